"""A model server whose model does what it is told: for tests of real command lines.

    python -m tests.clients.model SOCKET LOG [PORT] [--certificate FILE --key FILE]

It speaks what the command lines speak: Anthropic Messages, OpenAI Responses, Gemini, each as one
answer or as a stream, at a Unix socket and at a port of the loopback (printed; any free one by
default), with a certificate by TLS. It keeps nothing between requests: the script is in the
conversation itself. The last message of the user that has ``<script>[STEP, ...]</script>`` is
followed, one step for each result of a tool since. A step is an object:

    {"shell": COMMAND}               calls whatever runs commands in a shell; "as" may have more
                                     arguments
    {"tool": NAME, "input": {...}}   calls a tool of ctx, which an MCP server has to offer
    {"all": [STEP, ...]}             calls several at once; after it come as many steps less one
                                     that are not used
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
import ssl
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

    @property
    def calls(self) -> list[tuple[str, Json]]:
        """The calls of tools that the step is, by the names that the tools have here."""
        step = self.step
        found = map(self.call, step.get("all", [step]))
        return [call for call in found if call is not None]

    def call(self, step: Json) -> tuple[str, Json] | None:
        for name in self.tools:
            argument = _SHELLS.get(name.rpartition("/")[2])
            if "shell" in step and argument is not None:
                return name, {argument: step["shell"], **step.get("as", {})}
            if "tool" in step and name.endswith((f"_{step['tool']}", f"/{step['tool']}")):
                return name, step["input"]
            if step.get("own") == name:  # a tool of the program itself
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
        for key in ("text", "content", "output", "error", "response", "parts"):
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
    blocks = [
        {"type": "tool_use", "id": f"toolu_{count}_{index}", "name": name, "input": given}
        for index, (name, given) in enumerate(talk.calls)
    ]
    stop: Json = {"stop_reason": "tool_use" if blocks else "end_turn", "stop_sequence": None}
    blocks = blocks or [{"type": "text", "text": talk.text}]
    whole = {
        "id": f"msg_{count}", "type": "message", "role": "assistant",
        "model": request.get("model", ""), "content": blocks, "usage": _USAGE, **stop,
    }  # fmt: skip
    events: Events = [
        ("message_start", {"message": {**whole, "content": [], "stop_reason": None}})
    ]
    for index, block in enumerate(blocks):
        begin: Json = {**block, "text": ""} if "text" in block else {**block, "input": {}}
        delta = {"type": "text_delta", "text": block["text"]} if "text" in block else {
            "type": "input_json_delta", "partial_json": json.dumps(block["input"])}  # fmt: skip
        events += [
            ("content_block_start", {"index": index, "content_block": begin}),
            ("content_block_delta", {"index": index, "delta": delta}),
            ("content_block_stop", {"index": index}),
        ]
    events += [
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
    made: list[Json] = []
    for index, (called, arguments) in enumerate(talk.calls):
        # the tools of an MCP server are in a name space
        space, _, name = called.rpartition("/")
        ident = f"{len(items)}_{index}"
        made.append({
            "type": "function_call", "id": f"fc_{ident}", "call_id": f"call_{ident}",
            "name": name, "arguments": json.dumps(arguments),
            **({"namespace": space} if space else {}),
        })  # fmt: skip
    if not made:
        content = {"type": "output_text", "text": talk.text, "annotations": []}
        made.append({
            "type": "message", "id": f"m_{len(items)}", "role": "assistant", "content": [content],
        })  # fmt: skip
    whole = {
        "id": f"resp_{len(items)}", "object": "response", "status": "completed",
        "model": request.get("model", ""), "output": made,
        "usage": {
            **_USAGE, "total_tokens": 15,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    events: Events = [
        ("response.created", {"response": {**whole, "output": []}}),
        *(
            (f"response.output_item.{word}", {"output_index": index, "item": item})
            for index, item in enumerate(made)
            for word in ("added", "done")
        ),
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
    parts: list[Json] = [
        {"functionCall": {"name": name, "args": given}} for name, given in talk.calls
    ]
    parts = parts or [{"text": talk.text}]
    whole = {
        "candidates": [
            {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
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
                  model=request.get("model") or path,
                  instructed=b"The tools of an agent of ctxfs:" in body)  # fmt: skip
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
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    arguments = parser.parse_args()
    Handler.log = arguments.log
    port = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    if arguments.certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments.certificate, arguments.key)
        port.socket = context.wrap_socket(
            port.socket, server_side=True, do_handshake_on_connect=False
        )
    unix = UnixServer(str(arguments.socket), Handler)  # type: ignore[arg-type]
    arguments.socket.chmod(0o666)
    threading.Thread(target=unix.serve_forever, daemon=True).start()
    print(port.server_port, flush=True)
    port.serve_forever()


if __name__ == "__main__":
    main()
