"""Commands as rows, and the arguments that several of them take."""

from __future__ import annotations

from client.words import SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from client.root import Root

    Arguments = argparse.Namespace
    Argument = tuple[tuple[str, ...], dict[str, Any]]


def arg(*flags: str, **options: Any) -> Argument:
    """Return one argument of a command, in the terms of argparse."""
    return flags, options


class Command:
    """One row of the table of commands; a name of two words belongs to a group."""

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
        self.rest = rest  # the argument that takes the words after --


def duration(text: str) -> float:
    """Return the seconds of a duration such as 500ms, 30s, 10m, 2h or 1d."""
    for unit, seconds in SECONDS.items():
        number = text.removesuffix(unit)
        if number != text and number.isascii() and number.isdigit():
            return int(number) * seconds
    raise ValueError(text)


def line_count(text: str) -> int:
    """Return a number of lines."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def one_of(words: Sequence[str]) -> str:
    """Return some words as help names them: the last one after an "or"."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


NAME = arg("name", metavar="NAME", help="the agent")
NAMES = arg("names", metavar="NAME", nargs="+", help="the agents")
OWN = arg("name", metavar="NAME", nargs="?", help="default: the agent you are in")
#: the agent whose tasks, work items or waits a command is about
OF = arg("-a", "--agent", metavar="NAME", help="default: the agent you are in")
ENDED = arg("--all", action="store_true", help="list those that are over, too")
JSON = arg("--json", action="store_true", help="print JSON")
FOLLOW = arg("-f", "--follow", action="store_true", help="go on until the agent is dead")
WAIT = arg("--wait", action="store_true", help="return when they have ended")
TIMEOUT = arg(
    "-t", "--timeout", metavar="DURATION", type=duration, help="wait no longer, such as 30s"
)
VALUES = arg("values", metavar="FILE=VALUE", nargs="+", help="or FILE VALUE, or FILE -")
PARENT = arg("--parent", metavar="P", help="make it a child of the agent P")
CWD = arg("--cwd", metavar="DIR", help="its working directory")
ENV = arg(
    "--env", metavar="K=V", action="append", default=[], help="set a variable of its environment"
)
