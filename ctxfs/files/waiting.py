"""The waiting plane, ``agent/NAME.d/waiting``, and ``trigger``, as rows (ctxfs-tasks(5), Waits)."""

from __future__ import annotations

from typing import Final

from ctxfs.files import fields
from ctxfs.tree.base import Base
from ctxfs.tree.items import agent_with, item_layout
from ctxfs.tree.rownodes import RowNode, node_of
from ctxfs.tree.rows import Control, Directory, Row, Shown, one_line
from runtime.agents.waiting import ARMING, TRIGGERING, WAITS, WRITING
from runtime.caller import PARTIES, Role
from runtime.records.change import Change
from runtime.records.items import Wait, WaitStatus


def _pending(field: str, doc: str) -> Control[Wait]:
    """A control that may be written as long as the wait is not over."""
    return Control(
        name=field, doc=doc, guard=WRITING, single=True, render=fields.value(field),
        check=lambda base, wait, caller, line: base.agents.waiting.update(
            Change(), agent_with(base, wait), wait, field, line
        ),
        commit=lambda base, wait, caller, text: base.agents.waiting.set(
            agent_with(base, wait), wait, field, one_line(text)
        ),
    )  # fmt: skip


ROWS: Final[tuple[Row[Wait], ...]] = (
    Directory(name="", top=True),
    Control(name="on", guard=ARMING, single=True,
        render=fields.value("on"),
        check=lambda base, wait, caller, line: base.agents.waiting.begin(
            Change(), caller, agent_with(base, wait), wait, line
        ),
        commit=lambda base, wait, caller, text: base.agents.waiting.arm(
            caller, agent_with(base, wait), wait, one_line(text)
        ),
        doc="what it waits for: timer DURATION, timer TIME, timer every DURATION [until WHEN], "
        "task NAME, child NAME, reply NAME [MESSAGE], answer ASK, message, trigger or triggers. "
        "Writing it arms the wait, once"),
    _pending("work", "id of the work item that it blocks"),
    _pending("deadline", "a duration or time after which it expires; a duration counts from the "
             "arming, or from the writing of this file if that is later"),
    Shown(name="status", default="new", polled=True, render=fields.value("status"),
        doc=" ".join(WaitStatus)),
    Shown(name="payload", render=fields.text("payload"),
        doc="what fired it: a JSON object, or the text that was written to its token"),
    # who may only look must not be able to send it anything
    Shown(name="token", read=PARTIES, depends=("on",),
        render=lambda base, wait, caller: f"{wait.token}\n" if wait.has_token else "",
        doc="for a trigger, or triggers: the name of the file in trigger/ that fires it"),
    # joined to nothing, and nothing can be read: each flush is a whole of its own
    Control(name="TOKEN", path=lambda wait: "trigger", kept=False, mode=0o222, read=Role.NONE,
        guard=TRIGGERING, merges=True, volatile=True,
        commit=lambda base, wait, caller, text: base.agents.waiting.trigger(wait, text),
        doc="writing to it fires the wait, once; then the file is gone. Of triggers, it stays"),
)

LAYOUT: Final = item_layout(9, "waiting", ROWS, WAITS, lambda agents: agents.waiting)


def token_node(base: Base, wait: Wait) -> RowNode[Wait]:
    return node_of(base, LAYOUT, wait.index, wait, LAYOUT.beside["TOKEN"])
