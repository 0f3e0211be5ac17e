"""The commands for tools: list, show, and call with JSON."""

from __future__ import annotations

import os

from client.declaring import LISTING, Arguments, command, operand
from client.exits import DENIED, NOT_RUNNING, USAGE, Misuse
from client.files import read_stdin
from client.loop import encode
from client.output import STDOUT, gist, headed, show_rows
from client.planes import describe
from client.root import Root, tool
from client.sockets import answer, connect_own
from client.types import Any, Sequence

TOOL_CODES = {
    "EINVAL": USAGE,
    **dict.fromkeys(("EACCES", "EPERM"), DENIED),
    "EOPNOTSUPP": NOT_RUNNING,
}

TOOL = operand("name", "TOOL", "the tool")


def tool_input(words: Sequence[str]) -> dict[str, Any]:
    """Return the input of a tool: the argument; standard input without one, or for `-`, which may
    be empty."""
    import json

    asked = list(words) == ["-"] or not (words or os.isatty(0))
    data = read_stdin() if asked else os.fsencode("".join(words))
    try:
        value = json.loads(data.decode() if data.strip() else "{}")
    except (ValueError, RecursionError) as error:
        raise Misuse(f"the input is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Misuse(f"the input is not a JSON object: {gist(json.dumps(value))}")
    return value


def call_tool(root: Root, name: str, words: Sequence[str]) -> None:
    """Call a tool and print its output as one line; its errors become exit statuses."""
    value = tool_input(words)
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
    call_tool(root, name, words)


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


@command("tool call", TOOL, operand("input", "[JSON]", "an object; default, and -: standard input"))
def do_tool_call(root: Root, args: Arguments) -> None:
    """Call a tool.

    Prints the output as one line. Exits 1 on errors, 2 on invalid input, 13 if denied, 69 if
    there is no such tool.
    """
    call_tool(root, args.name, [] if args.input is None else [args.input])
