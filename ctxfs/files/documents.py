"""Documents: real files of an agent or session that rows stand for (ctxfs(5), Agents)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ctxfs.tree.handles import FileHandle
from ctxfs.tree.nodes import Call, Handle
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Check, Document, Kept, Lines, Render, Size, Time
from runtime.authority.guard import Guard
from runtime.caller import INSIDERS, PARTIES, Caller, Role
from runtime.errors import DeniedError, MalformedError
from runtime.records.model import Agent
from runtime.texts import names
from runtime.texts.names import quote

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem


def open_real(
    fs: Filesystem,
    node: RowNode,
    call: Call,
    flags: int,
    path: Path,
    changed: Callable[[], None],
) -> FileHandle:
    """The file behind a row, opened in place; made if it is not there yet."""
    caller = call.caller
    wanted = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
    if flags & os.O_TRUNC:
        wanted = os.O_RDWR
    wanted |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, wanted, 0o644)

    def check_alive() -> None:
        if not fs.runtime.agents.identity.still(caller):
            raise DeniedError("the process that opened this file is gone, and its rights with it")

    def may_read() -> None:
        check_alive()
        if not node.may_read(caller):
            raise DeniedError(f"the caller may not read {node.row.name} any more")

    def may_write() -> None:
        check_alive()
        node.check_writer(caller)

    return FileHandle(
        node,
        caller,
        fd,
        limit=fs.runtime.config.document_max,
        append=bool(flags & os.O_APPEND),
        share=fs.runtime.agents.disk.share(node.obj),
        may_read=may_read,
        may_write=may_write,
        changed=changed,
    )


def _size(name: str) -> Size:
    return lambda fs, agent: fs.runtime.agents.documents.size(agent, name)


def _time(name: str) -> Time:
    def mtime(fs: Filesystem, agent: Agent) -> float:
        try:
            return fs.runtime.agents.documents.path(agent, name).stat().st_mtime
        except FileNotFoundError:
            return agent.created

    return mtime


def _render(name: str) -> Render:
    def render(fs: Filesystem, agent: Agent, caller: Caller) -> bytes:
        return fs.runtime.agents.documents.read(agent, name)

    return render


def document(name: str, doc: str, *, guard: Guard, read: Role = INSIDERS) -> Document:
    """A document of an agent's that is written in place."""

    def open_it(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
        agent: Agent = node.obj
        path = fs.runtime.agents.documents.path(agent, name)
        return open_real(
            fs, node, call, flags, path, lambda: fs.agent_changed(agent.index, (name,))
        )

    return Document(
        name=name, doc=doc, read=read, guard=guard, opener=open_it, size=_size(name),
        mtime=_time(name),
    )  # fmt: skip


def lines_document(
    name: str, doc: str, check: Check, *, guard: Guard, read: Role = INSIDERS
) -> Lines:
    """A document of JSON lines, which is staged like a control."""

    def store(fs: Filesystem, agent: Agent, caller: Caller, data: bytes) -> None:
        share = fs.runtime.agents.disk.share(agent)
        share.check(caller, len(data))
        fs.runtime.agents.documents.write(agent, name, data)
        share.note(len(data))

    return Lines(
        name=name, doc=doc, read=read, guard=guard, render=_render(name), check=check,
        store=store, size=_size(name), mtime=_time(name),
    )  # fmt: skip


def kept_document(name: str, doc: str) -> Kept:
    """One that the runtime writes, for the parties."""
    return Kept(
        name=name, doc=doc, read=PARTIES, render=_render(name), size=_size(name),
        mtime=_time(name),
    )  # fmt: skip


def check_input(fs: Filesystem, agent: Agent, caller: Caller, line: str) -> None:
    if line.strip():
        names.parse_json_object(line)


def check_ref(fs: Filesystem, agent: Agent, caller: Caller, line: str) -> None:
    """``{path, hash?, kind?, summary?}`` with relative paths only below ``artifact/``."""
    if not line.strip():
        return
    ref = names.parse_json_object(line)
    for key, value in ref.items():
        if key not in ("path", "hash", "kind", "summary"):
            raise MalformedError(f"unknown key {quote(key)}; use path, hash, kind or summary")
        if not isinstance(value, str):
            raise MalformedError(f"{key} is not a string")
    path = ref.get("path")
    if not path:
        raise MalformedError(f"{quote(line)} has no path")
    if path.startswith("/"):
        names.check_absolute(path)
    elif not path.startswith("artifact/") or any(
        part in ("", ".", "..") for part in path.split("/")
    ):
        raise MalformedError(f"{quote(path)}: a relative path must be below artifact/")
