"""The reports of agents to their supervisors: the event of each, and which are remembered."""

from __future__ import annotations

from typing import Final

from runtime.authority.facts import Part
from runtime.errors import TooLongError
from runtime.ids import MessageId
from runtime.records.change import Change
from runtime.records.items import Report
from runtime.records.model import Agent
from runtime.texts.names import head

#: bytes of a report, of its text in the event, and of what its supervisor can look up later
REPORT_MAX: Final = 64 << 10
_TOLD: Final = 8 << 10
_KEPT_TEXT: Final = 1500
#: the last of all children of one agent
_KEPT: Final = 10
#: ids of reports that nobody received
_KEPT_IDS: Final = 1024


def check_report(text: str) -> None:
    """``TooLongError``."""
    if len(text.encode()) > REPORT_MAX:
        raise TooLongError(f"a report may have at most {REPORT_MAX} bytes")


class Reports(Part):
    """The reports of all agents. Everything is added to a change that the caller commits."""

    def of(self, supervisor: Agent) -> list[Report]:
        """The last that an agent received, of all its children, oldest first."""
        return [r for r in self._items.of(supervisor.index, Report) if r.child]

    def knows(self, agent: Agent, name: MessageId) -> bool:
        """Whether an agent without a supervisor reported by this id, in its session."""
        return self._items.named(agent.index, Report, f"/{agent.session}/{name}") is not None

    def add(
        self, change: Change, agent: Agent, text: str, *, name: MessageId, keep_id: bool = False
    ) -> None:
        """An agent has reported: the event, and what is kept of it.

        ``keep_id``: an id that may be said again, of a report that nobody receives.
        """
        change.tell(
            agent,
            "agent.report",
            run=agent.run.id,
            to=self._registry.supervisor(agent),
            message=name,
            text=head(text, _TOLD),
        )
        supervisor = self._registry.supervisor_of(agent)
        if agent.is_guest:
            said = {"id": name, "run": agent.run.id, "text": text}
            change.post(agent.peer, "report", agent.incarnation, **said)
        if supervisor is not None:
            self._keep(
                change,
                Report(
                    agent=supervisor.index,
                    session=supervisor.session,
                    name=name,
                    child=agent.name,
                    run=agent.run.id,
                    text=head(text, _KEPT_TEXT),
                ),
                _KEPT,
            )
        elif keep_id:
            report = Report(agent=agent.index, session=agent.session, name=name)
            self._keep(change, report, _KEPT_IDS)

    def _keep(self, change: Change, report: Report, most: int) -> None:
        """One more, instead of the oldest of its sort."""
        there = self._items.of(report.agent, Report)
        same = [r for r in there if bool(r.child) is bool(report.child)]
        for old in same[: max(0, len(same) + 1 - most)]:
            change.drop(old)
        change.make(report)
