"""A viewer of a terminal: a process at a pair of terminals, and a monitor that the tests play."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client import terminal
from client.commands import parse_command
from client.exits import Failure
from client.root import Root
from tests.unit.client.fakes import FakeRoot, Run
from tests.worlds.daemon import TIMEOUT
from tests.worlds.emulator import HOSTILE, Emulator
from tests.worlds.readiness import readable

HOUSE = Path(__file__).parents[3]
VIEW = """
import json, os, signal, sys
from client.terminal import Session
for number in (signal.SIGINT, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)  # a shell ignores them for what it runs beside itself
there = Session(int(sys.argv[1]), "coder", **json.loads(sys.argv[2]))
there.run()
os.write(int(sys.argv[3]), json.dumps([there.end, there.signal]).encode())
"""
#: waits for a terminal that answers, however late
PATIENT = VIEW.replace("there =", "import client.terminal as of; "
                       f"of.DRAIN = of.DRAIN_LONG = {TIMEOUT}; there =")


class Person:
    """A terminal that answers all that it is asked, with a viewer at it, and its monitor."""

    def __init__(self, answers: bool = True, **options: Any) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.theirs)
        self.monitor, viewer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.monitor.settimeout(TIMEOUT)
        self.report, report = os.pipe()
        given = {"look": False, "raw": False, "leave": 0x1D, **options}
        self.look = given["look"]
        # a thread of this process answers, which may come late on a busy machine
        view = PATIENT if answers else VIEW
        self.process = subprocess.Popen(
            [sys.executable, "-c", view, str(viewer.fileno()), json.dumps(given), str(report)],
            stdin=self.theirs, stdout=self.theirs, cwd=HOUSE, start_new_session=True,
            pass_fds=(viewer.fileno(), report), env={**os.environ, "LANG": "C.UTF-8"},
        )  # fmt: skip
        viewer.close()
        os.close(report)
        self.answers = answers
        self.emulator = Emulator()
        self.shown = b""
        self._ends = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.raw()
        # it may have another size than when it asked for the terminal, which no signal tells of
        assert given["look"] or self.packet() == b"w80x24"

    def raw(self) -> None:
        """Until the viewer has taken the terminal."""
        self.until(lambda: not termios.tcgetattr(self.theirs)[3] & termios.ICANON, "it is raw")

    def _read(self) -> None:
        while not self._ends.is_set():
            if readable([self.ours], 0.05):
                data = os.read(self.ours, 1 << 16)
                answers = self.emulator.feed(data)
                self.shown += data
                if self.answers:
                    os.write(self.ours, answers)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not done():
            assert time.monotonic() < deadline, f"not in time: {what}: {self.shown!r}"
            time.sleep(0.005)

    def sees(self, data: bytes) -> None:
        self.until(lambda: data in self.shown, f"{data!r} is shown")

    def type(self, data: bytes) -> None:
        os.write(self.ours, data)

    def packet(self) -> bytes:
        return self.monitor.recv(1 << 16)

    def end(self) -> tuple[str, int]:
        """How the viewer says that it ended."""
        self.process.wait(TIMEOUT)
        said = os.read(self.report, 1 << 16)
        end, number = json.loads(said or '["", -1]')
        return end, number

    def left(self) -> bytes:
        """What a shell would read as typed now."""
        attributes = termios.tcgetattr(self.theirs)
        attributes[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(self.theirs, termios.TCSANOW, attributes)
        found = b""
        while readable([self.theirs], 0.3):
            found += os.read(self.theirs, 1 << 16)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._ends.set()
        self._reader.join()
        self.monitor.close()
        for fd in (self.ours, self.theirs, self.report):
            os.close(fd)


@pytest.fixture
def at() -> Iterator[Callable[..., Person]]:
    made: list[Person] = []

    def make(**options: Any) -> Person:
        made.append(Person(**options))
        return made[-1]

    yield make
    for person in made:
        person.close()


def test_bytes_go_both_ways(at: Callable[..., Person]) -> None:
    person = at()
    person.type(b"ls\r\x03\x1a\xc3\xa4")
    assert person.packet() == b"ils\r\x03\x1a\xc3\xa4"
    person.monitor.send(b"ohello\r\n")
    person.sees(b"hello\r\n")
    person.resize(100, 30)
    os.kill(person.process.pid, signal.SIGWINCH)
    assert person.packet() == b"w100x30"
    person.monitor.send(b"xexit 3")
    assert person.end() == ("exit 3", 0)
    assert termios.tcgetattr(person.theirs) == person.before


def test_what_was_typed_before_is_kept(at: Callable[..., Person]) -> None:
    person = at()
    person.type(b"a" * 3000)
    got = b""
    while len(got) < 3000:
        packet = person.packet()
        assert packet[:1] == b"i" and len(packet) <= 8192
        got += packet[1:]
    assert got == b"a" * 3000


@pytest.mark.parametrize("key", [b"\x1d", b"\x1b[93;5u\x1b[93;5:3u", b"\x1b[27;5;93~"])
def test_the_key_leaves_in_order(at: Callable[..., Person], key: bytes) -> None:
    person = at()
    person.type(b"last" + key + b"d")
    assert [person.packet(), person.packet()] == [b"ilast", b"d"]
    person.monitor.close()
    assert person.end() == ("detached", 0)
    assert termios.tcgetattr(person.theirs) == person.before


def test_a_monitor_that_does_not_close_is_left_all_the_same(at: Callable[..., Person]) -> None:
    person = at()
    person.type(b"\x1dd")
    assert person.end() == ("detached", 0)


def test_the_keys_are_explained(at: Callable[..., Person]) -> None:
    person = at()
    person.type(b"\x1d?")
    person.sees(b"[coder: Ctrl-] d leaves, Ctrl-] Ctrl-] types Ctrl-]]\r\n")
    person.type(b"\x1d\x1d")
    assert person.packet() == b"i\x1d"


def test_escape_alone_is_typed_soon(at: Callable[..., Person]) -> None:
    person = at()
    person.type(b"\x1b")
    assert person.packet() == b"i\x1b"


def test_who_looks_types_nothing_and_is_asked_nothing(at: Callable[..., Person]) -> None:
    person = at(look=True)
    person.monitor.send(b"oasked: \x1b[6n\x1b[c!\r\n")
    person.sees(b"asked: !\r\n")
    person.type(b"rm\r")
    person.resize(10, 10)
    os.kill(person.process.pid, signal.SIGWINCH)
    person.type(b"\x1dd")
    assert person.packet() == b"d"


def hostile() -> bytes:
    asks = b"\x1b[6n\x1b[c\x1b[>q\x1b[5n\x1b]11;?\x1b\\\x1b[21t\x1b]52;c;?\x07"
    return b"\x1b[?1000h\x1b[?1006h\x1b[?2004h" + 50 * asks


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("end", [b"xexit 0", b"", b"\x1dd"])
def test_answers_do_not_become_input_of_the_shell(
    at: Callable[..., Person], raw: bool, end: bytes
) -> None:
    person = at(raw=raw)
    data = hostile()
    for begin in range(0, len(data), 333):
        person.monitor.send(b"o" + data[begin : begin + 333])
    if end.startswith(b"x"):
        person.monitor.send(end)
    elif not end:
        person.monitor.close()
    else:
        person.type(end)
    person.end()
    assert person.left() == b""
    assert raw or not re.search(rb"\x1b\[21t|\x1b\]52", person.shown)
    for mode in (1000, 1006, 2004):
        last = re.findall(rb"\x1b\[\?%d([hl])" % mode, person.shown)[-1]
        assert last == b"l"
    assert person.shown.rindex(b"\x1b[5n") > person.shown.rindex(b"\x1b[?2004l")


def test_the_same_split_at_every_byte(at: Callable[..., Person]) -> None:
    person = at()
    for byte in b"\x1b]52;c;?\x07\x1b[21t\x1b]2;title\x07\x1b[6n":
        person.monitor.send(b"o" + bytes((byte,)))
    person.sees(b"\x1b]2;[coder] title\x07\x1b[6n")
    person.monitor.send(b"xexit 0")
    person.end()
    assert person.left() == b""
    assert b"52;" not in person.shown and b"21t" not in person.shown


def test_a_terminal_that_answers_nothing_costs_little(at: Callable[..., Person]) -> None:
    person = at(answers=False)
    person.monitor.send(b"o\x1b[6n")
    person.sees(b"\x1b[6n")
    began = time.monotonic()
    person.monitor.send(b"xexit 0")
    person.end()
    assert time.monotonic() - began < 2
    assert b"\x1b[5n" in person.shown


def test_what_was_typed_after_the_last_answer_is_kept(at: Callable[..., Person]) -> None:
    person = at(answers=False)
    person.monitor.send(b"o\x1b[1mhello\r\n")
    person.sees(b"hello")
    person.monitor.send(b"xexit 0")
    person.sees(b"\x1b[5n")
    person.type(b"\x1b[0nls\r")
    person.end()
    assert person.left() == b"ls\r"


def test_a_key_that_is_let_go_when_it_has_left_is_dropped(at: Callable[..., Person]) -> None:
    person = at(answers=False)
    person.monitor.send(b"o\x1b[>3u")
    person.sees(b"\x1b[>3u")
    person.type(b"\x1b[93;5u\x1b[100u")
    assert person.packet() == b"d"
    person.monitor.close()
    person.sees(b"\x1b[5n")
    person.type(b"\x1b[100;1:3u\x1b[0n")
    assert person.end() == ("detached", 0)
    assert person.left() == b""


def test_another_terminal_answers(at: Callable[..., Person]) -> None:
    person = at()
    person.monitor.send(b"q0")
    person.monitor.send(b"oasked: \x1b[6n\x1b[?1004h!")
    person.sees(b"asked: \x1b[?1004h!")
    person.monitor.send(b"q1")
    person.monitor.send(b"o\x1b[6n")
    person.sees(b"\x1b[6n")
    person.monitor.send(b"xexit 0")
    person.end()
    assert person.left() == b""


@pytest.mark.parametrize(
    ("end", "options"),
    [(b"xexit 0", {}), (b"", {}), (b"\x1dd", {}), (b"\x1dd", {"look": True}), (b"TERM", {}),
     (b"xexit 0", {"raw": True})],
)  # fmt: skip
def test_a_hostile_program_reaches_nothing_but_the_screen(
    at: Callable[..., Person], end: bytes, options: dict[str, bool]
) -> None:
    person = at(**options)
    emulator, before = person.emulator, person.emulator.state()
    data = b"".join(HOSTILE)
    for begin in range(0, len(data), 4001):
        person.monitor.send(b"otm"[begin % 3 :][:1] + data[begin : begin + 4001])
    person.monitor.send(b"o!here")
    person.sees(b"!here")
    person.monitor.send(b"o" + 100 * b"\x1b[6n\x1b[c")  # whose answers come when it has left
    if end == b"TERM":
        os.kill(person.process.pid, signal.SIGTERM)
    elif end.startswith(b"x"):
        person.monitor.send(end)
    elif end:
        person.type(end)
    else:
        person.monitor.close()
    person.end()
    assert person.left() == b""
    assert (emulator.asked > 1) != person.look
    if not options.get("raw"):
        assert (emulator.beyond, emulator.state()) == ([], before)
        assert all(title.startswith("[coder] ") for title in emulator.titles)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_restores_the_terminal_and_does_not_leave(
    at: Callable[..., Person], number: int
) -> None:
    person = at()
    person.monitor.send(b"o\x1b[?1049h\x1b[?25l")
    person.sees(b"\x1b[?25l")
    os.kill(person.process.pid, number)
    assert person.end() == ("", number)
    assert person.packet() == b""  # without d: so it is hung up
    assert termios.tcgetattr(person.theirs) == person.before
    person.sees(b"\x1b[?25h\x1b[?1049l")


def test_ctrl_z_from_outside_does_not_stop_it(at: Callable[..., Person]) -> None:
    person = at()
    os.kill(person.process.pid, signal.SIGTSTP)
    person.type(b"x")
    assert person.packet() == b"ix"


def test_modes_come_first_and_again(at: Callable[..., Person]) -> None:
    person = at()
    person.monitor.send(b"m\x1b[?2004h\x1b[>7u")
    person.monitor.send(b"tbefore\x1b[6n\x1b[>7u\r\n")
    person.monitor.send(b"m\x1b[?2004h\x1b[>7u")
    person.monitor.send(b"onow")
    person.sees(b"now")
    assert person.shown == (b"\x1b[?2004h\x1b[>7ubefore\r\n\x1b[<1u\x1b[?2004h\x1b[>7unow")
    person.monitor.send(b"o\x1b]52;c;lo")
    person.monitor.send(b"l1234")
    person.monitor.send(b"m\x1b[?1049h")
    person.monitor.send(b"npaused")
    person.sees(b"coder: paused")
    assert b"[coder: 1234 bytes were not shown]\r\n" in person.shown
    person.monitor.send(b"xaborted")
    assert person.end() == ("aborted", 0)


def test_strange_packets_are_ignored(at: Callable[..., Person]) -> None:
    person = at()
    for packet in (b"q", b"zzz", b"n\xff\x1b]0;x\x07", b"l\x1b", b"o", b"m\xff\x1b[", b"t\x1b]"):
        person.monitor.send(packet)
    person.monitor.send(b"oon")
    person.monitor.send(b"x")
    assert person.end() == ("lost", 0)
    assert b"\x1b]0;" not in person.shown


def test_a_monitor_that_is_gone_is_lost(at: Callable[..., Person]) -> None:
    person = at()
    person.monitor.close()
    assert person.end() == ("lost", 0)


def test_a_terminal_that_is_gone_hangs_up(at: Callable[..., Person]) -> None:
    ours, theirs = pty.openpty()
    monitor, viewer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = json.dumps({"look": False, "raw": False, "leave": 29})
    process = subprocess.Popen(
        [sys.executable, "-c", VIEW, str(viewer.fileno()), given, "2"], cwd=HOUSE,
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, pass_fds=(viewer.fileno(),),
    )  # fmt: skip
    viewer.close()
    deadline = time.monotonic() + TIMEOUT
    while termios.tcgetattr(theirs)[3] & termios.ICANON:
        assert time.monotonic() < deadline
    os.close(theirs)
    os.close(ours)
    assert json.loads(process.communicate(timeout=TIMEOUT)[1]) == ["", signal.SIGHUP]
    monitor.settimeout(TIMEOUT)
    assert [monitor.recv(99), monitor.recv(99)] == [b"w80x24", b""]
    monitor.close()


def test_a_program_that_takes_no_input_cannot_be_left_yet(at: Callable[..., Person]) -> None:
    """The monitor would not know whether it was left, or hung up."""
    person = at()
    flood = b"x" * 4000
    while not readable([person.monitor.fileno()], 0):
        person.type(b"x")
    for _ in range(200):  # until the socket is full
        person.type(flood)
    person.type(b"\x1dd")
    person.sees(b"it takes no input, so you cannot leave yet")
    while b"d" not in (packets := person.packet()):
        assert packets[:1] == b"i"
        if packets.endswith(b"!"):
            break
        if not readable([person.monitor.fileno()], 0.5):
            person.type(b"\x1dd")
    assert person.end() == ("detached", 0)


def test_a_screen_that_takes_nothing_can_be_left(at: Callable[..., Person]) -> None:
    person = at(answers=False)
    person._ends.set()
    person._reader.join()
    person.monitor.setblocking(False)
    with pytest.raises(BlockingIOError):
        for _ in range(10_000):
            person.monitor.send(b"o" + b"y" * 8000)
            time.sleep(0.0005)
    os.kill(person.process.pid, signal.SIGTERM)
    assert person.end() == ("", signal.SIGTERM)
    assert termios.tcgetattr(person.theirs) == person.before


# without a terminal


def piped(
    data: bytes, stdout: int = subprocess.PIPE, **more: Any
) -> tuple[list[bytes], bytes, list[Any]]:
    """The packets that a viewer between pipes sends, what it prints, and how it ended."""
    monitor, viewer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monitor.settimeout(TIMEOUT)
    given = json.dumps({"look": False, "raw": False, "leave": 29, **more})
    process = subprocess.Popen(
        [sys.executable, "-c", VIEW, str(viewer.fileno()), given, "2"], cwd=HOUSE,
        stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, pass_fds=(viewer.fileno(),),
    )  # fmt: skip
    viewer.close()
    monitor.send(b"m\x1b[?2004h")
    monitor.send(b"o\x1b]52;c;aGk=\x07said\x1b[6n\r\n")
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.close()
    process.stdin = None
    packets = []
    while (packet := monitor.recv(1 << 16)) not in (b"d", b""):
        packets.append(packet)
    if packet:
        monitor.send(b"olast\r\n")
    monitor.close()
    out, err = process.communicate(timeout=TIMEOUT)
    return packets, out, json.loads(err)


def test_without_a_terminal_bytes_go_both_ways_and_the_end_leaves() -> None:
    packets, out, end = piped(b"\x1dd\x1b" + b"a" * 20_000)
    assert b"".join(packet[1:] for packet in packets) == b"\x1dd\x1b" + b"a" * 20_000
    assert {packet[:1] for packet in packets} == {b"i"} and max(map(len, packets)) <= 8192
    assert out == b"\x1b]52;c;aGk=\x07said\x1b[6n\r\nlast\r\n"
    assert end == ["detached", 0]


def test_what_was_piped_waits_for_a_program_that_takes_nothing_yet() -> None:
    """To close would lose it: the monitor hears no viewer that types while much waits."""
    monitor, viewer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = json.dumps({"look": False, "raw": False, "leave": 29})
    process = subprocess.Popen(
        [sys.executable, "-c", VIEW.replace("there =", "import client.terminal as of; "
         "of.LEAVING = 0.01; there ="), str(viewer.fileno()), given, "2"], cwd=HOUSE,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(viewer.fileno(),),
    )  # fmt: skip
    viewer.close()
    monitor.settimeout(TIMEOUT)
    assert monitor.recv(99) == b"d"
    assert not readable([monitor.fileno()], 0.3)  # nor closed
    monitor.close()
    assert json.loads(process.communicate(timeout=TIMEOUT)[1]) == ["detached", 0]


def test_what_ends_with_its_terminal_does_not_go_on_if_that_is_gone_by_now() -> None:
    packets, _, end = piped(b"", ends=True)
    assert (packets, end) == ([], ["", signal.SIGHUP])


# what goes along, and what is refused


def test_variables_go_along_if_nobody_could_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for line in (
        "TERM=xterm-256color", "LANG=de_DE.UTF-8", "LC_ALL=C", "COLORTERM=true color",
        "LC_X=$(x)", "PATH=/bin", "LC_TIME=" + "x" * 65, "TERMINFO=/x", "LC_=x",
    ):  # fmt: skip
        name, _, value = line.partition("=")
        monkeypatch.setenv(name, value)
    assert terminal.carried() == ["LANG=de_DE.UTF-8", "LC_ALL=C", "TERM=xterm-256color"]
    assert terminal.carried(["TERM=vt100"]) == ["LANG=de_DE.UTF-8", "LC_ALL=C"]
    for strange in ("xterm\n", "", "unheard-of", ".", "..", "/etc/passwd"):
        monkeypatch.setenv("TERM", strange)
        assert terminal.carried() == ["LANG=de_DE.UTF-8", "LC_ALL=C"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["run", "--tty", "x", "--", "true"], 2, "ctx spawn --tty, then ctx attach"),
        (["run", "--tty", "--agent", "claude"], 2, "ctx spawn --tty, then ctx attach"),
        (["enter", "x"], 2, "ctx task start -a x --wait -- COMMAND"),
        (["spawn", "--tty", "--mode", "turn", "new", "--", "true"], 2, "the mode is turn"),
        (["attach", "--leave-key", "x", "--look", "x"], 2, '"x" is not a key such as ^] or ^A'),
        (["attach", "nobody"], 69, 'no agent "nobody"'),
        (["attach", "fresh"], 69, "its status is new; start it: ctx start fresh\n"),
        (["attach", "x/none"], 69, 'no task "none"'),
        (["attach", "gone"], 69, "its status is dead; see: ctx log gone"),
        (["enter", "nobody"], 69, 'no agent "nobody"'),
        (["enter", "fresh"], 69, "its status is new; start it: ctx start fresh\n"),
        (["enter", "gone"], 69, "its status is dead; see: ctx log gone"),
    ],
)
def test_what_is_wrong_is_said(
    root: FakeRoot, run: Run, words: list[str], status: int, said: str
) -> None:
    root.agent("x", status="busy")
    (root.agent("fresh", status="new", mode="once") / "tty").write_text("80x24\n")
    root.agent("gone", status="dead")
    assert run(*words)[0] == status
    assert said in run(*words)[2]


def test_only_operators_attach(root: FakeRoot, run: Run, inside: Path) -> None:
    (inside / "tty").write_text("80x24\n")
    status, _, err = run("attach", "x")
    assert status == 13
    assert "only operators attach, from outside of agents" in err


@pytest.mark.parametrize(
    ("end", "status"),
    [("exit 0", 0), ("exit 3", 3), ("signal 9", 137), ("hangup", 129), ("aborted", 130),
     ("lost", 1), ("failed no terminal left (kernel.pty.max)", 126), ("exit x", 1)],
)  # fmt: skip
def test_exit_statuses(
    root: FakeRoot, capfd: pytest.CaptureFixture[str], end: str, status: int
) -> None:
    root.agent("x", status="dead")
    found = terminal.how_it_ended(Root(str(root.path)), "agent/x.d", "", end)
    assert found == status
    assert (f"x: {end}" in capfd.readouterr().err) == (end != f"exit {status}")


def test_a_timeout_is_told_as_by_others(root: FakeRoot) -> None:
    root.agent("x", status="dead", outcome="cancelled", reason="timeout")
    assert terminal.how_it_ended(Root(str(root.path)), "agent/x.d", "", "signal 15") == 124


def test_a_size_of_this_terminal() -> None:
    assert re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", terminal.own_size())


def test_a_directory_without_a_daemon(root: FakeRoot) -> None:
    root.agent("x", status="busy")
    with pytest.raises(Failure):
        terminal.attach(Root(str(root.path)), "agent/x.d", look=False, raw=False, leave=None)


def test_a_size_is_given_after_an_equals_sign_only() -> None:
    for words, size in ((["--tty"], ""), (["--tty=100x30"], "100x30"), ([], None)):
        _, args = parse_command(["spawn", *words, "coder", "--", "bash", "--tty"])
        assert (args.tty, args.words, args.program) == (size, ["coder"], ["bash", "--tty"])


def test_signals_wait_until_there_is_a_terminal() -> None:
    terminal.hold_signals()
    signal.raise_signal(signal.SIGHUP)
    restore, woken = terminal.watch_signals()
    assert os.read(woken, 10) == bytes([signal.SIGHUP])
    restore()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
