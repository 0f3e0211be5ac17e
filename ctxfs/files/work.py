"""The work plane, ``agent/NAME.d/work``, as rows (ctxfs-tasks(5), Work items)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ctxfs.files import fields
from ctxfs.tree.base import Base
from ctxfs.tree.items import ItemLayout, agent_with
from ctxfs.tree.rows import Check, Control, Directory, Row, Shown, one_line
from runtime.agents.work import WORK_ITEMS, WRITING
from runtime.authority.guard import Guard
from runtime.caller import PARTIES, Caller
from runtime.records.items import Work
from runtime.records.lifecycle import LIVE
from runtime.records.model import Agent


def _whole(text: str) -> str:
    """A text of several lines; blank ones alone are none."""
    return text if text.strip() else ""


def _set(field: str, taken: Callable[[str], str] = str) -> Check[Work]:
    def commit(base: Base, item: Work, caller: Caller, text: str) -> None:
        base.runtime.agents.work.set(agent_with(base, item), item, field, taken(text))

    return commit


def _checked(field: str) -> Check[Work]:
    def check(base: Base, item: Work, caller: Caller, line: str) -> None:
        base.runtime.agents.work.check(agent_with(base, item), item, field, line)

    return check


def _blocked_by(base: Base, item: Work, caller: Caller) -> str:
    return base.runtime.agents.work.blocked_by(agent_with(base, item), item)


def _check_focus(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    base.runtime.agents.work.check_focus(agent, line)


def _set_focus(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    base.runtime.agents.work.focus(agent, one_line(text))


#: beside the items, in the agent's table
CURRENT: Final = Control(
    name="current", within="work", guard=Guard(who=PARTIES, when=LIVE), single=True,
    render=fields.value("focus"), check=_check_focus, commit=_set_focus, depends=("focus",),
    doc="id of the item that has the focus; writing an id gives that item the focus, an empty line "
    "removes it",
)  # fmt: skip


ROWS: Final[tuple[Row[Work], ...]] = (
    Directory(name="", top=True),
    Control(name="objective", guard=WRITING,
        render=fields.text("objective"), commit=_set("objective", _whole),
        doc="its objective; an item needs one to become done"),
    Control(name="plan.md", guard=WRITING,
        render=fields.text("plan"), commit=_set("plan", _whole), depends=("plan",),
        doc="its plan and progress"),
    Control(name="acceptance.md", guard=WRITING,
        render=fields.text("acceptance"), commit=_set("acceptance", _whole),
        depends=("acceptance",), doc="how to tell that it is done"),
    Control(name="status", default="open", guard=WRITING, polled=True, single=True,
        render=fields.value("status"), check=_checked("status"), commit=_set("status", one_line),
        doc="open active blocked done cancelled; the last two are final"),
    Control(name="blocked_by", guard=WRITING, volatile=True,
        render=_blocked_by, check=_checked("blocked_by"), commit=_set("blocked_by"),
        doc="ids of items that come first, one per line; then, read-only, "
        "wait NAME for each armed wait that blocks it"),
    Control(name="parent", guard=WRITING, single=True,
        render=fields.value("parent"), check=_checked("parent"), commit=_set("parent", one_line),
        doc="id of a chain that it belongs to, any text"),
    Shown(name="created_at", render=fields.time("created"), doc="RFC 3339 time"),
    Shown(name="updated_at", render=fields.time("updated"), depends=("updated",),
        doc="RFC 3339 time of the last change"),
)

LAYOUT: Final = ItemLayout(
    number=8,
    name="work",
    rows=ROWS,
    kind=WORK_ITEMS,
    records=lambda agents: agents.work,
)
