"""The class of commands, and arguments that several commands share."""

from __future__ import annotations

from client.exits import USAGE, Failure
from client.output import COLOR_WHEN
from client.words import SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from types import SimpleNamespace
    from typing import Any

    from client.root import Root

    Arguments = argparse.Namespace | SimpleNamespace
    Argument = tuple[tuple[str, ...], dict[str, Any]]


def arg(*flags: str, **options: Any) -> Argument:
    """Return one argument of a command, in the terms of argparse."""
    return flags, options


class Command:
    """A row of the table of commands; a name of two words belongs to a group."""

    def __init__(
        self,
        name: str,
        summary: str,
        arguments: Sequence[Argument],
        handler: Callable[[Root, Arguments], int],
        notes: str = "",
        rest: str = "",
    ) -> None:
        self.name = name
        self.summary = summary
        self.arguments = arguments
        self.handler = handler
        self.notes = notes
        self.rest = rest  # the argument that receives the words after --


DIGITS = 9  # of a number, as in the durations of the daemon


def is_number(text: str) -> bool:
    """Return whether a word is a number that can be computed with."""
    return text.isascii() and text.isdigit() and len(text) <= DIGITS


def duration(text: str) -> float:
    """Return the seconds of a duration such as 500ms, 30s, 10m, 2h or 1d."""
    for unit, seconds in SECONDS.items():
        number = text.removesuffix(unit)
        if number != text and is_number(number):
            return int(number) * seconds
    raise Failure(f'"{text}" is not a duration such as 500ms, 30s, 10m, 2h or 1d', USAGE)


def line_count(text: str) -> int:
    """Return a number of lines."""
    if not is_number(text):
        raise Failure(f'"{text}" is not a number of lines', USAGE)
    return int(text)


def one_of(words: Sequence[str]) -> str:
    """Return words as a list in help texts, with "or" before the last."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


NAME = arg("name", metavar="NAME", help="the agent")
NAMES = arg("names", metavar="NAME", nargs="+", help="the agents")
OWN = arg("name", metavar="NAME", nargs="?", help="default: the agent you are in")
#: the agent that has the tasks, work items or waits of the command
OF = arg("-a", "--agent", metavar="NAME", help="default: the agent you are in")
ENDED = arg("--all", action="store_true", help="also list what has ended")
JSON = arg("--json", action="store_true", help="print JSON")
COLOR = arg(
    "--color",
    metavar="WHEN",
    choices=COLOR_WHEN,
    help=f"{one_of(COLOR_WHEN)} (default: auto, on a terminal, without NO_COLOR)",
)
#: what every command that lists something takes
LISTING = (JSON, COLOR)
FOLLOW = arg("-f", "--follow", action="store_true", help="continue until the agent is dead")
WAIT = arg("--wait", action="store_true", help="wait until all have ended")
TIMEOUT = arg(
    "-t", "--timeout", metavar="DURATION", type=duration, help="fail after this time, such as 30s"
)
VALUES = arg("values", metavar="FILE=VALUE", nargs="+", help="also: FILE VALUE, or FILE -")
PARENT = arg("--parent", metavar="P", help="make it a child of the agent P")
CWD = arg("--cwd", metavar="DIR", help="its working directory")
ENV = arg(
    "--env", metavar="K=V", action="append", default=[], help="set a variable of its environment"
)
