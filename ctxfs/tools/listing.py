"""Lists that tools answer: each is bounded, since a model reads all of it. One tells how many are
left out, and with which cursor it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

import trio

from ctxfs.tools.schemas import Schema, count, text
from ctxfs.tools.tool import Request, View
from runtime.texts.names import dump_json

#: bytes of a list: some hand an answer on twice, as text and as structure, and both together take
#: no more than 25,000 tokens
LIST_MAX: Final = 36_000
#: of a list that is a part of an answer
PART_MAX: Final = 8_000
#: entries before others have their turn: each may search all waits
_AT_ONCE: Final = 64


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


_I = TypeVar("_I", bound=_Indexed)

CURSOR: Final[Schema] = {"pattern": "^[0-9]+$", "maxLength": 20}
#: in the input of a tool that lists
AFTER: Final[dict[str, Schema]] = {
    "after": text("next of an earlier answer: go on after what that had", **CURSOR)
}
#: in its answer
LEFT: Final[dict[str, Schema]] = {
    "left": count("how many more there are, which this answer leaves out")
}
NEXT: Final[dict[str, Schema]] = {"next": text("give it as after, to get more")}


class Page:
    """The entries of a list that there is room for, in the order of their making."""

    def __init__(self, request: Request, room: int, after: int | None = None) -> None:
        self._request = request
        self._room = room
        self._after = int(request.input.get("after", 0)) if after is None else after
        self._last = 0
        self.entries: list[dict[str, Any]] = []
        self.left = 0

    @property
    def next(self) -> str:
        """The cursor with which it goes on, empty at the end."""
        return str(self._last) if self.left else ""

    def add(self, obj: _I, view: View[_I]) -> None:
        """One more; it is left out if there is no room, or if an earlier answer had it."""
        if obj.index <= self._after:
            return
        if not self.left:
            entry = view.of(self._request, obj)
            self._room -= len(dump_json(entry).encode()) + 2
            if self._room >= 0 or not self.entries:
                self.entries.append(entry)
                self._last = obj.index
                return
        self.left += 1


async def listing(
    request: Request, key: str, found: Iterable[_I], view: View[_I], wanted: Callable[[_I], bool]
) -> dict[str, Any]:
    """The answer of a tool that lists: those of the found that are wanted, as the view has them."""
    page = Page(request, LIST_MAX)
    for number, obj in enumerate(sorted(found, key=lambda obj: obj.index)):
        if number % _AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
        if wanted(obj):
            page.add(obj, view)
    more = {"next": page.next} if page.left else {}
    return {key: page.entries, "left": page.left, **more}
