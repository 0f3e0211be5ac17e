"""This machine as a host: leads of other machines that are connected, and under which leases.

A link lets its uid do nothing here that an operator of that uid may not do by hand. Which uid that
is the kernel says of ``ctx peer``; what a lead says of itself is a name to show.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from runtime import crashpoints
from runtime.agents.parts import Agents
from runtime.errors import CtxError, DeniedError
from runtime.kernel.daemonlog import because_of
from runtime.kernel.handover import Descriptors
from runtime.peers.guests import Guests
from runtime.peers.peering import (
    Acknowledged,
    BrokenLinkError,
    Bytes,
    Event,
    Grown,
    Hello,
    Host,
    Want,
)
from runtime.peers.post import LEAD, Post, key_of
from runtime.peers.registrations import Registrations
from runtime.peers.talking import MEMORY, Talk
from runtime.texts.names import check_name, escape

log = logging.getLogger("ctxd.peers")

#: before hello, in seconds
_HELLO_SECONDS: Final = 30.0
_LEASE_MIN: Final = 5.0
_NAME_MAX: Final = 16


@dataclass(slots=True, eq=False)
class _Served:
    """A connection, and what is noted of it for the next daemon."""

    talk: Talk
    host: Host
    uid: int
    progress: dict[str, Any]
    #: of its registration, once it has said hello
    known: str = ""

    @property
    def key(self) -> str:
        return key_of(LEAD, self.known) if self.known else ""


class Hosting:
    """Leads that are connected."""

    #: bytes that a connection may take
    memory: Final = MEMORY

    def __init__(
        self, agents: Agents, registrations: Registrations, post: Post, guests: Guests, **about: str
    ) -> None:
        """``about``: the fields of a hello that are always the same."""
        self._agents = agents
        self._registrations = registrations
        self._post = post
        self._guests = guests
        self._about = about
        #: by their descriptors
        self._served: dict[int, _Served] = {}
        registrations.in_use = self._in_use

    def _in_use(self, known: str) -> bool:
        """Whether a lead is connected, or has anything here."""
        connected = any(each.known == known for each in self._served.values())
        return connected or self._guests.has(key_of(LEAD, known))

    async def serve(self, fd: int, uid: int, received: bytes, progress: dict[str, Any]) -> None:
        """A connection of ``ctx peer``, until either side ends it; what is to pass to the next
        daemon is noted as ``progress``. ``CtxError`` if this machine runs nothing for others."""
        if not self._agents.settings.config.placed.allow:
            raise DeniedError("this machine runs no agents of others: placed.allow is false")
        # what an earlier daemon did half is taken back before it is done again
        await self._guests.taken_over.wait()
        host = Host()

        def fed() -> None:
            if served.known:
                self._guests.leased(served.key, host)

        talk = Talk(host, fd, _HELLO_SECONDS, fed)
        served = _Served(talk, host, uid, progress)
        if "peering" in progress:
            received = self._take_over(served)
        self._served[fd] = served

        async def hear(event: Event) -> None:
            if isinstance(event, Hello):
                self._welcome(served, event.said)
            elif isinstance(event, Acknowledged):
                self._post.acknowledged(served.key, event.number)
            elif isinstance(event, Want | Bytes | Grown):
                self._guests.supplies.hear(served.key, host, event)
            else:
                await self._guests.hear(served.key, uid, host, event)

        try:
            await talk.run(hear, received)
        except* BrokenLinkError as errors:
            said = escape(str(errors.exceptions[0]))
            log.warning("a lead of uid %d: %s", uid, said, extra=because_of(uid))
        finally:
            del self._served[fd]
            self._guests.supplies.closed(served.key, host)

    def note(self) -> None:
        """Notes what the next daemon needs in order to go on with each connection."""
        for served in self._served.values():
            progress = served.progress
            progress["peering"] = served.host.save(Descriptors())
            progress["left"] = served.talk.left
            progress["unheard"] = served.talk.unheard
            if served.known:
                progress["known"] = served.known
                progress["lease"] = self._guests.lease(served.key).save(Descriptors())

    def _take_over(self, served: _Served) -> bytes:
        progress, talk = served.progress, served.talk
        served.host.restore(progress["peering"])
        talk.left = bytearray(progress["left"])
        if known := progress.get("known"):
            served.known = known
            lease = self._guests.lease(served.key)
            lease.restore(progress["lease"])
            served.host.taken_over(self._post.stream(served.key), lease)
            talk.tell_by(self._post.wakeup(served.key))
            self._guests.supplies.opened(served.key, served.host)
            talk.expect(lease.seconds)
        return bytes(progress.get("unheard", b""))

    def _welcome(self, served: _Served, said: Mapping[str, Any]) -> None:
        """Answers a hello: the newer connection of a registration ends the older."""
        crashpoints.reach("peer.greeted")
        name, seconds = said.get("name"), said.get("ttl")
        config, uid = self._agents.settings.config, served.uid
        try:
            if not isinstance(name, str) or len(name) > _NAME_MAX:
                raise BrokenLinkError("hello without a right name")
            check_name(name)
            known, lead = self._registrations.lead(uid, said["as"], name)
            if not self._post.stream(key_of(LEAD, known)).fits(said) and known == said["as"]:
                self._guests.part(key_of(LEAD, known))
                self._registrations.drop(known)
                known, lead = self._registrations.lead(uid, "", name)
        except CtxError as error:
            raise BrokenLinkError(error.sentence) from None
        if seconds.__class__ not in (int, float) or not seconds >= _LEASE_MIN:
            raise BrokenLinkError("hello without a right ttl")
        crashpoints.reach("peer.registered")
        for other in self._served.values():
            if other.known == known:
                other.talk.close()
                other.known = ""
        served.known, key = known, key_of(LEAD, known)
        seconds = float(min(seconds, config.placed.lease_max))
        self._post.note(key, uid=uid, alias=lead.alias, seconds=seconds)
        lease = self._guests.lease(key)
        lease.seconds = seconds
        served.talk.tell_by(self._post.wakeup(key))
        served.talk.expect(seconds)
        answer = {
            **self._about,
            "as": known,
            "alias": lead.alias,
            "node": config.node_name,
            "lease_max": config.placed.lease_max,
            "directories": ["recipes"],
            "networks": list(config.placed.networks),
            "shared": list(config.placed.shared),
            "roots": [],
        }
        served.host.go_on(answer, self._post.stream(key), lease, Hello(said))
        self._guests.supplies.opened(key, served.host)
