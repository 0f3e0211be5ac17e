"""The agents that are placed at nodes: what their hosts are told, and what becomes known of them.

What is decided here is an operation, recorded in the transaction of the decision. What a host says
is a change here (``runtime.peers.replica``), in whose transaction it is noted as done; what follows
from it is done by the task that leads the agent (``follow``), for the next daemon to do again.

An agent is put at its node once the link there is open, so a stop before that is obeyed at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from runtime import crashpoints
from runtime.agents.bundles import Left, came, made, size_of
from runtime.agents.workspace import WorktreeState
from runtime.cell.port import Host, LiveCell, Part
from runtime.errors import (
    CtxError,
    MissingError,
    QuotaError,
    UnsupportedError,
    WrongStateError,
)
from runtime.ids import NO_RUN, AgentIndex, RunId
from runtime.kernel.inotify import Wakeup
from runtime.life.conclusions import LOST
from runtime.life.elsewhere import Elsewhere
from runtime.life.ending import Ender
from runtime.life.streams import Streams
from runtime.peers.bounds import bound_of, put_of
from runtime.peers.bylink import ByLink
from runtime.peers.contents import are_short, digests
from runtime.peers.lease import SLACK, Grants
from runtime.peers.peering import TALKING, Delta, Event, Message, Over
from runtime.peers.post import NODE, Post
from runtime.peers.replica import Replica
from runtime.peers.returns import Returns
from runtime.peers.speaking import Speaking
from runtime.peers.talking import now
from runtime.records.change import RUNTIME, Change, Subscriber
from runtime.records.items import BY_ABORT
from runtime.records.lifecycle import Cue, Effect, Status
from runtime.records.model import Agent, Outcome
from runtime.records.settings import PLACED_GRACE
from runtime.texts.names import quote

log = logging.getLogger("ctxd.peers")

#: that a start waits for the link
_OPEN_SECONDS: Final = 30.0
#: between two looks at clocks that go on while a machine sleeps
_LOOK_SECONDS: Final = 60.0
#: between two questions what an agent uses: it is told for longer (``runtime.peers.guests``)
_ASK_SECONDS: Final = 30.0
#: between two looks whether a node has heard that it is forgotten
_FORGET_LOOK: Final = 0.05
#: who said verbs of an agent last
_ASKED_MAX: Final = 8
#: of a supervisor that hears no report any more
_NOT_HEARING: Final = (Status.STOPPING, Status.DEAD)
_ENDS: Final = frozenset({Cue.STOP, Cue.ENDING, Cue.OWNER_ENDING})


class Leading(Part, Elsewhere, Subscriber):
    """The agents of all registrations at nodes, by their keys."""

    def __init__(self, host: Host, post: Post, streams: Streams) -> None:
        super().__init__(host)
        self._post = post
        self._ender = Ender(host)
        self._speaking = Speaking(host, post, streams)
        self._replica = Replica(host, post, self._ender, self._speaking)
        #: what they give back
        self.returns = Returns(host, post)
        self.returns.done = self._notify
        #: wants the link of a node and owner to be open
        self.want: Callable[[str, int], None] = lambda node, owner: None
        #: by node, the agents that were lost since the start
        self.lost: Counter[str] = Counter()
        #: of links that are open, their registrations; of the others, why not
        self._open: dict[tuple[str, int], str] = {}
        self._closed: dict[tuple[str, int], str] = {}
        #: that live at a node, or will when its link is open
        self._there = ByLink[AgentIndex, Agent]()
        self._changed = Wakeup()
        #: of those that are about to be put there, the documents that are long
        self._digests: dict[AgentIndex, dict[str, tuple[int, str]]] = {}
        #: when their hosts were asked what they use
        self._asked: dict[AgentIndex, float] = {}
        for agent in host.agents.registry:
            self._count(agent)
        #: a daemon that starts assumes that the one before granted in that moment
        self._grants = {
            key: self._granting(key, 0.0) for key in post.keys(NODE) if post.data(key)
        }
        self._by_link = ByLink[str, str]()
        for key in self._grants:
            self._by_link.put(self._where(key), key, key)
        host.agents.journal.subscribe(self)
        host.nursery.start_soon(self._watch)

    def lead_by(self, ender: Ender) -> None:
        self._ender = self._replica.ender = ender

    # leases and links

    def _granting(self, key: str, seconds: float) -> Grants:
        data = self._post.data(key)
        grants = Grants(max(seconds, data.get("seconds", 0.0)), PLACED_GRACE, now())
        grants.over = data.get("over")
        grants.behind = partial(self._behind, key)
        return grants

    def _behind(self, key: str) -> int:
        """Ends that hold in memory, of which a host cannot be told yet; or more."""
        late = self._agents.journal.late
        return sum(agent.peer == key for change in late for agent, _ in change.moves)

    def grants(self, key: str, node: str, owner: int, seconds: float) -> Grants:
        """The leases that were granted in a registration, which may be new."""
        if key not in self._grants:
            self._post.note(key, node=node, owner=owner, seconds=seconds)
            self._grants[key] = self._granting(key, seconds)
            self._by_link.put((node, owner), key, key)
        elif seconds > self._grants[key].seconds:
            # it is not made less as long as somebody may count with it
            self._post.note(key, seconds=seconds)
            self._grants[key].seconds = seconds
        return self._grants[key]

    def _where(self, key: str) -> tuple[str, int]:
        data = self._post.data(key)
        return data["node"], data["owner"]

    def _at(self, node: str) -> list[str]:
        """The registrations at a node."""
        return [key for key in self._grants if self._post.data(key).get("node") == node]

    def left(self, node: str) -> float:
        """Seconds after which agents at a node are lost if nothing is heard of it; 0 for no node
        at which there were any."""
        ends = [self._grants[key].lost_at() for key in self._at(node)]
        return max(0.0, min(ends) - now()) if ends else 0.0

    def undone(self, node: str) -> int:
        """Operations that a node has not said it has done."""
        return sum(len(self._post.stream(key).kept) for key in self._at(node))

    def state_of(self, agent: Agent) -> dict[str, Any]:
        """The state of an agent that was put at a node: seconds of its lease that are left, verbs
        that were said and are not done there, and bytes that are to come."""
        if not agent.away or agent.peer not in self._grants:
            return {}
        kept = self._post.stream(agent.peer).kept
        own = (json.loads(each.line) for each in kept if each.agent == agent.incarnation)
        return {
            "lease": self._grants[agent.peer].left(now()),
            "pending": " ".join(said["verb"] for said in own if said["op"] == "verb"),
            "fetch": self.returns.left(agent),
        }

    def needs(self, node: str, owner: int) -> bool:
        """Whether there is something for which the link has to be open."""
        where = node, owner
        return bool(self._there.at(where)) or any(
            self._post.stream(key).kept or self._grants[key].over is not None
            for key in self._by_link.at(where)
            if not self._post.data(key).get("parted")
        )

    def parted(self, key: str) -> None:
        """A registration is over at the host, or will be with its lease: what is there is lost
        when that is over, and whoever is there then has another one."""
        self._post.note(key, parted=True)
        self._changed.notify()

    def check_left(self, node: str, owner: int | None) -> None:
        """``WrongStateError`` if agents are at a node, of one owner or of any."""
        live = [each for each in self._there.values() if each.node == node]
        if there := [each.name for each in live if owner in (None, each.owner)]:
            raise WrongStateError(
                f"{len(there)} agents are at {quote(node)}, such as {quote(there[0])}: stop them"
            )

    async def leave(self, node: str, owner: int | None) -> None:
        """Has a node take away all that was left there, where its link is open, and waits for
        that; ``WrongStateError`` if agents are there."""
        self.check_left(node, owner)
        keys = [
            key
            for (name, uid), key in self._open.items()
            if name == node and owner in (None, uid)
        ]
        for key in keys:
            with self._agents.journal.changing() as change:
                change.post(key, "forget", "")
        while any(self._post.stream(key).kept for key in keys):
            await trio.sleep(_FORGET_LOOK)

    def forget(self, node: str, owner: int | None) -> set[int]:
        """Forgets the registrations at a node, of one owner or of all; the owners that had one.
        ``WrongStateError`` if agents are there."""
        self.check_left(node, owner)
        owners = set()
        for key in self._at(node):
            if owner in (None, self._post.data(key)["owner"]):
                owners.add(self._post.data(key)["owner"])
                self._forget(key)
        return owners

    def _forget(self, key: str) -> None:
        del self._grants[key]
        self._by_link.pop(key)
        self._post.forget(key)

    def knows(self, key: str) -> bool:
        """Whether a registration is there, be it over."""
        return key in self._grants

    def opened(self, key: str, hello: Mapping[str, Any]) -> None:
        """A link is open: both sides have said hello."""
        where, boot = self._where(key), hello.get("boot")
        if boot != self._post.data(key).get("boot"):  # whatever was there before has ended
            self._grants[key].over = None
            self._post.note(key, boot=boot, over=None)
        self._post.note(key, alias=hello.get("alias", ""), version=hello.get("version", 1))
        self._open[where] = key
        self._closed.pop(where, None)
        self._wake(where)

    def closed(self, node: str, owner: int, why: str, *, refused: bool = False) -> None:
        """A link is not open any more, or could not be opened."""
        self._open.pop((node, owner), None)
        self._closed[node, owner] = ("!" if refused else "") + why
        self._wake((node, owner))

    def _wake(self, where: tuple[str, int]) -> None:
        for agent in self._there.at(where):
            if not agent.away:
                self._notify(agent)

    def _notify(self, agent: Agent) -> None:
        if (live_cell := self._live_cells.get(agent.index)) is not None:
            live_cell.changed.notify()

    # starting

    def choose(self, agent: Agent) -> str:
        """The node, of those that are meant and allowed and that answered last, that has the
        least share of what it may have; ``DeniedError``, ``MissingError``, ``QuotaError``."""
        nodes = self._agents.settings.config.nodes
        meant = self._agents.nodes.candidates(agent)
        live = Counter(each.node for each in self._there.values())
        free = [name for name in meant if live[name] < nodes[name].max]
        if not free:
            raise QuotaError(self._full(meant))
        answering = [name for name in free if not self._closed.get((name, agent.owner))]
        return min(
            answering or free,
            key=lambda name: (live[name] / nodes[name].max, live[name], name),
        )

    def _full(self, meant: list[str]) -> str:
        nodes, said = self._agents.settings.config.nodes, []
        for name in meant:
            owners = [each.owner for each in self._there.values() if each.node == name]
            most = max(sorted(set(owners)), key=owners.count)
            said.append(
                f"{name} has {len(owners)} of {nodes[name].max} placed agents (nodes: max), "
                f"{owners.count(most)} of uid {most}"
            )
        return f"{'; '.join(said)}: wait until one has ended, or end one"

    def is_ready(self, agent: Agent, node: str) -> bool:
        return (node, agent.owner) in self._open and are_short(self.returns.supplies(agent))

    async def reach(self, live_cell: LiveCell) -> None:
        agent = live_cell.agent
        where = agent.node, agent.owner
        self._closed.pop(where, None)
        self.want(*where)

        def is_known() -> bool:
            refused = self._closed.get(where, "").startswith("!")
            return agent.status is not Status.STARTING or where in self._open or refused

        with trio.move_on_after(_OPEN_SECONDS):
            await live_cell.until(is_known)
        if agent.status is Status.STARTING and where not in self._open:
            why = self._closed.get(where, "").removeprefix("!")
            raise MissingError(f"{agent.node}: {why or f'no answer within {_OPEN_SECONDS:g} s'}")
        if not are_short(paths := self.returns.supplies(agent)):
            self._digests[agent.index] = await trio.to_thread.run_sync(digests, paths)

    def add_start(self, change: Change, agent: Agent, run: RunId) -> None:
        node = change.peek_agent(agent, "node")
        key, others = self._open[node, agent.owner], self._there.at((node, agent.owner))
        if agent.how.takes_messages and self._post.data(key)["version"] < TALKING:
            raise UnsupportedError(
                f"mode {agent.mode}: ctxd at {node} is an earlier one, where agents run once: "
                "upgrade it, or write once"
            )
        bound = bound_of(self._agents, agent)
        if not any(each.peer == key and "lost" not in each.heard for each in others):
            self._grants[key].begin(now())
            self._changed.notify()
        change.set(agent, peer=key, heard={"bound": bound})
        files = self._digests.pop(agent.index, None) or digests(self.returns.supplies(agent))
        tell = partial(self._speaking.tell, change, agent)
        first = self._speaking.first(change, agent)
        tell("put", **put_of(self._agents, agent, run, bound, files, first))
        if any(change.peek_agent(each, "frozen") for each in self._above(agent)):
            tell("freeze")
        self._speaking.waiting(agent, tell)
        tell("start", by=self._agents.journal.actor)

    def _above(self, agent: Agent) -> list[Agent]:
        return self._agents.registry.ancestors(agent)

    # worktrees

    def left_of(self, agent: Agent) -> tuple[Left, Path | None]:
        left, path = Left(**agent.heard.get("left", {})), came(self._agents, agent)
        if agent.peer and "ended" not in agent.heard:
            return replace(left, why=f"{agent.node} has not said what it committed"), None
        if not left.size or not left.commit:
            return left, None
        if size_of(path) == left.size:
            return left, path
        most = self._agents.settings.config.artifact_max
        size = f"what it committed, {left.size} bytes"
        why = f"{size}, and what else it gave is more than artifact_max, {most}"
        if left.size <= most:
            why = f"{size}, did not come from {agent.node}"
        return replace(left, why="; ".join(filter(None, (why, left.why)))), None

    def _is_left_there(self, agent: Agent, worktree: Mapping[str, Any] | None) -> bool:
        """Whether what an agent left in its worktree was not taken over whole: then it is kept at
        its node for as long as that keeps anything, or until that was done."""
        if worktree is None or not agent.worktree_made:
            return False
        return bool(worktree["state"] != WorktreeState.FETCHED)

    # what hosts are told

    def say(self, agent: Agent, verb: str, run: RunId = NO_RUN) -> None:
        self._speaking.check(agent)
        by, change = self._agents.journal.actor, Change()
        # what comes of it is told as done by who said it
        asked = [*dict.fromkeys((*agent.heard.get("asked", ()), by))][-_ASKED_MAX:]
        change.set(agent, heard={**agent.heard, "asked": asked})
        said = {"verb": verb, "by": by, "reason": "", "outcome": ""}
        if run:
            change.set(agent, run=replace(agent.run, cause=BY_ABORT, caused_by=by))
            said["run"] = run
        self._speaking.tell(change, agent, "verb", **said)
        self._agents.journal.commit(change)

    def switch(self, agent: Agent, name: str) -> None:
        self._speaking.switch(agent, name)

    def ask_usage(self, agent: Agent) -> None:
        before, since = self._asked.get(agent.index, -math.inf), trio.current_time()
        is_open = (agent.node, agent.owner) in self._open
        if agent.live and is_open and since - before > _ASK_SECONDS:
            self._asked[agent.index] = since
            with contextlib.suppress(CtxError), self._agents.journal.changing() as change:
                self._speaking.check(agent)
                self._speaking.tell(change, agent, "usage")

    def storing(self, change: Change, when: float) -> None:
        for agent, values in tuple(change.agents.values()):
            taken = "worktree" in values and not self._is_left_there(agent, values["worktree"])
            if taken and agent.away and not agent.live:
                self._speaking.tell(change, agent, "forget", keep=False)
        if not self._there:
            return
        self._tell_ends(change)
        for agent, values in tuple(change.agents.values()):
            if values.get("heard", {}).get("lost") and agent.away:
                self._post.note(agent.peer, over=self._grants[agent.peer].over)
            if not values.keys().isdisjoint(("policy", "limits")):  # ``_narrow`` follows
                for each in (agent, *self._agents.registry.descendants(agent)):
                    if each.away and each.live:
                        self._speaking.check(each)
            if "limits" in values and agent.away and agent.live:
                new, old = values["limits"], agent.limits
                keys = {key for key in new | old if new.get(key) != old.get(key)}
                limits = {key: new.get(key, "max") for key in sorted(keys)}
                self._speaking.tell(change, agent, "limits", limits=limits)
            if values.get("frozen", agent.frozen) is not agent.frozen:
                self._tell_frozen(change, agent)

    def _tell_ends(self, change: Change) -> None:
        killed = [
            member
            for agent, effect in change.effects
            if effect is Effect.KILL
            for member in (agent, *self._agents.registry.descendants(agent))
            if member.away and member.live
        ]
        # of a change that waited for room on the disk, the effects are done by now
        killed += [agent for agent, cue in change.moves if cue is Cue.KILL and agent.away]
        for agent in {each.index: each for each in killed}.values():
            self._tell_kill(change, agent)
        for agent, cue in change.moves:
            if not change.peek_agent(agent, "node"):
                continue
            heard = change.peek_agent(agent, "heard")
            if change.peek_agent(agent, "status") is Status.DEAD:
                left = self._is_left_there(agent, change.peek_agent(agent, "worktree"))
                self._speaking.tell(change, agent, "forget", keep=left)
            elif cue in _ENDS and agent not in killed and not heard.keys() & {"ended", "lost"}:
                self._tell_end(change, agent, "stop")

    def _tell_kill(self, change: Change, agent: Agent) -> None:
        """Once, however often it is said, until it is done."""
        kept = reversed(self._post.stream(agent.peer).kept)
        last = next((each for each in kept if each.agent == agent.incarnation), None)
        if last is None or json.loads(last.line).get("verb") != "kill":
            self._tell_end(change, agent, "kill")

    def _tell_end(self, change: Change, agent: Agent, verb: str) -> None:
        outcome, reason = change.peek_agent(agent, "cause") or ("", "")
        by = change.peek_agent(agent, "caused_by") or change.by
        said = {"verb": verb, "by": by, "reason": reason, "outcome": outcome}
        supervisor = self._agents.registry.supervisor_of(agent)
        if supervisor is not None and change.peek_agent(supervisor, "status") in _NOT_HEARING:
            said["orphaned"] = True
        self._speaking.tell(change, agent, "verb", **said)

    def _tell_frozen(self, change: Change, top: Agent) -> None:
        for agent in self._agents.registry.descendants(top):
            if agent.away and agent.live:
                above = self._above(agent)
                frozen = any(change.peek_agent(each, "frozen") for each in above)
                if frozen is not any(each.frozen for each in above):
                    self._speaking.check(agent)
                    self._speaking.tell(change, agent, "freeze" if frozen else "thaw")

    def agent_changed(self, index: AgentIndex, names: Any) -> None:
        agent = self._agents.registry.get(index)
        if agent is None:
            self._there.pop(index)
            return
        if "status" in names or "node" in names:
            self._count(agent)
            if agent.away and not agent.live:
                self.returns.forget(agent)
            if agent.away and agent.status in (Status.BUSY, Status.DEAD):
                self._agents.trash.discard(made(self._agents, agent), agent.owner)
        if "heard" in names:
            self._notify(agent)
        where = agent.node, agent.owner
        if "worktree" in names and agent.away and not agent.live and self.needs(*where):
            self.want(*where)
        if self._there and ("policy" in names or "limits" in names):
            self._narrow(agent)

    def agent_listed(self, agent: Agent) -> None:
        if self._agents.registry.get(agent.index) is not agent:
            self._there.pop(agent.index)

    def _count(self, agent: Agent) -> None:
        if agent.live and agent.node:
            self._there.put((agent.node, agent.owner), agent.index, agent)
        elif self._there.pop(agent.index):
            self._asked.pop(agent.index, None)
            self._digests.pop(agent.index, None)
            if self._post.data(agent.peer).get("parted"):
                self._changed.notify()

    def _narrow(self, top: Agent) -> None:
        """Tells hosts what agents may at most, where that has changed."""
        for agent in (top, *self._agents.registry.descendants(top)):
            if not agent.away or agent.index not in self._there:
                continue
            bound = bound_of(self._agents, agent)
            if bound != agent.heard.get("bound"):
                change = Change()
                change.set(agent, heard={**agent.heard, "bound": bound})
                self._speaking.tell(change, agent, "bound", **bound)
                self._agents.journal.note(change)

    # what hosts say

    def recovered(self) -> None:
        """All that lived is taken over, and what ended meanwhile is recorded: links are opened."""
        for agent in self._agents.registry:
            if agent.away and not agent.live:  # a daemon may have died before it let go of that
                self.returns.forget(agent)
        for agent in self._all():
            if agent.away:
                self._narrow(agent)
        wanted = {(each.node, each.owner) for each in self._all()}
        wanted.update(map(self._where, self._grants))
        for where in sorted(wanted):
            if self.needs(*where):
                self.want(*where)

    async def hear(self, key: str, event: Event, *more: Event) -> None:
        """Notes what the host says, several facts at once; ``BrokenLinkError``."""
        if isinstance(event, Message):
            self._replica.take(key, (event, *more))
            crashpoints.reach("lead.heard")
        elif isinstance(event, Delta):
            self._speaking.hear_delta(key, event)
        elif isinstance(event, Over):
            grants = self._grants[key]
            if grants.over is not None and event.upto >= grants.over:
                grants.over = None
                self._post.note(key, over=None)

    # following

    async def follow(self, live_cell: LiveCell) -> None:
        while live_cell.agent.live:
            count = live_cell.changed.count
            if self._is_over(live_cell):
                return
            await live_cell.changed.after(count)

    def _is_over(self, live_cell: LiveCell) -> bool:
        """Whether nothing of an agent is left there, and all that it gave is here; begins its end
        if the host has."""
        agent = live_cell.agent
        heard = agent.heard
        ended, lost = heard.get("ended"), heard.get("lost", False)
        if agent.status is not Status.STOPPING:
            if not (ended or lost):
                return False
            outcome, reason = ended or LOST
            self._ender.end(agent, Outcome(outcome), reason)
        elif ended is None and lost and agent.cause != LOST:
            live_cell.doubt = "unconfirmed"
        is_kept = ended is not None and self._is_kept(agent)
        if lost or live_cell.given_up:
            if ended is not None and not (is_kept and heard.get("dead")):
                live_cell.doubt = "incomplete"
            return lost or "dead" in heard
        if is_kept and self.returns.error(agent):
            live_cell.doubt = "incomplete"
        return is_kept and "dead" in heard

    def _is_kept(self, agent: Agent) -> bool:
        """Whether all is here that an agent that has ended gave back, or no more of it comes."""
        self.returns.ended(agent, agent.heard.get("gives", {}))
        return self.returns.is_complete(agent)

    async def _watch(self) -> None:
        """Says what is lost: nothing of it can be left."""
        while True:
            count = self._changed.count
            left = math.inf
            there = {each.peer for each in self._all()}
            not_lost = {each.peer for each in self._all() if "lost" not in each.heard}
            for key, grants in tuple(self._grants.items()):
                if key not in there and self._post.data(key).get("parted"):
                    self._forget(key)
                elif key in not_lost:
                    late = grants.lost_at() - now()
                    if late <= 0:
                        self._lose(key)
                    else:
                        left = min(left, late)
            with trio.move_on_after(min(left, _LOOK_SECONDS)):
                await self._changed.after(count)

    def _all(self) -> tuple[Agent, ...]:
        return tuple(self._there.values())

    def _lose(self, key: str) -> None:
        """Nothing is granted any more for what was put there until now, from before it is said
        that it is lost."""
        change = Change(by=RUNTIME)
        for agent in self._all():
            if agent.peer == key:
                self.lost[agent.node] += "lost" not in agent.heard
                change.set(agent, heard={**agent.heard, "lost": True})
        self._grants[key].over = self._post.stream(key).sent
        self._agents.journal.note(change)

    async def give_up(self) -> None:
        graces = [self._agents.settings.grace(each) for each in self._all() if each.away]
        if graces:
            await trio.sleep(max(graces) + SLACK)
            for key in {each.peer for each in self._all() if each.away}:
                self._lose(key)
