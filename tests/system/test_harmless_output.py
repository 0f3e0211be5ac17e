"""What agents write cannot control the terminal of who looks at it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.system.test_no_traceback import WORDS
from tests.worlds.daemon import Daemon, daemon_of, wait_status, wait_until, write
from tests.worlds.terminal import terminal

#: a title, a color, a bell, C1 controls as characters and as bytes, overrides of direction, a
#: carriage return that hides what is before it, a separator of lines
EVIL = (
    "\x1b]0;owned\x07\x1b[31mred\x1b[2J \x07 \x9b31m \x90q\x9c \u202egnp.exe\u2066 \x08\x7f\r\u2028"
)
MARK = "EVIL"
TEXT = f"{MARK}{EVIL}{MARK}"
RAW = TEXT.encode() + b"\x9b\xff\xfe"
#: what the colors of the client itself are
OWN = re.compile("\x1b\\[(?:[0-9]{1,2}(?:;[0-9]{1,2})*)?m")
#: what a program writes into each place that it may write
PROGRAM = """
import json, os, sys, time
text = json.loads(sys.argv[1])
raw = os.fsencode(text) + b"\\x9b\\xff\\xfe"
self, root = os.environ["CTX_SELF"], os.environ["CTX_ROOT"]
line = text.replace("\\r", "").replace("\\u2028", "")
def put(path, data):
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        print(path, error.strerror)
os.write(1, raw + b"\\n"); os.write(2, raw + b"\\n")
put(f"{self}/result.md", raw)
put(f"{self}/report", text.encode())
put(f"{self}/ctl", text.encode())
os.mkdir(f"{self}/work/w")
put(f"{self}/work/w/objective", line.encode())
put(f"{self}/work/w/plan.md", text.encode())
put(f"{self}/work/current", b"w")
os.mkdir(f"{self}/task/t")
put(f"{self}/task/t/title", line.encode())
cmd = f"printf {text!r}; cat; sleep 1000 # {line}"
put(f"{self}/task/t/cmd", cmd.encode())
put(f"{self}/task/t/accepts_input", b"1")
put(f"{self}/task/t/ctl", b"start")
os.mkdir(f"{self}/waiting/later")
put(f"{self}/waiting/later/work", b"w")
put(f"{self}/waiting/later/on", b"timer 1h")
said = json.dumps({"role": "assistant", "content": text})
put(f"{self}/session/messages.jsonl", said.encode() + b"\\n")
os.mkdir(f"{root}/agent/kid.d")
kid = f"{root}/agent/kid.d"
put(f"{kid}/exec", b"sh -c 'cat; sleep 1000'")
put(f"{kid}/handoff.md", text.encode())
put(f"{kid}/model", line.encode())
put(f"{kid}/meta.json", json.dumps({"title": text}).encode())
put(f"{kid}/ctl", b"start")
os.execvp("sleep", [line, "1000"])
"""
#: commands that show what was written, beside those that every command is tried with
MORE = (
    ["ps", "-p"], ["status", "kid"], ["status", "clerk"], ["logs", "-c", "coder"], ["logs"],
    ["get", "kid", "handoff.md"], ["get", "kid", "meta.json"], ["get", "kid", "model"],
    ["get", "coder", "session/messages.jsonl"], ["get", "coder", "error"], ["queue", "lead"],
    ["task", "output", "-a", "coder", "t"], ["task", "show", "-a", "coder", "kid"],
    ["reports", "coder"], ["log", "--out", "coder"], ["log", "--err", "coder"],
    ["tool", "call", "AgentGet", '{"agent_id": "kid"}'], ["why", "coder", TEXT, TEXT],
    ["get", "coder", TEXT], ["get", TEXT, "status"], [TEXT], ["help", TEXT],
    ["spawn", "--wait", "--rm", "quick", "--", "sh", "-c", f"printf '%s\\n' '{TEXT[:60]}'"],
)  # fmt: skip
#: of those, and of the others, the ones in which the text has to be seen
SEES = (
    "status coder", "get coder out", "result coder", "log coder", "logs coder clerk",
    "attach clerk", "events coder", "reports", "task list -a coder --all",
    "task show -a coder t", "task output -a coder t", "work list -a coder",
    "work show -a coder w", "ps -p", "status kid", "queue lead", "get kid handoff.md",
    "logs -c coder", "now coder", "audit",
)  # fmt: skip


@pytest.fixture(scope="module")
def evil() -> Iterator[Daemon]:
    with daemon_of() as daemon:
        lead = daemon.run("lead", "sh -c 'cat; sleep 1000'", "wait", mode="turn")
        wait_status(lead, "busy")
        agent = daemon.make("coder", f"python3 - {json_word(TEXT)}", PROGRAM, parent="agent:lead")
        write(agent / "policy", "allow coder_t agent:kid create\nallow coder_t tool:* execute\n"
              "allow coder_t model:* use")
        write(agent / "ctl", "start")
        clerk = daemon.run("clerk", "cat", mode="turn")
        wait_status(clerk, "idle")
        assert daemon.ctx("send", "clerk", TEXT).returncode == 0
        said = daemon.agent_dir("kid") / "out"
        wait_until(lambda: said.exists() and said.stat().st_size > 0, "its child has said it, too")
        begun = agent / "task" / "t" / "output"
        wait_until(lambda: begun.stat().st_size > 0, "and its task")
        yield daemon


def json_word(text: str) -> str:
    """As one word of ``exec``: no control character is in it."""
    return "'" + json.dumps(text) + "'"


COMMANDS = {
    shlex.join(words) if MARK not in "".join(words) else f"{words[0]} with the text {number}": words
    for number, words in enumerate([*WORDS.values(), *MORE, ["send", "clerk", TEXT]])
    # others read their input, or show what programs of a terminal write (client/screen.py)
    if words[0] not in ("new", "set", "start", "acp", "mcp", "bridge", "hook", "enter")
}


def harmful(shown: str) -> list[str]:
    """What could control a terminal, but for the client's own colors and ends of lines."""
    text = OWN.sub("", shown.replace("\r\n", "\n"))
    return [ascii(char) for char in text if not (char.isprintable() or char in "\n\t\u00a0")]


def test_the_text_is_harmful() -> None:
    assert len({*harmful(TEXT)}) >= 9


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in SEES or "with the text" in name else pytest.mark.long)
    for name in COMMANDS
])
def test_nothing_controls_the_terminal(evil: Daemon, name: str) -> None:
    with terminal(evil.root, *COMMANDS[name], size=(300, 50), PAGER="cat") as screen:
        if name.startswith(("attach", "chat")):
            screen.wait_for("attached" if name.startswith("attach") else "> ")
            screen.type("\x04")
        screen.end()
    assert harmful(screen.shown) == [], screen.shown
    if name in SEES or "with the text" in name:
        assert MARK in screen.shown, screen.shown


def test_what_is_to_be_seen_is_tried() -> None:
    assert {*SEES} <= {*COMMANDS}


def test_pipes_and_files_get_the_bytes_themselves(evil: Daemon) -> None:
    for words in (["result", "coder"], ["get", "coder", "out"], ["log", "--out", "coder"],
                  ["logs", "--out", "coder", "clerk"]):
        command = [sys.executable, "-IS", str(evil.root / "bin" / "ctx"), *words]
        env = {"CTX_ROOT": str(evil.root)}
        assert RAW in subprocess.run(command, env=env, capture_output=True, check=False).stdout


def test_lines_of_the_client_are_escaped_in_pipes_too(evil: Daemon) -> None:
    for words in (["ps", "-p"], ["events", "coder"], ["task", "list", "-a", "coder"],
                  ["queue", "lead"], ["reports"], ["audit"], ["status", "coder"]):
        assert harmful(evil.ctx(*words).stdout) == [], words
