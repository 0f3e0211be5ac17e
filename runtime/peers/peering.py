"""Two daemons over one connection, without input and output.

The *lead* has an agent, the *host* runs it. A *registration* is what both keep of each other; it
outlives connections, of which it has one at a time. On each connection the host speaks first, a
line with the versions that it knows. Then both say hello, the lead first, and go on where they
were:

- **Two streams**, of *operations* (to the host) and of *facts* (to the lead). A message has a
  number, and is kept by the side that sends it until the other side says that it has done it, in
  the transaction in which it was done. So each is done once, in order (``streams``).
- **Bytes**, of files whose length only is said in a message. The side that lacks them asks, and
  says how many it takes. All else goes before them.
- **A lease**, which the host asks for and the lead grants (``runtime.peers.lease``).

A registration is over if the streams do not fit: one side was put back to an earlier state. The
numbers alone would not say so once new messages have old numbers, so each message has a *mark*: a
digest of it and of all before it.

Both sides read what a stranger says. Whatever breaks the rules ends the connection
(``BrokenLinkError``), and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from runtime.errors import CtxError, MalformedError
from runtime.kernel.handover import Descriptors, Handed
from runtime.peers.lease import Grants, Lease
from runtime.peers.streams import MESSAGE_MAX, Stream
from runtime.texts.names import dump_json, parse_json_object
from runtime.texts.said import Said

#: of the protocol, that this program speaks: the least and the greatest
VERSIONS: Final = (1, 3)
#: from which on agents can be spoken to, and more bytes of files come at once
TALKING: Final = 2
_WIDE: Final = 3
#: how a host begins
GREETING: Final = b"ctxfs-peer "
#: bytes of other lines before the greeting: what a login shell prints
_PREAMBLE_MAX: Final = 64 << 10
_LINE_MAX: Final = 192 << 10
#: bytes of a file in one frame, and of all that were asked for on a connection and did not come;
#: the same in earlier versions
PART_MAX: Final = 256 << 10
CREDIT_MAX: Final = 2 << 20
PART_LEAST: Final = 48 << 10
_CREDIT_LEAST: Final = 256 << 10
#: files of which bytes are asked for at once, and answers that the other side does not take
WANTS_MAX: Final = 64
_ANSWERS_MAX: Final = 64
#: characters of a piece of a reply that is still being made
DELTA_MAX: Final = 8 << 10
#: frames that may wait to be sent before another such piece
_DELTAS_MAX: Final = 8

#: the kinds of numbered messages, by who sends them
OPERATIONS: Final = frozenset(
    (*("put", "start", "verb", "limits", "bound", "freeze", "thaw", "usage", "forget"),
     *("message", "text", "cancel", "session"))
)  # fmt: skip
#: facts before which all others hold: they are about messages, which look at what is, and may be
#: long
APART: Final = frozenset(("message", "session"))
FACTS: Final = frozenset(
    (*("state", "event", "report", "refused", "usage", "ended", "dead"),
     *("message", "text", "session"))
)  # fmt: skip


class BrokenLinkError(Exception):
    """The other side broke the rules of the protocol: the connection has to end."""


@contextmanager
def breaking(what: str = "") -> Iterator[None]:
    """Ends the connection for whatever is refused meanwhile."""
    try:
        yield
    except CtxError as error:
        raise BrokenLinkError(what + error.sentence) from None


class SilentLinkError(BrokenLinkError):
    """Nothing came from the other side for as long as it may say nothing."""


# frames


@dataclass(frozen=True, slots=True)
class Message:
    """A numbered one of the other side's, which is to be done, and then ``Peering.did``."""

    number: int
    op: str
    agent: str
    said: Mapping[str, Any]
    line: bytes

    @property
    def fields(self) -> Said:
        return Said(self.said, self.op)


@dataclass(frozen=True, slots=True)
class Hello:
    """The other side says hello: where it is, and all else that it tells of itself."""

    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Messages up to this one are done at the other side, and need not be stored any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Want:
    """The other side lacks bytes of a file, from ``offset``, and takes ``credit`` of them."""

    agent: str
    file: str
    offset: int
    credit: int


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of a file that were asked for; none if there are no more."""

    agent: str
    file: str
    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Over:
    """A lead says that what operations up to this one put there has to end; a host, that it has."""

    upto: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The host has so much of a file that grows."""

    agent: str
    file: str
    length: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the reply to a message, from the character ``at`` on. Nobody keeps it: the whole
    reply comes with the end of the message."""

    agent: str
    message: str
    at: int
    text: str


Event = Hello | Message | Acknowledged | Want | Bytes | Over | Grown | Delta

_NUMBER_MAX: Final = (1 << 63) - 1
_TEXT_MAX: Final = 1024


def _fields(said: Mapping[str, Any], **kinds: type) -> list[Any]:
    """The values of these fields, or ``BrokenLinkError``; numbers are whole, and not negative."""
    values: list[Any] = [said.get(name) for name in kinds]
    for (name, kind), value in zip(kinds.items(), values, strict=True):
        right = value.__class__ is kind
        if not right or not (0 <= value <= _NUMBER_MAX if kind is int else len(value) <= _TEXT_MAX):
            raise BrokenLinkError(f"{said.get('op')!r:.32} without a right {name}")
    return values


class Peering(Handed):
    """One connection, at either side: ``feed`` takes what came, ``outgoing`` gives what goes."""

    HANDED: ClassVar[tuple[str, ...]] = (
        *("_rest", "_looked", "_part", "_control", "_bulk", "_told", "_came", "_said"),
        *("_answers", "_credit", "_owed", "_greeted", "_opened", "_version"),
    )

    #: the messages that the other side may send, and all else that it may say
    _takes: ClassVar[frozenset[str]]
    _also: ClassVar[frozenset[str]]

    def __init__(self) -> None:
        #: what came; of that, where what was not read yet begins, and where a line may end
        self._rest = b""
        self._at = self._looked = 0
        #: of a frame of bytes whose bytes are still to come: agent, file, offset and length
        self._part: Sequence[Any] = ()
        self._control: list[bytes] = []
        self._bulk: list[bytes] = []
        #: what is said of this one; and whether both sides have said hello
        self._stream = Stream()
        self._opened = False
        #: of messages: the last that was sent, that came, and of which it was said that it is done
        self._told = self._came = self._said = 0
        #: answers that were not sent yet
        self._answers = 0
        #: bytes that this side asked for, and that the other side may still take
        self._credit = 0
        #: by agent and file, with a newline between them
        self._owed: Counter[str] = Counter()
        self._greeted = False
        #: that both speak, once that is known
        self._version = 0
        #: has what there is to say be sent at once
        self.push: Callable[[], object] = lambda: None
        #: more of what came is about to be heard: one acknowledgement is for all of that
        self.hears = False

    # what goes

    def outgoing(self, most: int = _LINE_MAX) -> bytes:
        """The next bytes to be sent: as many frames as ``most`` bytes have room for, or one.

        Bytes of files are last, so that all else waits for one frame of them at most.
        """
        found: list[bytes] = []
        size = 0
        while (frame := self._first()) and (not found or size + len(frame) <= most):
            self._went()
            found.append(frame)
            size += len(frame)
        return b"".join(found)

    def _first(self) -> bytes | None:
        """The next frame."""
        if self._control:
            return self._control[0]
        if self._opened:
            stream = self._stream
            kept = stream.after(self._told)
            if stream.got > self._said and (kept or not self.hears):
                self._said = stream.got
                self._say({"op": "ack", "got": self._said})
                return self._control[0]
            if kept:
                return kept.line
        return self._bulk[0] if self._bulk else None

    def _went(self) -> None:
        if self._control:
            self._control.pop(0)
            self._answers = min(self._answers, len(self._control))
        elif self._opened and self._stream.sent > self._told:
            self._told += 1
        else:
            self._bulk.pop(0)

    def want(self, agent: str, file: str, offset: int, credit: int) -> None:
        """Asks for bytes of a file, as many as there is ``credit`` for."""
        self._credit += credit
        assert credit > 0 and self.credit >= 0
        self._say({"op": "want", "agent": agent, "file": file, "offset": offset, "credit": credit})

    def give(self, agent: str, file: str, offset: int, data: bytes | memoryview) -> None:
        """Sends bytes of a file that the other side asked for, as many as it takes."""
        key = f"{agent}\n{file}"
        assert 0 < len(data) <= self.part_max and len(data) <= self._owed[key]
        self._owed[key] -= len(data)
        if not self._owed[key]:
            del self._owed[key]
        said = {"op": "bytes", "agent": agent, "file": file, "offset": offset, "length": len(data)}
        self._bulk.append(b"".join((dump_json(said).encode(), b"\n", data)))

    def give_up(self, agent: str, file: str) -> None:
        """Says that there are no more bytes of a file that the other side asked for."""
        credit = self._owed.pop(f"{agent}\n{file}")
        said = {"op": "bytes", "agent": agent, "file": file, "offset": 0, "length": 0}
        self._bulk.append(dump_json({**said, "credit": credit}).encode() + b"\n")

    @property
    def lacks(self) -> bool:
        """Whether bytes that were asked for are still to come."""
        return bool(self._part or self._credit)

    def at_once(self, message: Message) -> int:
        """With how many like it that come together a message may be done in one transaction."""
        return 1

    @property
    def is_open(self) -> bool:
        """Whether both sides have said hello."""
        return self._opened

    @property
    def part_max(self) -> int:
        """Bytes of a file that one frame may have."""
        return PART_MAX if self._version >= _WIDE else PART_LEAST

    @property
    def credit_max(self) -> int:
        """Bytes that may be asked for and not have come."""
        return CREDIT_MAX if self._version >= _WIDE else _CREDIT_LEAST

    @property
    def credit(self) -> int:
        """Bytes that may still be asked for."""
        return self.credit_max - self._credit

    def _say(self, said: Mapping[str, Any]) -> None:
        self._control.append(dump_json(said).encode() + b"\n")

    def _answer(self, said: Mapping[str, Any]) -> None:
        """Says what the other side can have as many of as it asks for, if it takes them."""
        self._answers += 1
        if self._answers > _ANSWERS_MAX:
            raise BrokenLinkError("it asks, and does not read the answers")
        self._say(said)

    def _go_on(self, stream: Stream, got: int) -> None:
        """Both have said hello: the other side has done messages up to ``got``."""
        stream.forget(got)
        self._stream = stream
        self._opened = True
        self._told = got
        self._came = self._said = stream.got

    def save(self, descriptors: Descriptors, *, again: Hello | None = None) -> dict[str, Any]:
        """``again``: what nobody has answered yet, for the next daemon to read."""
        self._forget_read()
        saved = super().save(descriptors)
        if again is not None:
            saved |= {"greeted": False, "looked": 0}
            saved["rest"] = dump_json(again.said).encode() + b"\n" + self._rest
        return saved

    # what came

    def feed(self, data: bytes, now: float) -> Iterator[Event]:
        """Reads what came, and what came before and was not whole. Bytes of a file are passed on as
        they come. ``BrokenLinkError``."""
        self._forget_read()
        self._rest += data
        while self._at < len(self._rest):
            if self._part:
                agent, file, offset, length = self._part
                piece: bytes | memoryview = memoryview(self._rest)[self._at : self._at + length]
                self._at = self._looked = self._at + len(piece)
                if len(piece) < len(self._rest) // 4:
                    piece = bytes(piece)  # or it would keep all that came with it in memory
                left = length - len(piece)
                self._part = (agent, file, offset + len(piece), left) if left else ()
                yield Bytes(agent, file, offset, piece)
                continue
            end = self._rest.find(b"\n", self._looked) + 1
            if not end:
                self._looked = len(self._rest)
                if self._looked - self._at > _LINE_MAX:
                    raise BrokenLinkError(f"a line of more than {_LINE_MAX} bytes")
                return
            line = bytes(self._rest[self._at : end])
            self._at = self._looked = end
            if event := self._read(line, now):
                yield event

    def _forget_read(self) -> None:
        self._rest = bytes(self._rest[self._at :])
        self._looked -= self._at
        self._at = 0

    def _read(self, line: bytes, now: float) -> Event | None:
        if len(line) > _LINE_MAX:
            raise BrokenLinkError(f"a line of more than {_LINE_MAX} bytes")
        try:
            said = parse_json_object(line.decode())
        except (UnicodeDecodeError, MalformedError) as error:
            raise BrokenLinkError(f"no frame: {error}") from None
        op = said.get("op")
        if not isinstance(op, str):
            raise BrokenLinkError("a frame without an op")
        if not self._opened:
            if op != "hello" or self._greeted:
                raise BrokenLinkError(f"{op!r:.32} before hello")
            self._greeted = True
            _fields(said, sent=int, got=int, seen=str, version=int, **{"as": str})
            return self._hello(said)
        if op in self._takes:
            return self._message(op, said, line)
        if op not in self._also:
            raise BrokenLinkError(f"{op!r:.32} is nothing that is said here")
        return self._DO[op](self, said, now)

    def _hello(self, said: dict[str, Any]) -> Event:
        if not VERSIONS[0] <= said["version"] <= VERSIONS[1]:
            raise BrokenLinkError(f"hello in version {said['version']}")
        return Hello(said)

    def _message(self, op: str, said: dict[str, Any], line: bytes) -> Event | None:
        number, agent = _fields(said, n=int, agent=str)
        if len(line) > MESSAGE_MAX:
            raise BrokenLinkError(f"a message of more than {MESSAGE_MAX} bytes")
        if number > self._came + 1:
            raise BrokenLinkError(f"message {number} comes after {self._came}")
        if number <= self._came:
            return None
        self._came = number
        return Message(number, op, agent, said, line)

    def _ack(self, said: dict[str, Any], now: float) -> Event:
        (got,) = _fields(said, got=int)
        if got > self._told:
            raise BrokenLinkError(f"message {got} is done, of {self._told}")
        self._stream.forget(got)
        return Acknowledged(got)

    def _want(self, said: dict[str, Any], now: float) -> Event:
        want = Want(*_fields(said, agent=str, file=str, offset=int, credit=int))
        self._owed[f"{want.agent}\n{want.file}"] += want.credit
        # with what is said of each piece
        most = self.credit_max + self.part_max
        unread = len(self._bulk) > 4 * WANTS_MAX or sum(map(len, self._bulk)) > most
        many = self._owed.total() > self.credit_max or len(self._owed) > WANTS_MAX
        if not want.credit or many or unread:
            raise BrokenLinkError(f"bytes of {len(self._owed)} files, or none, are asked for")
        return want

    def _bytes(self, said: dict[str, Any], now: float) -> Event | None:
        agent, file, offset, length = _fields(said, agent=str, file=str, offset=int, length=int)
        credit = length or _fields(said, credit=int)[0]
        if credit > self._credit or length > self.part_max:
            raise BrokenLinkError(f"{credit} bytes, of {self._credit} that were asked for")
        self._credit -= credit
        if length:
            self._part = agent, file, offset, length
        return None if length else Bytes(agent, file, offset, b"")

    def _over(self, said: dict[str, Any], now: float) -> Event:
        return Over(*_fields(said, upto=int))

    _DO: ClassVar[dict[str, Callable[..., Event | None]]] = {
        "ack": _ack, "want": _want, "bytes": _bytes, "over": _over,
    }  # fmt: skip


class Lead(Peering):
    """The side that has the agents. It says nothing before the host's greeting."""

    HANDED: ClassVar[tuple[str, ...]] = ("_skipped",)
    _takes = FACTS
    _also = frozenset(("ack", "want", "bytes", "ask", "over", "grown", "delta"))

    def __init__(self, hello: Mapping[str, Any], stream: Stream, grants: Grants) -> None:
        """``hello``: all that it says beside the streams; ``as`` is empty for a new one."""
        super().__init__()
        self._says = hello
        self._own = self._stream = stream
        self._grants = grants
        self._skipped = 0
        #: the last line before the greeting, which may say why there is none
        self.before = b""

    def _read(self, line: bytes, now: float) -> Event | None:
        if self._version:
            return super()._read(line, now)
        if line.startswith(GREETING):
            self._version = _common(line)
            said = {"op": "hello", "version": self._version, **self._says, **self._own.hello()}
            self._say(said)
            return None
        self._skipped += len(line)
        self.before = line if line.strip() else self.before
        if self._skipped > _PREAMBLE_MAX:
            raise BrokenLinkError("no ctx peer answers: something else is said")
        return None

    def at_once(self, message: Message) -> int:
        return 1 if message.op in APART else 16

    def fits(self, hello: Hello) -> bool:
        """Whether the host knows this registration, and is where it ought to be."""
        return hello.said["as"] == self._says["as"] and self._own.fits(hello.said)

    def go_on(self, hello: Hello, *, new: tuple[Stream, Grants] | None = None) -> None:
        """``new``: of the registration that the host made, if it does not know this one."""
        if new:
            self._own, self._grants = new
        if self._grants.over is not None:  # before operations that put new agents there
            self._say({"op": "over", "upto": self._grants.over})
        self._go_on(self._own, hello.said["got"])

    def _ask(self, said: dict[str, Any], now: float) -> None:
        (number,) = _fields(said, ask=int)
        self._answer(self._grants.answer(number, self._stream.sent, now))

    def _grown(self, said: dict[str, Any], now: float) -> Event:
        return Grown(*_fields(said, agent=str, file=str, length=int))

    def _delta(self, said: dict[str, Any], now: float) -> Event:
        agent, message, at = _fields(said, agent=str, id=str, at=int)
        text = said.get("text")
        if not isinstance(text, str) or len(text) > DELTA_MAX:
            raise BrokenLinkError("'delta' without a right text")
        return Delta(agent, message, at, text)

    _DO: ClassVar = {**Peering._DO, "ask": _ask, "grown": _grown, "delta": _delta}


class Host(Peering):
    """The side that runs the agents."""

    HANDED: ClassVar[tuple[str, ...]] = ("_asks",)
    _takes = OPERATIONS
    _also = frozenset(("ack", "want", "bytes", "grant", "over"))

    def __init__(self) -> None:
        super().__init__()
        self._lease: Lease | None = None
        self._asks = 0
        self._control.append(b"%s%d %d\n" % (GREETING, *VERSIONS))

    def go_on(self, said: Mapping[str, Any], stream: Stream, lease: Lease, hello: Hello) -> None:
        """``said``: what it answers beside the streams. The streams fit, or this side's is new."""
        self._lease, self._version = lease, hello.said["version"]
        lease.reconnected()
        answer = {"op": "hello", "version": hello.said["version"], **said, **stream.hello()}
        self._say(answer)
        self._go_on(stream, min(hello.said["got"], stream.sent))

    def at_once(self, message: Message) -> int:
        if message.op == "forget":
            return 16
        return 64 if message.said.get("verb") in ("stop", "kill") else 1

    def taken_over(self, stream: Stream, lease: Lease) -> None:
        """Goes on with what another daemon has handed over, after ``restore``."""
        self._stream, self._lease = stream, lease

    def tick(self, now: float) -> float:
        """Asks for the lease if it is time; when to look again."""
        assert self._lease is not None
        if self._lease.due() <= now:
            self._asks += 1
            self._lease.ask(self._asks, now)
            self._say({"op": "ask", "ask": self._asks})
        return self._lease.due()

    def renew(self, lease: Lease) -> None:
        """The next lease, after one that is over."""
        self._lease = lease

    def grown(self, agent: str, file: str, length: int) -> bool:
        """Says how much of a file there is, if the other side reads what is said."""
        if reads := len(self._control) < _ANSWERS_MAX:
            self._say({"op": "grown", "agent": agent, "file": file, "length": length})
        return reads

    def delta(self, agent: str, message: str, at: int, text: str) -> bool:
        """Says a piece of a reply, if the other side reads what is said."""
        if reads := len(self._control) < _DELTAS_MAX:
            self._say({"op": "delta", "agent": agent, "id": message, "at": at, "text": text})
        return reads

    def ended(self, upto: int) -> None:
        """Says that all has ended that operations up to this one put here, if that is read."""
        if len(self._control) < _ANSWERS_MAX:
            self._say({"op": "over", "upto": upto})

    def _grant(self, said: dict[str, Any], now: float) -> None:
        assert self._lease is not None
        number, after = _fields(said, ask=int, after=int)
        if number > self._asks:
            raise BrokenLinkError(f"a grant answers {number}, which was not asked")
        self._lease.granted(number, after, now)

    _DO: ClassVar = {**Peering._DO, "grant": _grant}


def _common(greeting: bytes) -> int:
    """The version to speak with a host, by the line that it says first."""
    words = greeting[len(GREETING) :].split()
    if len(words) != 2 or not all(word.isdigit() and len(word) < 9 for word in words):
        raise BrokenLinkError("the greeting has no versions")
    low, high = map(int, words)
    common = min(high, VERSIONS[1])
    if common < max(low, VERSIONS[0]):
        older = "there" if high < VERSIONS[0] else "here"
        raise BrokenLinkError(
            f"speaks {low}-{high}, here {VERSIONS[0]}-{VERSIONS[1]}: install a later ctxfs {older}"
        )
    return common
