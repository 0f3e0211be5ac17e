"""The orchestrator of ctxfs-orchestrators(7), as it stands there, also by a daemon that dies."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.worlds.daemon import TIMEOUT, Daemon, read
from tests.worlds.pages import Step, mdoc_blocks, steps_of


def prepare(daemon: Daemon) -> list[Step]:
    """The files of the page on a desk; the commands, with that desk and that mount."""
    desk = daemon.base / "desk"
    desk.mkdir()
    *programs, session = mdoc_blocks("ctxfs-orchestrators.7", "EXAMPLES")
    for text in programs:
        name = re.match(r"# (\S+\.sh)\n", text)
        assert name is not None
        (desk / name[1]).write_text(text)
    assert sorted(path.name for path in desk.iterdir()) == ["lead.sh", "rev.sh"]
    session = session.replace("/srv/desk", str(desk)).replace("/ctx/", f"{daemon.root}/")
    return steps_of([session])


def run(command: str, directory: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    return done.stdout


ASKED, HEARD = "rev-1 was asked", "rev-1 reports: reading"


def check_end(daemon: Daemon) -> list[str]:
    """All of it is there, and the reviewer is removed; what the program said."""
    lead = daemon.agent_dir("lead")
    assert not daemon.agent_dir("rev-1").exists()
    assert read(lead, "session/context/child/rev-1/result.md") == "Is it sound? Yes.\n"
    assert "ended: error" not in read(lead, "log")
    return read(lead, "out").splitlines()


def test_the_orchestrator_does_what_the_page_says(daemon: Daemon) -> None:
    change, *more = prepare(daemon)
    assert change == (f"cd {daemon.root}/agent", "")
    assert len(more) > 8
    for command, said in more:
        assert run(command, daemon.root / "agent") == said, command
    assert check_end(daemon) == [ASKED, HEARD, HEARD]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("report.queued:1", id="the reviewer reports"),
        pytest.param("run.recorded:3", id="three runs have ended"),
        *(pytest.param(place, id=what, marks=pytest.mark.long) for place, what in (
            ("create.announced:2", "the reviewer is made"),
            ("start.committed:2", "the reviewer is started"),
            ("message.queued:2", "the question is asked"),
            ("remove.committed:1", "the reviewer is removed"),
        )),
    ],
)
def test_it_outlives_the_daemon(daemon: Daemon, place: str) -> None:
    _, *more = prepare(daemon)
    daemon.stop()
    daemon.env["CTXD_CRASH_AT"] = place
    daemon.start()
    del daemon.env["CTXD_CRASH_AT"]
    asked = [command for command, _ in more].index('./lead "Review it."')
    for command, said in more[:asked]:
        assert run(command, daemon.root / "agent") == said, command
    (daemon.agent_dir("lead") / "inbox").write_text("Review it.\n")
    daemon.wait_killed()
    daemon.start()
    for command, said in more[asked + 1 :]:
        assert run(command, daemon.root / "agent") == said, command
    # the reviewer does not repeat a report that it could not send
    said_at_end = check_end(daemon)
    assert said_at_end.count(ASKED) == 1
    assert {*said_at_end} <= {ASKED, HEARD}
