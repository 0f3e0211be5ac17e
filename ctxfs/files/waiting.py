"""The waiting plane, ``agent/NAME.d/waiting``, and ``trigger``, as rows (ctxfs-tasks(5), Waits)."""

from __future__ import annotations

from typing import Final

from ctxfs.files import fields
from ctxfs.tree.base import Base
from ctxfs.tree.items import ItemLayout, agent_with
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Control, Directory, Row, Shown, one_line
from runtime.agents.waiting import ARMING, TRIGGERING, WAITS, WRITING
from runtime.caller import PARTIES, Caller, Role
from runtime.records.items import Wait, WaitStatus


def _check_on(base: Base, wait: Wait, caller: Caller, line: str) -> None:
    base.runtime.agents.waiting.check_arm(caller, agent_with(base, wait), wait, line)


def _arm(base: Base, wait: Wait, caller: Caller, text: str) -> None:
    base.runtime.agents.waiting.arm(caller, agent_with(base, wait), wait, one_line(text))


def _pending(field: str, doc: str) -> Control[Wait]:
    """A control that may be written as long as the wait is not over."""

    def check(base: Base, wait: Wait, caller: Caller, line: str) -> None:
        base.runtime.agents.waiting.check(agent_with(base, wait), wait, field, line)

    def commit(base: Base, wait: Wait, caller: Caller, text: str) -> None:
        base.runtime.agents.waiting.set(agent_with(base, wait), wait, field, one_line(text))

    return Control(
        name=field, doc=doc, guard=WRITING, single=True,
        render=fields.value(field), check=check, commit=commit,
    )  # fmt: skip


def _token(base: Base, wait: Wait, caller: Caller) -> str:
    return f"{wait.token}\n" if wait.on == "trigger" else ""


def _trigger(base: Base, wait: Wait, caller: Caller, text: str) -> None:
    base.runtime.agents.waiting.trigger(wait, text)


ROWS: Final[tuple[Row[Wait], ...]] = (
    Directory(name="", top=True),
    Control(name="on", guard=ARMING, single=True,
        render=fields.value("on"), check=_check_on, commit=_arm,
        doc="what it waits for: timer DURATION, timer TIME, task NAME, child NAME, reply NAME "
        "[MESSAGE], message or trigger. Writing it arms the wait, once"),
    _pending("work", "id of the work item that it blocks"),
    _pending("deadline", "a duration or time after which it expires; a duration counts from the "
             "arming, or from the writing of this file if that is later"),
    Shown(name="status", default="new", polled=True, render=fields.value("status"),
        doc=" ".join(WaitStatus)),
    Shown(name="payload", render=fields.text("payload"),
        doc="what fired it: a JSON object, or the text that was written to its token"),
    # who may only look must not be able to send it anything
    Shown(name="token", read=PARTIES, render=_token, depends=("on",),
        doc="for a trigger: the name of the file in trigger/ that fires it"),
    # joined to nothing, and nothing can be read: each flush is a whole of its own
    Control(name="TOKEN", path=lambda wait: "trigger", kept=False, mode=0o222, read=Role.NONE,
        guard=TRIGGERING, merges=True, volatile=True, commit=_trigger,
        doc="writing to it fires the wait, once; then the file is gone"),
)

LAYOUT: Final = ItemLayout(
    number=9,
    name="waiting",
    rows=ROWS,
    kind=WAITS,
    records=lambda agents: agents.waiting,
)


def token_node(base: Base, wait: Wait) -> RowNode[Wait]:
    return RowNode(base, LAYOUT, wait.index, wait, LAYOUT.beside["TOKEN"])
