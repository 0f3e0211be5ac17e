"""The identity of a caller: calling thread -> cgroup -> agent incarnation, and its roles.

A caller that cannot be resolved has no rights, uid 0 included. Names are not
identities: a caller is bound to an incarnation, and checked again at every use.

Uids cannot identify, since agents share their user's. An operator is a caller in no agent's cgroup
with uid 0 or the owner's. Socket peers are resolved in the same way, with a pidfd against PIDs
that are used again. Open files and connections are bound to the incarnation that opened them,
since names are reused and descriptors can be passed on. A caller below the daemon's root that is
in no agent has no rights, whatever its uid.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import replace
from typing import Final

from runtime.authority.accounts import OPERATORS as OPERATORS_SHARE
from runtime.authority.accounts import Payer, Reserve
from runtime.authority.attenuation import Authority
from runtime.caller import OPERATORS, Caller, Role
from runtime.kernel import cgroups, linux, spare
from runtime.kernel.privilege import Privilege
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.registry import Registry

#: of operators; of several they are found once, as each request asks for them
_OWNER: Final = Role.OPERATOR | Role.ANYONE
_MASTER: Final = OPERATORS | Role.ANYONE
_BY_POLICY: Final = (
    ("agent", "read", Role.READER),
    ("agent", "start", Role.STARTER),
    ("agent", "stop", Role.STOPPER),
    ("agent", "write", Role.WRITER),
    ("session", "read", Role.SESSION_READER),
)

#: that getsockopt(2) can be asked for
_GROUPS_MAX: Final = 256


def _peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """The groups of a peer as it connected (unix(7)); none if they are more than are asked for."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, linux.SO_PEERGROUPS, _GROUPS_MAX * 4)
    except OSError:
        return ()
    return tuple(int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4))


class Identity:
    """Resolves callers against the agents' cgroups."""

    def __init__(
        self,
        *,
        registry: Registry,
        authority: Authority,
        hierarchy: cgroups.Hierarchy,
        privilege: Privilege,
    ) -> None:
        self._registry = registry
        self._authority = authority
        self._hierarchy = hierarchy
        self._privilege = privilege
        self._askers = cgroups.Askers()

    def resolve(self, uid: int, gid: int, pid: int) -> Caller:
        """The caller that a thread is; ``pid`` may be a thread's id.

        ``OSError`` if that cannot be known now, as where the process is out of memory.
        """
        path = self._askers.path_of(pid) if pid > 0 else None
        if path is None:
            return Caller(uid, gid, pid, known=False)
        below = self._hierarchy.agent_path(path)
        if below is None and not self._hierarchy.is_own(path):
            return Caller(uid, gid, pid)
        # what helps the daemon asks for nothing, whatever it was led to
        agent = self._registry.by_cgroup(below) if below is not None else None
        if agent is None:
            return Caller(uid, gid, pid, known=False)
        return Caller(uid, gid, pid, agent.index, agent.incarnation)

    def resolve_peer(self, connection: socket.socket) -> Caller:
        """The process at the other end of a Unix socket, as it was when it connected.

        ``OSError`` if that cannot be known now.
        """
        return spare.with_spare(lambda: self._resolve_peer(connection))

    def _resolve_peer(self, connection: socket.socket) -> Caller:
        pid, uid, gid = linux.peer(connection)
        try:
            held = connection.getsockopt(socket.SOL_SOCKET, linux.SO_PEERPIDFD)
        except OSError as error:
            if error.errno == errno.ENOPROTOOPT:
                # before Linux 6.5: only the number
                return replace(self.resolve(uid, gid, pid), groups=_peer_groups(connection))
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):
                return Caller(uid, gid, pid, known=False)
            raise
        try:
            caller = self.resolve(uid, gid, pid)
            # After the look-up: if the peer still has its pid, that was no one else's.
            with open(f"/proc/self/fdinfo/{held}") as lines:
                alive = any(line.split() == ["Pid:", str(pid)] for line in lines)
        finally:
            os.close(held)
        if not alive:
            return Caller(uid, gid, pid, known=False)
        return replace(caller, groups=_peer_groups(connection))

    def still(self, caller: Caller) -> bool:
        """Whether the incarnation behind an open file or connection still lives."""
        if caller.agent is None:
            return caller.known
        agent = self._registry.get(caller.agent)
        return agent is not None and agent.live and agent.incarnation == caller.incarnation

    def is_master(self, caller: Caller) -> bool:
        """Whether it is root, or the user that runs the daemon without root, outside all agents."""
        return caller.known and caller.agent is None and self._privilege.is_master(caller.uid)

    def whose(self, caller: Caller) -> int | None:
        """The owner whose agents an operator has; None for all owners."""
        return None if self.is_master(caller) else caller.uid

    def payer(self, caller: Caller) -> Payer:
        """On whose account it uses something: its agent's owner's, else its own uid's."""
        if caller.agent is not None:
            agent = self._registry.recall(caller.agent)
            if agent is not None:
                return Payer(agent.owner, agent.name)
            return Payer(caller.uid, caller.incarnation)
        if not caller.known:
            return Payer(caller.uid, "unknown callers")
        master = self._privilege.is_master(caller.uid)
        return Payer(caller.uid, OPERATORS_SHARE, Reserve.MASTER if master else Reserve.OWNER)

    def root_roles(self, caller: Caller) -> Role:
        """The roles of the caller towards the daemon, and towards what belongs to no agent."""
        if not caller.known:
            return Role.NONE
        if caller.agent is not None:
            return Role.ANYONE
        return _MASTER if self.is_master(caller) else _OWNER

    def roles(self, caller: Caller, agent: Agent) -> Role:
        """The roles of the caller towards this agent, now."""
        if not caller.known:
            return Role.NONE
        if caller.agent is None:
            if self._privilege.is_master(caller.uid):
                roles = _MASTER
            elif caller.uid == agent.owner:
                roles = _OWNER
            else:
                return Role.ANYONE
            # who made it prepares it, also for the parent that it was given
            is_maker = agent.status is Status.NEW and agent.maker == caller.uid
            return roles | Role.CREATOR if is_maker else roles
        if not self.still(caller):
            return Role.NONE
        if caller.agent == agent.index:
            return Role.SELF | Role.ANYONE
        roles = Role.ANYONE
        if agent.parent == caller.agent:
            roles |= Role.CREATOR
        actor = self._registry.calling(caller)
        if actor is not None:
            if actor.owned and actor.parent == agent.index:
                roles |= Role.CHILD
            rules = self._authority.effective_policy(actor)
            for cls, perm, role in _BY_POLICY:
                if self._authority.reaches(actor, agent, cls, perm, rules):
                    roles |= role
        return roles
