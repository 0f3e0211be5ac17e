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
import tracemalloc
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
    *("life", "cwd", "restart", "mode", "context", "workspace", "model"),
)
EMPTY = ("out", "log", "result.md", "handoff.md", "inbox", "queue")
PARTS = {
    "task": "kind title cmd cwd env accepts_input status exit output preview input ctl work",
    "work": "objective plan.md acceptance.md status blocked_by parent created_at updated_at",
    "waiting": "on work deadline status payload token",
}


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
        for name in ("child", "session", *PARTS):
            (directory / name).mkdir()
        (directory / "work" / "current").write_text("")
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

    def fill_part(self, directory: Path, **values: str) -> None:
        """Fill the directory of a task, a work item or a wait."""
        for file in PARTS[directory.parent.name].split():
            value = values.get(file.removesuffix(".md"), "")
            (directory / file).write_text(value + "\n" * bool(value))
        if directory.parent.name == "task":
            os.mkfifo(directory / "wait")

    def part(self, plane: str, name: str, of: str = "x", **values: str) -> Path:
        directory = self.path / "agent" / f"{of}.d" / plane / name
        directory.mkdir()
        self.fill_part(directory, **values)
        return directory

    def end(self, name: str, outcome: str, reason: str) -> None:
        """End an agent as the daemon does."""
        directory = self.path / "agent" / f"{name}.d"
        self.record_end(directory, outcome=outcome, reason=reason, status="dead")

    def record_end(self, directory: Path, **values: str) -> None:
        """Record the end of an agent or a task, replace the FIFO, release its readers."""
        for file, value in values.items():
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
        if not isinstance(path, str):
            return  # it is of the test, which fills it itself
        if path.endswith(".d"):
            root.fill(Path(path))
        elif Path(path).parent.name in PARTS:
            root.fill_part(Path(path))

    def remove(path: str) -> None:
        subprocess.run(["rm", "-r", path], check=True)

    monkeypatch.setattr(client.os, "mkdir", fill)
    monkeypatch.setattr(client.os, "rmdir", remove)


@pytest.fixture
def inside(root: FakeRoot) -> Path:
    """An agent `x` that the client runs in."""
    (root.path / "self").symlink_to("agent/x.d")
    return root.agent("x", status="busy")


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


def is_asleep(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process waits: Python looks at signals later if they come just before."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("S")


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
        ["run", "y", "--message", "hi"],
        ["run", "y", "--", "true"],
        ["run", "y", "--mode", "once", "--message", "hi", "--", "true"],
        ["run", "y", "--set", "mode=once", "--message", "hi", "--", "true"],
        ["send", "x"],
        ["events"],
        ["abort", "x", "--run", "r1\nkill"],
        ["session", "x"],
        ["session", "x", "a\nkill"],
        ["queue"],
        ["task"],
        ["task", "show", "t"],
        ["task", "show", "-a", "x", "a/b"],
        ["task", "show", "-a", "x", ".."],
        ["task", "show", "-a", "a/b", "t"],
        ["task", "start", "-a", "x"],
        ["task", "start", "-a", "x", "--name", "", "--", "true"],
        ["task", "input", "-a", "x", "t"],
        ["work", "new", "-a", "x"],
        ["work", "set", "-a", "x", "w", "../status", "done"],
        ["waits", "add", "-a", "x", "w"],
        ["tool", "show", "a/b"],
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


ASKED: dict[str, Any] = {"type": "the next request is awaited"}


class FakeAgent:
    """A socket that answers each connection with prepared frames."""

    def __init__(
        self, root: FakeRoot, *frames: dict[str, Any], path: str = "agent/x.sock", times: int = 1
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.frames = frames
        self.times = times
        self.socket = socket.socket(socket.AF_UNIX)
        directory = os.open((root.path / path).parent, os.O_PATH)
        self.socket.bind(f"/proc/self/fd/{directory}/{Path(path).name}")  # addresses are short
        os.close(directory)
        self.socket.listen()
        self.thread = threading.Thread(target=self.answer, daemon=True)
        self.thread.start()

    def answer(self) -> None:
        for _ in range(self.times):
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rb") as lines:
                self.answer_one(connection, lines)
        self.socket.close()

    def answer_one(self, connection: socket.socket, lines: Any) -> None:
        for frame in self.frames:
            if frame is ASKED or frame.get("type") in ("start", "resumed"):
                line = lines.readline()
                if not line:
                    return  # only whether there is an answer was of interest
                self.requests.append(json.loads(line))
            if frame is not ASKED:
                ident = self.requests[-1]["id"] if self.requests else None
                connection.sendall(json.dumps({"id": ident, **frame}).encode() + b"\n")


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


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ({"status": "failed", "reason": "exit:3"}, 1, "x: failed exit:3"),
        ({"status": "aborted", "reason": "operator_aborted"}, 130, "x: aborted operator_aborted"),
        ({"status": "dropped"}, 130, "x: dropped"),
        ({"type": "error", "code": "EBUSY", "message": "x is dead"}, 1, "x is dead (EBUSY)"),
    ],
)
def test_what_became_of_a_message_is_said(
    root: FakeRoot, run: Run, end: dict[str, Any], status: int, said: str
) -> None:
    root.agent("x", status="idle")
    FakeAgent(root, START, delta("so far"), {**DONE, **end})
    assert run("send", "x", "hi") == (status, "so far\n", f"ctx: {said}\n")


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
        fake = FakeAgent(root, START, message("done it"), DONE, path="agent/coder.sock")
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


# --- talking ------------------------------------------------------------------------------------


class Obeying:
    """What the daemon does about verbs, done as they are written."""

    def __init__(
        self, root: FakeRoot, monkeypatch: pytest.MonkeyPatch, **verbs: Callable[[], object]
    ) -> None:
        self.written: list[str] = []
        write = client.Root.write

        def obey(root: Any, relative: str, data: bytes) -> None:
            write(root, relative, data)
            if relative.endswith("/ctl"):
                self.written.append(data.decode().strip())
                verbs[self.written[-1]]()

        monkeypatch.setattr(client.Root, "write", obey)


def set_status(root: FakeRoot, status: str, name: str = "x") -> None:
    (root.path / "agent" / f"{name}.d" / "status").write_text(status + "\n")


@pytest.fixture
def turning(root: FakeRoot, made_agents_are_full: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a started agent answer with these frames, once a connection has been tried in vain."""

    def prepare(*frames: dict[str, Any]) -> tuple[Obeying, list[FakeAgent]]:
        fakes: list[FakeAgent] = []
        connect = client.connect

        def try_first(*args: Any) -> Any:
            try:
                return connect(*args)
            finally:
                if not fakes:
                    fakes.append(FakeAgent(root, *frames))
                    set_status(root, "idle")

        monkeypatch.setattr(client, "connect", try_first)
        verbs = {
            "start": lambda: set_status(root, "starting"),
            "stop": lambda: root.end("x", "done", "self_stop"),
        }
        return Obeying(root, monkeypatch, **verbs), fakes

    return prepare


def test_run_leaves_nothing_behind(root: FakeRoot, run: Run, turning: Any) -> None:
    obeying, fakes = turning(START, message("four"), {**DONE, "status": "processed"})
    argv = ["run", "x", "--env", "A=1", "--", "cat", "-"]
    assert run(*argv, stdin=b"two and two?\n") == (0, "four\n", "")
    assert obeying.written == ["start", "stop"]
    assert fakes[0].requests[0]["input"] == "two and two?\n"
    assert os.listdir(root.path / "agent") == ["x.sock"]


def test_run_keeps_what_it_is_told_to(root: FakeRoot, run: Run, turning: Any) -> None:
    obeying, _ = turning(START, message("four"), DONE)
    argv = ["run", "--keep", "x", "--message", "two and two?", "--model", "small", "--", "cat"]
    assert run(*argv, stdin=b"not read") == (0, "four\n", "")
    assert obeying.written == ["start"]
    directory = root.path / "agent" / "x.d"
    expected = {"mode": "turn\n", "exec": "cat\n", "model": "small\n", "handoff.md": ""}
    assert {file: (directory / file).read_text() for file in expected} == expected
    (root.path / "agent" / "x.sock").unlink()
    fake = FakeAgent(root, START, message("five"), DONE)
    assert run("run", "x", "--message", "and one?", "--", "cat") == (0, "five\n", "")
    assert fake.requests[0]["input"] == "and one?"
    assert obeying.written == ["start"] and directory.exists()
    refused = run("run", "x", "--message", "?", "--", "dog")
    assert refused == (1, "", "ctx: x is there already, and executes: cat\n")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ({"status": "failed", "reason": "exit:3"}, 3),
        ({"status": "failed", "reason": "signal:9"}, 137),
        ({"status": "failed", "reason": "start_failed:no such file"}, 126),
        ({"status": "failed", "reason": "timeout"}, 124),
        ({"status": "failed"}, 1),
        ({"status": "aborted", "reason": "operator_aborted"}, 130),
        ({"type": "error", "code": "EACCES", "message": "no"}, 13),
    ],
)
def test_run_exits_as_the_program_did(
    root: FakeRoot, run: Run, turning: Any, end: dict[str, Any], status: int
) -> None:
    turning(START, {**DONE, **end})
    assert run("run", "x", "--mode", "resident", "--message", "hi", "--", "cat")[0] == status
    assert not (root.path / "agent" / "x.d").exists()


@pytest.mark.usefixtures("made_agents_are_full")
def test_run_of_what_cannot_start(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Obeying(
        root,
        monkeypatch,
        start=lambda: root.end("x", "error", "start_failed:no such file"),
        stop=lambda: None,
    )
    said = "ctx: x: error start_failed:no such file\n"
    assert run("run", "x", "--message", "hi", "--", "cat") == (126, "", said)
    assert os.listdir(root.path / "agent") == []


def test_chat_of_a_pipe(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="idle")
    fake = FakeAgent(root, START, message("yes"), DONE, times=3)
    assert run("chat", "x", stdin=b"one\n\n  two") == (0, "yes\nyes\n", "")
    fake.thread.join()
    assert [request["input"] for request in fake.requests] == ["one", "  two"]


def test_chat_of_a_pipe_goes_on_and_tells_the_first_failure(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="idle")
    failed = {**DONE, "status": "failed", "reason": "exit:3"}
    fake = FakeAgent(root, START, failed, times=3)
    assert run("chat", "x", stdin=b"one\ntwo\n") == (1, "", "ctx: x: failed exit:3\n" * 2)
    assert len(fake.requests) == 2
    (root.path / "agent" / "x.sock").unlink()
    set_status(root, "dead")
    assert run("chat", "x", stdin=b"one\n")[0] == 69


def read_until(fd: int, text: str) -> str:
    """Return what a terminal shows up to a text."""
    shown = ""
    while text not in shown:
        shown += os.read(fd, 4096).decode()
    return shown


def test_chat_at_a_terminal(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="idle")
    ours, theirs = pty.openpty()
    fake = FakeAgent(root, START, delta("hm\n"), {"type": "resumed"}, DONE, times=2)
    process = spawned("chat", "x", stdin=theirs, stdout=theirs)
    os.close(theirs)
    read_until(ours, "x> ")
    os.write(ours, b"never sent")
    read_until(ours, "never sent")
    eventually(lambda: is_asleep(process))
    process.send_signal(signal.SIGINT)
    read_until(ours, "x> ")
    os.write(ours, b"question\n")
    read_until(ours, "hm")
    eventually(lambda: is_asleep(process))
    process.send_signal(signal.SIGINT)  # cancels the message alone
    read_until(ours, "x> ")
    assert [request["op"] for request in fake.requests] == ["send", "cancel"]
    assert fake.requests[0]["input"] == "question"
    os.write(ours, b"\x04")
    assert process.wait() == 0
    os.close(ours)
    assert process.stderr.read() == b""


def test_abort_and_session(root: FakeRoot, run: Run) -> None:
    directory = root.agent("x", status="busy")
    for argv, line in (
        (["abort", "x"], "abort"),
        (["abort", "x", "--run", "r7"], "abort r7"),
        (["session", "x", "other"], "session other"),
    ):
        assert run(*argv) == (0, "", "")
        assert (directory / "ctl").read_text() == line + "\n"


def test_queue(root: FakeRoot, run: Run, inside: Path) -> None:
    queued = {"id": "m1", "ts": "2026-11-21T21:50:00.123Z", "from": "agent:y"}
    queued["provenance"] = "agent"
    line = json.dumps({**queued, "priority": "next", "text": "do\x1b this\nand that"}) + "\n"
    (inside / "queue").write_text(line + "not json\n")
    header, row = run("queue")[1].splitlines()
    assert header.split() == ["ID", "TS", "FROM", "PROVENANCE", "PRIORITY", "TEXT"]
    assert row.split() == [*queued.values(), "next", "do\\x1b", "this…"]
    assert run("queue", "x", "--json") == (0, line + "not json\n", "")


# --- tasks, work items and waits ----------------------------------------------------------------


def test_task_list(root: FakeRoot, run: Run, inside: Path) -> None:
    root.part("task", "t-10", kind="command_task", status="running", cmd="make\nmake install")
    root.part("task", "t-9", kind="command_task", status="queued", title="later")
    root.part("task", "kid", kind="child_agent_task", status="completed", exit="exit:0")
    rows = [line.split() for line in run("task", "list")[1].splitlines()]
    assert rows == [
        ["TASK", "KIND", "STATUS", "EXIT", "TITLE"],
        ["t-9", "command_task", "queued", "-", "later"],
        ["t-10", "command_task", "running", "-", "make…"],
    ]
    assert run("task") == run("task", "-a", "x") == run("task", "list")
    assert "kid" in run("task", "list", "--all")[1]
    shown = json.loads(run("task", "--all", "--json")[1])
    assert [(row["name"], row["exit"]) for row in shown] == [
        ("kid", "exit:0"),
        ("t-9", ""),
        ("t-10", ""),
    ]


def test_task_show(root: FakeRoot, run: Run, inside: Path) -> None:
    root.part("task", "t", status="failed", exit="exit:3", preview="one\n\x1btwo\tthree")
    assert run("task", "show", "t")[1] == (
        "name: t\nstatus: failed\nexit: exit:3\npreview:\n  one\n  \\x1btwo\tthree\n"
    )
    facts = json.loads(run("task", "show", "-a", "x", "--json", "t")[1])
    assert facts["exit"] == "exit:3" and facts["preview"] == "one\n\x1btwo\tthree"


@pytest.mark.parametrize(
    "argv",
    [
        ["task", "show", "nope"],
        ["task", "output", "nope"],
        ["task", "stop", "nope"],
        ["task", "wait", "nope"],
        ["task", "rm", "nope"],
        ["task", "input", "nope", "text"],
    ],
)
def test_unknown_tasks(run: Run, inside: Path, argv: list[str]) -> None:
    assert run(*argv) == (1, "", 'ctx: no task "nope"\n')
    assert run(*argv[:2], "-a", "y", *argv[2:]) == (1, "", 'ctx: no agent "y"\n')


def test_unknown_work_items_and_waits(run: Run, inside: Path) -> None:
    assert run("work", "done", "nope")[2] == 'ctx: no work item "nope"\n'
    assert run("waits", "show", "nope")[2] == 'ctx: no wait "nope"\n'


@pytest.mark.usefixtures("made_agents_are_full", "inside")
def test_task_start_writes_everything(root: FakeRoot, run: Run) -> None:
    argv = ["task", "start", "--name", "t", "--cwd", "/w", "--env", "A=1", "--env", "B=2"]
    argv += ["--input", "--title", "Tests", "--work", "w1", "--", "make", "-k", "it's"]
    assert run(*argv) == (0, "t\n", "")
    directory = root.path / "agent/x.d/task/t"
    expected = {
        "cwd": "/w\n",
        "env": "A=1\nB=2\n",
        "accepts_input": "1\n",
        "title": "Tests\n",
        "work": "w1\n",
        "cmd": "make -k 'it'\"'\"'s'\n",
        "ctl": "start\n",
    }
    assert {file: (directory / file).read_text() for file in expected} == expected


@pytest.mark.usefixtures("made_agents_are_full")
def test_tasks_get_the_first_free_name(root: FakeRoot, run: Run, inside: Path) -> None:
    for name in ("task-1", "task-3"):
        root.part("task", name, status="running")
    line = "make 2>&1 | tail"
    assert [run("task", "start", "--", line)[1] for _ in range(2)] == ["task-2\n", "task-4\n"]
    assert (inside / "task/task-2/cmd").read_text() == line + "\n"
    assert run("task", "start", "--name", "task-1", "--", "true")[0] == 1


@pytest.mark.usefixtures("made_agents_are_full", "inside")
@pytest.mark.parametrize("name", [[], ["--name", "t"]])
def test_a_refused_task_is_removed_again(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, name: list[str]
) -> None:
    refuse(monkeypatch, "env", errno.EEXIST)  # an unlikely one, but not that the name is taken
    assert run("task", "start", *name, "--env", "A", "--", "true")[0] == 1
    assert os.listdir(root.path / "agent/x.d/task") == []


@pytest.mark.usefixtures("made_agents_are_full", "inside")
@pytest.mark.parametrize(
    ("end", "exited", "status", "said"),
    [
        ("completed", "exit:0", 0, ""),
        ("failed", "exit:3", 3, ""),
        ("failed", "signal:9", 137, "ctx: task-1: failed signal:9\n"),
        ("cancelled", "signal:15", 130, "ctx: task-1: cancelled signal:15\n"),
        ("interrupted", "", 1, "ctx: task-1: interrupted\n"),
    ],
)
def test_task_start_waits(
    root: FakeRoot,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    exited: str,
    status: int,
    said: str,
) -> None:
    directory = root.path / "agent/x.d/task/task-1"

    def live() -> None:
        (directory / "output").write_text("made it\n")
        root.record_end(directory, status=end, exit=exited)

    Obeying(root, monkeypatch, start=live)
    assert run("task", "start", "--wait", "--", "make") == (status, "made it\n", said)
    assert directory.exists()


@pytest.mark.usefixtures("made_agents_are_full", "inside")
def test_ctrl_c_stops_a_task_then_kills_it(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root.path / "agent/x.d/task/task-1"
    interrupt = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGINT))

    def die() -> None:
        root.record_end(directory, status="cancelled", exit="signal:9")

    obeying = Obeying(
        root,
        monkeypatch,
        start=interrupt.start,
        stop=lambda: os.kill(os.getpid(), signal.SIGINT),
        kill=die,
    )
    status, _, err = run("task", "start", "--wait", "--", "make")
    interrupt.join()
    assert (status, obeying.written) == (130, ["start", "stop", "kill"])
    assert err.startswith("ctx: task-1: stop (Ctrl-C again kills it)\n")


def test_task_verbs(root: FakeRoot, run: Run, inside: Path) -> None:
    directories = [root.part("task", name, status="running") for name in ("a", "b")]
    for verb in ("stop", "kill"):
        assert run("task", verb, "a", "nope", "b") == (1, "", 'ctx: no task "nope"\n')
        assert {(path / "ctl").read_text() for path in directories} == {verb + "\n"}


def test_task_wait(root: FakeRoot, spawned: Any, inside: Path) -> None:
    directories = [root.part("task", name, status="running") for name in ("a", "b")]
    process = spawned("task", "wait", "a", "b")
    eventually(lambda: all(has_open(process, path / "wait") for path in directories))
    root.record_end(directories[1], status="failed", exit="exit:3")
    assert process.stdout.readline() == b"b failed exit:3\n"
    assert process.poll() is None
    root.record_end(directories[0], status="completed", exit="exit:0")
    assert process.communicate() == (b"a completed exit:0\n", b"")
    assert process.returncode == 1


def test_task_wait_for_what_is_over(root: FakeRoot, run: Run, inside: Path) -> None:
    done, _ = (root.part("task", name, status="running") for name in ("a", "b"))
    root.record_end(done, status="completed", exit="exit:0")
    assert run("task", "wait", "-a", "x", "a") == (0, "a completed exit:0\n", "")
    assert run("task", "wait", "-t", "20ms", "b") == (124, "", "ctx: not ended in time: b\n")


def test_task_output(root: FakeRoot, run: Run, spawned: Any, inside: Path) -> None:
    directory = root.part("task", "t", status="running")
    (directory / "output").write_text("1\n2\n3\n")
    assert run("task", "output", "t")[1] == "1\n2\n3\n"
    assert run("task", "output", "-n", "1", "t")[1] == "3\n"
    process = spawned("task", "output", "-f", "t")
    assert [process.stdout.readline() for _ in range(3)] == [b"1\n", b"2\n", b"3\n"]
    with (directory / "output").open("a") as output:
        output.write("4\n")
    root.record_end(directory, status="completed", exit="exit:0")
    assert process.communicate() == (b"4\n", b"")


@pytest.mark.parametrize(
    ("words", "stdin", "written"),
    [
        (["two", "words"], b"", b"two words\n"),
        (["--", "-n"], b"", b"-n\n"),
        ([], b"\xff no newline", b"\xff no newline"),
    ],
)
def test_task_input(
    root: FakeRoot, run: Run, inside: Path, words: list[str], stdin: bytes, written: bytes
) -> None:
    directory = root.part("task", "t", status="running")
    assert run("task", "input", "t", *words, stdin=stdin) == (0, "", "")
    assert (directory / "input").read_bytes() == written


@pytest.mark.usefixtures("made_agents_are_full")
def test_removing_tasks_and_cancelling_waits(root: FakeRoot, run: Run, inside: Path) -> None:
    root.part("task", "a", status="completed")
    root.part("waiting", "b", status="armed")
    assert run("task", "rm", "a") == run("waits", "cancel", "b") == (0, "", "")
    assert os.listdir(inside / "task") == os.listdir(inside / "waiting") == []


@pytest.mark.usefixtures("made_agents_are_full")
def test_work(root: FakeRoot, run: Run, inside: Path) -> None:
    assert run("work", "new", "fix the login") == (0, "work-1\n", "")
    assert run("work", "new", "--focus", "docs", "write it down") == (0, "docs\n", "")
    assert (inside / "work/work-1/objective").read_text() == "fix the login\n"
    assert (inside / "work/docs/objective").read_text() == "write it down\n"
    assert (inside / "work/current").read_text() == "docs\n"
    assert run("work", "focus", "work-1")[0] == 0
    assert (inside / "work/current").read_text() == "work-1\n"
    assert run("work", "set", "docs", "plan.md", "-", stdin=b"1. this\n2. that\n")[0] == 0
    assert run("work", "set", "docs", "parent=site", "blocked_by=work-1")[0] == 0
    for name, status in (("work-1", "active"), ("docs", "blocked")):
        (inside / "work" / name / "status").write_text(status + "\n")
    assert [line.split(maxsplit=4) for line in run("work")[1].splitlines()[1:]] == [
        ["docs", "blocked", "work-1", "site", "write it down"],
        ["work-1", "active", "-", "-", "fix the login"],
    ]
    assert run("work", "show", "docs")[1] == (
        "name: docs\nstatus: blocked\nobjective: write it down\nblocked_by: work-1\n"
        "parent: site\nplan.md:\n  1. this\n  2. that\n"
    )
    assert run("work", "done", "docs", "work-1")[0] == 0
    assert (inside / "work/docs/status").read_text() == "done\n"
    assert len(run("work", "list")[1].splitlines()) == 1
    assert run("work", "cancel", "docs")[0] == 0
    assert (inside / "work/docs/status").read_text() == "cancelled\n"


@pytest.mark.usefixtures("made_agents_are_full")
def test_waits(
    root: FakeRoot, run: Run, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = client.Root.write

    def note(self: Any, relative: str, data: bytes) -> None:
        written.append(relative.rpartition("/")[2])
        write(self, relative, data)

    monkeypatch.setattr(client.Root, "write", note)
    argv = ["waits", "add", "-a", "x", "--work", "w1", "--deadline", "2h", "later", "timer", "30s"]
    assert run(*argv) == (0, "", "")
    assert written == ["work", "deadline", "on"]  # which arms it, so that all must be there
    assert (inside / "waiting/later/on").read_text() == "timer 30s\n"
    assert run("waits", "add", "-a", "x", "soon", "timer 1s")[0] == 0
    for name, status in (("later", "armed"), ("soon", "fired")):
        (inside / "waiting" / name / "status").write_text(status + "\n")
    rows = [line.split(maxsplit=4) for line in run("waits")[1].splitlines()]
    assert rows == [
        ["WAIT", "STATUS", "ON", "WORK", "DEADLINE"],
        ["later", "armed", "timer", "30s", "w1    2h"],
    ]
    assert "payload" in json.loads(run("waits", "show", "--json", "soon")[1])


@pytest.mark.usefixtures("made_agents_are_full", "inside")
def test_a_trigger_says_whom_to_tell(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = client.Root.write

    def arm(self: Any, relative: str, data: bytes) -> None:
        write(self, relative, data)
        (root.path / relative).with_name("token").write_text("0123abcd\n")

    monkeypatch.setattr(client.Root, "write", arm)
    assert run("waits", "add", "w", "trigger") == (0, f"{root.path}/trigger/0123abcd\n", "")


# --- tools --------------------------------------------------------------------------------------


def make_tool(root: FakeRoot, name: str) -> Path:
    """Make a tool that is the client itself, as all of them are."""
    directory = root.path / "tool" / f"{name}.d"
    directory.mkdir(parents=True)
    for file, text in (
        ("description", "Gets it.\nAt once."),
        ("family", "core"),
        ("schema", '{"type": "object"}'),
        ("output_schema", "not json"),
    ):
        (directory / file).write_text(text + "\n")
    shutil.copy(CLIENT, root.path / "tool" / name)
    return root.path / "tool" / name


DESCRIBED = 'Gets it.\nAt once.\n\ninput:\n{\n  "type": "object"\n}\n\noutput:\nnot json\n'


def test_tool_list_and_show(root: FakeRoot, run: Run) -> None:
    make_tool(root, "Get")
    assert run("tool")[1] == "TOOL  FAMILY  DESCRIPTION\nGet   core    Gets it.…\n"
    described = [{"name": "Get", "family": "core", "description": "Gets it.\nAt once."}]
    assert json.loads(run("tool", "list", "--json")[1]) == described
    assert run("tool", "show", "Get") == (0, DESCRIBED, "")
    assert run("tool", "show", "Nope") == (1, "", 'ctx: no tool "Nope"\n')


def answer(output: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool", "output": output}


OUTPUT = {"agent_id": "ü", "text": "a\nb\ud800"}


@pytest.mark.parametrize(
    ("argv", "stdin", "given"),
    [
        (["Get", '{"agent_id": "x"}'], b"", {"agent_id": "x"}),
        (["call", "Get"], b'{\n"a": 1}\n', {"a": 1}),
        (["call", "Get"], b" \n", {}),
        (["call", "Get", "{}"], b"not read", {}),
    ],
)
@pytest.mark.parametrize("in_an_agent", [False, True])
def test_tool_call(
    root: FakeRoot, run: Run, argv: list[str], stdin: bytes, given: Any, in_an_agent: bool
) -> None:
    if in_an_agent:
        (root.path / "self").symlink_to("agent/x.d")
        root.agent("x", status="busy")
    news = {"type": "delta", "id": "another", "text": "not ours"}
    path = "agent/x.sock" if in_an_agent else "ctxd.sock"
    fake = FakeAgent(root, ASKED, news, answer(OUTPUT), path=path)
    expected = '{"agent_id": "ü", "text": "a\\nb\\ud800"}\n'
    assert run("tool", *argv, stdin=stdin) == (0, expected, "")
    (request,) = fake.requests
    assert len(request.pop("id")) >= 16
    assert request == {"op": "tool", "name": "Get", "input": given}


@pytest.mark.parametrize(
    ("frame", "status", "said"),
    [
        ({"code": "EINVAL", "message": "no number", "field": "timeout"}, 2, "timeout: no number"),
        ({"code": "EINVAL", "message": '"x" of name', "field": "name"}, 2, '"x" of name'),
        ({"code": "EACCES", "message": "no"}, 13, "no"),
        ({"code": "EPERM", "message": "no"}, 13, "no"),
        ({"code": "EOPNOTSUPP", "message": "no"}, 69, "no"),
        ({"code": "EDQUOT", "message": "no"}, 1, "no"),
        ({"code": "ESRCH", "message": "no"}, 1, "no"),
        ({"code": "ENOENT", "message": "no such task"}, 1, "no such task"),
    ],
)
def test_tool_refusals(
    root: FakeRoot, run: Run, frame: dict[str, Any], status: int, said: str
) -> None:
    make_tool(root, "Get")
    FakeAgent(root, ASKED, {"type": "error", **frame}, path="ctxd.sock")
    assert run("tool", "Get", "{}") == (status, "", f"ctx: {said} ({frame['code']})\n")


def test_tools_that_are_not_there(root: FakeRoot, run: Run) -> None:
    assert run("tool", "Get", "{}")[0] == 69  # no daemon
    error = {"type": "error", "code": "ENOENT", "message": "no such tool"}
    FakeAgent(root, ASKED, error, path="ctxd.sock")
    assert run("tool", "Get", "{}") == (69, "", "ctx: no such tool (ENOENT)\n")
    (root.path / "ctxd.sock").unlink()
    FakeAgent(root, ASKED, path="ctxd.sock")
    said = "ctx: Get: the connection ended before the answer came\n"
    assert run("tool", "Get", "{}") == (69, "", said)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", "[" * 60_000, "{'a': 1}", '{"a": \xff}'])
def test_bad_tool_input(root: FakeRoot, run: Run, text: str) -> None:
    status, out, err = run("tool", "Get", stdin=text.encode("latin-1"))
    assert (status, out) == (2, "")
    assert err.startswith("ctx: the input is not ") and "Traceback" not in err


def test_a_tool_is_its_own_command(root: FakeRoot) -> None:
    program = make_tool(root, "Get")
    environment = {**os.environ, "CTX_ROOT": "/nowhere"}

    def call(*argv: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        process = subprocess.run(
            [program, *argv], input=stdin, capture_output=True, env=environment
        )
        return process.returncode, process.stdout, process.stderr

    for argv, stdin in (['{"a": 1}'], b""), (["--", '{"a": 1}'], b""), ([], b'{"a": 1}'):
        fake = FakeAgent(root, ASKED, answer({"b": 2}), path="ctxd.sock")
        assert call(*argv, stdin=stdin) == (0, b'{"b": 2}\n', b"")
        assert fake.requests[0]["name"] == "Get" and fake.requests[0]["input"] == {"a": 1}
        (root.path / "ctxd.sock").unlink()
    assert call("{}")[0] == 69
    assert call("a", "b")[0] == 2
    status, out, err = call("--help")
    assert (status, err) == (0, b"")
    assert out.startswith(f"usage: {program} [JSON]\n".encode())
    assert out.endswith(DESCRIBED.encode())


def test_ctrl_c_leaves_a_tool_that_blocks(root: FakeRoot, spawned: Any) -> None:
    fake = FakeAgent(root, ASKED, ASKED, path="ctxd.sock")
    process = spawned("tool", "Get", '{"block": true}')
    eventually(lambda: fake.requests)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130


# --- doctor -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "level"), [("5.13.9", "FAIL"), ("5.14.0-rc1", "ok"), ("6.18.1+", "ok")]
)
def test_kernels(release: str, level: str) -> None:
    assert client.check_kernel(release)[0] == level


@pytest.mark.parametrize(("abi", "level"), [(-1, "warn"), (5, "warn"), (6, "ok"), (7, "ok")])
def test_an_older_kernel_is_said_to_keep_cells_less_apart(abi: int, level: str) -> None:
    found, text, remedy = client.check_landlock(abi)
    assert found == level
    assert ("trace its children" in text) == ("6.12" in remedy) == (level == "warn")


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


# --- the end of a long file -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "lines", "shown"),
    [
        (b"", 3, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 0, b""),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"\n\n\n", 1, b"\n"),
        (b"no newline", 1, b"no newline"),
        (b"x" * 200_000 + b"\n" + b"y" * 200_000 + b"\n", 1, b"y" * 200_000 + b"\n"),
        (b"x" * 65535 + b"\n" + b"y" * 65536, 1, b"y" * 65536),
    ],
)
def test_the_last_lines_are_found_from_the_end(
    tmp_path: Path, content: bytes, lines: int, shown: bytes
) -> None:
    (tmp_path / "log").write_bytes(content)
    tail = client.Tail(client.Root(str(tmp_path)), "log", client.STDOUT, lines)
    assert b"".join(tail.chunks()) == shown
    os.close(tail.fd)


def test_a_long_line_costs_no_memory_to_skip(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        for _ in range(64):
            log.write(b"x" * (1 << 20))
    root = client.Root(str(tmp_path))
    tracemalloc.start()
    try:
        tail = client.Tail(root, "log", client.STDOUT, 10)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    os.close(tail.fd)
    assert tail.offset == 0
    assert most < 1 << 20
