"""The `ctx` command over fake trees of plain files and FIFOs: neither root nor a mount needed."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CLIENT = Path(__file__).resolve().parents[2] / "ctxfs" / "client.py"


def load_client() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ctx_client", CLIENT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


client = load_client()

Run = Callable[..., tuple[int, str, str]]
FILES = (
    *("outcome", "reason", "pid", "run", "ctl", "exec", "env", "mount", "limits"),
    *("life", "cwd", "restart"),
)
EMPTY = ("out", "log", "result.md", "handoff.md", "inbox")


class FakeRoot:
    """Directories that look like a mounted ctxfs, as far as plain files can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "agent").mkdir(parents=True)
        (path / "status").write_text("version=1.2\nstate=ready\nmount=/ctx\ncontrollers=\n")

    def fill(self, directory: Path, **values: str) -> None:
        for file in FILES:
            (directory / file).write_text(values.get(file, "") + "\n")
        for file in EMPTY:
            (directory / file).write_text(values.get(file.removesuffix(".md"), ""))
        (directory / "parent").write_text(values.get("parent", "operator uid:0") + "\n")
        (directory / "status").write_text(values.get("status", "new") + "\n")
        (directory / "incarnation").write_text("i1\n")
        for name in ("child", "session"):
            (directory / name).mkdir()
        (directory / "session" / "events.jsonl").write_text(values.get("events", ""))
        if values.get("status") == "dead":
            (directory / "wait").write_text("")
        else:
            os.mkfifo(directory / "wait")

    def agent(self, name: str, **values: str) -> Path:
        directory = self.path / "agent" / f"{name}.d"
        directory.mkdir()
        self.fill(directory, **values)
        parent = values.get("parent", "").partition(" ")[0].removeprefix("agent:")
        if parent:
            link = self.path / "agent" / f"{parent}.d" / "child" / name
            link.symlink_to(f"../../{name}.d")
        return directory

    def end(self, name: str, outcome: str, reason: str) -> None:
        """End an agent as the daemon does: record, replace the FIFO, release its readers."""
        directory = self.path / "agent" / f"{name}.d"
        for file, value in (("outcome", outcome), ("reason", reason), ("status", "dead")):
            (directory / file).write_text(value + "\n")
        fifo = os.open(directory / "wait", os.O_RDWR | os.O_NONBLOCK)
        (directory / "wait.new").write_text("")
        (directory / "wait.new").rename(directory / "wait")
        os.close(fifo)

    def reject(self, code: str, path: str, sentence: str, ago: float = 0) -> None:
        when = datetime.fromtimestamp(time.time() - ago, UTC)
        stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        (self.path / "error").write_text(f"{stamp} {code} {path}: {sentence}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRoot:
    path = tmp_path / "ctx"
    monkeypatch.setenv("CTX_ROOT", str(path))
    return FakeRoot(path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the client in this process, with the given standard input."""

    def call(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        reader, writer = os.pipe()
        os.write(writer, stdin)
        os.close(writer)
        saved = os.dup(0)
        os.dup2(reader, 0)
        try:
            status = client.main(list(argv))
        finally:
            os.dup2(saved, 0)
            os.close(saved)
            os.close(reader)
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def made_agents_are_full(root: FakeRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `mkdir` fill a fresh agent, and `rmdir` remove it, as the file system does."""
    mkdir = os.mkdir

    def fill(path: Any, mode: int = 0o777) -> None:
        mkdir(path, mode)
        if str(path).endswith(".d"):
            root.fill(Path(path))

    def remove(path: str) -> None:
        subprocess.run(["rm", "-r", path], check=True)

    monkeypatch.setattr(client.os, "mkdir", fill)
    monkeypatch.setattr(client.os, "rmdir", remove)


def refuse(monkeypatch: pytest.MonkeyPatch, file: str, number: int, at_close: bool = False) -> None:
    """Make writing to files of that name fail like a control file, at `write` or at `close`."""
    real_open, real_write, real_close = os.open, os.write, os.close
    refused: set[int] = set()

    def fake_open(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if str(path).endswith("/" + file) and flags & os.O_WRONLY:
            refused.add(fd)
        return fd

    def fake_write(fd: int, data: bytes) -> int:
        if fd in refused and not at_close:
            raise OSError(number, os.strerror(number))
        return real_write(fd, data)

    def fake_close(fd: int) -> None:
        real_close(fd)
        if fd in refused:
            refused.discard(fd)
            if at_close:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(client.os, "open", fake_open)
    monkeypatch.setattr(client.os, "write", fake_write)
    monkeypatch.setattr(client.os, "close", fake_close)


@pytest.fixture
def spawned() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the client as a program; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, program: Path = CLIENT, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        options.setdefault("stdin", subprocess.DEVNULL)
        command = [sys.executable, "-IS", str(program), *argv]
        processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


def has_open(process: subprocess.Popen[bytes], path: Path) -> bool:
    """Return whether a process has opened a file, which here means that it waits for it."""
    try:
        descriptors = Path(f"/proc/{process.pid}/fd").iterdir()
        return any(os.readlink(descriptor) == str(path) for descriptor in descriptors)
    except OSError:  # one was closed meanwhile
        return False


# --- the file itself ----------------------------------------------------------------------------


def test_starts_isolated_and_imports_nothing_of_the_project() -> None:
    text = CLIENT.read_text()
    assert text.startswith("#!/usr/bin/env -S python3 -IS\n")
    assert os.access(CLIENT, os.X_OK)
    assert "import ctxfs" not in text and "from ctxfs" not in text and "runtime." not in text


def test_heavy_modules_are_loaded_late() -> None:
    code = (
        "import sys; source = open(sys.argv[1]).read();"
        "exec(compile(source, 'ctx', 'exec'), {'__name__': 'ctx'});"
        "print([m for m in ('argparse', 'json', 'socket', 're', 'subprocess') if m in sys.modules])"
    )
    command = [sys.executable, "-IS", "-c", code, str(CLIENT)]
    assert subprocess.check_output(command) == b"[]\n"


# --- output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keep", "expected"),
    [
        ("plain ü 日本", "", "plain ü 日本"),
        ("a\x1b[31mb", "", "a\\x1b[31mb"),
        ("a\nb\tc\rd", "", "a\\nb\\tc\\rd"),
        ("a\nb\tc\rd", "\n\t", "a\nb\tc\\rd"),
        ("\x7f\x9b\u202e\u2028", "", "\\x7f\\x9b\\u202e\\u2028"),
        ("\ud800", "", "\\ud800"),
    ],
)
def test_escape(text: str, keep: str, expected: str) -> None:
    assert client.escape(text, keep) == expected


def test_contents_are_exact_for_pipes(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="dead")
    data = b"\x1b[31m\xff\x00 no newline"
    (root.path / "agent/x.d/result.md").write_bytes(data)
    process = subprocess.run([CLIENT, "result", "x"], capture_output=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, data, b"")


def test_contents_are_escaped_on_a_terminal(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="dead")
    (root.path / "agent/x.d/result.md").write_bytes("é\x1b[31m\ttab\n".encode() + b"\xff")
    ours, theirs = pty.openpty()
    process = spawned("result", "x", stdout=theirs)
    assert process.wait() == 0
    os.close(theirs)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert "é\\x1b[31m" in shown and "\\xff" in shown and "\x1b" not in shown


def test_a_closed_pipe_ends_quietly(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="dead", out="line\n" * 100_000)
    process = spawned("log", "x")
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""


# --- reasons ------------------------------------------------------------------------------------

LIFE = "agent/x.d/life"


@pytest.mark.parametrize("at_close", [False, True])
def test_the_daemons_reason_is_shown(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, at_close: bool
) -> None:
    root.agent("x")
    root.reject("EINVAL", LIFE, '"forever" is none of: owned, temp, detached')
    refuse(monkeypatch, "life", errno.EINVAL, at_close)
    status, out, err = run("set", "x", "life", "forever")
    assert (status, out) == (1, "")
    assert err == f'ctx: {LIFE}: "forever" is none of: owned, temp, detached (EINVAL)\n'


@pytest.mark.parametrize(
    ("code", "path", "ago"),
    [
        ("EACCES", LIFE, 0),
        ("EINVAL", "agent/xy.d/life", 0),
        ("EINVAL", "agent/y.d/life", 0),
        ("EINVAL", LIFE, 5),
        ("path", LIFE, 0),
    ],
)
def test_somebody_elses_reason_is_not(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, code: str, path: str, ago: float
) -> None:
    root.agent("x")
    root.reject(code, path, "about something else", ago)
    refuse(monkeypatch, "life", errno.EINVAL)
    assert run("set", "x", "life", "forever")[2] == f"ctx: {LIFE}: not accepted (EINVAL)\n"


@pytest.mark.parametrize("content", [b"", b"\n", b"x", b"2026 EINVAL\n", b"\xff\x00 \xfe \xfd: y"])
def test_a_strange_error_file_is_survived(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    root.agent("x")
    (root.path / "error").write_bytes(content)
    refuse(monkeypatch, "life", errno.EINVAL)
    assert run("set", "x", "life", "y")[2] == f"ctx: {LIFE}: not accepted (EINVAL)\n"


def test_reasons_are_escaped(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    root.agent("x")
    root.reject("EINVAL", LIFE, "\x1b]0;gotcha\x07")
    refuse(monkeypatch, "life", errno.EINVAL)
    assert "\x1b" not in run("set", "x", "life", "y")[2]


def test_no_daemon(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CTX_ROOT", str(tmp_path))
    status, _, err = run("ps")
    assert status == 1
    assert err.startswith(f"ctx: no ctxd answers at {tmp_path}; start it")


def test_a_dead_daemon(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.ENOTCONN, "")

    monkeypatch.setattr(client.os, "listdir", fail)
    assert "has died (ENOTCONN)" in run("ps")[2]


def test_unknown_agent_and_file(root: FakeRoot, run: Run) -> None:
    root.agent("x")
    assert run("get", "y", "status")[::2] == (1, 'ctx: no agent "y"\n')
    assert run("get", "x", "nope")[2].startswith("ctx: agent/x.d/nope: ")


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nope"],
        ["--rot", "/x", "ps"],
        ["--root"],
        ["help", "nope"],
        ["start"],
        ["get", "x"],
        ["get", "a/b", "status"],
        ["get", "x", "../y.d/status"],
        ["get", "x", "/etc/passwd"],
        ["set", "x", "life"],
        ["set", "x", "a", "b", "c"],
        ["wait", "-t", "5", "x"],
        ["wait", "-t", "٣s", "x"],
        ["log", "-n", "-1", "x"],
        ["spawn", "x"],
        ["spawn", "x", "true"],
        ["spawn", "x", "--rm", "--", "true"],
        ["spawn", "x", "--mount", "a:b:c", "--", "true"],
        ["spawn", "x", "--mount", "", "--", "true"],
        ["spawn", "x", "--mount", "a\tb", "--", "true"],
        ["spawn", "x", "--set", "life", "--", "true"],
        ["spawn", "x", "--wait", "--life", "temp", "--", "true"],
        ["spawn", "x", "--wait", "--set", "life=temp", "--", "true"],
        ["spawn", "x", "--", "echo", "a\nb"],
        ["send", "x"],
        ["events"],
    ],
)
def test_usage_errors(root: FakeRoot, run: Run, argv: list[str]) -> None:
    root.agent("x")
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err and "Traceback" not in err
    assert os.listdir(root.path / "agent") == ["x.d"]


@pytest.mark.parametrize("command", [command.name for command in client.COMMANDS])
def test_every_command_has_help(run: Run, command: str) -> None:
    *group, name = command.split()
    status, out, err = run("help", *group, name)
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: ctx {command} ")
    assert run(*group, name, "--help") == (0, out, "")
    assert f"\n  {name} " in run(*group, "--help")[1]


@pytest.mark.parametrize("group", client.GROUPS)
def test_every_group_has_help(run: Run, group: str) -> None:
    status, out, err = run("help", group)
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: ctx {group} [COMMAND]")
    assert run(group, "--help") == run(group, "-h") == (0, out, "")
    assert f"\n  {group} " in run("--help")[1]


@pytest.mark.parametrize(
    ("words", "name", "rest"),
    [
        (["ps", "task"], "ps", ["task"]),
        (["task"], "task list", []),
        (["task", "-a", "x"], "task list", ["-a", "x"]),
        (["task", "start", "list"], "task start", ["list"]),
        (["tool", "TaskList", "{}"], "tool call", ["TaskList", "{}"]),
        (["tool", "call", "list"], "tool call", ["list"]),
    ],
)
def test_the_longest_name_is_meant(words: list[str], name: str, rest: list[str]) -> None:
    command, left = client.find_command(words)
    assert (command.name, left) == (name, rest)


def test_unknown_commands_lead_to_help(run: Run) -> None:
    assert run("nope", "x")[2] == 'ctx: no command "nope"; see: ctx help\n'
    for argv in (["task", "nope"], ["help", "task", "nope"], ["help", "task", "list", "nope"]):
        status, _, err = run(*argv)
        assert status == 2 and err.endswith("; see: ctx help task\n")


def test_every_command_is_in_the_man_page() -> None:
    page = (CLIENT.parents[1] / "man" / "ctx.1").read_text()
    for command in client.COMMANDS:
        assert f".It Cm {command.name}" in page
        for flags, _ in command.arguments:
            for flag in flags:
                assert not flag.startswith("--") or f"Fl {flag[1:]}" in page or len(flags) > 1


def test_root_option_wins(root: FakeRoot, run: Run, tmp_path: Path) -> None:
    other = FakeRoot(tmp_path / "other")
    other.agent("y", status="idle")
    for argv in (["--root", str(other.path)], [f"--root={other.path}"]):
        assert "y " in run(*argv, "ps")[1]


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_duration(text: str, seconds: float) -> None:
    assert client.duration(text) == seconds


# --- looking ------------------------------------------------------------------------------------


def test_ps(root: FakeRoot, run: Run) -> None:
    root.agent("coder", status="busy", pid="42", run="r3")
    root.agent("rev", status="new", parent="agent:coder session:default run:r3")
    root.agent("old", status="dead", outcome="error", reason="start_failed:no \x1b such file")
    status, out, err = run("ps")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["NAME", "STATUS", "OUTCOME", "REASON", "PARENT", "RUN", "PID", "AGE"]
    assert [row[:7] for row in rows[1:]] == [
        ["coder", "busy", "-", "-", "operator", "r3", "42"],
        ["rev", "new", "-", "-", "agent:coder", "-", "-"],
    ]
    assert "start_failed:no \\x1b such file" in run("ps", "-a")[1]


def test_ps_json(root: FakeRoot, run: Run) -> None:
    root.agent("rev", status="new", parent="")
    (row,) = json.loads(run("ps", "--json")[1])
    assert row["name"] == "rev" and row["status"] == "new" and row["age"] in (0, 1)
    (root.path / "agent" / "rev.d" / "status").unlink()  # it just went away
    assert json.loads(run("ps", "-a", "--json")[1]) == []


def test_tree(root: FakeRoot, run: Run) -> None:
    root.agent("coder", status="busy")
    root.agent("a", status="dead", outcome="error", reason="exit:3", parent="agent:coder")
    root.agent("b", status="idle", parent="agent:coder")
    root.agent("a1", status="new", parent="agent:a")
    root.agent("solo", status="ready")
    assert run("tree")[1].splitlines() == [
        "coder  busy",
        "├─ a  dead error exit:3",
        "│  └─ a1  new",
        "└─ b  idle",
        "solo  ready",
    ]
    assert run("tree", "a")[1].splitlines() == ["a  dead error exit:3", "└─ a1  new"]
    assert run("tree", "nope")[::2] == (1, 'ctx: no agent "nope"\n')


RESTART = {"id": "e9", "type": "agent.status", "reason": "restart:2", "after": "exit:3"}


def test_between_two_runs(root: FakeRoot, run: Run) -> None:
    events = json.dumps(EVENT) + "\n" + json.dumps(RESTART) + "\n"
    root.agent("waits", status="starting", events=events)
    root.agent("starts", status="starting", run="r3", events=events)
    root.agent("untold", status="starting")
    assert run("tree")[1].splitlines() == [
        "starts  starting",
        "untold  starting",
        "waits  starting restart:2 after exit:3",
    ]
    assert "restart:2 after exit:3" in run("ps")[1]


def test_the_tree_tells_what_does_not_live_as_others_do(root: FakeRoot, run: Run) -> None:
    root.agent("top", status="busy", life="detached")
    for life in ("owned", "temp", "detached"):
        root.agent(life, status="paused", life=life, parent="agent:top")
    assert run("tree")[1].splitlines() == [
        "top  busy",
        "├─ detached  paused (detached)",
        "├─ owned  paused",
        "└─ temp  paused (temp)",
    ]


def test_tree_survives_a_circle(root: FakeRoot, run: Run) -> None:
    for name in ("a", "b"):
        root.agent(name, status="busy")
    (root.path / "agent/a.d/child/b").symlink_to("../../b.d")
    (root.path / "agent/b.d/child/a").symlink_to("../../a.d")
    assert run("tree", "a")[1].splitlines() == ["a  busy", "└─ b  busy"]


def test_result(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", outcome="done", reason="exit:0", result="all well")
    root.agent("b", status="dead", outcome="error", reason="oom")
    root.agent("c", status="busy", result="so far")
    assert run("result", "a") == (0, "all well", "")
    assert run("result", "b") == (0, "", "ctx: b ended without a result: error oom\n")
    assert run("result", "c") == (1, "so far", "ctx: c has not finished: its status is busy\n")


def test_log(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", out="1\n2\n3\n", log="x\ny")
    root.agent("b", status="dead", out="only\n")
    assert run("log", "a")[1] == "==> log <==\nx\ny\n==> out <==\n1\n2\n3\n"
    assert run("log", "b")[1] == "only\n"
    assert run("log", "--out", "a")[1] == "1\n2\n3\n"
    assert run("log", "--err", "a")[1] == "x\ny"


@pytest.mark.parametrize("text", ["", "\n", "a", "a\nb\nc\n", "a\nb\nc", "long\n" * 40_000])
@pytest.mark.parametrize("lines", [0, 1, 2, 50_000])
def test_last_lines(root: FakeRoot, run: Run, text: str, lines: int) -> None:
    root.agent("a", status="dead", out=text)
    expected = "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""
    assert run("log", "--out", "-n", str(lines), "a")[1] == expected


def test_log_follows_until_the_end(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy", out="1\n")
    process = spawned("log", "-f", "a")
    assert process.stdout.readline() == b"1\n"
    with (directory / "log").open("a") as log:
        log.write("oops\n")
    heading = [process.stdout.readline() for _ in range(3)]
    assert heading == [b"\n", b"==> log <==\n", b"oops\n"]
    with (directory / "out").open("a") as out:
        out.write("2\n")
    root.end("a", "done", "exit:0")
    assert process.communicate()[0] == b"\n==> out <==\n2\n"
    assert process.returncode == 0


def test_log_tells_that_the_agent_is_gone(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy", out="1\n")
    process = spawned("log", "-f", "a")
    assert process.stdout.readline() == b"1\n"
    eventually(lambda: has_open(process, directory / "wait"))
    fifo = os.open(directory / "wait", os.O_RDWR | os.O_NONBLOCK)
    shutil.rmtree(directory)
    os.close(fifo)
    assert process.communicate()[1] == b"ctx: a is gone: the last that it wrote may be missing\n"
    assert process.returncode == 0


EVENT = {"id": "e1", "ts": "2026-11-21T21:50:00.123Z", "type": "run.end", "run": "r1", "n": 3}


def test_events(root: FakeRoot, run: Run) -> None:
    lines = json.dumps(EVENT) + "\n" + "not \x1b json\n" + "[" * 60_000 + "\n"
    root.agent("a", status="dead", events=lines)
    status, out, _ = run("events", "a")
    assert status == 0
    assert out.splitlines()[:2] == [
        "2026-11-21T21:50:00.123Z run.end            run=r1 n=3",
        "not \\x1b json",
    ]
    assert run("events", "--json", "a")[1] == lines
    (root.path / "self").symlink_to("agent/a.d")
    assert run("events", "--json")[1] == lines


def test_events_follow_whole_lines_until_the_end(root: FakeRoot, spawned: Any) -> None:
    line = json.dumps(EVENT) + "\n"
    directory = root.agent("a", status="busy", events=line + line[:20])
    process = spawned("events", "-f", "--json", "a")
    assert process.stdout.readline() == line.encode()
    with (directory / "session" / "events.jsonl").open("a") as events:
        events.write(line[20:])
    root.end("a", "done", "exit:0")
    assert process.communicate()[0] == line.encode()
    assert process.returncode == 0


# --- making and changing ------------------------------------------------------------------------


def test_set_and_get(root: FakeRoot, run: Run) -> None:
    directory = root.agent("x")
    assert run("set", "x", "env", "A=1")[0] == 0
    assert (directory / "env").read_text() == "A=1\n"
    assert run("set", "x", "life=temp", "exec=sh -c 'a=b'")[0] == 0
    assert run("get", "x", "exec")[1] == "sh -c 'a=b'\n"
    assert run("set", "x", "handoff.md", "-", stdin=b"two\nlines")[0] == 0
    assert (directory / "handoff.md").read_bytes() == b"two\nlines"
    assert run("set", "x", "env", "-")[0] == 0
    assert (directory / "env").read_bytes() == b"\n"


@pytest.mark.usefixtures("made_agents_are_full")
def test_new(root: FakeRoot, run: Run) -> None:
    assert run("new", "x", "--parent", "coder", "life=temp", "env=A=1") == (0, "", "")
    directory = root.path / "agent" / "x.d"
    assert (directory / "parent").read_text() == "agent:coder\n"
    assert (directory / "life").read_text() == "temp\n"
    assert (directory / "env").read_text() == "A=1\n"


@pytest.mark.usefixtures("made_agents_are_full")
@pytest.mark.parametrize(
    "argv", [["new", "x", "life=forever"], ["spawn", "x", "--set", "life=forever", "--", "true"]]
)
def test_a_refused_agent_is_removed_again(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    root.reject("EINVAL", LIFE, "no such life")
    refuse(monkeypatch, "life", errno.EINVAL)
    assert run(*argv) == (1, "", f"ctx: {LIFE}: no such life (EINVAL)\n")
    assert os.listdir(root.path / "agent") == []


@pytest.mark.usefixtures("made_agents_are_full")
def test_the_task_is_written_before_the_parent(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is somebody's private child, its task is that one's to write."""
    written: list[str] = []
    write = client.Root.write

    def note(self: Any, relative: str, data: bytes) -> None:
        written.append(relative.rpartition("/")[2])
        write(self, relative, data)

    monkeypatch.setattr(client.Root, "write", note)
    run("spawn", "x", "--parent", "p", "--set", "life=owned", "--", "true", stdin=b"the task")
    assert written == ["handoff.md", "parent", "life", "exec", "ctl"]


def test_taken_names(root: FakeRoot, run: Run) -> None:
    root.agent("x")
    assert run("new", "x")[::2] == (1, "ctx: agent/x.d: exists already (EEXIST)\n")
    assert (root.path / "agent/x.d/status").exists()


def test_rm_goes_on(root: FakeRoot, run: Run) -> None:
    for name in ("a", "b"):
        (root.path / "agent" / f"{name}.d").mkdir()
    assert run("rm", "a", "nope", "b") == (1, "", 'ctx: no agent "nope"\n')
    assert os.listdir(root.path / "agent") == []


@pytest.mark.parametrize("verb", ["start", "stop", "kill", "pause", "resume", "reset"])
def test_verbs(root: FakeRoot, run: Run, verb: str) -> None:
    directories = [root.agent(name, status="busy") for name in ("a", "b")]
    assert run(verb, "a", "nope", "b") == (1, "", 'ctx: no agent "nope"\n')
    assert run(verb, "a", "b")[0] == 0
    assert {(directory / "ctl").read_text() for directory in directories} == {verb + "\n"}


def test_stop_waits(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy")
    process = spawned("stop", "--wait", "a")
    eventually(lambda: has_open(process, directory / "wait"))
    assert process.poll() is None
    assert (directory / "ctl").read_text() == "stop\n"
    root.end("a", "cancelled", "operator_stop")
    assert process.wait() == 0


# --- waiting ------------------------------------------------------------------------------------


def test_wait_for_the_dead(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", outcome="done", reason="exit:0")
    root.agent("b", status="dead", outcome="error", reason="exit:3")
    assert run("wait", "a") == (0, "a done exit:0\n", "")
    status, out, _ = run("wait", "a", "b", "a")
    assert (status, sorted(out.splitlines())) == (1, ["a done exit:0", "b error exit:3"])
    assert run("wait", "a", "nope") == (1, "", 'ctx: no agent "nope"\n')


def test_wait_for_the_living(root: FakeRoot, spawned: Any) -> None:
    directories = [root.agent(name, status="busy") for name in ("a", "b")]
    process = spawned("wait", "a", "b")
    eventually(lambda: all(has_open(process, path / "wait") for path in directories))
    root.end("b", "done", "exit:0")
    assert process.stdout.readline() == b"b done exit:0\n"
    assert process.poll() is None
    root.end("a", "done", "self_stop")
    assert process.communicate() == (b"a done self_stop\n", b"")
    assert process.returncode == 0


STOP = {"id": "e7", "type": "agent.stop", "status": "error", "reason": "exit:3"}


def test_the_end_of_one_that_is_gone_is_in_its_session(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy", life="temp")
    session = root.path / "home" / "0" / "agent" / "a" / "session" / "default"
    session.parent.mkdir(parents=True)
    (directory / "session").rename(session)
    (directory / "session").symlink_to("../../home/0/agent/a/session/default")
    process = spawned("wait", "a")
    eventually(lambda: has_open(process, directory / "wait"))
    (session / "events.jsonl").write_text(f"{json.dumps(EVENT)}\n{json.dumps(STOP)}\n")
    fifo = os.open(directory / "wait", os.O_RDWR | os.O_NONBLOCK)
    shutil.rmtree(directory)
    os.close(fifo)
    assert process.communicate() == (b"a error exit:3\n", b"")
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("status", "outcome"), [("done\n", "done"), ("cancelled\n", "cancelled"), ("pending\n", "")]
)
def test_the_end_of_a_child_that_is_gone_is_in_the_channel(
    root: FakeRoot, status: str, outcome: str
) -> None:
    channel = root.path / "self" / "session" / "context" / "child" / "kid"
    channel.mkdir(parents=True)
    (channel / "status").write_text(status)
    assert client.ending(client.Root(str(root.path)), "kid") == (outcome, "")


def test_wait_times_out(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="busy")
    root.agent("b", status="dead", outcome="done", reason="exit:0")
    expected = (124, "b done exit:0\n", "ctx: not ended in time: a\n")
    assert run("wait", "-t", "20ms", "a", "b") == expected


def test_wait_is_interrupted(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy")
    process = spawned("wait", "a")
    eventually(lambda: has_open(process, directory / "wait"))
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130


# --- spawn --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/a", "/a\t/a\tro\t-"),
        ("/a:rw", "/a\t/a\trw\t-"),
        ("/a:/b", "/a\t/b\tro\t-"),
        ("/a:/b:hide", "/a\t/b\thide\t-"),
        ("/a b/../c d:/e f:rw", "/c d\t/e f\trw\t-"),
        ("sub", "{cwd}/sub\t{cwd}/sub\tro\t-"),
        (".:/src:rw", "{cwd}\t/src\trw\t-"),
    ],
)
def test_mount_line(text: str, line: str) -> None:
    assert client.mount_line(text) == line.format(cwd=os.getcwd())


@pytest.mark.usefixtures("made_agents_are_full")
def test_spawn_writes_everything(root: FakeRoot, run: Run) -> None:
    argv = [
        "spawn",
        "x",
        "--parent",
        "p",
        "--mount",
        "/a:/b:rw",
        "--mount",
        "/c",
        "--env",
        "A=1",
        "--env",
        "B=2",
        "--cwd",
        "/w",
    ]
    argv += ["--life", "temp", "--restart", "no", "--limit", "grace=1s", "--timeout", "10m"]
    argv += ["--", "echo", "--wait", "it's", ""]
    assert run(*argv, stdin=b"the task") == (0, "x\n", "")
    directory = root.path / "agent" / "x.d"
    expected = {
        "parent": "agent:p\n",
        "mount": "/a\t/b\trw\t-\n/c\t/c\tro\t-\n",
        "env": "A=1\nB=2\n",
        "cwd": "/w\n",
        "life": "temp\n",
        "restart": "no\n",
        "limits": "grace=1s\ntimeout=10m\n",
        "exec": "echo --wait 'it'\"'\"'s' ''\n",
        "handoff.md": "the task",
        "ctl": "start\n",
    }
    assert {file: (directory / file).read_text() for file in expected} == expected


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        (["spawn", "--rm", "x", "--", "sh", "--", "-h"], "program", ["sh", "--", "-h"]),
        (["send", "x", "--", "--help"], "text", ["--help"]),
        (["send", "x", "--priority", "next", "a", "--", "-b"], "text", ["a", "-b"]),
        (["new", "x", "--parent", "p", "a=-b"], "files", ["a=-b"]),
        (["set", "x", "--", "a", "-5"], "values", ["a", "-5"]),
    ],
)
def test_words_that_look_like_options(argv: list[str], field: str, expected: list[str]) -> None:
    args = client.parse(argv)[2]
    assert args.name == "x" and getattr(args, field) == expected


@pytest.mark.usefixtures("made_agents_are_full")
def test_spawn_waits(root: FakeRoot, run: Run) -> None:
    directory = root.path / "agent" / "x.d"

    def live() -> None:
        eventually(lambda: (directory / "ctl").exists() and (directory / "ctl").read_text() > "\n")
        (directory / "out").write_text("to stdout\n")
        (directory / "log").write_text("to stderr\n")
        root.end("x", "error", "exit:3")

    thread = threading.Thread(target=live)
    thread.start()
    result = run("spawn", "x", "--wait", "--rm", "--", "true")
    thread.join()
    assert result == (3, "to stdout\n", "to stderr\n")
    assert not directory.exists()


@pytest.mark.usefixtures("made_agents_are_full")
def test_ctrl_c_stops_then_kills(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = root.path / "agent" / "x.d"
    written: list[str] = []

    def note(root: Any, owner: str, verb: str) -> None:
        assert owner == "agent/x.d"
        written.append(verb)

    monkeypatch.setattr(client, "control", note)

    def live() -> None:
        for step in (["start"], ["start", "stop"], ["start", "stop", "kill"]):
            eventually(lambda step=step: written == step)  # type: ignore[misc]
            if len(step) < 3:
                os.kill(os.getpid(), signal.SIGINT)
        root.end(directory.name[:-2], "cancelled", "operator_stop")

    thread = threading.Thread(target=live)
    thread.start()
    status, _, err = run("spawn", "x", "--wait", "--", "true")
    thread.join()
    assert status == 130
    assert err.splitlines() == [
        "ctx: x: stop (Ctrl-C again kills it)",
        "ctx: x: kill",
        "ctx: x: cancelled operator_stop",
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("outcome", "reason", "status"),
    [
        ("done", "exit:0", 0),
        ("done", "self_stop", 0),
        ("error", "exit:3", 3),
        ("error", "signal:9", 137),
        ("error", "signal:15,unkillable", 143),
        ("error", "oom", 137),
        ("error", "start_failed:no such file", 126),
        ("error", "exit:many", 1),
        ("cancelled", "operator_stop", 130),
        ("cancelled", "parent_dead", 130),
        ("cancelled", "timeout", 124),
        ("cancelled", "timeout,unkillable", 124),
        ("interrupted", "reboot", 1),
        ("", "", 1),
    ],
)
def test_exit_status(outcome: str, reason: str, status: int) -> None:
    assert client.exit_status(outcome, reason) == status


# --- messages -----------------------------------------------------------------------------------


class FakeAgent:
    """An agent's socket that answers one request with prepared frames."""

    def __init__(self, root: FakeRoot, *frames: dict[str, Any], name: str = "x") -> None:
        self.requests: list[dict[str, Any]] = []
        self.frames = frames
        self.socket = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(root.path / "agent")  # socket addresses are short
        self.socket.bind(f"{name}.sock")
        os.chdir(here)
        self.socket.listen()
        self.thread = threading.Thread(target=self.answer, daemon=True)
        self.thread.start()

    def answer(self) -> None:
        connection, _ = self.socket.accept()
        with connection, connection.makefile("rb") as lines:
            for frame in self.frames:
                if frame.get("type") in ("start", "resumed"):  # each answers a request
                    self.requests.append(json.loads(lines.readline()))
                ident = self.requests[0]["id"] if self.requests else None
                connection.sendall(json.dumps({"id": ident, **frame}).encode() + b"\n")
        self.socket.close()


START, DONE = {"type": "start"}, {"type": "done"}


def delta(text: str) -> dict[str, Any]:
    return {"type": "delta", "text": text}


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "text": text}


@pytest.mark.parametrize(
    ("frames", "out", "status"),
    [
        ([START, message("hello"), DONE], "hello\n", 0),
        ([START, delta("hel"), delta("lo\n"), message("hello\n"), DONE], "hello\n", 0),
        ([START, delta("hel"), message("hello"), DONE], "hello\n", 0),
        ([START, delta("hello\n"), message("hello"), DONE], "hello\n", 0),
        ([START, delta("thinking"), message("hello"), DONE], "thinking\nhello\n", 0),
        ([START, {**delta("not ours"), "id": "other"}, message("a"), DONE], "a\n", 0),
        ([START, {"type": "news"}, message("a"), DONE], "a\n", 0),
        ([START, {**DONE, "status": "processed"}], "", 0),
        ([START, {**DONE, "status": "failed"}], "", 1),
        ([START, {**DONE, "status": "aborted"}], "", 130),
        ([START, {"type": "error", "text": "no"}], "", 1),
        ([START, {"type": "error", "code": "EACCES", "message": "no"}], "", 13),
        ([{"type": "error", "code": "EACCES", "message": "no"}], "", 13),
        ([START, {"type": "error", "code": "ESRCH", "message": "no"}], "", 69),
        ([START, delta("a")], "a\n", 1),
    ],
)
def test_send(root: FakeRoot, run: Run, frames: Any, out: str, status: int) -> None:
    root.agent("x", status="idle")
    fake = FakeAgent(root, *frames)
    result, shown, err = run("send", "--priority", "next", "x", "fix", "it")
    fake.thread.join()
    assert (result, shown) == (status, out)
    assert "Traceback" not in err
    if fake.requests:
        (request,) = fake.requests
        assert len(request.pop("id")) >= 16
        assert request == {"op": "send", "input": "fix it", "priority": "next"}


def test_ctrl_c_cancels_the_message(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="idle")
    fake = FakeAgent(root, START, delta("so far\n"), {"type": "resumed"}, DONE)
    process = spawned("send", "x", "fix it")
    assert process.stdout.readline() == b"so far\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == b""
    assert process.returncode == 130
    assert fake.requests[1] == {"op": "cancel", "id": fake.requests[0]["id"]}


def test_not_running(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="dead")
    assert run("send", "x", "hi")[::2] == (69, "ctx: x is not running: its status is dead\n")
    assert run("send", "y", "hi")[::2] == (69, 'ctx: no agent "y"\n')


@pytest.mark.parametrize("stdin", [b"", b" \n", b"\xff"])
def test_bad_texts(root: FakeRoot, run: Run, stdin: bytes) -> None:
    assert run("send", "x", stdin=stdin)[0] == 2


def test_a_handle_is_the_agent_it_is_named_after(root: FakeRoot, tmp_path: Path) -> None:
    root.agent("coder", status="idle")
    handle = root.path / "agent" / "coder"
    shutil.copy(CLIENT, handle)
    link = tmp_path / "link"
    link.symlink_to(handle)
    for program, argv, stdin, text in (
        (handle, ["--root", "fix"], b"", "--root fix"),
        (handle, ["--", "-h"], b"", "-h"),
        (link, [], b"from stdin\n", "from stdin\n"),
    ):
        fake = FakeAgent(root, START, message("done it"), DONE, name="coder")
        environment = {**os.environ, "CTX_ROOT": "/nowhere"}
        process = subprocess.run(
            [program, *argv], input=stdin, capture_output=True, env=environment
        )
        fake.thread.join()
        assert (process.returncode, process.stdout, process.stderr) == (0, b"done it\n", b"")
        assert fake.requests[0]["input"] == text
        (root.path / "agent" / "coder.sock").unlink()
    process = subprocess.run([handle, "hi"], capture_output=True)
    assert process.returncode == 69
    assert subprocess.run([handle, "--help"], capture_output=True).returncode == 0
    assert subprocess.run([handle], stdin=subprocess.DEVNULL, capture_output=True).returncode == 2


# --- doctor -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "level"), [("5.13.9", "FAIL"), ("5.14.0-rc1", "ok"), ("6.18.1+", "ok")]
)
def test_kernels(release: str, level: str) -> None:
    assert client.check_kernel(release)[0] == level


def test_fuse_device(tmp_path: Path) -> None:
    level, what, remedy = client.check_fuse(str(tmp_path / "fuse"))
    assert level == "FAIL" and "No such file" in what and "modprobe" in remedy
    (tmp_path / "fuse").touch()
    assert client.check_fuse(str(tmp_path / "fuse"))[0] == "ok"


def test_cgroups(tmp_path: Path) -> None:
    line = f"41 31 0:38 / {tmp_path} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    found = list(client.check_cgroups("1 0 8:1 / / rw - ext4 /dev/sda rw\n" + line))
    assert [level for level, _, _ in found] == ["ok", "warn"]
    assert "memory" in found[1][1] and "EOPNOTSUPP" in found[1][1]
    (tmp_path / "group").mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    assert [level for level, _, _ in client.check_cgroups(line)] == ["FAIL", "ok"]
    assert [level for level, _, _ in client.check_cgroups("")] == ["FAIL"]


@pytest.mark.parametrize(
    ("file", "value", "level"),
    [
        ("user/max_user_namespaces", "0", "FAIL"),
        ("kernel/unprivileged_userns_clone", "0", "FAIL"),
        ("kernel/unprivileged_userns_clone", "1", "ok"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "warn"),
    ],
)
def test_namespaces(tmp_path: Path, file: str, value: str, level: str) -> None:
    for directory in ("user", "kernel"):
        (tmp_path / directory).mkdir()
    (tmp_path / "user" / "max_user_namespaces").write_text("100\n")
    (tmp_path / file).write_text(value + "\n")
    assert client.check_namespaces(str(tmp_path))[0] == level


def test_a_users_own_cgroup(tmp_path: Path) -> None:
    line = f"41 31 0:38 / {tmp_path} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    own = tmp_path / "user" / "ctxd"
    own.mkdir(parents=True)
    for path, text in ((tmp_path, "cpu memory pids\n"), (own, "memory pids\n")):
        (path / "cgroup.controllers").write_text(text)
    (tmp_path / "user" / "cgroup.kill").touch()
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (own / name).touch()
    (own / "daemon").mkdir()
    for below in ("/user/ctxd", "/user/ctxd/daemon"):
        (tmp_path / below[1:] / "cgroup.controllers").write_text("memory pids\n")
        found = list(client.check_cgroups(line, below))
        assert [level for level, _, _ in found] == ["ok", "warn", "ok"]
        assert found[1][1].startswith("no cpu controller") and "Delegate=" in found[1][2]
        assert found[2][1] == f"the cgroup {own} is yours"
    level, _, remedy = client.check_delegated(str(tmp_path))
    assert level == "warn" and remedy.startswith("systemd-run --user --scope -p Delegate=yes ctxd")


def test_mounts_of_a_user(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    mounts = "27 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"
    assert [each[0] for each in client.check_mounts(mounts, str(directory))] == ["ok", "warn"]
    mounts += f"28 27 0:26 / {tmp_path} rw - tmpfs none rw\n"
    mounts += f"29 27 0:30 / {client.FUSECTL} rw shared:3 - fusectl none rw\n"
    found = list(client.check_mounts(mounts, str(directory)))
    assert [each[0] for each in found] == ["warn", "ok"]
    assert f"({tmp_path})" in found[0][1]


def test_whose_daemon_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = client.Root(str(tmp_path))
    assert not client.is_rootless(root, 0)
    assert client.is_rootless(root, 1000) == (tmp_path.stat().st_uid != 0)
    assert client.is_rootless(client.Root("/no/such"), 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert client.default_root() == "/ctx"
    (tmp_path / "ctx").symlink_to("/gone")
    assert client.default_root() == str(tmp_path / "ctx")


def test_what_is_weaker_without_root_is_listed(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "is_rootless", lambda root, uid: True)
    weak = [line for line in run("doctor")[1].splitlines() if line.startswith("weak  ")]
    assert len(weak) == len(client.WEAKER) > 5


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "find_program", lambda name: "/usr/bin/git" * (name == "git"))
    levels = {what.split()[0]: level for level, what, _ in client.check_programs(1000)}
    assert levels == {
        "bwrap": "FAIL",
        "setpriv": "FAIL",
        "fusermount3": "FAIL",
        "git:": "ok",
    }
    assert not any("fusermount3" in what for _, what, _ in client.check_programs(0))


def test_doctor(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("doctor")
    levels = [line.split()[0] for line in out.splitlines()]
    assert set(levels) <= {"ok", "warn", "FAIL", "weak"}
    assert status == ("FAIL" in levels)
    assert f"ctxd at {root.path} is ready: version=1.2 mount=/ctx" in out
    (root.path / "status").unlink()
    rows = json.loads(run("doctor", "--json")[1])
    rows = [row for row in rows if row["level"] != "weak"]
    assert len(rows) == len(levels) - levels.count("weak") and rows[-1]["level"] == "warn"
    monkeypatch.setattr(client, "findings", lambda root: iter([("FAIL", "all", "")]))
    assert run("doctor") == (1, "FAIL  all\n", "")
