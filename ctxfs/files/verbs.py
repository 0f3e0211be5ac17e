"""The verbs of ``ctl``, as rows: one parser, no chain of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ctxfs.tree.base import Base
from runtime.agents.births import RESETTING, SWITCHING
from runtime.authority.facts import Facts
from runtime.authority.guard import Act, Guard, Unless, of_move, unless
from runtime.caller import CONTROLLERS, Caller, Role
from runtime.errors import NotRunningError, QuotaError, WrongStateError
from runtime.ids import RunId
from runtime.life import room
from runtime.life.beginning import STARTING
from runtime.records.items import BY_ABORT
from runtime.records.lifecycle import Cue
from runtime.records.model import Agent
from runtime.texts.names import check_name, parse_usage, quote

#: what a verb is said to
_O = TypeVar("_O")


@dataclass(frozen=True, slots=True)
class Verb(Generic[_O]):
    """``usage`` is the verb with its arguments, those in brackets may be left out.

    ``told`` is what ``ctx help`` says of it, if it is a command that takes agents only.
    """

    usage: str
    doc: str
    guard: Guard[_O]
    handler: Callable[[Base, _O, Caller, list[str]], object]
    told: str = ""

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


@unless("it has no run", NotRunningError)
def _between(facts: Facts, caller: Caller, agent: Agent) -> str:
    return "" if agent.run.id else f"no run to abort: {quote(agent.name)} is between two runs"


@unless("its run is still ending", WrongStateError)
def _ending(facts: Facts, caller: Caller, agent: Agent) -> str:
    aborted_there = agent.away and agent.run.cause == BY_ABORT
    if agent.run.aborting or aborted_there:
        return f"{quote(agent.name)} still ends its message: try again when that has ended"
    if not agent.run.ending:
        return ""
    return f"the run {agent.run.id} is still ending: try again when it has ended"


#: by policy, an agent that may start may let go on, one that may stop may hold up
_STARTERS: Final = CONTROLLERS | Role.STARTER
_STOPPERS: Final = CONTROLLERS | Role.STOPPER

VERBS: Final[dict[str, Verb[Agent]]] = {
    verb.name: verb
    for verb in (
        Verb("start", "begin a run", STARTING,
             lambda base, agent, caller, words: base.runtime.supervisor.start(agent),
             "start agents"),
        Verb("stop", "cancel: SIGTERM, grace, SIGKILL",
             of_move(_STOPPERS | Role.SELF, Cue.STOP, local=True),
             lambda base, agent, caller, words: base.runtime.supervisor.stop(agent, kill=False),
             "stop agents; kill them after their grace period"),
        Verb("kill", "cancel without grace", of_move(_STOPPERS, Cue.KILL, local=True),
             lambda base, agent, caller, words: base.runtime.supervisor.stop(agent, kill=True),
             "stop agents at once"),
        Verb("pause", "freeze it and everything below it",
             of_move(_STOPPERS, Cue.PAUSE, local=True),
             lambda base, agent, caller, words: base.runtime.supervisor.pause(agent),
             "freeze agents and all that they own"),
        Verb("resume", "continue",
             of_move(_STARTERS, Cue.RESUME, _ending,
                     Unless("a tree that it may write has no room", QuotaError,
                            lambda facts, caller, agent: room.describe(agent)), local=True),
             lambda base, agent, caller, words: base.runtime.supervisor.resume(agent),
             "let paused agents continue"),
        Verb("abort [RUN]", "end the current run and pause",
             of_move(_STOPPERS, Cue.ABORT, _between),
             lambda base, agent, caller, words:
             base.runtime.supervisor.abort(agent, RunId(words[0]) if words else None)),
        Verb("reset", "replace a dead agent with a new one", RESETTING,
             lambda base, agent, caller, words: base.runtime.supervisor.reset(agent),
             "replace dead agents with new ones"),
        Verb("session NAME", "switch or make a session", SWITCHING,
             lambda base, agent, caller, words:
             base.runtime.supervisor.switch(agent, check_name(words[0]))),
    )
}  # fmt: skip


def act(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    """One line of ``ctl``."""
    verb, words = parse_usage(line, VERBS)
    agents = base.agents
    verb.guard.check(Act.SAY, verb.name, agents, caller, agent, agent)
    with agents.journal.acting(caller, agent, verb=verb.name):
        verb.handler(base, agent, caller, words)


def describe_verbs(base: Base, agent: Agent, caller: Caller) -> str:
    """The text that reading ``ctl`` shows."""
    return "".join(f"{verb.usage}\n" for verb in VERBS.values())
