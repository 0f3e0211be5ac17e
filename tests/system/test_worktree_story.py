"""The worktree story of contrib/examples, told to its end, also by daemons that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_until

STORY = Path(__file__).parents[2] / "contrib" / "examples" / "worktree.sh"
RESULT = "Greet the world as the tests want it on HEAD -> ctx/mender"
#: r2 and r4 are told that the task and the child have ended, and leave it to the waits
STEPS = (
    "r1: made a work item",
    "r1: made it the current work item",
    "r1: started the tests",
    "r1: waits for the tests",
    "r3: saw that the status of the tests is failed, and made a plan",
    "r3: made a child with a worktree",
    "r3: started the child",
    "r3: waits for the child",
    f"r5: read the result: {RESULT}",
    "r5: merged it",
    "r5: the work is done",
)


@contextmanager
def telling(daemon: Daemon, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The operator's script; it must have ended well at the end."""
    environment = {**os.environ, "CTX_ROOT": str(daemon.root), **env}
    story = subprocess.Popen(
        ["sh", str(STORY), str(daemon.base / "repository")],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield story
        out, err = story.communicate(timeout=TIMEOUT)
        assert (story.returncode, err) == (0, "")
        assert out.endswith("the tests pass\n")
    finally:
        story.kill()
        story.wait()


def check_end(daemon: Daemon) -> None:
    """All of it is there, each step once."""
    coder, mender = daemon.agent_dir("coder"), daemon.agent_dir("mender")
    assert read(coder, "out").splitlines() == list(STEPS)
    assert read(coder, "session/latest.md").splitlines() == list(STEPS[-3:])
    assert (read(coder, "status"), read(coder, "queue")) == ("idle\n", "")
    assert read(coder, "work/tests/status") == "done\n"
    assert read(coder, "work/tests/objective") == "Make the tests pass.\n"
    assert read(coder, "work/current") == ""
    assert (read(coder, "task/check/status"), read(coder, "task/check/exit")) == (
        "failed\n", "exit:1\n",
    )  # fmt: skip
    assert read(coder, "task/check/output") == "said: Helo, world\nwanted: Hello, world\n"
    assert [read(coder, f"waiting/{wait}/status") for wait in ("checked", "mended")] == [
        "fired\n", "fired\n",
    ]  # fmt: skip
    assert (read(mender, "outcome"), read(mender, "result.md")) == ("done\n", RESULT + "\n")
    assert "\twanted: Hello, world\n" in read(mender, "inherited.md")
    assert read(coder, "session/context/child/mender/result.md") == RESULT + "\n"
    commits = subprocess.run(
        ["git", "-c", "safe.directory=*", "log", "--format=%an %D", "main"],
        cwd=daemon.base / "repository", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert commits.stdout == "mender HEAD -> main, ctx/mender\nyou \n"

    events = daemon.events("coder")
    assert [e["id"] for e in events] == [f"e{n}" for n in range(1, len(events) + 1)]
    counts = Counter(e["type"] for e in events)
    for kind, number in (
        ("run.start", 5),
        ("run.end", 5),
        ("message.queued", 5),
        ("message.end", 5),
        ("task.start", 2),
        ("task.end", 2),
        ("wait.armed", 2),
        ("wait.fired", 2),
    ):
        assert counts[kind] == number, kind
    assert {e["outcome"] for e in events if e["type"] == "message.end"} == {"processed"}
    lines = [e["status"] for e in events if e["type"] == "work.status"]
    # twice something is waited for, which may be there already
    assert " ".join(lines) in {
        " ".join(("open", "active", *("blocked", "active") * times, "done")) for times in range(3)
    }
    counts = Counter(e["type"] for e in daemon.events("mender"))
    assert (counts["run.start"], counts["run.end"], counts["agent.stop"]) == (1, 1, 1)


def test_the_story_is_told(daemon: Daemon) -> None:
    with telling(daemon):
        pass
    check_end(daemon)


@pytest.mark.long
def test_the_daemon_is_killed_between_any_two_steps(daemon: Daemon) -> None:
    gate = daemon.base / "repository" / "gate"
    gate.parent.mkdir()
    os.mkfifo(gate, 0o666)
    out = daemon.agent_dir("coder") / "out"
    with telling(daemon, GATE=str(gate)):
        for number, step in enumerate(STEPS, 1):
            wait_until(
                lambda n=number: out.exists() and out.read_text().count("\n") == n,  # type: ignore[misc]
                step,
            )
            assert out.read_text().splitlines()[-1] == step
            daemon.restart()
            wait_until(lambda: opened(gate), "the agent is at the gate")
    check_end(daemon)


def opened(gate: Path) -> bool:
    """Lets through who stands before the gate; False if nobody does."""
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        assert error.errno == errno.ENXIO
        return False
    return True


def test_the_daemon_is_killed_whenever_something_has_happened(daemon: Daemon) -> None:
    """In the midst of steps, and while nobody runs but a task or a child."""
    kills = 0
    with telling(daemon):
        wait_until(lambda: "message.queued" in types(daemon), "the agent has its task")
        happened = daemon.events("coder")
        while not (done(happened) and happened[-1].get("status") == "idle"):
            kills += 1
            daemon.restart()
            known = len(happened)
            wait_until(lambda n=known: len(daemon.events("coder")) > n, "more")  # type: ignore[misc]
            happened = daemon.events("coder")
    assert kills >= 5, "there was somebody to kill"
    check_end(daemon)


def types(daemon: Daemon) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [event["type"] for event in daemon.events("coder")]
    return []


def done(events: list[dict[str, str]]) -> bool:
    return any(e["type"] == "work.status" and e["status"] == "done" for e in events)
