"""Arguments that several commands share, and what their values mean."""

from __future__ import annotations

from client.declaring import flag, operand, option
from client.exits import USAGE, Failure
from client.output import COLOR_WHEN
from client.types import Sequence
from client.words import SECONDS

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


NAME = operand("name", "NAME", "the agent")
NAMES = operand("names", "NAME...", "the agents")
OWN = operand("name", "[NAME]", "default: the agent you are in")
#: the agent that has the tasks, work items or waits of the command
OF = option("-a", "--agent", "NAME", "default: the agent you are in")
ENDED = flag("--all", "also list what has ended")
JSON = flag("--json", "print JSON")
COLOR = option(
    "--color",
    "WHEN",
    f"{one_of(COLOR_WHEN)} (default: auto, on a terminal, without NO_COLOR)",
    choices=COLOR_WHEN,
)
#: what every command that lists something takes
LISTING = (JSON, COLOR)
FOLLOW = flag("-f", "--follow", "continue until the agent is dead")
WAIT = flag("--wait", "wait until all have ended")
TIMEOUT = option("-t", "--timeout", "DURATION", "fail after this time, such as 30s", type=duration)
VALUES = operand("values", "FILE=VALUE...", "also: FILE VALUE, or FILE -")
PARENT = option("--parent", "P", "make it a child of the agent P")
CWD = option("--cwd", "DIR", "its working directory")
ENV = option("--env", "K=V...", "set a variable of its environment")
