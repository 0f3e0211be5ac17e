"""What a user sees with ls, cat and echo on a real mount."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from ctxfs.files import agent as agent_files
from tests.adapter.test_who_may import OPEN, PLACED
from tests.worlds.daemon import Daemon, read, refusal, wait_dead, write


@pytest.fixture(scope="module")
def shared_daemon(shared_daemon: Daemon) -> Daemon:
    """For tests that only try what is refused."""
    shared_daemon.make("coder")
    return shared_daemon


def test_root_has_what_the_manual_lists(daemon: Daemon) -> None:
    listed = {name for name in OPEN["root"] if "/" not in name} - {"trigger"}
    assert set(os.listdir(daemon.root)) == listed
    assert "state=ready" in (daemon.root / "status").read_text()
    assert stat.S_IMODE((daemon.root / "agent").stat().st_mode) == 0o1777
    assert stat.S_IMODE((daemon.root / "trigger").stat().st_mode) == 0o333


def test_an_agent_has_every_file_with_its_default(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    listed = set(os.listdir(agent))
    inside = [row for row in agent_files.ROWS if row.is_inside and not row.within]
    rows = {row.name for row in inside if row.listed}
    assert listed == rows
    expected = {
        "parent": "operator uid:0\n",
        "supervisor": "operator\n",
        "life": "detached\n",
        "profile": "public_named\n",
        "visibility": "public\n",
        "owner": "0\n",
        "uid": "61000\n",
        "label": "coder_t\n",
        "iso": "sandbox\n",
        "workspace": "inherit\n",
        "context": "fresh\n",
        "mode": "once\n",
        "restart": "no\n",
        "meta.json": "{}\n",
        "status": "new\n",
        "exec": "",
        "outcome": "",
        "pid": "",
        "run": "",
        "cgroup": "",
        "handoff.md": "",
        "result.md": "",
    }
    for file, text in expected.items():
        assert read(agent, file) == text, file


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["cat"], "{all}"),
        (["tail", "-n", "1"], "{last}"),
        (["head", "-c", "7"], "allow c"),
        (["dd", "bs=5", "status=none"], "{all}"),
        (["sed", "-n", "$p"], "{last}"),
        (["sh", "-c", "wc -c < $0"], "{size}\n"),
        (["sh", "-c", "cp $0 copy && cat copy"], "{all}"),
        (["grep", "-c", "allow"], "{count}\n"),
    ],
)
def test_files_without_a_size_are_read_as_any_other(
    daemon: Daemon, tmp_path: Path, command: list[str], shown: str
) -> None:
    agent = daemon.make("coder", "true", "a task\n")
    write(agent / "policy", "".join(f"allow coder_t tool:T{n} execute\n" for n in range(200)))
    file = agent / "policy.effective"
    assert file.stat().st_size == 0
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    wanted = shown.format(all=text, last=lines[-1], size=len(text), count=len(lines))
    done = subprocess.run(
        [*command, str(file)] if command[0] != "dd" else [*command, f"if={file}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == wanted


def test_sizes_are_exact(daemon: Daemon) -> None:
    agent = daemon.make("coder", "true", "a task\n")
    for file in agent.iterdir():
        if PLACED["agent"][file.name].generated:
            assert file.stat().st_size == 0, file.name
        elif file.is_file() and not file.is_symlink() and file.name not in ("wait", "inbox"):
            assert file.stat().st_size == len(file.read_bytes()), file.name
    write(agent / "label", "other")
    assert (agent / "label").stat().st_size == len("other\n")
    assert (agent / "policy").stat().st_size == len((agent / "policy").read_bytes())


def test_what_is_not_committed_changes_no_size(daemon: Daemon) -> None:
    """The kernel takes the end of a write for the size of the file, until it asks."""
    agent = daemon.make("coder")
    label, before = agent / "label", read(agent, "label")
    size = len(before)
    fd = os.open(label, os.O_WRONLY)
    try:
        assert label.stat().st_size == size
        os.write(fd, b"a_much_longer_label\n")
        assert os.fstat(fd).st_size == label.stat().st_size == size
        assert read(agent, "label") == before
        with pytest.raises(OSError, match="Errno 22"):
            os.write(fd, b"\n\n\n")
        assert os.fstat(fd).st_size == label.stat().st_size == size
    finally:
        os.close(fd)
    assert label.stat().st_size == len(label.read_bytes())


def test_mkdir_names_are_checked(daemon: Daemon) -> None:
    for name in ("-x.d", ".d", "a b.d", "current.d", "x.sock.d", "é.d", "a" * 65 + ".d", "plain"):
        with pytest.raises(OSError, match=r"Errno 22"):
            (daemon.root / "agent" / name).mkdir()
    daemon.make("taken")
    with pytest.raises(FileExistsError):
        daemon.agent_dir("taken").mkdir()


def test_rmdir_removes_new_and_dead_agents_only(daemon: Daemon) -> None:
    new = daemon.make("fresh")
    new.rmdir()
    assert not new.exists()
    running = daemon.run("busy", "sleep 1000")
    with pytest.raises(OSError, match="Errno 16"):
        running.rmdir()
    assert "stop it" in daemon.error()
    write(running / "ctl", "kill")
    wait_dead(running)
    running.rmdir()
    assert os.listdir(daemon.root / "agent") == []


def test_history_outlives_the_object_and_a_new_incarnation_gets_its_own_session(
    daemon: Daemon,
) -> None:
    first = daemon.finish("coder", "true")
    incarnation = read(first, "incarnation")
    first.rmdir()
    old = daemon.path("home", "0", "agent", "coder", "session", "default")
    assert '"type":"agent.stop"' in (old / "events.jsonl").read_text()
    second = daemon.make("coder")
    assert read(second, "incarnation") != incarnation
    assert os.readlink(second / "session").endswith("/session/default.2")


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("life", "forever", "EINVAL"),
        ("life", "owned", "EINVAL"),
        ("profile", "private", "EINVAL"),
        ("owner", "me", "EINVAL"),
        ("uid", "0", "EACCES"),
        ("gid", "٣", "EINVAL"),
        ("groups", "1 x", "EINVAL"),
        ("label", "a b", "EINVAL"),
        ("policy", "allow other_t agent:* create", "EINVAL"),
        ("policy", "allow coder_t agent:* fly", "EINVAL"),
        ("policy", "permit coder_t agent:* create", "EINVAL"),
        ("mount", "/a b ro", "EINVAL"),
        ("mount", "/a /b rx", "EINVAL"),
        ("mount", "/a /b ro noexe", "EINVAL"),
        ("mount", "/etc /b ro\n/usr /b ro", "EINVAL"),
        ("mount", "/a /proc/x ro", "EINVAL"),
        ("root", "relative", "EINVAL"),
        ("iso", "vm", "EINVAL"),
        ("workspace", "explicit_root:x", "EINVAL"),
        ("workspace", "worktree", "EINVAL"),
        ("cwd", "../x", "EINVAL"),
        ("env", "CTX_ROOT=/", "EINVAL"),
        ("env", "no equals sign", "EINVAL"),
        ("path", "bin", "EINVAL"),
        ("context", "clone", "EINVAL"),
        ("context", "fork", "EINVAL"),
        ("exec", "sh -c 'x", "EINVAL"),
        ("mode", "loop", "EINVAL"),
        ("limits", "grace=5", "EINVAL"),
        ("limits", "speed=max", "EINVAL"),
        ("limits", "memory.max=lots", "EINVAL"),
        ("restart", "sometimes", "EINVAL"),
        ("restart", "sometimes", "EINVAL"),
        ("meta.json", "[1]", "EINVAL"),
        ("meta.json", "{", "EINVAL"),
        ("meta.json", "[" * 60000, "EINVAL"),
        ("parent", "agent:nobody", "EACCES"),
        ("parent", "somebody", "EINVAL"),
        ("ctl", "bogus", "EINVAL"),
        ("ctl", "start now", "EINVAL"),
        ("ctl", "start", "EINVAL"),
        ("ctl", "pause", "EBUSY"),
        ("ctl", "resume", "EBUSY"),
        ("ctl", "reset", "EBUSY"),
        ("ctl", "abort", "ESRCH"),
        ("input.jsonl", "not json", "EINVAL"),
        ("inbox", "hello", "EBUSY"),
        ("status", "busy", "EPERM"),
        ("queue", "x", "EPERM"),
        ("out", "x", "EPERM"),
        ("result.md", "x", "EACCES"),
        ("refs.jsonl", "{}", "EACCES"),
        ("exec", "x" * 70000, "EMSGSIZE"),
        ("model", "a\0b", "EINVAL"),
    ],
)
def test_malformed_writes(shared_daemon: Daemon, file: str, text: str, code: str) -> None:
    agent = shared_daemon.agent_dir("coder")
    before = (agent / file).read_bytes() if file not in ("inbox",) else b""
    assert refusal(agent / file, text) == code
    reason = shared_daemon.error()
    assert f" {code} agent/coder.d/{file}: " in reason
    assert reason.count("\n") == 1
    if code not in ("EACCES", "EPERM"):
        assert read(agent, "error") == reason
    if file != "inbox":
        assert (agent / file).read_bytes() == before, "the old value is kept"


def test_echo_reports_the_error(shared_daemon: Daemon) -> None:
    result = subprocess.run(
        ["bash", "-c", f"echo forever > {shared_daemon.agent_dir('coder')}/life"],
        capture_output=True, text=True, check=False,
    )
    assert result.returncode == 1
    assert "write error: Invalid argument" in result.stderr


def test_non_utf8_is_refused(shared_daemon: Daemon) -> None:
    fd = os.open(shared_daemon.agent_dir("coder") / "model", os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(OSError, match="Errno 22"):
        os.write(fd, b"\xff\n")
    os.close(fd)
    assert "is not UTF-8" in shared_daemon.error()


def test_append_and_replace(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    with open(agent / "env", "a") as file:
        file.write("A=1\n")
    with open(agent / "env", "a") as file:
        file.write("B=2\n")
    assert read(agent, "env") == "A=1\nB=2\n"
    write(agent / "env", "C=3")
    assert read(agent, "env") == "C=3\n"


def test_limits_merge_by_key(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    write(agent / "limits", "grace=1s")
    write(agent / "limits", "timeout=10m")
    assert "grace=1s\n" in read(agent, "limits")
    assert "timeout=10m\n" in read(agent, "limits")
    write(agent / "limits", "timeout=max")
    assert "timeout=max\n" in read(agent, "limits")


def test_truncation_alone_changes_nothing(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    os.truncate(agent / "label", 0)
    os.close(os.open(agent / "label", os.O_WRONLY | os.O_TRUNC))
    assert read(agent, "label") == "coder_t\n"


def test_a_read_at_0_renders_anew_and_later_reads_continue(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    fd = os.open(agent / "label", os.O_RDWR)
    try:
        assert os.pread(fd, 5, 0) == b"coder"
        write(agent / "label", "other_label")
        assert os.pread(fd, 100, 5) == b"_t\n"
        assert os.pread(fd, 100, 0) == b"other_label\n"
    finally:
        os.close(fd)


def test_every_reader_sees_a_new_value_at_once(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    for number in range(200):
        write(agent / "label", f"label{number}")
        assert read(agent, "label") == f"label{number}\n"
        assert f"allow label{number} " in read(agent, "policy")
        assert (agent / "label").stat().st_size == len(f"label{number}\n")


def test_mode_owner_and_names_are_given(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    for action in (
        lambda: (agent / "label").chmod(0o777),
        lambda: (agent / "label").unlink(),
        lambda: (agent / "label").rename(agent / "other"),
        lambda: (agent / "mine").write_text("x"),
        lambda: os.link(agent / "label", agent / "hard"),
        lambda: os.symlink("/etc/passwd", agent / "soft"),
        lambda: os.mknod(agent / "fifo", stat.S_IFIFO | 0o666),
        lambda: (agent / "dir").mkdir(),
        lambda: os.chown(agent / "label", 5, 5),
    ):
        with pytest.raises(OSError, match=r"Errno (1|13|18)\]"):
            action()


def test_setting_what_is_there_hides_no_reason(daemon: Daemon) -> None:
    agent = daemon.make("coder")
    assert refusal(agent / "life", "forever") == "EINVAL"
    present = (agent / "life").stat()
    (agent / "life").chmod(stat.S_IMODE(present.st_mode))
    os.chown(agent / "life", present.st_uid, present.st_gid)
    assert 'unknown value "forever"' in daemon.error()


def test_the_parent_file_makes_a_child(daemon: Daemon) -> None:
    daemon.run("boss", "sleep 1000")
    child = daemon.make("worker")
    write(child / "parent", "agent:boss")
    assert read(child, "parent") == "agent:boss session:default run:r1\n"
    assert read(child, "life") == "owned\n"
    assert read(child, "profile") == "private_child\n"
    assert read(child, "supervisor") == "agent:boss\n"
    assert read(child, "exec") == "sleep 1000\n"
    assert "agent:" not in read(child, "policy")
    assert os.listdir(daemon.agent_dir("boss") / "child") == ["worker"]
    write(child / "parent", "operator")
    assert read(child, "profile") == "public_named\n"
    assert os.listdir(daemon.agent_dir("boss") / "child") == []


def test_editors_can_write_controls(daemon: Daemon, tmp_path: Path) -> None:
    agent = daemon.make("coder")
    script = f"open({str(agent / 'exec')!r}, 'w').write('sleep 5\\n')"
    subprocess.run(["python3", "-c", script], check=True)
    assert read(agent, "exec") == "sleep 5\n"
    subprocess.run(["cp", str(agent / "exec"), str(agent / "cwd")], check=False)
    assert read(agent, "cwd") == ""
    copied = tmp_path / "meta"
    copied.write_text('{"a":\n 1}\n')
    subprocess.run(["cp", str(copied), str(agent / "meta.json")], check=True)
    assert read(agent, "meta.json") == '{"a":\n 1}\n'


def test_a_thousand_agents_are_listed(daemon: Daemon) -> None:
    for number in range(1000):
        (daemon.root / "agent" / f"a{number}.d").mkdir()
    assert len(os.listdir(daemon.root / "agent")) == 3000
    started = time.monotonic()
    rows = subprocess.run(["ls", "-l", str(daemon.root / "agent")], capture_output=True, check=True)
    assert rows.stdout.count(b"\n") == 3001
    assert time.monotonic() - started < 20
