"""The heritage of one ctxd to the next in the same process: a sealed file, and open descriptors.

The daemon executes itself again. What it knows and no disk has goes into a file in memory that
nobody can change any more; the descriptors in it stay open. One table says what it is: each part
has a name, and saves and restores one JSON value, in which there may be bytes. A part whose value
changes its meaning needs a new ``FORMAT``; ``--check`` says which one a program takes, before it is
executed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

from runtime.caller import Caller
from runtime.errors import StartupError
from runtime.kernel import orders

#: of the file; a daemon executes no program that takes another one
FORMAT: Final = 2
#: the environment of the program that is executed says where the file is
VARIABLE: Final = "CTXD_HANDOVER"


class Descriptors:
    """Those that the next program gets, under their numbers."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def keep(self, fd: int) -> int:
        self.kept.append(fd)
        return fd


class Handed:
    """State that passes to the next daemon as it is: each class names the attributes that do in
    its own ``HANDED``. Sets and maps are filled there, bytes come as an array of them, and what an
    earlier version did not save stays as it is.
    """

    HANDED: ClassVar[tuple[str, ...]] = ()

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """A JSON value."""
        return {key: _plain(getattr(self, name)) for key, name in self._handed()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for key, name in self._handed():
            if key not in saved:
                continue
            present, value = getattr(self, name), saved[key]
            if isinstance(present, dict):
                present.update(dict(value))
            elif isinstance(present, set):
                present.update(value)
            else:
                setattr(self, name, bytearray(value) if isinstance(value, bytes) else value)

    def _handed(self) -> Iterator[tuple[str, str]]:
        for cls in type(self).__mro__:
            for name in vars(cls).get("HANDED", ()):
                yield name.lstrip("_"), name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())  # JSON has texts as keys only
    return list(value) if isinstance(value, set) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One row of the table: ``save`` gives a value, which ``restore`` gets."""

    name: str
    save: Callable[[Descriptors], Any]
    restore: Callable[[Any], None]


def written(content: Any) -> list[bytes]:
    """A value in which there are bytes, as two lines and what follows them: a word that nobody can
    guess, JSON, and the bytes, which may be many. In the JSON the word says where they are."""
    word = os.urandom(16).hex()
    parts: list[bytes] = []
    end = 0

    def put(value: Any) -> dict[str, list[int]]:
        nonlocal end
        if not isinstance(value, bytes | bytearray):
            raise TypeError(f"{type(value).__name__} cannot pass")
        parts.append(bytes(value))
        end += len(value)
        return {word: [end - len(value), end]}

    text = json.dumps(content, default=put)
    return [f"{word}\n{text}\n".encode(), *parts]


def read_back(data: bytes) -> Any:
    """The value that was written so; ``ValueError``."""
    middle = data.index(b"\n")
    begin = data.index(b"\n", middle + 1) + 1
    word = data[:middle].decode()

    def take(found: dict[str, Any]) -> Any:
        if word not in found:
            return found
        first, last = found[word]
        return data[begin + first : begin + last]

    return json.loads(data[middle + 1 : begin - 1], object_hook=take)


def seal(values: Mapping[str, Any], descriptors: Descriptors) -> int:
    """A sealed file with the values, and the descriptors; all of them are inherited."""
    content = {"format": FORMAT, "descriptors": descriptors.kept, "values": values}
    file = orders.sealed_file("handover", *written(content))
    for fd in (file, *descriptors.kept):
        os.set_inheritable(fd, True)
    return file


def inherited() -> dict[str, Any] | None:
    """The values that the program before left; None if this one was started otherwise.

    No process that is started later gets the descriptors. ``StartupError`` for a file of another
    format or of another user, or one that is not sealed.
    """
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return None
    try:
        file = int(number)
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        if (owner := os.fstat(file).st_uid) != os.geteuid():
            # who became this user by su(1) may have environment and descriptors of another one
            raise ValueError(f"it belongs to uid {owner}")
        with os.fdopen(file, "rb") as sealed_file:
            sealed_file.seek(0)
            content = read_back(sealed_file.read())
        if not sealed & fcntl.F_SEAL_WRITE or content["format"] != FORMAT:
            raise ValueError("not sealed, or of another format")
        for fd in content["descriptors"]:
            os.set_inheritable(fd, False)
        values: dict[str, Any] = content["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{VARIABLE}: cannot take over: {error}") from None
    return values


def pack_caller(caller: Caller) -> dict[str, Any]:
    return asdict(caller)


def unpack_caller(saved: Mapping[str, Any]) -> Caller:
    groups = saved["groups"]
    return Caller(**{**saved, "groups": tuple(groups) if groups is not None else None})
