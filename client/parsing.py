"""From a command line to a command and its arguments."""

from __future__ import annotations

import sys

from client.commands import find_command
from client.declaring import Arguments, Command
from client.exits import USAGE, Failure
from client.output import STDERR, STDOUT
from client.types import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

#: names for the words after -- in usage lines
REST = {"program": "-- PROGRAM [ARG...]", "shell": "-- COMMAND..."}


def parser_for(command: Command) -> argparse.ArgumentParser:
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


def arguments_without_words(command: Command) -> Arguments | None:
    """Return the arguments of a command with no words after it; None where argparse has to look.

    Importing argparse takes a tenth of the start of this program.
    """
    args = Arguments()
    for flags, options in command.arguments:
        default = options.get("default")
        if isinstance(default, str) or options.get("required") or "dest" in options:
            return None
        if options.get("action") == "store_true":
            default = False
        elif not flags[0].startswith("-"):
            if options.get("nargs") not in ("?", "*"):
                return None
            default = [] if options["nargs"] == "*" else default
        setattr(args, flags[-1].lstrip("-").replace("-", "_"), default)
    return args


def parse_options(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the value of --root, else nothing, and the words from the command on."""
    words = list(argv)
    named = ""
    while words and words[0].startswith("--root"):
        option, equals, named = words.pop(0).partition("=")
        if option != "--root" or not (equals or words):
            raise Failure("--root needs a directory: ctx --root DIR COMMAND", USAGE)
        named = named if equals else words.pop(0)
    if not words:
        raise Failure("no command given; see: ctx help", USAGE)
    return named, words


def parse_command(words: list[str]) -> tuple[Command, Arguments]:
    """Return the command that `words` begin with, and its arguments."""
    command, words = find_command(words)
    rest: list[str] = []
    if command.rest and "--" in words:  # argparse would parse the words after it
        split = words.index("--")
        words, rest = words[:split], words[split + 1 :]
    args = arguments_without_words(command) if not words else None
    if args is None:
        args = parser_for(command).parse_intermixed_args(words, Arguments())
    first, _, second = command.name.partition(" ")
    args.group, args.command = (first, second) if second else ("", first)
    if getattr(args, "color", None):
        STDOUT.color = STDERR.color = args.color
    if command.rest:
        setattr(args, command.rest, getattr(args, command.rest, []) + rest)
    return command, args
