"""Lines of ``agents`` that are kept until what they say changes.

A line is made when a reader first asks for it. The lines of an agent are as many as there are
kinds of readers, and each is short, so that all of them are bounded by the number of agents, as
the records are that they are made of. When nobody reads any more, none is kept.
"""

from __future__ import annotations

from typing import Final

import trio

from runtime.ids import AgentIndex

#: bytes; a longer line is made for each reader
LINE_MAX: Final = 2048
#: seconds without a reader, at least, after which no line is kept
UNREAD_SECONDS: Final = 60.0


class KeptLines:
    """By whether the reader is an insider of the agent, the lines by agent."""

    def __init__(self) -> None:
        self._lines: dict[bool, dict[AgentIndex, bytes]] = {True: {}, False: {}}
        self._read = trio.Event()

    def of(self, inside: bool) -> dict[AgentIndex, bytes]:
        """The lines for one kind of readers, to look into."""
        self._read.set()
        return self._lines[inside]

    def keep(self, inside: bool, index: AgentIndex, line: bytes) -> None:
        if len(line) <= LINE_MAX:
            self._lines[inside][index] = line

    def drop(self, index: AgentIndex) -> None:
        """Drops the lines of an agent: it changed, or is gone."""
        for lines in self._lines.values():
            lines.pop(index, None)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    async def run(self) -> None:
        """Drops all of them once nobody reads any more."""
        while True:
            await self._read.wait()
            while self._read.is_set():
                self._read = trio.Event()
                await trio.sleep(UNREAD_SECONDS)
            for lines in self._lines.values():
                lines.clear()
