"""The commands for tools: list, show, and call with JSON."""

from __future__ import annotations

import os

from client.declaring import LISTING, Arguments, command, operand
from client.exits import DENIED, NOT_RUNNING, USAGE, Misuse
from client.files import is_unread, json_object, read_stdin
from client.loop import encode
from client.output import STDOUT, complain, headed, show_rows
from client.planes import describe
from client.root import Root, tool
from client.sockets import answer, connect_own
from client.types import Sequence

TOOL_CODES = {
    "EINVAL": USAGE,
    **dict.fromkeys(("EACCES", "EPERM"), DENIED),
    "EOPNOTSUPP": NOT_RUNNING,
}

TOOL = operand("name", "TOOL", "the tool")


def call_tool(root: Root, name: str, text: str) -> None:
    """Call a tool with a text of JSON, or that of standard input for `-`, and print its output as
    one line; its errors become exit statuses."""
    data = read_stdin() if text == "-" else os.fsencode(text)
    value = json_object(data, "the input") if data.strip() else {}
    absent = {} if root.present(f"tool/{name}") else {"ENOENT": NOT_RUNNING}
    lost = f"{name}: the connection ended before the answer"
    # without an id: nobody asks again for the answer, so ctxd need not keep it
    frame = answer(
        connect_own(root), {**TOOL_CODES, **absent}, lost, op="tool", name=name, input=value
    )
    STDOUT.copy(encode(frame.get("output")))


def describe_tool(root: Root, name: str) -> str:
    """Return the description and the schemas of a tool."""
    import contextlib
    import json

    parts = [root.read(tool(name, "description")).decode("utf-8", "backslashreplace").rstrip()]
    for title, file in (("input", "schema"), ("output", "output_schema")):
        schema = root.value(tool(name, file))
        with contextlib.suppress(ValueError, RecursionError):  # else show it unchanged
            schema = json.dumps(json.loads(schema), indent=2, ensure_ascii=False)
        parts += [f"{title}:\n{schema}"] if schema else []
    return "\n\n".join(parts) + "\n"


def run_tool_handle(root: Root, name: str, words: Sequence[str]) -> None:
    """Act as the handle of a tool."""
    if list(words) in (["-h"], ["--help"]):
        usage = f"usage: {root.path}/tool/{name} [JSON]\n\nDefault, and -: standard input.\n\n"
        STDOUT.copy((usage + describe_tool(root, name)).encode("utf-8", "backslashreplace"))
        return
    words = words[1:] if words[:1] == ["--"] else words
    if len(words) > 1:
        raise Misuse(f"{name} takes one argument: a JSON object, quoted")
    call_tool(root, name, words[0] if words else "" if os.isatty(0) else "-")


@command("tool list", *LISTING)
def do_tool_list(root: Root, args: Arguments) -> None:
    """List the tools that you may call."""
    files = ("family", "description")
    rows = [describe(root, tool(name), files) for name in root.names("tool")]
    show_rows(rows, {"TOOL": "name", **headed(*files)}, raw=args.json)


@command("tool show", TOOL)
def do_tool_show(root: Root, args: Arguments) -> None:
    """Show what a tool does, and its schemas."""
    STDOUT.copy(describe_tool(root, args.name).encode("utf-8", "backslashreplace"))


@command("tool call", TOOL, operand("input", "[JSON]", "an object, default {}; -: standard input"))
def do_tool_call(root: Root, args: Arguments) -> None:
    """Call a tool.

    Prints the output as one line. Exits 1 on errors, 2 on invalid input, 13 if denied, 69 if
    there is no such tool.
    """
    if args.input is None and is_unread():  # until 0.2, it was read
        complain("standard input is not read: for the input of the tool, say -")
    call_tool(root, args.name, args.input or "")
