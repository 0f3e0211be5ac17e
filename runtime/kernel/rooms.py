"""How much output the monitors of an owner may keep: a file that they all map (room.h).

Monitors add what they keep to one number, and drop what is over what the daemon last set. The file
outlives both.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

# room.h
_VERSION: Final = 1
_KEPT: Final = 8
_MOST: Final = 16


class Rooms:
    """The files of all owners; monitors, and the daemon after this one, go on with them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, owner: int) -> Path:
        return self._directory / str(owner)

    def make(self, owner: int) -> bool:
        """Makes the file of an owner, without any room; False if it is there."""
        path = self.path(owner)
        if path.exists() and path.read_bytes()[:_KEPT] == struct.pack("=Q", _VERSION):
            return False
        new = path.with_name(f".{path.name}")
        new.write_bytes(struct.pack("=Qqq", _VERSION, 0, 0))
        new.rename(path)
        return True

    def kept(self, owner: int) -> int:
        """Bytes that its monitors have written, less what they removed; 0 without a file."""
        try:
            data = self.path(owner).read_bytes()
        except FileNotFoundError:
            return 0
        return int(struct.unpack_from("=q", data, _KEPT)[0])

    def limit(self, owner: int, most: int) -> None:
        """Sets the most that ``kept`` may become."""
        with open(self.path(owner), "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), struct.pack("=q", most), _MOST)
