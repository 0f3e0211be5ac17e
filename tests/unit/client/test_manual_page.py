"""ctx(1) and the table of commands name the same commands and the same options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from client.commands import CHAPTERS, OTHERWISE
from client.declaring import Command
from tests.unit.client.fakes import all_commands

PAGE = Path(__file__).parents[3] / "man" / "ctx.1"
COMMANDS = {command.name: command for command in all_commands()}
#: of the line before any command
GLOBAL = {"--root", "-h", "--help", "--version"}
#: explained once, for all commands that list something
COMMON = {"--color"}


@dataclass
class Item:
    """What the page says of one command, or of several that it explains together."""

    #: what is said of all commands of the subsection
    shared: set[str]
    heads: list[str] = field(default_factory=list)
    #: options in a list of its own, and those that its text speaks of
    listed: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)

    @property
    def commands(self) -> list[str]:
        return [name_in(head) for head in self.heads]

    @property
    def documented(self) -> set[str]:
        heads = set().union(*map(flags_in, self.heads))
        # "run" takes what configures an agent, and refers to "spawn"
        more = item_of("spawn").listed if set(self.commands) == {"run"} else set()
        return heads | self.listed | self.shared | more | COMMON


def flags_in(line: str) -> set[str]:
    """The options in a line of mdoc(7): `Fl a | -all` and `Fl h , Fl -help` are two each."""
    found = re.findall(r"\bFl (-?[a-z]+(?:-[a-z]+)*(?: \| -[a-z]+)*)", line)
    return {f"-{flag}" for several in found for flag in several.split(" | ")}


def name_in(head: str) -> str:
    words = head.removeprefix(".It Cm ").split()
    pair = " ".join(words[:2])
    if pair in COMMANDS or words[0] in COMMANDS:
        return pair if pair in COMMANDS else words[0]
    return f"{words[0]} {OTHERWISE[words[0]]}"


def items() -> Iterator[Item]:
    shared: set[str] = set()
    depth, item, in_head = 0, None, False
    for line in PAGE.read_text().splitlines():
        if line.startswith((".Ss ", ".Sh ")):
            shared = set()
        depth += line.startswith(".Bl") - line.startswith(".El")
        if line.startswith(".It Cm ") and depth == 1:
            if item is None or not in_head:
                item = Item(shared)
                yield item
            item.heads.append(line)
            in_head = True
        elif depth == 0:
            item, shared = None, shared | flags_in(line)
        elif item is not None:
            in_head = False
            if line.startswith(".It"):
                item.listed |= flags_in(line)
            item.named |= flags_in(line)


def item_of(command: str) -> Item:
    return next(item for item in ITEMS if command in item.commands)


def options_of(command: Command) -> set[str]:
    return {flag for flags, _ in command.arguments for flag in flags if flag.startswith("-")}


ITEMS = list(items())


def test_the_page_begins_with_the_chapters_of_help() -> None:
    """Each names its commands, in the subsections that have these commands, in that order."""
    page = PAGE.read_text()
    overview = page.partition(".Ss Overview\n")[2].partition("\n.Ss ")[0]
    named = {}
    for part in overview.split("\n.It Sx ")[1:]:
        heading, _, text = part.partition("\n")
        lines = re.findall(r"^\.Cm (.*) \.$", text, re.M)
        named[heading] = [word for line in lines for word in line.split(" , ")]
    assert [*named] == re.findall(r"^\.Ss (.*)$", page, re.M)[1 : len(named) + 1] == [*CHAPTERS]
    for heading, words in CHAPTERS.items():
        assert sorted(named[heading]) == sorted(words), heading
        section = re.split(r"^\.S[hs] ", page.partition(f".Ss {heading}\n")[2], flags=re.M)[0]
        heads = {line.split()[2] for line in section.splitlines() if line.startswith(".It Cm ")}
        assert {*words} <= heads, heading


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_page(name: str) -> None:
    assert item_of(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_page(name: str) -> None:
    assert options_of(COMMANDS[name]) <= item_of(name).documented


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.commands[0])
def test_every_option_in_the_page_is_one(item: Item) -> None:
    for head in item.heads:
        assert flags_in(head) <= options_of(COMMANDS[name_in(head)])
    options = set().union(*(options_of(COMMANDS[name]) for name in item.commands))
    assert item.listed <= options
    assert item.named <= options | GLOBAL | COMMON


def test_no_other_option_is_anywhere_in_the_page() -> None:
    known = GLOBAL.union(*map(options_of, COMMANDS.values()))
    assert flags_in(PAGE.read_text()) <= known
