"""The tools, ``/ctx/tool``, as rows (ctxfs-tools(5), Tools)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ctxfs.tools.registry import BY_NAME, BY_NUMBER, NUMBERS, refusal, visible
from ctxfs.tools.tool import Tool
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import node_of
from ctxfs.tree.rows import Directory, Row, Shown
from runtime.texts.names import dump_json


def _told(name: str, doc: str, text: Callable[[Tool], str]) -> Shown[Tool]:
    return Shown(
        name=name, doc=doc, public=True, render=lambda base, tool, caller: f"{text(tool)}\n"
    )


ROWS: Final[tuple[Row[Tool], ...]] = (
    # the two names in /ctx/tool
    Directory(name=".d", top=True, kept=False, public=True),
    Shown(name="", path=lambda tool: f"tool/{tool.name}", kept=False, mode=0o555, public=True,
        render=lambda base, tool, caller: base.client_program),
    _told("description", "its purpose: when to use it, when another, and an example of its input",
        lambda tool: tool.described),
    # some fields are for some callers
    Shown(name="schema", public=True, generated=True, doc="its input, as a JSON Schema",
        render=lambda base, tool, caller: f"{dump_json(tool.schema_for(base, caller))}\n"),
    _told("output_schema", "its output, as a JSON Schema",
        lambda tool: dump_json(tool.output_schema)),
    _told("family", "the family that it belongs to", lambda tool: tool.family),
)  # fmt: skip


#: the tools of the registry, by their places in it, from 1
LAYOUT: Final[Layout[Tool]] = Layout(
    number=10, name="tool", rows=ROWS,
    find=lambda base, index, row: BY_NUMBER.get(index),
    path=lambda base, tool: f"tool/{tool.name}.d",
)  # fmt: skip


def entries(base: Base, _: Base, call: Call) -> Iterator[str]:
    for tool in visible(base, call.caller):
        yield from (tool.name, f"{tool.name}.d")


def find(base: Base, _: Base, call: Call, name: str) -> Node | None:
    suffix = ".d" if name.endswith(".d") else ""
    tool: Tool | None = BY_NAME.get(name.removesuffix(suffix))
    if tool is None or refusal(base, call.caller, tool):
        return None
    number = LAYOUT.top if suffix else LAYOUT.beside[""]
    return node_of(base, LAYOUT, NUMBERS[tool.name], tool, number)
