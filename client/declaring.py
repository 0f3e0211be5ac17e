"""The declarations of commands: a function, what it is called, its arguments and what it says."""

from __future__ import annotations

from types import SimpleNamespace

from client.root import Root
from client.types import Any, Callable, Sequence

Argument = tuple[tuple[str, ...], dict[str, Any]]
Handler = Callable[[Root, "Arguments"], int]


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
