"""The limits of an agent: the file that sets them, and how its lines are parsed."""

from __future__ import annotations

import re
from typing import Final

from ctxfs.files import fields
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Control
from runtime.caller import Caller
from runtime.errors import MalformedError
from runtime.records.model import Agent
from runtime.texts import names
from runtime.texts.names import quote

_KEYS: Final = ("memory.max", "pids.max", "cpu.max", "timeout", "grace", "log_max")
_CPU: Final = re.compile(r"(max|[0-9]{1,12})( [0-9]{1,12})?")


def _parse(line: str) -> tuple[str, str]:
    key, separator, value = line.partition("=")
    if not separator or key not in _KEYS:
        keys = ", ".join(_KEYS)
        raise MalformedError(f"{quote(line)} is not KEY=VALUE with a key of {keys}")
    if value == "max":
        return key, "max"
    if key in ("timeout", "grace"):
        names.parse_duration(value)
    elif key == "log_max":
        names.parse_size(value)
    elif key == "memory.max":
        value = str(names.parse_size(value))
    elif key == "pids.max":
        value = str(names.parse_number(value))
    elif not _CPU.fullmatch(value):
        why = "is not a cpu.max; use QUOTA or QUOTA PERIOD, in microseconds"
        raise MalformedError(f"{quote(value)} {why}")
    return key, value


def _check_limit(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    if line:
        key, value = _parse(line)
        base.runtime.supervisor.check_limits({key: value})


def _set_limits(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    wanted = dict(_parse(line) for line in fields.lines(text))
    supervisor = base.runtime.supervisor
    supervisor.check_limits(wanted)
    before = {key: agent.limits.get(key, "max") for key in wanted}
    merged = {**agent.limits, **wanted}
    try:
        supervisor.apply_limits(agent, wanted)
        base.runtime.agents.journal.update(
            agent, limits={key: value for key, value in merged.items() if value != "max"}
        )
    except BaseException:
        supervisor.apply_limits(agent, before)
        raise


def _limits(base: Base, agent: Agent, caller: Caller) -> str:
    config = base.runtime.config
    defaults = {
        "timeout": f"{config.timeout:g}s" if config.timeout is not None else "max",
        "grace": f"{config.grace:g}s",
        "log_max": str(config.log_max),
    }
    return "".join(
        f"{key}={agent.limits.get(key, defaults.get(key, 'max'))}\n" for key in _KEYS
    )


ROW: Final[Control[Agent]] = Control(
    name="limits", default="configured", guard=fields.AT_ANY_TIME, merges=True,
    render=_limits, check=_check_limit, commit=_set_limits,
    doc="KEY=VALUE of memory.max pids.max cpu.max timeout grace log_max; merged by key",
)  # fmt: skip
