"""Completion: what could come next on a command line, by the hidden command `__complete` of
completions.

The shells' own files (contrib/completion) only ask for this and show it, so they need not change
when a command does.
"""

from __future__ import annotations

import os

from client.commands import GROUPS, OTHERWISE, SUBJECTS, commands_of, find_command, parse_options
from client.declaring import Argument, Arguments, Command, command, operand
from client.exits import Failure
from client.files import first_line
from client.loop import parse_object
from client.output import STDOUT, escape
from client.root import Root, agent, default_root, own_agent, readable
from client.types import Iterable, Iterator, Sequence
from client.words import AGENT_FILES

#: a word, and what it means
Candidate = tuple[str, str]


#: what a shell completes by itself, said in place of words
FILES, DIRECTORIES, PROGRAMS = ":files", ":directories", ":programs"
#: what may come instead of a command, or before it
OPTIONS = (
    ("--root", "where ctxfs is mounted"),
    ("--help", "show the commands"),
    ("--version", "show the version of ctx"),
)
#: in words that are offered: agents name files, and shells obey other characters
HARMLESS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-,@%=/:")
#: the directories of an agent that the objects of these arguments are in
PLACES = {"TASK": "task", "ID": "work", "WAIT": "waiting"}


def takes_value(argument: Argument) -> bool:
    """Return whether a value follows an option."""
    return str(argument[1].get("action", "append")) == "append" and "const" not in argument[1]


class Line:
    """The words of a command line after the command, up to the one that is completed."""

    def __init__(self, root: Root, command: Command, words: Sequence[str]) -> None:
        self.root = root
        self.command = command
        self.options = {
            flag: argument
            for argument in command.arguments
            for flag in argument[0]
            if flag.startswith("-")
        }
        self.positional = [row for row in command.arguments if not row[0][0].startswith("-")]
        self.values: dict[str, str] = {}  # of options, by their longest names
        self.given: list[str] = []  # what is no option
        self.awaited: Argument | None = None  # the option that the next word is a value of
        self.rest: int | None = None  # how many words there are after --
        for word in words:
            self.take(word)

    def take(self, word: str) -> None:
        """Take note of a word before the completed one."""
        if self.rest is not None:
            self.rest += 1
        elif self.awaited is not None:
            self.values[self.awaited[0][-1]] = word
            self.awaited = None
        elif word == "--":
            self.rest = 0
        elif word.startswith("-"):
            flag, equals, value = word.partition("=")
            option = self.options.get(flag)
            if option and takes_value(option):
                if equals:
                    self.values[option[0][-1]] = value
                else:
                    self.awaited = option
        else:
            self.given.append(word)

    def candidates(self, current: str) -> Iterator[Candidate]:
        """Yield what the current word could be."""
        if self.rest is not None and self.command.rest in ("program", "shell"):
            yield (FILES if self.rest else PROGRAMS), ""
        elif self.awaited is not None:
            yield from self.of_argument(self.awaited, current)
        elif self.rest is None and current.startswith("-"):
            flag, equals, value = current.partition("=")
            if equals and flag in self.options:
                for word, meaning in self.of_argument(self.options[flag], value):
                    yield (word if word.startswith(":") else f"{flag}={word}"), meaning
            for flag, (_, options) in self.options.items():
                yield flag, str(options.get("help", ""))
            yield "--help", "show the arguments"
        elif self.positional:
            number = min(len(self.given), len(self.positional) - 1)
            argument = self.positional[number]
            if len(self.given) <= number or argument[1].get("nargs") in ("*", "+"):
                yield from self.of_argument(argument, current)

    def of_argument(self, argument: Argument, current: str) -> Iterator[Candidate]:
        """Yield the values that an argument could have."""
        words = argument[1].get("choices") or argument[1].get("words")
        kind = str(argument[1].get("metavar", ""))
        if words:
            yield from ((word, "") for word in words)
        elif kind in ("NAME", "P"):
            yield from self.agents()
        elif kind in PLACES:
            owner = self.values.get("--agent") or own_agent(self.root)
            if owner:
                for name in self.root.listed(agent(owner, PLACES[kind])):
                    status = agent(owner, f"{PLACES[kind]}/{name}/status")
                    yield name, first_line(self.root.join(status))
        elif kind in ("ASK", "ANSWER"):
            from client.asks import named_ask, open_asks, path_of

            if kind == "ASK":
                for row in open_asks(self.root):
                    yield path_of(row), row["question"]
            elif (ask := named_ask(self.root, self.given[0])) is not None:
                yield from (option.partition(" ")[::2] for option in ask["options"])
                yield from ((f"{name}=", "") for name in (ask["form"] or {}).get("properties", ()))
        elif kind == "TOOL":
            yield from ((name, "") for name in self.root.names("tool"))
        elif kind == "FILE" or kind.startswith("FILE="):
            yield from self.files(kind, current)
        elif kind == "RECIPE":
            from client.recipes import places

            yield from places().items()
            yield FILES, ""
        elif kind == "NODE":
            nodes = readable(lambda: self.root.read("nodes"), b"")
            rows = filter(None, map(parse_object, nodes.splitlines()))
            yield from ((row["name"], row["state"]) for row in rows)
        elif kind == "RUN" and self.given:
            yield self.root.value(agent(self.given[0], "run")), "the current run"
        elif kind == "SESSION" and self.given:
            session = agent(self.given[0], "session")
            target = os.path.dirname(os.path.realpath(self.root.join(session)))
            yield from ((name, "") for name in self.root.listed(target))
        elif kind == "DIR":
            yield DIRECTORIES, ""
        elif kind == "TOPIC":
            from client.help import TOPICS

            yield from commands(self.given)
            if not self.given:
                yield from ((topic, about) for topic, (about, _) in TOPICS.items())
        elif kind == "SRC:TARGET:MODE":
            yield FILES, ""

    def files(self, kind: str, current: str) -> Iterator[Candidate]:
        """Yield files of the named agent, or those that set one up."""
        assigned = "=" * ("=" in kind)
        if not self.given or self.command.name in ("new", "spawn", "run"):
            yield from ((f"{file}=", "") for file in AGENT_FILES)
            return
        owner = agent(self.given[0])
        below = current.rpartition("/")[0]
        directory = f"{owner}/{below}" if below else owner
        for name in self.root.listed(directory):
            path = f"{below}/{name}" if below else name
            if os.path.isdir(self.root.join(f"{directory}/{name}")):
                yield f"{path}/", ""
            else:
                yield path + assigned, ""

    def agents(self) -> Iterator[Candidate]:
        """Yield the agents that the caller may list."""
        from client.ps import listed

        for rows in listed(self.root):
            for row in rows:
                yield row["name"], row["status"]


def commands(words: Sequence[str]) -> Iterator[Candidate]:
    """Yield the commands that could follow the words of a command line."""
    if not words:
        for word in SUBJECTS:
            if word in GROUPS:
                yield word, GROUPS[word]
            elif not word.startswith("_"):
                yield from ((word, row.summary) for row in commands_of(word).values())
    elif words[0] in GROUPS and len(words) == 1:
        for second, row in commands_of(words[0]).items():
            yield second, row.summary


def candidates(words: list[str]) -> Iterator[Candidate]:
    """Yield what the last of the words after `ctx` could be."""
    *words, current = words or [""]
    if words[-1:] == ["--root"]:
        yield DIRECTORIES, ""
        return
    named, (*words, _) = parse_options([*words, ""])
    if not words:
        yield from commands(words)
        yield from OPTIONS
        return
    if words[0] in GROUPS and len(words) == 1 and not current.startswith("-"):
        yield from commands(words)
        if words[0] not in OTHERWISE:
            return
        command, rest = commands_of(words[0])[OTHERWISE[words[0]]], words[1:]
    else:
        command, rest = find_command(words)
    yield from Line(Root(named or default_root()), command, rest).candidates(current)


def offered(found: Iterable[Candidate], current: str) -> Iterator[str]:
    """Yield the lines for a shell: what begins with the current word, and shells do not obey."""
    for word, meaning in dict(found).items():
        if word in (FILES, DIRECTORIES, PROGRAMS) or (
            word and word.startswith(current) and HARMLESS.issuperset(word)
        ):
            yield f"{word}\t{escape(meaning.partition(chr(10))[0])}\n"


@command("__complete", operand("words", "[WORD...]", ""), rest="words")
def do_complete(root: Root, args: Arguments) -> None:
    """Print what could come next on a command line."""
    import contextlib

    found: list[Candidate] = []
    with contextlib.suppress(Failure):
        for candidate in candidates(args.words):
            found.append(candidate)  # those before a failure count
    STDOUT.text("".join(offered(found, (args.words or [""])[-1])))
