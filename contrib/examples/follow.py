"""Follows a pull request for days: a private child of mode turn, see contrib/webhook.

Its task is the number. Its wait `events` has a token, to which contrib/webhook writes what happens;
its wait `daily` wakes it each day. Between messages nothing of it runs, and what it must remember
is in its result and its work item: a reboot leaves both, and waits and messages, too.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tools import Refused, call


def do(name: str, /, *done: str, **given: Any) -> None:
    """Calls a tool; `done` are the errors that tell that an earlier call was carried out."""
    try:
        call(name, **given)
    except Refused as refused:
        if refused.code not in done:
            raise


def begin(number: str) -> None:
    objective = f"follow pull request {number}"
    do("WorkCreate", "EEXIST", id="pr", objective=objective)
    do("WaitFor", "EEXIST", id="events", wake="externals")
    do("WaitFor", "EEXIST", id="daily", wake="timer", resource="every 1d")
    name = os.environ["CTX_AGENT"]
    call("Report", text=f"{objective}: see {name}.d/waiting/events/token", id=f"{name}-begun")


def note(line: str) -> None:
    """Adds to the result, once for each message."""
    result = Path(os.environ["CTX_SELF"]) / "result.md"
    before = result.read_text()
    if f"{os.environ['CTX_MESSAGE']} " not in before:
        call("ResultWrite", text=f"{before}{os.environ['CTX_MESSAGE']} {line}\n")


def hear(notice: dict[str, Any]) -> None:
    if notice["wait"] == "daily":
        note(f"open at {notice['payload']['due']}")
        return
    event = dict(line.split("=", 1) for line in notice["payload"].splitlines() if "=" in line)
    note(f"{event.get('action')} by {event.get('sender')}")
    if event.get("action") == "closed":
        do("WorkUpdate", "EBUSY", id="pr", status="done")
        do("AgentStop", "EBUSY", agent_id=os.environ["CTX_AGENT"])


text = sys.stdin.read()
if os.environ["CTX_PROVENANCE"] == "wait":
    hear(json.loads(text))
else:
    begin(text.strip())
