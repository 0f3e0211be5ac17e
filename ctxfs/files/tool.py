"""The tools, ``/ctx/tool``, as rows (ctxfs(5), Tools)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ctxfs.nodes import Call, Node
from ctxfs.rows import Kind, Plane, Row, RowNode, Table
from ctxfs.tools.registry import BY_NAME, TOOLS, refusal, visible
from ctxfs.tools.tool import Tool
from runtime.names import dump_json

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem

ROWS: Final = (
    # the two names in /ctx/tool
    Row(name=".d", within="tool", kind=Kind.DIRECTORY, mode=0o755, public=True),
    Row(name="", within="tool", mode=0o555, public=True,
        render=lambda fs, tool, caller: fs.client_program),
    Row(name="description", public=True, render=lambda fs, tool, caller: f"{tool.description}\n",
        doc="its purpose"),
    Row(name="schema", public=True, render=lambda fs, tool, caller: f"{dump_json(tool.schema)}\n",
        doc="its input, as a JSON Schema"),
    Row(name="output_schema", public=True,
        render=lambda fs, tool, caller: f"{dump_json(tool.output_schema)}\n",
        doc="its output, as a JSON Schema"),
    Row(name="family", public=True, render=lambda fs, tool, caller: f"{tool.family}\n",
        doc="the family that it belongs to"),
)  # fmt: skip

TABLE: Final = Table(Plane.TOOL, ROWS)


def node_of(fs: Filesystem, index: int, number: int) -> RowNode | None:
    """A row of the tool at a place in the registry, from 1."""
    if not 1 <= index <= len(TOOLS):
        return None
    return RowNode(fs, TABLE, index, TOOLS[index - 1], number)


def entries(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    for tool in visible(fs, call.caller):
        yield from (tool.name, f"{tool.name}.d")


def find(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    suffix = ".d" if name.endswith(".d") else ""
    tool: Tool | None = BY_NAME.get(name.removesuffix(suffix))
    if tool is None or refusal(fs, call.caller, tool):
        return None
    return node_of(fs, TOOLS.index(tool) + 1, TABLE.number(suffix, "tool"))
