"""Telling systemd while the daemon runs: that the event loop turns, and what there is.

Who hangs cannot say so. A task of the loop sends the keep-alives: they say that the loop turns,
and nothing of the mount, which the guard asks (guard.c). systemd's time is longer than the guard
needs, so it ends only a daemon that the guard does not.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable

import trio

from runtime.ids import AgentIndex
from runtime.kernel import systemd
from runtime.records.change import Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.runtime import Runtime

#: how often it is looked whether something is to be said, in seconds
_SECONDS = 2.0
#: the same while systemd has not taken what it was told
_AGAIN_SECONDS = 0.1
#: keep-alives while systemd waits for one
_KEEP_ALIVES = 3
#: an end that takes longer than TimeoutStopSec= goes on as long as this is said again (seconds)
_EXTENSION = 30.0


class Service(Subscriber):
    """Speaks for the event loop: who does not turn, says nothing.

    A keep-alive is sent by a task like all others. So it says that the loop turns, and nothing of
    the mount: whether requests are answered is seen from outside, by the mount guard.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._changed = True
        self._said = ""
        #: why the settings are those of before, as long as the file is wrong
        self._complaint = ""
        self._reloads = 0
        #: what systemd has to know and did not take yet, in order
        self._owed: deque[tuple[str, ...]] = deque()
        runtime.agents.journal.subscribe(self)

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        if "status" in names:
            self._changed = True

    def agent_listed(self, agent: Agent) -> None:
        self._changed = True

    def ready(self) -> None:
        """The mount answers, and what lived was taken over."""
        self._tell("READY=1")

    def stopping(self) -> None:
        """Every agent is being cancelled."""
        self._tell("STOPPING=1")

    def reloading(self) -> None:
        """The settings and the declared agents are being read again, until ``reloaded``."""
        self._reloads += 1
        self._tell(*systemd.reloading())

    def reloaded(self) -> None:
        """They were read; systemd hears of it once nobody reads them any more."""
        self._reloads -= 1
        # before it is ready, systemd is not told that it is
        if not self._reloads and self._runtime.state == "ready":
            self._tell("READY=1")

    def _tell(self, *assignments: str) -> None:
        """Sends a message that may not be lost: without the end of a reload, systemd waits for it
        for ever."""
        self._owed.append(assignments)
        self._pay()

    def _pay(self) -> None:
        while self._owed and systemd.notify(*self._owed[0]):
            self._owed.popleft()

    def complain(self, complaint: str) -> None:
        """Says in the status why the settings are those of before; nothing if they are not."""
        self._complaint = complaint
        self._changed = True

    async def run(self) -> None:
        """Until it is cancelled; at once over if nobody listens."""
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        limit = systemd.watchdog_seconds(os.environ)
        step = min(_SECONDS, limit / _KEEP_ALIVES) if limit else _SECONDS
        alive = -1.0
        stops: float | None = None
        while True:
            self._pay()
            now, words = trio.current_time(), []
            if limit and (alive < 0 or now - alive > limit / _KEEP_ALIVES - step / 2):
                words.append("WATCHDOG=1")
            if self._runtime.state == "stopping":
                if stops is None:
                    stops = now + self._runtime.supervisor.longest_end()
                if now < stops:
                    words.append(f"EXTEND_TIMEOUT_USEC={int(_EXTENSION * 1e6)}")
            if (status := self._status()) != self._said:
                words.append(f"STATUS={status}")
            if words and not self._owed and systemd.notify(*words):
                self._said, self._changed = status, False
                alive = now if "WATCHDOG=1" in words else alive
            await trio.sleep(_AGAIN_SECONDS if self._owed else step)

    def _status(self) -> str:
        state = self._runtime.state
        if not self._changed and state == "ready":
            return self._said
        there = [agent.status for agent in self._runtime.agents.registry]
        count = len(there) - there.count(Status.DEAD)
        text = f"{count} agent{'s' * (count != 1)}, {there.count(Status.BUSY)} busy"
        if state != "ready":
            text = f"{state}: {text}"
        return f"{text}; {self._complaint}" if self._complaint else text
