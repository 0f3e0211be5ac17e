"""The numbered messages of a registration, as the store of one side has them (``peering``)."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from runtime.errors import MalformedError
from runtime.texts.names import dump_json

#: bytes of a numbered message
MESSAGE_MAX: Final = 128 << 10
#: messages of one agent that the other side has not done; bytes of them, and of all of a stream
UNDONE_MAX: Final = 1024
UNDONE_BYTES: Final = 1 << 20
STREAM_BYTES: Final = 8 << 20
#: bytes of memory that one takes beside its text
_OWN_BYTES: Final = 512


class Kept(NamedTuple):
    """A message that the other side has not said it has done."""

    number: int
    agent: str
    line: bytes
    mark: str


def _mark(before: str, line: bytes) -> str:
    return hashlib.blake2b(before.encode() + line, digest_size=8).hexdigest()


class Stream:
    """Both streams of a registration at one side, as its store has them.

    Whoever changes it makes the change in the store first: ``record`` and ``done`` belong to the
    transaction of what causes the message, or of what it causes.
    """

    def __init__(
        self,
        kept: Iterable[Kept] = (),
        *,
        first: tuple[int, str] = (0, ""),
        got: tuple[int, str] = (0, ""),
    ) -> None:
        """``first``: number and mark of the last message that the other side has done; ``got``:
        of the last one of the other side's that is done here."""
        self.kept = deque(kept)
        self.got, self.seen = got
        self._done, self._mark_of_done = first
        #: by agent, how many are kept; and how many bytes, also of all
        self.undone = Counter(each.agent for each in self.kept)
        self._bytes = Counter[str]()
        self.size = 0
        for each in self.kept:
            self._weigh(each, 1)

    @property
    def sent(self) -> int:
        """The number of the last message."""
        return self.kept[-1].number if self.kept else self._done

    def record(self, op: str, agent: str, /, **said: Any) -> Kept:
        """A new message, which is kept from now on; ``MalformedError`` if it is too long."""
        number = self.sent + 1
        line = dump_json({"op": op, "n": number, "agent": agent, **said}).encode() + b"\n"
        if len(line) > MESSAGE_MAX:
            raise MalformedError(f"a message has {len(line)} bytes, and at most {MESSAGE_MAX}")
        before = self.kept[-1].mark if self.kept else self._mark_of_done
        kept = Kept(number, agent, line, _mark(before, line))
        self.kept.append(kept)
        self.undone[agent] += 1
        self._weigh(kept, 1)
        return kept

    def is_full(self, agent: str, times: int = 1) -> bool:
        """Whether an agent has to wait until the other side has done some of what is kept: that
        is so many times what there may be."""
        own, size = self._bytes[agent], self.size
        bytes_full = own >= times * UNDONE_BYTES or size >= times * STREAM_BYTES
        return self.undone[agent] >= times * UNDONE_MAX or bytes_full

    def _weigh(self, kept: Kept, sign: int) -> None:
        weight = sign * (len(kept.line) + _OWN_BYTES)
        self.size += weight
        self._bytes[kept.agent] += weight

    def take_back(self) -> None:
        """The last one was not stored: it never was."""
        kept = self.kept.pop()
        self._less(kept)

    @property
    def first(self) -> tuple[int, str]:
        """Number and mark of the last message that the other side has done."""
        return self._done, self._mark_of_done

    def done(self, number: int, line: bytes) -> Callable[[], None]:
        """This one of the other side's is done here; what is returned takes that back."""
        before = self.got, self.seen

        def undo() -> None:
            self.got, self.seen = before

        self.got, self.seen = number, _mark(self.seen, line)
        return undo

    def forget(self, number: int) -> None:
        """The other side has done those up to this one."""
        while self.kept and self.kept[0].number <= number:
            kept = self.kept.popleft()
            self._done, self._mark_of_done = kept.number, kept.mark
            self._less(kept)

    def _less(self, kept: Kept) -> None:
        self.undone[kept.agent] -= 1
        self._weigh(kept, -1)
        if not self.undone[kept.agent]:
            del self.undone[kept.agent], self._bytes[kept.agent]

    def fits(self, hello: Mapping[str, Any]) -> bool:
        """Whether a hello goes on where this side is; if not, one of the two was put back."""
        got, seen = hello["got"], hello["seen"]
        if not self._done <= got <= self.sent:
            return False
        mark = self._mark_of_done if got == self._done else self._at(got).mark
        return mark == seen and bool(hello["sent"] >= self.got)

    def after(self, number: int) -> Kept | None:
        """The message after this one."""
        return self._at(number + 1) if number < self.sent else None

    def _at(self, number: int) -> Kept:
        return self.kept[number - self.kept[0].number]

    def hello(self) -> dict[str, Any]:
        """The fields of a hello that are about it."""
        return {"sent": self.sent, "got": self.got, "seen": self.seen}
