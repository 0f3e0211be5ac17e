"""The limits of an agent: the file that sets them, and how its lines are parsed."""

from __future__ import annotations

import re
from typing import Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Control
from runtime.caller import Caller
from runtime.errors import MalformedError, QuotaError
from runtime.records.model import Agent
from runtime.texts import names
from runtime.texts.limits import (
    COST,
    NETWORKS_MAX,
    RUNNING,
    TOKENS,
    network_of,
    parse_cost,
    parse_tokens,
)
from runtime.texts.names import quote

_KEYS: Final = (
    *("memory.max", "pids.max", "cpu.max", "timeout", "grace", "log_max"),
    *(RUNNING, TOKENS, COST),
)
_CPU: Final = re.compile(r"(max|[0-9]{1,12})( [0-9]{1,12})?")


def _parse(line: str) -> tuple[str, str]:
    key, separator, value = line.partition("=")
    of_network = network_of(key) is not None
    if not separator or not (of_network or key in _KEYS):
        keys = ", ".join((*_KEYS, "net.NAME.max"))
        raise MalformedError(f"{quote(line)} is not KEY=VALUE with a key of {keys}")
    if value == "max":
        return key, "max"
    if key in ("timeout", "grace"):
        names.parse_duration(value)
    elif key == "log_max":
        names.parse_size(value)
    elif key == "memory.max" or of_network:
        value = str(names.parse_size(value))
    elif key in ("pids.max", RUNNING):
        value = str(names.parse_number(value))
    elif key == TOKENS:
        value = str(parse_tokens(value))
    elif key == COST:
        parse_cost(value)
    elif not _CPU.fullmatch(value):
        why = "is not a cpu.max; use QUOTA or QUOTA PERIOD, in microseconds"
        raise MalformedError(f"{quote(value)} {why}")
    return key, value


def _check_limit(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    if line:
        key, value = _parse(line)
        check_possible(base, agent, {key: value})


def check_possible(base: Base, agent: Agent, limits: dict[str, str]) -> None:
    """``UnsupportedError`` for a limit that this machine cannot set; of an agent that is to run at
    a node, that says so at its start."""
    if not agent.placement:
        base.runtime.supervisor.check_limits(limits)


def _set_limits(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    wanted = dict(_parse(line) for line in fields.lines(text))
    supervisor = base.runtime.supervisor
    check_possible(base, agent, wanted)
    before = {key: agent.limits.get(key, "max") for key in wanted}
    merged = {**agent.limits, **wanted}
    if len(_networks(merged)) > NETWORKS_MAX:
        raise QuotaError(
            f"limits of {len(_networks(merged))} networks are too many; use {NETWORKS_MAX}: "
            "net.NAME.max=max removes one"
        )
    try:
        supervisor.apply_limits(agent, wanted)
        base.agents.journal.update(
            agent, limits={key: value for key, value in merged.items() if value != "max"}
        )
    except BaseException:
        supervisor.apply_limits(agent, before)
        raise


def _networks(limits: dict[str, str]) -> list[str]:
    """The keys that limit a network."""
    return sorted(key for key, value in limits.items() if value != "max" and network_of(key))


def _limits(base: Base, agent: Agent, caller: Caller) -> str:
    config = base.runtime.config
    defaults = {
        "timeout": f"{config.timeout:g}s" if config.timeout is not None else "max",
        "grace": f"{config.grace:g}s",
        "log_max": str(config.log_max),
    }
    return "".join(
        f"{key}={agent.limits.get(key, defaults.get(key, 'max'))}\n"
        for key in (*_KEYS, *_networks(agent.limits))
    )


ROW: Final[Control[Agent]] = Control(
    name="limits", default="configured",
    shape=shapes.pairs(lambda line, label: _parse(line), _KEYS, r"^net\.[a-zA-Z0-9._+-]+\.max$"),
    guard=fields.AT_ANY_TIME, merges=True,
    render=_limits, check=_check_limit, commit=_set_limits,
    doc="KEY=VALUE of memory.max pids.max cpu.max timeout grace log_max children.running "
        "tokens.max cost.max, and net.NAME.max for a network; merged by key",
)  # fmt: skip
