"""A host is told of an agent that is put there: what it is, and what it may at most.

No cgroup of its ancestors holds it there, so its bound has the least of their limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runtime.agents.bundles import PACK, Given
from runtime.agents.parts import Agents
from runtime.agents.workspace import Worktree
from runtime.errors import TooLongError
from runtime.ids import RunId
from runtime.peers.admission import least
from runtime.peers.streams import MESSAGE_MAX
from runtime.records.model import Agent
from runtime.texts import policy
from runtime.texts.limits import COST, TOKENS, network_of
from runtime.texts.names import dump_json, quote

#: of the configuration, what the host needs as it is written
CONFIGURATION: Final = (
    *("exec", "env", "path", "cwd", "mode", "context", "model", "meta", "limits", "life", "iso"),
    *("workspace", "homedir", "mount", "author", "tty", "label", "profile"),
)
#: limits that hold for all that an agent owns, beside those at networks
_OF_ALL: Final = ("cpu.max", "pids.max", "memory.max", TOKENS, COST)
#: bytes that a message has beside its fields, at most
_AROUND: Final = 1024


def bound_of(agents: Agents, agent: Agent) -> dict[str, Any]:
    """The most that an agent may, as JSON values. A bound can only become less, so that its own
    limits, which may be raised, are not in it."""
    limits: dict[str, str] = {}
    for each in reversed(agents.registry.ancestors(agent)):
        limits = least(limits, {key: of for key, of in each.limits.items() if _is_of_all(key, of)})
    return {
        "policy": policy.render(agents.authority.effective_policy(agent), agent.label),
        "families": list(agent.families),
        "depth": max(0, agents.settings.config.depth - agents.registry.depth(agent)),
        "limits": limits,
    }


def _is_of_all(key: str, value: str) -> bool:
    """Whether a limit of an agent is one of all that it owns."""
    return value != "max" and (key in _OF_ALL or network_of(key) is not None)


def put_of(
    agents: Agents,
    agent: Agent,
    run: RunId,
    bound: dict[str, Any],
    files: Mapping[str, tuple[int, str]],
    first: dict[str, str] | None,
) -> dict[str, Any]:
    """The fields of ``put``. ``files`` are sizes and digests of the documents that it gets,
    ``first`` what is said of its first message, if there is one."""
    registry, session = agents.registry, agents.sessions.get(agent.session)
    supervisor = registry.supervisor_of(agent)
    worktree = {}
    if agent.workspace == "worktree" and agent.worktree is not None:
        made = Worktree.load(agent.worktree)
        files = {**files, PACK: (made.size, made.digest)}
        worktree = {"worktree": Given.of(made).said()}
    put = {
        "name": agent.name,
        "session": session.name if session is not None else "",
        "run": int(run.removeprefix("r")) if run else agents.store.runs(agent.name) + 1,
        "config": {
            **{name: getattr(agent, name) for name in CONFIGURATION},
            "life": "owned",
            "policy": bound["policy"],
        },
        "supervisor": registry.supervisor(agent),
        "takes": supervisor is not None and supervisor.how.takes_messages,
        "bound": bound,
        "files": {name: list(of) for name, of in files.items() if of[0]},
        **worktree,
        **({"first": first} if first else {}),
    }
    if (size := len(dump_json(put).encode())) > MESSAGE_MAX - _AROUND:
        raise TooLongError(
            f"placement: what a node has to be told of {quote(agent.name)}, such as env, mount and "
            f"policy, has {size} bytes, and at most {MESSAGE_MAX - _AROUND}: shorten them"
        )
    return put
