"""Recording ends: what became of a run, and whether another follows.

Whatever has ended when the recorder comes round is recorded in one
transaction: a tree of a thousand costs one commit, not a thousand.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

import trio

from runtime import crashpoints, output
from runtime.agents import Agents, Change, replace_file
from runtime.cgroups import Hierarchy
from runtime.ending import guarded
from runtime.following import Followed, Following
from runtime.lifecycle import Event, move
from runtime.limits import spent
from runtime.model import Agent, Outcome
from runtime.names import timestamp
from runtime.sockets import Sockets

log = logging.getLogger("ctxd.recording")

_RESULT_TAIL: Final = 64 << 10
_MESSAGE_MAX: Final = 1 << 20
#: the back-off doubles from the first to the last; a run that lasts as long as
#: the last begins anew with the first
_FIRST_BACK_OFF: Final = 1.0
_LAST_BACK_OFF: Final = 60.0


class Recorder:
    """Records runs that are over, in batches, and lets go of what they held."""

    def __init__(
        self, *, agents: Agents, hierarchy: Hierarchy, sockets: Sockets, followed: Followed
    ) -> None:
        self._agents = agents
        self._hierarchy = hierarchy
        self._sockets = sockets
        self._followed = followed
        self._due: list[tuple[Agent, Following]] = []
        self._wake = trio.Event()
        #: whether agents are started again that want to be
        self.restarting = True

    def add(self, agent: Agent, following: Following) -> None:
        """A run that is over, with everything below it; ``following.over`` tells when done."""
        self._due.append((agent, following))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            due, self._due = self._due, []
            self._record(due)

    def _record(self, due: list[tuple[Agent, Following]]) -> None:
        change = Change()
        recorded = []
        for agent, following in due:
            part = Change(change)
            try:
                self._conclude(part, agent, following)
            except Exception:
                log.exception("%s: a bug in ctxfs", agent.name)
                part = Change(change)
                self._agents.record_end(part, agent, Outcome.INTERRUPTED, "runtime_lost")
            recorded.append((agent, following))
            change.add(part)
        crashpoints.reach("finish.conversation")
        self._agents.note(change)
        crashpoints.reach("finish.recorded")
        for agent, following in recorded:
            with guarded(agent):
                self._let_go(agent, following)
            following.over.set()

    def _conclude(self, change: Change, agent: Agent, following: Following) -> None:
        """Steps 7 and 8: the session, the channel, the events."""
        assert agent.cause is not None
        record = following.record()
        outcome, reason = Outcome(agent.cause[0]), agent.cause[1]
        if following.unkillable:
            reason += ",unkillable"
        usage = {**spent(following.node), "processes": 0}
        if record.started and record.ended:
            usage["wall_msec"] = (record.ended - record.started) // 1_000_000
        if record.started:
            if not agent.pid:  # its end came before it was seen to run
                change.event(
                    agent.session, "run.start", agent.name, run=agent.run, pid=record.program
                )
            try:
                self._add_conversation(change, agent, outcome)
            except OSError as error:  # a full disk, say: the end is recorded all the same
                log.error("%s: the result could not be kept: %s", agent.name, error.strerror)
            change.event(
                agent.session,
                "run.end",
                agent.name,
                run=agent.run,
                outcome=outcome,
                reason=reason,
                started=timestamp(record.started / 1e9),
                ended=timestamp((record.ended or time.time_ns()) / 1e9),
                usage=usage,
            )
        with contextlib.suppress(OSError):
            directory = self._agents.directory(agent) / "log"
            output.append_line(directory, f"{agent.run or 'it'} ended: {outcome} {reason}")
        if self._restarts(agent, outcome, following):
            self._add_restart(change, agent, reason)
        else:
            move(agent.status, Event.ENDED)
            self._agents.record_end(change, agent, outcome, reason)
        change.set(agent, usage=usage)
        log.info("%s: %s (%s)", agent.name, outcome, reason)

    def _restarts(self, agent: Agent, outcome: Outcome, following: Following) -> bool:
        """Whether it is started again: not what somebody ended."""
        if not self.restarting or following.given_up or following.unkillable:
            return False
        wanted = {
            "always": (Outcome.DONE, Outcome.ERROR),
            "on-failure": (Outcome.ERROR,),
        }.get(agent.restart, ())
        if agent.parent is not None or outcome not in wanted:
            return False
        return self._restart_number(agent) <= self._agents.config.restart_max

    @staticmethod
    def _restart_number(agent: Agent) -> int:
        lasted = time.time() - agent.started
        return 1 if lasted >= _LAST_BACK_OFF else agent.restarts + 1

    def _add_restart(self, change: Change, agent: Agent, reason: str) -> None:
        to = move(agent.status, Event.RESTARTING)
        assert to.status is not None
        number = self._restart_number(agent)
        delay = min(_FIRST_BACK_OFF * 2 ** (number - 1), _LAST_BACK_OFF)
        change.set(
            agent,
            status=to.status,
            cause=None,
            run="",
            pid=0,
            cgroup="",
            restarts=number,
            restart_at=time.time() + delay,
        )
        change.event(
            agent.session,
            "agent.status",
            agent.name,
            status=to.status,
            reason=f"restart:{number}",
            after=reason,
        )
        with contextlib.suppress(OSError):
            directory = self._agents.directory(agent) / "log"
            maximum = self._agents.config.restart_max
            output.append_line(directory, f"restart {number} of {maximum} in {delay:g} s")

    def _let_go(self, agent: Agent, following: Following) -> None:
        """Of what a recorded run leaves: its cgroup, its record, who waits for it."""
        following.leaf.remove()
        if not following.unkillable and not following.node.remove():
            log.warning("%s: the cgroup %s could not be removed", agent.name, following.node.path)
        crashpoints.reach("finish.removed")
        following.record_path.unlink(missing_ok=True)
        if agent.live:  # it will be started again
            crashpoints.reach("restart.recorded")
            return
        self._agents.waits.release(agent.wait_token)
        self._sockets.close(agent)
        crashpoints.reach("finish.released")
        parent = self._agents.parent_of(agent)
        if parent is not None and (above := self._followed.get(parent.index)) is not None:
            above.changes.notify()
        if agent.life == "temp":
            self._agents.remove_temporary(agent)

    def _add_conversation(self, change: Change, agent: Agent, outcome: Outcome) -> None:
        """The result (by default the end of stdout) and what the session shows of the run."""
        agents = self._agents
        if outcome is Outcome.DONE and not agents.document_size(agent, "result.md"):
            written = output.Output(agents.directory(agent) / "out")
            tail = written.tail(_RESULT_TAIL, since=agent.output_start)
            if tail:
                agents.write_document(agent, "result.md", tail)
                change.set(agent, result_from_output=True)
        session = agents.session(agent.session)
        handoff = _text(agents.read_document(agent, "handoff.md"))
        if handoff:
            change.message(
                agent.session,
                role="user",
                **{"from": agent.lineage.split(" ")[0]},
                run=agent.run,
                content=handoff,
            )
        if outcome is not Outcome.DONE or session is None:
            return
        result = _text(agents.read_document(agent, "result.md"))
        if result:
            replace_file(agents.session_directory(session) / "latest.md", result.encode())
            change.touched.append((agent.session, "latest.md"))
            change.message(
                agent.session,
                role="assistant",
                **{"from": f"agent:{agent.name}"},
                run=agent.run,
                content=result,
            )


def _text(data: bytes) -> str:
    """A document as a message's content, cut to what a message may hold."""
    text = data.decode(errors="replace")
    if len(data) > _MESSAGE_MAX // 2:
        cut = len(data) - _MESSAGE_MAX // 2
        text = data[: _MESSAGE_MAX // 2].decode(errors="ignore") + f"\n[{cut} bytes more]"
    return text
