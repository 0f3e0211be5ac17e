"""Following what a monitor writes, from a byte on."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Final

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
