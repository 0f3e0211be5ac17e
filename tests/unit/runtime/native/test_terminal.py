"""The terminal of a program: its keeper makes it, and its monitor serves who looks at it."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.cell.inlet import Inlet
from runtime.cell.viewers import VIEWERS_EVER, VIEWERS_MAX, Viewer
from runtime.kernel.rooms import Rooms
from runtime.records.visits import Visit
from tests.unit.runtime.native.test_keeper_monitor import WHY_NOT, Run, cell
from tests.worlds.daemon import TIMEOUT, wait_until
from tests.worlds.readiness import readable

__all__ = ["cell"]
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: without a prompt or line editing, which differ
SHELL: Final = "stty -echo; exec sh"
ALL: Final = 10_000


class Screen:
    """The other end of a viewer, and what it was told."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        end.setblocking(False)
        self.packets: list[tuple[str, bytes]] = []
        self.ended = False

    def take(self) -> None:
        """All that is there."""
        while not self.ended:
            try:
                packet = self.end.recv(ALL)
            except BlockingIOError:
                return
            if packet:
                self.packets.append((packet[:1].decode(), packet[1:]))
            else:
                self.ended = True

    def wait(self, condition: Callable[[], object], what: str) -> None:
        begun = time.monotonic()
        self.take()
        while not condition():
            left = TIMEOUT - (time.monotonic() - begun)
            assert not self.ended, f"it ended before {what}: {self}"
            assert left > 0, f"not {what}: {self}"
            assert readable([self.end.fileno()], left), f"not {what}: {self}"
            self.take()

    def __str__(self) -> str:
        return " ".join(f"{kind}{data[:40]!r}" for kind, data in self.packets[-20:])

    def all(self, kind: str) -> bytes:
        return b"".join(data for each, data in self.packets if each == kind)

    def count(self, kind: str) -> int:
        return sum(len(data) for each, data in self.packets if each == kind)

    @property
    def output(self) -> bytes:
        return self.all("o")

    def wait_output(self, text: bytes) -> None:
        self.wait(lambda: text in self.output, f"told {text!r}")

    def wait_over(self) -> str:
        """What it is told last."""
        self.wait(lambda: self.ended, "ended")
        assert [kind for kind, _ in self.packets].count("x") == 1
        kind, text = self.packets[-1]
        assert kind == "x"
        return text.decode()

    def send(self, packet: bytes | str) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < TIMEOUT:
            with suppress(BlockingIOError):
                self.end.send(packet.encode() if isinstance(packet, str) else packet)
                return
            self.take()
            time.sleep(0.001)
        raise AssertionError("it is not heard")

    def type(self, text: str) -> None:
        self.send(f"i{text}")


class TerminalRun(Run):
    """A run with a terminal, in a cgroup that is all of its agent."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.inlet = Inlet(base / "socket")
        self.outer = self.leaf
        self.leaf = self.outer.child("run")
        self.leaf.path.mkdir()
        self.screens: list[Screen] = []
        self.listening = self.inlet.listen()

    def begin(self, script: str = SHELL, *argv: str, **options: Any) -> None:
        listening = os.dup(self.listening)

        class Listening(Inlet):
            def listen(self) -> int:
                return listening

        inlet = Listening(self.record_path)
        options = {"terminal": (80, 24), "whole": self.outer, "fed": False, **options}
        start = self.start if "inside" not in options else self.enter
        inside = [options.pop("inside")] if "inside" in options else []
        start(*inside, *argv, script="" if argv else script, inlet=inlet, **options)

    def look(
        self, number: int = 1, grace: float = 600.0, *, look: bool = False, hangup: bool = False,
        screen: tuple[int, int] | None = None,
    ) -> Screen:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        visit = Visit(number=number, uid=1234, looks=look, hangs_up=hangup)
        with ours:
            self.inlet.show(Viewer(visit=visit, end=ours, screen=screen), grace)
        self.screens.append(Screen(theirs))
        return self.screens[-1]

    def close(self) -> None:
        for screen in self.screens:
            screen.end.close()
        os.close(self.listening)
        super().close()
        self.outer.path.rmdir()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TerminalRun]:
    with closing(TerminalRun(tmp_path)) as made:
        yield made


def wait_left(run: TerminalRun, number: int, how: str) -> None:
    wait_until(lambda: run.record.left.get(number) == how, f"{number} has left: {how}")


# the program


def test_the_program_leads_a_session_on_a_terminal_of_its_cell(run: TerminalRun) -> None:
    script = "tty; stty size; ps -o pid=,sid=,tty= -p $$; tty < /dev/tty; ls -1 /proc/self/fd"
    run.begin(f"{script}; readlink /proc/$PPID/fd/* ; echo done")
    run.wait_end()
    lines = run.output().decode().replace("\r", "").split("\n")
    assert lines[:2] == ["/dev/pts/0", "24 80"]
    pid, session, name = lines[2].split()
    assert (pid, name) == (session, "pts/0")
    assert lines[3] == "/dev/tty"
    assert lines[4:8] == ["0", "1", "2", "3"], "and ls has the directory open"
    assert lines[8:] == ["done", ""], "its PID 1 has nothing that it could find"
    assert run.record.terminal
    assert run.record.exit_code == 0


def test_a_program_that_enters_has_one_too_and_the_cell_has_none(
    cell: Run, run: TerminalRun
) -> None:
    cell.hold()
    run.begin("tty; ps -o pid=,sid= -p $$; grep -c pts /proc/1/stat", inside=cell)
    assert run.wait_end().terminal
    lines = run.output().decode().replace("\r", "").split("\n")
    assert lines[0] == "/dev/pts/0"
    pid, session = lines[1].split()
    assert pid == session


def test_without_a_terminal_it_says_so(run: TerminalRun) -> None:
    view = ["--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    view += ["--bind", "/tmp", "/dev/pts"]
    run.begin("echo never", view=view)
    record = run.wait_end()
    assert "No such file" in record.failed
    assert run.output() == b""


def test_what_stops_with_no_shell_above_it_goes_on(run: TerminalRun) -> None:
    run.begin("kill -STOP $$; echo on")
    run.wait_end()
    assert run.output() == b"on\r\n"


def test_what_stops_in_a_run_that_entered_goes_on(cell: Run, run: TerminalRun) -> None:
    cell.hold()
    run.begin("kill -STOP $$; echo on", inside=cell)
    run.wait_end()
    assert run.output() == b"on\r\n"


#: asks for what types into a terminal, pastes there or breaks it: however the number is told
ASKS: Final = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
call = {"x86_64": 16, "aarch64": 29}[platform.machine()]
byte = ctypes.create_string_buffer(b"x")
for number in (0x5412, 0x541C, 0x5423):
    for upper in (0, 1, 0x80000000, 0xFFFFFFFF):
        request = ctypes.c_ulong(upper << 32 | number)
        answer = libc.syscall(ctypes.c_long(call), 0, request, byte)
        print(answer, errno.errorcode[ctypes.get_errno()])
    for call_of_x32 in (0x40000000 + 514, 0x40000000 + 16):
        answer = libc.syscall(ctypes.c_long(call_of_x32), 0, ctypes.c_ulong(number), byte)
        print(answer, errno.errorcode[ctypes.get_errno()])
print(libc.syscall(ctypes.c_long(call), 0, ctypes.c_ulong(0x5413), ctypes.create_string_buffer(8)))
"""


def test_nobody_types_for_another_nor_breaks_the_terminal(run: TerminalRun) -> None:
    run.begin("", sys.executable, "-c", ASKS)
    run.wait_end()
    refused = [b"-1 EPERM"] * 4 + [b"-1 ENOSYS"] * 2
    assert run.output().split(b"\r\n") == [*refused * 3, b"0", b""]


def test_no_pair_left_is_said(cell: Run, run: TerminalRun) -> None:
    keeper = cell.hold()
    mount = ["mount", "-o", "remount,max=1,ptmxmode=0666", "/dev/pts"]
    subprocess.run(["nsenter", "-m", "-t", str(keeper), "--", *mount], check=True)
    only = os.open(f"/proc/{keeper}/root/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
    run.begin("echo never", inside=cell)
    record = run.wait_end()
    os.close(only)
    assert record.failed == "no terminal left (kernel.pty.max)"


# who looks


def test_a_viewer_types_and_sees_and_all_is_kept(run: TerminalRun) -> None:
    screen = run.look()
    run.begin()
    screen.wait(lambda: screen.packets, "the modes come first")
    assert screen.packets[0] == ("m", b"")
    screen.type("echo $((6*7))\n")
    screen.wait_output(b"42\r\n")
    screen.type("exit 3\n")
    assert screen.wait_over() == "exit 3"
    record = run.wait_end()
    assert run.output() == screen.output
    assert (record.viewers, record.left) == ({}, {1: "ended"})
    assert "viewer 1 1234" in run.lines
    assert record.next_viewer == 2


def test_all_output_is_told_before_the_end(run: TerminalRun) -> None:
    screen = run.look()
    run.begin("stty -onlcr; seq 2000; kill -9 $$")
    assert screen.wait_over() == "signal 9"
    assert screen.output == "".join(f"{n}\n" for n in range(1, 2001)).encode()
    run.wait_end()
    assert run.output() == screen.output


def test_a_program_that_is_not_there_is_told(run: TerminalRun) -> None:
    screen = run.look()
    run.begin("", "no-such-program")
    assert screen.wait_over().startswith("failed no-such-program: no such program")


def test_an_end_that_nobody_can_tell_is_told(run: TerminalRun) -> None:
    screen = run.look()
    run.begin()
    keeper = run.wait_record(lambda record: record.started and record.keeper).keeper
    os.kill(keeper, signal.SIGKILL)
    assert screen.wait_over() == "lost"
    assert run.wait_end().lost


def test_what_is_left_by_a_keeper_that_was_killed_is_hung_up(cell: Run, run: TerminalRun) -> None:
    cell.hold()
    screen = run.look()
    run.begin("stty -echo; echo on; read _", inside=cell, whole=run.leaf)
    screen.wait_output(b"on")
    keeper = run.wait_record(lambda record: record.started and record.keeper).keeper
    run.daemon_dies()
    os.kill(keeper, signal.SIGKILL)
    assert screen.wait_over() == "lost"
    assert run.wait_end().lost
    assert not cell.record.finished


def test_one_that_looks_when_all_is_over_is_told_so(run: TerminalRun) -> None:
    run.begin("echo bye; trap '' HUP; sleep 600 > /dev/null & exit 4")
    run.wait_record(lambda record: record.exit_code == 4)
    screen = run.look()
    assert screen.wait_over() == "exit 4"
    assert screen.all("t") == b"bye\r\n"


def test_the_size_is_that_of_whoever_typed_or_resized_last(run: TerminalRun) -> None:
    one = run.look(1, screen=(100, 30))

    def is_now(size: bytes) -> None:
        seen = len(one.output)
        one.wait(lambda: size + b"\r\n" in one.output[seen:], f"the size {size!r}")

    run.begin("stty -echo; while :; do stty size; sleep 0.02; done")
    is_now(b"30 100")
    two = run.look(2, screen=(60, 20))
    is_now(b"20 60")
    looking = run.look(3, screen=(10, 10), look=True)
    looking.send("w11x11")
    looking.type("never\n")
    two.send("w61x21")
    is_now(b"21 61")
    one.type("\n")
    is_now(b"30 100")
    one.type("\x03")
    assert one.wait_over() == two.wait_over() == looking.wait_over() == "signal 2"
    assert b"11" not in one.output
    assert b"10 10\r" not in one.output


def test_one_terminal_answers_that_of_whoever_typed_or_resized_last(run: TerminalRun) -> None:
    one, two = (run.look(number, screen=(80, 24)) for number in (1, 2))
    looking, pipe = run.look(3, screen=(80, 24), look=True), run.look(4)
    run.begin("stty -echo; while read -r x; do echo =$x; done")

    def then(screen: Screen, text: str) -> list[bytes]:
        screen.type(f"{text}\n")
        for each in run.screens:
            if not each.ended:
                each.wait_output(f"={text}\r\n".encode())
        return [each.all("q") for each in run.screens]

    assert then(pipe, "first") == [b"0", b"", b"", b"0"]
    assert then(one, "second") == [b"01", b"0", b"", b"0"]
    two.send("w81x24")
    assert then(pipe, "third") == [b"010", b"01", b"", b"0"]
    two.end.close()
    two.ended = True
    wait_left(run, 2, "closed")
    assert then(pipe, "fourth") == [b"0101", b"01", b"", b"0"]
    assert looking.packets[0][0] == "m"


def test_whoever_comes_gets_the_modes_and_the_last_lines_and_the_program_draws_anew(
    run: TerminalRun,
) -> None:
    one = run.look()
    resized = "trap 'stty size' WINCH; "
    run.begin(
        rf"{resized}printf '\033[?2004h\033[?1000h\033[?25l\033[>7u\033[5 q\n'; seq 4000;"
        r"echo here; while :; do sleep 0.05; done"
    )
    one.wait_output(b"here\r\n")
    two = run.look(2)
    two.wait(lambda: b"24 80" in two.output, "it is drawn anew")
    assert [kind for kind, _ in two.packets[:4]] == ["m", "t", "t", "m"]
    assert two.packets[0][1] == b"\033[>7u\033[?25l\033[?1000h\033[?2004h\033[5 q"
    tail = two.all("t")
    assert tail.endswith(b"\r\n3999\r\n4000\r\nhere\r\n")
    assert 16_000 < len(tail) <= 16 << 10
    assert re.match(rb"\d+\r\n", tail)
    assert set(two.output.split(b"\r\n")) <= {b"23 80", b"24 80", b""}, "of two sizes"


def test_an_alternate_screen_is_not_shown_again(run: TerminalRun) -> None:
    one = run.look()
    run.begin(
        r"printf 'secret\033[?1049hdrawn'; read _; printf '\033[?1049lback\n'; read _",
    )
    one.wait_output(b"drawn")
    two = run.look(2)
    two.wait(lambda: two.packets, "the modes")
    assert two.packets[0] == ("m", b"\033[?1049h")
    assert not two.all("t")
    two.type("\n")
    two.wait_output(b"back")
    three = run.look(3)
    three.wait(lambda: three.all("t"), "the last output")
    assert three.packets[0] == ("m", b"")
    assert three.all("t").startswith(b"back")


def test_a_viewer_that_leaves_or_is_gone_changes_nothing(run: TerminalRun) -> None:
    one, two = run.look(1), run.look(2)
    run.begin()
    one.send("d")
    wait_left(run, 1, "detached")
    one.take()
    assert one.ended
    two.end.close()
    wait_left(run, 2, "closed")
    three = run.look(3)
    three.type("echo still; exit\n")
    three.wait_output(b"still")
    assert three.wait_over() == "exit 0"
    assert not run.wait_end().hung_up


def test_notices_are_told_and_an_end_may_be_named(run: TerminalRun) -> None:
    screen = run.look()
    run.begin()
    run.inlet.tell(b"n", "paused")
    screen.wait(lambda: screen.all("n") == b"paused", "the notice")
    run.inlet.tell(b"x", "aborted")
    os.kill(run.wait_record(lambda record: record.program).program, signal.SIGKILL)
    assert screen.wait_over() == "aborted"


def test_there_is_room_for_so_many(run: TerminalRun) -> None:
    run.begin()
    screens = [run.look(number) for number in range(1, VIEWERS_MAX + 1)]
    ninth = run.look(9)
    wait_left(run, 9, "closed")
    ninth.take()
    assert (ninth.ended, ninth.packets) == (True, [])
    screens[3].send("d")
    wait_left(run, 4, "detached")
    last = run.look(VIEWERS_EVER)
    last.wait(lambda: last.packets, "there is a place")
    last.send("d")
    wait_left(run, VIEWERS_EVER, "detached")
    beyond = run.look(VIEWERS_EVER + 1)
    wait_left(run, VIEWERS_EVER + 1, "closed")
    beyond.take()
    assert beyond.ended
    assert set(run.record.viewers) == {1, 2, 3, 5, 6, 7, 8}


def test_what_is_no_packet_is_ignored(run: TerminalRun) -> None:
    screen, other = run.look(), run.look(2, look=True)
    run.begin()
    screen.type("echo on\n")
    screen.wait_output(b"on")
    # whatever the monitor opens for the first viewers and their output, it has opened by the second
    screen.type("echo again\n")
    for each in (screen, other):
        each.wait_output(b"again")
    fds = Path(f"/proc/{run.record.monitor}/fd")
    held = len([*fds.iterdir()])
    sizes = (b"", b"0x0", b"0x5", b"70000x1", b"1x65537", b"1001x5", b"5", b"5x5x5", b"-1x5",
             b"+1x5", b" 1x5", b"5\0x5", b"5x5\n", b"1" * 99, b"4294967297x1")  # fmt: skip
    others = (b"", b"z", b"dd", b"i" + b"x" * 8192, b"i" + b"x" * 100_000, b"o", b"m", b"x", b"q1",
              bytes(8192))  # fmt: skip
    for packet in (*(b"w" + size for size in sizes), *others):
        screen.send(packet)
    left, right = socket.socketpair()
    with left, right, suppress(OSError):
        socket.send_fds(screen.end, [b"i"], [left.fileno()])
    screen.type("stty size\n")
    for each in (screen, other):
        each.wait_output(b"24 80\r\n")
        assert {kind for kind, _ in each.packets} == {"m", "o"}
    assert len([*fds.iterdir()]) == held
    assert run.record.left == {}


# hanging up


@pytest.mark.parametrize("daemon", ["dies", "stays"])
def test_a_viewer_that_is_lost_hangs_up_where_no_daemon_does(run: TerminalRun, daemon: str) -> None:
    screen, other = run.look(hangup=True), run.look(2)
    run.begin("", "bash", "--norc", "-i")
    screen.wait_output(b"bash-")
    if daemon == "dies":
        run.daemon_dies()
    screen.end.close()
    assert other.wait_over() == "hangup"
    record = run.wait_end()
    assert (record.hung_up, record.finished) == (True, True)
    assert record.left[1] == "closed"


@pytest.mark.parametrize("trap", ["trap '' HUP TERM", ":"])
def test_so_does_one_of_a_task_which_alone_is_killed(
    cell: Run, run: TerminalRun, trap: str
) -> None:
    cell.hold()
    screen = run.look(hangup=True, grace=0.1)
    run.begin(f"{trap}; echo on; sleep 600", inside=cell, whole=run.leaf)
    screen.wait_output(b"on")
    run.daemon_dies()
    screen.end.close()
    assert run.wait_end().hung_up
    assert not cell.record.finished


def test_what_a_daemon_leads_is_not_told_to_the_keeper(run: TerminalRun) -> None:
    screen = run.look(hangup=True, grace=0.0)
    run.begin("trap 'echo hup' HUP; echo on; while :; do sleep 600 & wait; done")
    screen.wait_output(b"on")
    run.record_path.chmod(0o400)
    screen.end.close()
    assert run.wait_end().hung_up
    assert b"hup" not in run.output()


def test_one_that_leaves_does_not_hang_up(run: TerminalRun) -> None:
    screen = run.look(hangup=True, grace=0.0)
    run.begin()
    screen.type("x\n" * 10)
    screen.send("d")
    screen.end.close()
    wait_left(run, 1, "detached")
    other = run.look(2)
    other.type("echo $((6*7))\n")
    other.wait_output(b"42")
    assert not run.record.hung_up


def test_an_interactive_shell_ends_at_once_with_its_cell(run: TerminalRun) -> None:
    """It ignores SIGTERM."""
    screen = run.look()
    run.begin("", "bash", "--norc", "-i", grace=600_000)
    screen.wait_output(b"bash-")
    wait_until(lambda: run.record.started, "it is recorded")
    stat = Path(f"/proc/{run.record.program}/stat")
    # a signal between its prompt and its read would wait for a key: so it is with readline(3)
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "it reads")
    os.kill(run.record.keeper, signal.SIGTERM)
    assert screen.wait_over() == "signal 1"
    assert run.wait_end().finished


# hostile ones


def test_one_that_takes_nothing_holds_it_up_once_and_loses_the_rest(run: TerminalRun) -> None:
    stopped, other = run.look(1), run.look(2)
    run.begin("stty -onlcr; yes 0123456789abcde | head -c 4000000; echo end")
    begun = time.monotonic()
    other.wait(lambda: b"end\n" in other.output, "all of it")
    lasted = time.monotonic() - begun
    assert lasted > 1.5
    assert len(other.output) == 4_000_004
    assert stopped.wait_over() == "exit 0"
    lost = [int(data) for kind, data in stopped.packets if kind == "l"]
    assert len(lost) == 1
    shown = len(stopped.output)
    assert shown + lost[0] == 4_000_004
    assert shown >= 256 << 10
    kinds = "".join(kind for kind, _ in stopped.packets)
    assert re.fullmatch(r"mo+lmx", kinds)
    run.wait_end()
    assert len(run.output()) >= 1 << 19


def test_one_that_takes_what_waits_holds_up_nobody(run: TerminalRun) -> None:
    """Each time the patience of two seconds would pass if nobody told that it took it."""
    screen = run.look()
    much, rounds = 400_000, 15
    run.begin(f"stty raw -echo; printf on; while read _; do head -c {much} /dev/zero; done")
    screen.wait_output(b"on")
    begun = time.monotonic()
    for number in range(1, rounds + 1):
        screen.type("\n")
        assert readable([screen.end.fileno()], TIMEOUT)
        # what is on its way is more than the socket takes
        time.sleep(0.02)
        size = len("on") + number * much
        screen.wait(lambda size=size: screen.count("o") == size, "all of it")  # type: ignore[misc]
    assert time.monotonic() - begun < rounds


def test_one_that_caught_up_sees_what_comes_and_in_which_modes(run: TerminalRun) -> None:
    stopped, other = run.look(1), run.look(2)
    run.begin(
        r"stty -onlcr; read _; yes 0123456789abcde | head -c 2000000; trap 'echo drawn' WINCH;"
        r"printf '\033[?1049hend'; read _; while :; do sleep 0.05; done"
    )
    stopped.wait(lambda: stopped.packets, "the modes")
    other.type("\n")
    other.wait(lambda: b"end" in other.output, "all of it")
    stopped.wait(lambda: [kind for kind, _ in stopped.packets].count("m") == 2, "the modes")
    kinds = "".join(kind for kind, _ in stopped.packets)
    assert re.match(r"mo+lm", kinds)
    modes = stopped.packets[kinds.rindex("m")][1]
    assert modes.startswith(b"\033[?1047l\033[<8u\033[?1049h")
    assert b"\033[?2004l" in modes
    assert b"\033[?7h" in modes
    other.type("\n")
    stopped.wait_output(b"drawn")


def test_for_one_that_was_late_and_lost_nothing_nothing_is_drawn_anew(run: TerminalRun) -> None:
    late, other = run.look(1), run.look(2)
    run.begin(
        "stty -onlcr -echo; echo on; read _; trap 'echo drawn' WINCH; head -c 300000 /dev/zero;"
        "echo; read _; echo end; read _"
    )
    late.wait_output(b"on\n")
    other.wait_output(b"on\n")
    other.type("\n")
    other.wait(lambda: other.count("o") >= 300_000, "all of it")
    late.wait(lambda: late.count("o") >= 300_000, "all of it")
    other.type("\n")
    for screen in (late, other):
        screen.wait_output(b"end\n")
        assert screen.output == b"on\n" + bytes(300_000) + b"\nend\n"
    assert {kind for kind, _ in late.packets[1:]} <= {"o", "q"}


def test_input_that_is_not_read_waits_and_so_does_who_types(run: TerminalRun) -> None:
    go = run.directory / "go"
    os.mkfifo(go)
    screen = run.look()
    run.begin(f"stty raw -echo; echo on; read _ < {go}; head -c 300000 | cksum")
    screen.wait_output(b"on")
    sent = 0
    begun = time.monotonic()
    while time.monotonic() - begun < 1:
        with suppress(BlockingIOError):
            screen.end.send(b"i" + b"x" * 1000)
            sent += 1000
    assert 64 << 10 < sent < 500_000
    # the other directions go on
    other = run.look(2)
    run.inlet.tell(b"n", "hello")
    other.wait(lambda: other.all("n"), "the notice")
    with open(go, "w") as file:
        file.write("\n")
    while sent < 300_000:
        screen.send(b"i" + b"x" * min(1000, 300_000 - sent))
        sent += min(1000, 300_000 - sent)
    screen.wait(lambda: re.search(rb"\d+ 300000", screen.output), "all was read")


def test_a_frozen_program_is_typed_at_and_hung_up(run: TerminalRun) -> None:
    screen = run.look(hangup=True, grace=0.0)
    run.begin("stty -echo; echo on; read line; echo got $line; sleep 600")
    screen.wait_output(b"on")
    run.leaf.freeze(True)
    screen.type("it waits\n")
    run.leaf.freeze(False)
    screen.wait_output(b"got it waits")
    run.leaf.freeze(True)
    run.daemon_dies()
    screen.end.close()
    assert run.wait_end().hung_up


def test_a_terminal_that_nobody_has_open_for_a_while_goes_on(run: TerminalRun) -> None:
    screen = run.look()
    run.begin(
        "exec 3< /proc/self/fd/0 < /dev/null > /dev/null 2>&1; exec 3<&-; sleep 0.3;"
        "exec > /dev/tty; echo again"
    )
    screen.wait_output(b"again")
    assert screen.wait_over() == "exit 0"


@pytest.mark.parametrize("kind", ["file", "fifo", "null", "slave", "socket", "ptmx"])
def test_only_a_master_of_a_devpts_is_taken(
    cell: Run, run: TerminalRun, tmp_path: Path, kind: str
) -> None:
    """A step on the way into the cell sends something else."""
    if kind == "ptmx" and os.path.islink("/dev/ptmx"):
        pytest.skip("there is no other way to a master than by a devpts")
    (tmp_path / "file").write_text("secret")
    os.mkfifo(tmp_path / "fifo")
    opens = {
        "file": f"os.open({str(tmp_path / 'file')!r}, os.O_RDWR)",
        "fifo": f"os.open({str(tmp_path / 'fifo')!r}, os.O_RDWR)",
        "null": "os.open('/dev/null', os.O_RDWR)",
        "slave": "os.openpty()[1]",
        "socket": "socket.socketpair()[0].detach()",
        "ptmx": "os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)",
    }
    program = f"""
import os, socket
report = socket.socket(fileno=3)
report.send(b"hello")
socket.send_fds(report, [b"terminal"], [{opens[kind]}])
report.send(b"start")
report.send(b"exit 0")
"""
    screen = run.look()
    run.begin("echo", steps=["/usr/bin/python3", "-c", program])
    assert screen.wait_over() == "exit 0"
    assert not run.wait_end().terminal
    assert (tmp_path / "file").read_text() == "secret"


#: says what makes no line of a record: first as another process, which an agent may be
FORGES = """
import os, socket
report = socket.socket(fileno=3)
report.send(b"hello")
lines = b"viewer 7 0", b"left 1 closed", b"hangup 5", b"failed x\\nhangup 5\\nviewer 9 9"
if not os.fork():
    socket.send_fds(report, [b"terminal"], [os.openpty()[0]])
    for word in (b"hello", b"hold", b"term", b"exit 5", b"signal 9", b"stay"):
        report.send(word)
    os._exit(0)
os.wait()
for line in (b"start", *lines, b"exit 0\\nhangup 5"):
    report.send(line)
"""


def test_what_a_record_says_cannot_be_forged(run: TerminalRun) -> None:
    screen = run.look()
    run.begin("echo", steps=["/usr/bin/python3", "-c", FORGES])
    screen.wait_over()
    record = run.wait_end()
    assert not (record.terminal or record.hung_up or record.held or record.viewers)
    kinds = [line.partition(" ")[0] for line in run.lines]
    assert [kind for kind in kinds if kind in ("viewer", "left", "keeper")] == [
        "viewer", "keeper", "left",
    ]  # fmt: skip
    assert {"hangup", "hold", "term", "signal", "terminal"}.isdisjoint(kinds)
    assert kinds.count("exit") == 1


def test_a_full_disk_holds_up_nobody(tmp_path: Path, run: TerminalRun) -> None:
    rooms = Rooms(tmp_path)
    rooms.make(1)
    rooms.limit(1, 1000)
    screen = run.look()
    run.begin("stty -onlcr; yes 0123456789abcde | head -c 100000; echo end", room=rooms.path(1))
    screen.wait_output(b"end\n")
    assert len(screen.output) == 100_004
    run.wait_end()
    assert b"bytes of output lost" in run.output()


def test_much_output_is_kept_and_told_whole(run: TerminalRun) -> None:
    screen = run.look()
    run.begin("stty -onlcr; head -c 20000000 /dev/zero | tr '\\0' x; echo end", log_max=64 << 20)
    assert screen.wait_over() == "exit 0"
    assert len(screen.output) == 20_000_004
    run.wait_end()
    assert len(run.output()) == 20_000_004


def test_the_monitor_hands_nothing_to_the_program(run: TerminalRun) -> None:
    """Neither the master nor a viewer is among its descriptors or its PID 1's."""
    screen = run.look()
    run.begin("echo on; sleep 600")
    screen.wait_output(b"on")
    wait_until(lambda: run.record.started, "it is recorded")
    for pid in (run.record.keeper, run.record.program, run.record.chain):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                mode = path.stat().st_mode
                assert not (stat.S_ISCHR(mode) and "ptmx" in os.readlink(path)), path
                assert not stat.S_ISSOCK(mode) or pid == run.record.keeper, path
    sockets = [
        os.readlink(path)
        for path in Path(f"/proc/{run.record.keeper}/fd").iterdir()
        if os.readlink(path).startswith("socket:")
    ]
    assert len(sockets) == 1, "its report socket"
