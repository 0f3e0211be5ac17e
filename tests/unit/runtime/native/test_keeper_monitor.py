"""The programs around a run, without a daemon: what they record, keep and end.

The cell is bubblewrap's, made without privileges; everything is born in
cgroups below the one that the tests are in, which they need the right to change.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.cell.cell import native
from runtime.cell.inlet import Inlet
from runtime.cell.record import VERSION, RunRecord, read_record
from runtime.kernel import linux, orders
from runtime.kernel.cgroups import Cgroup, path_of, unified_mount
from runtime.kernel.output import Segments, append_line
from tests.worlds.daemon import TIMEOUT, wait_until
from tests.worlds.readiness import readable

BWRAP = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1"]
BWRAP += ["--die-with-parent"]
BWRAP += ["--unshare-ipc", "--unshare-uts", "--unshare-net"]
#: until a trap: a child that has it for a moment too does not wait long
DOZE = "while :; do sleep 0.1; done"
VIEW = ["--bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]


def own_cgroup() -> Path | None:
    """The cgroup that these tests are in, if it can be seen and changed."""
    mount, own = unified_mount(), path_of(os.getpid())
    if mount is None or own is None:
        return None
    found = mount / own.removeprefix("/")
    changeable = all(os.access(path, os.W_OK) for path in (found, found / "cgroup.procs"))
    return found if changeable else None


def missing() -> str:
    """Why these tests cannot run here; empty if they can."""
    for name in ("monitor", "keeper", "enter"):
        if not native(name).exists():
            return f"{name} is not compiled: make programs"
    if shutil.which("bwrap") is None:
        return "bwrap is missing: apt-get install bubblewrap"
    if own_cgroup() is None:
        return "the cgroup of the tests cannot be changed: run them as root"
    trial = subprocess.run([*BWRAP, *VIEW, "--", "true"], capture_output=True, check=False)
    return "" if trial.returncode == 0 else f"bwrap cannot be used: {trial.stderr.decode()}"


WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def wait_readable(fd: int) -> None:
    assert readable([fd], TIMEOUT), "nothing happened"


def wait_modified(path: Path, condition: Callable[[], object]) -> None:
    """Until something holds that can only come about by a change of the file."""
    fd = linux.inotify_init()
    try:
        linux.inotify_add_watch(fd, path, linux.IN_MODIFY)
        while not condition():
            wait_readable(fd)
            os.read(fd, 4096)
    finally:
        os.close(fd)


class Run:
    """One run of a shell script as the agent's program, followed by its monitor."""

    def __init__(self, base: Path) -> None:
        self.directory = base / "agent"
        self.directory.mkdir()
        self.record_path = base / "record"
        cgroup = own_cgroup()
        assert cgroup is not None
        self.cgroup = cgroup
        self.leaf = Cgroup(cgroup / f"ctxfs-test-{os.getpid()}-{base.name}")
        self.leaf.path.mkdir()
        self.lifeline = base / "lifeline"
        os.mkfifo(self.lifeline)
        # a daemon that lives
        self._daemon: int | None = os.open(self.lifeline, os.O_RDWR | os.O_CLOEXEC)
        #: a process like this one's child, until it is reaped
        self.monitor: int | None = None

    def daemon_dies(self) -> None:
        if self._daemon is not None:
            os.close(self._daemon)
            self._daemon = None

    def start(
        self,
        *argv: str,
        script: str = "",
        grace: int = 5000,
        log_max: int = 1 << 20,
        environment: tuple[str, ...] = ("PATH=/usr/bin:/bin",),
        cwd: str = "/",
        spec: bytes | int | None = None,
        steps: list[str] | None = None,
        view: list[str] = VIEW,
        leaf: Path | None = None,
        log: str = "",
        reply: str = "-",
        room: Path | str = "-",
        lead: str = "cell",
        cell: int | None = None,
        inlet: Inlet | None = None,
        fed: bool = True,
        whole: Cgroup | None = None,
        lease: Path | None = None,
        lease_grace: int = 0,
        terminal: tuple[int, int] | None = None,
    ) -> int:
        """Returns 0 once the monitor is recorded, or what it exits with if it is not.

        ``spec`` stands for all that makes up one, or is a descriptor to read it
        from. ``cell`` is a pidfd that the steps find after it, and then the keeper. The program's
        standard input is what the monitor is handed by ``inlet``, if that is ``fed``. A hang-up
        kills ``whole``, and so does the end of the lease in a file.
        """
        words = argv or (("sh", "-c", script) if script else ())
        screen = ("terminal", *terminal) if terminal else ()
        made = orders.message(cwd, environment, words, *screen)
        data = spec if isinstance(spec, bytes) else made
        memory = orders.memory_file("spec", data)
        fds = [spec if isinstance(spec, int) else memory]
        program = os.open(native("keeper"), os.O_PATH | os.O_CLOEXEC)
        if cell is not None:
            fds += [cell, program]
        keeper = [str(native("keeper")), "4", "3", str(grace)]
        complaint, complaining = os.pipe2(os.O_CLOEXEC)
        listening = os.open(os.devnull, os.O_RDONLY) if inlet is None else inlet.listen()
        try:
            pid = os.posix_spawn(
                native("monitor"),
                orders.words(
                    *(native("monitor"), self.record_path),
                    *(self.directory / "out", log or self.directory / "log", reply, log_max),
                    *(room, self.lifeline, leaf or self.leaf.path, os.getuid()),
                    lead,
                    "-" if inlet is None else listening,
                    "fed" if fed and inlet is not None else "-",
                    "-" if whole is None else str(whole),
                    *("-" if lease is None else lease, lease_grace),
                    fds,
                    *orders.words(steps or [*BWRAP, *view, "--", *keeper]),
                ),
                {},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, complaining, 2),
                    *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in (*fds, listening)),
                ],
            )
        finally:
            os.close(complaining)
            os.close(listening)
            os.close(memory)
            os.close(program)
        wait_readable(complaint)
        os.close(complaint)
        if self.record.monitor != pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.monitor = pid
        return 0

    def hold(self, *, grace: int = 60_000) -> int:
        """A cell without a program; the pid of its keeper."""
        self.start(grace=grace)
        return self.wait_record(lambda record: record.held and record.keeper).keeper

    def enter(
        self,
        cell: Run,
        *argv: str,
        script: str = "",
        spec: bytes | None = None,
        log: str = "",
        reply: str = "-",
        log_max: int = 1 << 20,
        leads: bool = False,
        inlet: Inlet | None = None,
        **options: Any,
    ) -> None:
        """A run of its own in a cell that is held; ``leads`` makes its end the cell's."""
        runner = ["keeper", "4", "3", "-"]
        ids = [str(os.getuid()), str(os.getgid()), "="]
        held = os.pidfd_open(cell.record.keeper)
        try:
            self.start(
                *argv,
                script=script,
                spec=spec,
                steps=orders.words(native("enter"), 5, 6, *ids, "cell", runner),
                log=log,
                reply=reply,
                log_max=log_max,
                lead=str(held) if leads else "-",
                cell=held,
                inlet=inlet,
                **options,
            )
        finally:
            os.close(held)

    @property
    def record(self) -> RunRecord:
        return read_record(self.record_path)

    @property
    def lines(self) -> list[str]:
        return self.record_path.read_text().splitlines()

    def wait_record(self, condition: Callable[[RunRecord], object]) -> RunRecord:
        wait_modified(self.record_path, lambda: condition(self.record))
        return self.record

    def wait_end(self) -> RunRecord:
        assert self.wait_monitor() == 0
        return self.record

    def wait_monitor(self) -> int:
        """What the monitor exits with, once it does."""
        assert self.monitor is not None
        held = os.pidfd_open(self.monitor)
        try:
            wait_readable(held)
        finally:
            os.close(held)
        return os.waitstatus_to_exitcode(os.waitpid(self.reaped(), 0)[1])

    def reaped(self) -> int:
        assert self.monitor is not None
        pid, self.monitor = self.monitor, None
        return pid

    def output(self, name: str = "out") -> bytes:
        output = Segments(self.directory / name)
        return output.read(0, output.size)

    def close(self) -> None:
        self.daemon_dies()
        self.leaf.kill()
        with open(self.leaf.path / "cgroup.events") as events:
            changed = select.poll()
            changed.register(events, select.POLLPRI)
            while "populated 1" in events.read():
                assert changed.poll(TIMEOUT * 1000), "processes are left"
                events.seek(0)
        self.leaf.path.rmdir()
        if self.monitor is not None:  # a cell that was held, or a test that failed
            os.kill(self.monitor, signal.SIGKILL)
            os.waitpid(self.reaped(), 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as made:
        yield made


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Run]:
    """For runs to enter, once it is told to hold."""
    base = tmp_path / "cell"
    base.mkdir()
    with closing(Run(base)) as made:
        yield made


class Signpost:
    """A FIFO by which a script says that it has come so far, or is told to go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def wait_reached(self) -> str:
        wait_readable(self._fd)
        return os.read(self._fd, 100).decode().strip()

    def tell(self) -> None:
        os.write(self._fd, b"go\n")

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Signpost]:
    with closing(Signpost(tmp_path / "post")) as made:
        yield made


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Signpost]:
    with closing(Signpost(tmp_path / "go")) as made:
        yield made


# what is recorded


@pytest.mark.parametrize("code", [0, 1, 3, 126, 127, 255])
def test_an_exit_code_is_recorded(run: Run, code: int) -> None:
    run.start(script=f"exit {code}")
    record = run.wait_end()
    assert (record.exit_code, record.signal, record.failed) == (code, None, "")
    assert record.finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGSEGV])
def test_a_signal_is_recorded(run: Run, number: signal.Signals) -> None:
    run.start(script=f"kill -{number.value} $$")
    record = run.wait_end()
    assert (record.exit_code, record.signal) == (None, number)


def test_what_was_ignored_outside_is_not_ignored_inside(run: Run) -> None:
    ignored = (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT)
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        run.start(script=f"kill -{signal.SIGHUP.value} $$")
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    assert run.wait_end().signal == signal.SIGHUP


def test_a_record_has_all_its_lines_in_order(run: Run) -> None:
    before, before_up = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    run.start(script="exit 0")
    record = run.wait_end()
    assert run.lines[0] == f"version {VERSION}"
    words = [line.split()[0] for line in run.lines[1:]]
    words.remove("monitor")  # noted beside what its program does, however late
    assert sorted(words[:-3]) == ["began", "chain", "keeper", "start"]
    assert words.index("keeper") < words.index("start")
    assert words[-3:] == ["ceased", "exit", "end"]
    assert len({record.monitor, record.chain, record.program}) == 3
    assert before <= record.started <= record.ended <= time.time_ns()
    up = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before_up <= record.started_up <= record.ended_up <= up


def test_pids_are_those_of_this_namespace(run: Run, post: Signpost) -> None:
    run.start(script=f"echo $$ > {post.path}; exec sleep 60")
    inside = post.wait_reached()
    record = run.wait_record(lambda record: record.started)
    status = Path(f"/proc/{record.program}/status").read_text()
    assert f"NSpid:\t{record.program}\t{inside}\n" in status
    status = Path(f"/proc/{record.keeper}/status").read_text()
    assert f"NSpid:\t{record.keeper}\t1\n" in status


def test_an_interpreter_that_is_not_there_is_said(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    run.start(str(script))
    record = run.wait_end()
    remedy = "its interpreter is not in the agent's view: mount that as well"
    assert record.failed == f"{script}: {remedy}"
    assert record.exit_code == 127


def test_a_program_that_is_not_there_is_said(run: Run) -> None:
    run.start("no-such-program", "x")
    record = run.wait_end()
    remedy = "mount it, or name another in exec"
    assert record.failed == f"no-such-program: no such program in the agent's view: {remedy}"
    assert record.exit_code == 127


def test_a_program_that_cannot_be_executed_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    run.start(str(tmp_path / "text"))
    record = run.wait_end()
    assert record.failed == f"{tmp_path}/text: Permission denied"
    assert record.exit_code == 126


def test_programs_are_found_as_a_shell_finds_them(run: Run, tmp_path: Path) -> None:
    """Past what is no directory or may not be executed; and a script needs no ``#!``."""
    for name in ("denied", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script").write_text('echo "$0" "$@"\n')
    (tmp_path / "there" / "script").chmod(0o755)
    places = (tmp_path / "none", tmp_path / "record", tmp_path / "denied", tmp_path / "there")
    path = ":".join(map(str, places))
    run.start("script", "a b", "c", environment=(f"PATH={path}",))
    record = run.wait_end()
    assert record.exit_code == 0, record.failed
    assert run.output() == f"{tmp_path}/there/script a b c\n".encode()


def test_what_may_not_be_executed_is_told_from_what_is_missing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("echo never\n")
    run.start("script", environment=(f"PATH={tmp_path}:/no/such",))
    record = run.wait_end()
    assert record.failed == "script: Permission denied"
    assert record.exit_code == 126


def test_a_program_without_a_search_path_is_found(run: Run) -> None:
    run.start("true", environment=())
    assert run.wait_end().exit_code == 0


SHOW_KEYRING = (
    "import ctypes, platform\n"
    "keyctl = 250 if platform.machine() == 'x86_64' else 219\n"
    "call = ctypes.CDLL(None).syscall\n"
    "text = ctypes.create_string_buffer(256)\n"
    "ring = call(keyctl, 0, -3, 0)\n"
    "call(keyctl, 6, ring, text, 256)\n"
    "print(ring, text.value.decode())\n"
)


def test_each_run_gets_a_session_keyring_on_the_account_of_the_daemon(run: Run) -> None:
    """Not of the agent's uid: it would have room for few."""
    own = subprocess.check_output([sys.executable, "-c", SHOW_KEYRING], text=True)
    run.start(steps=[sys.executable, "-c", SHOW_KEYRING])
    run.wait_end()
    said = run.output().decode()
    assert said.split()[0] != own.split()[0]
    assert said.split()[1].startswith(f"keyring;{os.getuid()};")


def test_a_working_directory_that_is_not_there_is_said(run: Run) -> None:
    run.start(script="exit 0", cwd="/no/such")
    record = run.wait_end()
    assert record.failed == "cwd /no/such: No such file or directory"
    assert record.exit_code == 126


def test_control_characters_do_not_reach_the_record(run: Run) -> None:
    run.start("evil\nexit 0 1\n\x1b[31m")
    record = run.wait_end()
    assert record.exit_code == 127
    assert record.failed.startswith("evil?exit 0 1??[31m: ")


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"/",
        b"/\0",
        b"0\0",
        b"1\0/\0",
        b"3\0/\x005\0A=1\0",
        b"4\0/\0-1\x001\0sh\0",
        b"5\0/\x000\x001\0sh\0",
        b"4\0/\x000\x001\0sh",
        b"4\0/\x000\x002\0sh\0",
        b"5\0/\x000\x001\0sh\0more\0",
    ],
)
def test_damaged_start_data_is_said(run: Run, spec: bytes) -> None:
    run.start(spec=spec)
    record = run.wait_end()
    assert record.failed == "the runtime's start data is damaged"
    assert not record.started
    assert record.finished


def test_steps_that_fail_end_the_run_and_say_why_in_the_log(run: Run) -> None:
    run.start(steps=["no-such-step"])
    record = run.wait_end()
    assert (record.keeper, record.started, record.finished) == (0, 0, True)
    assert run.output("log") == b"ctxfs: no-such-step: No such file or directory\n"


def test_a_cgroup_that_is_not_there_fails_the_start(run: Run, tmp_path: Path) -> None:
    assert run.start(script="exit 0", leaf=tmp_path / "none") == 0
    assert run.wait_monitor() == 1
    assert run.record.failed == f"{tmp_path}/none: No such file or directory"
    assert run.record.finished


def test_the_monitor_goes_on_when_it_is_known(run: Run, post: Signpost) -> None:
    assert run.start(script=f"read go < {post.path}; exit 0") == 0
    assert run.monitor is not None
    assert Path(f"/proc/{run.monitor}/comm").read_text() in ("monitor\n", "ctx-monitor\n")
    for number in (1, 2):
        assert os.readlink(f"/proc/{run.monitor}/fd/{number}") == "/dev/null"
    with open(post.path, "w") as file:
        file.write("go\n")
    run.wait_end()


# what the program finds


def test_the_program_has_its_environment_and_nothing_else(run: Run) -> None:
    run.start("/usr/bin/env", environment=("A=1", "B=x y\nz"))
    run.wait_end()
    assert run.output() == b"A=1\nB=x y\nz\n"


def test_the_program_has_three_descriptors(run: Run) -> None:
    run.start(script="echo /proc/self/fd/*")
    run.wait_end()
    # 3 may be the directory that the shell itself is reading
    found = {word.rpartition("/")[2] for word in run.output().decode().split()}
    assert {"0", "1", "2"} <= found <= {"0", "1", "2", "3"}


def test_the_program_has_no_blocked_signals_and_no_core(run: Run) -> None:
    run.start(script="grep -E 'Sig(Blk|Ign)' /proc/self/status; ulimit -c; umask")
    run.wait_end()
    blocked, _, core, mask = run.output().decode().splitlines()
    assert blocked.split() == ["SigBlk:", "0000000000000000"]
    assert (core, mask) == ("0", "0022")


def test_standard_output_and_error_go_apart(run: Run) -> None:
    run.start(script="echo one; echo two >&2; echo three > /dev/stdout; echo four > /dev/stderr")
    run.wait_end()
    assert run.output("out") == b"one\nthree\n"
    assert run.output("log") == b"two\nfour\n"


# how much is kept


def test_output_is_cut_into_segments_of_which_the_last_two_are_kept(run: Run) -> None:
    run.start(script="yes 0123456789abcde | head -c 1048576", log_max=65536)
    run.wait_end()
    names = sorted(os.listdir(run.directory / "out"))
    assert len(names) == 2
    output = Segments(run.directory / "out")
    first, second = output.segments
    assert second.start == first.start + first.size
    assert second.start + second.size == 1048576
    assert 32768 <= first.size + second.size <= 65536 + 2 * 65536
    kept = output.read(len(output.header), 1 << 20)
    whole = b"0123456789abcde\n" * 65536
    assert kept == whole[first.start :]
    assert str(first.start).encode() in output.header


def test_what_fits_is_kept_in_one_segment(run: Run) -> None:
    run.start(script="head -c 4000 /dev/zero", log_max=8192)
    run.wait_end()
    assert os.listdir(run.directory / "out") == [f"{0:020d}"]
    assert len(run.output()) == 4000


def write_room(path: Path, most: int, *, version: int = 1) -> None:
    path.write_bytes(struct.pack("=Qqq", version, 0, most))


def kept(path: Path) -> int:
    return int(struct.unpack("=Qqq", path.read_bytes())[1])


def test_what_is_over_the_owners_room_is_dropped_and_told(tmp_path: Path, run: Run) -> None:
    room = tmp_path / "room"
    write_room(room, 100_000)
    run.start(script="head -c 300000 /dev/zero; echo no >&2", room=room)
    run.wait_end()
    said = run.output()
    assert said.startswith(bytes(100_000)), "all that fits is kept"
    lost = b"\nctxfs: 200000 bytes of output lost, the disk or its owner's account of it was full\n"
    assert said[100_000:] == lost
    assert b"ctxfs: 3 bytes of output lost" in run.output("log"), "both streams share it"
    assert kept(room) == len(said) + len(run.output("log"))


def test_removed_segments_make_room(tmp_path: Path, run: Run) -> None:
    """A program that says much, of which little is kept, does not use its owner's room up."""
    room = tmp_path / "room"
    write_room(room, 200_000)
    run.start(script="yes | head -c 1048576", log_max=65536, room=room)
    run.wait_end()
    output = Segments(run.directory / "out")
    assert output.end == 1048576
    assert kept(room) == sum(segment.size for segment in output.segments)


@pytest.mark.parametrize("made", [False, True])
def test_without_room_that_it_knows_a_monitor_keeps_all(
    tmp_path: Path, run: Run, made: bool
) -> None:
    if made:
        write_room(tmp_path / "room", 10, version=2)
    run.start(script="head -c 1000 /dev/zero", room=tmp_path / "room")
    run.wait_end()
    assert len(run.output()) == 1000


def test_what_says_nothing_makes_no_directories(run: Run) -> None:
    run.directory.rmdir()
    run.start(script="exit 0")
    run.wait_end()
    assert not run.directory.exists()


def test_the_first_data_make_the_directories(run: Run) -> None:
    run.directory.rmdir()
    run.start(script="echo said >&2")
    run.wait_end()
    assert os.listdir(run.directory) == ["log"]
    assert run.output("log") == b"said\n"


def test_a_later_run_goes_on_where_the_earlier_left_off(tmp_path: Path, run: Run) -> None:
    (run.directory / "out").mkdir()
    (run.directory / "out" / f"{100:020d}").write_bytes(b"earlier\n")
    run.start(script="echo later")
    run.wait_end()
    assert os.listdir(run.directory / "out") == [f"{100:020d}"]
    assert run.output().endswith(b"earlier\nlater\n")


def test_output_is_complete_after_the_whole_chain_was_killed(run: Run, post: Signpost) -> None:
    run.start(script=f"head -c 300000 /dev/zero; echo end; echo x > {post.path}; exec sleep 60")
    post.wait_reached()
    record = run.wait_record(lambda record: record.started and record.keeper)
    for pid in (record.chain, record.keeper, record.program):
        with suppress(ProcessLookupError):  # with its PID 1 the cell goes
            os.kill(pid, signal.SIGKILL)
    record = run.wait_end()
    assert record.finished
    assert len(run.output()) == 300004


def test_output_after_the_programs_end_is_kept_too(run: Run, post: Signpost) -> None:
    run.start(script=f"(read go < {post.path}; echo late) & exit 0")
    run.wait_record(lambda record: record.ended)
    with open(post.path, "w") as file:
        file.write("go\n")
    run.wait_end()
    assert run.output() == b"late\n"


# what is left behind


def test_a_background_process_holds_the_cell(run: Run, post: Signpost) -> None:
    run.start(script=f"(read go < {post.path}) & exit 7")
    record = run.wait_record(lambda record: record.ended)
    assert (record.exit_code, record.finished) == (7, False)
    assert Path(f"/proc/{record.keeper}").exists()
    assert Path(f"/proc/{run.monitor}/comm").read_text() == "ctx-monitor\n"
    with open(post.path, "w") as file:
        file.write("go\n")
    assert run.wait_end().finished


def test_without_a_daemon_what_is_left_is_ended(run: Run, post: Signpost) -> None:
    trap = f"trap 'echo ended; exit' TERM; echo x > {post.path}; while :; do sleep 60 & wait; done"
    run.start(script=f"({trap}) & read x < {post.path}; exit 0")
    run.wait_record(lambda record: record.ended)
    run.daemon_dies()
    assert run.wait_end().exit_code == 0
    assert run.output() == b"ended\n"


def test_a_daemon_that_died_before_the_end_makes_no_difference(run: Run) -> None:
    run.daemon_dies()
    run.start(script="sleep 600 & exit 4")
    assert run.wait_end().exit_code == 4


def test_what_ignores_sigterm_is_ended_after_the_grace(run: Run, post: Signpost) -> None:
    stubborn = f"trap '' TERM; echo x > {post.path}; while :; do sleep 60; done"
    run.start(script=f"({stubborn}) & read x < {post.path}; exit 0", grace=200)
    run.wait_record(lambda record: record.ended)
    before = time.monotonic()
    run.daemon_dies()
    run.wait_end()
    assert 0.19 <= time.monotonic() - before < TIMEOUT


def test_what_is_stopped_is_woken_to_be_ended(run: Run, post: Signpost) -> None:
    stopped = f"echo $$ > {post.path}; kill -STOP $$; sleep 600"
    run.start(script=f"sh -c '{stopped}' & exit 0", grace=60_000)
    post.wait_reached()
    run.wait_record(lambda record: record.ended)
    run.daemon_dies()
    run.wait_end()


# being stopped


def test_sigterm_to_the_keeper_ends_the_cell_in_order(run: Run, post: Signpost) -> None:
    run.start(script=f"trap 'echo bye; exit 5' TERM; echo x > {post.path}; sleep 60 & wait")
    post.wait_reached()
    record = run.wait_record(lambda record: record.keeper and record.started)
    os.kill(record.keeper, signal.SIGTERM)
    record = run.wait_end()
    assert record.exit_code == 5
    assert "term" in run.lines
    assert run.output() == b"bye\n"


def test_sigterm_to_the_keeper_ends_what_ignores_it_after_the_grace(
    run: Run, post: Signpost
) -> None:
    run.start(script=f"trap '' TERM; echo x > {post.path}; while :; do sleep 60; done", grace=200)
    post.wait_reached()
    record = run.wait_record(lambda record: record.keeper and record.started)
    os.kill(record.keeper, signal.SIGTERM)
    record = run.wait_end()
    assert record.finished
    assert record.exit_code is None


def test_further_sigterms_do_not_begin_the_grace_anew(run: Run, post: Signpost) -> None:
    run.start(script=f"trap '' TERM; echo x > {post.path}; while :; do sleep 60; done", grace=300)
    post.wait_reached()
    record = run.wait_record(lambda record: record.keeper and record.started)
    keeper = os.pidfd_open(record.keeper)
    deadline = time.monotonic() + TIMEOUT
    try:
        while not readable([keeper], 0.05):
            assert time.monotonic() < deadline, "the grace never ends"
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(keeper, signal.SIGTERM)
    finally:
        os.close(keeper)
    assert run.wait_end().finished


def test_a_cell_whose_monitor_is_gone_ends_itself(run: Run, post: Signpost) -> None:
    run.start(script=f"trap 'exit 0' TERM; echo x > {post.path}; sleep 60 & wait")
    post.wait_reached()
    record = run.wait_record(lambda record: record.keeper and record.started)
    keeper = os.pidfd_open(record.keeper)
    try:
        assert run.monitor is not None
        os.kill(run.monitor, signal.SIGKILL)
        os.waitpid(run.reaped(), 0)
        wait_readable(keeper)
    finally:
        os.close(keeper)


def test_the_agents_program_cannot_end_its_keeper(run: Run) -> None:
    run.start(script="kill -KILL 1; kill -STOP 1; kill -SEGV 1; exit 6")
    assert run.wait_end().exit_code == 6


#: rt_sigqueueinfo(2) to PID 1 with what the caller likes as the sender's pid
FORGE = """
import ctypes, os, signal, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def queue(pid, number, sender=0):
    info = struct.pack("iiiiii", number, 0, -1, 0, sender, 0).ljust(128, b"\\0")
    return libc.syscall(129, pid, number, info)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM])
def test_a_keeper_takes_no_orders_from_inside(run: Run, number: signal.Signals) -> None:
    lines = [FORGE, f"os.kill(1, {number:d})", f"assert queue(1, {number:d}) == 0", "sys.exit(6)"]
    run.start("python3", "-c", "\n".join(lines))
    record = run.wait_end()
    assert (record.exit_code, record.held) == (6, False)
    assert not {"hold", "term"}.intersection(run.lines)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_nor_with_a_signal_that_has_no_sender(run: Run, number: signal.Signals) -> None:
    # without room for its particulars it reads as sent from outside, by uid 0
    lines = [FORGE, f"assert queue(1, {number:d}) == 0", "sys.exit(6)"]
    room, most = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, most))
    try:
        run.start("python3", "-c", "\n".join(lines), view=["--uid", "1000", *VIEW])
    finally:
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (room, most))
    record = run.wait_end()
    assert (record.exit_code, record.held) == (6, False), run.output("log")
    assert not {"hold", "term"}.intersection(run.lines)


# a cell that is held


def test_a_cell_is_held_without_a_program(run: Run) -> None:
    keeper = run.hold()
    record = run.record
    assert (record.started, record.over, record.settled) == (0, False, True)
    os.kill(keeper, signal.SIGHUP)
    record = run.wait_end()
    assert (record.exit_code, record.signal, record.failed) == (None, None, "")
    words = [line.split()[0] for line in run.lines]
    assert words[-2:] == ["hold", "end"]
    assert words.count("hold") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_held_cell_with_nothing_in_it_ends_at_once(run: Run, number: signal.Signals) -> None:
    keeper = run.hold(grace=600_000)
    os.kill(keeper, number)
    assert run.wait_end().finished
    assert ("term" in run.lines) == (number == signal.SIGTERM)


@pytest.mark.parametrize(
    ("number", "program", "lines"),
    [
        (signal.SIGUSR1, "true", ["hold", "exit 0"]),
        (signal.SIGHUP, "true", ["exit 0"]),
        (signal.SIGTERM, "sleep 600", ["term", "signal 15"]),
    ],
)
def test_a_signal_is_obeyed_that_comes_before_the_keeper_is_ready(
    run: Run, number: signal.Signals, program: str, lines: list[str]
) -> None:
    source, spec = os.pipe()
    try:
        run.start(spec=source)
        # it says hello, and waits for the end of the pipe that says what to start
        record = run.wait_record(lambda record: record.keeper)
        os.kill(record.keeper, number)
        os.write(spec, orders.message("/", (), ("sh", "-c", program)))
    finally:
        os.close(spec)
        os.close(source)
    if number == signal.SIGUSR1:
        run.wait_record(lambda record: record.ended)
        os.kill(record.keeper, signal.SIGHUP)
    run.wait_end()
    surroundings = (
        "version", "monitor", "chain", "keeper", "began", "start", "ceased", "end",
    )
    told = [line for line in run.lines if line.split()[0] not in surroundings]
    assert [" ".join(line.split()[:2]) for line in told] == lines


def test_a_cell_that_was_to_be_held_when_its_program_died_is_held(
    cell: Run, run: Run, post: Signpost
) -> None:
    cell.start(script=f"echo x > {post.path}; exec sleep 600")
    post.wait_reached()
    record = cell.wait_record(lambda record: record.started and record.keeper)
    # it finds both at once, and nothing else in the namespace
    os.kill(record.keeper, signal.SIGSTOP)
    os.kill(record.keeper, signal.SIGUSR1)
    os.kill(record.program, signal.SIGKILL)
    os.kill(record.keeper, signal.SIGCONT)
    record = cell.wait_record(lambda record: record.ended)
    assert (record.held, record.signal) == (True, signal.SIGKILL)
    assert [line.split()[0] for line in cell.lines[-3:]] == ["hold", "ceased", "signal"]
    run.enter(cell, script="exit 5")
    assert run.wait_end().exit_code == 5


def test_a_cell_is_held_for_what_its_program_left_behind(
    cell: Run, run: Run, post: Signpost
) -> None:
    cell.start(script=f"(read go < {post.path}) & exit 0")
    record = cell.wait_record(lambda record: record.ended)
    assert not record.held
    os.kill(record.keeper, signal.SIGUSR1)
    cell.wait_record(lambda record: record.held)
    os.kill(record.keeper, signal.SIGUSR1)
    post.tell()
    run.enter(cell, script="exit 5")
    assert run.wait_end().exit_code == 5
    os.kill(record.keeper, signal.SIGHUP)
    cell.wait_end()
    assert cell.lines.count("hold") == 1


def test_sighup_waits_for_what_is_in_the_cell(cell: Run, run: Run, go: Signpost) -> None:
    keeper = cell.hold()
    run.enter(cell, script=f"trap 'echo signal' HUP TERM; read go < {go.path}; echo end")
    run.wait_record(lambda record: record.started)
    os.kill(keeper, signal.SIGHUP)
    # of what is done from here on the keeper has been told
    os.kill(keeper, signal.SIGUSR1)
    go.tell()
    assert run.wait_end().exit_code == 0
    assert run.output() == b"end\n"
    assert cell.wait_end().finished


def test_sighup_waits_for_the_program(run: Run, go: Signpost) -> None:
    run.start(script=f"trap 'echo signal' HUP TERM; read go < {go.path}; echo end; exit 3")
    record = run.wait_record(lambda record: record.started and record.keeper)
    os.kill(record.keeper, signal.SIGUSR1)
    run.wait_record(lambda record: record.held)
    os.kill(record.keeper, signal.SIGHUP)
    go.tell()
    assert run.wait_end().exit_code == 3
    assert run.output() == b"end\n"


def test_sigterm_ends_what_is_in_a_held_cell(cell: Run, run: Run, post: Signpost) -> None:
    keeper = cell.hold(grace=600_000)
    run.enter(cell, script=f"trap 'echo bye; exit 5' TERM; echo x > {post.path}; {DOZE}")
    post.wait_reached()
    os.kill(keeper, signal.SIGTERM)
    assert cell.wait_end().finished
    assert run.wait_end().exit_code == 5
    assert run.output() == b"bye\n"


def test_what_ignores_that_is_ended_after_the_grace(cell: Run, run: Run, post: Signpost) -> None:
    keeper = cell.hold(grace=200)
    run.enter(cell, script=f"trap '' TERM; echo x > {post.path}; while :; do sleep 60; done")
    post.wait_reached()
    before = time.monotonic()
    os.kill(keeper, signal.SIGTERM)
    cell.wait_end()
    assert 0.19 <= time.monotonic() - before < TIMEOUT
    # its runner went with the cell, so nobody could tell how
    record = run.wait_end()
    assert (record.exit_code, record.signal, record.finished) == (None, None, True)


def test_a_held_cell_whose_monitor_is_gone_ends_itself(run: Run) -> None:
    keeper = os.pidfd_open(run.hold())
    try:
        assert run.monitor is not None
        os.kill(run.monitor, signal.SIGKILL)
        os.waitpid(run.reaped(), 0)
        wait_readable(keeper)
    finally:
        os.close(keeper)


# a run that enters one


@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_entered_runs_exit_code_is_recorded(cell: Run, run: Run, code: int) -> None:
    cell.hold()
    run.enter(cell, script=f"echo out; echo log >&2; exit {code}")
    record = run.wait_end()
    assert (record.exit_code, record.failed, record.finished) == (code, "", True)
    assert (run.output(), run.output("log")) == (b"out\n", b"log\n")
    assert run.lines[0] == f"version {VERSION}"
    words = [line.split()[0] for line in run.lines[1:]]
    words.remove("monitor")  # noted beside what its program does, however late
    assert sorted(words[:-3]) == ["began", "chain", "keeper", "start"]
    assert words.index("keeper") < words.index("start")
    assert words[-3:] == ["ceased", "exit", "end"]
    assert len({record.monitor, record.chain, record.keeper, record.program}) == 4
    assert not cell.record.finished


def test_an_entered_runs_signal_is_recorded(cell: Run, run: Run) -> None:
    cell.hold()
    run.enter(cell, script="kill -9 $$")
    record = run.wait_end()
    assert (record.exit_code, record.signal) == (None, signal.SIGKILL)


def test_an_entered_program_that_is_not_there_is_said(cell: Run, run: Run) -> None:
    cell.hold()
    run.enter(cell, "no-such-program")
    record = run.wait_end()
    remedy = "mount it, or name another in exec"
    assert record.failed == f"no-such-program: no such program in the agent's view: {remedy}"
    assert record.exit_code == 127


@pytest.mark.parametrize("spec", [b"", orders.message("/", (), ())])
def test_a_runner_without_a_program_says_so(cell: Run, run: Run, spec: bytes) -> None:
    cell.hold()
    run.enter(cell, spec=spec)
    assert run.wait_end().failed == "the runtime's start data is damaged"


def test_an_entered_program_is_as_free_and_as_bound_as_the_cells_own(cell: Run, run: Run) -> None:
    cell.hold()
    script = "grep -E '^(Sig(Blk|Ign)|Cap...|NoNewPrivs|Seccomp):' /proc/self/status"
    run.enter(cell, script=f"{script}; ulimit -c; umask; env; echo /proc/self/fd/*")
    assert run.wait_end().exit_code == 0, run.output("log")
    lines = run.output().decode().splitlines()
    values = dict(line.split(":\t") for line in lines if ":\t" in line)
    assert values.pop("NoNewPrivs") == "1"
    assert values.pop("Seccomp") == "2"
    if os.getuid():
        # of no use to it: nothing that it executes may gain any
        values.pop("CapBnd")
    values.pop("SigIgn")
    assert set(values.values()) == {f"{0:016x}"}
    assert lines[-5:-3] == ["0", "0022"] or lines[-6:-4] == ["0", "0022"]
    assert "PATH=/usr/bin:/bin" in lines
    assert set(lines[-1].split()) <= {f"/proc/self/fd/{fd}" for fd in range(4)}


def test_an_entered_program_has_a_session_without_a_terminal(cell: Run, run: Run) -> None:
    cell.hold()
    run.enter(cell, script="cat /proc/self/stat; cat /proc/$PPID/stat; : < /dev/tty")
    assert run.wait_end().exit_code != 0
    of_cat, of_runner = run.output().decode().splitlines()
    assert of_cat.rpartition(") ")[2].split()[3:5] == [of_runner.split()[0], "0"]


def test_a_runner_listens_to_nobody(cell: Run, run: Run) -> None:
    cell.hold()
    signals = "HUP INT QUIT USR1 USR2 PIPE ALRM TERM CHLD TSTP"
    run.enter(cell, script=f"for s in {signals}; do kill -$s $PPID; done; exit 4")
    assert run.wait_end().exit_code == 4


def test_a_run_lasts_until_nothing_of_it_is_left(
    cell: Run, run: Run, post: Signpost, go: Signpost
) -> None:
    cell.hold()
    late = f"echo x > {post.path}; read go < {go.path}; head -c 300000 /dev/zero; echo late"
    run.enter(cell, script=f"setsid sh -c '{late}' & exit 2")
    post.wait_reached()
    record = run.wait_record(lambda record: record.ended)
    assert (record.exit_code, record.finished) == (2, False)
    go.tell()
    assert run.wait_end().finished
    assert run.output() == bytes(300000) + b"late\n"
    assert not cell.record.finished


def test_what_is_left_without_output_costs_nothing(
    cell: Run, run: Run, post: Signpost, go: Signpost
) -> None:
    cell.hold()
    quiet = f"exec >&- 2>&-; sleep 0.5; echo x > {post.path}; read go < {go.path}"
    run.enter(cell, script=f"({quiet}) & exit 0")
    post.wait_reached()
    assert not run.record.finished
    stat = Path(f"/proc/{run.monitor}/stat").read_text().rpartition(") ")[2].split()
    ticks = int(stat[11]) + int(stat[12])
    assert ticks < os.sysconf("SC_CLK_TCK") // 10
    go.tell()
    run.wait_end()


def test_a_cells_own_run_lasts_as_long(run: Run, go: Signpost) -> None:
    run.start(script=f"(read go < {go.path}; echo late) & exit 0")
    run.wait_record(lambda record: record.ended)
    go.tell()
    run.wait_end()
    assert run.output() == b"late\n"


# whose output it is


def test_standard_error_may_go_with_the_output(cell: Run, run: Run) -> None:
    cell.hold()
    script = "for i in 1 2 3; do echo out $i; echo log $i >&2; done; echo x > /dev/stderr"
    run.enter(cell, script=script, log="-")
    run.wait_end()
    numbered = [f"{name} {i}\n" for i in (1, 2, 3) for name in ("out", "log")]
    assert run.output().decode() == "".join(numbered) + "x\n"
    assert os.listdir(run.directory) == ["out"]


def test_lines_of_replies_go_elsewhere(cell: Run, run: Run) -> None:
    cell.hold()
    script = r"""printf '{"a":1}\nplain {\n {no\n\n{b\n{c\nlast'; echo '{log' >&2"""
    run.enter(cell, script=script, reply=str(run.directory / "reply"))
    run.wait_end()
    assert run.output("reply") == b'{"a":1}\n{b\n{c\n'
    assert run.output() == b"plain {\n {no\n\nlast"
    assert run.output("log") == b"{log\n"


def _holds(path: Path, text: str) -> bool:
    return path.read_text() == text


@pytest.mark.parametrize(("first", "stream"), [("{", "reply"), ("x", "out")])
def test_a_line_that_comes_in_pieces_goes_to_one_place(
    cell: Run, run: Run, go: Signpost, first: str, stream: str
) -> None:
    cell.hold()
    read = f"read go < {go.path}"
    script = rf"printf '{first}'; {read}; printf '{{a'; {read}; printf '\n'; {read}; echo '{{b'"
    run.enter(cell, script=script, reply=str(run.directory / "reply"))
    kept = run.directory / stream / f"{0:020d}"
    wait_until(kept.exists, "it has said something")
    for expected in (first, first + "{a", first + "{a\n"):
        # bytes flow before their line is whole
        wait_modified(kept, partial(_holds, kept, expected))
        go.tell()
    run.wait_end()
    assert run.output(stream).decode() == first + "{a\n" + ("{b\n" if first == "{" else "")
    assert run.output("reply").endswith(b"{b\n")


def test_lines_of_all_lengths_are_told_apart(cell: Run, run: Run, tmp_path: Path) -> None:
    cell.hold()
    lengths = [0, 1, 5, 4095, 4096, 65535, 65536, 200_000, 3, 2] * 3
    lines = [("{" if i % 3 else "x") + chr(97 + i % 26) * n for i, n in enumerate(lengths)]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    # blocks whose borders are anywhere in a line
    script = f"dd if={tmp_path}/lines bs=1013 2>/dev/null"
    run.enter(cell, script=script, reply=str(run.directory / "reply"), log_max=16 << 20)
    run.wait_end()
    for name, first in (("reply", "{"), ("out", "x")):
        expected = "".join(f"{line}\n" for line in lines if line.startswith(first))
        assert run.output(name).decode() == expected


def test_replies_are_cut_into_segments_of_their_own(cell: Run, run: Run) -> None:
    cell.hold()
    script = "yes '{23456789abcdef' | head -c 1048576; echo plain"
    run.enter(cell, script=script, reply=str(run.directory / "reply"), log_max=65536)
    run.wait_end()
    first, second = Segments(run.directory / "reply").segments
    assert (first.size, second.start + second.size) == (32768, 1048576)
    assert run.output() == b"plain\n"


# who leads the end without a daemon


def test_without_a_daemon_an_entered_run_may_end_the_cell(cell: Run, run: Run) -> None:
    cell.hold()
    run.daemon_dies()
    run.enter(cell, script="exit 3", leads=True)
    assert run.wait_end().exit_code == 3
    assert cell.wait_end().finished
    assert "term" in cell.lines


def test_with_a_daemon_it_does_not(cell: Run, run: Run, tmp_path: Path) -> None:
    cell.hold()
    run.enter(cell, script="exit 3", leads=True)
    run.wait_record(lambda record: record.finished)
    run.record_path.unlink()  # as a daemon does that has acted on the end
    assert run.wait_monitor() == 0
    (tmp_path / "next").mkdir()
    with closing(Run(tmp_path / "next")) as after:
        after.enter(cell, script="exit 4")
        assert after.wait_end().exit_code == 4
    assert "term" not in cell.lines


def test_the_cell_ends_when_the_daemon_dies_before_it_acts_on_the_end(cell: Run, run: Run) -> None:
    cell.hold()
    run.enter(cell, script="exit 3", leads=True)
    run.wait_record(lambda record: record.finished)
    assert "term" not in cell.lines
    run.daemon_dies()
    assert cell.wait_end().finished
    assert run.wait_end().exit_code == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_cell_goes_on_when_the_daemon_ended_its_program_and_died(
    cell: Run, run: Run, tmp_path: Path, late: bool
) -> None:
    """The record is read-only: only the run was to end."""
    cell.hold()
    run.enter(cell, script="exec sleep 600", leads=True)
    record = run.wait_record(lambda record: record.program)
    run.record_path.chmod(0o400)
    if not late:
        run.daemon_dies()
    os.kill(record.program, signal.SIGKILL)
    assert run.wait_end().signal == signal.SIGKILL
    run.daemon_dies()
    (tmp_path / "next").mkdir()
    with closing(Run(tmp_path / "next")) as after:
        after.enter(cell, script="exit 4")
        assert after.wait_end().exit_code == 4
    assert "term" not in cell.lines


def test_the_cell_ends_when_the_daemon_dies_after_the_program(
    cell: Run, run: Run, post: Signpost
) -> None:
    cell.hold()
    left = f"trap 'echo ended; exit' TERM; echo x > {post.path}; {DOZE}"
    run.enter(cell, script=f"({left}) & read x < {post.path}; exit 0", leads=True)
    run.wait_record(lambda record: record.ended)
    run.daemon_dies()
    assert cell.wait_end().finished
    assert run.wait_end().exit_code == 0
    assert run.output() == b"ended\n"


def test_a_runner_that_was_killed_has_ended_its_run(cell: Run, run: Run) -> None:
    cell.hold()
    run.daemon_dies()
    run.enter(cell, script="kill -9 $PPID; sleep 600", leads=True)
    assert cell.wait_end().finished
    record = run.wait_end()
    assert (record.exit_code, record.signal) == (None, None)


def test_no_signal_from_inside_keeps_the_cell_from_ending(cell: Run, run: Run) -> None:
    keeper = cell.hold()
    os.kill(keeper, signal.SIGSTOP)
    run.daemon_dies()
    # the kernel has room for one SIGTERM, and this is not the one that is obeyed
    run.enter(cell, script="kill -TERM 1; exit 3", leads=True)
    run.wait_record(lambda record: record.finished)
    assert not cell.record.finished
    os.kill(keeper, signal.SIGCONT)
    assert cell.wait_end().finished
    assert run.wait_end().exit_code == 3


def test_a_run_that_leads_nothing_ends_nothing(run: Run, go: Signpost) -> None:
    run.daemon_dies()
    run.start(script=f"(read go < {go.path}; echo late) & exit 0", lead="-")
    run.wait_record(lambda record: record.ended)
    go.tell()
    run.wait_end()
    assert run.output() == b"late\n"


def test_without_a_daemon_a_held_cell_outlives_its_program(cell: Run, run: Run) -> None:
    cell.start(script="exec sleep 600")
    record = cell.wait_record(lambda record: record.started and record.keeper)
    os.kill(record.keeper, signal.SIGUSR1)
    cell.wait_record(lambda record: record.held)
    cell.daemon_dies()
    os.kill(record.program, signal.SIGKILL)
    cell.wait_record(lambda record: record.ended)
    run.enter(cell, script="exit 5")
    assert run.wait_end().exit_code == 5
    os.kill(record.keeper, signal.SIGHUP)
    cell.wait_end()
    assert "term" not in cell.lines


# how it is called


def test_the_monitor_explains_how_it_is_called() -> None:
    found = subprocess.run([native("monitor"), "x"], capture_output=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith(b"usage: monitor RECORD OUT LOG REPLY LOG_MAX")


def test_a_run_is_started_once(run: Run) -> None:
    run.record_path.write_text("monitor 1\n")
    assert run.start(script="exit 0") == 1
    assert run.lines == ["monitor 1"]
    run.monitor = None


# lines that are not the runtime's


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (r"'ctxfs: r1 ended\n'", "ctxfs : r1 ended\n"),
        (r"'warned\nctxfs: x\n'", "warned\nctxfs : x\n"),
        (r"'warned\rctxfs: x\n'", "warned\rctxfs : x\n"),
        (r"'say ctxfs: x\n ctxfs: y\nctxfs x\nctxf: y\n'",
         "say ctxfs: x\n ctxfs: y\nctxfs x\nctxf: y\n"),
        (r"'ctxfs:ctxfs: x\nctxfs:'", "ctxfs :ctxfs: x\nctxfs :"),
        (r"'ctxctxfs: x\n'", "ctxctxfs: x\n"),
    ],
)  # fmt: skip
def test_lines_of_a_program_do_not_pass_for_the_runtimes(
    run: Run, written: str, kept: str
) -> None:
    run.start(script=f"printf {written} >&2; printf {written}")
    assert run.wait_end().exit_code == 0
    assert run.output("log").decode() == kept
    # what a program writes to its output is data
    assert run.output("out").decode() == kept.replace("ctxfs :", "ctxfs:")


def test_nor_do_they_if_they_are_written_in_parts(run: Run) -> None:
    """The monitor has read each part before the next is written."""
    letters = "ctxfs: forged"
    words = "; ".join(f"printf '{c}' >&2; read -r _ <&3" for c in letters)
    fifo = run.directory / "go"
    os.mkfifo(fifo)
    run.start(script=f"exec 3< {fifo}; {words}; echo >&2")
    # opened once: one that opens it anew may meet the end of the one before
    with open(fifo, "w") as go:
        for number in range(1, len(letters) + 1):
            size = number + (number > 5)
            wait_until(lambda size=size: len(run.output("log")) >= size, "it is kept")  # type: ignore[misc]
            print(file=go, flush=True)
    assert run.wait_end().exit_code == 0
    assert run.output("log") == b"ctxfs : forged\n"


def test_nor_do_they_after_a_line_of_the_daemons_in_their_midst(run: Run) -> None:
    fifo = run.directory / "go"
    os.mkfifo(fifo)
    run.start(script=f"printf half >&2; read -r _ < {fifo}; echo 'ctxfs: forged' >&2")
    wait_until(lambda: run.output("log") == b"half", "it is kept")
    append_line(run.directory / "log", "r1 goes on", 1 << 20)
    with open(fifo, "w") as go:
        go.write("\n")
    assert run.wait_end().exit_code == 0
    assert run.output("log") == b"half\nctxfs: r1 goes on\nctxfs : forged\n"
