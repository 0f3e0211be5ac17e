"""The registrations of this machine: of hosts, at which it has agents, and of leads, whose it runs.

Each has 128 random bits that its two sides know, and nobody else: ``known``. They are in a file of
their own, so no backup has them: a daemon whose state was put back is another one to its peers.

A registration holds at once, and nothing is said of it before the file has it (``written``), which
is written beside the loop: others do not wait for the disk, however often a stranger says hello.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import trio

from runtime.errors import NoSpaceError, QuotaError

_FILE: Final = "peers.json"
#: of one uid, of those that lead from elsewhere
_MOST: Final = 64


@dataclass(slots=True)
class Lead:
    """A lead of elsewhere: whose agents it may have here, and how these are called."""

    uid: int
    name: str
    alias: str


@dataclass(slots=True)
class _Kept:
    #: by node and owner of this machine, as ``NODE OWNER``
    hosts: dict[str, str] = field(default_factory=dict)
    #: by what both sides know
    leads: dict[str, Lead] = field(default_factory=dict)


class Registrations:
    """All of them, from their file, which is read once and written whole."""

    def __init__(self, state: Path) -> None:
        self._path = state / _FILE
        self._kept = _Kept()
        #: how often something changed, and how much of that the file has
        self._changes = self._stored = 0
        self._writing = trio.Lock()
        if self._path.exists():
            values = json.loads(self._path.read_bytes())
            leads = {
                known: Lead(each["uid"], each["name"], each["alias"])
                for known, each in values["leads"].items()
            }
            self._kept = _Kept(values["hosts"], leads)

    def host(self, node: str, owner: int) -> str:
        """The bits that a host gave this lead; none for the first time."""
        return self._kept.hosts.get(f"{node} {owner}", "")

    def note_host(self, node: str, owner: int, known: str) -> None:
        """A host knows this lead by these bits from now on."""
        if self.host(node, owner) != known:
            self._kept.hosts[f"{node} {owner}"] = known
            self._changes += 1

    def is_own(self, known: str) -> bool:
        """Whether this machine gave somebody these bits: whoever says them is this machine."""
        return known in self._kept.leads

    def lead(self, uid: int, said: str, name: str) -> tuple[str, Lead]:
        """The registration of a lead that says these bits, and a new one for whoever says others.

        ``QuotaError`` if its uid has too many.
        """
        for known, each in self._kept.leads.items() if said else ():
            if hmac.compare_digest(known.encode(), said.encode()) and each.uid == uid:
                return known, each
        if sum(each.uid == uid for each in self._kept.leads.values()) >= _MOST:
            raise QuotaError(f"{_MOST} leads of uid {uid} are registered here: that is the most")
        taken = {each.alias for each in self._kept.leads.values()}
        numbers = (f"{name}-{number}" for number in range(2, len(taken) + 3))
        alias = next(each for each in (name, *numbers) if each not in taken)
        known = secrets.token_hex(16)
        made = self._kept.leads[known] = Lead(uid, name, alias)
        self._changes += 1
        return known, made

    def leads(self) -> list[str]:
        """The bits of all leads."""
        return [*self._kept.leads]

    def drop(self, known: str) -> None:
        """The registration of a lead is over."""
        del self._kept.leads[known]
        self._changes += 1

    async def written(self) -> None:
        """Returns when the file has all that holds now; ``NoSpaceError`` if it cannot."""
        changes = self._changes
        async with self._writing:
            if self._stored >= changes:
                return
            changes, text = self._changes, json.dumps(asdict(self._kept))
            try:
                await trio.to_thread.run_sync(self._write, text)
            except OSError as error:
                raise NoSpaceError(f"{self._path}: {error.strerror}") from None
            self._stored = changes
        await trio.lowlevel.checkpoint_if_cancelled()  # it may have been closed meanwhile

    def _write(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
