"""The waiting plane, ``agent/NAME.d/waiting``, and ``trigger``, as rows (ctxfs(5), Waits)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxfs.rows import ITEM, ItemPlane, Kind, Plane, Render, Row, RowNode, Table, one_line
from runtime.caller import PARTIES, Caller, Role
from runtime.errors import MissingError
from runtime.items import Wait, WaitStatus
from runtime.lifecycle import LIVE

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem


def _value(field: str) -> Render:
    def render(fs: Filesystem, wait: Wait, caller: Caller) -> str:
        value = str(getattr(wait, field))
        return f"{value}\n" if value else ""

    return render


def _check_on(fs: Filesystem, wait: Wait, caller: Caller, line: str) -> None:
    fs.runtime.agents.waiting.check_arm(caller, fs.agent_with(wait), wait, line)


def _arm(fs: Filesystem, wait: Wait, caller: Caller, text: str) -> None:
    fs.runtime.agents.waiting.arm(caller, fs.agent_with(wait), wait, one_line(text))


def _unarmed(fs: Filesystem, wait: Wait) -> None:
    fs.runtime.agents.waiting.check_unarmed(wait)


def _pending(field: str, doc: str) -> Row:
    """What may be said as long as the wait is not over."""

    def check(fs: Filesystem, wait: Wait, caller: Caller, line: str) -> None:
        fs.runtime.agents.waiting.check(fs.agent_with(wait), wait, field, line)

    def commit(fs: Filesystem, wait: Wait, caller: Caller, text: str) -> None:
        fs.runtime.agents.waiting.set(fs.agent_with(wait), wait, field, one_line(text))

    def writable(fs: Filesystem, wait: Wait) -> None:
        fs.runtime.agents.waiting.check_pending(wait)

    return Row(
        name=field, doc=doc, mode=0o644, write=PARTIES, when=LIVE, single=True,
        render=_value(field), check=check, commit=commit, writable=writable,
    )  # fmt: skip


def _token(fs: Filesystem, wait: Wait, caller: Caller) -> str:
    return f"{wait.token}\n" if wait.on == "trigger" else ""


def _nothing(fs: Filesystem, wait: Wait, caller: Caller) -> str:
    return ""


def _unused(fs: Filesystem, wait: Wait) -> None:
    if not fs.runtime.agents.waiting.is_trigger(wait):
        raise MissingError("this token is no longer valid: it was used, or the wait is over")


def _trigger(fs: Filesystem, wait: Wait, caller: Caller, text: str) -> None:
    fs.runtime.agents.waiting.trigger(wait, text)


ROWS: Final = (
    Row(name="", within=ITEM, kind=Kind.DIRECTORY, mode=0o755),
    Row(name="on", mode=0o644, write=PARTIES, when=LIVE, writable=_unarmed, single=True,
        render=_value("on"), check=_check_on, commit=_arm,
        doc="what it waits for: timer DURATION, timer TIME, task NAME, child NAME, message or "
        "trigger. Writing it arms the wait, once"),
    _pending("work", "id of the work item that it blocks"),
    _pending("deadline", "duration, from when it is armed or from the writing of this if that is "
             "later, or time after which it expires"),
    Row(name="status", default="new", polled=True, render=_value("status"),
        doc=" ".join(WaitStatus)),
    Row(name="payload", render=lambda fs, wait, caller: wait.payload,
        doc="what fired it: a JSON object, or the text that was written to its token"),
    # who may only look must not be able to send it anything
    Row(name="token", read=PARTIES, render=_token, depends=("on",),
        doc="for a trigger: the name of the file in trigger/ that fires it"),
    # joined to nothing, and nothing can be read: each flush is a whole of its own
    Row(name="TOKEN", within="trigger", mode=0o222, read=Role.NONE, write=Role.ANYONE,
        writable=_unused, merges=True, volatile=True, render=_nothing, commit=_trigger,
        doc="what is written to it fires the wait, once; then it is gone"),
)

TABLE: Final = Table(Plane.WAITING, ROWS)
PLANE: Final = ItemPlane(
    name="waiting", cls=Wait, table=TABLE, records=lambda agents: agents.waiting
)


def token_node(fs: Filesystem, wait: Wait) -> RowNode:
    return RowNode(fs, TABLE, wait.index, wait, TABLE.number("TOKEN", "trigger"))
