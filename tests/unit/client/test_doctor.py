"""What a machine lacks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from client import doctor, networks, nodes
from client.root import Root, default_root
from tests.unit.client.fakes import FakeRoot, Run


@pytest.mark.parametrize(
    ("release", "level"), [("5.13.9", "FAIL"), ("5.14.0-rc1", "ok"), ("6.18.1+", "ok")]
)
def test_kernels(release: str, level: str) -> None:
    assert doctor.check_kernel(release)[0] == level


@pytest.mark.parametrize(("abi", "level"), [(-1, "warn"), (5, "warn"), (6, "ok"), (7, "ok")])
def test_an_older_kernel_is_said_to_keep_cells_less_apart(abi: int, level: str) -> None:
    found, text, remedy = doctor.check_landlock(abi)
    assert found == level
    assert ("trace its children" in text) == ("6.12" in remedy) == (level == "warn")
    newer = doctor.check_landlock(abi, "6.18.44-cloud")[2]
    assert "install" not in newer and ("in a container" in newer) == (level == "warn")


def test_cgroups(tmp_path: Path) -> None:
    line = f"41 31 0:38 / {tmp_path} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    found = list(doctor.check_cgroups("1 0 8:1 / / rw - ext4 /dev/sda rw\n" + line))
    assert [level for level, _, _ in found] == ["ok", "warn"]
    assert "memory" in found[1][1] and "EOPNOTSUPP" in found[1][1]
    (tmp_path / "group").mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    assert [level for level, _, _ in doctor.check_cgroups(line)] == ["FAIL", "ok"]
    assert [level for level, _, _ in doctor.check_cgroups("")] == ["FAIL"]


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
    assert doctor.check_namespaces(str(tmp_path))[0] == level


@pytest.mark.parametrize(
    ("used", "level"), [("12", "ok"), ("2764", "ok"), ("2765", "warn"), ("3072", "warn")]
)
def test_terminals_are_the_machines(tmp_path: Path, used: str, level: str) -> None:
    for file, text in {"nr": used, "max": "4096", "reserve": "1024"}.items():
        (tmp_path / file).write_text(f"{text}\n")
    [(found, what, remedy)] = doctor.check_terminals(str(tmp_path))
    assert found == level
    assert what == f"{used} terminals are in use of 3072 that agents may open together"
    assert ("sysctl kernel.pty.max=8192" in remedy) is (level == "warn")


def test_a_kernel_without_such_terminals_is_not_judged(tmp_path: Path) -> None:
    assert [*doctor.check_terminals(str(tmp_path / "none"))] == []


def test_what_ends_with_a_login(tmp_path: Path) -> None:
    manager, places = tmp_path / "systemd", tmp_path / "linger"
    places.mkdir()
    assert doctor.check_lingering("ann", str(manager), str(places))[0] == "ok"
    manager.mkdir()
    level, what, remedy = doctor.check_lingering("ann", str(manager), str(places))
    assert (level, what) == ("warn", "your ctxd and its agents end with your last login")
    assert remedy.startswith("loginctl enable-linger ann, as root")
    (places / "ann").touch()
    assert doctor.check_lingering("ann", str(manager), str(places))[0] == "ok"


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
        found = list(doctor.check_cgroups(line, below))
        assert [level for level, _, _ in found] == ["ok", "warn", "ok"]
        assert found[1][1].startswith("no cpu controller") and "Delegate=" in found[1][2]
        assert found[2][1] == f"the cgroup {own} belongs to you"
    level, _, remedy = doctor.check_delegated(str(tmp_path))
    assert level == "warn" and "systemd-run --user --scope -p Delegate=yes ctxd" in remedy


def test_mounts_of_a_user(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    mounts = "27 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"
    assert [each[0] for each in doctor.check_mounts(mounts, str(directory))] == ["ok", "warn"]
    mounts += f"28 27 0:26 / {tmp_path} rw - tmpfs none rw\n"
    mounts += f"29 27 0:30 / {doctor.FUSECTL} rw shared:3 - fusectl none rw\n"
    found = list(doctor.check_mounts(mounts, str(directory)))
    assert [each[0] for each in found] == ["warn", "ok"]
    assert f"({tmp_path})" in found[0][1]


def test_whose_daemon_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(str(tmp_path))
    assert not doctor.is_rootless(root, 0)
    assert doctor.is_rootless(root, 1000) == (tmp_path.stat().st_uid != 0)
    assert doctor.is_rootless(Root("/no/such"), 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_root() == "/ctx"
    (tmp_path / "ctx").symlink_to("/gone")
    assert default_root() == str(tmp_path / "ctx")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "link"))
    assert default_root() == str(tmp_path / "ctx"), "a link may lead elsewhere later"
    # another user's, whose environment the caller may have
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert default_root() == "/ctx"


def test_what_is_weaker_without_root_is_listed(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "is_rootless", lambda root, uid: True)
    weak = [line for line in run("doctor")[1].splitlines() if line.startswith("weak  ")]
    assert len(weak) == len(doctor.WEAKER) > 5


def test_the_cgroup_of_a_users_daemon_counts_if_there_is_one(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "is_rootless", lambda root, uid: True)
    (served := tmp_path / "served").mkdir()
    with (root.path / "status").open("a") as status:
        status.write(f"cgroup={served}\n")
    assert f"warn  {served} does not belong to you" in run("doctor")[1]
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (served / name).touch()
    assert f"ok    the cgroup {served} belongs to you" in run("doctor")[1]


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_program", lambda name: "/usr/bin/git" * (name == "git"))
    levels = {what.split()[0]: level for level, what, _ in doctor.check_programs(1000)}
    assert levels == {
        "fusermount3": "FAIL",
        "git:": "ok",
    }
    assert not any("fusermount3" in what for _, what, _ in doctor.check_programs(0))


def test_the_socket_of_a_network(
    tmp_path: Path, root: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tmp_path itself is open to its user alone
    monkeypatch.setattr(networks, "way_to", lambda path: [(os.stat(path), 0o002)])
    path = tmp_path / "api.sock"
    with open(root.path / "status", "a") as file:
        file.write(f"network.api=8081 4711 {path}\n")
    found = list(networks.check_networks(doctor.status_of(Root(str(root.path)))))
    assert [level for level, _, _ in found] == ["warn"]
    assert f"network:api: {path}: No such file" in found[0][1]
    path.touch()
    assert "is not a socket" in next(networks.check_network("n", 4711, str(path)))[1]
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        for mode, level, what in (
            (0o700, "warn", "the relays (uid 4711) may not connect"),
            (0o666, "warn", "every user may connect"),
        ):
            path.chmod(mode)
            first, second = networks.check_network("n", 4711, str(path))
            assert first[0] == level and what in first[1]
            assert second[0] == "warn" and "refused" in second[1]
        listening.listen()

        def answer(said: bytes) -> networks.Finding:
            def serve() -> None:
                with listening.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(said)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                return networks.check_answer("n", str(path))
            finally:
                thread.join()

        assert answer(b"HTTP/1.1 403 Forbidden\r\n")[:2] == ("ok", "n: answers GET / with 403")
        assert answer(b"HTTP/1.1 200 OK\r\n")[0] == "warn"
        assert "does not speak HTTP" in answer(b"* OK IMAP4\r\n")[1]


class Listener:
    """What listens at the socket of a network, and says something to whoever asks; or closes."""

    def __init__(self, path: Path, says: bytes = b"") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()
        self.says = says
        #: the first words of each who asked
        self.asked: list[bytes] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection:
                    self.asked.append(connection.recv(1000))
                    connection.sendall(self.says)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def test_a_meter_listens_where_counters_are_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for says, level in ((b"", "ok"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "warn")):
        listener = Listener(path, says)
        found = list(networks.check_network("n", 4711, str(path), "counters"))
        assert found[-1][0] == level, found
        listener.close()
        path.unlink()
    listener = Listener(path, b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert [*networks.check_network("n", 4711, str(path), "proxy")][-1][0] == "ok"
    assert listener.asked[-1].startswith(b"\r\n\r\n\0\r\nQUIT\n!!\0\x24\xfd\x63txfs\0\0")
    assert b"GET / HTTP/1.1" in listener.asked[-1]
    listener.close()
    assert [*networks.check_network("n", 4711, str(path), "counters")][-1][0] == "warn"
    path.unlink()
    missing = [*networks.check_network("n", 4711, str(path), "counters")][-1]
    assert "systemctl start ctxfs-meter" in missing[2]


def test_a_forward_proxy_has_the_remedies_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "pypi.sock"
    missing = [*networks.check_network("n", 4711, str(path), "proxy", "http_proxy")][-1]
    assert missing[2].endswith("systemctl start ctxfs-web@pypi.socket")
    listener = Listener(path, b"* OK IMAP4\r\n")
    odd = [*networks.check_network("n", 4711, str(path), "proxy", "http_proxy")][-1]
    assert "journalctl -u ctxfs-web" in odd[2]
    listener.close()


def test_the_ports_of_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "LISTS", str(tmp_path))
    assert [*networks.check_lists(str(tmp_path / "none"))] == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "a.conf").write_text(f"# http_port 1\nhttp_port 127.0.0.1:{port} name=a\n")
        (tmp_path / "a.hosts").write_text("http_port 127.0.0.1:2\n")
        status = {"network.a": f"8090 4711 {tmp_path}/a.sock", "kind.a": "http_proxy"}
        level, what, remedy = [*networks.check_networks(status)][-1]
        assert (level, f"may connect to 127.0.0.1:{port}" in what) == ("FAIL", True)
        assert "ctxfs-web.nft" in remedy
        (tmp_path / "a.conf").write_text(f"http_port {port} name=a\n")
        assert "listens at 127.0.0.1 alone" in [*networks.check_networks(status)][-2][1]
        del status["kind.a"]
        assert len([*networks.check_networks(status)]) == 1
    (tmp_path / "a.conf").write_text(f"http_port 127.0.0.1:{port} name=a\n")
    assert [level for level, _, _ in networks.check_lists(str(tmp_path))] == ["ok"]


def test_whoever_has_an_own_meter_is_told_how_to_start_it(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    status = {"network.n": f"uid {os.geteuid()} {path}", "header.n": "counters"}
    (missing,) = networks.check_networks(status, rootless=True)
    assert missing[:2] == ("warn", f"network:n: {path}: No such file or directory")
    assert "ctxfs-meter --config" in missing[2] and "systemctl" not in missing[2]
    Path(path).touch()
    ((_, _, remedy),) = networks.check_networks(status, rootless=True)
    assert remedy == "correct networks in ~/.config/ctxfs/config.yaml; systemctl --user reload ctxd"


METER = """
# socket: /of/nobody
networks:
  a: {api: anthropic, socket: SOCKET, upstream: "UPSTREAM"}
  b:
    api: openai
    socket: /none.sock   # upstream: /of/nobody
    upstream: /none.up
"""


def test_the_meter_has_the_networks_of_ctxd_and_nobody_gets_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, up, file = (tmp_path / name for name in ("m", "up", "meter.yaml"))
    file.write_text(METER.replace("SOCKET", str(path)).replace("UPSTREAM", str(up)))
    up.touch()
    # tmp_path itself is open to its user alone
    monkeypatch.setattr(networks, "way_to", lambda path: [(os.stat(path), 0o002)])
    known = {str(path): "network:a", "/none.sock": "network:b"}

    def judged(metered: list[str], *, relay: int = 4711) -> set[tuple[str, str]]:
        found = networks.check_meter(known, metered, relay, str(file))
        assert all(remedy for level, _, remedy in found if level == "warn")
        found = networks.check_meter(known, metered, relay, str(file))
        return {(level, what.replace(str(tmp_path), "")) for level, what, _ in found}

    up.chmod(0o600)
    none = ("warn", "behind the meter: /none.up: No such file or directory")
    good = ("ok", "the networks in /meter.yaml are those of ctxd")
    alone = ("ok", "/up: reached by the meter alone")
    assert judged([str(path), "/none.sock"]) == {none, good, alone}
    up.chmod(0o666)
    past = ("warn", "the relays (uid 4711) may connect to /up, past the meter")
    assert judged([str(path), "/none.sock"]) == {none, good, past}
    own = ("weak", f"relays and the meter have one user, {os.stat(up).st_uid}: only sandboxes keep "
           "agents from what is behind the meter")  # fmt: skip
    assert own in judged([str(path), "/none.sock"], relay=os.stat(up).st_uid)
    lacks = ("warn", "the meter listens at /none.sock, and network:b lacks header: counters")
    assert lacks in judged([str(path)])
    known["/more.sock"] = "network:more"
    more = ("warn", "network:more: the meter has no socket /more.sock in /meter.yaml")
    found = judged([str(path), "/none.sock", "/more.sock"])
    assert more in found and good not in found
    known[str(up)] = "network:past"
    assert ("warn", "network:past leads to /up, past the meter") in judged([str(path)])
    file.unlink()
    assert judged([str(path)]) == {
        ("warn", "the configuration of the meter: /meter.yaml: No such file or directory")
    }


LISTENS = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("words", "file"), [
    (["--config", "meter.yaml"], "PLACE/meter.yaml"), (["--config=x/m.yaml"], "PLACE/x/m.yaml"),
    (["--config", "/etc/m.yaml"], "/etc/m.yaml"), ([], networks.METER),
])  # fmt: skip
def test_a_meter_reads_its_configuration_where_it_was_started(
    tmp_path: Path, words: list[str], file: str
) -> None:
    path = str(tmp_path / "m")
    assert networks.meter_file(path) == ""
    program = [sys.executable, "-c", LISTENS, path, *words]
    with subprocess.Popen(program, cwd=tmp_path, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as meter:  # fmt: skip
        assert meter.stdout and meter.stdout.readline()
        assert networks.meter_file(path) == file.replace("PLACE", str(tmp_path))


def test_who_may_do_what_with_a_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o751)
    found = os.stat(tmp_path)
    assert networks.permits(found, found.st_uid, 0o002)
    for bit, may in ((0o001, True), (0o002, False)):
        assert networks.permits(found, 4711, bit) == may
    assert networks.permits(found, 0, 0o002)
    os.chown(tmp_path, 4712, 4711)
    tmp_path.chmod(0o730)
    assert networks.permits(os.stat(tmp_path), 4711, 0o002), "by its group"


@pytest.mark.skipif(os.geteuid() != 0, reason="only links of uid 0 count")
def test_links_that_lead_nowhere_in_a_sandbox(tmp_path: Path) -> None:
    etc, there = tmp_path / "etc", tmp_path / "there"
    etc.mkdir()
    there.mkdir()
    (there / "file").write_text("")
    (there / "again").symlink_to("file")
    for name, target in (
        *(("shown", "../there/file"), ("gone", "../there/none"), ("system", "/usr/bin")),
        *(("within", "shown"), ("twice", "../there/again"), ("self", "/proc/self/mounts")),
    ):
        (etc / name).symlink_to(target)
    # the directory of tests is in /tmp, of which no sandbox has the host's
    seen = {what.split()[0] for _, what, _ in doctor.check_links(str(etc))}
    assert seen == {str(etc / "shown"), str(etc / "twice")}


def test_doctor(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("doctor")
    levels = [line.split()[0] for line in out.splitlines()]
    assert set(levels) <= {"ok", "warn", "FAIL", "weak"}
    assert status == ("FAIL" in levels)
    assert f"ctxd at {root.path} is ready: version=1.2 mount=/ctx" in out
    (root.path / "status").unlink()
    monkeypatch.setattr(doctor, "try_daemon", lambda: ("FAIL", "it does not start", ""))
    rows = json.loads(run("doctor", "--json")[1])
    rows = [row for row in rows if row["level"] != "weak"]
    assert [row["level"] for row in rows[-2:]] == ["FAIL", "warn"]
    monkeypatch.setattr(doctor, "findings", lambda root: iter([("FAIL", "all", "")]))
    assert run("doctor") == (1, "FAIL  all\n", "")


def _metrics(free: int, size: int, waiting: int = 0) -> str:
    return (
        "# HELP ctxfs_state_free_bytes Text.\n"
        f"ctxfs_state_free_bytes {free}\nctxfs_state_size_bytes {size}\n"
        f"ctxfs_changes_waiting {waiting}\n"
    )


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (_metrics(50 << 30, 100 << 30), ["ok"]),
        (_metrics(9 << 30, 100 << 30), ["warn"]),
        (_metrics(0, 100 << 30, 3), ["warn", "FAIL"]),
        (_metrics(-1, -1), []),
        ("ctxfs_uptime_seconds 1\n", []),
    ],
)
def test_a_disk_that_is_nearly_full(tmp_path: Path, text: str, levels: list[str]) -> None:
    (tmp_path / "metrics").write_text(text)
    found = list(doctor.check_room(Root(str(tmp_path))))
    assert [level for level, _, _ in found] == levels
    for level, _, remedy in found:
        assert ("ctx quota" in remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("text", "levels"),
    [("trees=hard\n", ["ok"]), ("trees=soft\n", ["warn"]), ("state=ready\n", [])],
)
def test_whether_the_kernel_bounds_trees(tmp_path: Path, text: str, levels: list[str]) -> None:
    (tmp_path / "status").write_text(text)
    found = list(doctor.check_trees(doctor.status_of(Root(str(tmp_path)))))
    assert [level for level, _, _ in found] == levels
    for level, what, remedy in found:
        assert ("soft" in what) == ("prjquota" in remedy) == (level != "ok")


#: words with which a command begins that one can type, or what it changes
_COMMANDS = (
    *("apt-get install", "systemctl", "systemd-run", "journalctl", "chmod", "chgrp", "mount -"),
    *("modprobe", "sysctl", "loginctl", "useradd", "update-grub", "ctx quota", "printf"),
    "ctxd --mount",
)


def test_every_problem_names_a_command(tmp_path: Path) -> None:
    """All that is judged, with the worst answers."""
    (tmp_path / "sock").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "sock" / "s"))
        (tmp_path / "sock").chmod(0o700)
        denied = list(networks.check_network("network:a", 61001, str(tmp_path / "sock" / "s")))
    (tmp_path / "plain").touch()
    (tmp_path / "metrics").write_text(_metrics(0, 1 << 30, 1))
    (tmp_path / "status").write_text("state=starting\n")
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "user").mkdir()
    (tmp_path / "sys" / "user" / "max_user_namespaces").write_text("0\n")
    (full := tmp_path / "pty").mkdir()
    for file, text in {"nr": "3072", "max": "4096", "reserve": "1024"}.items():
        (full / file).write_text(text)
    root = Root(str(tmp_path))
    found = [
        doctor.check_kernel("4.19.0"),
        *doctor.check_cgroups(""),
        *doctor.check_cgroups(f"41 31 0:38 / {tmp_path} rw shared:9 - cgroup2 cgroup2 rw", "/own"),
        doctor.check_namespaces(str(tmp_path / "sys")),
        doctor.check_landlock(-1),
        *doctor.check_terminals(str(full)),
        *doctor.check_identity(4_000_000_000),
        doctor.check_lingering("ann", str(tmp_path), str(tmp_path / "none")),
        *doctor.check_mounts("41 31 0:38 / / rw - ext4 /dev/x rw", str(tmp_path)),
        *doctor.check_daemon(root, tries=False),
        *doctor.check_daemon(Root(str(tmp_path / "none")), tries=False),
        *doctor.check_room(root),
        *denied,
        *networks.check_network("network:b", 61001, str(tmp_path / "none")),
        *networks.check_network("network:c", 61001, str(tmp_path / "plain")),
    ]
    problems = [each for each in found if each[0] in ("FAIL", "warn")]
    assert len(problems) >= 14
    for level, what, remedy in problems:
        assert any(word in remedy for word in _COMMANDS), (level, what, remedy)


def test_a_key_of_links_is_for_one_user_alone(tmp_path: Path) -> None:
    keys, uid = tmp_path / "ssh", os.getuid()
    assert nodes.check_keys(str(keys), 61999)[0] == "FAIL", "nobody has that uid"
    assert nodes.check_keys(str(keys), uid)[::2] == ("warn", "ctx nodes add")
    keys.mkdir(mode=0o700)
    (keys / "key").touch(mode=0o600)
    assert nodes.check_keys(str(keys), uid)[0] == "ok"
    for path, mode in ((keys, 0o710), (keys / "key", 0o640)):
        before = path.stat().st_mode
        path.chmod(mode)
        level, what, remedy = nodes.check_keys(str(keys), uid)
        assert level == "FAIL" and "may read the key" in what and f"chmod 700 {keys}" in remedy
        path.chmod(before)


def test_a_link_says_why_it_is_down() -> None:
    root = Root("/nowhere")
    row = {"name": "n2", "state": "down", "error": "it is: do that"}
    assert nodes.check_link(root, row, True) == (
        "warn", "node n2: it is: do that", "ctx nodes check n2"
    )  # fmt: skip
    idle = {"name": "n2", "state": "idle", "error": ""}
    assert nodes.check_link(root, idle, True) == ("ok", "node n2 is idle: no agent needs it", "")
    up = {"name": "n2", "state": "up", "error": ""}
    assert nodes.check_link(root, up, False) == ("ok", "node n2 is up", "")
