"""Keeping a relay beside each cell that has networks, and telling it what may pass.

A relay outlives the daemon; what it is told is in a file that outlives both
(``runtime.cell.networks``). So a daemon that adopts a cell does what the one did that made it:
it writes what holds now, and starts a relay if none is there.

What is taken away, or a new limit, is written into the file of counters, at which the relay looks
every 250 ms while connections are open, and before it accepts one. If the file still shows open
connections after 700 ms (the agent is paused, say), the daemon kills the relay. A daemon that was
killed between the commit and that write is followed by one that writes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from runtime import crashpoints
from runtime.cell import networks
from runtime.cell.networks import Counters
from runtime.cell.port import Host, LiveCell, Part, about, guarded
from runtime.cell.spending import Spending
from runtime.errors import CtxError
from runtime.ids import AgentIndex
from runtime.kernel import orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup
from runtime.kernel.spawn import Process
from runtime.records.change import RUNTIME, Change
from runtime.records.config import Config
from runtime.records.model import Agent
from runtime.texts.names import escape

log = logging.getLogger("ctxd.networks")

#: before another relay is started in place of one that ended, in seconds
_FIRST_RETRY: Final = 0.1
_LAST_RETRY: Final = 10.0
#: that a relay takes to close what was taken away; longer than LOOK_MS of relay.c
_CLOSING_SECONDS: Final = 0.7
#: between two looks at what was used of models
_KEPT_SECONDS: Final = 10.0
#: between two looks at what a relay or a meter reports: an agent that is refused at every request
#: takes no more time of the daemon's
_PAUSE: Final = 0.05
#: cells whose networks are looked at before others have their turn in the loop
_AT_ONCE: Final = 32
#: standard input, output and error, before what is passed to a relay
_FIRST_PASSED: Final = 3


@dataclass(frozen=True, slots=True)
class Trouble:
    """The last trouble with an agent's networks, and its time."""

    when: float
    what: str


class Networks(Part):
    """Leads the relays of cells."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        #: agents whose cells have relays
        self._led: set[AgentIndex] = set()
        self._troubles: dict[AgentIndex, Trouble] = {}
        #: what each owner used of models, as it is in the synced store
        self._on_disk: dict[int, tuple[int, ...]] = {}

    def trouble(self, agent: Agent) -> Trouble | None:
        """The last trouble with its networks, until it is removed."""
        return self._troubles.get(agent.index)

    # what may pass

    def policy_changed(self, agent: Agent) -> None:
        """The policy of an agent changed, and so perhaps of all below: networks that they lost are
        closed."""
        if self._led:
            self._nursery.start_soon(self._judge, agent)

    def configured(self) -> None:
        """Networks may have come or gone."""
        if self._led:
            self._nursery.start_soon(self._judge, None)

    async def _judge(self, top: Agent | None) -> None:
        for number, index in enumerate(tuple(self._led)):
            if number % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            agent = self._agents.registry.get(index)
            if agent is None:
                continue
            if top is None or top in (agent, *self._agents.registry.ancestors(agent)):
                self._write(agent)

    def limits_changed(self, agent: Agent) -> None:
        """Its limits of networks, tokens and cost hold from now on, for all below it, whether it
        lives or not."""
        self._counters(agent).limit(agent.limits)

    def _counters(self, agent: Agent) -> Counters:
        return networks.counters(self._places.networks, agent)

    def _write(self, agent: Agent) -> None:
        """Writes what holds for its cell now; a relay looks by itself, or is killed if it does
        not."""
        counters = self._counters(agent)
        busy = False
        for line in counters.lines():
            closed = not networks.may_use(self._agents, agent, line.name)
            if line.closed != closed:
                counters.write(line.number, "closed", int(closed))
                crashpoints.reach("relay.told")
                word = "closed" if closed else "open again"
                self._say(agent, f"network:{line.name} is {word}")
                busy |= closed and line.open > 0
        if busy:
            self._nursery.start_soon(self._insist, agent)

    async def _insist(self, agent: Agent) -> None:
        """A relay that is frozen with its agent, say, closes nothing by itself; the next one finds
        nothing open."""
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:
            return
        with trio.move_on_after(_CLOSING_SECONDS):
            await live_cell.wait_over()
            return
        lines = self._counters(agent).lines()
        left = [line.name for line in lines if line.closed and line.open]
        if left:
            what = f"its relay does not close {left[0]}: it is killed"
            why = about(agent)
            log.warning("%s: %s", agent.name, what, extra=why)
            with guarded(agent):
                live_cell.node.child("net").kill()

    async def run(self, spending: Spending) -> None:
        """Keeps what was used of models, for lives that go on after a reboot, and adds it up."""
        while True:
            await trio.sleep(_KEPT_SECONDS)
            registry = self._agents.registry
            for index in tuple(self._troubles):
                if registry.get(index) is None:
                    del self._troubles[index]
            try:
                await self._keep(spending)
            except (CtxError, OSError) as error:  # counted on, in memory
                log.error("what was used of models is not recorded: %s", error)

    async def _keep(self, spending: Spending) -> None:
        registry = self._agents.registry
        led = [agent for agent in map(registry.get, self._led) if agent is not None]
        for number, agent in enumerate({registry.payers(each)[-1]: each for each in led}.values()):
            if number % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            spending.look(agent)
        used = dict(spending.of_owner)
        due = list({payer for agent in led for payer in registry.payers(agent)})
        while due and networks.metered(self._agents):
            change, part, due = Change(by=RUNTIME), due[:_AT_ONCE], due[_AT_ONCE:]
            networks.keep(change, registry, self._places.networks, part)
            if change.agents:
                self._agents.journal.commit(change)
            await trio.lowlevel.checkpoint()
        if used != self._on_disk:  # before a loss of power, nobody else may ask for it
            await trio.to_thread.run_sync(self._agents.journal.sync, abandon_on_cancel=True)
            self._on_disk = used

    # relays

    async def lead(self, live_cell: LiveCell) -> None:
        """Keeps a relay beside a cell until it is over, if it has networks."""
        agent = live_cell.agent
        if not networks.hand_path(self._places.networks, agent).exists():
            return
        self._led.add(agent.index)
        try:
            with guarded(agent):
                await self._lead(agent, live_cell)
        finally:
            if self._live_cells.get(agent.index) in (live_cell, None):
                self._led.discard(agent.index)

    async def _lead(self, agent: Agent, live_cell: LiveCell) -> None:
        leaf = live_cell.node.child("net")
        await self._take_over(agent, leaf)
        retry = _FIRST_RETRY
        while live_cell.goes_on or leaf.populated():
            began = trio.current_time()
            relay: Process | None = None
            if not leaf.populated():
                try:
                    relay = await self._start(agent, leaf)
                except (CtxError, OSError) as error:
                    self._say(agent, f"its networks have no relay yet: {escape(str(error))}")
            await self._until_gone(agent, leaf)
            crashpoints.reach("relay.gone")
            if relay is not None:
                await relay.wait()
            await self._port.wait_settled(live_cell)
            if trio.current_time() - began > _LAST_RETRY:
                retry = _FIRST_RETRY
            with trio.move_on_after(retry):
                await live_cell.wait_over()
            retry = min(2 * retry, _LAST_RETRY)
            if not live_cell.goes_on or not self._has_keeper(live_cell):
                return
            why = about(agent)
            log.warning("%s: its relay is gone: starting another one", agent.name, extra=why)

    async def _take_over(self, agent: Agent, leaf: Cgroup) -> None:
        """Writes what a daemon before may have recorded and not written, or a newer one
        written."""
        if not self._counters(agent).make(agent).lines():  # those of a later version are lost
            leaf.kill()
            wanted = networks.wanted(self._agents, agent)
            networks.prepare(self._agents, agent, self._places.networks, wanted)
        registry = self._agents.registry
        for payer in filter(None, map(registry.incarnation, registry.payers(agent))):
            self.limits_changed(payer)  # of whose network nobody else may be in charge
        self._write(agent)

    async def _start(self, agent: Agent, leaf: Cgroup) -> Process:
        places, config = self._places, self._agents.settings.config
        with contextlib.ExitStack() as stack:
            levels = [
                self._counters(member).make(member)
                for member in networks.family(self._agents.registry, agent)
            ]
            payers: list[Path] = []
            table: list[list[str]] = []
            for line in levels[0].lines():
                if line.listens:
                    numbers = [str(each.number_of(line.name)) for each in levels]
                    header = config.header_of(line.name)
                    table.append([line.name, _path(config, line.name), header, *numbers])
                    if header == "counters":
                        payers = networks.charge(self._agents, agent, places.networks)
            owners = networks.owners_path(places.networks, agent.owner)
            shared = []
            for path in (owners, *payers, *(each.path for each in levels)):
                new = os.O_CREAT if path == owners else 0
                shared.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | new, 0o600))
                stack.callback(os.close, shared[-1])
            fds = [None, None, 2, *shared]
            first_level = _FIRST_PASSED + 1 + len(payers)
            privilege = self._agents.privilege
            ids = (privilege.uid, privilege.gid, "=") if privilege.rootless else config.relay_ids()
            words = orders.words(
                places.program("relay"),
                places.networks,
                networks.hand_path(places.networks, agent).name,
                f"{self._port.hierarchy.prefix}/{agent.cell.cgroup}",
                *ids,
                _FIRST_PASSED,
                config.owner_connections,
                agent.incarnation,
                list(range(_FIRST_PASSED + 1, first_level)),
                list(range(first_level, len(fds))),
                table,
            )
            # Linux 6.x kills what is born into a cgroup that was ever killed
            leaf.remove()
            leaf.create(self._port.hierarchy.controllers)
            crashpoints.reach("relay.planned")
            relay = await self._port.spawner.start(leaf, words, owner=agent.owner, fds=fds)
            crashpoints.reach("relay.started")
            return relay

    async def _until_gone(self, agent: Agent, leaf: Cgroup) -> None:
        """Until there is no relay; meanwhile what it reports is told."""
        wakeup = Wakeup()
        path = self._counters(agent).path
        with contextlib.ExitStack() as watches:
            for each in (leaf.path / "cgroup.events", path):
                with contextlib.suppress(OSError):
                    watches.enter_context(self._port.watcher.watching(each, wakeup))
            while True:
                self._tell(agent)
                self._tell_limit(agent)
                if not leaf.populated():
                    return
                await trio.sleep(_PAUSE)
                await wakeup.wait_changed()

    def _has_keeper(self, live_cell: LiveCell) -> bool:
        try:
            os.close(self._port.open_keeper(live_cell))
        except OSError:
            return False
        return live_cell.facts.has_keeper()

    def _tell(self, agent: Agent) -> None:
        """Troubles that have not been told, by whichever daemon."""
        counters = self._counters(agent)
        config, registry = self._agents.settings.config, self._agents.registry
        for line in counters.lines():
            if line.trouble == line.told:
                continue
            counters.write(line.number, "told", line.trouble)
            path = _path(config, line.name)
            if what := networks.describe_trouble(registry, agent, line, path):
                self._troubles[agent.index] = Trouble(time.time(), what)
                self._say(agent, what)

    def _tell_limit(self, agent: Agent) -> None:
        """A limit of tokens or cost that was met."""
        change = Change()
        told, what = self.tell_limit(change, agent)
        if told:
            self._agents.journal.note(change)
        for each in told:
            self._say(each, what)

    def tell_limit(self, change: Change, agent: Agent) -> tuple[list[Agent], str]:
        """Adds to a change what tells of a limit that was met (``networks.tell_limit``); files
        ``error`` say so, too."""
        told, what = networks.tell_limit(change, self._agents, self._places.networks, agent)
        for each in told:
            self._troubles[each.index] = Trouble(time.time(), what)
        return told, what

    def _say(self, agent: Agent, what: str) -> None:
        log.warning("%s: %s", agent.name, what, extra=about(agent))
        self._tell_log(agent, what)


def _path(config: Config, name: str) -> str:
    """The path of the operator's socket; "-" if there is none any more."""
    network = config.networks.get(name)
    return "-" if network is None else network.socket
