#!/usr/bin/env python3
"""An agent of the Agent Client Protocol that does what its prompts say, for cells: it needs
nothing but Python. The words of a prompt are separated by "; ":

    say TEXT          a piece of the answer
    call KIND TITLE   a tool call, as it begins and ends
    ask KIND          whether a tool call of this kind is permitted; says which option was taken
    form FIELD        asks for a form with a field; says the answer
    mode              says the mode of the session
    hold              until the turn is cancelled
    sleep             for good, whatever is said
    stop REASON       the turn ends so
    fail TEXT         the prompt is answered with an error
    other TEXT        says and asks in a session that was never opened; says which option was taken
    file              asks for what was not offered; says the error
    tell              says what of session/new, and of turns before, it knows
    echo LINE         writes a line that is not of the protocol
    exit CODE         ends

Other words are ignored: the end of a task is a prompt, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

#: what it can do, by its first argument
CAPABILITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "load": {"loadSession": True},
    "late": {"loadSession": True},  # replays when it has answered
    "resume": {"loadSession": True, "sessionCapabilities": {"resume": {}}},
    "http": {"mcpCapabilities": {"http": True}},
}
KEPT = Path(os.environ.get("HOME", "/tmp")) / "sessions.json"


class Agent:
    """One connection."""

    def __init__(self, can: str) -> None:
        self.can = can
        self.asked = 0
        self.cancelled = False
        #: prompts by session; and the params of the one that was opened
        self.turns: dict[str, list[str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        self.opened: dict[str, Any] = {}
        self.mode = ""

    def say(self, **frame: Any) -> None:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **frame}) + "\n")
        sys.stdout.flush()

    def update(self, kind: str, /, **fields: Any) -> None:
        update = {"sessionUpdate": kind, **fields}
        params = {"sessionId": self.opened["sessionId"], "update": update}
        self.say(method="session/update", params=params)

    def text(self, text: str, kind: str = "agent_message_chunk") -> None:
        self.update(kind, content={"type": "text", "text": text})

    def frames(self) -> Any:
        for line in sys.stdin:
            yield json.loads(line)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a request; what comes before it is a cancel."""
        self.asked += 1
        ident = f"q{self.asked}"
        self.say(id=ident, method=method, params=params)
        for frame in self.frames():
            if frame.get("id") == ident:
                return frame  # type: ignore[no-any-return]
            assert frame["method"] == "session/cancel", frame
            self.cancelled = True
        sys.exit(0)

    def open(self, frame: dict[str, Any]) -> None:
        params = dict(frame["params"])
        if frame["method"] == "session/new":
            params["sessionId"] = f"s{len(self.turns) + 1}"
            self.turns[params["sessionId"]] = []
        elif params["sessionId"] not in self.turns:
            error = {"code": -32002, "message": "no such session", "data": {"details": "it went"}}
            self.say(id=frame["id"], error=error)
            return
        self.opened = {"how": frame["method"], **params}
        result = {"sessionId": params["sessionId"]} if frame["method"] == "session/new" else {}
        if self.can == "late":
            self.say(id=frame["id"], result=result)
        if frame["method"] == "session/load":
            for prompt in self.turns[params["sessionId"]]:
                self.text(prompt, "user_message_chunk")
                self.text(f"replay of {prompt}")
        if self.can != "late":
            self.say(id=frame["id"], result=result)

    def prompt(self, frame: dict[str, Any]) -> None:
        self.cancelled = False
        texts = [block["text"] for block in frame["params"]["prompt"]]
        known = self.turns[frame["params"]["sessionId"]]
        stop = "end_turn"
        for word in texts[-1].split("; "):
            verb, _, rest = word.partition(" ")
            if verb == "stop":
                stop = rest
            elif verb == "fail":
                self.say(id=frame["id"], error={"code": -32603, "message": rest})
                return
            elif verb == "tell":
                self.text(json.dumps({**self.opened, "before": known, "texts": texts}))
            elif hasattr(self, f"do_{verb}"):
                getattr(self, f"do_{verb}")(rest)
        known.append(texts[-1])
        KEPT.write_text(json.dumps(self.turns))
        stop = "cancelled" if self.cancelled else stop
        self.say(id=frame["id"], result={"stopReason": stop})

    def do_say(self, text: str) -> None:
        self.text(text)

    def do_call(self, rest: str) -> None:
        kind, _, title = rest.partition(" ")
        about = {"toolCallId": f"c{self.asked}"}
        self.update("tool_call", **about, title=title, kind=kind, status="pending")
        self.update("tool_call_update", **about, status="in_progress")
        self.update("tool_call_update", **about, status="completed", rawOutput={"x": 1})

    def do_ask(self, kind: str) -> None:
        options = [
            {"optionId": f"id-{option}", "name": option, "kind": option}
            for option in ("reject_always", "reject_once", "allow_always", "allow_once")
        ]
        call = {"toolCallId": "p1", "kind": kind, "title": f"to {kind}"}
        frame = self.ask("session/request_permission", sessionId=self.opened["sessionId"],
                         toolCall=call, options=options)  # fmt: skip
        outcome = frame["result"]["outcome"]
        self.text(outcome.get("optionId", outcome["outcome"]))

    def do_form(self, field: str) -> None:
        schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
        frame = self.ask("elicitation/create", sessionId=self.opened["sessionId"], mode="form",
                         message=f"which {field}?", requestedSchema=schema)  # fmt: skip
        self.text(json.dumps(frame.get("result", frame.get("error"))))

    def do_mode(self, _: str) -> None:
        self.text(self.mode)

    def do_other(self, text: str) -> None:
        own = self.opened
        self.opened = {**own, "sessionId": "other"}
        self.text(text)
        frame = self.ask("session/request_permission", sessionId="other", toolCall={}, options=[
            {"optionId": "once", "name": "once", "kind": "allow_once"}])  # fmt: skip
        self.opened = own
        self.text(frame["result"]["outcome"]["outcome"])

    def do_hold(self, _: str) -> None:
        self.text("holding")
        while not self.cancelled:
            frame = json.loads(sys.stdin.readline())
            self.cancelled = frame["method"] == "session/cancel"

    def do_sleep(self, _: str) -> None:
        self.text("asleep")
        while sys.stdin.readline():
            pass

    def do_file(self, _: str) -> None:
        about = {"sessionId": self.opened["sessionId"], "path": "/etc/passwd"}
        frame = self.ask("fs/read_text_file", **about)
        self.text(str(frame["error"]["code"]))

    def do_echo(self, line: str) -> None:
        print(line, flush=True)

    def do_exit(self, code: str) -> None:
        sys.exit(int(code))

    def run(self) -> None:
        for frame in self.frames():
            method = frame.get("method")
            if method == "initialize":
                version = 99 if self.can == "future" else 1
                result = {"protocolVersion": version,
                          "agentCapabilities": CAPABILITIES.get(self.can, {})}  # fmt: skip
                self.say(id=frame["id"], result=result)
            elif method in ("session/new", "session/load", "session/resume"):
                if self.can == "locked":
                    error = {"code": -32000, "message": "Authentication required"}
                    self.say(id=frame["id"], error=error)
                else:
                    self.open(frame)
            elif method == "session/set_mode":
                self.mode = frame["params"]["modeId"]
                error = {"code": -32602, "message": f"no mode {self.mode}"}
                said = {"error": error} if self.mode == "none" else {"result": {}}
                self.say(id=frame["id"], **said)
            elif method == "session/prompt":
                self.prompt(frame)


if __name__ == "__main__":
    Agent(sys.argv[1] if sys.argv[1:] else "resume").run()
