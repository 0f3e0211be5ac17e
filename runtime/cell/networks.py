"""The networks of cells: what an agent's cell listens for, and what passed through.

A network is a Unix socket of the operator's, with a name (``Config.networks``). The keeper of a
cell listens for it inside (keeper.c), a relay outside copies (relay.c). What the daemon tells
relays, and what they count, is in a file for each incarnation, which outlives both (counters.h).

No network namespace, address or rule of a firewall is needed to give an agent one socket and
nothing else::

    program -> 127.0.0.1:PORT | /run/ctx/net/NAME -> relay -> the operator's socket
              of the cell, the keeper's listeners   outside, in the agent's cgroup

The keeper binds both before the program starts, and hands the listening sockets to whoever
connects to a socket of the daemon's that it was given. So a relay can be killed and replaced, by
this daemon or the next, and programs that connect meanwhile wait in the kernel's queue. A port of
a cell's own loopback is reached from that cell only; the Unix socket could be handed to a child as
a descriptor, so the relay looks at the cgroup of each peer.

Each incarnation has a file of counters. A relay maps that of its agent and those of all agents
above, and adds to each. So the subtree's sum and its limit hold without the daemon, and children
that are gone have been counted.

At a network whose ``header`` is ``counters``, a meter (``runtime.metering``) counts what models
say was used. The relay hands it the files of the *payers*: the agent, and all above it by lineage,
detached ones too. The file of a payer that has ended stays for as long as an agent that it pays
for lives.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

from runtime.agents.parts import Agents
from runtime.errors import QuotaError
from runtime.records.change import Change
from runtime.records.items import REPORTED
from runtime.records.model import Agent
from runtime.records.registry import Registry
from runtime.records.spent import (
    COST_USED,
    NAME_SIZE,
    NO_LIMIT,
    NO_RATE,
    NOTHING_SPENT,
    PLACES,
    SIZE,
    SPENT,
    TOKENS_USED,
    VERSION,
    Spent,
)
from runtime.texts import limits
from runtime.texts.names import quote

#: where a cell has the sockets; NETWORKS of keeper.c
DIRECTORY: Final = "/run/ctx/net"
#: files of owners begin so
OWNER: Final = "owner-"
#: the host's network, which no relay is needed for
HOST: Final = "default"

# counters.h
LINES: Final = 42
LEVELS: Final = 32
_LIMIT: Final = 1 << 32
_FIRST: Final = 64
_LINE: Final = 192
_NAME: Final = 72
_HEAD: Final = struct.pack("=Q", VERSION)
#: its files lack what is at ``SPENT``
_OLDER: Final = struct.pack("=Q", 1)
#: in ``listens``: not in this cell, or on the socket alone; else it is the port
NOWHERE: Final = 0
SOCKET: Final = 1


def wanted(agents: Agents, agent: Agent) -> dict[str, int]:
    """The networks that a cell made now has, each with its port; ``SOCKET`` for none, since a
    cell in the host's network has no loopback of its own."""
    host = agents.authority.allows(agent, "network", HOST, "connect")
    return {
        name: SOCKET if host else network.port
        for name, network in sorted(agents.settings.config.networks.items())
        if may_use(agents, agent, name)
    }


def may_use(agents: Agents, agent: Agent, name: str) -> bool:
    """Whether it is configured, and the effective policy has it."""
    there = name in agents.settings.config.networks
    return there and agents.authority.allows(agent, "network", name, "connect")


def unknown(agents: Agents, agent: Agent) -> list[str]:
    """Names of networks in its effective policy that are not configured."""
    named = agents.authority.effective_policy(agent).objects("allow", "network", "connect").names
    patterns = {name for name in named if name.endswith("*")}
    return sorted(named - patterns - {HOST, *agents.settings.config.networks})


def variables(networks: Mapping[str, int]) -> dict[str, str]:
    """The variables that programs find in their environment: where each network is on the
    loopback."""
    return {
        limits.variable(name): f"http://127.0.0.1:{port}"
        for name, port in networks.items()
        if port > SOCKET
    }


def proxies(agents: Agents, networks: Mapping[str, int]) -> list[str]:
    """Those on the loopback that are forward proxies; programs are told of the first one."""
    return [
        name
        for name, network in agents.settings.config.networks.items()
        if network.kind == "http_proxy" and networks.get(name, NOWHERE) > SOCKET
    ]


def listened(networks: Mapping[str, int]) -> list[tuple[str, int]]:
    """The networks as the keeper is told of them: each with its port, or 0."""
    return [(name, port if port > SOCKET else 0) for name, port in networks.items()]


def metered(agents: Agents) -> list[str]:
    """The networks at which a meter counts what is used of models."""
    networks = agents.settings.config.networks
    return sorted(name for name, network in networks.items() if network.header == "counters")


def family(registry: Registry, agent: Agent) -> list[Agent]:
    """An agent and those in whose subtree it is, from itself up."""
    found = [agent]
    while found[-1].owned:
        above = registry.parent_of(found[-1])
        if above is None:
            break
        found.append(above)
    return found


def hand_path(directory: Path, agent: Agent) -> Path:
    """The socket at which the cell's keeper hands out what it listens on."""
    return directory / f"{agent.incarnation}-{agent.cell.id}"


def owners_path(directory: Path, owner: int) -> Path:
    """The file of whose bytes each relayed connection of an owner locks one."""
    return directory / f"{OWNER}{owner}"


def remove(registry: Registry, directory: Path, agent: Agent, cell: str) -> None:
    """Removes what is left of a cell that is over; the counters go with the lives of all that
    the agent pays for."""
    (directory / cell).unlink(missing_ok=True)
    for incarnation in registry.payers(agent):
        if not registry.is_paying(incarnation):
            (directory / incarnation).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Line:
    """One network in the file of an incarnation; ``sent`` and ``received`` are bytes. After the
    name the fields are as in the file."""

    number: int
    name: str
    connections: int
    sent: int
    received: int
    trouble: int
    #: connections of the agent's own
    open: int
    max: int
    closed: int
    listens: int
    told: int

    @property
    def usage(self) -> dict[str, int]:
        return {
            f"net.{self.name}.{key}": getattr(self, key)
            for key in ("connections", "sent", "received")
        }

    @property
    def errno(self) -> int:
        """Why the operator's socket cannot be reached; 0 if it can, as far as known."""
        return self.trouble if self.trouble < _LIMIT else 0

    @property
    def limited_by(self) -> int | None:
        """The level (``family``) whose limit is reached."""
        return self.trouble - _LIMIT if self.trouble >= _LIMIT else None


#: numbers of a line, after its name
_FIELDS: Final = tuple(each.name for each in fields(Line))[2:]


def position(number: int, field: str) -> int:
    """Where a number of a line is in a file."""
    return _FIRST + number * _LINE + _NAME + 8 * _FIELDS.index(field)


class Counters:
    """The file of one incarnation. Without one it has used no network, and neither has what it
    owns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _read(self) -> bytes:
        """The contents; nothing if there is no file, or this daemon does not know what it is."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        return data if data.startswith((_HEAD, _OLDER)) else b""

    def make(self, agent: Agent) -> Counters:
        """Makes the file, which appears as a whole, unless it is there; also in place of one
        that a later version made. One of the version before becomes longer: relays that map it
        go on."""
        data = self._read()
        if data.startswith(_HEAD):
            return self
        first = Spent(*_limits(agent.limits), *agent.spent)
        first.owner = agent.owner
        numbers = astuple(first)
        spent = agent.name.encode("ascii").ljust(NAME_SIZE, b"\0")
        spent += struct.pack(f"={len(numbers)}Q", *numbers)
        if data:
            os.truncate(self.path, SIZE)
            self._put(SPENT, spent)
            self._put(0, _HEAD)
        else:
            new = self.path.with_name(f".{self.path.name}")
            new.touch(0o600)
            new.write_bytes((_HEAD.ljust(SPENT, b"\0") + spent).ljust(SIZE, b"\0"))
            new.rename(self.path)
        return self

    def spent(self) -> Spent | None:
        """Use of models; None if there can have been none."""
        data = self._read()
        if not data.startswith(_HEAD):
            return None
        return Spent(*struct.unpack_from(f"={len(PLACES)}Q", data, SPENT + NAME_SIZE))

    def whose(self) -> str:
        """The name of the agent, which may be removed."""
        return self._read()[SPENT : SPENT + NAME_SIZE].rstrip(b"\0").decode("ascii")

    def spend(self, **numbers: int) -> None:
        """Some of the numbers of ``Spent``: those that are the daemon's, or, while no relay is
        there, any."""
        for name, value in numbers.items():
            self._put(PLACES[name], struct.pack("=Q", value))

    def lines(self) -> list[Line]:
        data = self._read()
        found = []
        for number in range(LINES if data else 0):
            at = _FIRST + number * _LINE
            name = data[at : at + _NAME].rstrip(b"\0").decode("ascii")
            if not name:
                break
            numbers = struct.unpack_from(f"={len(_FIELDS)}Q", data, at + _NAME)
            found.append(Line(number, name, *numbers))
        return found

    def number_of(self, name: str) -> int:
        """The line of a network, which is made if there is none; ``QuotaError``."""
        lines = self.lines()
        for line in lines:
            if line.name == name:
                return line.number
        if len(lines) == LINES:
            raise QuotaError(
                f"network:{name}: this agent and what it owns have had {LINES} networks since "
                "its start: reset it, or use fewer"
            )
        number = len(lines)
        self.write(number, "max", NO_LIMIT)
        self._put(_FIRST + number * _LINE, name.encode("ascii"))
        return number

    def write(self, number: int, field: str, value: int) -> None:
        """One of the numbers that are the daemon's."""
        self._put(position(number, field), struct.pack("=Q", value))

    def _put(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, at)

    def limit(self, wanted: Mapping[str, str]) -> None:
        """Sets what the agent's limits say."""
        for line in self.lines():
            most = limits.network_limit(wanted, line.name)
            value = NO_LIMIT if most is None else most
            if line.max != value:
                self.write(line.number, "max", value)
        spent, (tokens_max, cost_max) = self.spent(), _limits(wanted)
        if spent is not None and (tokens_max, cost_max) != (spent.tokens_max, spent.cost_max):
            self.spend(tokens_max=tokens_max, cost_max=cost_max)


def _limits(wanted: Mapping[str, str]) -> tuple[int, int]:
    """Those of tokens and of cost."""
    tokens, cost = wanted.get(limits.TOKENS), wanted.get(limits.COST)
    return (
        NO_LIMIT if tokens is None else limits.parse_tokens(tokens),
        NO_LIMIT if cost is None else limits.parse_cost(cost),
    )


def counters(directory: Path, agent: Agent) -> Counters:
    """The counters of an agent."""
    return Counters(directory / agent.incarnation)


def of_cell(directory: Path, agent: Agent) -> dict[str, int]:
    """The networks that an agent's cell was made with and that are open, as ``wanted``."""
    lines = counters(directory, agent).lines()
    return {line.name: line.listens for line in lines if line.listens and not line.closed}


def spent_of(directory: Path, agent: Agent) -> Spent:
    """Use of models by an agent and all below it, and its limits, once its file is gone, too."""
    spent = counters(directory, agent).spent()
    if spent is None:
        spent = Spent(*_limits(agent.limits), *agent.spent)
    return spent


def _payers(registry: Registry, directory: Path, agent: Agent) -> Iterator[Spent]:
    for incarnation in registry.payers(agent):
        if payer := registry.incarnation(incarnation):
            yield spent_of(directory, payer)
        elif spent := Counters(directory / incarnation).spent():
            yield spent


def usage(agents: Agents, directory: Path, agent: Agent) -> dict[str, int | float]:
    """The bytes that an agent and all that it owns have passed through networks, and, if a network
    is metered, what they and all below by lineage used of models; ``cost`` is in units."""
    counts = counters(directory, agent)
    found: dict[str, int | float] = {}
    for line in counts.lines():
        found |= line.usage
    if not metered(agents):
        return found
    found |= spent_of(directory, agent).usage
    tokens, cost = [], []
    for spent in _payers(agents.registry, directory, agent):
        tokens.append(spent.tokens_max - spent.tokens)
        cost.append(spent.cost_max - spent.cost)
    if tokens and min(tokens) < NO_LIMIT >> 1:
        found["tokens.left"] = max(0, min(tokens))
    if cost and min(cost) < NO_LIMIT >> 1:
        found["cost.left"] = max(0, min(cost)) / limits.UNIT
    return found


def prepare(agents: Agents, agent: Agent, directory: Path, networks: Mapping[str, int]) -> None:
    """Makes the lines of a new cell's networks, its own and those of the agents above;
    ``QuotaError`` if there is no room for one of them, or too many are above."""
    own = counters(directory, agent)
    if not networks:
        for line in own.lines():  # of an earlier cell of this incarnation
            own.write(line.number, "listens", NOWHERE)
        return
    members = family(agents.registry, agent)
    if len(members) > LEVELS:
        raise QuotaError(
            f"network:{next(iter(networks))}: {quote(agent.name)} is {len(members)} levels deep, "
            f"and the bytes of {LEVELS} are counted: make it higher up, or without a network"
        )
    for member in members:
        counts = counters(directory, member).make(member)
        for name in networks:
            counts.number_of(name)
        counts.limit(member.limits)
    for line in own.lines():
        own.write(line.number, "closed", 0)
        own.write(line.number, "listens", networks.get(line.name, NOWHERE))
    if not set(networks).isdisjoint(metered(agents)):
        charge(agents, agent, directory)


def charge(agents: Agents, agent: Agent, directory: Path) -> list[Path]:
    """The files of those who pay for an agent, made if they are not there; ``QuotaError``. A reboot
    takes those along of agents that were removed before."""
    payers = []
    for incarnation in agents.registry.payers(agent):
        if payer := agents.registry.incarnation(incarnation):
            counters(directory, payer).make(payer).limit(payer.limits)
        elif not (directory / incarnation).exists():
            continue
        payers.append(incarnation)
    if len(payers) > LEVELS:
        raise QuotaError(
            f"{quote(agent.name)} is {len(payers)} levels deep, and what models say is charged to "
            f"{LEVELS}: make it higher up, or without such a network"
        )
    if agent.parent is not None and agent.payers != tuple(payers):
        agents.journal.update(agent, payers=tuple(payers))
    return [directory / incarnation for incarnation in payers]


def keep(
    change: Change, registry: Registry, directory: Path, incarnations: Iterable[str]
) -> None:
    """Records what was used of models until now, as far as that is not recorded."""
    for agent in filter(None, map(registry.incarnation, incarnations)):
        spent = counters(directory, agent).spent()
        if spent is not None and spent.sums != (agent.spent or NOTHING_SPENT):
            change.set(agent, spent=spent.sums)


def keep_last(change: Change, registry: Registry, directory: Path, agent: Agent) -> None:
    """Records what was used by an agent that ends, and by those that have ended and pay for it: it
    may have been the last one for which their files stay."""
    above = map(registry.incarnation, registry.payers(agent)[1:])
    ended = [payer.incarnation for payer in above if payer is not None and not payer.live]
    keep(change, registry, directory, [agent.incarnation, *ended])


@dataclass(frozen=True, slots=True)
class Met:
    """A limit that a request met: whose it is, and what ``agent.limit`` tells of it."""

    #: None if it was removed
    payer: Agent | None
    of: str
    limit: str
    max: str
    used: str
    #: names this limit, whatever its value
    key: str

    @property
    def what(self) -> str:
        if not self.used:
            return f"cost.max={self.max} of {quote(self.of)}: a model has no rate"
        return f"{self.limit}={self.max} of {quote(self.of)} is used up ({self.used})"


def limit_met(registry: Registry, directory: Path, agent: Agent) -> Met | None:
    """The limit at which the last request of an agent was refused, if that is still so."""
    spent = counters(directory, agent).spent()
    if spent is None or not spent.trouble:
        return None
    kind, number = divmod(spent.trouble, _LIMIT)
    payers = registry.payers(agent)
    if number >= len(payers):
        return None
    payer, counts = registry.incarnation(payers[number]), Counters(directory / payers[number])
    of = counts.spent()
    if of is None:
        return None
    limit, most, used = limits.COST, limits.show_cost(of.cost_max), ""
    if kind == TOKENS_USED and of.tokens >= of.tokens_max:
        limit, most, used = limits.TOKENS, str(of.tokens_max), str(of.tokens)
    elif kind == COST_USED and of.cost >= of.cost_max:
        used = limits.show_cost(of.cost)
    elif kind != NO_RATE or of.cost_max == NO_LIMIT:
        return None
    return Met(payer, counts.whose(), limit, most, used, f"{payers[number]} {kind}")


def tell_limit(
    change: Change, agents: Agents, directory: Path, agent: Agent
) -> tuple[list[Agent], str]:
    """Tells of the limit at which the last request of an agent was refused: the agent, the payer
    whose limit it is, and that one's supervisor, each once of each value. Returns those whose logs
    are to say so, and what."""
    told: list[Agent] = []
    met = limit_met(agents.registry, directory, agent)
    if met is None:
        return told, ""
    for each in [agent] if met.payer in (agent, None) else [agent, met.payer]:
        known = change.peek_agent(each, "limits_told")
        if known.get(met.key) == met.max:
            continue
        change.set(each, limits_told={**known, met.key: met.max})
        change.tell(each, "agent.limit", limit=met.limit, of=met.of, max=met.max, used=met.used)
        told.append(each)
        supervisor = agents.registry.supervisor_of(each)
        if each is not met.payer or supervisor is None:
            continue
        if agents.messages.takes_notices(change, supervisor):
            # with its reports; who changes limits of its own children fills no more than these may
            with suppress(QuotaError):
                agents.messages.queue(
                    change, supervisor, text=met.what, sender=f"agent:{each.name}",
                    provenance=REPORTED,
                )  # fmt: skip
    return told, met.what


def describe_trouble(registry: Registry, agent: Agent, line: Line, path: str) -> str:
    """The trouble with a network, in a sentence; empty if nothing is."""
    if line.limited_by is not None:
        members = family(registry, agent)
        whose = members[min(line.limited_by, len(members) - 1)]
        of = "" if whose is agent else f" of {quote(whose.name)}"
        most = whose.limits.get(f"net.{line.name}.max", "max")
        return (
            f"network:{line.name}: net.{line.name}.max={most}{of} is used up: its connections "
            "are closed, and new ones refused"
        )
    if line.errno:
        why = os.strerror(line.errno)
        return f"network:{line.name}: cannot connect to {path or 'its socket'}: {why}"
    return ""
