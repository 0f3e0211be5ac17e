"""Why something failed, as the daemon says it or as the client guesses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import client.root
from client.files import read_file
from client.root import Root, default_root, start_hint
from tests.unit.client.fakes import LIFE, FakeRoot, Run, refuse


@pytest.mark.parametrize("at_close", [False, True])
def test_the_daemons_reason_is_shown(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, at_close: bool
) -> None:
    root.agent("x")
    root.reject("EINVAL", LIFE, 'unknown value "forever"; use owned, temp, detached')
    refuse(monkeypatch, "life", errno.EINVAL, at_close)
    status, out, err = run("set", "x", "life", "forever")
    assert (status, out) == (1, "")
    assert err == f'ctx: {LIFE}: unknown value "forever"; use owned, temp, detached (EINVAL)\n'


@pytest.mark.parametrize(
    ("code", "path", "ago"),
    [
        ("EACCES", LIFE, -60),
        ("EINVAL", "agent/xy.d/life", -60),
        ("EINVAL", "agent/y.d/life", -60),
        ("EINVAL", LIFE, 0.005),
        ("path", LIFE, -60),
    ],
)
def test_the_reason_of_something_else_is_not(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, code: str, path: str, ago: float
) -> None:
    root.agent("x")
    root.reject(code, path, "about something else", ago)
    refuse(monkeypatch, "life", errno.EINVAL)
    assert run("set", "x", "life", "forever")[2] == f"ctx: {LIFE}: invalid argument (EINVAL)\n"


@pytest.mark.parametrize("content", [b"", b"\n", b"x", b"2026 EINVAL\n", b"\xff\x00 \xfe \xfd: y"])
def test_a_strange_error_file_is_survived(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    root.agent("x")
    (root.path / "error").write_bytes(content)
    refuse(monkeypatch, "life", errno.EINVAL)
    assert run("set", "x", "life", "y")[2] == f"ctx: {LIFE}: invalid argument (EINVAL)\n"


def test_reasons_are_escaped(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    root.agent("x")
    root.reject("EINVAL", LIFE, "\x1b]0;gotcha\x07")
    refuse(monkeypatch, "life", errno.EINVAL)
    assert "\x1b" not in run("set", "x", "life", "y")[2]


@pytest.mark.parametrize(
    "command",
    ["ps", "tree", "now x", "reports", "reports x", "rm x y", "stop x y", "set x life owned",
     "get x status", "wait x", "result x", "spawn x -- true", "send x hi", "tool AgentList"],
)  # fmt: skip
def test_no_daemon(command: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told once, with the status after which a program tries again."""
    monkeypatch.setenv("CTX_ROOT", str(tmp_path))
    status, _, err = run(*command.split())
    assert (status, err.count("\n")) == (69, 1)
    start = f"start it with: ctxd --mount {tmp_path} (and its other options)"
    assert err == f"ctx: no ctxd answers at {tmp_path}; {start}\n"


def test_a_dead_daemon(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> Iterator[bytes]:
        raise OSError(errno.ENOTCONN, "")
        yield b""

    monkeypatch.setattr("client.root.read_ahead", fail)
    status, _, err = run("ps")
    assert status == 69
    assert "died (ENOTCONN)" in err


def test_unknown_agent_and_file(root: FakeRoot, run: Run) -> None:
    root.agent("x")
    assert run("get", "y", "status")[::2] == (1, 'ctx: no agent "y"\n')
    assert run("get", "x", "nope")[2].startswith("ctx: agent/x.d/nope: ")


def uid_map(path: str) -> bytes:
    return (
        b"     61000      61000          1\n" if path == "/proc/self/uid_map" else read_file(path)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to other users")
def test_the_environment_of_another_user_leads_nowhere(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after su(1): that user could put links in place of control files."""
    root.agent("x")
    monkeypatch.setattr(os, "getuid", lambda: 1_000)
    os.chown(root.path, 1_001, 1_001)
    for command in ("get x status", "ps", "doctor", "__complete -- get"):
        status, out, err = run(*command.split())
        assert (status, out) == (1, "")
        assert err.startswith(f"ctx: CTX_ROOT leads to {root.path}, which belongs to user 1001")
    assert run("--root", str(root.path), "get", "x", "status")[::2] == (0, "")
    assert run("help")[0] == 0
    for owner in (0, 1_000):
        os.chown(root.path, owner, owner)
        assert run("get", "x", "status")[::2] == (0, "")
    os.chown(root.path, 65_534, 65_534)  # nobody, who may run programs too
    assert run("get", "x", "status")[0] == 1
    # as in a cell, where root's files are nobody's
    monkeypatch.setattr(client.root, "read_file", uid_map)
    assert run("get", "x", "status")[::2] == (0, "")


@pytest.mark.parametrize(
    ("uid", "path", "named", "hint"),
    [
        (0, "/ctx", False, "start it as root with: systemctl start ctxd (or: ctxd)"),
        (1234, "/run/user/1234/ctx", True, "start it with: systemctl --user start ctxd (or: ctxd)"),
        (1234, "/srv/ctx", True, "start it with: ctxd --mount /srv/ctx (and its other options)"),
        (1234, "/ctx", True, "start it as root with: systemctl start ctxd (or: ctxd)"),
        (
            1234, "/ctx", False,
            "start it as root with: systemctl start ctxd (or: ctxd), or your own with: "
            "systemctl --user start ctxd",
        ),
    ],
)  # fmt: skip
def test_how_to_start_a_daemon(
    monkeypatch: pytest.MonkeyPatch, uid: int, path: str, named: bool, hint: str
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("CTX_ROOT", raising=False)
    if named:
        monkeypatch.setenv("CTX_ROOT", path)
    assert start_hint(path) == hint


@pytest.fixture
def forged(root: FakeRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of another user's, of whom the environment is; what root has is beside it."""
    root.agent("x")
    monkeypatch.delenv("CTX_ROOT")
    path = tmp_path / "forged"
    path.mkdir()
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to other users")
def test_no_environment_leads_where_others_decide_what_is_there(
    root: FakeRoot, forged: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory itself may be root's."""

    def leads_to(path: Path) -> bool:
        monkeypatch.setenv("CTX_ROOT", str(path))
        status, out, err = run("get", "x", "status")
        assert (status, out) == (1, "") or status == 0, err
        assert status == 0 or err.startswith(f"ctx: CTX_ROOT leads to {path}, which "), err
        return status == 0

    assert leads_to(root.path)
    link = forged / "link"
    link.symlink_to(root.path)
    assert leads_to(link)
    os.lchown(link, 1001, 1001)
    assert not leads_to(link)
    os.lchown(link, 0, 0)
    os.chown(forged, 1001, 1001)
    assert not leads_to(link) and not leads_to(forged / ".." / "forged" / "link")
    os.chown(forged, 0, 0)
    for mode, is_safe in ((0o757, False), (0o775, False), (0o1777, True), (0o755, True)):
        forged.chmod(mode)
        assert leads_to(link) == is_safe
    root.path.chmod(0o1777)  # such as /tmp: the agents in it are anybody's
    assert not leads_to(root.path)
    root.path.chmod(0o755)
    other = forged / "other"
    other.symlink_to("link")
    assert leads_to(other)
    forged.chmod(0o1777)
    assert not leads_to(forged / "not there yet")


@pytest.mark.skipif(os.geteuid() != 0, reason="as root alone")
def test_a_runtime_directory_that_all_may_write_is_nobodys_own(
    root: FakeRoot, forged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forged / "ctx").symlink_to(root.path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(forged))
    forged.chmod(0o700)
    assert default_root() == str(forged / "ctx")
    forged.chmod(0o1777)
    assert default_root() != str(forged / "ctx")


def test_only_what_is_held_is_reached_by_its_directory(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    assert Root("/").join("/run/ctxd.sock") == "/run/ctxd.sock"
    (tmp_path / "agent" / "x.d").mkdir(parents=True)
    root.hold("agent/x.d")
    assert root.join("agent/x.d/status").startswith("/proc/self/fd/")
    for other in ("agent/x.d", "agent/x.dd/status", "agent/y.d/status", "error"):
        assert root.join(other) == f"{tmp_path}/{other}"
