"""The declarations of commands: a function, what it is called, its arguments and what it says."""

from __future__ import annotations

from types import SimpleNamespace

from client.exits import Misuse
from client.output import COLOR_WHEN
from client.root import Root
from client.types import Any, Callable, Sequence
from client.words import SECONDS

Argument = tuple[tuple[str, ...], dict[str, Any]]
#: carries a command out, and returns the exit status; None stands for 0
Handler = Callable[[Root, "Arguments"], int | None]


class Arguments(SimpleNamespace):
    """The values that a command line gives to the arguments of its command, by name."""


def arg(*flags: str, **options: Any) -> Argument:
    """Return one argument of a command, in the terms of argparse.

    Its value may be one of `words`, which are offered, or another one, unlike with `choices`.
    """
    return flags, options


def operand(name: str, form: str, help: str, **more: Any) -> Argument:
    """Return an argument that is no option: WORD, [WORD], WORD... or [WORD...], as in help."""
    several, optional = "..." in form, form.startswith("[")
    if several or optional:
        more["nargs"] = "?" if not several else "*" if optional else "+"
    return arg(name, metavar=form.strip("[.]"), help=help, **more)


def option(*words: str, **more: Any) -> Argument:
    """Return an option with a value, from its flags, WORD or (if it may be repeated) WORD..., and
    its help."""
    *flags, form, help = words
    if form.endswith("..."):
        more = {"action": "append", "default": [], **more}
    return arg(*flags, metavar=form.rstrip("."), help=help, **more)


def flag(*words: str) -> Argument:
    """Return an option without a value, from its flags and its help."""
    *flags, help = words
    return arg(*flags, action="store_true", help=help)


class Command:
    """A command; a name of two words belongs to a group.

    Its text begins with a sentence, which is the summary; notes may follow.
    """

    def __init__(
        self, handler: Handler, name: str, text: str, arguments: Sequence[Argument], rest: str
    ) -> None:
        self.handler = handler
        self.name = name
        self.description, _, notes = text.partition("\n\n")
        self.summary = self.description[0].lower() + self.description[1:].removesuffix(".")
        self.notes = " ".join(notes.split())
        self.arguments = arguments
        self.rest = rest  # the argument that receives the words after --


#: the commands of the modules that are loaded, by the first and the second word of their names
DECLARED: dict[str, dict[str, Command]] = {}


def declare(handler: Handler, name: str, text: str, *arguments: Argument, rest: str = "") -> None:
    """Declare a command."""
    first, _, second = name.partition(" ")
    DECLARED.setdefault(first, {})[second] = Command(handler, name, text, arguments, rest)


def command(name: str, *arguments: Argument, rest: str = "") -> Callable[[Handler], Handler]:
    """Declare a function as the handler of a command, whose text is its docstring."""

    def declared(handler: Handler) -> Handler:
        declare(handler, name, handler.__doc__ or "", *arguments, rest=rest)
        return handler

    return declared


# arguments that several commands share, and what their values mean


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
    raise Misuse(f'"{text}" is not a duration such as 500ms, 30s, 10m, 2h or 1d')


def line_count(text: str) -> int:
    """Return a number of lines."""
    if not is_number(text):
        raise Misuse(f'"{text}" is not a number of lines')
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
