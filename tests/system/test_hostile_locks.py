"""Locks of inodes of the mount, which the kernel holds for others: verbs have a way around them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ctxfs.locks import TABLE
from tests.system.hostile.guarded import (
    OBEDIENCE,
    TIMES_BASELINE,
    agents_of,
    end_and_remove,
)
from tests.system.test_hostile_requests import compiled, run
from tests.worlds.daemon import (
    MARK,
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.held import held
from tests.worlds.unfilled import unfilled_file
from tests.worlds.whose import ROOTLESS

THREADS = 500
#: who has no rights to anything
STRANGER = 5151
#: makes agents and looks them up beside the attacks
OTHER = 4343
#: one for each attack, so that nobody has used its account
FIRST_OWNER = 31_000
#: seconds for what takes its turn at a lock behind hundreds: no lock is held for ever
TURN = 5.0
#: others may take the processors for a while; who holds a lock holds it each time
ATTEMPTS = 3
#: an operation that nobody waits for needs no attack, and one that is never asked has no lock
ATTACKS = [name for name in TABLE if name not in ("forget", "release", "releasedir", "access")]
#: those of the ordinary tests
CHOSEN = {("agent", "setattr"), ("agent", "fsyncdir"), ("stranger", "readdir")}
#: a stranger opens nothing to write, and an agent its own files
WRITING = ("write", "pages")
CASES = [*(("agent", operation) for operation in ATTACKS),
         *(("stranger", operation) for operation in ATTACKS if operation not in WRITING)]
#: where somebody holds a lock: a daemon answers within it on a busy machine, too
PATIENT = "watchdog: 3s\n"
BOUNDS = {"echo kill": OBEDIENCE, "ctx kill": OBEDIENCE,
          "lookup": TURN, "mkdir": TURN, "status": TURN}


@pytest.mark.needs_root("others do not get as far: test_hostile_rootless.py")
@pytest.mark.parametrize("name", ["ctl", "inbox"])
def test_who_has_no_rights_is_refused_before_a_lock_is_taken(daemon: Daemon, name: str) -> None:
    """By the look-up; by whom the name was handed to, by the mode."""
    agent = daemon.run("other", "sleep 100000")
    wait_status(agent, "busy")
    assert (agent / name).stat().st_mode & 0o7777 == 0o660
    handed = os.open(agent / name, os.O_PATH)
    try:
        for file in (str(agent / name), f"/proc/self/fd/{handed}"):
            for words in (["truncate", "-s", "0", file], ["dd", "if=/dev/null", f"of={file}"]):
                done = subprocess.run(words, user=STRANGER, group=STRANGER, extra_groups=[],
                                      capture_output=True, text=True, check=False,
                                      pass_fds=[handed], timeout=TIMEOUT)
                assert "Permission denied" in done.stderr
    finally:
        os.close(handed)


def ctx_took(daemon: Daemon, *words: str) -> float:
    """Seconds for what root says by ``ctx``, as it is installed."""
    begun = time.monotonic()
    ctx = Path(sys.executable).with_name("ctx")
    subprocess.run([ctx, "--root", daemon.root, *words], check=True, timeout=TIMEOUT,
                   stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def ctx_kill(daemon: Daemon, agent: Path) -> float:
    """Seconds to its answer, more than those in which Python starts: hundreds of threads leave
    it few of a processor's."""
    starts = ctx_took(daemon, "help")
    took = ctx_took(daemon, "kill", agent.name.removesuffix(".d"))
    # without root the stranger is its owner, who removes it as soon as it is dead
    wait_until(lambda: is_over(agent), "it is dead, or gone")
    return took - starts


def is_over(agent: Path) -> bool:
    try:
        return read(agent, "status") == "dead\n"
    except FileNotFoundError:
        return True


def echo_kill(_: Daemon, agent: Path) -> float:
    begun = time.monotonic()
    write(agent / "ctl", "kill")
    wait_dead(agent)
    return time.monotonic() - begun


def timed(work: Callable[[], object]) -> float:
    """As another owner: this thread, to filesystems."""
    libc = ctypes.CDLL(None)
    libc.setfsgid(OTHER)
    libc.setfsuid(OTHER)
    begun = time.monotonic()
    try:
        work()
        return time.monotonic() - begun
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)


@contextmanager
def by_an_agent(daemon: Daemon, operation: str, other: Path, owner: int) -> Iterator[Path]:
    own = daemon.agent_dir("queue")
    at = own if operation in WRITING else f"{own} {other}"
    run(daemon, "queue", f"/programs/queue {operation} {THREADS} {at}", owner=str(owner))
    wait_until(lambda: "attacks" in read(own, "out"), "it attacks")
    yield own


@contextmanager
def by_a_stranger(daemon: Daemon, operation: str, other: Path, owner: int) -> Iterator[Path]:
    """Ends before the context does; the other agent stands for it. Without root it is the user,
    outside of all agents."""
    ids: dict[str, Any] = {} if ROOTLESS else {"user": owner, "group": owner, "extra_groups": []}
    words = [str(daemon.base / "programs" / "queue"), operation, str(THREADS), str(other)]
    # a session of its own has its own share of the processors
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True,
                          env={"CTX_ROOT": str(daemon.root)}, **ids) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("attacks")
            yield other
        finally:
            process.kill()


@contextmanager
def by_nobody(daemon: Daemon, operation: str, other: Path, owner: int) -> Iterator[Path]:
    """How long all that takes on this machine anyway."""
    yield other


BY = {"agent": by_an_agent, "stranger": by_a_stranger, "nobody": by_nobody}


def waited(stage: Daemon, who: str, operation: str, owner: int) -> dict[str, float]:
    """How long others waited beside an attack, in seconds."""
    try:
        others = [stage.run(f"other-{number}", "sleep 100000") for number in range(2)]
        for each in others:
            wait_status(each, "busy")
        made = stage.agent_dir("made")
        with BY[who](stage, operation, others[0], owner) as attacker:
            return {
                "echo kill": echo_kill(stage, others[1]),
                "lookup": timed(lambda: os.path.exists(stage.agent_dir("none"))),
                "mkdir": timed(made.mkdir),
                "status": timed(lambda: read(others[0], "status")),
                "ctx kill": ctx_kill(stage, attacker),
            }
    finally:
        end_and_remove(stage, agents_of(stage))


@pytest.fixture(scope="module")
def stage() -> Iterator[Daemon]:
    with daemon_of(config="grace: 300ms\n") as daemon:
        compiled(daemon, "queue")
        yield daemon


@pytest.mark.alone
@pytest.mark.parametrize(("who", "operation"), [
    pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.long) for case in CASES
])
def test_hundreds_who_queue_for_a_lock_hold_up_nobody(
    stage: Daemon, who: str, operation: str
) -> None:
    for attempt in range(ATTEMPTS):
        owner = FIRST_OWNER + CASES.index((who, operation)) * ATTEMPTS + attempt
        took = waited(stage, who, operation, owner)
        if all(took[what] <= bound for what, bound in BOUNDS.items()):
            return
    calm = waited(stage, "nobody", operation, owner)
    allowed = {what: max(bound, TIMES_BASELINE * calm[what]) for what, bound in BOUNDS.items()}
    assert all(took[what] <= allowed[what] for what in allowed), f"{took}, allowed: {allowed}"


@pytest.mark.alone
@pytest.mark.parametrize(("owner", "kill"), [
    (4344, echo_kill), pytest.param(4345, ctx_kill, marks=pytest.mark.long)
])  # fmt: skip
def test_root_kills_who_writes_to_its_ctl_from_pages_of_its_own_files(
    stage: Daemon, owner: int, kill: Callable[[Daemon, Path], float]
) -> None:
    """By echo it waits behind all who may write there, each of which waits for a read."""
    try:
        with by_an_agent(stage, "pages", stage.root, owner) as attacker:
            assert kill(stage, attacker) < TURN
    finally:
        end_and_remove(stage, agents_of(stage))


#: of the kernel: an instance is a test's own
TRACING = Path("/sys/kernel/tracing")
SENT = Path("events/fuse/fuse_request_send")


@pytest.mark.skipif(not os.path.exists(TRACING / SENT), reason="needs the kernel's traces of FUSE")
def test_nobody_who_syncs_a_directory_is_asked_for(daemon: Daemon) -> None:
    """Of hundreds who are first each would be, in its turn at the lock."""
    compiled(daemon, "queue")
    agent = daemon.run("other", "sleep 100000")
    wait_status(agent, "busy")
    traces = TRACING / "instances" / MARK
    traces.mkdir()
    try:
        connection = os.minor(daemon.root.stat().st_dev)
        (traces / SENT / "filter").write_text(f"connection == {connection}")
        (traces / SENT / "enable").write_text("1")
        with by_a_stranger(daemon, "fsyncdir", agent, STRANGER):
            sent = (traces / "trace").read_text()
    finally:
        traces.rmdir()
    assert "FUSE_OPENDIR" in sent
    assert "FUSE_FSYNCDIR" not in sent


@pytest.mark.alone
def test_root_kills_by_ctx_while_somebody_holds_the_ctl(daemon: Daemon) -> None:
    agent = daemon.run("held", "sleep 100000")
    wait_status(agent, "busy")
    with held(agent / "ctl", what="write"):
        # once it has the lock, the agent is dead
        waiting = subprocess.Popen(["sh", "-c", f"echo kill > {agent}/ctl 2> /dev/null"])
        kernel = Path(f"/proc/{waiting.pid}/wchan")
        wait_until(lambda: "truncate" in kernel.read_text(), "by echo, who kills it waits")
        took = ctx_kill(daemon, agent)
        assert waiting.poll() is None, "by echo, who kills it waits for the lock"
        assert took < OBEDIENCE, f"ctx kill took {took:.2f} s"
    waiting.wait(TIMEOUT)


@pytest.mark.needs_root("it mounts")
def test_ctx_says_verbs_although_the_mount_shows_something_else(daemon: Daemon) -> None:
    agent = daemon.run("told", "sleep 100000")
    wait_status(agent, "busy")
    ctx = [str(Path(sys.executable).with_name("ctx")), "--root", str(daemon.root)]
    subprocess.run(["mount", "-t", "tmpfs", "none", daemon.root], check=True)
    try:
        subprocess.run([*ctx, "kill", "told"], check=True, timeout=TIMEOUT)
    finally:
        subprocess.run(["umount", daemon.root], check=True)
    wait_dead(agent)


#: lists a directory into memory that is never there
LIST = """
import ctypes, mmap, os, sys
with open(sys.argv[1], "rb") as file:
    page = mmap.mmap(file.fileno(), 1 << 16, mmap.MAP_PRIVATE)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
fd = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECTORY)
ctypes.CDLL(None).getdents64(fd, ctypes.c_void_p(address), 1 << 16)
"""


@contextmanager
def agents_held(daemon: Daemon, stack: ExitStack) -> Iterator[subprocess.Popen[bytes]]:
    """A stranger holds the lock of ``agent/``, and is named in the log; one who would make an agent
    waits for it."""
    made = []
    with unfilled_file() as file:
        for words, waits in (
            (["/usr/bin/python3", "-c", LIST, str(file), str(daemon.root / "agent")],
             "iterate_dir"),
            (["mkdir", str(daemon.agent_dir("made"))], "filename_create"),
        ):
            process = stack.enter_context(subprocess.Popen(words, user=STRANGER, group=STRANGER,
                                                           extra_groups=[]))
            made.append(process)
            kernel = Path(f"/proc/{process.pid}/stack")
            wait_until(lambda kernel=kernel, waits=waits: waits in kernel.read_text(), waits)  # type: ignore[misc]
        named = f"(getdents): {made[0].pid}, uid {STRANGER}, python3: "
        wait_until(lambda: named in daemon.log.read_text(), "its holder is named")
        yield process


@pytest.mark.needs_root("it looks into the kernel's stacks")
@pytest.mark.alone
def test_who_holds_the_lock_of_agents_is_named_and_those_that_live_go_on() -> None:
    with running(Daemon(config=PATIENT)) as daemon, ExitStack() as stack:
        agents = [daemon.run(name, "sleep 100000") for name in ("killed", "lives")]
        for each in agents:
            wait_status(each, "busy")
        guards = daemon.guards()
        with agents_held(daemon, stack) as process:
            assert process.poll() is None
            assert "holds the lock of agent/" in daemon.ctx("doctor").stdout
            ctx_kill(daemon, agents[0])
            assert read(agents[1], "status") == "busy\n"
            assert daemon.guards() == guards
        assert process.wait(TIMEOUT) == 0
        wait_status(daemon.run("next", "sleep 100000"), "busy")
        assert "does not answer" not in daemon.log.read_text()


@pytest.mark.long
@pytest.mark.needs_root("it looks into the kernel's stacks")
def test_a_daemon_stops_and_begins_while_somebody_holds_the_lock_of_agents() -> None:
    """Nothing that waits for it is left in the daemon's own cgroup."""
    with running(Daemon(config=PATIENT)) as daemon, ExitStack() as stack:
        wait_status(daemon.run("listed", "sleep 100000"), "busy")
        with agents_held(daemon, stack):
            assert daemon.stop() == 0
            daemon.start()
            wait_status(daemon.run("next", "sleep 100000"), "busy")


#: lists a directory as soon as it may, if it is a mount, into a page that never comes; then wants
#: the lock for writing
CATCH = """if True:
    import ctypes, mmap, os, sys, threading
    with open(sys.argv[1], "rb") as file:
        page = mmap.mmap(file.fileno(), 1 << 16, mmap.MAP_PRIVATE)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    print("waits", flush=True)
    listed, above = sys.argv[2], os.path.dirname(sys.argv[2])
    top = None
    while top is None:
        try:
            if os.stat(listed).st_dev != os.stat(above).st_dev:
                top = os.open(listed, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            pass
    getdents = ctypes.CDLL(None).getdents64
    threading.Thread(target=getdents, args=(top, address, 1 << 16)).start()
    os.mkdir(listed + "/made")
"""


@pytest.mark.needs_root("nobody else lists what a user mounts")
def test_a_daemon_begins_although_somebody_would_hold_its_root() -> None:
    daemon = Daemon()
    with ExitStack() as stack:
        file = stack.enter_context(unfilled_file())
        words = ["/usr/bin/python3", "-c", CATCH, str(file), str(daemon.runtime / "root" / "ctx")]
        catcher = stack.enter_context(
            subprocess.Popen(words, user=STRANGER, group=STRANGER, extra_groups=[],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )  # fmt: skip
        stack.callback(catcher.kill)
        assert catcher.stdout is not None
        assert catcher.stdout.readline() == b"waits\n"
        with running(daemon):
            wait_status(daemon.run("lives", "sleep 100000"), "busy")
