"""The beginning and the end of a run, in the session: events, results, replies."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from runtime.agents.messages import OWN, provenance_of_handoff, sender_of_handoff
from runtime.agents.parts import Agents
from runtime.cell.port import Execution, LiveCell, about
from runtime.cell.record import RunRecord, judge
from runtime.ids import RunId
from runtime.kernel import clock, output
from runtime.records.change import Change
from runtime.records.documents import replace_file
from runtime.records.items import Message, MessageStatus
from runtime.records.model import Agent, Outcome
from runtime.records.run import RunCue, RunStatus, Said
from runtime.texts.names import escape, timestamp

log = logging.getLogger("ctxd.conclusions")

LOST: Final = (Outcome.INTERRUPTED, "runtime_lost")
#: of what was heard of an agent that was away, what is asked for later
_KEPT: Final = ("refused", "ended", "left")
_RESULT_TAIL: Final = 64 << 10
#: so that a line of messages.jsonl stays below what a message may hold
_CONTENT_MAX: Final = 512 << 10


def judge_run(
    agents: Agents, agent: Agent, cell: Execution, execution: Execution
) -> tuple[Outcome, str]:
    """Outcome and reason of a program in a cell that ended by itself, or was cut short. With its
    monitor a cell ends, and so does what runs inside."""
    cut = cell.record().cut_short or execution.record().cut_short
    if cut is not None:
        return cut
    if cell.lost or execution.lost:
        return LOST
    text = output.Segments(agents.documents.directory(agent) / "log").tail(4096)
    lines = text.decode(errors="replace").strip().splitlines()
    complaint = escape(lines[-1]) if lines else ""
    return judge(execution.record(), oom=execution.was_out_of_memory(), complaint=complaint)


def judge_agent(agents: Agents, live_cell: LiveCell) -> tuple[Outcome, str]:
    """Outcome and reason of an agent whose cell has ended: by the program that it was, if that had
    entered the cell and ended first."""
    agent, run = live_cell.agent, live_cell.run
    is_agent = run is not None and not agent.how.run_per_message and not agent.run.ending
    if run is not None and is_agent and run.record().over:
        return judge_run(agents, agent, live_cell, run)
    return judge_run(agents, agent, live_cell, live_cell)


def begin_run(change: Change, agents: Agents, agent: Agent) -> RunId:
    """The next run."""
    run = agents.registry.next_run(change, agent)
    change.run(agent, RunCue.BEGIN, id=run, started=clock.wall(), started_up=clock.up())
    renew_said(change, agents, agent)
    return run


def renew_said(change: Change, agents: Agents, agent: Agent) -> None:
    """Words that come from now on are of another run: they begin where those before end."""
    if agent.said.result_from_output:
        agents.documents.write(agent, "result.md", b"")
    directory = agents.documents.directory(agent)
    reply = output.Segments(directory / "reply").end if agent.how.converses else 0
    said = Said(
        output_start=output.Segments(directory / "out").end,
        reply_start=reply,
        reply_offset=reply,
        kept_offset=reply,
    )
    change.set(agent, said=said)


def see_run(change: Change, agent: Agent, record: RunRecord) -> None:
    """The program of the current run is seen to run."""
    change.run(agent, RunCue.SEEN, pid=record.program)
    change.tell(agent, "run.start", run=agent.run.id, pid=record.program)


def conclude_run(
    change: Change,
    agents: Agents,
    agent: Agent,
    record: RunRecord,
    outcome: Outcome,
    reason: str,
    usage: dict[str, Any],
    *,
    last: bool,
) -> None:
    """The current run is over, with everything in its leaf: what it gives back, its event, and
    the message that it worked on. With the ``last`` run its agent is over."""
    if record.started:
        _add_gains(change, agents, agent, outcome, last=last)
        _add_run_end(change, agent, record, outcome, reason, usage)
    agents.asks.run_over(change, agent)
    message = agents.messages.current(agent)
    if message is not None:
        status = message_status(outcome, reason)
        reply = _reply_of_run(agents, agent) if agent.how.run_per_message else ""
        why = reason if last or outcome is not Outcome.DONE else ""
        end_message(change, agents, agent, message, status, reply=reply, reason=why, last=last)


def conclude_away(
    change: Change, agents: Agents, agent: Agent, outcome: Outcome, reason: str
) -> None:
    """An agent that was away is over: what it gave back, and what its host did not tell."""
    run, message = agent.run, agents.messages.current(agent)
    told = agent.heard.get("over") == run.id
    if message is not None:
        status = message_status(outcome, reason)
        end_message(change, agents, agent, message, status, reason=reason, last=True)
    if run.id and (told or run.status is not RunStatus.BEGUN):
        _add_gains(change, agents, agent, outcome, last=True)
        if not told:
            change.tell(agent, "run.end", run=run.id, outcome=outcome, reason=reason)
    kept = {key: value for key, value in agent.heard.items() if key in _KEPT}
    change.set(agent, heard=kept)


def _add_gains(
    change: Change, agents: Agents, agent: Agent, outcome: Outcome, *, last: bool
) -> None:
    """Adds all that a run gives back, and of the last one the conversation."""
    try:
        if outcome is Outcome.DONE and not (agent.away and agent.how.takes_messages):
            _add_result(change, agents, agent)
        told = agent.heard.get("conversation")  # by its host
        if last and not (told or agent.how.takes_messages):
            _add_delegation(change, agents, agent, outcome)
    except OSError as error:  # a full disk, say: the end is recorded all the same
        extra = about(agent, run=agent.run.id)
        log.error("%s: cannot keep the result: %s", agent.name, error.strerror, extra=extra)


def _add_run_end(
    change: Change,
    agent: Agent,
    record: RunRecord,
    outcome: Outcome,
    reason: str,
    usage: dict[str, Any],
) -> None:
    if not agent.run.pid:  # its end came before it was seen to run
        see_run(change, agent, record)
    if record.ended:
        usage["wall_msec"] = record.lasted // 1_000_000
    change.tell(
        agent,
        "run.end",
        run=agent.run.id,
        outcome=outcome,
        reason=reason,
        started=timestamp(record.started / 1e9),
        ended=timestamp((record.ended or time.time_ns()) / 1e9),
        usage=usage,
    )


def _add_result(change: Change, agents: Agents, agent: Agent) -> None:
    """By default the result of a run that ended well is the end of its standard output; what is on
    a terminal is for people."""
    if agent.tty or agents.documents.size(agent, "result.md"):
        return
    written = output.Segments(agents.documents.directory(agent) / "out")
    tail = written.tail(_RESULT_TAIL, since=agent.said.output_start)
    if tail:
        agents.documents.write(agent, "result.md", tail)
        change.hear(agent, result_from_output=True)


def _add_delegation(change: Change, agents: Agents, agent: Agent, outcome: Outcome) -> None:
    """Adds what the session shows of a ``once`` agent's run: its task, and its result."""
    handoff = as_content(agents.documents.read(agent, "handoff.md"))
    if handoff:
        sender, provenance = sender_of_handoff(agent), provenance_of_handoff(agent)
        _add_line(change, agent, "user", sender, provenance, handoff)
    if outcome is Outcome.DONE:
        _add_reply(change, agents, agent, as_content(agents.documents.read(agent, "result.md")))


def _add_reply(change: Change, agents: Agents, agent: Agent, text: str, **more: Any) -> None:
    """A reply is the session's latest, and a line of the conversation."""
    session = agents.sessions.get(agent.session)
    if not text or session is None:
        return
    replace_file(agents.sessions.ensure(session) / "latest.md", text.encode())
    change.touched.append((agent.session, "latest.md"))
    _add_line(change, agent, "assistant", f"agent:{agent.name}", OWN, text, **more)


def end_message(
    change: Change,
    agents: Agents,
    agent: Agent,
    message: Message,
    status: MessageStatus,
    *,
    reply: str = "",
    reason: str = "",
    last: bool = False,
) -> None:
    """A message that was worked on is over: the conversation, and its end; with the ``last`` one
    its agent is over."""
    content = as_content(message.text.encode())
    _add_line(change, agent, "user", message.sender, message.provenance, content)
    try:
        if status is MessageStatus.PROCESSED:
            _add_reply(change, agents, agent, reply, **({"told": True} if agent.is_guest else {}))
    except OSError as error:  # a full disk, say: the end is recorded all the same
        why = about(agent, run=agent.run.id)
        log.error("%s: cannot keep the reply: %s", agent.name, error.strerror, extra=why)
    agents.messages.end(change, agent, message, status, reply=reply, reason=reason)
    if not last:
        agents.tasks.child_goes_on(change, agent, message, status, reason)


def message_status(outcome: str, reason: str) -> MessageStatus:
    """The status of a message after the end of the run, or the agent, that worked on it."""
    if outcome == Outcome.DONE:
        return MessageStatus.PROCESSED
    if outcome == Outcome.CANCELLED and not reason.startswith("timeout"):
        return MessageStatus.ABORTED
    return MessageStatus.FAILED


def _reply_of_run(agents: Agents, agent: Agent) -> str:
    """The standard output of the current run, its end if it is long."""
    written = output.Segments(agents.documents.directory(agent) / "out")
    return written.tail(_CONTENT_MAX, since=agent.said.output_start).decode(errors="replace")


def as_content(data: bytes) -> str:
    """A document as a message's content, cut to what a message may hold."""
    text = data.decode(errors="replace")
    if len(data) > _CONTENT_MAX:
        cut = len(data) - _CONTENT_MAX
        text = data[:_CONTENT_MAX].decode(errors="ignore") + f"\n[{cut} bytes more]"
    return text


def _add_line(
    change: Change, agent: Agent, role: str, sender: str, provenance: str, content: str, **more: Any
) -> None:
    change.say(
        agent.session,
        role=role,
        **{"from": sender},
        provenance=provenance,
        run=agent.run.id,
        content=content,
        **more,
    )
