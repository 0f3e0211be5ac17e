"""The work plane, ``agent/NAME.d/work``, as rows (ctxfs(5), Work items)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ctxfs.tree.planes import ItemPlane, agent_with
from ctxfs.tree.rows import Check, Control, Directory, Render, Row, Shown, one_line
from runtime.agents.work import WRITING, WorkPlane
from runtime.authority.guard import Guard
from runtime.caller import PARTIES, Caller
from runtime.records.items import Work
from runtime.records.lifecycle import LIVE
from runtime.records.model import Agent
from runtime.texts.names import timestamp

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem


def _set(field: str) -> Check:
    def commit(fs: Filesystem, item: Work, caller: Caller, text: str) -> None:
        fs.runtime.agents.work.set(agent_with(fs, item), item, field, text)

    return commit


def _set_line(field: str) -> Check:
    def commit(fs: Filesystem, item: Work, caller: Caller, text: str) -> None:
        fs.runtime.agents.work.set(agent_with(fs, item), item, field, one_line(text))

    return commit


def _set_text(field: str) -> Check:
    """A text of several lines; blank ones alone are none."""

    def commit(fs: Filesystem, item: Work, caller: Caller, text: str) -> None:
        value = text if text.strip() else ""
        fs.runtime.agents.work.set(agent_with(fs, item), item, field, value)

    return commit


def _checked(field: str) -> Check:
    def check(fs: Filesystem, item: Work, caller: Caller, line: str) -> None:
        fs.runtime.agents.work.check(agent_with(fs, item), item, field, line)

    return check


def _value(field: str) -> Render:
    def render(fs: Filesystem, item: Work, caller: Caller) -> str:
        value = str(getattr(item, field))
        return f"{value}\n" if value else ""

    return render


def _text(field: str) -> Render:
    return lambda fs, item, caller: str(getattr(item, field))


def _time(field: str) -> Render:
    return lambda fs, item, caller: timestamp(getattr(item, field)) + "\n"


def _blocked_by(fs: Filesystem, item: Work, caller: Caller) -> str:
    return fs.runtime.agents.work.blocked_by(agent_with(fs, item), item)


def _focus(fs: Filesystem, agent: Agent, caller: Caller) -> str:
    return f"{agent.focus}\n" if agent.focus else ""


def _check_focus(fs: Filesystem, agent: Agent, caller: Caller, line: str) -> None:
    fs.runtime.agents.work.check_focus(agent, line)


def _set_focus(fs: Filesystem, agent: Agent, caller: Caller, text: str) -> None:
    fs.runtime.agents.work.focus(agent, one_line(text))


#: beside the items, in the agent's table
CURRENT: Final = Control(
    name="current", within="work", guard=Guard(who=PARTIES, when=LIVE), single=True,
    render=_focus, check=_check_focus, commit=_set_focus, depends=("focus",),
    doc="id of the item that has the focus; writing an id gives that item the focus, an empty line "
    "removes it",
)  # fmt: skip


def _control(name: str, doc: str, **more: Any) -> Control:
    return Control(name=name, doc=doc, guard=WRITING, **more)


ROWS: Final[tuple[Row, ...]] = (
    Directory(name="", top=True),
    _control("objective", "its objective; an item without one is never done",
             render=_text("objective"), commit=_set_text("objective")),
    _control("plan.md", "its plan and progress",
             render=_text("plan"), commit=_set_text("plan"), depends=("plan",)),
    _control("acceptance.md", "how to tell that it is done",
             render=_text("acceptance"), commit=_set_text("acceptance"), depends=("acceptance",)),
    _control("status", "open active blocked done cancelled; the last two are final",
             default="open", polled=True, single=True, render=_value("status"),
             check=_checked("status"), commit=_set_line("status")),
    _control("blocked_by", "ids of items that come first, one per line; then, read-only, "
             "wait NAME for each armed wait that blocks it",
             volatile=True, render=_blocked_by, check=_checked("blocked_by"),
             commit=_set("blocked_by")),
    _control("parent", "id of a chain that it belongs to, any text", single=True,
             render=_value("parent"), check=_checked("parent"), commit=_set_line("parent")),
    Shown(name="created_at", render=_time("created"), doc="RFC 3339 time"),
    Shown(name="updated_at", render=_time("updated"), depends=("updated",),
        doc="RFC 3339 time of the last change"),
)

PLANE: Final = ItemPlane(
    number=8,
    name="work",
    rows=ROWS,
    cls=Work,
    kind=WorkPlane,
    records=lambda agents: agents.work,
)
