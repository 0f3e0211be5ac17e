"""A host is told of an agent that is put there: what it is, and what it may at most.

No cgroup of its ancestors holds it there, so its bound has the least of their limits.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from runtime.agents.bundles import PACK, Given
from runtime.agents.parts import Agents
from runtime.agents.workspace import Worktree
from runtime.errors import TooLongError
from runtime.ids import RunId
from runtime.peers.streams import MESSAGE_MAX
from runtime.records.model import Agent
from runtime.texts import policy
from runtime.texts.limits import COST, TOKENS, network_of, parse_cost, parse_tokens
from runtime.texts.names import dump_json, parse_size, quote

#: of the configuration, what the host needs as it is written
CONFIGURATION: Final = (
    *("exec", "env", "path", "cwd", "mode", "context", "model", "meta", "limits", "life", "iso"),
    *("workspace", "homedir", "mount", "author", "tty", "label", "profile"),
)
#: documents that a program may read when it starts
DOCUMENTS: Final = ("handoff.md", "input.jsonl", "inherited.md", "inherited.json")
_CPU_PERIOD: Final = 100_000
#: bytes that a message has beside its fields, at most
_AROUND: Final = 1024


def bound_of(agents: Agents, agent: Agent) -> dict[str, Any]:
    """The most that an agent may, as JSON values. A bound can only become less, so that its own
    limits, which may be raised, are not in it."""
    limits: dict[str, str] = {}
    for each in reversed(agents.registry.ancestors(agent)):
        for key, value in each.limits.items():
            if (amount := _amount(key, value)) is not None:
                before = limits.get(key)
                if before is None or amount < (_amount(key, before) or 0):
                    limits[key] = value
    return {
        "policy": policy.render(agents.authority.effective_policy(agent), agent.label),
        "families": list(agent.families),
        "depth": max(0, agents.settings.config.depth - agents.registry.depth(agent)),
        "limits": limits,
    }


def _amount(key: str, value: str) -> float | None:
    """A limit that holds for all that an agent owns, as a number; None for any other."""
    if value == "max":
        return None
    if key == "cpu.max":
        quota, _, period = value.partition(" ")
        # a period of 0 is one that the host refuses
        return None if quota == "max" else int(quota) / (int(period or 0) or _CPU_PERIOD)
    if key == "pids.max":
        return int(value)
    if key == "memory.max" or network_of(key) is not None:
        return parse_size(value)
    if key == TOKENS:
        return parse_tokens(value)
    return parse_cost(value) if key == COST else None


def put_of(agents: Agents, agent: Agent, run: RunId, bound: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``put``."""
    registry, session = agents.registry, agents.sessions.get(agent.session)
    supervisor = registry.supervisor_of(agent)
    files = {}
    for name in DOCUMENTS:
        if agents.documents.size(agent, name):
            data = agents.documents.read(agent, name)
            files[name] = [len(data), hashlib.sha256(data).hexdigest()]
    worktree = {}
    if agent.workspace == "worktree" and agent.worktree is not None:
        made = Worktree.load(agent.worktree)
        files[PACK] = [made.size, made.digest]
        worktree = {"worktree": Given.of(made).said()}
    put = {
        "name": agent.name,
        "session": session.name if session is not None else "",
        "run": int(run.removeprefix("r")),
        "config": {
            **{name: getattr(agent, name) for name in CONFIGURATION},
            "life": "owned",
            "policy": bound["policy"],
        },
        "supervisor": registry.supervisor(agent),
        "takes": supervisor is not None and supervisor.how.takes_messages,
        "bound": bound,
        "files": files,
        **worktree,
    }
    if (size := len(dump_json(put).encode())) > MESSAGE_MAX - _AROUND:
        raise TooLongError(
            f"placement: what a node has to be told of {quote(agent.name)}, such as env, mount and "
            f"policy, has {size} bytes, and at most {MESSAGE_MAX - _AROUND}: shorten them"
        )
    return put
