"""Programs inside real sandboxes that want what they may not have.

Assumed of them: they run any code, and share their uid with their parent, their
siblings and other agents. Each attempt is refused with exactly what the table
says (hostile/attempts.py), and harms nobody.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runtime.kernel import linux
from runtime.kernel.cgroups import Cgroup
from tests.system.hostile.attempts import (
    FLOODS,
    FULL,
    INHERITED,
    LIMITS,
    REQUIREMENTS,
    TABLE,
    Attempt,
)
from tests.system.hostile.guarded import BESIDE, guarded
from tests.system.hostile.stage import CHECKS, CONFIG, Stage, compile_programs, heard, only_of_root
from tests.system.hostile.staged import STAGED, Staged
from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.whose import ROOTLESS

#: whatever others do, an answer comes in this time
PATIENCE = 10.0
KERNEL = tuple(int(number) for number in os.uname().release.split(".")[:2])


def by_name(attempt: Attempt | Staged) -> str:
    return attempt.name


# the table, on one stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with daemon_of(config=CONFIG) as daemon, guarded(daemon, bystanders=BESIDE) as guard:
        made = Stage(guard)
        try:
            made.set()
            made.play()
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("attempt", TABLE, ids=by_name)
def test_what_is_tried_is_refused(stage: Stage, attempt: Attempt) -> None:
    if only_of_root(attempt):
        pytest.skip(f"needs root: {attempt.needs_root or 'another user has what it is tried on'}")
    for path, makes in stage.targets(attempt):
        there = os.path.dirname(path) if makes else path
        assert os.path.lexists(there), f"what it was tried on is not there: {there}"
    said = stage.answer(attempt)
    if attempt.kernel > KERNEL:
        pytest.skip(f"said {said}: Linux {attempt.kernel} and later can refuse it")
    assert said == stage.expected(attempt)
    stage.hold(attempt.holds)


@pytest.mark.parametrize("attempt", STAGED, ids=by_name)
def test_what_takes_more_hands_is_refused(stage: Stage, attempt: Staged) -> None:
    if ROOTLESS and attempt.needs_root:
        pytest.skip(f"needs root: {attempt.needs_root}")
    assert attempt.play(stage) == stage.expand(attempt.expect)
    CHECKS["unharmed"](stage)


def test_what_is_attempted_is_all_that_is_required() -> None:
    everything: list[Attempt | Staged] = [*TABLE, *STAGED, *FLOODS, *INHERITED, *FULL]
    covered = {requirement for attempt in everything for requirement in attempt.covers}
    covered |= {"23.speech", "23.notices"}  # by tests of their own
    assert covered == set(REQUIREMENTS)
    points = {requirement.partition(".")[0] for requirement in REQUIREMENTS}
    assert {str(number) for number in range(1, 25)} <= points


def test_nothing_is_attempted_under_another_name() -> None:
    tables: tuple[Sequence[Attempt | Staged], ...] = (TABLE, STAGED, FLOODS, INHERITED, FULL)
    for attempts in tables:
        names = [attempt.name for attempt in attempts]
        assert len(set(names)) == len(names)


# daemons of their own


def line_of(attempt: Attempt, daemon: Daemon) -> str:
    """The command of an attempt without a stage: ``@NAME`` is an agent's directory."""
    words = []
    for word in attempt.words:
        head, _, rest = word.partition("/")
        if head == "@agent":
            word = f"{daemon.root}/agent/{rest}"
        elif head.startswith("@"):
            word = f"{daemon.agent_dir(head[1:])}/{rest}"
        words.append(word)
    return f"/hostile/hostile {shlex.quote(attempt.name)} {shlex.join(words)}"


def attempting(daemon: Daemon, attempt: Attempt, before: str = "", **files: str) -> Path:
    """An agent that makes one attempt, and stays."""
    script = daemon.base / "hostile" / f"{attempt.actor}.sh"
    script.write_text(f"{before}\n{line_of(attempt, daemon)}\nexec sleep 1000\n")
    return daemon.run(attempt.actor, f"sh /hostile/{attempt.actor}.sh",
                      mount=f"{daemon.base}/hostile /hostile ro", **files)


def answer(agent: Path, attempt: Attempt) -> str:
    """Waits for it."""
    said = ""

    def is_answered() -> bool:
        nonlocal said
        said = heard(first(agent)).get(attempt.name) or ""  # a flood rotates it away
        return bool(said)

    wait_until(is_answered, f"{attempt.name} is answered")
    return said


def first(agent: Path) -> str:
    """What was printed first: there may be very much of it."""
    with open(agent / "out", "rb") as out:
        return out.read(4096).decode(errors="replace").replace("x" * 100, "")


class Careless(Daemon):
    """Started from a terminal, with a keyring and an open file that it knows nothing of."""

    executed = True

    def command(self, *more: str) -> list[str]:
        return [str(self.base / "host"), "careless", *super().command(*more)]


@pytest.fixture(scope="module")
def careless() -> Iterator[Daemon]:
    daemon = Careless()
    compile_programs(daemon.base / "hostile")
    daemon.start()
    try:
        with guarded(daemon, bystanders=False):
            yield daemon
    finally:
        daemon.close()


@pytest.mark.parametrize("attempt", INHERITED, ids=by_name)
def test_what_the_daemon_inherited_is_not_handed_on(careless: Daemon, attempt: Attempt) -> None:
    agent = careless.finish(attempt.actor, line_of(attempt, careless),
                            mount=f"{careless.base}/hostile /hostile ro")
    assert answer(agent, attempt) == attempt.expect


@contextmanager
def started(daemon: Daemon) -> Iterator[None]:
    """Starts it, and stops it if nobody has."""
    daemon.start()
    try:
        yield
    finally:
        if daemon.process is not None:
            daemon.stop()


def is_answered(daemon: Daemon, bystander: Path) -> None:
    """Others are served while somebody floods."""
    begun = time.monotonic()
    assert read(bystander, "status") == "busy\n"
    assert daemon.ctx("--help").returncode == 0
    assert read(daemon.finish("passer-by", "echo hello"), "out") == "hello\n"
    assert time.monotonic() - begun < PATIENCE


@pytest.mark.needs_root("each flood is on an account of its own")
@pytest.mark.alone
def test_floods_end_at_limits_and_with_their_agents() -> None:
    daemon = Daemon(config=LIMITS)
    with closing(daemon), started(daemon), guarded(daemon):
        bystander = daemon.run("bystander", "sleep 1000")
        wait_status(bystander, "busy")
        compile_programs(daemon.base / "hostile")
        agents = []
        # one after the other: those before go on, on accounts of their own
        for number, attempt in enumerate(FLOODS):
            agents.append(attempting(daemon, attempt, owner=str(20_000 + number)))
            assert answer(agents[-1], attempt) in attempt.expect.split(" or "), attempt.name
        is_answered(daemon, bystander)
        nodes = [Cgroup(Path(read(agent, "cgroup").strip())) for agent in agents]
        begun = time.monotonic()
        for agent in agents:
            assert read(agent, "status") == "busy\n"
            write(agent / "ctl", "stop")
        for agent in agents:
            wait_dead(agent)
            assert read(agent, "reason") == "operator_stop\n"
        assert time.monotonic() - begun < 10
        wait_until(lambda: not any(cgroup.exists() for cgroup in nodes), "they are removed")
        assert daemon.kept("out") < 2 << 20, "what was printed is limited too"
        assert read(bystander, "status") == "busy\n"


#: (name, mode, program): what they say when they are spoken to, or before
SPEECH = (
    ("braces", "resident", "yes '{'"),
    ("a line without end", "resident", r"tr '\0' '{' < /dev/zero"),
    ("noise", "resident",
     r"while :; do printf '{\377\000\n'; head -c 65536 /dev/urandom; done"),
    ("deltas", "resident", """yes '{"type":"delta","id":null,"text":"x"}'"""),
    ("forged ends", "resident", """yes '{"type":"message","id":"another","text":"x"}'"""),
    ("errors", "resident", "while :; do printf '{\"type\":\"error\",\"text\":\"'; "
                           "head -c 1900000 /dev/zero | tr '\\0' 'x'; echo '\"}'; done"),
    ("a reply without end", "turn", "yes"),
    ("a deaf one", "turn", "exec <&-; head -c 1000000000 /dev/zero; sleep 1000"),
)
#: one of each mode is in every run of the tests
OFTEN = ("deltas", "a deaf one")


@pytest.mark.usefixtures("guard")
@pytest.mark.settings(log_max="1M", grace="300ms")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=each[0], marks=[] if each[0] in OFTEN else pytest.mark.long)
        for each in SPEECH
    ],
)
def test_who_is_spoken_to_says_what_it_likes_and_holds_up_nobody(
    daemon: Daemon, program: tuple[str, str, str]
) -> None:
    _, mode, text = program
    bystander = daemon.run("bystander", "sleep 1000")
    wait_status(bystander, "busy")
    agent = daemon.run("talker", f"sh -c {shlex.quote(text)}", mode=mode)
    wait_status(agent, "idle", "ready")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.root / "agent" / "talker.sock"))
        connection.sendall(b'{"op":"send","id":"1","input":"go"}\n')
        wait_until(lambda: "message.queued" in {e["type"] for e in daemon.events("talker")},
                   "it is told")
        is_answered(daemon, bystander)
        begun = time.monotonic()
        write(agent / "ctl", "stop")
        wait_dead(agent)
        assert time.monotonic() - begun < 5
    for kept in ("out", "log", "reply"):
        assert daemon.kept(kept) < 3 << 20, f"{kept} is limited"
    events = (agent / "session" / "events.jsonl").read_text().split("\n")
    assert max(map(len, events)) < 10_000, "what goes wrong is told in short"
    wait_until(lambda: not list((daemon.runtime / "monitor").iterdir()),
               "the socket of its input goes with it")


@pytest.mark.usefixtures("guard_beside")
@pytest.mark.settings(messages=30, grace="300ms")
def test_what_leaves_messages_behind_is_not_begun_without_end(daemon: Daemon) -> None:
    """Waits that fire at once, and tasks that are stopped before they start. Who removes them
    need not be told of them any more."""
    lines = (
        "cd $CTX_SELF; exec 2> /dev/null",
        "i=0; while [ $i -lt 60 ]; do mkdir waiting/x && echo 'timer 0s' > waiting/x/on "
        "&& rmdir waiting/x && echo removed; i=$((i+1)); done",
        "i=0; while [ $i -lt 60 ]; do mkdir waiting/x$i && echo 'timer 0s' > waiting/x$i/on "
        "&& echo waited; i=$((i+1)); done",
        "i=0; while [ $i -lt 60 ]; do mkdir task/x$i && echo stop > task/x$i/ctl "
        "&& echo stopped; i=$((i+1)); done",
        "echo over; sleep 1000",
    )
    agent = daemon.run("noter", f"sh -c {shlex.quote('; '.join(lines))}", "go", mode="turn")
    wait_until(lambda: "over\n" in read(agent, "out"), "it has tried it all")
    assert read(agent, "out").count("removed\n") == 60
    assert read(agent, "out").count("waited\n") == 30
    assert read(agent, "out").count("stopped\n") == 0
    assert read(agent, "queue").count("\n") == 30
    write(agent / "ctl", "stop")
    wait_dead(agent)


@pytest.mark.usefixtures("guard")
@pytest.mark.settings(grace="300ms")
def test_a_git_that_hangs_holds_up_its_own_parent_only(daemon: Daemon) -> None:
    """More starts need it than the filesystem answers requests at a time: none waits."""
    bystander = daemon.run("bystander", "sleep 1000")
    wait_status(bystander, "busy")
    repository = daemon.base / "repository"
    repository.mkdir()
    os.chown(repository, AGENT_UID, AGENT_UID)
    git = daemon.base / "git"
    git.write_text("#!/bin/sh\nexec sleep 1000\n")
    git.chmod(0o755)
    lines = (
        "cd $CTX_ROOT/agent; exec 2> /dev/null",
        "i=0; while [ $i -lt 120 ]; do mkdir c$i.d; echo worktree > c$i.d/workspace",
        "echo true > c$i.d/exec; echo start > c$i.d/ctl || echo refused",
        "i=$((i+1)); done",
        "echo over; sleep 1000",
    )
    agent = daemon.run("patient", f"sh -c {shlex.quote(' ; '.join(lines))}",
                       workspace=f"explicit_root:{repository}", mount=f"{git} /usr/bin/git ro")
    wait_until(lambda: read(agent, "out") == "over\n", "each start is answered")
    assert read(daemon.agent_dir("c0"), "status") == "starting\n"
    is_answered(daemon, bystander)
    begun = time.monotonic()
    write(agent / "ctl", "kill")
    wait_dead(agent)
    assert time.monotonic() - begun < 10


@pytest.mark.needs_root("it mounts a small disk")
def test_a_full_disk_keeps_nobody_alive_and_no_history_broken() -> None:
    daemon = Daemon(config="grace: 500ms\n")
    daemon.state.mkdir()
    linux.mount("none", daemon.state, "tmpfs", 0, "size=4m")
    try:
        with started(daemon):
            with guarded(daemon, bystanders=False):
                compile_programs(daemon.base / "hostile")
                # what is said before takes the room for what is said when there is none any more
                wait = "echo waits; while ! test -e /hostile/go; do sleep 0.02; done"
                agents = [attempting(daemon, attempt, wait) for attempt in FULL]
                for agent in agents:
                    wait_until(lambda a=agent: read(a, "out"), "its output has a page")  # type: ignore[misc]
                (daemon.base / "hostile" / "go").touch()
                for agent, attempt in zip(agents, FULL, strict=True):
                    # the account says so if the disk was measured before it was full
                    assert answer(agent, attempt) in (attempt.expect, "EDQUOT")
                for agent in agents:
                    begun = time.monotonic()
                    write(agent / "ctl", "stop")
                    wait_dead(agent)
                    assert time.monotonic() - begun < 5
                daemon.agent_dir("filler").rmdir()
                wait_until(lambda: os.statvfs(daemon.state).f_bavail > 100, "there is room again")
                history = daemon.agent_dir("writer") / "session" / "messages.jsonl"
                lines = history.read_text().split("\n")
                assert lines.pop() == ""
                ids = [json.loads(line)["id"] for line in lines]
                assert ids == [f"m{number}" for number in range(1, len(ids) + 1)]
            assert daemon.stop() == 0
    finally:
        linux.unmount(daemon.state, linux.MNT_DETACH)
        daemon.close()
