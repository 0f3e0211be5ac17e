"""What is typed at a shell in man pages and in README files, done as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, wait_status
from tests.worlds.ordinary import ordinary_daemon
from tests.worlds.pages import CHECKOUT, Step, markdown_blocks, mdoc_blocks, reader, steps_of
from tests.worlds.screens import terminal

README = CHECKOUT / "README.md"
CONTRIB = CHECKOUT / "contrib"
#: another one each time
OTHER = {
    "17854": r"\d+",
    "2712": r"\d+",
    "restart:2": r"restart:\d+",
    "operator uid:0": r"operator uid:\d+",
    "tmp.9qPHnSDvKG": r"tmp\.\w+",
    "8adbe23": "[0-9a-f]{7}",
    "2faf67f": "[0-9a-f]{7}",
}


@pytest.mark.settings(grace="1s")
def test_the_tour(daemon: Daemon) -> None:
    steps = steps_of(mdoc_blocks("ctxfs.7", "TOUR"))
    assert len(steps) > 70
    with reader(daemon) as shell:
        shell.walk(steps, {**OTHER, "r8": r"r\d+"})


def five_minutes() -> Iterator[Step]:
    """What the README has a newcomer type."""
    steps = steps_of(markdown_blocks(README, "Five minutes"))
    assert len(steps) > 20
    return iter(steps)


def test_five_minutes_of_root(daemon: Daemon) -> None:
    with reader(daemon) as shell:
        shell.walk([*five_minutes()], patient=False)


def test_five_minutes_of_an_ordinary_user() -> None:
    first, *more = five_minutes()
    _, _, instead = first.command.partition("# your own daemon: ")
    assert instead.startswith("cd $")
    with ordinary_daemon() as daemon, reader(daemon) as shell:
        shell.walk([Step(instead, ""), *more], patient=False)


def shaped(line: str) -> list[str]:
    """The words of a line of ctx top, with every number for any other."""
    return re.sub(r"\b\d+(\.\d+)?[BKMsmh]?\b", "#", line.replace("─", "")).split()


def test_the_recording_of_ctx_top(daemon: Daemon) -> None:
    """Agents that are, and do, what the README shows."""
    (recorded,) = (block for block in markdown_blocks(README, "Five minutes") if "NAME▾" in block)
    waits = "until grep -q go $CTX_SELF/meta.json; do sleep 0.05; done"
    begin = [
        "cd /ctx/agent",
        "ctx spawn clerk --mode turn -- cat",
        "ctx spawn watch -- sleep 1000",
        "ctx spawn coder --mode turn -- sleep 1000",
        "echo work > coder.d/inbox",
        "ctx spawn reviewer --parent coder -- sleep 1000",
        "ctx spawn tests --parent reviewer -- sleep 1000",
        f"ctx spawn lint --parent reviewer -- sh -c '{waits}; exit 3'",
        f"ctx spawn docs --parent coder -- sh -c '{waits}'",
    ]
    with reader(daemon) as shell:
        for command in begin:
            shell.say(shell.here(command))
        for name in ("watch", "coder", "reviewer", "tests"):
            wait_status(daemon.agent_dir(name), "busy")
        shell.say("ctx pause watch")
        for name in ("lint", "docs"):
            shell.say(f"echo '{{\"go\": 1}}' > {name}.d/meta.json; cat {name}.d/wait")
    with terminal(92, 11, {"CTX_ROOT": str(daemon.root)}) as at:
        at.run(f"{Path(sys.executable).with_name('ctx')} top")
        wanted = [*map(shaped, shell.here(recorded).splitlines())]
        at.wait(lambda now: [*map(shaped, now.rstrip().splitlines())] == wanted, f"{wanted}")


def test_the_examples_of_policies(daemon: Daemon) -> None:
    steps = steps_of(mdoc_blocks("ctxfs-policy.5", "EXAMPLES"))
    assert len(steps) > 10
    with reader(daemon) as shell:
        shell.walk([Step("cd /ctx/agent", ""), *steps])


@pytest.mark.parametrize("page", ["ctxfs.5", "ctxfs-programs.7", "ctxfs-tasks.5",
                                  "ctxfs-tools.5", "ctxfs-worktrees.7"])  # fmt: skip
def test_the_examples_of(page: str, daemon: Daemon) -> None:
    steps = steps_of(mdoc_blocks(page, "EXAMPLES"))
    assert len(steps) > 9
    project = daemon.base / "project"
    project.mkdir()
    (project / "Makefile").write_text("all:\n\tsleep 1000\n")
    dates = r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \w+ \d+"
    other = {f"Sat Nov 21 22:43:0{n} UTC 2026": dates for n in (1, 2)}
    with reader(daemon, {"/srv/project": str(project)}) as shell:
        shell.walk(steps, other)


#: a program that answers the questions of ctx(1), and has nothing to do without one
MY_AGENT = """sh -c 'asked=$(cat); case $asked in
"") exit 1;;
what*) echo A parser, and its tests.;;
are*) echo No: nothing tests an empty file.;;
*) echo It is fine.;;
esac'""".replace("\n", " ")


def test_the_examples_of_ctx(daemon: Daemon) -> None:
    """The agent of the page may make children, as the one in which the tools are called must."""
    steps = steps_of(mdoc_blocks("ctx.1", "EXAMPLES"))
    assert len(steps) > 20
    project = daemon.base / "home" / "project"
    with reader(daemon, {"my-agent": MY_AGENT}) as shell:
        project.mkdir()
        (project / "Makefile").write_text("all:\n\techo made\n")
        shell.say(f"cd {project}")
        for step in steps:
            if step.command.startswith("ctx chat"):
                chat(daemon, step)
            elif "/tool/" in step.command:
                (daemon.agent_dir("coder") / "policy").write_text(
                    "allow coder_t tool:* execute\nallow coder_t agent:lint create\n"
                )
                command = shell.here(step.command).replace("'", r"'\''")
                said = shell.say(f"ctx task start -a coder --wait -- '{command}'; echo $?")
                assert said.endswith("\n0\n"), f"{command}: {said}"
            else:
                shell.walk([step], OTHER)


def chat(daemon: Daemon, step: Step) -> None:
    """A conversation at a terminal: what is after the prompt is typed, the rest is the answer."""
    asks, answer = step.says.splitlines()
    prompt, _, question = asks.partition("> ")
    with terminal(100, 10, {"CTX_ROOT": str(daemon.root)}) as at:
        at.run(f"{Path(sys.executable).with_name('ctx')} {step.command.removeprefix('ctx ')}")
        at.wait(lambda now: now.rstrip().endswith(f"\n{prompt}>"), "the prompt")
        at.run(question)
        at.wait_for(f"{asks}\n{answer}\n{prompt}>")


def test_the_examples_of_contrib(daemon: Daemon) -> None:
    """Those of residents, of recipes of one's own, and of what is beside them."""
    page = CONTRIB / "examples" / "README.md"
    with reader(daemon) as shell:
        shell.say(f"cd {page.parent}")
        shell.walk(steps_of(markdown_blocks(page, "An agent that keeps running")))
        shell.walk(steps_of(markdown_blocks(CONTRIB / "agents" / "README.md", "Your own")))
