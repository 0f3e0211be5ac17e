"""The daemon is killed at every named place, and what it acknowledged stays true."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from runtime.cell.record import read_record
from runtime.crashpoints import POINTS
from runtime.kernel.cgroups import Cgroup
from tests.worlds import stages
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    alive,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.fates import CRASH_AT, SLEEP, Scene, child, inside, reboot, scene_of
from tests.worlds.invariants import Crashed, told_write

_STUBBORN: Final = "sh -c 'trap \"\" TERM; sleep 1000'"
#: of anything, more than is done at once
_CROWD: Final = 70
_WRITER: Final = f"sh -c '{told_write('mine')}; sleep 1000'"


# Stages: each is a part of a life, with others beside it.


def _family(scene: Scene) -> None:
    """Three levels, the lowest deaf to SIGTERM, a new child, and somebody who waits."""
    kid = inside(*child("grandkid", _STUBBORN), SLEEP)
    boss = inside(*child("kid", kid, policy="allow kid_t agent:* create"),
                   *child("writer", _WRITER), "mkdir idle.d", SLEEP)
    scene.run("boss", boss, meta_json='{"a": 1}', label="boss_l", env="A=1", **{
        "handoff.md": "the family's task"})
    for name in ("boss", "kid", "writer", "grandkid"):
        directory = scene.daemon.agent_dir(name)
        scene.wait_until(directory.exists, f"{name} is made")
        scene.wait(name, "busy")
    scene.wait_until(scene.daemon.agent_dir("idle").exists, "idle is made")
    out = scene.daemon.agent_dir("writer") / "out"
    scene.wait_until(lambda: out.read_text().endswith("mine\n"), "the result is written")
    scene.hold("boss", "grandkid", "idle")
    scene.invariants.observe()


def _configured(scene: Scene) -> None:
    """New agents and controls, again and again."""
    for number in range(3):
        name = f"new{number}"
        scene.new(name, "true", label=f"l{number}", env=f"N={number}",
                  meta_json=f'{{"n": {number}}}', **{"handoff.md": f"task {number}\n" * 2000})
        scene.operator.write(name, "limits", "timeout=1h")
        scene.operator.write(name, "label", f"again{number}")
    scene.operator.verb("new0", "stop")
    scene.promise("new0", "cancelled", "operator_stop")


def _started(scene: Scene) -> None:
    scene.run("started", _WRITER)
    scene.wait("started", "busy")
    scene.invariants.observe()
    scene.run("second", SLEEP)
    scene.wait("second", "busy")


def _finished(scene: Scene) -> None:
    """A run that hands over; then one that fails."""
    scene.run("quick", "sh -c 'cat; echo done'", **{"handoff.md": "say it"})
    scene.promise("quick", "done", "exit:0")
    scene.wait("quick", "dead")
    scene.run("failing", "sh -c 'echo no >&2; exit 3'")
    scene.promise("failing", "error", "exit:3")
    scene.wait("failing", "dead")


def _executed_again(scene: Scene) -> None:
    """The daemon executes its program again, and dies before it is ready."""
    os.kill(scene.daemon.pid, signal.SIGUSR1)
    assert scene.daemon.has_ended(TIMEOUT)
    raise Crashed


def _cancelled(scene: Scene) -> None:
    scene.operator.verb("boss", "stop")
    scene.promise("boss", "cancelled", "operator_stop")
    scene.wait("boss", "dead")


def _killed(scene: Scene) -> None:
    scene.operator.verb("boss", "kill")
    scene.promise("boss", "cancelled", "operator_stop")
    scene.wait("boss", "dead")


def _parent_gone(scene: Scene) -> None:
    """The parent's program is killed by somebody else: its children are to end."""
    end_process(int(read(scene.daemon.agent_dir("boss"), "pid")))
    scene.promise("boss", "error", "signal:9")
    scene.wait("boss", "dead")


def _paused(scene: Scene) -> None:
    scene.operator.verb("boss", "pause")
    scene.wait("boss", "paused")
    node = Cgroup(Path(read(scene.daemon.agent_dir("boss"), "cgroup").strip()))
    scene.wait_until(lambda: node.keys("cgroup.events").get("frozen"), "the subtree is frozen")


def _resumed(scene: Scene) -> None:
    scene.operator.verb("boss", "resume")
    scene.wait("boss", "busy")


def _restarting(scene: Scene) -> None:
    """It fails at once for as long as it may."""
    scene.run("phoenix", "sh -c 'echo again; exit 4'", restart="on-failure")
    scene.wait_until(lambda: read(scene.daemon.agent_dir("phoenix"), "run") == "r3\n", "run r3")


def _stopped_waiting(scene: Scene) -> None:
    """Stopped while it waits for its next run."""
    scene.run("phoenix", "sh -c 'exit 4'", restart="always")
    directory = scene.daemon.agent_dir("phoenix")
    scene.wait_until(
        lambda: read(directory, "status") == "starting\n" and read(directory, "run") == ""
        and '"run.end"' in (directory / "session" / "events.jsonl").read_text(),
        "it waits to be started again",
    )
    scene.operator.verb("phoenix", "stop")
    scene.promise("phoenix", "cancelled", "operator_stop")
    scene.wait("phoenix", "dead")


def _reset(scene: Scene) -> None:
    """Twice through the same life."""
    directory = scene.daemon.agent_dir("quick")
    scene.wait("quick", "dead")

    def archived() -> None:
        first = scene.daemon.path("home", "0", "agent", "quick", "session", "default")
        current = os.path.basename(os.readlink(directory / "session")) == "default"
        assert read(directory if current else first, "result.md") == "say it\ndone\n"

    scene.after.append(archived)
    for _ in range(2):
        scene.operator.verb("quick", "reset")
        assert read(directory, "handoff.md") == "say it\n"
        scene.operator.verb("quick", "start")
        scene.wait("quick", "dead")


def _temporary(scene: Scene) -> None:
    """A child whose object goes with its end."""
    lines = child("temp", "sh -c 'echo ended'", life="temp")
    lines.append("until [ \"$(cat $CTX_SELF/session/context/child/temp/status)\" = done ]; "
                 "do sleep 0.02; done; cat $CTX_SELF/session/context/child/temp/result.md")
    directory = scene.run("temps", inside(*lines))

    def handed_over() -> None:
        wait_dead(directory)
        assert read(directory, "out") == "made temp\nended\n"
        assert not scene.daemon.agent_dir("temp").exists()

    scene.after.append(handed_over)
    scene.wait("temps", "dead")


def _detached(scene: Scene) -> None:
    """A child of an operator's that lives on when its parent ends."""
    directory = scene.operator.make("loner")
    scene.operator.write("loner", "parent", "agent:boss")
    scene.operator.write("loner", "life", "detached")
    scene.operator.write("loner", "exec", SLEEP)
    scene.operator.verb("loner", "start")
    scene.wait("loner", "busy")
    assert read(directory, "cgroup").endswith("/user-0/agent-loner\n")
    pid = read(directory, "pid")

    def lives_on() -> None:
        assert (read(directory, "status"), read(directory, "pid")) == ("busy\n", pid)

    scene.after.append(lives_on)
    scene.hold("loner")


def _removed(scene: Scene) -> None:
    scene.operator.remove("quick")
    scene.operator.remove("failing")
    scene.operator.remove("boss")


def _resident(scene: Scene) -> None:
    scene.run("crowd", SLEEP, mode="resident")
    scene.wait("crowd", "ready", "busy")


def _crowded(scene: Scene) -> None:
    """More children of one agent than are marked or removed at once."""
    for number in range(_CROWD):
        scene.new(f"crowd{number}", "true", parent="agent:crowd")
    scene.invariants.observe()


def _addressed(scene: Scene) -> None:
    """More messages to one agent than are dropped at once."""
    for number in range(_CROWD):
        scene.operator.say("crowd", f"message {number}")
    scene.invariants.observe()


def _dispersed(scene: Scene) -> None:
    scene.operator.verb("crowd", "stop")
    scene.promise("crowd", "cancelled", "operator_stop")
    scene.wait("crowd", "dead")
    scene.operator.remove("crowd")
    left = [scene.daemon.agent_dir(f"crowd{number}") for number in range(_CROWD)]
    scene.wait_until(lambda: not any(map(Path.exists, left)), "what it owned is gone")


Stage = Callable[[Scene], None]

#: What leads to each place. Stages before the last are there to have others around.
SCENARIOS: Final[dict[str, tuple[Stage, ...]]] = {
    "create.waitfile": (_configured, _family),
    "create.inserted": (_configured, _family),
    "create.announced": (_configured, _family),
    "write.committed": (_configured, _family),
    "outbox.appended": (_configured, _family, _finished),
    "events.appended": (_configured, _family, _finished),
    "start.committed": (_started, _family),
    "start.planned": (_started, _family),
    "start.launched": (_started, _family),
    "start.running": (_started, _family),
    "run.committed": (stages.talking,),
    "run.launched": (stages.talking,),
    "run.running": (stages.talking,),
    "run.ended": (stages.aborted,),
    "run.recorded": (stages.talking,),
    "message.queued": (stages.talking,),
    "message.delivered": (stages.residing,),
    "message.written": (stages.residing,),
    "message.ended": (stages.residing,),
    "report.queued": (stages.reporting,),
    "resident.greeted": (stages.heeded,),
    "session.switched": (stages.switched,),
    "abort.committed": (stages.aborted,),
    "abort.told": (stages.heeded,),
    "abort.late": (stages.heeded,),
    "abort.killed": (stages.paused_aborted,),
    "task.queued": (stages.tasked,),
    "task.launched": (stages.tasked,),
    "task.running": (stages.tasked,),
    "task.recorded": (stages.tasked,),
    "relay.planned": (stages.wired,),
    "relay.started": (stages.wired,),
    "relay.told": (stages.wired,),
    "relay.gone": (stages.wired,),
    "worktree.planned": (stages.worktree,),
    "worktree.made": (stages.worktree,),
    "worktree.unpacked": (stages.worktree_for,),
    "worktree.packed": (stages.worktree_for,),
    "worktree.received": (stages.worktree_at,),
    "worktree.fetched": (stages.worktree,),
    "worktree.removed": (stages.worktree,),
    "finish.shed": (_resident, _addressed, _dispersed),
    "finish.conversation": (_family, _finished, _cancelled),
    "finish.recorded": (_family, _finished, _cancelled),
    "finish.removed": (_family, _finished, _cancelled),
    "finish.released": (_family, _finished, _cancelled),
    "cancel.marked": (_family, _detached, _cancelled),
    "cancel.more": (_resident, _crowded, _addressed, _dispersed),
    "cancel.thawed": (_family, _paused, _cancelled),
    "cancel.signalled": (_family, _cancelled),
    "cancel.killed": (_family, _cancelled),
    "pause.frozen": (_family, _paused),
    "pause.committed": (_family, _paused),
    "resume.thawed": (_family, _paused, _resumed),
    "resume.committed": (_family, _paused, _resumed),
    "restart.recorded": (_restarting,),
    "restart.due": (_restarting,),
    "reset.committed": (_finished, _reset),
    "remove.committed": (_family, _finished, _cancelled, _removed),
    "remove.forgotten": (_family, _finished, _cancelled, _removed),
    "remove.more": (_resident, _crowded, _dispersed),
    "terminal.handed": (stages.visited,),
    "terminal.hungup": (stages.visited,),
    "wait.armed": (stages.waited,),
    "wait.due": (stages.waited,),
    "wait.fired": (stages.waited,),
    "ask.answered": (stages.asked,),
    "link.planned": (stages.linked,),
    "link.started": (stages.linked,),
    "link.greeted": (stages.linked,),
    "peer.greeted": (stages.linked_to,),
    "peer.registered": (stages.linked_to,),
    "peer.put": (stages.placed_here,),
    "peer.done": (stages.placed_here,),
    "peer.told": (stages.placed_here,),
    "lead.heard": (stages.placed,),
    "adopt.led": (_family, _started),
    "adopt.lost": (_family, _started),
    "adopt.ended": (_family, _started),
    "adopt.cleaned": (_family, _started),
    "reexec.held": (_family, _started, _executed_again),
    "reexec.saved": (_family, _started, _executed_again),
    "reexec.executed": (_family, _started, _executed_again),
    "reexec.restored": (_family, _started, _executed_again),
}

#: (place, for which time, what else is done to it)
CASES: Final = [
    *((point, 1, "") for point in POINTS),
    ("create.inserted", 4, ""),
    *(("lead.heard", count, "") for count in (2, 3)),
    ("write.committed", 7, ""),
    ("start.committed", 3, ""),
    ("start.planned", 2, "orphaned"),
    ("start.running", 2, "orphaned"),
    ("finish.conversation", 3, "again"),
    ("finish.recorded", 4, "again"),
    ("finish.released", 2, ""),
    ("cancel.marked", 1, "again"),
    ("cancel.killed", 1, "again"),
    ("pause.committed", 1, "again"),
    ("restart.due", 2, ""),
    ("reset.committed", 2, ""),
    ("remove.committed", 3, ""),
    ("run.committed", 3, "again"),
    ("run.recorded", 2, "again"),
    ("run.ended", 1, "again"),
    ("message.queued", 3, ""),
    ("report.queued", 4, "again"),
    ("message.written", 3, "again"),
    ("message.ended", 3, ""),
    ("session.switched", 2, ""),
    ("abort.committed", 1, "again"),
    ("task.launched", 6, ""),
    ("task.recorded", 2, "again"),
    ("task.recorded", 5, ""),
    ("terminal.hungup", 1, "again"),
    ("wait.armed", 4, ""),
    ("wait.due", 2, "again"),
    ("wait.fired", 3, ""),
]
#: the first place of each kind is visited in every run of the tests
OFTEN: Final = {point.partition(".")[0]: point for point in reversed(POINTS)}.values()
#: other ways to the same places
WAYS: Final[list[tuple[str, int, tuple[Stage, ...]]]] = [
    ("cancel.marked", 1, (_family, _detached, _parent_gone)),
    ("cancel.marked", 1, (_family, _paused, _killed)),
    ("cancel.signalled", 1, (_family, _killed)),
    ("finish.recorded", 1, (_temporary,)),
    ("finish.released", 1, (_temporary,)),
    ("remove.committed", 1, (_temporary,)),
    ("remove.forgotten", 1, (_temporary,)),
    ("create.waitfile", 3, (_finished, _reset)),
    ("create.inserted", 3, (_finished, _reset)),
    ("remove.forgotten", 1, (_finished, _reset)),
    ("cancel.marked", 2, (_stopped_waiting,)),
    ("finish.recorded", 2, (_stopped_waiting,)),
    ("finish.recorded", 2, (_family, _detached, _parent_gone)),
    *(
        (point, 1, (stage,))
        for point in ("abort.committed", "run.ended", "run.recorded")
        for stage in (stages.resident_aborted, stages.once_aborted)
    ),
    *((point, count, (stages.heeded,))
      for point in ("abort.committed", "abort.told") for count in (1, 2)),
    ("message.ended", 1, (stages.heeded,)),
    *((point, 2, (stages.wired,)) for point in ("relay.planned", "relay.started")),
    *((point, 1, (stages.wired,))
      for point in ("start.planned", "start.launched", "cancel.signalled", "finish.recorded",
                    "finish.removed")),
    *((point, 2, (stages.resident_aborted,)) for point in ("run.committed", "run.running")),
    # not abort.killed: what honours SIGTERM may be gone before there is something to kill
    *(
        (point, 1, (stages.once_aborted,))
        for point in ("run.committed", "run.launched", "run.running")
    ),
    ("run.committed", 2, (stages.aborted,)),
    *((point, 1, (stages.residing,)) for point in ("run.committed", "run.launched")),
    ("run.running", 1, (stages.residing,)),
    *(
        (point, 1, (stages.stopped,))
        for point in ("cancel.marked", "cancel.signalled", "cancel.killed", "finish.conversation",
                      "finish.recorded", "finish.removed", "finish.released")
    ),
    *((point, 1, (stages.tied,))
      for point in ("start.committed", "start.planned", "start.launched", "start.running",
                    "terminal.hungup", "cancel.marked", "cancel.signalled", "finish.recorded",
                    "finish.removed", "finish.released", "remove.committed", "remove.forgotten")),
    *((point, 1, (stages.entered,))
      for point in ("task.queued", "task.launched", "task.running", "task.recorded",
                    "terminal.hungup")),
    *((point, 1, (stages.placed,))
      for point in ("link.planned", "link.started", "link.greeted", "start.committed",
                    "cancel.marked", "finish.conversation", "finish.recorded", "finish.removed",
                    "finish.released")),
    *((point, 1, (stages.placed_here,))
      for point in ("peer.greeted", "peer.registered", "create.waitfile", "create.inserted",
                    "create.announced", "start.planned", "start.launched", "start.running",
                    "cancel.marked", "cancel.signalled", "finish.recorded", "finish.removed",
                    "finish.released")),
    ("peer.done", 3, (stages.placed_here,)),
    ("write.committed", 12, (stages.talking,)),
    *(("write.committed", count, (stages.waited,)) for count in (30, 36, 50, 60)),
    *((point, count, (stages.waited,))
      for point in ("run.ended", "run.recorded") for count in (1, 2)),
    ("outbox.appended", 9, (stages.tasked,)),
    *(("events.appended", count, (stages.tasked,)) for count in (9, 23)),
]


def _play(scene: Scene, stages: tuple[Stage, ...]) -> bool:
    """Whether the daemon died meanwhile; it may do so later."""
    try:
        for stage in stages:
            stage(scene)
    except Crashed:
        return True
    return False


def _kill_programs(scene: Scene) -> None:
    """While there is no daemon, every program ends, and with it what it owned."""
    for path in scene.daemon.cgroup.path.glob("user-*/agent-*"):
        wait_until(lambda p=path: _is_killed(Cgroup(p)), f"{path} is empty")  # type: ignore[misc]


def _is_killed(node: Cgroup) -> bool:
    """Kills the programs of one agent, also what has only now become one."""
    for pid in node.child("run").processes():
        if _is_program(pid):
            with contextlib.suppress(ProcessLookupError):
                end_process(pid)
    return not node.populated()


def _is_program(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False
    return os.path.basename(command) in (b"sh", b"sleep")


def _die(scene: Scene, point: str, crash_at: str, stages: tuple[Stage, ...]) -> None:
    """Brings the daemon to the place, and looks at what it leaves."""
    daemon = scene.daemon
    if point.startswith("adopt."):
        scene.arm("")
        daemon.start()
        assert not _play(scene, stages), "the daemon died too early"
        pids = [int(read(daemon.agent_dir(name), "pid")) for name in ("kid", "started")]
        daemon.kill()
        scene.invariants.observe()
        if point == "adopt.lost":
            reboot(scene)
        else:
            end_process(pids[0])
            end_process(pids[1])
            wait_until(lambda: not any(alive(pid) for pid in pids), "they end without a daemon")
        scene.arm(crash_at)
        assert not daemon.start_or_die(), f"{crash_at} was never reached"
    else:
        daemon.start()
        died = _play(scene, stages) or daemon.has_ended(TIMEOUT)
        assert died, f"{crash_at} was never reached"
        daemon.wait_killed()
    scene.invariants.observe()


@pytest.mark.parametrize(
    ("point", "count", "more"),
    [
        pytest.param(point, count, more, marks=(
            () if point in OFTEN and (count, more) == (1, "") else pytest.mark.long))
        for point, count, more in CASES
    ],
    ids=lambda value: str(value) if value else "once",
)
def test_a_death_at(point: str, count: int, more: str) -> None:
    _check_death(point, count, more, SCENARIOS[point])


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "count", "stages"),
    WAYS,
    ids=lambda v: "".join(f.__name__ for f in v) if isinstance(v, tuple) else str(v),
)
def test_a_death_on_another_way(point: str, count: int, stages: tuple[Stage, ...]) -> None:
    _check_death(point, count, "", stages)


def _check_death(point: str, count: int, more: str, stages: tuple[Stage, ...]) -> None:
    crash_at = f"{point}:{count}" if count > 1 else point
    with scene_of(crash_at) as scene:
        _die(scene, point, crash_at, stages)
        if more == "orphaned":
            _kill_programs(scene)
        if more == "again":
            # whatever of it the recovery does, it may die there too
            scene.deaths += 1
            scene.arm(point)
            if scene.daemon.start_or_die():
                scene.daemon.kill()
            scene.invariants.observe()
        scene.arm("")
        scene.daemon.start()
        scene.invariants.check(scene.operator)
        for holds in scene.after:
            holds()
        scene.invariants.dismantle(scene.operator)


#: places of a session at a terminal, and what leads there
AT_TERMINALS: Final = [
    *((point, stages.visited) for point in ("terminal.handed", "terminal.hungup")),
    *((point, stages.tied)
      for point in ("start.launched", "start.running", "terminal.hungup", "cancel.signalled",
                    "finish.recorded")),
    *((point, stages.entered)
      for point in ("task.launched", "task.running", "terminal.hungup", "task.recorded")),
]


@pytest.mark.long
@pytest.mark.parametrize("role", ["monitor", "keeper", "program"])
@pytest.mark.parametrize(("point", "stage"), AT_TERMINALS,
                         ids=lambda v: v.__name__ if callable(v) else v)
def test_a_death_of_two_at_a_terminal(point: str, stage: Stage, role: str) -> None:
    """The daemon at a place, and then a process of the session, as far as there is one by now."""
    with scene_of(point) as scene:
        _die(scene, point, point, (stage,))
        records = scene.daemon.runtime / "record"
        for path in records.glob("*-task-*" if stage is stages.entered else "*"):
            record = read_record(path)
            if (pid := getattr(record, role)) and not record.finished:
                with contextlib.suppress(ProcessLookupError):
                    end_process(pid)
        for entry in scene.operator.entries.values():
            entry.end = None  # as of whoever was first
        scene.arm("")
        scene.daemon.start()
        scene.invariants.check(scene.operator)
        for holds in scene.after:
            holds()
        scene.invariants.dismantle(scene.operator)


def test_every_place_has_a_scenario_and_is_in_the_source() -> None:
    assert tuple(SCENARIOS) == POINTS
    found = [*Path("runtime").rglob("*.py"), *Path("ctxfs").rglob("*.py")]
    modules = [path for path in found if path.name != "crashpoints.py"]
    source = "".join(path.read_text() for path in modules)
    missing = [point for point in POINTS if f'"{point}"' not in source]
    assert not missing


def test_an_unknown_place_is_refused() -> None:
    daemon = Daemon()
    try:
        for value, sentence in (
            ("nowhere", "unknown place 'nowhere'; use one of: create.waitfile"),
            ("start.planned:0", "'0' is not a count"),
        ):
            result = subprocess.run(
                daemon.command(), capture_output=True, text=True, check=False, timeout=30,
                env={**os.environ, CRASH_AT: value},
            )
            assert result.returncode == 1
            assert result.stderr.startswith(f"ctxd: {CRASH_AT}: {sentence}")
    finally:
        shutil.rmtree(daemon.base)


# The other processes of a run


@pytest.mark.parametrize(("role", "with_daemon"), [
    pytest.param("monitor", True, id="monitor-daemon"),
    pytest.param("monitor", False, id="monitor-alone", marks=pytest.mark.long),
    pytest.param("keeper", True, id="keeper-daemon", marks=pytest.mark.long),
    pytest.param("keeper", False, id="keeper-alone"),
    pytest.param("program", True, id="program-daemon"),
    pytest.param("program", False, id="program-alone", marks=pytest.mark.long),
])
def test_a_death_of_a_runs_process(role: str, with_daemon: bool) -> None:
    """One of a parent's and one of a child's: its whole subtree ends and is recorded."""
    with scene_of() as scene:
        daemon = scene.daemon
        daemon.start()
        lower = inside(*child("bottom", SLEEP), SLEEP)
        for boss, kid in (("boss", "kid"), ("other", "lower")):
            program = lower if kid == "lower" else SLEEP
            policy = f"allow {kid}_t agent:* create"
            scene.run(boss, inside(*child(kid, program, policy=policy), SLEEP))
        for name in ("boss", "kid", "other", "lower", "bottom"):
            wait_until(daemon.agent_dir(name).exists, f"{name} is made")
            wait_status(daemon.agent_dir(name), "busy")
        scene.hold("boss", "kid", "other", "bottom")
        scene.invariants.observe()
        victims = [getattr(scene.invariants.record(n), role) for n in ("boss", "lower")]
        trees = [Cgroup(Path(read(daemon.agent_dir(n), "cgroup").strip()))
                 for n in ("boss", "lower")]
        if not with_daemon:
            daemon.kill()
        for pid in victims:
            end_process(pid)
        if with_daemon:
            for name in ("boss", "kid", "lower", "bottom"):
                wait_dead(daemon.agent_dir(name))
        else:
            for tree in trees:
                wait_until(lambda t=tree: not t.populated(),  # type: ignore[misc]
                           f"{tree} is empty without a daemon")
            daemon.start()
        scene.invariants.check(scene.operator)
        for name in ("boss", "kid", "lower", "bottom"):
            assert read(daemon.agent_dir(name), "status") == "dead\n"
        for name in ("kid", "bottom"):
            assert read(daemon.agent_dir(name), "reason") == "parent_dead\n"
        for name in ("boss", "lower"):
            assert read(daemon.agent_dir(name), "outcome") in ("error\n", "interrupted\n")
        assert read(daemon.agent_dir("other"), "status") == "busy\n"
        scene.invariants.dismantle(scene.operator)


@pytest.mark.parametrize("with_daemon", [True, False], ids=["daemon", "alone"])
def test_a_death_of_a_step_that_led_into_the_cell(with_daemon: bool) -> None:
    """Bubblewrap's outer process, or what entered: nobody needs them any more."""
    with scene_of() as scene:
        scene.daemon.start()
        scene.run("boss", inside(*child("kid", SLEEP), SLEEP))
        for name in ("boss", "kid"):
            wait_until(scene.daemon.agent_dir(name).exists, f"{name} is made")
            wait_status(scene.daemon.agent_dir(name), "busy")
        scene.hold("boss", "kid")
        scene.invariants.observe()
        steps = [scene.invariants.record(name).chain for name in ("boss", "kid")]
        if not with_daemon:
            scene.daemon.kill()
        for pid in steps:
            end_process(pid)
        wait_until(lambda: not any(alive(pid) for pid in steps), "they are gone")
        if not with_daemon:
            scene.daemon.start()
        scene.invariants.check(scene.operator)
        for name in ("boss", "kid"):
            assert read(scene.daemon.agent_dir(name), "status") == "busy\n"
        scene.invariants.dismantle(scene.operator)


def test_a_death_of_every_monitor_and_the_daemon() -> None:
    """Nothing that nobody records goes on, and it is said that it was lost."""
    with scene_of() as scene:
        scene.daemon.start()
        _family(scene)
        scene.daemon.kill()
        for pid in scene.daemon.monitors():
            with contextlib.suppress(ProcessLookupError):  # one may end with another
                end_process(pid, signal.SIGKILL)
        node = scene.daemon.cgroup.child("user-0", "agent-boss")
        wait_until(lambda: not node.populated(), "all of it ends")
        scene.daemon.start()
        wait_dead(scene.daemon.agent_dir("boss"))
        scene.promise("boss", "interrupted", "runtime_lost")
        scene.invariants.check(scene.operator)
        scene.invariants.dismantle(scene.operator)


def test_a_run_that_was_due_while_there_was_no_daemon() -> None:
    with scene_of() as scene:
        scene.daemon.start()
        directory = scene.run("phoenix", "sh -c 'exit 3'", restart="always")
        wait_until(lambda: (read(directory, "status"), read(directory, "run")) == (
            "starting\n", ""), "it waits to be started again")
        due = time.monotonic() + 1.5
        scene.daemon.kill()
        scene.invariants.observe()
        wait_until(lambda: time.monotonic() > due, "its time has come")
        scene.daemon.start()
        scene.invariants.check(scene.operator)
        wait_until(
            lambda: any(e["type"] == "run.end" and e["run"] == "r2"
                        for e in scene.daemon.events("phoenix")), "it ran again")
        scene.invariants.dismantle(scene.operator)


@pytest.mark.parametrize("crash", [False, True], ids=["daemon", "crash"])
def test_what_was_starting_when_it_was_frozen_does_not_delay_the_end(crash: bool) -> None:
    with scene_of() as scene:
        scene.daemon.start()
        parent = scene.run("boss", SLEEP)
        wait_status(parent, "busy")
        scene.new("kid", SLEEP, parent="agent:boss")
        scene.operator.verb("kid", "start")
        leaf = scene.daemon.cgroup.child("user-0", "agent-boss", "child", "agent-kid", "run")
        wait_until(leaf.exists, "it is being started", interval=0.001)
        scene.operator.verb("boss", "pause")
        if crash:
            scene.daemon.kill()
            scene.invariants.observe()
            scene.daemon.start()
        scene.operator.verb("boss", "stop")
        wait_dead(parent, 5)
        scene.invariants.check(scene.operator)
        scene.invariants.dismantle(scene.operator)


def test_the_daemon_dies_while_a_parent_writes_and_starts() -> None:
    """What a program in a cell was told to be done is so, wherever it was."""
    lines = ["for n in 1 2 3 4 5 6; do mkdir kid$n.d && echo made kid$n; "
             "printf 'sleep 1000\\n' > kid$n.d/exec; echo start > kid$n.d/ctl; "
             f"{told_write('$n')}; done", SLEEP]
    with scene_of() as scene:
        scene.daemon.start()
        for number in range(4):
            name = f"boss{number}"
            scene.run(name, inside(*lines).replace("kid", f"{name}-kid"))
            out = scene.daemon.agent_dir(name) / "out"
            wait_until(lambda o=out: o.read_text().count("made") > number, "it makes")  # type: ignore[misc] # noqa: B023
            scene.daemon.kill()
            scene.invariants.observe()
            scene.daemon.start()
            scene.invariants.check(scene.operator)
        write(scene.daemon.agent_dir("boss3") / "meta.json", '{"still": "there"}')
        scene.invariants.dismantle(scene.operator)
