"""This machine as a host: leads of other machines that are connected, and under which leases.

A link lets its uid do nothing here that an operator of that uid may not do by hand. Which uid that
is the kernel says of ``ctx peer``; what a lead says of itself is a name to show.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio

from runtime import crashpoints
from runtime.agents.parts import Agents
from runtime.authority.accounts import Payer
from runtime.authority.loop import Timed, Turns
from runtime.errors import DeniedError, NoSpaceError
from runtime.kernel.daemonlog import Rates, because_of
from runtime.kernel.handover import Descriptors
from runtime.peers.complaints import COMPLAINT_SECONDS
from runtime.peers.guests import Guests
from runtime.peers.peering import (
    CREDIT_MAX,
    Acknowledged,
    BrokenLinkError,
    Bytes,
    Event,
    Grown,
    Hello,
    Host,
    Want,
    breaking,
)
from runtime.peers.post import LEAD, Post, key_of
from runtime.peers.registrations import Registrations
from runtime.peers.talking import MEMORY, Talk
from runtime.texts.names import check_name, escape
from runtime.texts.said import Said

log = logging.getLogger("ctxd.peers")

#: before hello, in seconds
_HELLO_SECONDS: Final = 30.0
#: between two looks for leads that are to be forgotten
_LOOK_SECONDS: Final = 3600.0
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
    #: what it said, as long as that is not answered
    hello: Hello | None = None

    @property
    def key(self) -> str:
        return key_of(LEAD, self.known) if self.known else ""


class Hosting:
    """Leads that are connected."""

    #: bytes that a connection may take, and of these in the kernel
    memory: Final = MEMORY
    at_once: Final = CREDIT_MAX

    def __init__(
        self, agents: Agents, registrations: Registrations, post: Post, guests: Guests, **about: str
    ) -> None:
        """``about``: the fields of a hello that are always the same."""
        self._agents = agents
        self._registrations = registrations
        self._post = post
        self.guests = guests
        self._about = about
        #: by their descriptors
        self._served: dict[int, _Served] = {}
        self._turns = Turns()
        self._complaints = Rates(window=COMPLAINT_SECONDS)

    async def run(self) -> None:
        """Forgets leads that have had nothing here for long."""
        await self.guests.taken_over.wait()
        while True:
            self._forget_old()
            with suppress(NoSpaceError):
                await self._registrations.written()
            await trio.sleep(_LOOK_SECONDS)

    def _forget_old(self) -> None:
        before = time.time() - self._agents.settings.config.placed_keep
        for known in self._registrations.leads():
            key = key_of(LEAD, known)
            connected = any(each.known == known for each in self._served.values())
            seen = self._post.data(key).get("seen", 0.0)
            if not (seen >= before or connected or self.guests.has(key)):
                self._registrations.drop(known)
        # what the store has of others is also left by a daemon that died between the two
        known_keys = {key_of(LEAD, known) for known in self._registrations.leads()}
        for key in self._post.keys(LEAD):
            if key not in known_keys and not self.guests.has(key):
                self.guests.part(key)

    async def serve(self, fd: int, uid: int, received: bytes, progress: dict[str, Any]) -> None:
        """A connection of ``ctx peer``, until either side ends it; what is to pass to the next
        daemon is noted as ``progress``. ``CtxError`` if this machine runs nothing for others."""
        if not self._agents.settings.config.placed.allow:
            raise DeniedError("this machine runs no agents of others: placed.allow is false")
        # what an earlier daemon did half is taken back before it is done again
        await self.guests.taken_over.wait()
        host = Host()

        def fed() -> None:
            if served.known:
                self.guests.leased(served.key, host)

        payer = Payer(uid)
        talk = Talk(host, fd, _HELLO_SECONDS, partial(self._turns.take, payer), fed)
        served = _Served(talk, host, uid, progress)
        if "peering" in progress:
            received = self._take_over(served)
        self._served[fd] = served

        async def hear(event: Event, *more: Event) -> None:
            if isinstance(event, Hello):
                await self._welcome(served, event)
            elif isinstance(event, Acknowledged):
                self._post.acknowledged(served.key, event.number)
                self.guests.telling.heard(served.key)
            elif isinstance(event, Want | Bytes | Grown):
                self.guests.supplies.hear(served.key, host, event)
            else:
                await self.guests.hear(served.key, uid, host, event, *more)

        try:
            await Timed(talk.run(hear, received), partial(self._agents.accounts.time.pay, payer))
        except* BrokenLinkError as errors:
            admitted, more = self._complaints.admit(str(uid), 1)
            if admitted:
                said, before = escape(str(errors.exceptions[0])), f" ({more} more before)"
                log.warning("a lead of uid %d: %s%s", uid, said, before if more else "",
                            extra=because_of(uid))  # fmt: skip
        finally:
            del self._served[fd]
            self.guests.supplies.closed(served.key, host)
            if self._post.data(served.key):
                self._post.note(served.key, seen=time.time())

    def note(self) -> None:
        """Notes what the next daemon needs in order to go on with each connection."""
        for served in self._served.values():
            progress = served.progress
            progress["peering"] = served.host.save(Descriptors(), again=served.hello)
            progress["left"] = bytes(served.talk.left)
            progress["unheard"] = bytes(served.talk.unheard)
            if served.known and not served.hello:
                progress["known"] = served.known
                progress["lease"] = self.guests.lease(served.key).save(Descriptors())

    def _take_over(self, served: _Served) -> bytes:
        progress, talk = served.progress, served.talk
        served.host.restore(progress["peering"])
        talk.left = memoryview(progress["left"])
        if known := progress.get("known"):
            served.known = known
            lease = self.guests.lease(served.key)
            lease.restore(progress["lease"])
            served.host.taken_over(self._post.stream(served.key), lease)
            self._post.tell(served.key, talk.said)
            self.guests.opened(served.key, served.host)
            talk.expect(lease.seconds)
        return bytes(progress.get("unheard", b""))

    async def _welcome(self, served: _Served, hello: Hello) -> None:
        """Answers a hello: the newer connection of a registration ends the older."""
        said = hello.said
        crashpoints.reach("peer.greeted")
        config, uid = self._agents.settings.config, served.uid
        with breaking():
            name = check_name(Said(said, "hello").word("name"))
            seconds: Any = said.get("ttl")
            right = seconds.__class__ in (int, float) and seconds >= _LEASE_MIN
            if len(name) > _NAME_MAX or not right:
                raise BrokenLinkError("hello without a right name or ttl")
            known, lead = self._registrations.lead(uid, said["as"], name)
            for other in self._served.values():
                if other.known == known:
                    other.talk.close()
                    other.known = ""
            if not self._post.stream(key_of(LEAD, known)).fits(said) and known == said["as"]:
                self.guests.part(key_of(LEAD, known))
                self._registrations.drop(known)
                known, lead = self._registrations.lead(uid, "", name)
        crashpoints.reach("peer.registered")
        served.known, served.hello, key = known, hello, key_of(LEAD, known)
        with breaking():
            await self._registrations.written()
        served.hello = None
        if served.known != known:
            return  # there is a newer one meanwhile
        seconds = float(min(seconds, config.placed.lease_max))
        self._post.note(key, uid=uid, alias=lead.alias, seconds=seconds, seen=time.time())
        lease = self.guests.lease(key)
        lease.seconds = seconds
        self._post.tell(key, served.talk.said)
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
        served.host.go_on(answer, self._post.stream(key), lease, hello)
        self.guests.opened(key, served.host)
