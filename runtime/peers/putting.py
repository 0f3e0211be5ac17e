"""Agents of other machines are made here, as a lead puts them, and are given less than that later.

A lead's uid makes them as its operator would by hand: the same parsers judge what is written. What
is less here than it was there falls away, or refuses the whole (``runtime.peers.admission``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from runtime import crashpoints
from runtime.agents.bundles import Left
from runtime.caller import Caller
from runtime.cell import networks
from runtime.cell.port import Host as Machine
from runtime.cell.port import Part
from runtime.errors import DeniedError, MalformedError, NotRunningError, QuotaError
from runtime.ids import Incarnation
from runtime.kernel.users import find_user
from runtime.peers.admission import (
    FILES,
    Bound,
    Put,
    check_sizes,
    least,
    lines_of,
    mount_table,
    narrowed,
    settable,
)
from runtime.peers.peering import Message
from runtime.peers.post import Post
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.spaces import tree_of_worktree
from runtime.texts import policy
from runtime.texts.names import quote
from runtime.texts.policy import Rules

_INCARNATION: Final = re.compile(r"[0-9a-f]{16}")


class Files(Protocol):
    """Writes files of agents (``ctxfs.placing``)."""

    #: the directory of those that came with ctxfs
    recipes: Path

    def write(self, agent: Agent, caller: Caller, name: str, text: str) -> None:
        """Writes a file of an agent as ``caller`` would, but for who may; ``CtxError``."""

    def code(self, error: BaseException) -> str:
        """The name of the errno of an error."""


class Putting(Part):
    """Makes guests, and takes from them."""

    #: is set once there is a filesystem
    files: Files

    def __init__(self, host: Machine, post: Post) -> None:
        super().__init__(host)
        self._post = post
        #: takes away a copy that its lead has forgotten
        self.take_away: Callable[[Agent], None] = lambda agent: None

    def caller(self, uid: int) -> Caller:
        """An operator of the link's uid, outside of all agents."""
        own = self._agents.privilege
        if uid == own.uid:
            return Caller(uid, own.gid, os.getpid(), groups=own.groups)
        entry = find_user(uid)
        if entry is None:
            return Caller(uid, uid, os.getpid(), groups=())
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
        return Caller(uid, entry.pw_gid, os.getpid(), groups=groups)

    def put(self, key: str, uid: int, message: Message) -> Agent:
        """A new guest, whose files are still to come; ``CtxError``."""
        agents, births = self._agents, self._agents.births
        data, config = self._post.data(key), agents.settings.config
        if not config.placed.allow:
            raise DeniedError("this machine runs no agents of others: placed.allow is false")
        if message.number <= data.get("upto", 0):
            raise NotRunningError("its lead has said meanwhile that it is lost")
        if not _INCARNATION.fullmatch(message.agent):
            raise MalformedError(f"{quote(message.agent)} is not an incarnation")
        self._check_room(uid, config.placed.max)
        caller, alias = self.caller(uid), data["alias"]
        put = Put.read(message.said, alias)
        guest: dict[str, Any] = {
            "supervisor": put.supervisor,
            "takes": put.takes,
            "alias": alias,
            "bound": asdict(put.bound),
            "files": {name: list(of) for name, of in put.files.items()},
            "limits": dict(put.limits),
            "session": put.session,
            "number": message.number,
            "first": put.first,
        }
        check_sizes(put.files, config)
        if put.worktree is not None:
            guest["worktree"] = asdict(put.worktree)
            tree = tree_of_worktree(uid, f"{put.name}@{alias}", message.agent)
            left = Left(path=f"{self._places.trees}/{tree}/work", keep=config.placed_keep)
            guest["left"] = asdict(left)
        self._make_way(key, f"{put.name}@{alias}")
        agent = births.guest(
            caller,
            f"{put.name}@{alias}",
            Incarnation(message.agent),
            lineage=put.supervisor,
            label=f"{put.name}_t",
            context=put.config.get("context", "fresh"),
            mount=mount_table(put.config.get("mount", ""), self.files.recipes),
            peer=key,
            guest=guest,
        )
        with births.placing(agent) as change:
            guest["lost"] = self._configure(agent, caller, put)
            agent.workspace = put.config.get("workspace", "inherit")
            if put.run > 1:
                change.runs.append((agent.name, put.run - 1))
            crashpoints.reach("peer.put")
        return agent

    def _make_way(self, key: str, name: str) -> None:
        """An agent of that name may be one that its lead has just forgotten."""
        agent = self._agents.registry.named(name)
        if agent is None or agent.peer != key or agent.status is not Status.DEAD:
            return
        if agent.guest.get("forgotten") and not self._agents.journal.behind:
            with self._agents.journal.preparing():
                self.take_away(agent)

    def _check_room(self, uid: int, most: int) -> None:
        placed = sum(
            agent.is_guest and agent.owner == uid and agent.status is not Status.DEAD
            for agent in self._agents.registry
        )
        if placed >= most:
            raise QuotaError(
                f"uid {uid} has {placed} agents of other machines here, the configured maximum "
                "(placed.max)"
            )

    def _configure(self, agent: Agent, caller: Caller, put: Put) -> list[str]:
        """Writes its files; which networks and spaces it does not have here."""
        wanted = least(put.limits, put.bound.limits)
        self.files.write(agent, caller, "label", f"{put.config['label']}\n")
        rules = policy.parse(put.config.get("policy", ""), agent.label)
        rules, lost = self._narrowed(agent, rules, put.bound, wanted)
        texts = {
            **put.config,
            "policy": policy.render(rules, agent.label),
        }
        if settable(wanted):
            texts["limits"] = lines_of(settable(wanted))
        for name in FILES:
            if name in texts:
                self.files.write(agent, caller, name, texts[name])
        return lost

    def _narrowed(
        self, agent: Agent, rules: Rules, bound: Bound, limits: Mapping[str, str]
    ) -> tuple[Rules, list[str]]:
        placed = self._agents.settings.config.placed
        return narrowed(
            rules,
            bound,
            agent.label,
            networks=placed.networks,
            shared=placed.shared,
            metered=networks.metered(self._agents),
            limited=limits,
        )

    def limit(self, agent: Agent, uid: int, message: Message) -> None:
        """All limits of a guest, as they are now."""
        said = message.fields.texts("limits")
        limits = {key: value for key, value in said.items() if value != "max"}
        self._confine(agent, uid, Bound.kept(agent.guest["bound"]), limits)

    def bound(self, agent: Agent, uid: int, message: Message) -> None:
        """Less than before, from now on."""
        before = Bound.kept(agent.guest["bound"])
        bound = Bound.read(message.said, agent.label, before)
        self._confine(agent, uid, bound, agent.guest["limits"])

    def _confine(self, agent: Agent, uid: int, bound: Bound, limits: Mapping[str, str]) -> None:
        """Takes from a guest what is not in a bound, or what its limits leave out."""
        if agent.status is Status.DEAD:
            return
        authority, total = self._agents.authority, least(limits, bound.limits)
        rules, _ = self._narrowed(agent, authority.own_policy(agent), bound, total)
        authority.check_taking(agent, rules)
        now_set = settable(total)
        gone = {key: "max" for key in agent.limits if key not in now_set}
        guest = {**agent.guest, "bound": asdict(bound), "limits": dict(limits)}
        with self._agents.journal.gathering() as change:
            self.files.write(agent, self.caller(uid), "limits", lines_of({**gone, **now_set}))
            change.set(agent, guest=guest)
            if rules != authority.own_policy(agent):
                change.set(agent, policy=policy.render(rules, agent.label))
