"""Agents of other machines, placed here: what their daemons tell them to do, and are told of them.

An operation is done by the parts that do it for an operator here, and noted as done in the same
transaction. What a lead says is judged as if an operator of the link's uid had said it by hand,
and what is refused is a fact. What else becomes of a guest is told in ``runtime.peers.telling``.

All guests of a registration run under one lease (``runtime.peers.lease``), whose end monitors read
from a file of their own (``runtime.cell.leases``): so they end with it, whoever is alive. A guest
that is to start waits for the first grant, and for what was put with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from itertools import groupby
from typing import ClassVar, Final

import trio

from runtime import crashpoints
from runtime.authority.guard import Act
from runtime.cell.leases import Leases
from runtime.cell.port import Host as Machine
from runtime.cell.port import LiveCell, Part, guarded
from runtime.cell.record import LEASE_OVER
from runtime.errors import (
    CtxError,
    KernelError,
    MalformedError,
    MissingError,
    NotRunningError,
    QuotaError,
    WrongStateError,
)
from runtime.ids import AgentIndex, RunId
from runtime.kernel import clock
from runtime.kernel.inotify import Wakeup
from runtime.life import room
from runtime.life.beginning import STARTING
from runtime.life.supervisor import Supervisor
from runtime.peers.hearing import Hearing
from runtime.peers.keeping import Keeping
from runtime.peers.lease import Lease
from runtime.peers.peering import BrokenLinkError, Event, Host, Message, Over
from runtime.peers.post import LEAD, Post
from runtime.peers.putting import Putting
from runtime.peers.supplies import Supplies
from runtime.peers.talking import now
from runtime.peers.telling import Telling
from runtime.records.change import RUNTIME, Change, Subscriber
from runtime.records.lifecycle import AGENT_MOVES, Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.texts.names import check_known, quote

log = logging.getLogger("ctxd.peers")

#: that what is killed at once may take, until that is said all the same
_KILL_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 1.0
_VERBS: Final = {
    cue.value: cue for cue in (Cue.STOP, Cue.KILL, Cue.PAUSE, Cue.RESUME, Cue.ABORT)
}
_ENDS: Final = frozenset((Cue.STOP, Cue.KILL))
#: nothing is said of what is killed without having begun to end
_OUTCOMES: Final = {"": Outcome.CANCELLED, **{each.value: each for each in Outcome}}


class Guests(Part, Subscriber):
    """Those of all registrations, by their keys."""

    def __init__(self, host: Machine, post: Post, supervisor: Supervisor) -> None:
        super().__init__(host)
        self._post = post
        self._supervisor = supervisor
        self.supplies = Supplies(host, post)
        #: makes them
        self.putting = Putting(host, post)
        self.putting.take_away = self._take_away
        self.keeping = Keeping(host, self._take_away)
        self.hearing = Hearing(host, post, supervisor.streams, self.supplies.connection)
        self.telling = Telling(host, post, self.supplies, supervisor.meter)
        self.telling.end_unheard = lambda agent: self._end(agent, Cue.KILL)
        self.telling.recipes = lambda: self.putting.files.recipes
        supervisor.streams.are_heard = self.telling.is_heard
        supervisor.recorder.conclude_with = self.telling.conclude
        self._leases = Leases(self._places.leases)
        self._under: dict[str, Lease] = {}
        #: told when a lease is granted, or is over
        self.changed = Wakeup()
        #: by whom, and up to which operation, what is ending now was called lost
        self._called_lost: dict[str, tuple[Host, int]] = {}
        #: that take along all that they have here
        self._leaving: set[str] = set()
        #: all that lives is taken over: leads are heard
        self.taken_over = trio.Event()
        self.supplies.done = lambda agent: self.changed.notify()
        supervisor.launch_when(self._ready, lambda agent: self.number(agent.peer))
        host.agents.journal.subscribe(self)

    def go_on(self) -> None:
        """Once all that lives is taken over: goes on with what the daemon before has left."""
        for key in self._post.keys(LEAD):
            if self._post.data(key).get("lease"):
                self._nursery.start_soon(self._watch, key, self.lease(key))
        for agent in self._agents.registry:
            if not agent.is_guest:
                continue
            if agent.status is Status.DEAD:
                self._nursery.start_soon(self._finish, agent)
            elif agent.status in (Status.NEW, Status.STARTING):
                self.supplies.expect(agent, agent.guest["files"])
            else:
                self.supplies.watch(agent)
                self.hearing.go_on(agent)
        self._nursery.start_soon(self.keeping.run)
        self.taken_over.set()

    def opened(self, key: str, peering: Host) -> None:
        """Both sides have said hello on a new connection, or it was taken over."""
        self.supplies.opened(key, peering)
        self.telling.heard(key)

    def has(self, key: str) -> bool:
        """Whether a lead has anything here."""
        return bool(self._agents.registry.guests(key))

    # the lease

    def lease(self, key: str) -> Lease:
        """The lease of a registration, which may be over, or not be granted yet."""
        if key not in self._under:
            data = self._post.data(key)
            number = data.get("lease", 0)
            end = self._leases.end(number) if number else None
            reached = self._post.stream(key).got
            self._under[key] = Lease(data["seconds"], reached, end)
        return self._under[key]

    def number(self, key: str) -> int:
        """The number of the lease under which a guest may start now; 0 if none is granted."""
        number = int(self._post.data(key).get("lease", 0))
        return number if number and self._leases.end(number) > now() else 0

    def leased(self, key: str, host: Host) -> None:
        """Something came on a connection: the lease may have been put off, or be over."""
        lease, number = self.lease(key), int(self._post.data(key).get("lease", 0))
        if lease.is_over(now()):
            lease = self._over(key, lease)
        elif lease.end is not None and not number:
            self._post.note(key, lease=self._leases.grant(lease.end))
            self._nursery.start_soon(self._watch, key, lease)
            self.changed.notify()
        elif lease.end is not None:
            self._leases.extend(number, lease.end)
        host.renew(lease)

    def _over(self, key: str, lease: Lease) -> Lease:
        """A lease is over, and so is what ran under it; what has not begun waits for the next."""
        self._leases.stop(int(self._post.data(key).get("lease", 0)))
        self._post.note(key, lease=0)
        new = self._under[key] = Lease(lease.seconds, lease.reached)
        for agent in self._agents.registry.guests(key):
            if agent.live and self._has_begun(agent):
                self._end(agent, Cue.ENDING)
        self.changed.notify()
        return new

    def _has_begun(self, agent: Agent) -> bool:
        """Whether a guest runs under a lease, or is about to."""
        live_cell = self._live_cells.get(agent.index)
        if live_cell is not None and live_cell.lease is not None:
            return True
        return self._port.facts(f"{agent.incarnation}-{agent.cell.id}").exist()

    async def _watch(self, key: str, lease: Lease) -> None:
        """Until a lease is over, also if nothing comes any more: monitors see that by themselves,
        and this daemon beside them."""
        while not lease.is_over(now()):
            left = (lease.end or 0.0) - now()
            await trio.sleep(min(max(left, 0.0), clock.LOOK_AGAIN))
        if self._under.get(key) is lease:
            self._over(key, lease)

    async def _ready(self, live_cell: LiveCell) -> None:
        """Until a guest that is to start may begin: it then runs under the lease at hand."""
        agent = live_cell.agent
        if not agent.is_guest:
            return
        while agent.status is Status.STARTING:
            granted, changed = self.changed.count, live_cell.changed.count
            number = self.number(agent.peer)
            if error := self.supplies.error(agent):
                raise MalformedError(error)
            if number and not agent.is_held and self.supplies.is_complete(agent):
                self.hearing.begin(agent)
                live_cell.lease = number
                return
            async with trio.open_nursery() as nursery:

                async def woken(wakeup: Wakeup, count: int, scope: trio.CancelScope) -> None:
                    await wakeup.after(count)
                    scope.cancel()

                nursery.start_soon(woken, self.changed, granted, nursery.cancel_scope)
                nursery.start_soon(woken, live_cell.changed, changed, nursery.cancel_scope)

    # ends

    def _end(self, agent: Agent, cue: Cue) -> None:
        """The end of a guest that its lead does not vouch for any more."""
        if agent.status in (Status.STOPPING, Status.DEAD) and cue is Cue.ENDING:
            return
        if agent.status is not Status.DEAD:
            with suppress(KernelError):  # who cannot be killed yet is killed later
                self._supervisor.end(agent, Outcome.INTERRUPTED, LEASE_OVER, cue)

    def end_all(self, key: str, upto: float = math.inf, *, since: int = -1) -> None:
        """Kills the guests of a registration, or those that operations after ``since`` and up to
        this one put here."""
        for agent in self._agents.registry.guests(key):
            if agent.status is not Status.DEAD and since < agent.guest["number"] <= upto:
                self._end(agent, Cue.KILL)

    def part(self, key: str) -> None:
        """A registration is over: a lead, or this machine, was put back to an earlier state."""
        self.end_all(key)
        self._leases.stop(int(self._post.data(key).get("lease", 0)))
        self._under.pop(key, None)
        self._post.forget(key)

    async def _end_over(self, key: str) -> None:
        """Says that nothing is left of what a lead calls lost, once that is so."""
        said = None
        while said != self._called_lost[key]:
            said = host, upto = self._called_lost[key]
            with trio.move_on_after(_KILL_SECONDS):
                for agent in self._agents.registry.guests(key):
                    live_cell = self._live_cells.get(agent.index)
                    if live_cell is not None and agent.guest["number"] <= upto:
                        await live_cell.wait_over()
        del self._called_lost[key]
        # only once a crash cannot undo that; a lead whose host asks says it again
        if self._post.is_stored(key):
            host.ended(upto)
            self._post.wakeup(key).notify()

    # what a lead says

    async def hear(self, key: str, uid: int, host: Host, event: Event, *more: Event) -> None:
        """Does what the lead says, several ends at once; ``BrokenLinkError``."""
        if isinstance(event, Message):
            messages = [each for each in (event, *more) if isinstance(each, Message)]
            for is_forget, some in groupby(messages, lambda each: each.op == "forget"):
                self._do_together(key, uid, list(some), is_forget=is_forget)
            self.lease(key).reach(messages[-1].number, now())
        elif isinstance(event, Over):
            lease, upto = self.lease(key), int(self._post.data(key).get("upto", 0))
            if event.upto > upto:
                self._post.note(key, upto=event.upto)
                lease.stop()
                self._over(key, lease)
            before = self._called_lost.get(key)
            since = before[1] if before else -1
            self.end_all(key, event.upto, since=since)
            self._called_lost[key] = host, max(event.upto, since)
            if not before:
                self._nursery.start_soon(self._end_over, key)

    def _do_together(
        self, key: str, uid: int, messages: list[Message], *, is_forget: bool
    ) -> None:
        """Does several ends, or takes several copies away, in one transaction."""
        if is_forget and len(messages) > 1 and self._are_forgotten(key, messages):
            return
        journal, many = self._agents.journal, len(messages) > 1 and not is_forget
        gathering = journal.gathering(refusable=False) if many else nullcontext()
        with suppress(KernelError), gathering:  # what was not killed is killed later
            for each in messages:
                self._do(key, uid, each)

    def _are_forgotten(self, key: str, messages: list[Message]) -> bool:
        """Takes copies of agents away, if nothing has to be done or kept for any of them."""
        agents = {each.agent: self._guest(key, each) for each in messages}
        there = [agent for agent in agents.values() if agent is not None and self._is_over(agent)]
        if len(there) < len(messages) or any(each.said.get("keep") for each in messages):
            return False
        change = Change()
        change.done += [(key, each.number, each.line) for each in messages]
        try:
            self._take_away(*there, change=change)
        except CtxError:
            return False  # each is judged by itself
        crashpoints.reach("peer.done")
        return True

    def _is_over(self, agent: Agent) -> bool:
        """Whether nothing of a guest runs, is to be written, or goes with it."""
        alone = not self._agents.registry.children(agent)
        return agent.status is Status.DEAD and alone and not self._agents.journal.behind

    def _do(self, key: str, uid: int, message: Message) -> None:
        """Does one operation; what is refused is told to the lead."""
        do = self._DO.get(message.op)
        if do is None:
            raise BrokenLinkError(f"{message.op} is not done here")
        self.telling.check_heard(key)
        journal = self._agents.journal
        error: BaseException
        with journal.acting(self.putting.caller(uid)):
            doing = None
            try:
                by = self._by(key, message)
                with journal.doing(key, message.number, message.line, by) as doing:
                    do(self, key, uid, message)
                crashpoints.reach("peer.done")
                return
            except (CtxError, OSError) as failed:
                error = failed
            except Exception as failed:
                log.exception("%s of a lead: a bug in ctxfs", message.op)
                error = failed
            change = Change()
            known = isinstance(error, CtxError | OSError)
            sentence = getattr(error, "sentence", str(error)) if known else "a bug in ctxfs there"
            code = self.putting.files.code(error) if known else "EIO"
            self.telling.refuse(change, key, message, code, sentence)
            if doing is None or not doing.done:
                change.done.append((key, message.number, message.line))
            journal.note(change)

    def _by(self, key: str, message: Message) -> str:
        """The name of whoever has it done at the lead, as in ``by``; empty if it does not say."""
        by = message.fields.word("by") if "by" in message.said else ""
        return by if by in ("", RUNTIME) else f"{by}@{self._post.data(key)['alias']}"

    def _guest(self, key: str, message: Message) -> Agent | None:
        """The guest that a lead means, if it is here: one of its own."""
        agent = self._agents.registry.incarnation(message.agent)
        return agent if agent is not None and agent.is_guest and agent.peer == key else None

    def _present(self, key: str, message: Message) -> Agent:
        agent = self._guest(key, message)
        if agent is None:
            raise MissingError(f"no agent {quote(message.agent)} of this lead is here")
        return agent

    # operations

    def _put(self, key: str, uid: int, message: Message) -> None:
        agent = self.putting.put(key, uid, message)
        self.supplies.expect(agent, agent.guest["files"])

    def _limits(self, key: str, uid: int, message: Message) -> None:
        if (agent := self._guest(key, message)) is not None:
            self.putting.limit(agent, uid, message)

    def _bound(self, key: str, uid: int, message: Message) -> None:
        if (agent := self._guest(key, message)) is not None:
            self.putting.bound(agent, uid, message)

    def _start(self, key: str, uid: int, message: Message) -> None:
        agent = self._present(key, message)
        if agent.guest["number"] <= self._post.data(key).get("upto", 0):
            raise NotRunningError("its lead has said meanwhile that it is lost")
        STARTING.check_when(Act.SAY, "start", agent)
        self._supervisor.start(agent)

    def _verb(self, key: str, uid: int, message: Message) -> None:
        agent, said = self._present(key, message), message.fields
        cue = check_known(said.word("verb"), _VERBS, "verb")
        AGENT_MOVES.move(agent.status, cue)
        if cue in _ENDS:
            outcome = check_known(said.word("outcome"), _OUTCOMES, "outcome")
            change, reason = Change(), said.word("reason") or "supervisor_stop"
            if said.get("orphaned", bool, False):
                change.set(agent, guest={**agent.guest, "orphaned": True})
            self._supervisor.end(agent, outcome, reason, cue, change)
        elif cue is Cue.PAUSE:
            self._supervisor.pause(agent)
        elif cue is Cue.RESUME:
            if why := room.describe(agent):
                raise QuotaError(why)
            if agent.run.aborting or agent.run.ending:
                raise WrongStateError(f"{quote(agent.name)} is still being aborted")
            self._supervisor.resume(agent)
        elif not agent.run.id:
            raise NotRunningError(f"no run to abort: {quote(agent.name)} is between two runs")
        else:
            run = said.get("run", str, "")  # an earlier lead does not say which
            self._supervisor.abort(agent, RunId(run) if run else None)

    def _freeze(self, key: str, uid: int, message: Message, *, held: bool = True) -> None:
        if (agent := self._guest(key, message)) is not None:
            self._supervisor.hold(agent, held)

    def _thaw(self, key: str, uid: int, message: Message) -> None:
        self._freeze(key, uid, message, held=False)

    def _usage(self, key: str, uid: int, message: Message) -> None:
        if (agent := self._guest(key, message)) is not None and agent.live:
            self.telling.look(agent)

    def _spoken(self, key: str, uid: int, message: Message) -> None:
        self.hearing.do(message.op, self._present(key, message), message.fields)

    def _forget(self, key: str, uid: int, message: Message) -> None:
        """The copy goes, as soon as nothing of the agent runs. Of no agent: all that is here."""
        if not message.agent and key not in self._leaving:
            self._leaving.add(key)
            self._nursery.start_soon(self._forget_all, key)
        elif (agent := self._guest(key, message)) is not None:
            self._forget_one(agent, keep=message.said.get("keep") is True)
        elif message.agent:
            data = self._post.data(key)
            self.keeping.forget(data["uid"], data["alias"], message.agent)

    async def _forget_all(self, key: str) -> None:
        """Forgets all that a lead has here, or had; who cannot be taken away is not waited for."""
        data, agents = self._post.data(key), self._agents.registry.guests(key)
        for agent in agents:
            with guarded(agent):
                self._forget_one(agent)
        with trio.move_on_after(_KILL_SECONDS):
            while any(self._agents.registry.get(agent.index) is agent for agent in agents):
                await trio.sleep(_RETRY_SECONDS)
        self._leaving.discard(key)
        self.keeping.forget(data["uid"], data["alias"])

    async def forget_lead(self, name: str, uid: int | None) -> None:
        """An operator here forgets a lead, by what it calls itself: of one uid, or of all.
        ``MissingError``; ``WrongStateError`` if agents of it live, or cannot be taken away."""
        keys = [
            key
            for key in self._post.keys(LEAD)
            if (data := self._post.data(key)).get("alias") == name and uid in (None, data["uid"])
        ]
        if not keys:
            raise MissingError(f"no lead {quote(name)} has or had agents of yours here")
        there = [each for key in keys for each in self._agents.registry.guests(key)]
        if live := [each.name for each in there if each.live]:
            such = f"such as {quote(live[0])}: stop them"
            raise WrongStateError(f"{len(live)} agents of {quote(name)} live here, {such}")
        for key in keys:
            await self._forget_all(key)
        if left := [each.name for key in keys for each in self._agents.registry.guests(key)]:
            such = f"such as {quote(left[0])}: the log of ctxd says why; then try again"
            raise WrongStateError(f"{len(left)} agents of {quote(name)} are still here, {such}")

    def _forget_one(self, agent: Agent, *, keep: bool = False) -> None:
        """With ``keep`` its worktree stays for a while."""
        if agent.status is Status.DEAD and not (keep or self._agents.journal.behind):
            with suppress(CtxError):
                self._take_away(agent)
                return
        with self._agents.journal.changing() as change:
            change.set(agent, guest={**agent.guest, "forgotten": True, "kept": keep})
        if agent.status is Status.DEAD:
            self._nursery.start_soon(self._finish, agent)
        else:
            self._end(agent, Cue.KILL)

    _DO: ClassVar[dict[str, Callable[[Guests, str, int, Message], None]]] = {
        "put": _put,
        "start": _start,
        "verb": _verb,
        "limits": _limits,
        "bound": _bound,
        "freeze": _freeze,
        "thaw": _thaw,
        "usage": _usage,
        "forget": _forget,
        **dict.fromkeys(("message", "text", "cancel", "session"), _spoken),
    }

    # what becomes of it

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        agent = self._agents.registry.get(index)
        if agent is None or not agent.is_guest or "status" not in names:
            return
        if agent.status is Status.DEAD:
            self.supplies.unwatch(agent)
            if not agent.guest.get("told"):
                self._nursery.start_soon(self._finish, agent)
            elif "guest" in names:
                crashpoints.reach("peer.told")
        elif agent.status in (Status.READY, Status.IDLE, Status.BUSY):
            self.supplies.watch(agent)
            self.supplies.drop_pack(agent)
            if agent.is_held:
                self._supervisor.restore(agent)  # it began just when it was to wait

    def agent_listed(self, agent: Agent) -> None:
        if agent.is_guest and self._agents.registry.get(agent.index) is not agent:
            self.supplies.forget(agent)

    async def _finish(self, agent: Agent) -> None:
        """Tells the end of a guest, or takes away what its lead has forgotten."""
        with guarded(agent):
            files = None
            while True:
                while self._agents.journal.behind:
                    await trio.sleep(_RETRY_SECONDS)
                if self._agents.registry.get(agent.index) is not agent:
                    return
                if agent.guest.get("forgotten"):
                    self._take_away(agent)
                    return
                if agent.guest.get("told") or not self._post.data(agent.peer):
                    return
                if files is not None:
                    self.telling.end(agent, files)
                    crashpoints.reach("peer.told")
                    return
                files = await self.supplies.files_of(agent)

    def _take_away(self, *agents: Agent, change: Change | None = None) -> None:
        self._agents.removals.remove_copies(change or Change(), *agents)
        for agent in agents:
            self.keeping.left(agent)
