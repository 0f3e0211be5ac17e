"""The work plane, ``agent/NAME.d/work``, as rows (ctxfs-tasks(5), Work items)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ctxfs.files import fields
from ctxfs.tree.items import agent_with, item_layout
from ctxfs.tree.rows import Control, Directory, Row, Shown, one_line
from runtime.agents.work import WORK_ITEMS, WRITING
from runtime.authority.guard import Guard
from runtime.caller import PARTIES
from runtime.records.change import Change
from runtime.records.items import Work
from runtime.records.lifecycle import LIVE


def _text(name: str, doc: str) -> Control[Work]:
    """A text of several lines; blank ones alone are none."""
    field = name.removesuffix(".md")
    return Control(
        name=name, doc=doc, guard=WRITING, render=fields.text(field),
        depends=() if field == name else (field,),
        commit=lambda base, item, caller, text: base.agents.work.set(
            agent_with(base, item), item, field, text if text.strip() else ""
        ),
    )  # fmt: skip


def _checked(
    name: str, doc: str, taken: Callable[[str], str] = one_line, **more: Any
) -> Control[Work]:
    """A value whose lines are checked as they are written."""
    return Control(
        name=name, doc=doc, guard=WRITING,
        check=lambda base, item, caller, line: base.agents.work.update(
            Change(), agent_with(base, item), item, name, line
        ),
        commit=lambda base, item, caller, text: base.agents.work.set(
            agent_with(base, item), item, name, taken(text)
        ),
        **{"render": fields.value(name), **more},
    )  # fmt: skip


#: beside the items, in the agent's table
CURRENT: Final = Control(
    name="current", within="work", guard=Guard(who=PARTIES, when=LIVE), single=True,
    render=fields.value("focus"), depends=("focus",),
    check=lambda base, agent, caller, line: base.agents.work.turn_to(Change(), agent, line),
    commit=lambda base, agent, caller, text: base.agents.work.focus(agent, one_line(text)),
    doc="id of the item that has the focus; writing an id gives that item the focus, an empty line "
    "removes it",
)  # fmt: skip


ROWS: Final[tuple[Row[Work], ...]] = (
    Directory(name="", top=True),
    _text("objective", "its objective; an item needs one to become done"),
    _text("plan.md", "its plan and progress"),
    _text("acceptance.md", "how to tell that it is done"),
    _checked("status", "open active blocked done cancelled; the last two are final",
        default="open", polled=True, single=True),
    _checked("blocked_by", "ids of items that come first, one per line; then, read-only, "
        "wait NAME for each armed wait that blocks it", str, volatile=True,
        render=lambda base, item, caller: base.agents.work.blocked_by(
            agent_with(base, item), item
        )),
    _checked("parent", "id of a chain that it belongs to, any text", single=True),
    Shown(name="created_at", render=fields.time("created"), doc="RFC 3339 time"),
    Shown(name="updated_at", render=fields.time("updated"), depends=("updated",),
        doc="RFC 3339 time of the last change"),
)

LAYOUT: Final = item_layout(8, "work", ROWS, WORK_ITEMS, lambda agents: agents.work)
