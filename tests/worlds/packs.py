"""Packs of git that no git makes: a few bytes of them stand for very many."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from typing import Final

MIB: Final = 1 << 20
_ONES: Final = b"\1" * MIB
_KINDS: Final = {"commit": 1, "tree": 2, "blob": 3}
_DELTA: Final = 7


def _raw(data: bytes, mode: int = zlib.Z_FULL_FLUSH) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush(mode)


_PACKED_ONES: Final = _raw(_ONES)


def _entry(kind: int, size: int, data: bytes) -> bytes:
    head, size = bytearray([kind << 4 | size & 15]), size >> 4
    while size:
        head[-1] |= 128
        head.append(size & 127)
        size >>= 7
    return bytes(head) + data


def _number(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


class Pack:
    """What is added has its id, twenty bytes."""

    def __init__(self) -> None:
        self._entries: list[bytes] = []

    def add(self, kind: str, data: bytes, ones: int = 0) -> bytes:
        """An object that ends with so many MiB, each of which takes a KiB. They are ones: git
        makes holes of zeros."""
        size = len(data) + ones * MIB
        name = hashlib.sha1(b"%s %d\0" % (kind.encode(), size) + data)
        check = zlib.adler32(data)
        for _ in range(ones):
            name.update(_ONES)
            check = zlib.adler32(_ONES, check)
        packed = _raw(data) + ones * _PACKED_ONES + _raw(b"", zlib.Z_FINISH)
        packed = b"\x78\xda" + packed + struct.pack(">I", check)
        self._entries.append(_entry(_KINDS[kind], size, packed))
        return name.digest()

    def repeat(self, base: bytes, of: bytes, times: int, begin: bytes) -> bytes:
        """A blob that is a beginning, and so often another one, of less than 16 MiB: each time
        takes seven bytes."""
        size = len(begin) + times * len(of)
        copy = b"\xf0" + struct.pack("<I", len(of))[:3]
        delta = _number(len(of)) + _number(size) + bytes([len(begin)]) + begin + times * copy
        self._entries.append(_entry(_DELTA, len(delta), base + zlib.compress(delta)))
        name = hashlib.sha1(b"blob %d\0" % size + begin)
        for _ in range(times):
            name.update(of)
        return name.digest()

    def tree(self, entries: Iterable[tuple[str, str, bytes]]) -> bytes:
        """Of modes, names, and ids, in order."""
        lines = (f"{mode} {name}\0".encode() + named for mode, name, named in entries)
        return self.add("tree", b"".join(lines))

    def commit(self, tree: bytes, *parents: bytes) -> bytes:
        above = "".join(f"parent {parent.hex()}\n" for parent in parents)
        who = "x <x@localhost> 1 +0000"
        text = f"tree {tree.hex()}\n{above}author {who}\ncommitter {who}\n\nx\n"
        return self.add("commit", text.encode())

    def tree_bomb(self, levels: int = 10) -> bytes:
        """A tree of ten entries, each of which is one of ten, and so on."""
        named, mode = self.add("blob", b"x"), "100644"
        for _ in range(levels):
            named = self.tree((mode, f"d{n}", named) for n in range(10))
            mode = "40000"
        return named

    def done(self) -> bytes:
        data = b"PACK" + struct.pack(">II", 2, len(self._entries)) + b"".join(self._entries)
        return data + hashlib.sha1(data).digest()
