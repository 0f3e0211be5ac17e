"""Following what a monitor writes, from a byte on."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from runtime.authority.accounts import Payer
from runtime.authority.loop import Gentle
from runtime.kernel.inotify import Wakeup, Watcher
from runtime.kernel.output import Segments

_BLOCK: Final = 64 << 10


class Tail:
    """The bytes of a kept stream after a position, each once."""

    def __init__(self, directory: Path, position: int) -> None:
        self._directory = directory
        self.position = position
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, length: int = _BLOCK) -> bytes:
        """The bytes that were added, at most so many."""
        data, self.position = Segments(self._directory).since(self.position, length)
        return data

    def text(self) -> str:
        """The text that was added; a character that is not complete yet comes later."""
        return self._decoder.decode(self.read())

    async def follow(
        self, watcher: Watcher, gentle: Gentle, who: Payer
    ) -> AsyncGenerator[str, None]:
        """Pieces of text, as they come, until cancelled."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        wakeup = Wakeup()
        with watcher.watching(self._directory, wakeup):
            while True:
                # a program that writes faster than this is read must not have the loop alone
                while text := await gentle.do(who, self.text):
                    yield text
                await wakeup.wait_changed()
