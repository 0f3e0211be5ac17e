"""Machines that place agents at each other, simulated: clocks, links, disks and daemons that fail.

Time is simulated, so an hour takes seconds, and each run is repeated exactly by its seed. What
daemons say is said by ``runtime.peers.peering``; what they do of it here is the least that keeps
its promises: a disk that has what was committed, a process for each agent, and its monitor, which
needs no daemon. ``Fleet.run`` fails with what was broken:

- I1: no agent executes for more than a second after its lead said that it is lost. (A virtual
  machine that was paused does, as long as its own clock says that it may.)
- I2: none executes later than the bound after the end of its parent.
- I3: each operation has its effect once, each fact is in the lead's history once, in order.
- I4: what either side acknowledged survives both: in the end, both agree.
- Whoever is connected keeps its lease, whatever else goes over the link.
"""

from __future__ import annotations

import copy
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from runtime.peers import peering
from runtime.peers.lease import Grants, Lease, bound
from runtime.peers.peering import PART_LEAST, Bytes, Hello, Host, Lead, Message, Over, Want
from runtime.peers.streams import Stream

Who = tuple[str, str]


@dataclass(slots=True)
class Owned:
    """An agent as its lead's disk has it."""

    name: str
    number: int
    status: str = "placed"
    outcome: str = ""
    history: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Placing:
    """A registration at the lead's disk."""

    lead: int
    host: int
    stream: Stream
    over: int | None = None
    known: str = ""
    agents: dict[str, Owned] = field(default_factory=dict)


@dataclass(slots=True)
class Guest:
    """An agent as its host's disk has it."""

    number: int
    status: str = "put"


@dataclass(slots=True)
class Hosting:
    """A registration at the host's disk; operations up to ``upto`` put nothing there any more."""

    known: str
    lead: int
    stream: Stream
    upto: int = 0
    guests: dict[str, Guest] = field(default_factory=dict)
    effects: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Disk:
    """What survives everything but being put back."""

    placing: dict[int, Placing] = field(default_factory=dict)
    #: those that are over, until that is told
    former: list[Placing] = field(default_factory=list)
    hosting: dict[str, Hosting] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Process:
    """An agent's, and its monitor, which reads ``cell``: the end of the lease."""

    who: Who
    machine: Machine
    cell: list[float]
    grace: float
    obeys: bool
    ends: float | None = None


@dataclass(slots=True, eq=False)
class Wire:
    """One direction of a connection."""

    to: End
    slow: float = 0.0
    lost: bool = False
    #: bytes a second; what is sent waits for what was sent before
    width: float = 0.0
    busy: bool = False
    last: float = 0.0


@dataclass(slots=True, eq=False)
class End:
    """One side of a connection."""

    daemon: Daemon
    peering: Lead | Host
    wire: Wire = field(init=False)
    other: End = field(init=False)
    placing: Placing | None = None
    hosting: Hosting | None = None
    open: bool = True
    ready: bool = False
    since: float = 0.0
    #: when something came last; when it asks next
    heard: float = 0.0
    due: float = 0.0


@dataclass(slots=True)
class Rules:
    """How the daemons are, so that a test can have them wrong."""

    lead: type[Lead] = Lead
    host: type[Host] = Host
    lease: type[Lease] = Lease
    grants: type[Grants] = Grants
    #: a daemon that starts knows what it granted; stops are stored; what is done is stored first
    remembers: bool = True
    stores_stops: bool = True
    commits_first: bool = True
    #: the grace counts from the end of the lease; a lead grants only what it is asked for
    grace_from_end: bool = True
    is_asked: bool = True


@dataclass(slots=True)
class Plan:
    """What is simulated: numbers, seconds, and how often faults come."""

    machines: int = 100
    agents: int = 500
    lease: float = 30.0
    grace: float = 1.0
    neighbours: int = 3
    faults: float = 1.0

    @property
    def unit(self) -> float:
        """Seconds take so long: what happens lasts as long as leases do."""
        return self.lease / 30

    @property
    def seconds(self) -> float:
        return 400 * self.unit


class Machine:
    """Its clock and what runs on it; ``disk`` is what is left of it without power."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.rate = fleet.random.uniform(0.9, 1.1)
        self.disk = Disk()
        self.processes: dict[Who, Process] = {}
        #: ends of leases, by registration: a file that monitors map
        self.ends: dict[str, list[float]] = {}
        self.parents: dict[str, bool] = {}
        self.awake = True
        self.boots = 0
        self.daemon: Daemon | None = None
        self.cut = False
        self._clock = (fleet.now, fleet.random.uniform(10, 1000), self.rate)
        #: when it last came to be awake, and how long it was not before; when it was disturbed
        self.woke = self.slept = 0.0
        self.disturbed = 0.0
        self.paused = False
        #: what came while it was not awake
        self.queue: deque[tuple[Wire, bytes]] = deque()

    def now(self) -> float:
        at, local, rate = self._clock
        return local + (self.fleet.now - at) * rate

    def when(self, local: float) -> float:
        """The true time at which its clock says this."""
        at, base, rate = self._clock
        return at + (local - base) / (rate or self.rate) + 1e-6  # not before, by rounding

    def sleep(self, seconds: float, *, stands: bool) -> None:
        """It executes nothing; ``stands``: its clock stands still too."""
        if not self.awake:
            return
        self.awake = False
        self.slept = self.fleet.now
        if stands:
            self._clock = (self.fleet.now, self.now(), 0.0)
            self.paused = True
        self.fleet.after(seconds, self.wake, self.boots)

    def wake(self, boots: int) -> None:
        if self.boots != boots or self.awake:
            return
        self._clock = (self.fleet.now, self.now(), self.rate)
        self.awake = True
        self.woke = self.disturbed = self.fleet.now
        for process in list(self.processes.values()):
            self.watch(process)
        if self.daemon:
            self.daemon.wake()
        while self.queue and self.awake:
            self.fleet.deliver(*self.queue.popleft())

    def reboot(self, seconds: float, disk: Disk | None = None) -> None:
        self.stop_daemon()
        for process in list(self.processes.values()):
            self.fleet.ended(process)
        self.boots += 1
        self.awake = False
        self.ends.clear()
        for name in self.parents:
            self.fleet.parent_ended(self.number, name)
        self.parents.clear()
        if disk:
            self.disk = disk
        self.fleet.after(seconds, self._booted, self.boots)

    def _booted(self, boots: int) -> None:
        if boots == self.boots:
            self._clock = (self.fleet.now, self.fleet.random.uniform(1, 10), self.rate)
            self.paused = False
            self.awake = True
            self.woke = self.disturbed = self.fleet.now
            self.daemon = Daemon(self)

    def stop_daemon(self) -> None:
        self.disturbed = self.fleet.now
        if self.daemon:
            self.daemon.stop()
            self.daemon = None

    def restart(self, seconds: float) -> None:
        if self.daemon:
            self.stop_daemon()
            self.fleet.after(seconds, self._restarted, self.boots)

    def _restarted(self, boots: int) -> None:
        if boots == self.boots and self.daemon is None:
            self.daemon = Daemon(self)

    # monitors

    def watch(self, process: Process) -> None:
        """Its monitor looks at the end of the lease, and sleeps until then."""
        if self.processes.get(process.who) is not process or not self.awake:
            return
        now, end = self.now(), process.cell[0]
        if now < end:
            self.fleet.at(self.when(end), self.watch, process)
            return
        rules = self.fleet.rules
        over = end + process.grace if rules.grace_from_end else now + process.grace
        if process.ends is None:
            process.ends = over
        if process.obeys or now >= process.ends:
            self.fleet.ended(process)
        else:
            self.fleet.at(self.when(process.ends), self.watch, process)


class Daemon:
    """ctxd, from its start to its death."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.fleet = machine.fleet
        self.alive = True
        self.ends: dict[int, End] = {}
        self.hosted: dict[str, End] = {}
        self.sides: list[End] = []
        self.grants: dict[int, Grants] = {}
        self.leases: dict[str, Lease] = {}
        #: what waits to be committed, in order; ``hangs``: until then nothing is
        self._commits: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._committing = False
        self.hangs = 0.0
        self._tries: dict[int, float] = defaultdict(lambda: 0.1)
        self._recover()

    def stop(self) -> None:
        self.alive = False
        for end in self.sides:
            self.fleet.close(end)

    def wake(self) -> None:
        """It was asleep: what was to be done meanwhile is done now."""
        for placing in [*self.machine.disk.placing.values(), *self.machine.disk.former]:
            self._look_for_lost(placing)
        for end in [*self.ends.values(), *self.hosted.values()]:
            if end.open:
                self.tick(end)
                self.fleet.pump(end)
        self._commit()

    def _recover(self) -> None:
        machine, rules = self.machine, self.fleet.rules
        for placing in [*machine.disk.placing.values(), *machine.disk.former]:
            self._granting(placing, restarted=True)
            for owned in placing.agents.values():
                if owned.status == "placed" and owned.name not in machine.parents:
                    self.end_parent(placing, owned)
        for known, hosting in machine.disk.hosting.items():
            end = machine.ends.get(known)
            seconds = self.fleet.plan.lease
            lease = rules.lease(seconds, hosting.stream.got, end[0] if end else None)
            self.leases[known] = lease
            for name, guest in hosting.guests.items():
                if guest.status == "running" and (known, name) not in machine.processes:
                    self._fact(hosting, name, guest)
            self.look_at_lease(hosting)
        for host, placing in machine.disk.placing.items():
            if self.needs(placing):
                self.connect(host)

    # the lead

    def _granting(self, placing: Placing, *, restarted: bool = False) -> Grants:
        plan, now = self.fleet.plan, self.machine.now()
        if restarted and not self.fleet.rules.remembers:
            now -= 10 * plan.lease
        grants = self.fleet.rules.grants(plan.lease, plan.grace, now)
        grants.over = placing.over
        self.grants[id(placing)] = grants
        self.fleet.at(self.machine.when(grants.lost_at()), self._look_for_lost, placing)
        return grants

    @staticmethod
    def needs(placing: Placing) -> bool:
        """Whether there is anything for which a lead wants a connection."""
        live = any(owned.status != "dead" for owned in placing.agents.values())
        return live or bool(placing.stream.kept) or placing.over is not None

    def place(self, host: int, name: str) -> None:
        disk = self.machine.disk
        placing = disk.placing.get(host)
        if placing is None:
            placing = disk.placing[host] = Placing(self.machine.number, host, Stream())
            self._granting(placing)
        put = placing.stream.record("put", name)
        placing.stream.record("start", name)
        placing.agents[name] = Owned(name, put.number)
        self._send(placing)

    def end_parent(self, placing: Placing, owned: Owned) -> None:
        """The parent is dead: the child is to end."""
        owned.status = "stopping"
        if self.fleet.rules.stores_stops:
            placing.stream.record("verb", owned.name, verb="kill")
            self._send(placing)
        elif end := self.ends.get(placing.host):
            self._volatile(end, owned.name)

    def _volatile(self, end: End, name: str) -> None:
        if end.ready and end.placing:
            end.placing.stream.record("verb", name, verb="kill")
            self._send(end.placing)

    def _send(self, placing: Placing) -> None:
        end = self.ends.get(placing.host)
        if end is None:
            self.connect(placing.host)
        elif end.ready and end.placing is placing:
            self.fleet.pump(end)

    def connect(self, host: int) -> None:
        if self.alive and host not in self.ends:
            pause = self._tries[host]
            self._tries[host] = min(2 * pause, self.fleet.plan.lease / 6)
            self.fleet.after(pause, self._try, host)

    def _try(self, host: int) -> None:
        if not self.alive or host in self.ends:
            return
        placing = self.machine.disk.placing.get(host)
        other = self.fleet.machines[host]
        if placing is None:
            return
        reachable = other.daemon and other.awake and not (other.cut or self.machine.cut)
        if not reachable or not self.machine.awake or (self.machine.number, host) in self.fleet.cut:
            self.connect(host)
            return
        assert other.daemon
        said = {"as": placing.known, "name": self.machine.number}
        lead = self.fleet.rules.lead(said, placing.stream, self.grants[id(placing)])
        near = End(self, lead, placing=placing)
        far = End(other.daemon, self.fleet.rules.host())
        near.wire, far.wire = Wire(far), Wire(near)
        near.other, far.other = far, near
        near.since = far.since = near.heard = far.heard = self.fleet.now
        self.ends[host] = near
        self.fleet.pump(far)
        for end in (near, far):
            end.daemon.sides.append(end)
            self.fleet.after(self.fleet.plan.lease, end.daemon.listen, end)

    def listen(self, end: End) -> None:
        """A connection on which nothing came for as long as a lease is closed."""
        rest = end.heard + self.fleet.plan.lease - self.fleet.now
        if end.open and self.machine.awake and rest <= 0:
            self.fleet.close(end)
        elif end.open:
            self.fleet.after(max(rest, 1.0), self.listen, end)

    def _look_for_lost(self, placing: Placing) -> None:
        machine = self.machine
        if not self.alive or machine.daemon is not self or not machine.awake:
            return
        grants = self.grants.get(id(placing))
        if grants is None:
            return
        if machine.now() < grants.lost_at():
            self.fleet.at(machine.when(grants.lost_at()), self._look_for_lost, placing)
            return
        for owned in placing.agents.values():
            if owned.status != "dead" and owned.number <= placing.stream.sent:
                owned.status, owned.outcome = "dead", "runtime_lost"
                self.fleet.said_lost(machine, placing, owned.name)
                placing.over = grants.over = placing.stream.sent
        if placing in machine.disk.former:
            machine.disk.former.remove(placing)
            del self.grants[id(placing)]

    # the host

    def _fact(self, hosting: Hosting, name: str, guest: Guest) -> None:
        """Records that a guest has ended."""
        guest.status = "ended"
        hosting.stream.record("ended", name)
        end = self.hosted.get(hosting.known)
        if end and end.ready:
            self.fleet.pump(end)

    def look_at_lease(self, hosting: Hosting) -> None:
        """Notes its end for monitors; makes the next one if it is over."""
        lease, now = self.leases[hosting.known], self.machine.now()
        if lease.end is not None:
            self.machine.ends.setdefault(hosting.known, [0.0])[0] = lease.end
        if not lease.is_over(now):
            return
        self.fleet.lease_ended(self, hosting, lease)
        cell = self.machine.ends.pop(hosting.known, None)
        for (known, _), process in list(self.machine.processes.items()):
            if known == hosting.known and process.cell is cell:
                self.machine.watch(process)
        new = self.fleet.rules.lease(lease.seconds, lease.reached)
        self.leases[hosting.known] = new
        end = self.hosted.get(hosting.known)
        if end and end.ready and isinstance(end.peering, Host):
            end.peering.renew(new)

    def _start(self, hosting: Hosting, name: str) -> None:
        guest = hosting.guests.get(name)
        if guest is None or guest.status not in ("put", "waits"):
            return
        cell = self.machine.ends.get(hosting.known)
        if guest.number <= hosting.upto:
            self._fact(hosting, name, guest)
        elif cell is None or self.machine.now() >= cell[0]:
            guest.status = "waits"  # for the first grant
        else:
            guest.status = "running"
            who = (hosting.known, name)
            obeys = self.fleet.random.random() < 0.5
            process = Process(who, self.machine, cell, self.fleet.plan.grace, obeys)
            self.machine.processes[who] = process
            self.fleet.started(process)
            self.machine.watch(process)

    def ended(self, who: Who) -> None:
        """A process of its machine has ended."""
        hosting = self.machine.disk.hosting.get(who[0])
        if hosting and (guest := hosting.guests.get(who[1])) and guest.status == "running":
            self._fact(hosting, who[1], guest)

    def _operation(self, end: End, hosting: Hosting, message: Message) -> None:
        """Number and effect in one transaction."""
        if not end.open:
            return  # the next connection brings it again
        if message.number != hosting.stream.got + 1:
            self.fleet.fail(f"I3: operation {message.number} after {hosting.stream.got}")
        hosting.stream.done(message.number, message.line)
        hosting.effects.append(message.number)
        name = message.agent
        if message.op == "put":
            hosting.guests[name] = Guest(message.number)
        elif message.op == "start":
            self._start(hosting, name)
        elif guest := hosting.guests.get(name):
            process = self.machine.processes.get((hosting.known, name))
            if process:
                self.fleet.ended(process)
            elif guest.status in ("put", "waits"):
                self._fact(hosting, name, guest)
        lease = self.leases[hosting.known]
        lease.reach(message.number, self.machine.now())
        self._leased(hosting)
        self.fleet.pump(end)

    def _leased(self, hosting: Hosting) -> None:
        self.look_at_lease(hosting)
        for name, guest in hosting.guests.items():
            if guest.status == "waits":
                self._start(hosting, name)

    def _over(self, end: End, hosting: Hosting, upto: int) -> None:
        if upto > hosting.upto:
            hosting.upto = upto
            for (known, name), process in list(self.machine.processes.items()):
                if known == hosting.known and hosting.guests[name].number <= upto:
                    self.fleet.ended(process)
            self.leases[hosting.known].stop()
            self.look_at_lease(hosting)
            for name, guest in hosting.guests.items():
                if guest.status == "waits":
                    self._start(hosting, name)
        assert isinstance(end.peering, Host)
        end.peering.ended(upto)
        self.fleet.pump(end)

    # both

    def _fact_came(self, end: End, placing: Placing, message: Message) -> None:
        if not end.open:
            return
        if message.number != placing.stream.got + 1:
            self.fleet.fail(f"I3: fact {message.number} after {placing.stream.got}")
        placing.stream.done(message.number, message.line)
        owned = placing.agents.get(message.agent)
        if owned and owned.status != "dead":
            owned.history.append(message.number)
            owned.status, owned.outcome = "dead", "ended"
        self.fleet.pump(end)

    def commit(self, do: Callable[..., None], *values: Any) -> None:
        self._commits.append((do, values))
        if not self._committing:
            self._committing = True
            self.fleet.after(self.fleet.random.uniform(0, 0.02), self._commit)

    def _commit(self) -> None:
        if not self.alive or not self.machine.awake:
            return
        if self.hangs > self.fleet.now:
            self.fleet.at(self.hangs, self._commit)
            return
        self._committing = False
        while self._commits:
            do, values = self._commits.popleft()
            do(*values)

    def tick(self, end: End) -> None:
        """Asks for a lease."""
        if end.open and end.ready and self.machine.awake and isinstance(end.peering, Host):
            assert end.hosting
            self.look_at_lease(end.hosting)
            due = self.machine.when(end.peering.tick(self.machine.now()))
            self.fleet.pump(end)
            if not end.due or end.due <= self.fleet.now or due < end.due:
                end.due = max(due, self.fleet.now + 0.01)
                self.fleet.at(end.due, self.tick, end)

    def came(self, end: End, data: bytes) -> None:
        end.heard = self.fleet.now
        try:
            for event in end.peering.feed(data, self.machine.now()):
                if end.placing:
                    self._heard(end, end.placing, event)
                else:
                    self._told(end, event)
                if not end.open:
                    return
        except peering.BrokenLinkError as error:
            self.fleet.broken.append(f"{self.fleet.now:.2f} {type(end.peering).__name__}: {error}")
            self.fleet.close(end)
            return
        if end.hosting and end.ready:
            self._leased(end.hosting)
        self.fleet.pump(end)

    def _heard(self, end: End, placing: Placing, event: peering.Event) -> None:
        assert isinstance(end.peering, Lead)
        if isinstance(event, Hello):
            if not end.peering.fits(event):
                if event.said["as"] == placing.known:  # the host was put back, and does not know
                    self._part(placing)
                    self.fleet.close(end)
                    return
                new = None
                if placing.known:
                    new = self._part(placing)
                else:
                    placing.known = event.said["as"]
                if new:
                    new.known = event.said["as"]
                    end.placing = new
                    end.peering.go_on(event, new=(new.stream, self.grants[id(new)]))
                else:
                    end.peering.go_on(event)
            else:
                end.peering.go_on(event)
            end.ready = True
            self._tries.pop(placing.host, None)
            self.fleet.pump(end)
            if not self.fleet.rules.is_asked:
                self._renew(end)
        elif isinstance(event, Message):
            if self.fleet.rules.commits_first:
                self.commit(self._fact_came, end, placing, event)
            else:
                self._early(end, placing.stream, event, self._fact_came, placing)
        elif isinstance(event, Over):
            grants = self.grants[id(placing)]
            if grants.over is not None and event.upto >= grants.over:
                placing.over = grants.over = None
        elif isinstance(event, Bytes):
            end.peering.want(event.agent, event.file, event.offset, len(event.data))
            self.fleet.pump(end)

    def _renew(self, end: End) -> None:
        """As one must not: grants what nobody asked for."""
        if end.open and end.placing:
            end.peering._say({"op": "grant", "ask": 0, "after": end.placing.stream.sent})
            self.fleet.pump(end)
            self.fleet.after(self.fleet.plan.lease / 3, self._renew, end)

    def _early(self, end: End, stream: Stream, event: Message, do: Any, whose: Any) -> None:
        """As one must not: says that it is done, and then does it."""
        end.peering._say({"op": "ack", "got": event.number})
        self.fleet.pump(end)
        self.commit(do, end, whose, event)

    def _part(self, placing: Placing) -> Placing:
        """This registration is over at the host, or will be: a new one is made."""
        disk = self.machine.disk
        disk.former.append(placing)
        new = disk.placing[placing.host] = Placing(placing.lead, placing.host, Stream())
        self._granting(new)
        self.fleet.parted(placing)
        return new

    def _told(self, end: End, event: peering.Event) -> None:
        assert isinstance(end.peering, Host)
        if isinstance(event, Hello):
            self._welcome(end, end.peering, event)
            return
        hosting = end.hosting
        assert hosting
        if isinstance(event, Message):
            if self.fleet.rules.commits_first:
                self.commit(self._operation, end, hosting, event)
            else:
                self._early(end, hosting.stream, event, self._operation, hosting)
        elif isinstance(event, Over):
            self.commit(self._over, end, hosting, event.upto)
        elif isinstance(event, Want):
            left = event.credit
            while left:
                size = min(left, PART_LEAST)
                end.peering.give(event.agent, event.file, 0, bytes(size))
                left -= size
            self.fleet.pump(end)

    def _welcome(self, end: End, host: Host, event: Hello) -> None:
        disk = self.machine.disk
        hosting = disk.hosting.get(event.said["as"])
        if hosting and not hosting.stream.fits(event.said):
            self._put_back(hosting)
            hosting = None
        if hosting is None:
            known = f"r{next(self.fleet.names)}"
            hosting = disk.hosting[known] = Hosting(known, event.said["name"], Stream())
            self.leases[known] = self.fleet.rules.lease(self.fleet.plan.lease, 0)
        if older := self.hosted.pop(hosting.known, None):
            self.fleet.close(older)
        self.hosted[hosting.known] = end
        end.hosting = hosting
        host.go_on({"as": hosting.known}, hosting.stream, self.leases[hosting.known], event)
        end.ready = True
        self.tick(end)

    def _put_back(self, hosting: Hosting) -> None:
        """One of the two has an earlier state: the registration is over, at once."""
        for (known, _), process in list(self.machine.processes.items()):
            if known == hosting.known:
                self.fleet.ended(process)
        if end := self.hosted.get(hosting.known):
            self.fleet.close(end)
        del self.machine.disk.hosting[hosting.known]


class Fleet:
    """All machines, and what is true of them together."""

    def __init__(self, seed: int, plan: Plan, rules: Rules | None = None) -> None:
        self.random = Random(seed)
        self.plan = plan
        self.rules = rules or Rules()
        self.now = 0.0
        self.names = count(1)
        self.cut: set[tuple[int, int]] = set()
        self.broken: list[str] = []
        self.failures: list[str] = []
        self.steps = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._snapshots: dict[int, Disk] = {}
        #: machines that were put back
        self._former: set[int] = set()
        #: by (machine of the lead, name): when its parent ended, and when it was said to be lost
        self._parents: dict[tuple[int, str], float] = {}
        self._lost: dict[str, float] = {}
        self._running: dict[str, Process] = {}
        self.lives = self.losses = 0
        self.late = 0.0
        self._calm = 0.0
        self.machines = [Machine(self, number) for number in range(plan.machines)]
        for machine in self.machines:
            machine.daemon = Daemon(machine)

    def at(self, when: float, do: Callable[..., None], *values: Any) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), do, values))

    def after(self, seconds: float, do: Callable[..., None], *values: Any) -> None:
        self.at(self.now + seconds, do, *values)

    def fail(self, what: str) -> None:
        self.failures.append(f"at {self.now:.2f}: {what}")

    # what is observed

    def started(self, process: Process) -> None:
        self.lives += 1
        name = process.who[1]
        self._running[name] = process
        if name in self._lost:
            self.fail(f"I1: {name} starts after it was lost")

    def parent_ended(self, lead: int, name: str) -> None:
        self._parents.setdefault((lead, name), self.now)

    def said_lost(self, machine: Machine, placing: Placing, name: str) -> None:
        self.losses += 1
        self._lost.setdefault(name, self.now)

    def parted(self, placing: Placing) -> None:
        """A lead takes one of both for put back to an earlier state."""
        if not self._former & {placing.lead, placing.host}:
            self.fail(f"I4: {placing.lead} and {placing.host} do not know each other any more")

    def ended(self, process: Process) -> None:
        """A process is gone: how long had it been executing when it ought not to?"""
        machine, (_, name) = process.machine, process.who
        if machine.processes.get(process.who) is not process:
            return
        del machine.processes[process.who]
        self._running.pop(name, None)
        self._judge(machine, name)
        if machine.daemon and machine.awake:
            machine.daemon.ended(process.who)

    def _judge(self, machine: Machine, name: str) -> None:
        lead = int(name.split("-")[0])
        until = self.now if machine.awake else machine.slept
        if (at := self._lost.get(name)) is not None and not machine.paused:
            # who wakes late has executed since then only
            ran = until - max(at, machine.woke)
            if ran > 1.0:
                self.fail(f"I1: {name} executed {ran:.2f} s after it was lost")
        if (at := self._parents.get((lead, name))) is not None:
            late = until - at
            self.late = max(self.late, late)
            most = bound(self.plan.lease, self.plan.grace)
            if late > most and until - max(at + most, machine.woke) > 1.0 and not machine.paused:
                self.fail(f"I2: {name} executed {late:.1f} s after its parent's end, of {most:.1f}")

    def lease_ended(self, daemon: Daemon, hosting: Hosting, lease: Lease) -> None:
        """A host notices the end of a lease: was there any reason?"""
        end = daemon.hosted.get(hosting.known)
        if lease.end == 0.0 or end is None or not end.ready or end.other.daemon is None:
            return
        quiet = self.now - 2 * self.plan.lease
        both = (daemon.machine, end.other.daemon.machine)
        hangs = max(daemon.hangs, end.other.daemon.hangs)
        wires = (end.wire, end.other.wire)
        if (
            end.since < quiet
            and hangs < quiet
            and all(each.disturbed < quiet and each.awake for each in both)
            and not any(wire.slow or wire.lost for wire in wires)
            and self._calm < quiet
        ):
            self.fail(f"a lease of machine {daemon.machine.number} ended, and nothing was wrong")

    # links

    def pump(self, end: End) -> None:
        """Sends what a side has to say."""
        wire = end.wire
        if not end.open or wire.busy or not end.daemon.machine.awake:
            return
        while data := end.peering.outgoing(64 << 10):
            if wire.lost:
                continue
            wire.last = max(wire.last, self.now + self.random.uniform(0.0005, 0.02) + wire.slow)
            if wire.width:
                wire.busy = True
                gone = self.now + len(data) / wire.width
                wire.last = max(wire.last, gone)
                self.at(wire.last, self.deliver, wire, data)
                self.at(gone, self._free, end)
                return
            if self.random.random() < 0.02:  # the connection may end between any two bytes
                cut = self.random.randrange(len(data))
                self.at(wire.last, self.deliver, wire, data[:cut])
                data = data[cut:]
                wire.last += self.random.uniform(0, 0.1)
            self.at(wire.last, self.deliver, wire, data)

    def _free(self, end: End) -> None:
        end.wire.busy = False
        self.pump(end)

    def deliver(self, wire: Wire, data: bytes) -> None:
        to = wire.to
        if not to.open:
            return
        if not to.daemon.machine.awake:
            to.daemon.machine.queue.append((wire, data))
            return
        to.daemon.came(to, data)

    def close(self, end: End, at: int | None = None) -> None:
        """The connection is gone, for both sides."""
        for each in (end, end.other):
            if each.open:
                each.open = False
                self.after(self.random.uniform(0.0, 0.5), self._closed, each)

    def _closed(self, end: End) -> None:
        daemon = end.daemon
        if end.placing and daemon.ends.get(end.placing.host) is end:
            del daemon.ends[end.placing.host]
            if daemon.alive:
                daemon.connect(end.placing.host)
        elif end.hosting and daemon.hosted.get(end.hosting.known) is end:
            del daemon.hosted[end.hosting.known]

    # what happens

    def run(self) -> None:
        """``AssertionError`` with what was broken, and the seed's plan."""
        plan = self.plan
        active = plan.seconds - 4 * bound(plan.lease, plan.grace)
        for number in range(plan.agents):
            lead = self.random.randrange(plan.machines)
            near = self.random.randrange(1, plan.neighbours + 1)
            name = f"{lead}-{number}"
            begins = self.random.uniform(0, active / 2)
            self.at(begins, self._place, lead, (lead + near) % plan.machines, name)
            if self.random.random() < 0.7:
                self.at(begins + self.random.uniform(0, active), self._end_parent, lead, name)
        for fault, often in self._faults():
            for _ in range(round(often * plan.machines * plan.faults)):
                self.at(self.random.uniform(1, active), fault)
        self.at(active, self._heal)
        while self._heap and self._heap[0][0] <= plan.seconds:
            self.now, _, do, values = heapq.heappop(self._heap)
            self.steps += 1
            do(*values)
        self._agree()
        assert not self.failures, "\n".join(self.failures[:10])

    def _place(self, lead: int, host: int, name: str) -> None:
        machine = self.machines[lead]
        if machine.daemon and machine.awake:
            machine.parents[name] = True
            machine.daemon.place(host, name)

    def _end_parent(self, lead: int, name: str) -> None:
        """Of the parent's program: a daemon notices now, or when it starts."""
        machine = self.machines[lead]
        if not machine.awake:
            self.after(1.0, self._end_parent, lead, name)
            return
        if machine.parents.pop(name, None) is None:
            return
        self.parent_ended(lead, name)
        if machine.daemon:
            self._notice(machine, name)

    def _notice(self, machine: Machine, name: str) -> None:
        assert machine.daemon
        for placing in [*machine.disk.placing.values(), *machine.disk.former]:
            owned = placing.agents.get(name)
            if owned and owned.status == "placed":
                machine.daemon.end_parent(placing, owned)

    def _faults(self) -> Iterator[tuple[Callable[[], None], float]]:
        yield self._crash, 0.5
        yield self._reboot, 0.1
        yield self._cut_link, 0.8
        yield self._close_link, 0.8
        yield self._slow_link, 0.3
        yield self._one_way, 0.3
        yield self._isolate, 0.1
        yield self._sleep, 0.15
        yield self._pause, 0.1
        yield self._hang, 0.15
        yield self._narrow, 0.2
        yield self._snapshot, 0.1
        yield self._put_back, 0.05

    def _any(self) -> Machine:
        return self.random.choice(self.machines)

    def _link(self) -> End | None:
        daemon = self._any().daemon
        return self.random.choice([*daemon.ends.values()]) if daemon and daemon.ends else None

    def _some(self, least: float, most: float) -> float:
        return self.random.uniform(least, most) * self.plan.unit

    def _crash(self) -> None:
        self._any().restart(self._some(1, 60))

    def _reboot(self) -> None:
        self._any().reboot(self._some(5, 60))

    def _cut_link(self) -> None:
        """Nothing comes, either way, and nobody is told for a while."""
        if end := self._link():
            assert end.placing
            pair = (end.daemon.machine.number, end.placing.host)
            self.cut.add(pair)
            end.wire.lost = end.other.wire.lost = True
            self.after(self._some(1, 90), self._mend, end, pair)

    def _mend(self, end: End, pair: tuple[int, int]) -> None:
        self.cut.discard(pair)
        self.close(end)

    def _close_link(self) -> None:
        if end := self._link():
            self.close(end)

    def _slow_link(self) -> None:
        if end := self._link():
            wires = (end.wire, end.other.wire)
            for wire in self.random.sample(wires, self.random.randrange(1, 3)):
                wire.slow = self._some(0, 90)
                self.after(self._some(10, 100), self._quicken, wire)

    def _quicken(self, wire: Wire) -> None:
        wire.slow = 0.0
        wire.to.since = wire.to.other.since = max(self.now, wire.last)

    def _one_way(self) -> None:
        if end := self._link():
            self.random.choice((end, end.other)).wire.lost = True
            self.after(self._some(1, 90), self.close, end)

    def _isolate(self) -> None:
        machine = self._any()
        machine.cut = True
        for each in self.machines:
            for end in each.daemon.ends.values() if each.daemon else ():
                if end.placing and machine.number in (each.number, end.placing.host):
                    end.wire.lost = end.other.wire.lost = True
                    self.after(self._some(60, 90), self.close, end)
        self.after(self._some(5, 60), self._reach, machine)

    def _reach(self, machine: Machine) -> None:
        machine.cut = False

    def _sleep(self) -> None:
        self._any().sleep(self._some(1, 90), stands=False)

    def _pause(self) -> None:
        self._any().sleep(self._some(1, 90), stands=True)

    def _hang(self) -> None:
        """It answers and asks, but its disk does not."""
        machine = self._any()
        if machine.daemon:
            machine.daemon.hangs = self.now + self._some(30, 120)

    def _narrow(self) -> None:
        """Much else goes over the link."""
        if (end := self._link()) and end.ready and isinstance(end.peering, Lead):
            # more is asked for only where it comes at once (runtime.peers.parcels)
            if credit := min(end.peering.credit, 256 << 10):
                end.peering.want("any", "out", 0, credit)
            for each in (end, end.other):
                each.wire.width = 6000.0 / self.plan.unit
            self.pump(end)

    def _snapshot(self) -> None:
        machine = self._any()
        self._snapshots[machine.number] = copy.deepcopy(machine.disk)

    def _put_back(self) -> None:
        """A machine starts with the disk that it had earlier."""
        if self._snapshots:
            number = self.random.choice([*self._snapshots])
            disk = self._snapshots.pop(number)
            self._former.add(number)
            self.machines[number].reboot(self._some(5, 60), disk)

    def _heal(self) -> None:
        self._calm = self.now
        self.cut.clear()
        for machine in self.machines:
            machine.cut = False

    def _agree(self) -> None:
        for name, process in self._running.items():
            self._judge(process.machine, name)
        for machine in self.machines:
            for placing in machine.disk.placing.values():
                hosting = self.machines[placing.host].disk.hosting.get(placing.known)
                if hosting:
                    self._agree_on(machine, placing, hosting)
                elif Daemon.needs(placing):
                    self.fail(f"I4: machine {placing.host} knows nothing of {machine.number}")

    def _agree_on(self, machine: Machine, placing: Placing, hosting: Hosting) -> None:
        pair = f"{machine.number} and {placing.host}"
        ours, theirs = placing.stream, hosting.stream
        same = ours.sent == theirs.got and theirs.sent == ours.got and ours.fits(theirs.hello())
        if Daemon.needs(placing) and not same:
            self.fail(f"I4: {pair} differ: {ours.hello()}, {theirs.hello()}")
        if hosting.effects != list(range(1, len(hosting.effects) + 1)):
            self.fail(f"I3: effects of {pair}: {hosting.effects}")
        for name, owned in placing.agents.items():
            runs = (hosting.known, name) in self.machines[placing.host].processes
            if runs != (owned.status == "placed"):
                said = "runs" if runs else "does not run"
                self.fail(f"I4: {name} {said}, and its lead says {owned.status}")
            if len(owned.history) > 1:
                self.fail(f"I3: {name} ended more than once")
