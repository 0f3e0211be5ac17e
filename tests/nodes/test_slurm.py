"""Links by srun(1), in a cluster of two nodes on this machine (slurm-lab.sh)."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.worlds.apart import DaemonIn
from tests.worlds.daemon import (
    MARK,
    TIMEOUT,
    Daemon,
    daemon_of,
    end_process,
    read,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.nodes import Lead, node, peer

_MISSING = [each for each in ("slurmd", "slurmctld", "srun", "munged") if not shutil.which(each)]
pytestmark = pytest.mark.skipif(
    bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: make test-nodes installs them"
)
#: Slurm starts a step within seconds
_LEASE_SECONDS = 15.0
Took = Callable[[str, float, float], None]
_LAB = Path(__file__).with_name("slurm-lab.sh")


class Lab:
    """The cluster. Its first machine has the controller."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "LAB": str(directory)}

    def run(self, *words: str) -> str:
        done = subprocess.run(["bash", _LAB, *words], env=self.environment, timeout=4 * TIMEOUT,
                              text=True, stdout=subprocess.PIPE, check=True)  # fmt: skip
        return done.stdout

    def enter(self, command: Sequence[str]) -> list[str]:
        """What becomes a command on the first machine."""
        return ["nsenter", "--net=/run/netns/lab-c", "--", *command]

    def jobs(self, *states: str) -> list[str]:
        """The newest first."""
        of = ["-t", ",".join(states)] if states else []
        found = self.run("at", "0", "squeue", "-h", *of, "-o", "%i").split()
        return sorted(found, key=int, reverse=True)

    def cancel(self) -> None:
        """All jobs: also those of an srun that was killed, which keep their processors."""
        for job in self.jobs():
            self.run("at", "0", "scancel", job)

    def end_controller(self) -> None:
        """In order. One that is killed has not written the last seconds of its state. The next one
        drains a node again that was resumed, and gives the number of a job that still runs to
        another one, whose step slurmd forgets when the first ends: no time limit ends it then."""
        file = self.directory / "ctl.pid"
        end_process(int(file.read_text()), signal.SIGTERM)
        wait_until(lambda: not file.exists(), "the controller has ended")

    def state(self) -> str:
        """Of n2, as Slurm sees it."""
        return self.run("at", "0", "sinfo", "-h", "-n", "n2", "-o", "%T").strip()

    def wait_clean(self) -> None:
        in_use = ("idle", "mixed", "allocated")
        wait_until(lambda: self.state() in in_use, "Slurm has n2 in use")
        wait_until(lambda: len(self.jobs()) <= 1, "no job is left but that of the link")

    def mend(self) -> None:
        """Undoes what a scene that failed may have left."""
        self.run("heal", "2")
        if not (self.directory / "ctl.pid").exists():
            self.start_controller()
        if "drain" in self.state():
            self.run("at", "0", "scontrol", "update", "nodename=n2", "state=resume")
        self.cancel()

    def start_controller(self) -> None:
        self.run("at", "0", "slurmctld", "-f", str(self.directory / "slurm.conf"))


@dataclass
class Cluster:
    lab: Lab
    lead: Lead
    host: Daemon

    def peers(self) -> list[int]:
        """The pids of ``ctx peer`` at the host."""
        found = []
        wanted = [*map(str.encode, peer(self.host)), b""]
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if (directory / "cmdline").read_bytes().split(b"\0")[-len(wanted) :] == wanted:
                    words = (directory / "cmdline").read_bytes()
                    found += [] if b"srun" in words else [int(directory.name)]
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        # the names of its networks, and munged, are there once on a machine
        fcntl.flock(stack.enter_context(open("/run/lock/ctxtest-slurm", "w")), fcntl.LOCK_EX)
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/run"))
        lab = Lab(Path(name) / "lab")
        stack.callback(lab.run, "stop")
        lab.run("start", "2")
        host = stack.enter_context(daemon_of(config="node_name: two\n"))
        srun = [str(shutil.which("srun")), "-Q", "-N1", "-n1", "--unbuffered", "-w", "n2"]
        env = {"SLURM_CONF": f"{lab.directory}/slurm.conf"}
        row = node([*srun, *peer(host)], lease=f"{_LEASE_SECONDS:g}s", env=env)
        config = f"node_name: one\nnodes: {json.dumps({'n2': row})}\n"
        daemon = stack.enter_context(running(DaemonIn(lab, config)))
        yield Cluster(lab, Lead(daemon), host)


@pytest.fixture(autouse=True)
def _clean(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each scene leaves the node in use, and no job but that of the link; one that fails is told of
    alone."""
    cluster.lab.wait_clean()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        cluster.lab.mend()


def test_a_node_is_reached_by_a_step(cluster: Cluster) -> None:
    status, said = cluster.lead.check("n2")
    assert status == 0 and "two runs ctxd" in said, said
    assert len(cluster.lab.jobs()) == 1 and len(cluster.peers()) == 1


def test_a_step_that_is_cancelled_leaves_nothing_and_is_started_anew(cluster: Cluster) -> None:
    cluster.lead.use("n2")
    (job,), (before,) = cluster.lab.jobs(), cluster.peers()
    cluster.lab.run("at", "0", "scancel", job)
    wait_until(lambda: before not in cluster.peers(), "its process has ended")
    cluster.lead.wait("up")
    wait_until(lambda: len(cluster.peers()) == 1, "there is another one")
    assert job not in cluster.lab.jobs()


def test_a_link_needs_no_controller_once_it_is_open(cluster: Cluster) -> None:
    cluster.lead.use("n2")
    engines, seen = cluster.lead.engines(), cluster.lead.rows()["n2"]["seen"]
    cluster.lab.end_controller()
    try:
        wait_until(lambda: cluster.lead.rows()["n2"]["seen"] > seen + 15, "it goes on for a lease")
        assert cluster.lead.state() == "up" and cluster.lead.engines() == engines
        for engine in engines:
            end_process(engine)
        wait_until(lambda: cluster.lead.state() != "up", "it is seen")
        wait_until(lambda: not cluster.peers(), "nothing is left of it")
        wait_until(lambda: "srun" in cluster.lead.rows()["n2"]["error"], "srun says why")
    finally:
        cluster.lab.start_controller()
    cluster.lab.cancel()
    cluster.lead.wait_reached()


def _placed(cluster: Cluster, name: str) -> Path:
    directory = cluster.lead.daemon.make(name, "sh -c 'sleep 1000'", placement="node=n2")
    write(directory / "ctl", "start")
    wait_status(directory, "busy")
    wait_until(lambda: _left(cluster, name, "sleep"), "all of its processes are there")
    return directory


def _left(cluster: Cluster, name: str, program: str = "") -> list[int]:
    """The processes that an agent has at its host."""
    return cluster.host.processes_of(f"{name}@*", program)


def test_an_agent_outlives_a_step_whose_time_is_over(cluster: Cluster) -> None:
    cluster.lead.use("n2")
    directory = _placed(cluster, "late")
    wait_until(lambda: len(cluster.peers()) == 1, "one link is left")
    # Slurm keeps the job of a step whose srun was killed
    before, job, (peer_of,) = _left(cluster, "late"), cluster.lab.jobs()[0], cluster.peers()
    cluster.lab.run("at", "0", "scontrol", "update", f"jobid={job}", "EndTime=now+5")
    wait_until(lambda: peer_of not in cluster.peers(), "Slurm ends it", timeout=90)
    cluster.lead.wait_reached()
    assert before and _left(cluster, "late") == before, "it is not in the step, and goes on"
    wait_until(lambda: job not in cluster.lab.jobs(), "its job is over")
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert not _left(cluster, "late") and read(directory, "outcome") == "cancelled\n"


def test_a_node_that_is_drained(cluster: Cluster, took: Took) -> None:
    """A link that is open goes on. No other one is opened, and what waits for its turn is taken
    back; agents end with their lease."""
    cluster.lead.use("n2")
    directory = _placed(cluster, "drained")
    cluster.lab.run("at", "0", "scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        seen = cluster.lead.rows()["n2"]["seen"]
        wait_until(lambda: cluster.lead.rows()["n2"]["seen"] > seen + 10, "it goes on")
        assert cluster.lead.state() == "up" and _left(cluster, "drained")
        began = time.monotonic()
        for engine in cluster.lead.engines():
            end_process(engine, signal.SIGTERM)
        wait_until(lambda: cluster.lead.state() == "down", "it is seen")
        wait_until(lambda: not _left(cluster, "drained"), "nothing of it runs")
        took("last process gone", time.monotonic() - began, _LEASE_SECONDS)
        assert not cluster.peers()
        wait_until(lambda: "heard for 30 s" in cluster.lead.rows()["n2"]["error"], "it is said",
                   timeout=90)  # fmt: skip
        waiting = cluster.lab.jobs("PD")
        assert len(waiting) <= 1, "of those that gave up none is left in the queue"
    finally:
        cluster.lab.run("at", "0", "scontrol", "update", "nodename=n2", "state=resume")
    cluster.lead.wait_reached()
    wait_dead(directory)
    assert read(directory, "outcome") == "interrupted\n"
    wait_until(lambda: len(cluster.peers()) == 1, "one link is left")


def test_an_agent_outlives_a_step_and_the_controller(cluster: Cluster) -> None:
    cluster.lead.use("n2")
    directory = _placed(cluster, "far")
    before = _left(cluster, "far")
    assert before
    cluster.lab.end_controller()
    cluster.lab.start_controller()
    (peer_of,) = cluster.peers()
    cluster.lab.cancel()
    wait_until(lambda: peer_of not in cluster.peers(), "its process has ended")
    cluster.lead.wait_reached()
    assert _left(cluster, "far") == before, "it is not in the step, and goes on"
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert not _left(cluster, "far") and read(directory, "outcome") == "cancelled\n"


def test_a_lead_that_ends_leaves_no_job(cluster: Cluster) -> None:
    """Slurm keeps the job of an srun that is killed, and its processors, for good."""
    cluster.lead.use("n2")
    job = cluster.lab.jobs()[0]
    for end in (cluster.lead.daemon.stop, cluster.lead.daemon.kill):
        end()
        cluster.lead.daemon.start()
        wait_until(lambda j=job: j not in cluster.lab.jobs(), "its job is over")  # type: ignore[misc]
        cluster.lead.wait_reached()
        job = cluster.lab.jobs()[0]


def test_a_cable_is_pulled(cluster: Cluster) -> None:
    """The last one: until Slurm has the node in use again is its own affair."""
    cluster.lead.use("n2")
    (before,) = cluster.peers()
    cluster.lab.run("cut", "2")
    try:
        wait_until(lambda: cluster.lead.state() == "down", "nothing was heard for a lease")
        wait_until(lambda: before not in cluster.peers(), "the host has given it up")
    finally:
        cluster.lab.run("heal", "2")
