"""Why calls failed: the last line for each caller and each agent, and what was refused lately.

Refusals are not events: an agent could fill its own history and others' with them. The daemon
keeps the latest of each caller in memory for ``ctx audit``, and logs them, up to a number per
second for each caller and owner.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ctxfs.errnos import name_of
from runtime.agents.parts import Agents
from runtime.caller import Caller
from runtime.errors import CtxError, ExceedingError
from runtime.ids import Incarnation
from runtime.kernel.daemonlog import CALLER_RATE, Rates, because_of
from runtime.kernel.handover import Descriptors
from runtime.kernel.recent import Recent
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


class Reasons:
    """The last rejections, bounded; those of the longest silent callers go first."""

    def __init__(self, agents: Agents | None = None) -> None:
        self._agents = agents
        self._lines = Recent[str, str](_KEPT)
        self._rates = Rates()
        #: refusals since the start
        self.count = 0
        #: by owner, and there by caller
        self._refusals = Recent[int, Recent[str, deque[_Refusal]]](_OWNERS)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        lines = [(key, line) for key, (line, _) in self._lines.entries.items()]
        return {"lines": lines, "refusals": [asdict(refusal) for refusal in self._all()]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for key, line in saved["lines"]:
            self._lines.put(key, line)
        for fields in saved["refusals"]:
            refusal = _Refusal(**fields)
            self._kept(refusal).append(refusal)

    def of_caller(self, caller: Caller) -> str:
        return self._lines.get(caller.key) or ""

    def of_agent(self, incarnation: Incarnation) -> str:
        return self._lines.get(f"agent:{incarnation}") or ""

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
        line = f"{moment} {said}"[:_LINE_MAX] + "\n"
        self._lines.put(caller.key, line)
        for_who = code in ("EACCES", "EPERM")
        if incarnation is not None and (not for_who or isinstance(error, ExceedingError)):
            self._lines.put(f"agent:{incarnation}", line)
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

    def _kept(self, refusal: _Refusal) -> deque[_Refusal]:
        """Those of the same caller, which so are the last to go."""
        callers = self._refusals.get(refusal.owner)
        if callers is None:
            callers = Recent(_CALLERS)
            self._refusals.put(refusal.owner, callers)
        kept = callers.get(refusal.key)
        if kept is None:
            kept = deque(maxlen=_OF_CALLER)
            callers.put(refusal.key, kept)
        return kept

    def _keep(self, refusal: _Refusal) -> None:
        kept = self._kept(refusal)
        admitted, _ = self._rates.admit(refusal.key, CALLER_RATE)
        if admitted or not kept:
            kept.append(refusal)
        else:
            kept[-1].more += 1

    def recent(self, caller: Caller, agent: Agent | None) -> list[dict[str, Any]]:
        """The last refusals, oldest first: for an operator, those to and about its agents; for an
        agent, those of its own requests."""
        found = [refusal for refusal in self._all() if self._may_see(caller, refusal)]
        if agent is not None and caller.agent is None:
            found = [r for r in found if r.key == agent.incarnation or r.agent == agent.name]
        return [refusal.shown() for refusal in sorted(found, key=lambda r: r.ts)[-_TOLD:]]

    def _all(self) -> Iterator[_Refusal]:
        for callers, _ in self._refusals.entries.values():
            for kept, _ in callers.entries.values():
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
