"""A model server whose model does what it is told: for tests of real command lines.

    python -m tests.clients.model SOCKET LOG [PORT]

It speaks what the command lines speak: Anthropic Messages, OpenAI Responses, Gemini, each as one
answer or as a stream, at a Unix socket and at a port of the loopback (printed; any free one by
default). It keeps nothing between requests: the script is in the conversation itself. The last
message of the user that has ``<script>[STEP, ...]</script>`` is followed, one step for each result
of a tool since. A step is an object:

    {"shell": COMMAND}               calls whatever runs commands in a shell
    {"tool": NAME, "input": {...}}   calls a tool of ctx, which an MCP server has to offer
    {"text": TEXT}                   is the answer; the last step of each script

In all texts ``{last}`` is the last result of a tool, ``{memory}`` what the user said before in the
conversation, without scripts. Each request is a JSON object in LOG.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]
#: (name of the event, data) of a stream
Events = list[tuple[str, Json]]

#: greedy, since the task of a child has a script of its own in its parent's
_SCRIPT: Final = re.compile(r"<script>(.*)</script>", re.DOTALL)
#: what Claude Code adds to what users and tools say
_REMINDER: Final = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
#: what the command lines call the tool that runs commands, and its argument
_SHELLS: Final = {
    "Bash": "command",
    "exec_command": "cmd",
    "shell_command": "command",
    "run_shell_command": "command",
}
_USAGE: Final[Json] = {"input_tokens": 10, "output_tokens": 5}


@dataclass
class Talk:
    """A conversation, whatever it is written in: what counts of it."""

    #: of the user, oldest first, and the last script
    said: list[str] = field(default_factory=list)
    script: list[Json] = field(default_factory=list)
    #: results of tools since the last script
    results: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)

    def hear(self, text: str) -> None:
        """Takes what the user said."""
        found = _SCRIPT.search(text)
        # the notice of a child's end quotes the child's, within JSON
        with contextlib.suppress(json.JSONDecodeError):
            if found is not None:
                self.script = json.loads(found[1])
                self.results.clear()
                text = _SCRIPT.sub("", text)
        self.said += [text.strip()] if text.strip() else []

    @property
    def step(self) -> Json:
        """What the script wants next; without one, such as for a title, just an answer."""
        if not self.script or not self.tools:
            return {"text": "ok"}
        chosen = self.script[min(len(self.results), len(self.script) - 1)]
        words = {
            "{last}": self.results[-1] if self.results else "",
            "{memory}": " ".join(self.said[:-1]),
        }
        filled: Json = _filled(chosen, words)
        return filled

    @property
    def text(self) -> str:
        """What the answer is where no tool is called."""
        step = self.step
        return str(step.get("text", f"there is no tool for {step} among {self.tools}"))

    def call(self) -> tuple[str, Json] | None:
        """The call of a tool that the step is, by the name that the tool has here."""
        step = self.step
        for name in self.tools:
            argument = _SHELLS.get(name.rpartition("/")[2])
            if "shell" in step and argument is not None:
                return name, {argument: step["shell"]}
            if "tool" in step and name.endswith((f"_{step['tool']}", f"/{step['tool']}")):
                return name, step["input"]
        return None


def _filled(value: Any, words: dict[str, str]) -> Any:
    """The same with words in all texts replaced."""
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if isinstance(value, dict):
        return {key: _filled(each, words) for key, each in value.items()}
    return [_filled(each, words) for each in value] if isinstance(value, list) else value


def texts(value: Any) -> Iterator[str]:
    """Every text in the content of a message or in the result of a tool."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, dict):
        for key in ("text", "content", "output", "response", "parts"):
            yield from texts(value.get(key))


def _whole(value: Any) -> str:
    return _REMINDER.sub("", "\n".join(texts(value))).strip()


# the three languages: each reads a request, and gives the whole answer and its stream


def anthropic(request: Json) -> tuple[Talk, Json, Events]:
    talk = Talk(tools=[tool["name"] for tool in request.get("tools", [])])
    count = 0
    for message in request["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        count += len(blocks)
        for heard in blocks if message["role"] == "user" else ():
            if heard["type"] == "tool_result":
                talk.results.append(_whole(heard.get("content")))
            else:
                talk.hear(_whole(heard))
    call = talk.call()
    if call is not None:
        name, given = call
        block: Json = {"type": "tool_use", "id": f"toolu_{count}", "name": name, "input": given}
        begin: Json = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(given)}
    else:
        text = talk.text
        block, begin = {"type": "text", "text": text}, {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": text}
    stop: Json = {"stop_reason": "end_turn" if call is None else "tool_use", "stop_sequence": None}
    whole = {
        "id": f"msg_{count}", "type": "message", "role": "assistant",
        "model": request.get("model", ""), "content": [block], "usage": _USAGE, **stop,
    }  # fmt: skip
    events: Events = [
        ("message_start", {"message": {**whole, "content": [], "stop_reason": None}}),
        ("content_block_start", {"index": 0, "content_block": begin}),
        ("content_block_delta", {"index": 0, "delta": delta}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": stop, "usage": {"output_tokens": 5}}),
        ("message_stop", {}),
    ]
    return talk, whole, [(name, {"type": name, **data}) for name, data in events]


def responses(request: Json) -> tuple[Talk, Json, Events]:
    given = request["input"]
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    talk = Talk(tools=list(_tools_of([request, *items])))
    for item in items:
        if str(item.get("type", "")).endswith("call_output"):
            talk.results.append(_whole(item.get("output")))
        elif item.get("role") == "user":
            talk.hear(_whole(item.get("content")))
    call = talk.call()
    if call is not None:
        # the tools of an MCP server are in a name space
        space, _, name = call[0].rpartition("/")
        item = {
            "type": "function_call", "id": f"fc_{len(items)}", "call_id": f"call_{len(items)}",
            "name": name, "arguments": json.dumps(call[1]),
            **({"namespace": space} if space else {}),
        }  # fmt: skip
    else:
        content = {"type": "output_text", "text": talk.text, "annotations": []}
        item = {
            "type": "message", "id": f"m_{len(items)}", "role": "assistant", "content": [content],
        }  # fmt: skip
    whole = {
        "id": f"resp_{len(items)}", "object": "response", "status": "completed",
        "model": request.get("model", ""), "output": [item],
        "usage": {
            **_USAGE, "total_tokens": 15,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    events: Events = [
        ("response.created", {"response": {**whole, "output": []}}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": whole}),
    ]
    return talk, whole, [(name, {"type": name, **data}) for name, data in events]


def _tools_of(holders: Iterable[Json], space: str = "") -> Iterator[str]:
    for holder in holders:
        for tool in holder.get("tools") or ():
            name = tool.get("name") or tool.get("type", "")
            if tool.get("tools"):
                yield from _tools_of([tool], f"{name}/")
            else:
                yield space + name


def gemini(request: Json) -> tuple[Talk, Json, Events]:
    declared = [tool.get("functionDeclarations", []) for tool in request.get("tools", [])]
    talk = Talk(tools=[function["name"] for each in declared for function in each])
    for content in request["contents"]:
        for part in content["parts"]:
            if "functionResponse" in part:
                talk.results.append(_whole(part["functionResponse"].get("response")))
            elif content.get("role") == "user":
                talk.hear(_whole(part))
    call = talk.call()
    made = {"text": talk.text} if call is None else None
    part = made or {"functionCall": {"name": call[0], "args": call[1]}}  # type: ignore[index]
    whole = {
        "candidates": [
            {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
        ],
        "usageMetadata": {
            "promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15,
        },
    }  # fmt: skip
    return talk, whole, [("", whole)]


LANGUAGES: Final[dict[str, Callable[[Json], tuple[Talk, Json, Events]]]] = {
    "/messages": anthropic,
    "/responses": responses,
    "enerateContent": gemini,
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log: Path

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: ``note`` does."""

    def address_string(self) -> str:
        return ""

    def note(self, **facts: Any) -> None:
        keys = ("authorization", "x-api-key", "x-goog-api-key")
        key = next(filter(None, map(self.headers.get, keys)), "")
        line = json.dumps({"path": self.path, "key": key, **facts}) + "\n"
        with self.log.open("a") as log:
            log.write(line)

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.note()
        self.answer(b'{"data":[],"models":[]}')

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        speak = next((said for ending, said in LANGUAGES.items() if ending in path), None)
        if path.endswith(("count_tokens", ":countTokens")) or speak is None:
            self.note()
            self.answer(b'{"input_tokens":10,"totalTokens":10}')
            return
        request = json.loads(body)
        talk, whole, events = speak(request)
        self.note(tools=talk.tools, said=talk.said, results=talk.results, step=talk.step,
                  model=request.get("model") or path)  # fmt: skip
        if request.get("stream") or "streamGenerate" in path:
            lines = (
                (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"
                for name, data in events
            )
            self.answer("".join(lines).encode(), "text/event-stream")
        else:
            self.answer(json.dumps(whole).encode())


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.model")
    parser.add_argument("socket", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("port", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    Handler.log = arguments.log
    port = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    unix = UnixServer(str(arguments.socket), Handler)  # type: ignore[arg-type]
    arguments.socket.chmod(0o666)
    threading.Thread(target=unix.serve_forever, daemon=True).start()
    print(port.server_port, flush=True)
    port.serve_forever()


if __name__ == "__main__":
    main()
