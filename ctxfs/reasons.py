"""Why calls failed: the last line for each caller and each agent, and what was refused lately.

Refusals are not events: an agent could fill its own history and others' with them. The daemon
keeps the latest of each caller in memory for ``ctx audit``, and logs them, up to a number per
second for each caller and owner.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ctxfs.errnos import name_of
from runtime.agents.parts import Agents
from runtime.caller import Caller
from runtime.errors import CtxError, ExceedingError
from runtime.ids import Incarnation
from runtime.kernel.daemonlog import CALLER_RATE, Rates, because_of
from runtime.kernel.handover import Descriptors, Handed
from runtime.records.model import Agent
from runtime.texts.names import escape, timestamp

log = logging.getLogger("ctxd.rejected")

_KEPT: Final = 10_000
_LINE_MAX: Final = 1000
#: refusals of one caller, callers of one owner, and owners, of whom some are kept
_OF_CALLER: Final = 16
_CALLERS: Final = 32
_OWNERS: Final = 32
#: told at once
_TOLD: Final = 1024
#: characters of a refusal that is kept
_SENTENCE_MAX: Final = 300


@dataclass(slots=True)
class _Refusal:
    """One refusal; ``owner`` and ``about`` are uids, of who called and of the agent that the
    call was about. ``more`` followed in the same second."""

    ts: str
    by: str
    key: str
    owner: int
    agent: str
    about: int | None
    code: str
    path: str
    reason: str
    more: int = 0

    def shown(self) -> dict[str, Any]:
        names = ("ts", "by", "agent", "code", "path", "reason", "more")
        return {name: getattr(self, name) for name in names}


class Reasons(Handed):
    """The last rejections, bounded; those of the longest silent callers go first."""

    HANDED = ("_lines",)

    def __init__(self, agents: Agents | None = None) -> None:
        self._agents = agents
        self._lines: OrderedDict[str, str] = OrderedDict()
        self._rates = Rates()
        #: refusals since the start
        self.count = 0
        self._refusals: OrderedDict[int, OrderedDict[str, deque[_Refusal]]] = OrderedDict()

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        refusals = [asdict(refusal) for refusal in self._all()]
        return {**super().save(descriptors), "refusals": refusals}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        for fields in saved["refusals"]:
            refusal = _Refusal(**fields)
            callers = self._refusals.setdefault(refusal.owner, OrderedDict())
            callers.setdefault(refusal.key, deque(maxlen=_OF_CALLER)).append(refusal)

    def of_caller(self, caller: Caller) -> str:
        return self._lines.get(caller.key, "")

    def of_agent(self, incarnation: Incarnation) -> str:
        return self._lines.get(f"agent:{incarnation}", "")

    def note(
        self,
        error: BaseException,
        caller: Caller,
        path: str,
        incarnation: Incarnation | None = None,
    ) -> None:
        """Keeps ``TIME ERRNO PATH: SENTENCE`` for the caller and, unless the caller was
        refused for who it is, for the agent whose file it was; once, however far it goes."""
        if isinstance(error, CtxError):
            if error.kept:
                return
            error.kept = True
        sentence = error.sentence if isinstance(error, CtxError) else _system(error)
        code, moment = name_of(error), timestamp()
        said = f"{code} {escape(path)}: {escape(sentence)}"
        line = f"{moment} {said}"[:_LINE_MAX]
        self._put(caller.key, line)
        for_who = code in ("EACCES", "EPERM")
        if incarnation is not None and (not for_who or isinstance(error, ExceedingError)):
            self._put(f"agent:{incarnation}", line)
        self.count += 1
        by, owner = self._who(caller)
        about = self._about(path)
        mine = self._calling(caller)
        names = [agent.name for agent in (mine, about) if agent is not None]
        run = mine.run.id if mine is not None else ""
        why = because_of(owner, by, agents=names, run=run, reason=code)
        log.info("%s: %s", by, said, extra=why)
        self._keep(
            _Refusal(
                ts=moment,
                by=by,
                key=caller.key,
                owner=owner,
                agent=about.name if about is not None else "",
                about=about.owner if about is not None else None,
                code=code,
                path=escape(path)[:_SENTENCE_MAX],
                reason=escape(sentence)[:_SENTENCE_MAX],
            )
        )

    def _who(self, caller: Caller) -> tuple[str, int]:
        """Processes outside all agents by uid: operator or stranger, depending on the agent."""
        if self._agents is None or caller.agent is None:
            return caller.key, caller.uid
        return self._agents.journal.describe(caller), self._agents.identity.payer(caller).owner

    def _calling(self, caller: Caller) -> Agent | None:
        """The agent that the caller is a process of, if it is there still."""
        if self._agents is None or caller.agent is None:
            return None
        return self._agents.registry.recall(caller.agent)

    def _about(self, path: str) -> Agent | None:
        """The agent whose file it was, as far as that is known by the name."""
        where, _, rest = path.partition("/")
        if where != "agent" or self._agents is None:
            return None
        name = rest.partition("/")[0]
        return self._agents.registry.named(name.removesuffix(".d").removesuffix(".sock"))

    def _put(self, key: str, line: str) -> None:
        self._lines[key] = line + "\n"
        self._lines.move_to_end(key)
        while len(self._lines) > _KEPT:
            self._lines.popitem(last=False)

    def _keep(self, refusal: _Refusal) -> None:
        callers = self._refusals.setdefault(refusal.owner, OrderedDict())
        kept = callers.setdefault(refusal.key, deque(maxlen=_OF_CALLER))
        admitted, _ = self._rates.admit(refusal.key, CALLER_RATE)
        if admitted or not kept:
            kept.append(refusal)
        else:
            kept[-1].more += 1
        callers.move_to_end(refusal.key)
        self._refusals.move_to_end(refusal.owner)
        if len(callers) > _CALLERS:
            callers.popitem(last=False)
        if len(self._refusals) > _OWNERS:
            self._refusals.popitem(last=False)

    def recent(self, caller: Caller, agent: Agent | None) -> list[dict[str, Any]]:
        """The last refusals, oldest first: for an operator, those to and about its agents; for an
        agent, those of its own requests."""
        found = [refusal for refusal in self._all() if self._may_see(caller, refusal)]
        if agent is not None and caller.agent is None:
            found = [r for r in found if r.key == agent.incarnation or r.agent == agent.name]
        return [refusal.shown() for refusal in sorted(found, key=lambda r: r.ts)[-_TOLD:]]

    def _all(self) -> Iterator[_Refusal]:
        for callers in self._refusals.values():
            for kept in callers.values():
                yield from kept

    def _may_see(self, caller: Caller, refusal: _Refusal) -> bool:
        if caller.agent is not None:
            return refusal.key == caller.incarnation
        if self._agents is not None and self._agents.identity.is_master(caller):
            return True
        return caller.known and caller.uid in (refusal.owner, refusal.about)


def late_line(when: float, path: str, sentence: str) -> str:
    """The line of what failed after it had been answered, at ``when`` (epoch seconds)."""
    return f"{timestamp(when)} {escape(path)}: {escape(sentence)}"[:_LINE_MAX] + "\n"


def _system(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "an error inside ctxfs, see the daemon's log"
