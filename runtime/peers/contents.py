"""Files of placed agents: which there are, how they are called, and what is looked at in them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import trio

from runtime.agents.bundles import PACK
from runtime.errors import MalformedError
from runtime.kernel.output import Copy
from runtime.texts.names import decode

#: what an agent may be given
SUPPLIES: Final = ("handoff.md", "input.jsonl", "inherited.md", "inherited.json", PACK)
#: what it prints
OUTPUTS: Final = ("out", "log")
#: what it gives back at its end: documents of its own, and files of its session
DOCUMENTS: Final = ("result.md", "refs.jsonl")
CONVERSATION: Final = ("messages.jsonl", "latest.md")
#: a list of artifacts that is too long for a message, with a line for each
LISTING: Final = "files"
ARTIFACT: Final = "artifact/"
#: of a name, what no text has, or what would be taken for that
_ESCAPED: Final = re.compile("[%\x00-\x1f\x7f\udc80-\udcff]")
#: bytes of lines that are looked at in one step, and of one line
_LINES: Final = 16 << 10
_LINE_MAX: Final = 1 << 20
#: of files that are read in one step
_SHORT: Final = 64 << 10


def named(path: bytes) -> str:
    """The name of a file as the other side is told it: a text, whatever its bytes are."""
    text = path.decode(errors="surrogateescape")
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", text)


def unnamed(name: str) -> bytes:
    """The path whose name ``named`` made."""
    return unquote_to_bytes(name)


@dataclass(slots=True, eq=False, kw_only=True)
class File:
    """A file that is on its way."""

    name: str
    #: None if that is known only once there is no more
    length: int | None = 0
    #: the most that it may be
    most: int = 0
    #: on the disk, and asked for
    kept: int = 0
    asked: int = 0
    #: bytes that the disk has more, and nobody has counted
    more: int = 0
    #: some of it could not be kept: what is still to come does not follow what is there
    spoiled: bool = False
    #: what else was said of it
    right: Any = None
    #: of output, which may grow
    copy: Copy | None = None

    def piece(self, most: int) -> int:
        """Bytes to ask for next, at most so many."""
        if self.length is None:
            return most if self.asked == self.kept else 0
        # more was asked for than there is, if it ends before what was said
        return 0 if self.spoiled else max(0, min(most, self.length - self.asked))

    @property
    def is_whole(self) -> bool:
        return self.kept == self.length

    def start_over(self) -> None:
        """Nothing that was asked for is still to come."""
        self.asked, self.spoiled = self.kept, False

    def add(self, path: Path, offset: int, data: bytes) -> None:
        """Bytes that came; of those that are there already nothing changes. ``MalformedError``,
        ``OSError``: what was written before is kept."""
        if self.copy is not None:
            before = self.copy.size
            try:
                self.copy.add(offset, data)
            finally:
                self.kept = self.copy.end
                self.length = max(self.kept, self.length or 0)
                self.asked = max(self.asked, self.kept)
                self.more += self.copy.size - before
            return
        if offset > self.kept:
            raise MalformedError(f"{self.name} goes on at {offset}, not at {self.kept}")
        data = data[self.kept - offset :]
        if self.kept + len(data) > self.most:
            raise MalformedError(f"{self.name} is longer than {self.most} bytes")
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while data:
                written = os.write(fd, data)
                self.kept += written
                self.more += written
                data = data[written:]
        finally:
            os.close(fd)


def are_short(paths: Mapping[str, Path]) -> bool:
    """Whether files are read in no time."""
    size = 0
    for path in paths.values():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size <= _SHORT


def digests(paths: Mapping[str, Path]) -> dict[str, tuple[int, str]]:
    """Sizes and SHA-256 of those files that are there; ``OSError``."""
    found = {}
    for name, path in paths.items():
        with suppress(FileNotFoundError), open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = file.tell(), digest
    return found


async def lines_of(path: Path, offset: int = 0) -> AsyncGenerator[tuple[int, list[str]], None]:
    """The lines of a file from ``offset`` on, some at a time, each time in another step; and how
    far these reach. ``MalformedError`` for what is no text."""
    with open(path, "rb") as file:
        file.seek(offset)
        while data := file.readlines(_LINES):
            if len(data[-1]) > _LINE_MAX:
                raise MalformedError(f"a line of more than {_LINE_MAX} bytes")
            yield file.tell(), [decode(line) for line in data if line.strip()]
            await trio.lowlevel.checkpoint()


def link(path: Path, shown: Path) -> None:
    """Has a file that is whole be another one, too, in place of what was that; ``OSError``."""
    shown.unlink(missing_ok=True)
    os.link(path, shown)
