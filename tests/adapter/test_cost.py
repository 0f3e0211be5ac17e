"""No single call costs the event loop more than 50 ms of processor time.

Made from the rows: every row is looked up, measured by stat, listed, read, written and
truncated, made and removed in, with the largest contents that it could take or refuse, in a
scene whose quotas are used up. Every tool is called, too. A new row or tool without a case fails.
Processor time, not real time, and the best of a few tries: a busy machine changes little.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyfuse3
import pytest
import trio

from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files import tool as tool_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.rows import NEW, Kind, Row, Table
from ctxfs.tools import registry
from ctxfs.tools.tool import Tool
from runtime.authority.identity import Caller, Role
from runtime.change import Change
from runtime.errors import CtxError
from runtime.lifecycle import Status
from runtime.loop import LoopMeter
from runtime.model import Agent
from runtime.planes import Message, Task, Wait, WaitStatus, Work
from tests.adapter.mounted import CONTEXT, USER, Mounted, mounted_in
from tests.unit.fakes import ROOT, inside

SECONDS: Final = 0.050
TRIES: Final = 6
CHUNK: Final = 1 << 20
TABLES: Final = (
    root_files.TABLE,
    root_files.HOME_TABLE,
    root_files.HISTORY_TABLE,
    agent_files.TABLE,
    agent_files.CHILD_TABLE,
    session_files.TABLE,
    session_files.CHANNEL_TABLE,
    task_files.TABLE,
    work_files.TABLE,
    waiting_files.TABLE,
    tool_files.TABLE,
)
PERMS: Final = "create,start,stop,read,write,detach"
REF: Final = '{"path":"/%x"}\n'
MESSAGE: Final = '{"role":"user","content":""}\n'


class Scene:
    """An agent ``x`` with as much below it as it may have, and one ``deep`` below others."""

    def __init__(self, mounted: Mounted, *, scale: int) -> None:
        self.mounted = mounted
        agents = mounted.agents
        self.x = mounted.world.live(mounted.make("x", USER))
        world = mounted.world
        world.agents.update(self.x, mode="turn")
        self._chain()
        self._items(min(1024, scale))
        self.children = [
            agents.create(inside(self.x), f"k{n}") for n in range(min(1023, scale // 2))
        ]
        for child in self.children[-200:]:
            document = agents.document(child, "result.md")
            document.write_bytes(b"result\n")
            os.truncate(document, 16 << 20)
            agents.write_document(child, "refs.jsonl", (REF * 100 % tuple(range(100))).encode())
        for name in ("result.md", "handoff.md"):
            agents.document(self.x, name).write_bytes(b"0123456789abcde\n" * (1 << 20))
        refs = "".join(REF % n for n in range(200_000))
        for name in ("refs.jsonl", "input.jsonl"):
            agents.write_document(self.x, name, refs.encode())
        for n in range(10 * scale):
            (agents.document(self.x, "artifact") / f"file{n}").touch()
        session = agents.session(self.x.session)
        assert session is not None
        self.session = f"home/1000/agent/x/session/{session.name}"
        directory = agents.session_directory(session)
        (directory / "context" / "memory.md").write_bytes(b"a note\n" * (1 << 20))
        for name, letter in (("messages.jsonl", "m"), ("events.jsonl", "e")):
            with open(directory / name, "ab") as file:
                file.truncate(300 << 20)
                file.seek(0, os.SEEK_END)
                file.write(b'\n{"id":"%s70000"}\n' % letter.encode())

    def _chain(self) -> None:
        """A child in a child, eight deep, each with 256 lines of which few are the others'."""
        above: Agent | None = None
        for depth in range(8):
            caller = inside(above) if above is not None else USER
            name = f"d{depth}"
            above = self.mounted.world.live(self.mounted.agents.create(caller, name))
            lines = [f"allow {above.label} agent:d* create\n"] + [
                f"allow {above.label} agent:p{n}* {PERMS}\n" for n in range(8) if n != depth
            ]
            lines += [
                f"allow {above.label} agent:p{depth}{'x' * 90}{n} {PERMS}\n"
                for n in range(256 - len(lines))
            ]
            self.mounted.agents.update(above, policy="".join(lines))
        assert above is not None
        self.deep = above
        text = "".join(f"allow x_t agent:{'q' * 90}{n}* {PERMS}\n" for n in range(250))
        text += "allow x_t agent:k* create\nallow x_t tool:* execute\n"
        self.mounted.agents.update(self.x, policy=text)

    def _items(self, count: int) -> None:
        change = Change()
        index = self.x.index
        for n in range(count):
            change.make(
                Message(agent=index, name=f"m{n}", session=self.x.session, sender="operator uid:1",
                        provenance="operator", text="a text of a message " * 200)
            )
            change.make(Task(agent=index, name=f"T{n}", wait_token=f"{n:032x}"))
            blocked = tuple(f"W{m}" for m in range(1, count)) if n == 0 else ()
            change.make(
                Work(agent=index, name=f"W{n}", objective="o", plan="- a step\n" * 400,
                     blocked_by=blocked)
            )
            change.make(
                Wait(agent=index, name=f"A{n}", status=WaitStatus.ARMED, on="trigger", work="W0")
            )
        change.make(Wait(agent=index, name="new"))
        self.mounted.agents.commit(change)
        self.token = next(w.token for w in self.mounted.agents.items.of(index, Wait))

    # where a row is

    def paths(self, table: Table, row: Row) -> Iterator[str]:
        """The places that a row is shown at, with what makes it cost most."""
        name = row.name
        if table is root_files.TABLE:
            yield "" if name == "/" else f"{row.within}/{name}".lstrip("/")
        elif table is root_files.HOME_TABLE:
            yield f"home/1000/{name}"
        elif table is root_files.HISTORY_TABLE:
            yield f"home/1000/agent/x/{name}"
        elif table is agent_files.TABLE:
            for agent in ("x", "d7"):
                if row.within == "agent":
                    yield f"agent/{agent}{name}"
                elif row.within == "self":
                    yield "self"
                else:
                    yield f"agent/{agent}.d/{row.within}/{name}"
        elif table is agent_files.CHILD_TABLE:
            yield "agent/x.d/child/k0"
        elif table is session_files.TABLE:
            yield f"{self.session}/{row.within if row.within == 'context' else ''}/{name}"
        elif table is session_files.CHANNEL_TABLE:
            yield f"{self.session}/context/child/k0/{name}"
        elif table is tool_files.TABLE:
            yield f"tool/AgentGet{name}" if row.within else f"tool/AgentGet.d/{name}"
        elif row.within == "trigger":
            yield f"trigger/{self.token}"
        else:
            plane = {task_files.TABLE: "task/T", work_files.TABLE: "work/W",
                     waiting_files.TABLE: "waiting/A"}[table]  # fmt: skip
            yield f"agent/x.d/{plane}0/{name}"
            if table is waiting_files.TABLE:
                yield f"agent/x.d/waiting/new/{name}"


def contents(row: Row, scene: Scene) -> Iterator[bytes]:
    """What is written to a row: the largest that it takes, and what is worst to refuse."""
    most = (64 << 10) - 1
    lines = LINES.get(row.name, ())
    for line in lines:
        size = 2 * CHUNK if row.document else most
        if row.name in ("messages.jsonl", "inbox", "input"):
            size = CHUNK
        yield b"".join(_until(size, line)) if "%" in line else _repeated(line, size)
    for unit in (b"\n", b"x\n", b"x", b" ", b"[", b"\xc3\xa4"):
        yield unit * (most // len(unit))
    yield b"".join(_until(most, "%x\n"))
    yield b"".join(_until(most, "# %x\n"))
    if row.document or row.name in ("messages.jsonl", "inbox"):
        yield b"x" * CHUNK
        yield b"[" * CHUNK
        yield b"\n" * CHUNK
        yield b"{}\n" * (CHUNK // 3)


def _until(size: int, form: str) -> Iterator[bytes]:
    for number in itertools.count():
        line = (form % number).encode()
        size -= len(line)
        if size < 0:
            return
        yield line


def _repeated(text: str, size: int) -> bytes:
    data = text.encode()
    return data * (size // len(data)) if len(data) < size else data


#: of a row: the shortest lines of which it takes many; "%x" makes each another one
LINES: Final[dict[str, tuple[str, ...]]] = {
    "policy": ("allow x_t agent:%x create\n", f"allow x_t agent:a {PERMS}\n",
               "allow d7_t agent:p0%x " + PERMS + "\n"),
    "mount": ("/srv/a /m/%x ro\n",),
    "env": ("A%x=\n",),
    "path": ("/%x\n",),
    "groups": ("%d\n",),
    "limits": ("timeout=%ds\n", "grace=5s\n"),
    "meta.json": ("{" + ",".join(f'"{n:x}":1' for n in range(7000)) + "}",
                  "[" * 60_000, '{"a":"' + '\\"' * 30_000 + '"}'),
    "ctl": ("pause\nresume\n", "start\n", "nonsense %x\n"),
    "input.jsonl": (REF, "{}\n"),
    "refs.jsonl": (REF, '{"path":"artifact/%x","summary":"s"}\n'),
    "handoff.md": ("a line %x\n",),
    "result.md": ("a line %x\n",),
    "memory.md": ("a line %x\n",),
    "inbox": ("a message %x\n",),
    "input": ("some %x\n",),
    "messages.jsonl": (MESSAGE, '{"role":"user","content":{"a":[1,2,%d]}}\n'),
    "objective": ("an aim %x\n",),
    "plan.md": ("- [ ] a step %x\n",),
    "acceptance.md": ("it works %x\n",),
    "blocked_by": ("W%d\n",),
    "cmd": ("true %x\n",),
    "TOKEN": ("fired %x\n",),
}  # fmt: skip


class Costs:
    """The calls of the kernel, measured; remembers what was too much."""

    def __init__(self, scene: Scene, meter: LoopMeter) -> None:
        self.scene = scene
        self.meter = meter
        self.mounted = scene.mounted
        self.ops = scene.mounted.ops
        self.worst: dict[str, float] = {}

    async def call(self, what: str, operation: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Its result, None if it was refused."""
        await trio.lowlevel.checkpoint()
        self.meter.longest = self.meter._step = 0.0
        result = None
        with contextlib.suppress(pyfuse3.FUSEError, CtxError):
            result = await operation(*args)
        await trio.lowlevel.checkpoint()
        self.worst[what] = max(self.worst.get(what, 0.0), self.meter.longest)
        return result

    async def inode(self, path: str) -> int | None:
        inode: int | None = 1
        for part in filter(None, path.split("/")):
            name = part.encode()
            entry = await self.call(f"lookup {path}", self.ops.lookup, inode, name, CONTEXT)
            if entry is None:
                return None
            inode = entry.st_ino
        return inode

    async def opened(self, path: str, inode: int, flags: int) -> int | None:
        info = await self.call(f"open {path}", self.ops.open, inode, flags, CONTEXT)
        return None if info is None else int(info.fh)

    async def closed(self, path: str, fh: int) -> None:
        await self.call(f"close {path}", self.ops.flush, fh)
        await self.call(f"release {path}", self.ops.release, fh)

    async def read(self, path: str, inode: int) -> None:
        fh = await self.opened(path, inode, os.O_RDONLY)
        if fh is None:
            return
        offset = 0
        for _ in range(3):
            data = await self.call(f"read {path}", self.ops.read, fh, offset, CHUNK)
            offset += len(data or b"")
        await self.call(f"read {path}", self.ops.read, fh, 10 << 20, CHUNK)
        await self.closed(path, fh)

    async def write(self, path: str, inode: int, data: bytes, flags: int) -> None:
        fh = await self.opened(path, inode, os.O_WRONLY | flags)
        if fh is None:
            return
        offset = 0
        for _ in range(4):
            part = data[offset : offset + CHUNK]
            if not part:
                break
            taken = await self.call(f"write {path}", self.ops.write, fh, offset, part)
            if taken is None:
                break
            offset += taken
        await self.closed(path, fh)

    async def list(self, path: str, inode: int) -> None:
        fh = await self.call(f"opendir {path}", self.ops.opendir, inode, CONTEXT)
        if fh is None:
            return
        await self.call(f"readdir {path}", self.ops.readdir, fh, 0, Page())
        await self.call(f"readdir {path}", self.ops.readdir, fh, 100, Page())
        await self.call(f"releasedir {path}", self.ops.releasedir, fh)


class Page:
    """Stands for the room of one answer to readdir: 64 KiB have it for so many names."""

    def __init__(self) -> None:
        self.left = 300


def reply(token: Page, name: bytes, entry: object, position: int) -> bool:
    token.left -= 1
    return token.left >= 0


def callers(row: Row, scene: Scene, path: str) -> Iterator[Caller]:
    yield inside(scene.deep if "/d7" in path else scene.x)
    yield ROOT if row.write & Role.ROOT else USER


async def act(costs: Costs, scene: Scene, table: Table, row: Row) -> None:
    for path in scene.paths(table, row):
        for caller in callers(row, scene, path):
            with scene.mounted.as_(caller):
                inode = await costs.inode(path)
                if inode is None:
                    continue
                await costs.call(f"getattr {path}", scene.mounted.ops.getattr, inode, CONTEXT)
                if row.kind is Kind.LINK:
                    await costs.call(f"readlink {path}", scene.mounted.ops.readlink, inode, CONTEXT)
                elif row.kind is Kind.DIRECTORY:
                    await costs.list(path, inode)
                    ops = scene.mounted.ops
                    for name in (b"new.d", b"new", b"k0.d", b"k0", b"T1", b"W1", b"A1"):
                        await costs.call(f"mkdir {path}", ops.mkdir, inode, name, 0o755, CONTEXT)
                        await costs.call(f"rmdir {path}", ops.rmdir, inode, name, CONTEXT)
                elif row.kind is Kind.FILE:
                    await costs.read(path, inode)
                    if row.write:
                        for data in contents(row, scene):
                            await costs.write(path, inode, data, os.O_TRUNC)
                        for data in itertools.islice(contents(row, scene), 1):
                            await costs.write(path, inode, data, os.O_APPEND)
                            await costs.write(path, inode, data[:100], 0)


#: in this status everything that can be is written; in the other, what is written while new
STATUSES: Final = (Status.BUSY, Status.NEW)


async def measure_rows(scene: Scene, status: Status, meter: LoopMeter) -> dict[str, float]:
    """The longest step of each call, in seconds."""
    costs = Costs(scene, meter)
    for table in TABLES:
        for row in table.rows:
            if status is Status.BUSY or row.when is NEW:
                await act(costs, scene, table, row)
    return costs.worst


#: of a field in the input of a tool: what there is in the scene
GIVEN: Final[dict[str, Any]] = {
    "agent_id": "k0", "name": "fresh", "text": "x" * 1_000_000, "work_id": "W0", "task_id": "T0",
    "wait_id": "A0", "wake": "timer", "resource": "1h", "priority": "normal", "kill": False,
}  # fmt: skip


def inputs(tool: Tool) -> Iterator[Any]:
    """What is taken, as large as a frame lets it be, and what is worst to refuse."""
    fields = tool.schema.get("properties", {})
    wanted = {name: GIVEN.get(name, "x") for name in tool.schema.get("required", ())}
    yield {}
    yield wanted
    yield {name: value for name, value in GIVEN.items() if name in fields}
    for name in fields:
        for value in ("x" * 1_000_000, ["x"] * 30_000, "\ud7ff" * 300_000, -1, None):
            yield {**wanted, name: value}
    yield {**wanted, **{f"unknown{n}": n for n in range(30_000)}}
    yield [[]] * 30_000


async def measure_tools(scene: Scene, meter: LoopMeter) -> dict[str, float]:
    costs = Costs(scene, meter)
    fs = scene.mounted.fs
    for tool in registry.TOOLS:
        for caller in (inside(scene.x), USER):
            await costs.call(f"tool {tool.name}", registry.call, fs, caller, tool.name, {})
            costs.worst.pop(f"tool {tool.name}")  # the first call of all loads what checks them
            for given in inputs(tool):
                with trio.move_on_after(1):
                    await costs.call(
                        f"tool {tool.name}", registry.call, fs, caller, tool.name, given
                    )
    return costs.worst


def measure(path: Path, scale: int) -> dict[str, float]:
    """The same of all rows, in each status in a scene of its own."""
    worst: dict[str, float] = {}
    for status in STATUSES:
        with mounted_in(path / status.value, agents=20_000) as mounted:
            scene = Scene(mounted, scale=scale)
            mounted.agents.update(scene.x, status=status)
            meter = LoopMeter()
            gc.collect()
            gc.disable()  # what it takes is the whole heap's, of all tests before this one
            try:
                worst |= trio.run(measure_rows, scene, status, meter, instruments=[meter])
                if status is Status.BUSY:
                    worst |= trio.run(measure_tools, scene, meter, instruments=[meter])
            finally:
                gc.enable()
    return worst


def find_expensive(path: Path, scale: int) -> dict[str, float]:
    """What is too much in each of a few tries."""
    too_much: dict[str, float] | None = None
    for number in range(TRIES):
        (path / str(number)).mkdir()
        found = {w: t for w, t in measure(path / str(number), scale).items() if t > SECONDS}
        too_much = (
            found
            if too_much is None
            else {w: min(t, found[w]) for w, t in too_much.items() if w in found}
        )
        if not too_much:
            break
    return too_much or {}


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)


def test_every_row_that_takes_more_than_one_value_has_a_case() -> None:
    for table in TABLES:
        for row in table.rows:
            if row.kind is Kind.FILE and row.write and not row.single:
                assert row.name in LINES, f"{row.name}: say in LINES what is written to it"


def test_no_call_of_any_row_costs_more_than_fifty_milliseconds(tmp_path: Path) -> None:
    assert find_expensive(tmp_path, scale=100) == {}


@pytest.mark.long
def test_at_full_quotas_no_call_of_any_row_costs_more(tmp_path: Path) -> None:
    assert find_expensive(tmp_path, scale=1024) == {}
