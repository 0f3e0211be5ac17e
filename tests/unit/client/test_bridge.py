"""`ctx bridge acp`: a scripted agent of the protocol, spoken to as a resident program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import acp.schema
import pytest

from client.bridge import KINDS, STOPS
from client.permits import choose
from tests.acp import agent as scripted
from tests.worlds.daemon import TIMEOUT, wait_until

library = Path(scripted.__file__).with_name("library.py")
HELLO = {"type": "hello", "takes": ["cancel"]}


class Bridged:
    """A bridge, with what ctxfs would write and read."""

    def __init__(self, program: Path, home: Path, can: str, *options: str) -> None:
        script = library if can == "library" else Path(scripted.__file__)
        self.command = [sys.executable, str(script), can]
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "CTX_ROOT": "/nowhere"}
        self.process = subprocess.Popen(
            [sys.executable, "-IS", program, "bridge", "acp", *options, "--", *self.command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=env, cwd=home,
        )  # fmt: skip
        self.count = 0
        assert self.line() == HELLO

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def tell(self, **line: Any) -> None:
        self.write(json.dumps(line).encode() + b"\n")

    def line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        try:
            return json.loads(line)
        except ValueError:
            return line

    def begin(self, text: str, **more: str) -> str:
        """Sends a message; returns its id."""
        self.count += 1
        ident = f"m{self.count}"
        fields = {"from": "operator uid:0", "provenance": "operator", **more}
        self.tell(type="message", id=ident, text=text, **fields)
        return ident

    def lines(self, ident: str) -> list[Any]:
        """What is said of a message, up to its end."""
        found = [self.line()]
        while found[-1] and not (
            isinstance(found[-1], dict) and found[-1]["type"] in ("message", "error")
        ):
            found.append(self.line())
        assert found[-1] and found[-1]["id"] == ident
        return found

    def ask(self, text: str, **more: str) -> list[Any]:
        return self.lines(self.begin(text, **more))

    def reply(self, text: str, **more: str) -> str:
        """The pieces of a reply that ends well."""
        lines = self.ask(text, **more)
        assert lines[-1]["type"] == "message", lines
        return said(lines)

    def end(self) -> tuple[int, str]:
        """The exit status and the complaints, when nothing more is said to it."""
        _, errors = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, errors.decode()


Start = Callable[..., Bridged]


@pytest.fixture
def bridged(program: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts bridges, all of one home, and ends them."""
    there: list[Bridged] = []

    def start(can: str = "resume", *options: str) -> Bridged:
        there.append(Bridged(program, tmp_path, can, *options))
        return there[-1]

    yield start
    for each in there:
        each.process.kill()
        each.process.communicate(timeout=TIMEOUT)


def said(lines: list[Any]) -> str:
    found = [line for line in lines if isinstance(line, dict)]
    return "".join(line["text"] for line in found if line["type"] == "delta")


def test_a_message_is_a_turn(bridged: Start) -> None:
    bridge = bridged()
    ident = bridge.begin("say one,; say  two")
    assert bridge.lines(ident) == [
        {"type": "delta", "id": ident, "text": "one,"},
        {"type": "delta", "id": ident, "text": " two"},
        {"type": "message", "id": ident, "text": ""},
    ]
    assert bridge.reply("say \u00e4\U0001f600") == "\u00e4\U0001f600"
    assert bridge.end() == (0, "")


def test_tool_calls_are_lines_that_are_no_replies(bridged: Start) -> None:
    bridge = bridged()
    ident = bridge.begin("say I look.; call read a file; say Well.")
    lines = bridge.lines(ident)
    call = {"type": "tool_call", "message": ident, "call": "c0", "title": "a file", "kind": "read"}
    assert lines[1:4] == [
        {**call, "status": status} for status in ("pending", "in_progress", "completed")
    ]
    assert said(lines) == "I look.\n\nWell.", "what was said in two places is not one word"


@pytest.mark.parametrize("stop", STOPS)
def test_a_turn_that_ends_otherwise_has_failed(bridged: Start, stop: str) -> None:
    bridge = bridged()
    last = bridge.ask(f"say so far; stop {stop}")[-1]
    assert (last["type"], last["text"]) == ("error", f"{stop}: {STOPS[stop]}")
    last = bridge.ask("fail no key")[-1]
    assert (last["type"], last["text"]) == ("error", "no key")
    assert bridge.reply("say on") == "on"


def test_permissions_are_given_once_unless_a_list_says_otherwise(bridged: Start) -> None:
    bridge = bridged()
    assert bridge.reply("ask edit; say ,; ask something new") == "id-allow_once,id-allow_once"
    bridge = bridged("resume", "--allow", "read", "--allow", "search")
    assert bridge.reply("ask read; say ,; ask edit; say ,; ask search") == (
        "id-allow_once,id-reject_once,id-allow_once")
    assert bridge.end() == (0, "ctx: not permitted: edit: to edit\n")


def test_what_is_said_in_another_session_is_not_heard(bridged: Start) -> None:
    assert bridged().reply("other psst; say own") == "cancelledown"


@pytest.mark.parametrize("allowed", [True, False])
def test_the_best_option_there_is_is_taken(allowed: bool) -> None:
    always = {"kind": "allow_always" if allowed else "reject_always", "optionId": "1"}
    once = {"kind": "allow_once" if allowed else "reject_once", "optionId": "2"}
    other = {"kind": "reject_once" if allowed else "allow_once", "optionId": "3"}
    assert choose([other, always, once], allowed)["optionId"] == "2"
    assert choose([other, always], allowed)["optionId"] == "1"
    assert choose([other], allowed) == choose([], allowed) == {"outcome": "cancelled"}


def test_a_cancelled_turn_ends_its_message_and_the_conversation_goes_on(bridged: Start) -> None:
    bridge = bridged()
    ident = bridge.begin("hold; ask edit")
    assert bridge.line()["text"] == "holding"
    bridge.tell(type="cancel", id="another")
    bridge.tell(type="cancel", id=ident)
    bridge.tell(type="cancel", id=ident)
    lines = bridge.lines(ident)
    assert said(lines) == "cancelled", "of a permission that was asked for then"
    assert lines[-1] == {"type": "message", "id": ident, "text": ""}
    bridge.tell(type="cancel", id=ident)
    assert json.loads(bridge.reply("tell"))["before"] == ["hold; ask edit"]


def test_what_is_cancelled_before_its_turn_is_not_asked(bridged: Start) -> None:
    """The turn of a message that ctxfs has given up goes on: nothing else is asked meanwhile."""
    bridge = bridged()
    given_up = bridge.begin("hold")
    assert bridge.line()["text"] == "holding"
    waits = bridge.begin("say never")
    bridge.tell(type="cancel", id=waits)
    assert bridge.lines(waits) == [{"type": "message", "id": waits, "text": ""}]
    assert given_up != waits
    assert bridge.process.poll() is None


def test_a_line_may_come_twice_or_in_part(bridged: Start) -> None:
    bridge = bridged()
    bridge.write(b'{"type":"message","id":"m1","te\n\n[]\n7\n{"type":"message"}\n')
    assert bridge.reply("say one") == "one"
    bridge.tell(type="message", id="m1", text="say one", provenance="operator")
    assert bridge.reply("say two") == "two"


@pytest.mark.parametrize(
    ("can", "how"),
    [
        ("resume", "session/resume"), ("load", "session/load"), ("late", "session/load"),
        ("plain", "session/new"),
    ],
)  # fmt: skip
def test_the_next_run_continues_the_conversation(bridged: Start, can: str, how: str) -> None:
    bridge = bridged(can)
    assert bridge.reply("say first") == "first"
    assert bridge.end()[0] == 0
    told = json.loads(bridged(can).reply("tell"))
    assert told["how"] == how
    assert told["before"] == ([] if can == "plain" else ["say first"])
    # the conversation of another program is none of its
    assert json.loads(bridged("http").reply("tell"))["how"] == "session/new"


def test_a_conversation_that_is_gone_begins_anew(bridged: Start, tmp_path: Path) -> None:
    bridge = bridged()
    assert bridge.reply("say first") == "first"
    bridge.end()
    (tmp_path / "sessions.json").unlink()
    bridge = bridged()
    assert json.loads(bridge.reply("tell"))["how"] == "session/new"
    complaints = bridge.end()[1].splitlines()
    for way in ("session/resume", "session/load"):
        assert any(f"{way}: no such session: it went" in line for line in complaints)


@pytest.mark.parametrize("kept", ["", "{", "[]", "[" * 100_000, '{"session": 7}'])
def test_what_is_kept_may_be_anything(bridged: Start, tmp_path: Path, kept: str) -> None:
    (tmp_path / ".ctx-acp-default.json").write_text(kept)
    assert bridged().reply("say first") == "first"


def test_nothing_is_offered_to_the_agent(bridged: Start) -> None:
    assert bridged().reply("file") == "-32601"


def test_other_lines_are_output(bridged: Start) -> None:
    bridge = bridged()
    lines = bridge.ask("echo Loading.; echo [1]; say done")
    assert lines[:2] == [b"Loading.\n", [1]]
    assert said(lines) == "done"


def test_who_speaks_is_told(bridged: Start) -> None:
    bridge = bridged()
    for provenance, told in (("operator", False), ("delegation", False), ("child", True)):
        texts = json.loads(bridge.reply("tell", provenance=provenance, **{"from": "agent:x"}))
        first = "Message from agent:x (provenance: child):"
        assert texts["texts"] == ([first, "tell"] if told else ["tell"])


def test_an_agent_that_ends(bridged: Start) -> None:
    bridge = bridged()
    last = bridge.ask("exit 3")[-1]
    assert (last["type"], last["text"]) == ("error", f"{sys.executable} ended")
    assert bridge.end()[0] == 3


@pytest.mark.parametrize(
    ("can", "why"),
    [
        ("future", "it speaks version 99 of the protocol, not 1"),
        ("locked", "Authentication required; put its key into env, or its login into its home"),
    ],
)
def test_an_agent_that_cannot_be_spoken_to(bridged: Start, can: str, why: str) -> None:
    bridge = bridged(can)
    assert bridge.process.wait(TIMEOUT) == 1
    _, complaint = bridge.end()
    assert complaint.endswith(why + "\n")


def test_sigterm_ends_the_agent_too(bridged: Start) -> None:
    bridge = bridged()
    bridge.begin("sleep")
    assert bridge.line()["text"] == "asleep"
    children = Path(f"/proc/{bridge.process.pid}/task/{bridge.process.pid}/children")
    (child,) = children.read_text().split()
    bridge.process.terminate()
    assert bridge.end()[0] == 128 + signal.SIGTERM
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "it has ended")


def test_what_the_agent_has_started_ends_with_it(program: Path, tmp_path: Path) -> None:
    """Some agents are a process that waits for another one, and pass on no signals."""
    # A shell that has forked and not executed yet has the trap, and would lose the signal.
    script = "trap : TERM; sh -c 'echo $$; exec sleep 1000' & wait $!; wait $!"
    words = [sys.executable, "-IS", str(program), "bridge", "acp", "--", "sh", "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == HELLO
        child = int(process.stdout.readline())
        process.terminate()
        assert process.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{child}").exists()


def test_at_the_end_of_the_input_the_last_turn_is_waited_for(bridged: Start) -> None:
    bridge = bridged()
    bridge.begin("say one")
    output, _ = bridge.process.communicate(timeout=TIMEOUT)
    kinds = [json.loads(line)["type"] for line in output.splitlines()]
    assert kinds == ["delta", "message"]
    assert bridge.process.returncode == 0


def test_mcp_servers_are_given(bridged: Start, tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    servers = {
        "one": {"type": "stdio", "command": "/one", "args": ["a"], "env": {"K": "v"}},
        "two": {"url": "http://two", "headers": {"H": "v"}},
    }
    config.write_text(json.dumps({"mcpServers": servers}))
    one = {"name": "one", "command": "/one", "args": ["a"], "env": [{"name": "K", "value": "v"}]}
    two = {"type": "http", "name": "two", "url": "http://two",
           "headers": [{"name": "H", "value": "v"}]}  # fmt: skip
    told = json.loads(bridged("http", "--mcp", str(config)).reply("tell"))
    assert told["mcpServers"] == [one, two]
    bridge = bridged("resume", "--mcp", str(config))
    told = json.loads(bridge.reply("tell"))
    assert (told["mcpServers"], told["cwd"]) == ([one], str(tmp_path))
    assert bridge.end()[1] == "ctx: the agent takes no MCP servers of type http: two is left out\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("{}", "mcpServers"),
        ('{"mcpServers": {"one": {}}}', "one: write its command, or its url"),
        (None, "No such file or directory"),
    ],
)
def test_a_bad_file_of_mcp_servers(
    program: Path, tmp_path: Path, text: str | None, why: str
) -> None:
    path = tmp_path / "mcp.json"
    if text is not None:
        path.write_text(text)
    words = [sys.executable, "-IS", str(program), "bridge", "acp", "--mcp", str(path)]
    words += ["--", "true"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    assert process.returncode == 2
    assert process.stderr.startswith(f"ctx: {path}")
    assert why in process.stderr


def test_a_program_that_is_not_there(program: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-IS", str(program), "bridge", "acp", "--", "/nowhere/agent"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    assert (process.returncode, process.stderr) == (
        1, "ctx: /nowhere/agent: No such file or directory\n")
    process = subprocess.run(words[:-2], capture_output=True, text=True, timeout=TIMEOUT)
    assert process.returncode == 2


def test_the_librarys_own_agent(bridged: Start) -> None:
    bridge = bridged("library")
    assert bridge.reply("one") == "new one: allow_once"
    ident = bridge.begin("hold")
    while bridge.line()["type"] != "delta":
        pass
    bridge.tell(type="cancel", id=ident)
    assert said(bridge.lines(ident)).strip() == "new hold: cancelled"
    assert bridge.end() == (0, "")
    bridge = bridged("library", "--allow", "read")
    assert bridge.reply("two") == "new two: reject_once"


def test_the_kinds_are_those_of_the_protocol() -> None:
    fields = acp.schema.ToolCallUpdate.model_json_schema()
    assert set(KINDS) <= set(json.dumps(fields).replace('"', " ").split())
