"""The verbs of ``ctl``, as rows: one parser, no chain of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from runtime.caller import CONTROLLERS, Caller, Role
from runtime.errors import DeniedError, MalformedError
from runtime.model import Agent
from runtime.names import check_name, quote

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem


@dataclass(frozen=True, slots=True)
class Verb:
    """``arguments``: least and most."""

    name: str
    usage: str
    doc: str
    who: Role
    arguments: tuple[int, int]
    handler: Callable[[Filesystem, Agent, Caller, list[str]], None]


def _reason(agent: Agent, caller: Caller) -> str:
    if caller.agent is None:
        return "operator_stop"
    return "self_stop" if caller.agent == agent.index else "supervisor_stop"


def _start(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.start(agent)


def _stop(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.stop(agent, _reason(agent, caller), kill=False)


def _kill(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.stop(agent, _reason(agent, caller), kill=True)


def _pause(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.pause(agent)


def _resume(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.resume(agent)


def _reset(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.reset(agent)


def _abort(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.supervisor.abort(agent, words[0] if words else None)


def _session(fs: Filesystem, agent: Agent, caller: Caller, words: list[str]) -> None:
    fs.runtime.agents.births.switch_session(agent, check_name(words[0]))


#: by policy, an agent that may start may let go on, one that may stop may hold up
_STARTERS: Final = CONTROLLERS | Role.STARTER
_STOPPERS: Final = CONTROLLERS | Role.STOPPER

VERBS: Final = {
    verb.name: verb
    for verb in (
        Verb("start", "start", "begin a run", _STARTERS, (0, 0), _start),
        Verb("stop", "stop", "cancel: SIGTERM, grace, SIGKILL", _STOPPERS | Role.SELF,
             (0, 0), _stop),
        Verb("kill", "kill", "cancel without grace", _STOPPERS, (0, 0), _kill),
        Verb("pause", "pause", "freeze it and everything below it", _STOPPERS, (0, 0), _pause),
        Verb("resume", "resume", "continue", _STARTERS, (0, 0), _resume),
        Verb("abort", "abort [RUN]", "end the current run and pause", _STOPPERS, (0, 1), _abort),
        Verb("reset", "reset", "replace a dead agent with a new one", _STARTERS, (0, 0), _reset),
        Verb("session", "session NAME", "switch or make a session", CONTROLLERS, (1, 1), _session),
    )
}


def act(fs: Filesystem, agent: Agent, caller: Caller, line: str) -> None:
    """One line of ``ctl``."""
    name, *words = (word for word in line.replace("\t", " ").split(" ") if word)
    verb = VERBS.get(name)
    if verb is None:
        raise MalformedError(f"unknown verb {quote(name)}; use {', '.join(VERBS)}")
    least, most = verb.arguments
    if not least <= len(words) <= most:
        raise MalformedError(f"{quote(line)}: wrong arguments; use {verb.usage}")
    if not fs.runtime.agents.identity.roles(caller, agent) & verb.who:
        raise DeniedError(f"the caller may not {name} {quote(agent.name)}")
    with fs.runtime.agents.journal.acting(caller, agent, verb=name):
        verb.handler(fs, agent, caller, words)


def describe_verbs(fs: Filesystem, agent: Agent, caller: Caller) -> str:
    """What reading ``ctl`` shows."""
    return "".join(f"{verb.usage}\n" for verb in VERBS.values())
