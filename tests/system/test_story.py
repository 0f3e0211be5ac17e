"""The story of contrib/examples: an orchestrator with tools only, also under daemons that die."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import CRASH_AT

STORY: Final = Path(__file__).parents[2] / "contrib" / "examples" / "story.sh"
CHILDREN: Final = ("long", "longest", "marks")
FIRST: Final = "spawned long (mode once): Which lines are longer than 100 characters?"
SPAWNED: Final = (
    FIRST,
    "spawned longest (mode turn): Which file is the longest?",
    "spawned marks (mode resident): What is left to do?",
)
ASKED: Final = "asked longest: How does it begin?"
LAST: Final = "removed its children"
STEPS: Final = (
    *SPAWNED,
    "long reports: reading 3 files",
    "longest reports: b is the longest",
    "marks reports: marks found: 1; I can look again",
    ASKED,
    "longest answers: b begins with: one",
    "needs longest no more",
    "needs marks no more",
    "long has ended: completed (exit:0)",
    "longest has ended: cancelled (supervisor_stop)",
    "marks has ended: cancelled (supervisor_stop)",
    "wrote the result",
    LAST,
)
LONG: Final = "long: completed (exit:0)\na:2: 101 characters"
LONGEST: Final = "longest: cancelled (supervisor_stop)\nb begins with: one"
MARKS: Final = "marks: cancelled (supervisor_stop)\nc:1: TODO: more"
#: places within the calls of the orchestrator and of its children, and in what follows from them,
#: and when: the daemon dies there for each of these times
PLACES: Final = {
    "write.committed": (1, 9, 17, 25, 33, 41, 49),
    "outbox.appended": (1, 9, 17, 25, 33, 41, 49),
    "events.appended": (5, 21, 37),
    **dict.fromkeys(("run.launched", "run.running", "run.ended", "run.recorded"), (1, 4, 8)),
    **dict.fromkeys(("remove.committed", "remove.forgotten"), (1, 2, 3)),
    **dict.fromkeys(("create.waitfile", "create.inserted", "create.announced"), (1, 2)),
    **dict.fromkeys(("start.committed", "start.planned", "start.launched"), (1, 2)),
    **dict.fromkeys(("cancel.marked", "cancel.signalled", "finish.recorded"), (1, 2)),
    "report.queued": (1, 2),
    **dict.fromkeys(("message.queued", "message.delivered", "message.ended"), (1,)),
}
#: those that every run of the tests tries
NORMAL: Final = {("message.queued", 1)}


def nothing() -> None:
    """The daemon is left alone."""


class Story:
    """The story while it is told: the orchestrator stands still after each step until ``go``."""

    def __init__(self, daemon: Daemon, files: Path) -> None:
        self.daemon, self.files, self.gate = daemon, files, files / ".gate"
        os.mkfifo(self.gate, 0o666)
        self.process = subprocess.Popen(
            ["sh", str(STORY), str(files)], text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "CTX_ROOT": str(daemon.root), "GATE": "/files/.gate",
                 "PATH": f"{os.environ['PATH']}:{daemon.root}/bin"},
        )  # fmt: skip
        self.name = f"story-{self.process.pid}"
        self.steps: list[str] = []
        #: how often the daemon was found dead
        self.deaths = 0
        wait_until(self._waits, "the operator waits, as it does until the end")

    def _waits(self) -> bool:
        """Whether what the script runs has the FIFO of an agent's end open."""
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for pid in children.read_text().split():
                open_files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
                if any(path.startswith(f"{self.daemon.runtime}/root/wait/") for path in open_files):
                    return True
        return False

    def dir(self, child: str = "") -> Path:
        return self.daemon.agent_dir(f"{self.name}-{child}" if child else self.name)

    def said(self) -> list[str]:
        """What the orchestrator did, without the run and its own name."""
        lines = read(self.dir(), "out").replace(f"{self.name}-", "").splitlines()
        return [line.partition(": ")[2] for line in lines]

    def step(self) -> str:
        """The next one, once it is done. A daemon that has died is replaced."""

        said: list[str] = []

        def is_done() -> bool:
            nonlocal said
            if self.daemon.has_ended():
                self.daemon.wait_killed()
                self.deaths += 1
                self.daemon.start()
            with contextlib.suppress(OSError):  # it is dying
                said = self.said()
            return len(said) > len(self.steps)

        wait_until(is_done, f"a step after {self.steps}", 2 * TIMEOUT)
        assert said[:-1] == self.steps
        self.steps = said
        return said[-1]

    def go(self) -> None:
        """Lets the orchestrator go on."""
        wait_until(self.opened, "the orchestrator is at the gate")

    def opened(self) -> bool:
        try:
            os.close(os.open(self.gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            assert error.errno == errno.ENXIO
            return False
        return True

    def until(self, wanted: str, then: Callable[[], object] = nothing) -> None:
        """Goes on to that step, and does something after each step up to it; stands after it."""
        while not self.steps or self.steps[-1] != wanted:
            if self.steps:
                self.go()
            self.step()
            then()

    def told(self, provenance: str) -> list[str]:
        """What the orchestrator was told, with the message that it works on."""
        text = read(self.dir(), "session/messages.jsonl")
        found = [json.loads(line) for line in text.splitlines()]
        texts = [m["content"] for m in found
                 if (m["role"], m["provenance"]) == ("user", provenance)]  # fmt: skip
        now = json.loads(read(self.dir(), "message"))
        return [*texts, now["text"]] if now["provenance"] == provenance else texts

    def notice(self, child: str) -> dict[str, Any]:
        """Of a child's end; there is one."""
        found = [json.loads(text) for text in self.told("task_result")]
        notice: dict[str, Any]
        (notice,) = [each for each in found if each["agent"] == f"{self.name}-{child}"]
        return notice

    def history(self, child: str) -> Counter[str]:
        """Types of the events of a child that was removed; it had one life."""
        sessions = self.daemon.root / "home" / "0" / "agent" / f"{self.name}-{child}" / "session"
        assert os.listdir(sessions) == ["default"]
        lines = read(sessions / "default", "events.jsonl").splitlines()
        return Counter(json.loads(line)["type"] for line in lines)

    def end(self) -> str:
        """What the script printed, after it was let go on from the last step: it leaves nothing."""
        self.go()
        out, err = self.process.communicate(timeout=TIMEOUT)
        assert (self.process.returncode, err) == (0, "")
        self.check_nothing_left()
        return out.replace(f"{self.name}-", "")

    def check_nothing_left(self) -> None:
        assert os.listdir(self.daemon.root / "agent") == []
        assert os.listdir(self.daemon.root / "home" / "0" / "agent") == []


@contextmanager
def telling(daemon: Daemon, files: Path) -> Iterator[Story]:
    story = Story(daemon, files)
    try:
        yield story
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(story.process.pid, signal.SIGKILL)
        story.process.communicate()


@pytest.fixture
def files(daemon: Daemon) -> Path:
    """What is reviewed: three files, each with something for one of the reviewers."""
    directory = daemon.base / "files"
    directory.mkdir()
    (directory / "a").write_text(f"short\n{'x' * 101}\n")
    (directory / "b").write_text("one\ntwo\nthree\n")
    (directory / "c").write_text("TODO: more\n")
    return directory


def check_told(story: Story, *, steps: tuple[str, ...] = STEPS) -> None:
    """Standing after the last step: all of it was done, each thing once."""
    assert sorted(story.steps) == sorted(steps)
    assert tuple(story.steps[:3]) == SPAWNED
    told = {p: len(story.told(p)) for p in ("child", "wait", "task_result")}
    assert told == {"child": 3, "wait": 1, "task_result": 3}
    events = story.daemon.events(story.name)
    assert [e["id"] for e in events] == [f"e{n}" for n in range(1, len(events) + 1)]
    counts = Counter(e["type"] for e in events)
    # its task, and what it was told; it works on the last
    assert (counts["message.queued"], counts["message.end"]) == (8, 7)
    assert (counts["run.start"], counts["run.end"]) == (8, 7)
    assert (counts["wait.armed"], counts["wait.fired"], counts["task.end"]) == (1, 1, 3)
    ends = {e["outcome"] for e in events if e["type"] == "message.end"}
    assert ends == {"processed"}
    agents = os.listdir(story.daemon.root / "agent")
    assert sorted(agents) == [story.name, f"{story.name}.d", f"{story.name}.sock"]


def check_children(story: Story) -> None:
    """Each was made, was run, reported and ended once; one was asked a second time."""
    for child in CHILDREN:
        counts = story.history(child)
        once = ("agent.create", "agent.start", "agent.report", "agent.stop")
        assert [counts[kind] for kind in once] == [1, 1, 1, 1], child
        assert counts["run.start"] == (2 if child == "longest" else 1), child


def check_end(story: Story, *results: str) -> None:
    out = story.end()
    assert out.endswith("\nIts result:\n" + "\n\n".join(results) + "\n"), out


@pytest.fixture(params=["", pytest.param("killed", marks=pytest.mark.long)])
def after_each(request: pytest.FixtureRequest, daemon: Daemon) -> Callable[[], None]:
    """What happens after each step of a variant."""
    return daemon.restart if request.param else nothing


def test_the_story_is_told(daemon: Daemon, files: Path) -> None:
    with telling(daemon, files) as story:
        story.until(LAST)
        check_told(story)
        check_children(story)
        check_end(story, LONG, LONGEST, MARKS)


@pytest.mark.long
def test_the_daemon_is_killed_after_each_step(daemon: Daemon, files: Path) -> None:
    with telling(daemon, files) as story:
        story.until(LAST, daemon.restart)
        check_told(story)
        check_children(story)
        check_end(story, LONG, LONGEST, MARKS)


def test_the_daemon_is_killed_whenever_something_has_happened(daemon: Daemon, files: Path) -> None:
    """In the midst of steps, and while nobody runs but the children."""
    kills = gone = known = 0
    with telling(daemon, files) as story:

        def has_more() -> bool:
            """Each step is let go on from once, when it was seen."""
            nonlocal gone
            story.steps = story.said()
            if len(story.steps) > gone and story.steps[-1] != LAST:
                gone += story.opened()
            return story.steps[-1:] == [LAST] or len(daemon.events(story.name)) > known

        while story.steps[-1:] != [LAST]:
            wait_until(has_more, "more happens")
            known = len(daemon.events(story.name))
            daemon.restart()
            kills += 1
        assert kills >= 5, "there was somebody to kill"
        check_told(story)
        check_children(story)
        check_end(story, LONG, LONGEST, MARKS)


def _cases() -> list[Any]:
    cases = [(place, count) for place, counts in PLACES.items() for count in counts]
    return [pytest.param(*c, marks=() if c in NORMAL else pytest.mark.long) for c in cases]


@pytest.mark.parametrize(("place", "count"), _cases())
def test_the_daemon_dies_amid_a_call(daemon: Daemon, files: Path, place: str, count: int) -> None:
    with telling(daemon, files) as story:
        story.until(FIRST)
        wait_dead(story.dir("long"))
        daemon.kill()
        daemon.env[CRASH_AT] = f"{place}:{count}"
        daemon.start()
        del daemon.env[CRASH_AT]
        story.until(LAST)
        assert story.deaths == 1
        check_told(story)
        check_children(story)
        check_end(story, LONG, LONGEST, MARKS)


def test_a_result_of_20_kib(daemon: Daemon, files: Path, after_each: Callable[[], None]) -> None:
    """Its notice has head and tail of it, and where all of it is, even when its child is gone."""
    (files / "a").write_text(f"{'x' * 101}\n" * 1000)
    (files / "b").write_text("one\n" * 1001)
    full = "".join(f"a:{number}: 101 characters\n" for number in range(1, 1001))
    assert len(full) > 20 * 1024
    with telling(daemon, files) as story:
        story.until(LAST, after_each)
        check_told(story)
        notice = story.notice("long")
        result = notice["result"]
        assert len(result.encode()) <= 8 * 1024
        assert result.startswith("a:1: 101 characters\na:2:")
        assert result.endswith("a:1000: 101 characters\n")
        assert notice["truncated"] is True
        assert Path(notice["output_path"]).read_text() == full
        path = notice["output_path"].replace(f"{story.name}-", "")
        check_end(story, f"long: completed (exit:0)\n{result}\n(in full: {path})", LONGEST, MARKS)


def test_a_child_fails(daemon: Daemon, files: Path, after_each: Callable[[], None]) -> None:
    (files / "c").chmod(0)
    with telling(daemon, files) as story:
        story.until(FIRST)
        wait_dead(story.dir("long"))
        (files / "c").chmod(0o644)
        story.until(LAST, after_each)
        failed = "long reports: failed: [Errno 13] Permission denied: '/files/c'"
        others = {
            "long reports: reading 3 files": failed,
            "long has ended: completed (exit:0)": "long has ended: failed (exit:3)",
        }
        check_told(story, steps=tuple(others.get(step, step) for step in STEPS))
        notice = story.notice("long")
        assert [notice[key] for key in ("status", "exit", "reason", "result")] == [
            "failed", "exit:3", "exit:3", "",
        ]  # fmt: skip
        check_end(story, "long: failed (exit:3)", LONGEST, MARKS)


def test_reports_arrive_while_the_parent_is_busy(
    daemon: Daemon, files: Path, after_each: Callable[[], None]
) -> None:
    with telling(daemon, files) as story:
        story.until(SPAWNED[-1], after_each)

        def waiting() -> list[str]:
            queue = [json.loads(line) for line in read(story.dir(), "queue").splitlines()]
            return [m["from"].replace(f"{story.name}-", "") for m in queue
                    if m["provenance"] == "child"]  # fmt: skip

        wait_until(lambda: len(waiting()) == 3, "all have reported")
        assert sorted(waiting()) == [f"agent:{child}" for child in CHILDREN]
        assert (read(story.dir(), "status"), read(story.dir(), "run")) == ("busy\n", "r1\n")
        order = [f"{each.removeprefix('agent:')} reports" for each in waiting()]
        after_each()
        story.until(LAST, after_each)
        heard = [step.partition(":")[0] for step in story.steps if " reports: " in step]
        assert heard == order
        check_told(story)
        check_end(story, LONG, LONGEST, MARKS)


def test_a_child_dies_between_question_and_answer(
    daemon: Daemon, files: Path, after_each: Callable[[], None]
) -> None:
    with telling(daemon, files) as story:
        story.until(SPAWNED[-1], after_each)
        wait_dead(story.dir("long"))
        wait_status(story.dir("marks"), "ready")
        wait_status(story.dir("longest"), "idle")
        (files / "b").unlink()
        os.mkfifo(files / "b", 0o644)  # who reads it now does not get far
        story.until(ASKED, after_each)
        wait_status(story.dir("longest"), "busy")
        wait_until(lambda: read(story.dir("longest"), "pid").strip(), "its run has begun")
        write(story.dir("longest") / "ctl", "kill")
        wait_dead(story.dir("longest"))
        story.until(LAST, after_each)
        others = {
            "longest answers: b begins with: one":
                "longest does not answer: aborted (operator_stop)",
            "longest has ended: cancelled (supervisor_stop)":
                "longest has ended: cancelled (operator_stop)",
        }  # fmt: skip
        check_told(story, steps=tuple(others.get(step, step) for step in STEPS))
        check_children(story)
        (notice,) = map(json.loads, story.told("wait"))
        payload = notice["payload"]
        assert (payload["message"], payload["reply"]) == ("question", "")
        check_end(story, LONG, "longest: cancelled (operator_stop)", MARKS)


def test_a_review_that_nobody_can_do_ends_too(daemon: Daemon, files: Path) -> None:
    """What fails in a run of mode turn ends no agent: the orchestrator hears of it all the same."""
    (files / "c").chmod(0)
    with telling(daemon, files) as story:
        story.until(LAST)
        assert "longest goes on without its task: failed (exit:3)" in story.steps
        assert "longest does not answer: failed (exit:1)" in story.steps
        check_end(
            story, "long: failed (exit:3)", "longest: cancelled (supervisor_stop)",
            "marks: failed (exit:3)",
        )  # fmt: skip


def test_an_interrupt_leaves_nothing(daemon: Daemon, files: Path) -> None:
    with telling(daemon, files) as story:
        story.until(SPAWNED[-1])
        os.killpg(story.process.pid, signal.SIGINT)
        assert story.process.wait(TIMEOUT) == 130
        story.check_nothing_left()
