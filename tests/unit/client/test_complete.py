"""What could come next on a command line."""

from __future__ import annotations

import pytest

from client.commands import GROUPS
from client.declaring import Command
from tests.unit.client.fakes import FakeRoot, Run, all_commands


def offered(run: Run, *words: str) -> list[str]:
    status, out, err = run("__complete", "--", *words)
    assert (status, err) == (0, "")
    return [line.partition("\t")[0] for line in out.splitlines()]


def test_every_command_is_offered(root: FakeRoot, run: Run) -> None:
    names = {command.name for command in all_commands()}
    first = {name for name in offered(run, "") if not name.startswith("-")}
    assert first == {name.partition(" ")[0] for name in names}
    for group in GROUPS:
        second = {name.partition(" ")[2] for name in names if name.startswith(f"{group} ")}
        assert second <= {*offered(run, group, "")}


@pytest.mark.parametrize("command", [*all_commands()], ids=lambda command: command.name)
def test_every_option_is_offered(root: FakeRoot, run: Run, command: Command) -> None:
    flags = {flag for flags, _ in command.arguments for flag in flags if flag.startswith("-")}
    assert {*offered(run, *command.name.split(), "-")} == flags | {"--help"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stop", "c"], ["coder", "critic"]),
        (["stop", "coder", "cr"], ["critic"]),
        (["get", "coder", "sta"], ["status"]),
        (["get", "coder", "status", ""], []),
        (["send", "--priority", "n"], ["next", "normal"]),
        (["send", "coder", "c"], []),
        (["spawn", "--mode=", "x"], []),
        (["spawn", "--mode=r"], ["--mode=resident"]),
        (["spawn", "x", "--", "--mo"], [":programs"]),
        (["spawn", "x", "--", "ls", ""], [":files"]),
        (["task", "start", "-a", "coder", "--", ""], [":programs"]),
        (["--root"], ["--root"]),
        (["--v"], ["--version"]),
        (["--root", ""], [":directories"]),
        (["abort", "--run", ""], []),
        (["set", "coder", "limits", ""], ["mode="]),
        (["spawn", "--node", ""], ["gpu1", "n2"]),
    ],
)
def test_values(root: FakeRoot, run: Run, words: list[str], expected: list[str]) -> None:
    root.agent("coder", status="busy")
    root.agent("critic", status="new")
    nodes = '{"name":"n2","state":"up"}\n{"name":"gpu1","state":"idle"}\n'
    (root.path / "nodes").write_text(nodes)
    found = offered(run, *words)
    if expected == ["mode="]:
        assert {"mode=", "limits=", "model="} <= {*found}
    else:
        assert sorted(found) == expected
