"""Accounts of owners: one account for each resource of the machine.

An owner is a uid; all its agents share its accounts, whichever agent made them, so that
children do not multiply what one may have. Of each account a tenth is kept for the
owner's operators, and of all accounts together a tenth for operators of uid 0 (of a
daemon without root: for its user): agents that took all there is can still be stopped.

A caller in an agent charges the agent's owner, a caller outside its own uid. Open files and
connections are charged until they are closed, files of ``artifact/`` that the kernel knows until
it forgets them, texts above a kilobyte as memory, rows of the store as disk. Lines of the log are
limited where they are written (``runtime.kernel.daemonlog``). Monitors are in no agent's cgroup
but in one of their owner's, with limits that follow from their allowed number.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from resource import RLIMIT_NOFILE, getrlimit
from typing import Final

from runtime.errors import QuotaError
from runtime.records.config import Config, memory
from runtime.texts.names import quote

#: descriptors that the daemon needs for itself: its store, its helpers, what is in line to be
#: closed (ctxfs.disks), and what one request opens for a moment
_OWN_DESCRIPTORS: Final = 1500
#: the part of an account that is left to its operators, and of all accounts to uid 0
_TENTH: Final = 10
#: the longest delay for what an owner used, in seconds: a caller cannot be killed while it
#: waits, and root's kill is obeyed within a second
_DELAY_MAX: Final = 0.5


class Resource(StrEnum):
    """A resource that is accounted; amounts are numbers, or bytes of ``memory``, ``tmp`` and
    ``disk``."""

    DESCRIPTORS = "descriptors"
    CONNECTIONS = "connections"
    MEMORY = "memory"
    TASKS = "tasks"
    MONITORS = "monitors"
    #: questions that nobody has answered yet
    ASKS = "asks"
    #: files that cells have in memory, as they were measured
    TMP = "tmp"
    DISK = "disk"


class Reserve(IntEnum):
    """How much of what is kept back somebody may use."""

    #: an agent
    NONE = 0
    #: an operator: of its own account all
    OWNER = 1
    #: an operator of uid 0, or of a daemon without root its user: all there is
    MASTER = 2
    #: an operator that starts something: of its own account half. What runs then is the agent's,
    #: and must not leave its operator without a descriptor to end it
    START = 3


#: the setting, and how one gets room
_ABOUT: Final[dict[Resource, tuple[str, str]]] = {
    Resource.DESCRIPTORS: ("owner_descriptors", "close open files, or stop agents"),
    Resource.CONNECTIONS: ("owner_connections", "close connections"),
    Resource.MEMORY: (
        "owner_memory_max",
        "close files that are being written or listed, and read waiting answers",
    ),
    Resource.TASKS: ("owner_tasks", "let tasks end, or stop some"),
    Resource.MONITORS: ("owner_monitors", "let runs and tasks end, or stop some"),
    Resource.ASKS: ("owner_asks", "answer some, or withdraw some with rmdir or AskWithdraw"),
    Resource.TMP: ("owner_tmp_max", "remove files below /tmp in cells, or stop agents"),
    Resource.DISK: ("owner_disk_max", "remove files (rm), or sessions and agents (rmdir)"),
}

#: who has what is not an agent's
OPERATORS: Final = "its operators"


@dataclass(frozen=True, slots=True)
class Payer:
    """The account that is charged: the owner's uid, the agent's name, and its reserve."""

    owner: int
    name: str = OPERATORS
    reserve: Reserve = Reserve.NONE


class _Account:
    """The amount of one resource that one owner has."""

    __slots__ = ("holders", "use")

    def __init__(self) -> None:
        self.use = 0
        self.holders: dict[str, int] = {}

    def add(self, name: str, amount: int) -> None:
        self.use += amount
        held = self.holders.get(name, 0) + amount
        if held:
            self.holders[name] = held
        else:
            self.holders.pop(name, None)

    def most(self) -> tuple[str, int]:
        """The one who holds most, and how much; an empty name if nobody does."""
        if not self.holders:
            return "", 0
        return max(self.holders.items(), key=lambda item: item[1])


@dataclass(frozen=True, slots=True)
class Standing:
    """One account as it is: ``use``, ``limit`` and ``reserve`` in the resource's unit.

    For ``time``, in milliseconds, ``limit`` may be used at once and ``use`` of it is used up.
    """

    owner: int
    account: str
    use: int
    limit: int
    reserve: int = 0
    #: who holds most, and how much
    most: str = ""
    held: int = 0


class Charge:
    """So much of one resource on the account of its payer, until it is released."""

    __slots__ = ("_accounts", "amount", "payer", "resource")

    def __init__(self, accounts: Accounts, payer: Payer, resource: Resource) -> None:
        self._accounts = accounts
        self.payer = payer
        self.resource = resource
        self.amount = 0

    def resize(self, amount: int) -> None:
        """Holds so much from now on; ``QuotaError`` if that is more and too much."""
        if amount > self.amount:
            more = amount - self.amount
            self._accounts.check(
                self.payer.owner, self.resource, more, reserve=self.payer.reserve
            )
        self.set(amount)

    def set(self, amount: int) -> None:
        """Holds so much from now on of something that is there already: nothing is refused."""
        self._accounts.pay_anyway(self.payer, self.resource, amount - self.amount)
        self.amount = amount

    def release(self) -> None:
        self.resize(0)


class Accounts:
    """All accounts of all owners.

    ``limits`` bound each owner, ``totals`` all owners together; a resource that ``totals``
    lacks is bounded for each owner only.
    """

    def __init__(
        self,
        limits: dict[Resource, int],
        totals: dict[Resource, int] | None = None,
        *,
        share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = dict(limits)
        self._totals = dict(totals or {})
        self._accounts: dict[tuple[int, Resource], _Account] = defaultdict(_Account)
        self._used: dict[Resource, int] = dict.fromkeys(Resource, 0)
        #: time of the event loop, in seconds
        self.time = TimeAccounts(share, clock=clock)

    # limits

    def configure(self, config: Config) -> None:
        """Other limits from now on; what is held already stays."""
        self._limits = _limits_of(config)
        self.time.share = config.owner_time

    def set_total(self, resource: Resource, total: int) -> None:
        self._totals[resource] = total

    def limit(self, resource: Resource) -> int:
        """The most that one owner may have; never more than there is for all."""
        limit, total = self._limits[resource], self._totals.get(resource)
        return limit if total is None else min(limit, total)

    # using

    def pay_anyway(self, payer: Payer, resource: Resource, amount: int) -> None:
        """Takes so much for what cannot be refused; less than 0 is given back."""
        account = self._accounts[payer.owner, resource]
        account.add(payer.name, amount)
        self._used[resource] += amount
        if not account.use and not account.holders:
            del self._accounts[payer.owner, resource]

    def check(
        self, owner: int, resource: Resource, amount: int, *, reserve: Reserve = Reserve.NONE
    ) -> None:
        """``QuotaError`` if there is no room for so much more."""
        total = self._totals.get(resource)
        if reserve is Reserve.MASTER and resource is Resource.DISK:
            return  # what is left for root the filesystem itself knows, and says
        if total is not None:
            most = total if reserve is Reserve.MASTER else total - total // _TENTH
            if self._used[resource] + amount > most:
                raise QuotaError(self._all_taken(resource, amount, total))
        if reserve is Reserve.MASTER:
            return
        limit = self.limit(resource)
        tenth = limit // _TENTH
        kept = {Reserve.OWNER: 0, Reserve.START: (tenth + 1) // 2}.get(reserve, tenth)
        if self.use(owner, resource) + amount > limit - kept:
            raise QuotaError(self._taken(owner, resource, amount, limit))

    def charged(self, payer: Payer, resource: Resource, amount: int = 0) -> Charge:
        """So much, until it is released; ``QuotaError``."""
        charge = Charge(self, payer, resource)
        charge.resize(amount)
        return charge

    def charged_anyway(self, payer: Payer, resource: Resource, amount: int) -> Charge:
        """A charge for what is there already; nothing is refused."""
        charge = Charge(self, payer, resource)
        charge.set(amount)
        return charge

    # looking

    def use(self, owner: int, resource: Resource) -> int:
        account = self._accounts.get((owner, resource))
        return account.use if account is not None else 0

    def room(self, owner: int, resource: Resource, *, reserve: Reserve = Reserve.NONE) -> int:
        """How much more somebody may take; 0 if nothing."""
        limit, total = self.limit(resource), self._totals.get(resource)
        kept = 0 if reserve is not Reserve.NONE else limit // _TENTH
        room = limit - kept - self.use(owner, resource)
        if total is not None:
            room = min(room, total - total // _TENTH - self._used[resource])
        return max(0, room)

    def used(self, resource: Resource) -> int:
        """By all owners."""
        return self._used[resource]

    def total(self, resource: Resource) -> int | None:
        """The most that all owners may have together; None without such a bound."""
        return self._totals.get(resource)

    def owners(self) -> list[int]:
        """The owners that hold anything."""
        return sorted({owner for owner, _ in self._accounts} | set(self.time.owners()))

    def standings(self, owner: int) -> list[Standing]:
        """All accounts of one owner, also those that are empty."""
        found = []
        for resource in Resource:
            account = self._accounts.get((owner, resource), _Account())
            limit = self.limit(resource)
            kept, most = limit // _TENTH, account.most()
            found.append(Standing(owner, resource.value, account.use, limit, kept, *most))
        used, burst = (round(1000 * each) for each in (self.time.used(owner), self.time.burst))
        return [*found, Standing(owner, "time", used, burst)]

    def _taken(self, owner: int, resource: Resource, amount: int, limit: int) -> str:
        setting, remedy = _ABOUT[resource]
        account = self._accounts.get((owner, resource), _Account())
        return (
            f"the account {resource} of uid {owner} has {account.use} of {limit}, and this needs "
            f"{amount} more; a tenth is reserved for its operators ({setting}){_most(account)}: "
            f"{remedy}"
        )

    def _all_taken(self, resource: Resource, amount: int, total: int) -> str:
        _, remedy = _ABOUT[resource]
        return (
            f"the accounts {resource} of all owners have {self._used[resource]} of {total}, and "
            f"this needs {amount} more; a tenth is reserved for root: {remedy}"
        )


def _descriptors() -> int:
    """How many the process may open for others."""
    soft, _ = getrlimit(RLIMIT_NOFILE)
    return max(soft // 4, soft - _OWN_DESCRIPTORS)


def _limits_of(config: Config) -> dict[Resource, int]:
    """The limits of one owner: half of what there is where the settings say none."""
    limits = {resource: getattr(config, setting) for resource, (setting, _) in _ABOUT.items()}
    halves = {Resource.DESCRIPTORS: _descriptors() // 2, Resource.TMP: memory() // 2}
    return {name: halves[name] if limit is None else limit for name, limit in limits.items()}


def accounts_of(config: Config) -> Accounts:
    """Those that the settings and this process's limits make."""
    return Accounts(
        _limits_of(config),
        {Resource.DESCRIPTORS: _descriptors(), Resource.MEMORY: memory() // 4},
        share=config.owner_time,
    )


def _most(account: _Account) -> str:
    name, held = account.most()
    if not name:
        return ""
    return f"; {name if name == OPERATORS else quote(name)} holds most ({held})"


@dataclass(frozen=True, slots=True)
class _Level:
    """The time that an owner had left, and when."""

    left: float
    at: float


class TimeAccounts:
    """Time of the event loop: each owner has a share of it.

    ``share`` is a part of one second in each second. An owner may use ``burst`` seconds of
    work at once; what it owes beyond is at most as much again, so that it is over for a
    bounded time after it has stopped. One that used nothing for as long as a burst takes is
    forgotten.
    """

    def __init__(
        self, share: float, *, burst: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.share = share
        self.burst = burst
        self._clock = clock
        self._levels: dict[int, _Level] = {}

    def _level(self, owner: int) -> _Level:
        now = self._clock()
        known = self._levels.get(owner)
        if known is None:
            return _Level(self.burst, now)
        return _Level(min(self.burst, known.left + self.share * (now - known.at)), now)

    def delay(self, owner: int) -> float:
        """Seconds until it has time again, 0 to 1: how late it is to be answered."""
        left = self._level(owner).left
        if left >= 0:
            return 0.0
        return min(_DELAY_MAX, -left / self.share) if self.share else _DELAY_MAX

    def is_over(self, owner: int) -> bool:
        """Whether it has used more than it has."""
        return self._level(owner).left < 0

    def is_charged(self, who: Payer) -> bool:
        """Whether anybody pays: operators' time is on no account."""
        return who.reserve is Reserve.NONE

    def pay(self, who: Payer, seconds: float) -> None:
        """So much of the loop's time was used for somebody."""
        if not self.is_charged(who):
            return
        level = self._level(who.owner)
        left = max(-self.burst, level.left - seconds)
        if left >= self.burst:
            self._levels.pop(who.owner, None)
        else:
            self._levels[who.owner] = _Level(left, level.at)

    def makes_wait(self, who: Payer) -> bool:
        """Whether somebody's owner is over its account; operators always have time."""
        return self.is_charged(who) and self.is_over(who.owner)

    def owners(self) -> list[int]:
        """The owners that used some of it lately."""
        return [owner for owner in self._levels if self.used(owner) > 0]

    def used(self, owner: int) -> float:
        """Seconds of its burst that are used now."""
        return self.burst - self._level(owner).left
