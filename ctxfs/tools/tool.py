"""A tool: a row that is called with one JSON object and answers with one.

The handler of a tool walks the nodes as its caller (``ctxfs.tools.paths``): it does what the files
would do, or combines several steps on a plane into one change. Sockets get one function that calls
tools by name, because ``runtime`` does not know them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cached_property
from itertools import count as count_up
from typing import Any, Final, Generic, TypeVar

from ctxfs.tools.paths import Paths
from ctxfs.tools.schemas import Schema, flag, shape, text
from ctxfs.tree.base import Base
from ctxfs.tree.nodes import Call, Node
from runtime.agents.parts import Agents
from runtime.caller import Caller
from runtime.errors import CtxError, MalformedError, QuotaError, WrongStateError
from runtime.records.change import Answer, Change
from runtime.records.items import Item
from runtime.records.model import Agent
from runtime.texts.names import dump_json, quote

_O = TypeVar("_O")


class Concerns(Enum):
    """Whom a call is about, and so what ``agent_id`` is to an operator."""

    #: the calling agent; operators name it
    CALLER = auto()
    #: the calling agent, as the parent of another; operators may name one
    PARENT = auto()
    #: the agent that the input names, if any
    OTHERS = auto()


class Does(Flag):
    """The kinds of effect that a call may have, for who decides whether to make it, or to make it
    again."""

    #: nothing more than to add
    ADDS = 0
    #: nothing: it only looks
    READS = auto()
    #: end, overwrite or remove something
    DESTROYS = auto()
    #: the same again has no further effect
    REPEATS = auto()
    #: reach what is outside of the agents: a program may do anything
    REACHES = auto()
    #: make room: it is not refused for want of that
    FREES = auto()


#: says what a call answers; None while that is not decided
Make = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Request:
    """One call. ``subject`` is the agent that it concerns; not of tools that concern others.

    ``answer`` is kept for a call with an id.
    """

    base: Base
    root: Node
    caller: Caller
    subject: Agent | None
    input: dict[str, Any]
    answer: Answer | None = None

    @property
    def agents(self) -> Agents:
        return self.base.agents

    @property
    def agent(self) -> Agent:
        """The subject of a call that has one."""
        assert self.subject is not None
        return self.subject

    @property
    def live_agent(self) -> Agent:
        """The subject of the call, if its planes can be changed; ``WrongStateError``."""
        agent = self.agent
        if not agent.live:
            raise WrongStateError(f"the agent {quote(agent.name)} is {agent.status}")
        return agent

    @contextmanager
    def changing(self, make: Make) -> Iterator[Change]:
        """A change of the caller's, committed once all of it is said, with what ``make`` says
        then that the call answers."""
        journal = self.agents.journal
        with journal.acting(self.caller), self.deciding(make), journal.changing() as change:
            yield change

    def deciding(self, make: Make) -> AbstractContextManager[None]:
        """The call is decided by what is changed meanwhile. Not to be awaited in."""
        if self.answer is None:
            return nullcontext()
        self.answer.make = make
        return self.agents.journal.answering(self.answer)

    async def start(
        self,
        path: str,
        files: Iterable[tuple[str, str, str]],
        undo: Callable[[], object],
        make: Make,
        meanwhile: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Any]:
        """Writes the files of what was just made, each for a field of the input, and says start,
        ``meanwhile`` something else; if any of it is refused, it is undone."""
        try:
            for field, file, text in files:
                with about(field):
                    await self.paths.write(f"{path}/{file}", text)
            with meanwhile or nullcontext():
                await self.paths.say(f"{path}/ctl", "start", self.deciding(make))
        except BaseException:
            undo()
            raise
        return done(make)

    async def end(self, ctl: str, make: Make) -> dict[str, Any]:
        """Says stop to a ``ctl``, or kill if the input wants that."""
        verb = "kill" if self.input.get("kill") else "stop"
        await self.paths.say(ctl, verb, self.deciding(make))
        return done(make)

    def remove(self, where: str, name: str, make: Make) -> dict[str, Any]:
        """As rmdir(2)."""
        with self.deciding(make):
            self.paths.rmdir(where, name)
        return done(make)

    def begin(self) -> None:
        """The call's next step can be in no transaction: it is not done twice."""
        if self.answer is not None:
            self.agents.answers.begin(self.answer)

    @property
    def call(self) -> Call:
        return Call.of(self.base.runtime, self.caller)

    @property
    def paths(self) -> Paths:
        """The files, as the caller reaches them."""
        return Paths(self.root, self.base.disks, self.call)

    def path(self, relative: str) -> str:
        """Where a file is for who calls."""
        return f"{self.base.runtime.places.mount}/{relative}"


_AGENT_ID: Final = {
    Concerns.CALLER: text(
        "the agent that the call concerns; only for operators. A call by an agent concerns itself"
    ),
    Concerns.PARENT: text(
        "the parent, for operators; without it, the new agent is a root agent. "
        "An agent is the parent of what it creates"
    ),
}
Handler = Callable[[Request], Awaitable[dict[str, Any]]]
#: told what is answered, and whether it is cut short, it says what is answered instead
Lingers = Callable[[Request, dict[str, Any], bool], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. ``description`` says to a model when to use it and when another; ``example`` is
    an input, of fields that are ``required`` or ``optional``. ``does`` is what a call may do.
    Of the optional fields, those in ``for_some`` are told only to callers for whom that is true.
    ``waits`` is awaited before ``handler``, for however long it takes; then the caller is looked at
    again. ``lingers`` is awaited after it, with what the call answers: it waits for more to tell
    unless it is cut short, and says what is answered then. It changes nothing that is decided."""

    name: str
    family: str
    concerns: Concerns
    does: Does
    description: str
    example: dict[str, Any]
    required: Mapping[str, Schema]
    optional: Mapping[str, Schema]
    output_schema: Schema
    handler: Handler
    for_some: Mapping[str, Callable[[Base, Caller], bool]]
    waits: Callable[[Request], Awaitable[None]] | None
    lingers: Lingers | None

    @cached_property
    def schema(self) -> Schema:
        """The schema of what goes in."""
        added = {"agent_id": _AGENT_ID[self.concerns]} if self.concerns in _AGENT_ID else {}
        return shape(self.required, {**self.optional, **added})

    def schema_for(self, base: Base, caller: Caller) -> Schema:
        """The schema of what goes in, as far as it concerns a caller."""
        hidden = {name for name, whether in self.for_some.items() if not whether(base, caller)}
        if not hidden:
            return self.schema
        shown = {k: v for k, v in self.schema["properties"].items() if k not in hidden}
        return {**self.schema, "properties": shown}

    @property
    def described(self) -> str:
        """All that a model is told of it, beside the schemas."""
        return f"{self.description} Example: {dump_json(self.example)}"


#: all that were declared, by name
DECLARED: Final[dict[str, Tool]] = {}


def tool(
    name: str,
    *,
    family: str = "core",
    concerns: Concerns = Concerns.CALLER,
    does: Does,
    example: dict[str, Any],
    required: Mapping[str, Schema] | None = None,
    optional: Mapping[str, Schema] | None = None,
    output: Schema,
    waits: Callable[[Request], Awaitable[None]] | None = None,
    lingers: Lingers | None = None,
    for_some: Mapping[str, Callable[[Base, Caller], bool]] | None = None,
) -> Callable[[Handler], Handler]:
    """Declares a tool at its handler, whose docstring is the description for a model."""

    def declare(handler: Handler) -> Handler:
        DECLARED[name] = Tool(
            name=name, family=family, concerns=concerns, does=does, example=example,
            required=required or {}, optional=optional or {}, output_schema=output, waits=waits,
            lingers=lingers, for_some=for_some or {},
            description=" ".join((handler.__doc__ or "").split()), handler=handler,
        )  # fmt: skip
        return handler

    return declare


# answers

#: the schema of a value, and how it is found; without that, it is the attribute of that name
Field = Schema | tuple[Schema, Callable[[Request, _O], Any]]


class View(Generic[_O]):
    """An object as tools show it: what is answered and its schema are said once for each key. An
    ``optional`` one is left out where there is nothing."""

    def __init__(
        self, required: Mapping[str, Field[_O]], optional: Mapping[str, Field[_O]] | None = None
    ) -> None:
        self._finds: dict[str, Callable[[Request, _O], Any]] = {}
        #: those that are always there, for a view of more
        self.fields = required
        #: the schemas of these, and of the others
        self.required = {key: self._declared(key, field) for key, field in required.items()}
        self.optional = {key: self._declared(key, field) for key, field in (optional or {}).items()}
        self.schema = shape(self.required, self.optional)

    def _declared(self, key: str, field: Field[_O]) -> Schema:
        schema, find = field if isinstance(field, tuple) else (field, None)
        self._finds[key] = find or (lambda request, obj: getattr(obj, key))
        return schema

    def of(self, request: Request, obj: _O) -> dict[str, Any]:
        shown = ((key, find(request, obj)) for key, find in self._finds.items())
        return {key: value for key, value in shown if value or key in self.required}


#: of what wakes the agent when it is over
WAKES: Final = {
    "wakes": flag("false if the agent is of mode once: nothing wakes it, it has to look itself")
}


def waking(request: Request, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of what wakes the agent later; it says so if nothing wakes this one."""
    agent = request.subject
    if agent is None or agent.how.takes_messages:
        return answer
    return {**answer, "wakes": False}


@contextmanager
def about(field: str) -> Iterator[None]:
    """Has a refusal inside name this field of the input, rather than a state."""
    try:
        yield
    except (WrongStateError, QuotaError):
        raise
    except CtxError as error:
        raise type(error)(f"{field}: {error.sentence}") from None


def done(make: Make) -> dict[str, Any]:
    """The answer of a call that is decided."""
    answer = make()
    assert answer is not None
    return answer


def lines(value: str) -> str:
    """A text as a file has it: ended by a newline, unless it is empty."""
    return value if not value.strip() or value.endswith("\n") else value + "\n"


def first_free(stem: str, there: Iterable[Item]) -> str:
    """``STEM-1``, ``STEM-2``, …: the first that none of these has as its name."""
    taken = {item.name for item in there}
    return next(name for n in count_up(1) if (name := f"{stem}-{n}") not in taken)


def wanted(field: str, given: dict[str, Any], why: str) -> str:
    """A text that this call cannot do without; ``MalformedError``."""
    value = given.get(field)
    if not isinstance(value, str) or not value.strip():
        raise MalformedError(f"{field}: {why}")
    return value
