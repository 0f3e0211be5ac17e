"""The command hook: what a coding CLI asks by its hooks, as asks of the agent that it runs in."""

from __future__ import annotations

from client.control import Terminated, terminate
from client.declaring import Arguments, command, operand
from client.exits import Failure
from client.files import read_stdin
from client.jsonrpc import object_in, text_in
from client.loop import Loop, parse_object
from client.output import STDOUT, complain
from client.permits import Asked, End, asks_for, decided, detail_of, fields_of, remove, use_of
from client.root import Root, agent, own_agent, own_name
from client.types import Any

#: names of the asks that hooks make begin so
STEM = "claude"
#: events after which what was asked is decided, in the dialogue or by the end of the turn
USED = ("PostToolUse", "PostToolUseFailure")
OVER = ("Stop", "StopFailure", "SessionEnd")
PERMISSION, ELICITATION = "PermissionRequest", "Elicitation"


def withdraw_asked(root: Root, about: str | None) -> None:
    """Withdraw what hooks ask for this input of a tool, or for any."""
    plane = agent(own_name(root), "ask")
    for name in root.listed(plane):
        owner = f"{plane}/{name}"
        if not name.startswith(f"{STEM}-") or root.value(f"{owner}/status") != "open":
            continue
        if about is None or root.value(f"{owner}/detail") == about:
            remove(root, owner)


def ask(root: Root, event: dict[str, Any], kind: str) -> dict[str, Any]:
    """Ask what an event asks, and return the decision; `Failure`."""
    tool, given = text_in(event, "tool_name"), object_in(event, "tool_input")
    if kind == PERMISSION:
        files = asks_for(tool, given)
    else:
        server, said = text_in(event, "mcp_server_name"), text_in(event, "message")
        form = object_in(event, "requested_schema")
        files = fields_of(f"{server}: {said}", detail_of(form), form=form)
    ends: list[End] = []
    loop = Loop()
    asked = Asked(loop, root, STEM, files, ends.append)
    try:
        while not ends:
            loop.step()
    finally:
        asked.withdraw()
    end = ends[0]
    if kind == PERMISSION:
        decision: dict[str, Any] = {"decision": decided(tool, given, end)}
    elif end.answer:
        decision = {"action": "accept", "content": parse_object(end.text.encode()) or {}}
    else:
        decision = {"action": "cancel"}
    return {"hookSpecificOutput": {"hookEventName": kind, **decision}}


@command("hook", operand("program", "CLI", "whose hooks these are", choices=("claude",)))
def do_hook(root: Root, args: Arguments) -> None:
    """Ask people what a coding CLI asks by a hook.

    Runs inside an agent, as a command of the hooks PermissionRequest, Elicitation, PostToolUse,
    Stop and SessionEnd: reads the event from standard input, and prints the decision. What was
    answered in the CLI's own dialogue is withdrawn. Says nothing if it cannot ask: the CLI then
    does what it does without it.
    """
    import signal

    from client.jsontext import dumps

    event = parse_object(read_stdin().strip())
    if event is None:
        complain("this event is no object of JSON: nothing is asked")
        return
    if not own_agent(root):
        complain("you are not in an agent: nobody is asked")
        return
    kind = text_in(event, "hook_event_name")
    signal.signal(signal.SIGTERM, terminate)
    try:
        if kind in (PERMISSION, ELICITATION):
            STDOUT.lines([dumps(ask(root, event, kind))])
        elif kind in USED:
            tool, given = text_in(event, "tool_name"), object_in(event, "tool_input")
            withdraw_asked(root, use_of(tool, given))
        elif kind in OVER:
            withdraw_asked(root, None)
    except Failure as failure:
        complain(f"nobody is asked: {failure}")
    except Terminated:
        return
