"""The table of commands, and the way from a command line to one and its arguments.

A module is loaded only when one of its commands is used.
"""

from __future__ import annotations

import sys

from client.declaring import DECLARED, Arguments, Command
from client.exits import Failure, Misuse
from client.output import STDERR, STDOUT
from client.types import Any, ArgumentParser, Iterable, Sequence
from client.words import VERBS

#: the module of each command by the first word of its name, by chapter, in the order of help
CHAPTERS = {
    "Looking": {
        **dict.fromkeys(("ps", "tree"), "ps"),
        "top": "drawn",
        "status": "status",
        "get": "agents",
        **dict.fromkeys(("result", "now", "log", "logs"), "log"),
        "events": "events",
        "reports": "histories",
        "timeline": "drawn",
    },
    "Making and changing": {
        **dict.fromkeys(("new", "set"), "agents"),
        "session": "verbs",
        "rm": "agents",
        "prune": "pruning",
        "agents": "recipes",
        "export": "export",
    },
    "Running and ending": {
        **dict.fromkeys(("spawn", "run"), "spawn"),
        **dict.fromkeys((*VERBS, "abort", "wait"), "verbs"),
    },
    "Talking": {
        **dict.fromkeys(("send", "chat"), "messages"),
        "attach": "log",
        "enter": "terminal",
        "queue": "messages",
        **dict.fromkeys(("ask", "asks", "answer"), "asks"),
        **{name: name for name in ("acp", "bridge", "hook")},
    },
    "Tasks, work items and waits": dict.fromkeys(("task", "work", "waits"), "items"),
    "Tools": {"tool": "tools", "mcp": "mcp"},
    "Rights and accounts": {"why": "asking", "audit": "histories", "quota": "asking"},
    "The daemon and help": {
        **dict.fromkeys(("ping", "reexec", "who"), "asking"),
        **dict.fromkeys(("backup", "restore"), "backup"),
        **dict.fromkeys(("nodes", "peer"), "nodes"),
        **{name: name for name in ("doctor", "help")},
    },
}
SUBJECTS = {
    **{word: module for words in CHAPTERS.values() for word, module in words.items()},
    "__complete": "complete",
}


#: words that several commands begin with, and their subjects; the word alone runs `list`
GROUPS = {
    "task": "commands that run inside an agent",
    "work": "what an agent has to do",
    "waits": "what an agent waits for",
    "nodes": "other machines, at which agents may be placed",
    "tool": "programs for models: JSON in, JSON out",
}
#: in a group, the command to run if the second word is not the name of one
OTHERWISE = {"tool": "call"}


def commands_of(word: str) -> dict[str, Command]:
    """Return the commands whose names begin with a word, by the words after it."""
    __import__(f"client.{SUBJECTS[word]}")  # importlib itself is slow to import
    return DECLARED[word]


def meant(word: str, known: Iterable[str], before: str = "") -> str:
    """Return a question about a word that may be mistyped, empty if it is like no known one."""
    import difflib

    like = difflib.get_close_matches(word, known, n=1) if " " not in word else []
    return f'; did you mean "{before}{like[0]}"?' if like else ""


def no_command(name: str) -> Failure:
    """Return the failure of an unknown command."""
    group, _, second = name.partition(" ")
    if group in GROUPS:
        like = meant(second, filter(None, commands_of(group)), f"{group} ")
        return Misuse(f'unknown command "{name}"{like or f"; see: ctx help {group}"}')
    like = meant(name, (word for word in SUBJECTS if not word.startswith("_")))
    return Misuse(f'unknown command "{name}"{like or "; see: ctx help"}')


def find_command(words: list[str]) -> tuple[Command, list[str]]:
    """Return the command at the beginning of `words`, and the words after its name."""
    first, second = words[0], " ".join(words[1:2])
    if first not in SUBJECTS:
        raise no_command(first)
    rows = commands_of(first)
    if first not in GROUPS:
        return rows[""], words[1:]
    if second in rows:
        return rows[second], words[2:]
    if not second or second.startswith("-"):
        return rows["list"], words[1:]
    if first not in OTHERWISE:
        raise no_command(f"{first} {second}")
    return rows[OTHERWISE[first]], words[1:]


# command lines


#: names for the words after -- in usage lines
REST = {"program": "-- PROGRAM [ARG...]", "shell": "-- COMMAND..."}


def parser_for(command: Command) -> ArgumentParser:
    """Return the parser of a command's arguments.

    Only the parser of the given command is made. argparse would make all subparsers first, and
    subparsers do not accept options between arguments, as `send` does.
    """
    import argparse

    class Parser(argparse.ArgumentParser):
        def _print_message(self, message: str, file: object = None) -> None:
            (STDERR if file is sys.stderr else STDOUT).text(message)

    parser = Parser(
        prog=f"ctx {command.name}",
        description=command.description,
        epilog=command.notes,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=90),
    )
    for flags, options in command.arguments:
        own = {name: value for name, value in options.items() if name != "words"}
        parser.add_argument(*flags, **own)
    if command.rest in REST:
        parser.usage = f"{parser.format_usage().partition(': ')[2].rstrip()} {REST[command.rest]}"
    return parser


#: the name of the value of an argument, and what else is declared of it
Declared = tuple[str, dict[str, Any]]


def destination(flags: Sequence[str], options: dict[str, Any]) -> str:
    """Return the name of the value of an argument."""
    return str(options.get("dest") or flags[-1].lstrip("-").replace("-", "_"))


def plain_arguments(command: Command, words: Sequence[str]) -> Arguments | None:
    """Return the arguments that `words` give; None where argparse has to look.

    This knows options by their whole names, and their values as words of their own or after `=`.
    argparse knows the rest, says what is wrong, and takes a third of a start to import.
    """
    args, options, operands = Arguments(), dict[str, Declared](), list[Declared]()
    for flags, more in command.arguments:
        name = destination(flags, more)
        if not flags[0].startswith("-"):
            operands.append((name, more))
        elif more.get("required") or isinstance(more.get("default"), str):
            return None
        else:
            default = more.get("default")
            setattr(args, name, False if more.get("action") == "store_true" else default)
            options |= dict.fromkeys(flags, (name, more))
    plain = []
    left = iter(words)
    for word in left:
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        flag, equals, value = word.partition("=")
        name, more = options.get(flag, ("", {}))
        action = more.get("action", "")
        if action == "store_true" and not equals:
            setattr(args, name, True)
            continue
        value = value if equals else next(left, "--")
        is_flag = value.startswith("-") and value != "-" and not equals
        if is_flag or not name or action not in ("", "append"):
            return None
        if value not in more.get("choices", (value,)):
            return None
        given = more.get("type", str)(value)
        setattr(args, name, [*getattr(args, name), given] if action else given)
    return args if take_operands(args, operands, plain) else None


def with_defaults(command: Command, words: Sequence[str]) -> list[str]:
    """Return words in which options that may have a value, after =, have one: argparse would take
    the next word for it."""
    for flags, more in command.arguments:
        if flags[0].startswith("-") and more.get("nargs") == "?":
            words = [f"{word}={more['const']}" if word in flags else word for word in words]
    return [*words]


def take_operands(args: Arguments, operands: Sequence[Declared], words: Sequence[str]) -> bool:
    """Give words to operands, as many as each takes and the next ones leave; return whether there
    are enough, all may be given, and none is left."""
    kinds = [more.get("nargs", "") for _, more in operands]
    spare = len(words) - sum(kind in ("", "+") for kind in kinds)
    at = 0
    for (name, more), kind in zip(operands, kinds, strict=True):
        optional = max(0, min(spare, 1) if kind == "?" else spare if kind else 0)
        end = at + (kind in ("", "+")) + optional
        taken = list(words[at:end])
        if not set(taken) <= set(more.get("choices", taken)):
            return False
        setattr(args, name, taken if kind in ("*", "+") else taken[0] if taken else None)
        at, spare = end, spare - optional
    return spare == 0


def parse_options(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the value of --root, else nothing, and the words from the command on."""
    words = list(argv)
    named = ""
    while words and words[0].startswith("--root"):
        option, equals, named = words.pop(0).partition("=")
        if option != "--root" or not (equals or words):
            raise Misuse("--root needs a directory: ctx --root DIR COMMAND")
        named = named if equals else words.pop(0)
    if not words:
        raise Misuse("no command given; see: ctx help")
    return named, words


def parse_command(words: list[str]) -> tuple[Command, Arguments]:
    """Return the command that `words` begin with, and its arguments."""
    command, words = find_command(words)
    rest: list[str] = []
    if command.rest and "--" in words:  # argparse would parse the words after it
        split = words.index("--")
        words, rest = words[:split], words[split + 1 :]
    words = with_defaults(command, words)
    args = plain_arguments(command, words)
    if args is None:
        args = parser_for(command).parse_intermixed_args(words, Arguments())
    first, _, second = command.name.partition(" ")
    args.group, args.command = (first, second) if second else ("", first)
    if getattr(args, "color", None):
        STDOUT.color = STDERR.color = args.color
    if command.rest:
        setattr(args, command.rest, getattr(args, command.rest, []) + rest)
    return command, args
