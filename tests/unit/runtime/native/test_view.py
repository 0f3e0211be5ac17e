"""What view.c makes of a plan: a root of its own, whoever composed what is bound there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.cell.cell import bind, native
from runtime.kernel import orders

TIMEOUT = 60.0
#: agents' ids, where there is the right to take them
UID = 61000 if os.geteuid() == 0 else os.geteuid()
GID = 61000 if os.geteuid() == 0 else os.getegid()


View = list[tuple[str, ...]]
SHMALL = Path("/proc/sys/kernel/shmall").read_text()
MEMORY = ("memory", str(8 << 20), "1000")


def base() -> View:
    """A root with the host's programs."""
    view = [bind("/usr", "/usr", "r"), bind("/etc", "/etc", "r")]
    for name in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{name}"):
            view.append(("symlink", os.readlink(f"/{name}"), f"/{name}"))
        else:
            view.append(bind(f"/{name}", f"/{name}", "rt"))
    return [*view, ("proc", "/proc"), ("dev", "/dev"), ("tmpfs", "0755", "/tmp")]


def build(
    view: View, script: str, *, uid: int = UID, plan: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    """A shell as PID 1 of a cell. ``plan`` stands for the whole message that says what to build."""
    whole = orders.message([MEMORY, *view]) if plan is None else plan
    file = orders.memory_file("view", whole)
    program = os.open("/bin/sh", os.O_PATH)
    try:
        return subprocess.run(
            command(file, program, script, uid),
            pass_fds=[file, program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    finally:
        os.close(file)
        os.close(program)


def command(plan: int, program: int, script: str, uid: int = UID) -> list[str]:
    groups: orders.Order = () if os.geteuid() == 0 else "="
    shell = ("sh", "-c", f"PATH=/usr/bin:/bin; {script}")
    # nobody takes the report to standard error
    return orders.words(native("view"), 2, plan, program, uid, GID, groups, shell)


WHY_NOT = "" if native("view").exists() else "view is not compiled: make programs"
if not WHY_NOT:
    tried = build([bind("/", "/"), ("proc", "/proc"), ("dev", "/dev")], "true")
    WHY_NOT = tried.stderr.strip() if tried.returncode else ""
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def said(view: View, script: str) -> str:
    done = build(view, script)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def tree() -> Iterator[Path]:
    """A directory of the agent's own uid, which it composed."""
    made = Path(tempfile.mkdtemp(prefix="ctxfs-view-"))
    (made / "sub").mkdir()
    (made / "sub" / "file").write_text("text\n")
    (made / "file").write_text("text\n")
    try:
        for path in (made, *made.rglob("*")):
            os.chown(path, UID, GID)
        yield made
    finally:
        shutil.rmtree(made)


def test_the_program_has_the_ids_and_no_right_beyond_them() -> None:
    script = "id -u; id -g; grep -E '^(Cap|NoNewPrivs|Groups)' /proc/self/status; echo $$"
    uid, gid, *lines, pid = said(base(), script).splitlines()
    assert (int(uid), int(gid), int(pid)) == (UID, GID, 1)
    values = dict(line.split(":\t", 1) for line in lines)
    bounding = values.pop("CapBnd")
    if os.geteuid() == 0:
        assert set(bounding) == {"0"} and values.pop("Groups").strip() == ""
    else:
        values.pop("Groups")
    assert values.pop("NoNewPrivs") == "1"
    assert {value for value in values.values()} == {"0" * 16}


def test_its_exit_status_is_the_programs() -> None:
    assert build(base(), "exit 7").returncode == 7
    assert build(base(), "exec 2>&-; ulimit -c 0; kill -9 $$; exit 3").returncode == 3, "PID 1"


def test_nothing_is_inherited_but_what_it_was_given() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        script = "for f in /proc/$$/fd/*; do [ ${f##*/} -lt 5 ] || readlink $f; done; env"
        found = said(base(), script).splitlines()
    finally:
        os.close(fd)
    # the shell's own
    assert {line.split("=")[0] for line in found} <= {"PWD", "PATH", "_", "OLDPWD"}


def test_the_old_root_is_gone() -> None:
    script = "ls /; cut -d ' ' -f 5 /proc/self/mountinfo; ls /../.. | head -1"
    words = said(base(), script).split()
    assert not {"old", "new", "hidden", "/old", "home", "var"} & set(words)


def test_a_network_of_its_own_has_a_loopback_that_is_up() -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no python3 of the system")
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_connection(s.getsockname()); print(*(n for _, n in socket.if_nameindex()))"
    )
    names = said([("network",), *base()], f'{python} -c "{code}"').split()
    assert "lo" in names
    # tunnels that the kernel adds to every namespace, and no other
    assert not {name for name in names if name.startswith(("eth", "en", "wl", "br"))}


def test_devices_are_the_harmless_ones() -> None:
    script = "echo x > /dev/null; head -c 2 /dev/zero | wc -c; ls -x /dev; ls /dev/pts"
    words = said(base(), script).split()
    assert words[0] == "2"
    assert set(words[1:]) == {
        "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
        "tty", "urandom", "zero",
    }


def test_there_are_so_many_terminals() -> None:
    code = (
        "import os, errno\n"
        "for n in range(100):\n"
        " try: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)\n"
        " except OSError as e: print(n, errno.errorcode[e.errno]); break"
    )
    assert said(base(), f'/usr/bin/python3 -c "{code}"') == "64 ENOSPC\n"


# what the base view leads to


def test_where_a_link_leads_there_is_its_directory_as_it_is_now(tree: Path) -> None:
    tree.chmod(0o755)
    path, directory = str(tree / "sub" / "file"), str(tree / "sub")
    view = [*base(), ("reach", directory, path)]
    script = f"cat {path}; ls {directory}; ! touch {directory}/x; ! ls {tree}/file"
    assert said(view, script) == "text\nfile\n"
    (tree / "sub" / "file").unlink()  # as a rename does, in between
    assert said(view, f"ls {directory}; echo -") == "-\n"


def test_a_link_to_a_directory_shows_that_and_one_to_a_file_alone_that_file(tree: Path) -> None:
    tree.chmod(0o755)
    view = [*base(), ("reach", str(tree), str(tree / "sub"))]
    assert said(view, f"ls {tree}; ls {tree}/sub").split() == ["sub", "file"]
    view = [*base(), ("reach", "-", str(tree / "file"))]
    assert said(view, f"ls {tree}; cat {tree}/file") == "file\ntext\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives files away")
def test_nothing_is_reached_by_a_link_nor_without_the_agents_rights(tree: Path) -> None:
    tree.chmod(0o755)
    (tree / "link").symlink_to("sub")
    (tree / "shut").mkdir(mode=0o700)
    (tree / "shut" / "file").write_text("secret\n")
    there = [str(tree / name) for name in ("link/file", "shut/file", "none/file")]
    view = [*base(), *(("reach", os.path.dirname(path), path) for path in there)]
    script = "".join(f"! cat {path} 2>&1; " for path in there)
    found = said(view, script).splitlines()
    assert [line.rpartition(": ")[2] for line in found] == [
        "No such file or directory", "Permission denied", "No such file or directory"
    ]


def test_a_text_covers_a_file_and_nobody_changes_it() -> None:
    view = [*base(), ("file", "a:x:1:\n" * 9000, "/etc/group"), ("file", "", "/tmp/empty")]
    script = "wc -l < /etc/group; ! echo x > /etc/group; ! rm /etc/group; wc -c < /tmp/empty"
    assert said(view, script).split() == ["9000", "0"]


# targets


def test_options_are_of_the_whole_tree(tree: Path) -> None:
    view = [*base(), bind(str(tree), "/t", "rx"), bind(str(tree), "/w")]
    lines = said(view, "cat /proc/self/mounts; touch /w/made; ! touch /t/x; cat /w/file")
    options = {words[1]: words[3].split(",") for words in map(str.split, lines.splitlines()[:-1])}
    assert {"ro", "noexec", "nosuid", "nodev"} <= set(options["/t"])
    assert {"rw", "nosuid", "nodev"} <= set(options["/w"]) and "noexec" not in options["/w"]
    assert lines.endswith("text\n")
    assert (tree / "made").stat().st_uid == UID


def test_targets_are_made_with_the_agents_rights(tree: Path) -> None:
    view = [*base(), bind(str(tree), "/a/b/c"), bind(str(tree / "file"), "/a/b/c/new/file")]
    assert said(view, "cat /a/b/c/new/file") == "text\n"
    assert (tree / "new" / "file").exists() and (tree / "new").stat().st_uid == UID
    denied = build([*base(), bind(str(tree), "/usr/nowhere/x")], "true")
    assert denied.returncode == 125
    assert denied.stderr == (
        "ctxfs: mount target /usr/nowhere is not there and cannot be made: Read-only file system\n"
    )


def test_links_of_what_is_bound_lead_nowhere_outside(tree: Path) -> None:
    """What would lead the host's programs astray is a name in the new root only."""
    outside = Path(tempfile.mkdtemp(prefix="ctxfs-outside-"))
    outside.chmod(0o777)
    try:
        for name, to in (("abs", str(outside)), ("rel", "../" * 20 + str(outside)[1:])):
            (tree / name).symlink_to(to)
            view = [*base(), bind(str(tree), "/t"), ("tmpfs", "0755", f"/t/{name}/deep")]
            done = build(view, f"ls -d {outside}")
            # a dangling link is not followed to make something
            assert (done.returncode, done.stdout) == (125, ""), done.stderr
            inside = [*base(), ("dir", "0755", str(outside)), bind(str(tree), "/t")]
            done = build([*inside, ("tmpfs", "0700", f"/t/{name}/deep")], f"ls {outside}")
            assert done.stdout == "deep\n", done.stderr
        assert list(outside.iterdir()) == []
    finally:
        shutil.rmtree(outside)


def test_procfs_links_are_not_followed(tree: Path) -> None:
    (tree / "magic").symlink_to("/proc/self/root")
    for view in (
        [bind(str(tree / "magic"), "/t")],
        [bind(str(tree), "/t"), bind(str(tree), "/t/magic")],
    ):
        done = build([*base(), *view], "true")
        assert done.returncode == 125
        assert "Symbolic link loop" in done.stderr


# sources


def test_a_source_may_be_missing_only_if_it_may() -> None:
    assert said([*base(), bind("/nowhere", "/t", "t")], "! test -e /t") == ""
    done = build([*base(), bind("/nowhere", "/t")], "true")
    assert (done.returncode, done.stderr) == (
        125, "ctxfs: mount source /nowhere: No such file or directory\n",
    )


def test_a_target_that_does_not_fit_its_source_is_said_to(tree: Path) -> None:
    """With what to do about it."""
    refusals = [
        (bind("/etc/hostname", "/usr/bin"),
         "mount target /usr/bin is a directory, but its source is not: name another target"),
        (bind("/etc", "/usr/bin/env"),
         "mount target /usr/bin/env is not a directory, but its source is: name another target"),
    ]
    for operation, message in refusals:
        done = build([*base(), operation], "true")
        assert (done.returncode, done.stderr) == (125, f"ctxfs: {message}\n")


def identity(path: Path) -> str:
    st = path.stat()
    return f"{st.st_dev}:{st.st_ino}"


def test_a_source_is_the_object_that_was_meant(tree: Path) -> None:
    meant = identity(tree / "sub")
    assert said([*base(), bind(str(tree / "sub"), "/t", "", meant)], "cat /t/file") == "text\n"
    (tree / "sub").rename(tree / "moved")
    message = f"ctxfs: ESTALE: mount source {tree}/sub: the path no longer leads to the file or " \
        "directory that it led to: write the line again\n"
    done = build([*base(), bind(str(tree / "sub"), "/t", "", meant)], "true")
    assert (done.returncode, done.stderr) == (125, message), "nothing is there"
    (tree / "sub").symlink_to("moved")
    done = build([*base(), bind(str(tree / "sub"), "/t", "", meant)], "true")
    assert (done.returncode, done.stderr) == (125, message), "a link to the very object"
    (tree / "sub").unlink()
    (tree / "sub").mkdir()
    done = build([*base(), bind(str(tree / "sub"), "/t", "", meant)], "true")
    assert (done.returncode, done.stderr) == (125, message), "another one"


# what is hidden


def test_what_is_hidden_depends_on_what_is_there(tree: Path) -> None:
    (tree / "link").symlink_to("sub")
    view = [*base(), bind(str(tree), "/t")]
    for name in ("sub", "file", "none", "none/below", "file/below"):
        view.append(("hide", f"/t/{name}"))
    script = "ls /t/sub; cat /t/sub/file /t/file /t/link/file; ls /t; stat -c %a /t/sub"
    done = build(view, script)
    assert done.stdout.split() == ["file", "link", "sub", "0"]
    assert done.stderr.count("ermission denied") == 4
    assert sorted(path.name for path in tree.iterdir()) == ["file", "link", "sub"]


def test_a_link_hides_what_it_leads_to_in_the_view(tree: Path) -> None:
    (tree / "link").symlink_to("/other/sub")
    view = [*base(), bind(str(tree), "/t"), bind(str(tree), "/other"), ("hide", "/t/link")]
    done = build(view, "cat /other/sub/file; cat /t/sub/file")
    assert done.stdout == "text\n" and "denied" in done.stderr


def test_what_is_closed_to_the_agent_is_hidden_where_it_is_closed(tree: Path) -> None:
    """Or what lies below would show as soon as somebody opens it."""
    if os.geteuid() != 0:
        pytest.skip("needs a directory of somebody else's")
    os.chown(tree / "sub", 0, 0)
    (tree / "sub").chmod(0o700)
    view = [*base(), bind(str(tree), "/t"), ("hide", "/t/sub/file")]
    script = "ls /t; read x < /t/opened; cat /t/sub/file"
    os.mkfifo(tree / "opened")
    (tree / "opened").chmod(0o666)
    plan = orders.memory_file("view", orders.message([MEMORY, *view]))
    program = os.open("/bin/sh", os.O_PATH)
    with subprocess.Popen(
        command(plan, program, script), pass_fds=[plan, program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:
        fifo = os.open(tree / "opened", os.O_WRONLY)  # once the view is there
        (tree / "sub").chmod(0o755)
        os.write(fifo, b"\n")
        os.close(fifo)
        out, errors = running.communicate(timeout=TIMEOUT)
    os.close(plan)
    os.close(program)
    assert out.split() == ["file", "opened", "sub"] and "denied" in errors


def test_thousands_of_hidden_paths_are_one_process_and_one_filesystem(tree: Path) -> None:
    view = [*base(), bind(str(tree), "/t")]
    for number in range(2000):
        (tree / f"d{number}").mkdir()
        view.append(("hide", f"/t/d{number}"))
    script = "grep -c '/t/d' /proc/self/mountinfo; grep '/t/d' /proc/self/mountinfo | " \
             "cut -d ' ' -f 3 | sort -u | wc -l"
    assert said(view, script).split() == ["2000", "1"]


# what is wrong with a plan


@pytest.mark.parametrize(
    ("view", "complaint"),
    [
        ([("bind", "-", "-", "/")], "wrong number of arguments for bind"),
        ([("proc",)], "wrong number of arguments for proc"),
        ([("proc", "/proc", "/proc")], "wrong number of arguments for proc"),
        ([("format", "/")], "unknown operation format"),
        ([()], "unknown operation "),
    ],
)
def test_a_plan_that_nobody_can_follow_is_refused(view: View, complaint: str) -> None:
    done = build(view, "true")
    assert (done.returncode, done.stderr) == (125, f"ctxfs: the agent's view: {complaint}\n")


WHOLE = orders.message([("proc", "/proc"), ("dev", "/dev")])


@pytest.mark.parametrize(
    "plan",
    [
        *(WHOLE[:length] for length in range(len(WHOLE))),
        WHOLE + b"dev\0",
        WHOLE.replace(b"7\0", b"8\0", 1),
        WHOLE.replace(b"2\0", b"3\0"),
        WHOLE.replace(b"2\0", b"-2\0"),
        WHOLE.replace(b"2\0", b" 2\0"),
        WHOLE.replace(b"2\0", b"18446744073709551617\0"),
        orders.message([("proc", "/proc")], "more"),
    ],
)
def test_a_damaged_plan_is_refused(plan: bytes) -> None:
    done = build([], "true", plan=plan)
    said = "ctxfs: the agent's view: the runtime's plan is damaged\n"
    assert (done.returncode, done.stderr) == (125, said)


def test_all_that_is_in_memory_has_one_bound() -> None:
    """Of bytes and of files; shared memory has as much, if this kernel lets us say so."""
    fill = "for d in / /dev/shm /tmp /more; do head -c 3m /dev/zero >$d/x 2>/dev/null; done; du -cm"
    view = [*base(), ("tmpfs", "0777", "/more")]
    assert said(view, f"{fill} /x /dev/shm/x /tmp/x /more/x | tail -n 1") == "8\ttotal\n"
    touch = "n=0; while [ $n -lt 2000 ] && true >/tmp/$n; do n=$((n+1)); done 2>/dev/null; echo $n"
    assert 800 < int(said(view, touch)) < 1000
    assert said(view, "cat /proc/sys/kernel/shmall") in ("2048\n", SHMALL)


@pytest.mark.parametrize(
    "number", ["", "x", "-1", "+5", " 5", "5 ", "5x", "4294967295", "4294967296", "1" * 30]
)
@pytest.mark.parametrize("place", [3, 4, 6])
def test_what_is_no_id_is_taken_for_none(place: int, number: str) -> None:
    """Not for 0, which is root's, nor for what changes nothing (setresuid(2))."""
    words = orders.words(native("view"), 0, 0, 5, 5, (5,), ("sh",))
    words[place] = number
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stderr[:19]) == (125, b"ctxfs: usage: view ")


@pytest.mark.parametrize(
    "change", [lambda w: w[:-1], lambda w: [*w, "x"], lambda w: [*w[:-2], "2", "sh"]]
)
def test_too_little_and_too_much_is_refused(change: Callable[[list[str]], list[str]]) -> None:
    words = change(orders.words(native("view"), 0, 0, 5, 5, "=", ("sh",)))
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stderr[:19]) == (125, b"ctxfs: usage: view ")


def test_it_says_what_the_agent_may_not_write_in_the_end(tree: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a directory of somebody else's")
    os.chown(tree / "sub", 0, 0)
    view = [
        *base(), bind(str(tree), "/t"), ("expect", "/t", "t is closed"),
        ("expect", "/t/sub", "sub is closed"), ("expect", "/usr", "usr is closed"),
    ]  # fmt: skip
    done = build(view, "echo it runs >&2")
    # the report comes to standard error as well
    said = [line for line in done.stderr.splitlines() if "closed" in line or "runs" in line]
    assert said == ["sub is closed", "usr is closed", "it runs"]
