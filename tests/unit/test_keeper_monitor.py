"""The programs around a run, without a daemon: what they record, keep and end.

The cell is bubblewrap's, made without privileges; everything is born in the
cgroup that the tests are in, which that needs the right to write to.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from runtime import linux
from runtime.cell import native
from runtime.cgroups import path_of, unified_mount
from runtime.output import Output
from runtime.record import Record, read_record

TIMEOUT = 10.0
BWRAP = ["bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1", "--die-with-parent"]
VIEW = ["--bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]


def own_cgroup() -> Path | None:
    """The cgroup that these tests are in, if it can be seen and written to."""
    mount, own = unified_mount(), path_of(os.getpid())
    if mount is None or own is None:
        return None
    found = mount / own.removeprefix("/")
    return found if os.access(found / "cgroup.procs", os.W_OK) else None


def missing() -> str:
    """Why these tests cannot run here; empty if they can."""
    for name in ("monitor", "keeper"):
        if not native(name).exists():
            return f"{name} is not compiled: make programs"
    if shutil.which("bwrap") is None:
        return "bwrap is missing: apt-get install bubblewrap"
    if own_cgroup() is None:
        return "the cgroup of the tests cannot be written to: run them as root"
    trial = subprocess.run([*BWRAP, *VIEW, "--", "true"], capture_output=True, check=False)
    return "" if trial.returncode == 0 else f"bwrap cannot be used: {trial.stderr.decode()}"


WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def wait_readable(fd: int) -> None:
    readable, _, _ = select.select([fd], [], [], TIMEOUT)
    assert readable, "nothing happened"


class Run:
    """One run of a shell script as the agent's program, followed by its monitor."""

    def __init__(self, base: Path) -> None:
        self.directory = base / "agent"
        self.directory.mkdir()
        self.record_path = base / "record"
        cgroup = own_cgroup()
        assert cgroup is not None
        self.cgroup = cgroup
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
        targets: tuple[str, ...] = (),
        spec: bytes | None = None,
        steps: list[str] | None = None,
        leaf: Path | None = None,
    ) -> int:
        """Returns what the starter, which only begets the monitor, exits with."""
        words = [cwd, str(len(environment)), *environment, str(len(targets)), *targets]
        words += argv or ("sh", "-c", script)
        memory = os.memfd_create("spec", os.MFD_CLOEXEC)
        data = b"".join(word.encode() + b"\0" for word in words) if spec is None else spec
        os.write(memory, data)
        os.lseek(memory, 0, os.SEEK_SET)
        keeper = [str(native("keeper")), "4", "3", str(grace)]
        try:
            starter = subprocess.run(
                [
                    *(str(native("monitor")), str(self.record_path)),
                    *(str(self.directory / "out"), str(self.directory / "log"), "-"),
                    str(log_max),
                    *(str(self.lifeline), str(self.cgroup), str(leaf or self.cgroup)),
                    *(str(os.getuid()), "cell", str(memory), "--"),
                    *(steps or [*BWRAP, *VIEW, "--", *keeper]),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[memory],
                env={},
                timeout=TIMEOUT,
                check=False,
            )
        finally:
            os.close(memory)
        self.monitor = self.record.monitor or None
        return starter.returncode

    @property
    def record(self) -> Record:
        return read_record(self.record_path)

    @property
    def lines(self) -> list[str]:
        return self.record_path.read_text().splitlines()

    def wait_record(self, condition: Callable[[Record], object]) -> Record:
        fd = linux.inotify_init()
        try:
            linux.inotify_add_watch(fd, self.record_path, linux.IN_MODIFY)
            while not condition(record := self.record):
                wait_readable(fd)
                os.read(fd, 4096)
        finally:
            os.close(fd)
        return record

    def wait_end(self) -> Record:
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
        output = Output(self.directory / name)
        return output.read(0, output.size)

    def close(self) -> None:
        self.daemon_dies()
        if self.monitor is None:
            return
        # a test that failed: with its PID 1 the whole cell goes
        for pid in (self.record.keeper, self.monitor):
            if pid:
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.reaped(), 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as made:
        yield made


class Signpost:
    """A FIFO by which a script says that it has come so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def wait_reached(self) -> str:
        wait_readable(self._fd)
        return os.read(self._fd, 100).decode().strip()

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Signpost]:
    with closing(Signpost(tmp_path / "post")) as made:
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


def test_a_record_has_all_its_lines_in_order(run: Run) -> None:
    before = time.time_ns()
    run.start(script="exit 0")
    record = run.wait_end()
    words = [line.split()[0] for line in run.lines]
    assert sorted(words[:-3]) == ["chain", "keeper", "monitor"]
    assert words[-3:] == ["start", "exit", "end"]
    assert len({record.monitor, record.chain, record.program}) == 3
    assert before <= record.started <= record.ended <= time.time_ns()


def test_pids_are_those_of_this_namespace(run: Run, post: Signpost) -> None:
    run.start(script=f"echo $$ > {post.path}; exec sleep 60")
    inside = post.wait_reached()
    record = run.wait_record(lambda record: record.started)
    status = Path(f"/proc/{record.program}/status").read_text()
    assert f"NSpid:\t{record.program}\t{inside}\n" in status
    status = Path(f"/proc/{record.keeper}/status").read_text()
    assert f"NSpid:\t{record.keeper}\t1\n" in status


def test_a_program_that_is_not_there_is_said(run: Run) -> None:
    run.start("no-such-program", "x")
    record = run.wait_end()
    assert record.failed == "no-such-program: no such program in the agent's view"
    assert record.exit_code == 127


def test_a_program_that_cannot_be_executed_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    run.start(str(tmp_path / "text"))
    record = run.wait_end()
    assert record.failed == f"{tmp_path}/text: Permission denied"
    assert record.exit_code == 126


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
        *(b"", b"/", b"/\0", b"/\0" + b"5\0A=1\0sh\0", b"/\0-1\0sh\0"),
        *(b"/\0" + b"0\0", b"/\0" + b"0\0" + b"3\0x/tmp\0sh\0"),
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


def test_the_starter_is_gone_when_the_monitor_is_known(run: Run, post: Signpost) -> None:
    assert run.start(script=f"read go < {post.path}; exit 0") == 0
    assert run.monitor is not None
    assert Path(f"/proc/{run.monitor}/comm").read_text() in ("monitor\n", "ctx-monitor\n")
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


def test_execution_is_forbidden_and_the_right_to_that_is_gone(run: Run) -> None:
    keeper = [str(native("keeper")), "4", "3", "5000"]
    view = [*VIEW, "--tmpfs", "/mnt", "--tmpfs", "/mnt/dark", "--tmpfs", "/mnt/light"]
    caps = ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    run.start(
        script="grep -E '^Cap' /proc/1/status /proc/self/status; cat /proc/self/mounts",
        targets=("x/mnt", "k/mnt/light"),
        steps=[*BWRAP, *view, *caps, "--", *keeper],
    )
    assert run.wait_end().exit_code == 0
    lines = run.output().decode().splitlines()
    shown = [line.split("\t")[1] for line in lines if ":Cap" in line]
    assert shown == [f"{0:016x}"] * 10
    # what is mounted last at a point is what is there
    options = {words[1]: words[3].split(",") for words in map(str.split, lines[10:])}
    assert "noexec" in options["/mnt"] and "noexec" in options["/mnt/dark"]
    assert "noexec" not in options["/mnt/light"]


@pytest.mark.parametrize("target", ["x/nowhere", "x/usr/bin", "k/nowhere"])
def test_without_what_was_asked_for_nothing_starts(run: Run, target: str) -> None:
    run.start(script="exit 0", targets=(target,))
    record = run.wait_end()
    assert record.failed.startswith(f"noexec {target[1:]}: ")
    assert not record.started


def test_without_the_right_to_forbid_execution_nothing_starts(run: Run) -> None:
    keeper = [str(native("keeper")), "4", "3", "5000"]
    run.start(
        script="exit 0",
        targets=("x/mnt",),
        steps=[*BWRAP, *VIEW, "--tmpfs", "/mnt", "--cap-drop", "ALL", "--", *keeper],
    )
    assert run.wait_end().failed == "noexec mount namespace: Operation not permitted"
    assert not run.record.started


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
    output = Output(run.directory / "out")
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
        while not select.select([keeper], [], [], 0.05)[0]:
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


def test_the_monitor_explains_how_it_is_called() -> None:
    found = subprocess.run([native("monitor"), "x"], capture_output=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith(b"usage: monitor RECORD OUT LOG REPLY LOG_MAX")


def test_a_run_is_started_once(run: Run) -> None:
    run.record_path.write_text("monitor 1\n")
    assert run.start(script="exit 0") == 1
    assert run.lines == ["monitor 1"]
    run.monitor = None
