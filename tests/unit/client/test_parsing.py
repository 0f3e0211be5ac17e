"""Command lines: what they mean, what is wrong with them, and help."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from client import commands, declaring, words
from client.declaring import DECLARED, Arguments, Command
from client.exits import Misuse
from tests.unit.client.fakes import FakeRoot, Run, all_commands


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["zzz"],
        ["--rot", "/x", "ps"],
        ["--root"],
        ["help", "zzz"],
        ["start"],
        ["get", "x"],
        ["get", "a/b", "status"],
        ["get", "x", "../y.d/status"],
        ["get", "x", "/etc/passwd"],
        ["set", "x", "life"],
        ["set", "x", "a", "b", "c"],
        ["wait", "-t", "5", "x"],
        ["wait", "-t", "٣s", "x"],
        ["log", "-n", "-1", "x"],
        ["spawn", "x"],
        ["spawn", "x", "true"],
        ["spawn", "x", "--rm", "--", "true"],
        ["spawn", "x", "--mount", "a:b:c", "--", "true"],
        ["spawn", "x", "--mount", "", "--", "true"],
        ["spawn", "x", "--mount", "a\tb", "--", "true"],
        ["spawn", "x", "--set", "life", "--", "true"],
        ["spawn", "x", "--wait", "--life", "temp", "--", "true"],
        ["spawn", "x", "--wait", "--set", "life=temp", "--", "true"],
        ["spawn", "x", "--env", "A=a\nb", "--", "echo"],
        ["run", "y", "--message", "hi"],
        ["run", "y", "--", "true"],
        ["run", "y", "--mode", "once", "--message", "hi", "--", "true"],
        ["run", "y", "--set", "mode=once", "--message", "hi", "--", "true"],
        ["send", "x"],
        ["abort", "x", "--run", "r1\nkill"],
        ["session", "x"],
        ["session", "x", "a\nkill"],
        ["queue"],
        ["task"],
        ["task", "show", "t"],
        ["task", "show", "-a", "x", "a/b"],
        ["task", "show", "-a", "x", ".."],
        ["task", "show", "-a", "a/b", "t"],
        ["task", "start", "-a", "x"],
        ["task", "start", "-a", "x", "--name", "", "--", "true"],
        ["task", "input", "-a", "x", "t"],
        ["work", "new", "-a", "x"],
        ["work", "set", "-a", "x", "w", "../status", "done"],
        ["waits", "add", "-a", "x", "w"],
        ["tool", "show", "a/b"],
    ],
)
def test_usage_errors(root: FakeRoot, run: Run, argv: list[str]) -> None:
    root.agent("x")
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err and "Traceback" not in err
    assert os.listdir(root.path / "agent") == ["x.d"]


@pytest.mark.parametrize("command", [row.name for row in all_commands()])
def test_every_command_has_help(run: Run, command: str) -> None:
    *group, name = command.split()
    status, out, err = run("help", *group, name)
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: ctx {command} ")
    assert run(*group, name, "--help") == (0, out, "")
    assert f"\n  {name} " in run(*group, "--help")[1]


@pytest.mark.parametrize("group", commands.GROUPS)
def test_every_group_has_help(run: Run, group: str) -> None:
    status, out, err = run("help", group)
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: ctx {group} [COMMAND]")
    assert run(group, "--help") == run(group, "-h") == (0, out, "")
    assert f"\n  {group} " in run("--help")[1]


def test_every_command_is_found_by_its_first_word() -> None:
    found = [row.name for row in all_commands()]
    assert len(set(found)) == len(found)
    for subject in set(commands.SUBJECTS.values()):
        import_module(f"client.{subject}")
    declared = {row.name for rows in DECLARED.values() for row in rows.values()}
    assert declared == {*found, "__complete"}


@pytest.mark.parametrize(
    ("words", "name", "rest"),
    [
        (["ps", "task"], "ps", ["task"]),
        (["task"], "task list", []),
        (["task", "-a", "x"], "task list", ["-a", "x"]),
        (["task", "start", "list"], "task start", ["list"]),
        (["tool", "TaskList", "{}"], "tool call", ["TaskList", "{}"]),
        (["tool", "call", "list"], "tool call", ["list"]),
    ],
)
def test_the_longest_name_is_meant(words: list[str], name: str, rest: list[str]) -> None:
    command, left = commands.find_command(words)
    assert (command.name, left) == (name, rest)


def test_unknown_commands_lead_to_help(run: Run) -> None:
    assert run("zzz", "x")[2] == 'ctx: unknown command "zzz"; see: ctx help\n'
    assert run("task", "zzz")[2] == 'ctx: unknown command "task zzz"; see: ctx help task\n'
    for argv in (["task", "zzz"], ["help", "task", "zzz"], ["help", "task", "list", "zzz"]):
        status, _, err = run(*argv)
        assert status == 2 and err.endswith("; see: ctx help task\n")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"ctx {words.VERSION}\n", "")


def test_root_option_wins(root: FakeRoot, run: Run, tmp_path: Path) -> None:
    other = FakeRoot(tmp_path / "other")
    other.agent("y", status="idle")
    other.list_agents()
    for argv in (["--root", str(other.path)], [f"--root={other.path}"]):
        assert "y " in run(*argv, "ps")[1]


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_duration(text: str, seconds: float) -> None:
    assert declaring.duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "x", "s", "1.5s", "-1s", "1000000000s", "9" * 400 + "d"])
def test_what_is_no_duration(root: FakeRoot, run: Run, text: str) -> None:
    root.agent("x")
    said = f'ctx: "{text}" is not a duration such as 500ms, 30s, 10m, 2h or 1d\n'
    assert run("wait", f"--timeout={text}", "x") == (2, "", said)


@pytest.mark.parametrize("text", ["x", "-1", "1K", "9" * 5000])
def test_what_is_no_number_of_lines(root: FakeRoot, run: Run, text: str) -> None:
    root.agent("x")
    said = f'ctx: "{text}" is not a number of lines\n'
    assert run("log", f"--lines={text}", "x") == (2, "", said)


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        (["spawn", "--rm", "x", "--", "sh", "--", "-h"], "program", ["sh", "--", "-h"]),
        (["send", "x", "--", "--help"], "text", ["--help"]),
        (["send", "x", "--priority", "next", "a", "--", "-b"], "text", ["a", "-b"]),
        (["new", "x", "--parent", "p", "a=-b"], "files", ["a=-b"]),
        (["set", "x", "--", "a", "-5"], "values", ["a", "-5"]),
    ],
)
def test_words_that_look_like_options(argv: list[str], field: str, expected: list[str]) -> None:
    args = commands.parse_command(argv)[1]
    name = getattr(args, "words", None) or [args.name]
    assert name == ["x"] and getattr(args, field) == expected


def random_line(chance: random.Random, command: Command) -> list[str]:
    """Return words that may be right for a command, or wrong."""
    words: list[list[str]] = []
    for flags, more in command.arguments:
        value = chance.choice(["a", "5", "5s", "a=b", "-", "", *more.get("choices", ())])
        if not flags[0].startswith("-"):
            words += [[value]] * chance.choice([0, 1, 1, 1, 2, 3])
        elif more.get("action") in ("store_true", "append_const"):
            words += [[chance.choice(flags)]] * chance.choice([0, 0, 1])
        else:
            flag = chance.choice(flags)
            joined = [f"{flag}={value}"] if flag.startswith("--") else [flag + value]
            words += [chance.choice([[flag, value], joined])] * chance.choice([0, 0, 1, 2])
    words += chance.choice([[], [], [], [["-x"]], [["--help"]], [["-5"]], [["--"], ["a"]]])
    chance.shuffle(words)
    return [word for some in words for word in some]


def by_argparse(command: Command, words: list[str]) -> Arguments | None:
    parser = commands.parser_for(command)
    try:
        return parser.parse_intermixed_args(words, Arguments())
    except (SystemExit, Misuse):
        return None


def test_command_lines_are_parsed_as_by_argparse(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever is parsed without argparse; most of what is right is."""
    chance = random.Random(1)
    right, spared = 0, 0
    for command in all_commands():
        for line in [[], *(random_line(chance, command) for _ in range(40))]:
            expected = by_argparse(command, line)
            with suppress(Misuse):
                args = commands.plain_arguments(command, line)
                assert args is None or vars(args) == vars(expected), (command.name, line)
                spared += args is not None
            right += expected is not None
    assert spared > 0.6 * right > 100
    capfd.readouterr()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("spwan x", "spawn"), ("satus", "status"), ("repots", "reports"), ("task strat", "task start"),
     ("work lst", "work list"), ("helpp", "help")],
)  # fmt: skip
def test_a_mistyped_command_gets_a_suggestion(
    root: FakeRoot, run: Run, typed: str, meant: str
) -> None:
    status, out, err = run(*typed.split())
    assert (status, out) == (2, "")
    assert err.startswith("ctx: unknown command ") and err.endswith(f'; did you mean "{meant}"?\n')
