"""The tools, ``/ctx/tool``, as rows (ctxfs-tools(5), Tools)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ctxfs.tools.registry import BY_NAME, BY_NUMBER, NUMBERS, refusal, visible
from ctxfs.tools.tool import Tool
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Row, Shown
from runtime.texts.names import dump_json

ROWS: Final[tuple[Row[Tool], ...]] = (
    # the two names in /ctx/tool
    Directory(name=".d", top=True, kept=False, public=True),
    Shown(name="", path=lambda tool: f"tool/{tool.name}", kept=False, mode=0o555, public=True,
        render=lambda base, tool, caller: base.client_program),
    Shown(name="description", public=True,
        render=lambda base, tool, caller: f"{tool.described}\n",
        doc="its purpose: when to use it, when another, and an example of its input"),
    Shown(name="schema", public=True,
        render=lambda base, tool, caller: f"{dump_json(tool.schema)}\n",
        doc="its input, as a JSON Schema"),
    Shown(name="output_schema", public=True,
        render=lambda base, tool, caller: f"{dump_json(tool.output_schema)}\n",
        doc="its output, as a JSON Schema"),
    Shown(name="family", public=True,
        render=lambda base, tool, caller: f"{tool.family}\n",
        doc="the family that it belongs to"),
)  # fmt: skip


class _Tools(Layout[Tool]):
    """The tools of the registry, by their places in it, from 1."""

    def find(self, base: Base, index: int, row: Row[Tool]) -> Tool | None:
        return BY_NUMBER.get(index)

    def path(self, base: Base, tool: Tool) -> str:
        return f"tool/{tool.name}.d"


LAYOUT: Final = _Tools(number=10, name="tool", rows=ROWS)


def entries(base: Base, _: Base, call: Call) -> Iterator[str]:
    for tool in visible(base, call.caller):
        yield from (tool.name, f"{tool.name}.d")


def find(base: Base, _: Base, call: Call, name: str) -> Node | None:
    suffix = ".d" if name.endswith(".d") else ""
    tool: Tool | None = BY_NAME.get(name.removesuffix(suffix))
    if tool is None or refusal(base, call.caller, tool):
        return None
    number = LAYOUT.top if suffix else LAYOUT.beside[""]
    return RowNode(base, LAYOUT, NUMBERS[tool.name], tool, number)
