"""Makes, starts and changes the agents that ``agents.d`` declares, as their owners would.

Every step is one that an operator takes: ``mkdir``, writes of files, verbs, through the same
nodes and so under the same rules.

An agent remembers which file declared it, and what that said. So a file is compared with what it
said before, not with what operators have written since.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import trio

from ctxfs.declared import ROWS, SHAPES, Declaration, Declared, read_directory
from ctxfs.filesystem import Filesystem
from ctxfs.tools.paths import Paths
from ctxfs.tree.nodes import Call
from runtime.caller import Caller, Role
from runtime.errors import CtxError, MalformedError
from runtime.ids import AgentIndex
from runtime.kernel.linux import boot_id
from runtime.kernel.users import find_user
from runtime.records.change import Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.yaml_marks import Mistake
from runtime.texts.yaml_marks import Path as Keys

log = logging.getLogger("ctxd.declared")

#: that say who makes the agent, and so are not written
_MAKING: Final = ("owner",)
#: files with paths, which lead somewhere anew at each reading
_PATHS: Final = ("mount", "root", "workspace")


class _Refused(Exception):
    """A part of a declaration was refused."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(str(mistake))


class Declaring(Subscriber):
    """Compares what is declared with the agents that there are, when it is told to read and
    when those change."""

    def __init__(self, fs: Filesystem, directory: Path) -> None:
        self._fs = fs
        self._base = fs.base
        self._agents = fs.base.agents
        self._directory = directory
        self._declared = Declared()
        #: sentences on what was wrong, or could not be, when it was read last
        self.complaints: list[str] = []
        #: something was read
        self.known = trio.Event()
        #: that live, and are to be changed when they have ended
        self._changing: set[str] = set()
        #: what somebody's children wait for, by name: the incarnation that was live last
        self._parents: dict[str, str] = {}
        self._wake = trio.Event()
        self._turn = trio.Lock()
        self._closed = False
        self._agents.journal.subscribe(self)

    # Subscriber

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        agent = self._agents.registry.get(index)
        if agent is not None and "status" in names:
            self.agent_listed(agent)

    def agent_listed(self, agent: Agent) -> None:
        if agent.name in self._changing or agent.name in self._parents:
            self._wake.set()

    def close(self) -> None:
        """From now on nothing is begun: all agents are about to be ended."""
        self._closed = True

    async def closed(self) -> None:
        """Returns when what was begun before ``close`` is done."""
        async with self._turn:
            pass

    # reading

    async def read(self, *, booting: bool) -> None:
        """Reads the directory, makes what is new and changes what is another and stopped.

        ``booting`` starts what says so, too. Mistakes are logged with file and line; what a file
        that is wrong declared earlier is left as it is.
        """
        async with self._turn:
            found = await self._read()
            self.complaints = []
            for mistake in found.mistakes:
                self._complain(mistake)
            self._keep_broken(found)
            self._declared = found
            self._changing.clear()
            self._parents = {each.parent: "" for each in found.agents.values() if each.parent}
            for declaration in found.ordered():
                await self._bring(declaration, booting=booting)
            self._look_at_parents()
            self.known.set()
        if found.agents or found.mistakes:
            wrong = f", {len(found.mistakes)} mistakes" if found.mistakes else ""
            log.info("%s: %d agents are declared%s", self._directory, len(found.agents), wrong)

    def _complain(self, what: object, level: int = logging.ERROR) -> None:
        log.log(level, "%s", what)
        self.complaints.append(str(what))

    async def _read(self) -> Declared:
        trusted = {0, self._agents.privilege.uid}
        return await trio.to_thread.run_sync(
            lambda: read_directory(self._directory, trusted=trusted)
        )

    async def started_at_boot(self) -> set[str]:
        """The agents that are declared to start and that are what their files say."""
        found = await self._read()
        return {
            agent.name
            for agent in self._agents.registry
            if (declaration := found.agents.get(agent.name)) is not None
            and declaration.start
            and agent.declared == declaration.file
            and agent.declaration == declaration.values
        }

    def _keep_broken(self, found: Declared) -> None:
        """A file that is wrong says what it said before; of one that is gone it is told."""
        for agent in self._agents.registry:
            if not agent.declared or agent.name in found.agents:
                continue
            if agent.declared in found.broken:
                found.agents[agent.name] = Declaration.recorded(
                    agent.name, agent.declared, agent.declaration
                )
            else:
                gone = f"{agent.declared} is gone: the agent {agent.name} stays until it is removed"
                self._complain(gone, logging.WARNING)

    async def run(self) -> None:
        """Goes on with what waits for agents to begin or to end."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await self.go_on()

    async def go_on(self) -> None:
        """Changes what has ended since, and makes the children of what has begun."""
        async with self._turn:
            for declaration in self._declared.ordered():
                agent = self._agents.registry.named(declaration.name)
                ended = declaration.name in self._changing and not (agent and agent.live)
                if ended or self._has_new_parent(declaration):
                    await self._bring(declaration, booting=False)
            self._look_at_parents()

    def _has_new_parent(self, declaration: Declaration) -> bool:
        """Whether its parent has become live since it was looked last."""
        parent = self._parent_of(declaration)
        if parent is None or not parent.accepts_children:
            return False
        return self._parents[parent.name] != parent.incarnation

    def _parent_of(self, declaration: Declaration) -> Agent | None:
        """The agent that is meant by its ``parent``: anybody may have taken the name."""
        found = self._agents.registry.named(declaration.parent)
        return found if found is not None and not self._why_not_meant(declaration, found) else None

    def _why_not_meant(self, declaration: Declaration, found: Agent) -> str:
        """Why a child gets no parent of this name, whose owner would read what it is told."""
        above = self._declared.agents.get(found.name)
        if above is not None and found.declared != above.file:
            return f"the agent {found.name} is not the one that {above.file} declares"
        if above is not None or "owner" in declaration.values:
            return ""
        if found.owner == self._agents.privilege.uid:
            return ""
        what = f"the agent {found.name} is not declared, and belongs to uid {found.owner}"
        return f"{what}: if that one is meant, add owner"

    def _look_at_parents(self) -> None:
        for name in self._parents:
            agent = self._agents.registry.named(name)
            # between two runs its children are gone, and belong to the next one
            live = agent is not None and agent.accepts_children and not agent.waits_to_run
            self._parents[name] = agent.incarnation if agent is not None and live else ""

    # one agent

    async def _bring(self, declaration: Declaration, *, booting: bool) -> None:
        """Makes an agent what its file says, as far as it can be now; logs what cannot."""
        await trio.lowlevel.checkpoint()
        if self._closed:
            return
        try:
            await self._agree(declaration, booting=booting)
        except _Refused as refused:
            self._complain(refused)
        except (CtxError, OSError) as error:
            sentence = error.sentence if isinstance(error, CtxError) else str(error)
            self._complain(f"{declaration.file}: {declaration.name}: {sentence}")
        except Exception:
            log.exception("%s: a bug in ctxfs", declaration.file)

    async def _agree(self, declaration: Declaration, *, booting: bool) -> None:
        name = declaration.name
        self._changing.discard(name)
        agent = self._agents.registry.named(name)
        if agent is None:
            if waiting := self._why_waiting(declaration):
                log.info("%s: %s is made when %s", declaration.file, name, waiting)
                return
            await self._make(declaration)
            if declaration.start and not self._closed:
                await self._say(name, "start")
            return
        if agent.declared != declaration.file:
            other = f"an agent {name} exists that this file did not declare: it is left alone"
            self._complain(f"{declaration.file}: {other}", logging.WARNING)
            return
        changed = agent.declaration != declaration.values
        if agent.live:
            if changed:
                self._changing.add(name)
                later = f"{name} runs: it is changed when it has ended"
                self._complain(f"{declaration.file}: {later}", logging.WARNING)
            return
        renewed = booting and agent.reason == "shutdown"
        due = declaration.start and (renewed or _is_due(agent, booting=booting))
        if not (renewed or due or changed or agent.status is Status.NEW):
            return
        if waiting := self._why_waiting(declaration):
            log.info("%s: %s goes on when %s", declaration.file, name, waiting)
            return
        if agent.status is Status.DEAD:
            await self._say(name, "reset")
            agent = self._named(name)
        if changed:
            await self._make_again(agent, declaration)
        else:
            await self._write_files(agent, declaration, _PATHS)
        if due and not self._closed:
            await self._say(name, "start")

    def _why_waiting(self, declaration: Declaration) -> str:
        """A sentence on what has to happen before the agent can be there; empty if nothing has to.
        ``_Refused`` if another agent than the one that is meant has the name of its parent."""
        if not declaration.parent:
            return ""
        parent = self._agents.registry.named(declaration.parent)
        if parent is not None and (why := self._why_not_meant(declaration, parent)):
            raise _Refused(declaration.mistake(("parent",), why))
        if parent is not None and parent.accepts_children and not parent.waits_to_run:
            return ""
        return f"its parent {declaration.parent} runs"

    def _named(self, name: str) -> Agent:
        agent = self._agents.registry.named(name)
        assert agent is not None, name
        return agent

    async def _make_again(self, agent: Agent, declaration: Declaration) -> None:
        """In place of a new agent, another one; if that is refused, one as it was."""
        before = Declaration.recorded(agent.name, agent.declared, agent.declaration)
        self._agents.removals.unmake(agent)
        try:
            await self._make(declaration)
        except _Refused as refused:
            self._complain(f"{refused}; the agent {agent.name} remains as it was")
            await self._make(before)
        else:
            log.info("%s: %s was changed", declaration.file, agent.name)

    async def _make(self, declaration: Declaration) -> None:
        """All of it, or nothing: ``_Refused``."""
        name, journal = declaration.name, self._agents.journal
        operator = self._operator(declaration)
        try:
            with journal.starting():
                self._paths(operator).mkdir("agent", f"{name}.d")
        except CtxError as error:
            raise _Refused(declaration.mistake((), error.sentence)) from None
        agent = self._named(name)
        try:
            await self._write_files(agent, declaration, ROWS)
            journal.update(
                agent,
                declared=declaration.file,
                declaration=dict(declaration.values),
                made_to_start=False,
            )
        except BaseException:
            self._agents.removals.unmake(agent)
            raise

    async def _write_files(
        self, agent: Agent, declaration: Declaration, keys: Iterable[str]
    ) -> None:
        operator = self._operator(declaration)
        for key in keys:
            if key in declaration.values and key not in _MAKING:
                # ids are given by the daemon's user alone, whose file this is
                by_master = ROWS[key].guard.who is Role.ROOT or key == "groups"
                caller = self._master if by_master else operator
                await self._write_file(agent, declaration, key, self._paths(caller))

    async def _write_file(
        self, agent: Agent, declaration: Declaration, key: str, paths: Paths
    ) -> None:
        at: Keys = (key,)

        def note(number: int | None) -> None:
            nonlocal at
            at = (key,) if number is None else (key, *lines[number][0])

        path = f"agent/{agent.name}.d/{key}"
        try:
            lines = SHAPES[key].lines(declaration.values[key])
            if SHAPES[key].lined:
                await paths.write_lines(path, [line for _, line in lines], note)
            else:
                await paths.write(path, lines[0][1])
        except CtxError as error:
            raise _Refused(declaration.mistake(at, error.sentence)) from None
        except OSError as error:
            raise _Refused(declaration.mistake(at, error.strerror or str(error))) from None

    async def _say(self, name: str, verb: str) -> None:
        await self._paths(self._master).say(f"agent/{name}.d/ctl", verb)

    # who asks

    def _paths(self, caller: Caller) -> Paths:
        runtime = self._base.runtime
        return Paths(self._fs.root, self._base.disks, Call.of(runtime, caller))

    @property
    def _master(self) -> Caller:
        own = self._agents.privilege
        return Caller(own.uid, own.gid, os.getpid(), groups=own.groups)

    def _operator(self, declaration: Declaration) -> Caller:
        """The owner outside of all agents, with the ids that passwd(5) gives; ``_Refused``."""
        own = self._agents.privilege
        parent = self._parent_of(declaration) if declaration.parent else None
        try:
            if "owner" in declaration.values:
                uid = int(SHAPES["owner"].lines(declaration.values["owner"])[0][1])
            else:
                uid = parent.owner if parent is not None else own.uid
            if uid == own.uid:
                return self._master
            own.check_ids(f"owner {uid}", (uid,), (own.uid,))
            entry = find_user(uid)
            if entry is None:
                raise MalformedError(f"uid {uid} is no user of this machine")
        except CtxError as error:
            raise _Refused(declaration.mistake(("owner",), error.sentence)) from None
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
        return Caller(uid, entry.pw_gid, os.getpid(), groups=groups)


def _is_due(agent: Agent, *, booting: bool) -> bool:
    """Whether an agent that does not run, and whose file says ``start``, is to be started now.

    What the end of its parent ended is, and at a boot what has not run since the machine began;
    not what somebody stopped, or what came to its own end.
    """
    if agent.reason == "parent_dead":
        return True
    return booting and (agent.status is Status.NEW or agent.cell.boot != boot_id())
