"""Agents that are spoken to: turn and resident, their runs, messages and sessions."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

#: replies with its argument list, what it was told and which run that is
TELL = "sh -c 'read -r text; echo \"$CTX_RUN: $text\"'"
RESIDENT = """\
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    text, about = message["text"].strip(), {"id": message["id"]}
    def say(kind, text):
        print(json.dumps({"type": kind, **about, "text": text}), flush=True)
    print("working on", text, flush=True)
    if text == "never":
        continue
    if text == "die":
        sys.exit(7)
    if text == "fail":
        say("error", "it cannot be done")
        continue
    say("delta", "you said ")
    say("delta", text)
    say("message", "you said " + text)
"""
#: ends "hold" when it is told to, and "deaf" never; both say a piece of a reply at once
HEEDFUL = """\
import json, sys
def say(kind, **more):
    print(json.dumps({"type": kind, **more}), flush=True)
if sys.argv[1:]:
    print(*sys.argv[1:], flush=True)
say("hello", takes=["cancel", "something else"])
held = None
for line in sys.stdin:
    told = json.loads(line)
    about = {"id": told["id"]}
    if told["type"] == "cancel":
        print("told to cancel", told["id"], flush=True)
        if told["id"] == held:
            say("message", text="well then", **about)
        continue
    say("delta", text="so far", **about)
    if told["text"].strip() == "hold":
        held = told["id"]
    elif told["text"].strip() == "die":
        held = None
        sys.stdin.readline()
        sys.exit(3)
    elif told["text"].strip() != "deaf":
        say("message", text="you said " + told["text"], **about)
"""


pytestmark = pytest.mark.settings(grace="500ms")


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of an agent of the test's own, in the daemon of the module."""
    return f"a{abs(hash(request.node.nodeid)) % 10**9}"


class Talk:
    """A connection to an agent's socket."""

    def __init__(self, daemon: Daemon, agent: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT)
        self._socket.connect(str(daemon.path("agent", f"{agent}.sock")))
        self._file = self._socket.makefile("rb")

    def ask(self, times: int = 1, /, **request: Any) -> None:
        self._socket.sendall((json.dumps(request).encode() + b"\n") * times)

    def frame(self) -> dict[str, Any]:
        line = self._file.readline()
        assert line, "the connection ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def frames(self) -> list[dict[str, Any]]:
        """Those of one message, up to its end."""
        found = [self.frame()]
        while found[-1]["type"] not in ("done", "error"):
            found.append(self.frame())
        return found

    def send(self, text: str, ident: str, **more: str) -> list[dict[str, Any]]:
        self.ask(op="send", id=ident, input=text, **more)
        return self.frames()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


TalkTo = Callable[[Daemon, str], Talk]


@pytest.fixture
def talk_to() -> Iterator[TalkTo]:
    """Opens connections, and closes them after the test."""
    with contextlib.ExitStack() as stack:

        def begin(daemon: Daemon, name: str) -> Talk:
            talk = Talk(daemon, name)
            stack.callback(talk.close)
            return talk

        yield begin


def turn(daemon: Daemon, name: str, command: str = TELL, **files: str) -> Path:
    agent = daemon.run(name, command, mode="turn", **files)
    wait_until(lambda: read(agent, "status") != "starting\n", "it has a cell")
    return agent


def resident(daemon: Daemon, name: str, **files: str) -> Path:
    program = daemon.base / "resident.py"
    program.write_text(RESIDENT)
    agent = daemon.run(
        name, "python3 -u /resident.py", mode="resident", mount=f"{program} /resident.py ro",
        **files,
    )
    wait_status(agent, "ready")
    return agent


def heedful(daemon: Daemon, name: str, *words: str, **files: str) -> Path:
    """A resident program that takes cancels."""
    program = daemon.base / "heedful.py"
    program.write_text(HEEDFUL)
    agent = daemon.run(
        name, f"python3 -u /heedful.py {' '.join(words)}", mode="resident",
        mount=f"{program} /heedful.py ro", **files,
    )  # fmt: skip
    wait_status(agent, "ready")
    return agent


def begin(talk: Talk, text: str, ident: str) -> None:
    """Sends a message, and returns when the program works on it."""
    talk.ask(op="send", id=ident, input=text)
    while talk.frame()["type"] != "delta":
        pass


def text_of(frames: list[dict[str, Any]], kind: str) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == kind)


def kinds(events: list[dict[str, Any]], *wanted: str) -> list[str]:
    return [event["type"] for event in events if event["type"] in wanted]


# turn


def test_each_message_is_a_run(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = turn(daemon, name)
    assert read(agent, "status") == "idle\n"
    assert (read(agent, "run"), read(agent, "pid")) == ("", "")
    talk = talk_to(daemon, name)
    for number, text in enumerate(("one", "two"), 1):
        frames = talk.send(text, f"m{number}")
        reply = f"r{number}: {text}\n"
        # a run may end before anybody has listened
        told = [frame["type"] for frame in frames if frame["type"] != "delta"]
        assert told == ["start", "message", "done"]
        assert frames[0]["run"] == f"r{number}"
        assert text_of(frames, "message") == reply
        assert reply.startswith(text_of(frames, "delta"))
        assert frames[-1] == {"type": "done", "id": f"m{number}", "status": "processed"}
        assert read(agent, "session/latest.md") == reply
    messages = [json.loads(line) for line in read(agent, "session/messages.jsonl").splitlines()]
    assert [(m["role"], m["provenance"], m["run"], m["content"]) for m in messages] == [
        ("user", "operator", "r1", "one"),
        ("assistant", "self", "r1", "r1: one\n"),
        ("user", "operator", "r2", "two"),
        ("assistant", "self", "r2", "r2: two\n"),
    ]
    wanted = ("run.start", "run.end", "message.queued", "message.end")
    assert kinds(daemon.events(name), *wanted) == [
        "message.queued", "run.start", "run.end", "message.end",
    ] * 2  # fmt: skip


def test_the_handoff_is_the_first_message(daemon: Daemon, name: str) -> None:
    agent = daemon.run(name, TELL, "the task\n", mode="turn")
    wait_until(lambda: read(agent, "session/latest.md"), "it replied")
    assert read(agent, "session/latest.md") == "r1: the task\n"
    queued = next(e for e in daemon.events(name) if e["type"] == "message.queued")
    assert queued["provenance"] == "operator"


def test_a_failed_run_ends_its_message_and_not_the_agent(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = turn(daemon, name, "sh -c 'read -r code; echo before; exit $code'")
    talk = talk_to(daemon, name)
    frames = talk.send("3", "bad")
    assert frames[-1] == {"type": "done", "id": "bad", "status": "failed", "reason": "exit:3"}
    assert read(agent, "session/latest.md") == ""
    assert talk.send("0", "good")[-1]["status"] == "processed"
    assert read(agent, "status") == "idle\n"
    ends = [e for e in daemon.events(name) if e["type"] == "run.end"]
    assert [(e["outcome"], e["reason"]) for e in ends] == [("error", "exit:3"), ("done", "exit:0")]


def test_a_timeout_is_one_of_each_run(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    # in this time the second one has to start and to end
    agent = turn(daemon, name, "sh -c 'read -r n; sleep $n'", limits="timeout=3s")
    talk = talk_to(daemon, name)
    done = talk.send("1000", "slow")[-1]
    assert (done["status"], done["reason"]) == ("failed", "timeout")
    assert talk.send("0", "fast")[-1]["status"] == "processed"
    assert read(agent, "status") == "idle\n"


def test_priorities_and_order(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = turn(daemon, name, "sh -c 'read -r text; test $text != hold || sleep 1000'")
    talk = talk_to(daemon, name)
    talk.ask(op="send", id="first", input="hold")
    wait_status(agent, "busy")
    for ident in ("background0", "normal0", "next0", "interject0", "normal1"):
        talk.ask(op="send", id=ident, input="x", priority=ident[:-1])
    wait_until(lambda: len(read(agent, "queue").splitlines()) == 5, "all are queued")
    order = ["interject0", "next0", "normal0", "normal1", "background0"]
    queue = [json.loads(line) for line in read(agent, "queue").splitlines()]
    assert [m["id"] for m in queue] == order
    assert set(queue[0]) == {"id", "ts", "from", "provenance", "priority", "text"}
    talk.ask(op="cancel", id="first")
    ended: list[tuple[str, str]] = []
    while len(ended) < 6:
        frame = talk.frame()
        if frame["type"] == "done":
            ended.append((frame["id"], frame["status"]))
    assert ended == [("first", "aborted"), *((ident, "processed") for ident in order)]
    assert read(agent, "queue") == ""


def test_a_repeated_id_is_told_again_and_not_run_again(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    turn(daemon, name)
    talk = talk_to(daemon, name)
    first = talk.send("hello", "same")
    again = talk.send("something else", "same")
    assert [f for f in first if f["type"] != "delta"] == [f for f in again if f["type"] != "delta"]
    assert kinds(daemon.events(name), "run.start") == ["run.start"]


def test_cancelling_ends_the_run_without_pausing(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = turn(daemon, name, "sh -c 'echo begun; sleep 1000'")
    talk = talk_to(daemon, name)
    talk.ask(op="send", id="long", input="x")
    assert talk.frame()["type"] == "start"
    assert talk.frame()["text"] == "begun\n"
    talk.ask(op="send", id="waits", input="y")
    wait_until(lambda: read(agent, "queue"), "it is queued")
    talk.ask(op="cancel", id="waits")
    assert talk.frame() == {
        "type": "done", "id": "waits", "status": "dropped", "reason": "message_cancelled",
    }  # fmt: skip
    talk.ask(op="cancel", id="long")
    assert talk.frame()["status"] == "aborted"
    wait_status(agent, "idle")
    talk.ask(op="cancel", id="long")
    assert talk.frame()["code"] == "ESRCH"
    talk.ask(op="cancel", id="unheard of")
    assert talk.frame()["code"] == "ENOENT"


def test_an_abort_ends_one_run_and_nothing_else(daemon: Daemon, name: str) -> None:
    agent = turn(daemon, name, "sh -c 'cat; sleep 1000'")
    (agent / "work" / "W").mkdir()
    (agent / "task" / "T").mkdir()
    write(agent / "task/T/cmd", "sleep 1000")
    write(agent / "task/T/ctl", "start")
    write(agent / "inbox", "first")
    wait_until(lambda: read(agent, "pid") and read(agent, "task/T/pid"), "both run")
    write(agent / "inbox", "second")
    assert refusal(agent / "ctl", "abort r77") == "ESTALE"
    write(agent / "ctl", "abort r1")
    wait_status(agent, "paused")
    assert read(agent, "run") == read(agent, "pid") == "", "which goes with it"
    assert read(agent, "task/T/status") == "running\n"
    assert read(agent, "work/W/status") == "open\n"
    assert len(read(agent, "queue").splitlines()) == 1
    end = next(e for e in daemon.events(name) if e["type"] == "message.end")
    assert (end["outcome"], end["reason"]) == ("aborted", "operator_aborted")
    assert refusal(agent / "ctl", "abort") == "ESRCH"
    write(agent / "ctl", "resume")
    wait_until(lambda: read(agent, "run") == "r2\n", "the next message has its run")
    write(agent / "ctl", "pause")
    assert read(agent, "status") == "paused\n"
    write(agent / "ctl", "abort")  # of a frozen run
    wait_until(lambda: not read(agent, "run"), "the frozen run is over")
    write(agent / "ctl", "resume")
    wait_status(agent, "idle")
    assert read(agent, "task/T/status") == "running\n"


def test_what_a_run_leaves_behind_ends_before_the_run(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    left = "trap : TERM; echo up; while :; do sleep 0.1; done"
    agent = turn(
        daemon, name,
        f"sh -c '(setsid sh -c \"{left}\" &); until grep -q up $CTX_SELF/out; do :; done'",
    )
    talk = talk_to(daemon, name)
    assert text_of(talk.send("x", "m"), "message") == "up\n"
    assert not Cgroup(Path(read(agent, "cgroup").strip())).child("run").populated()


def test_stopping_itself_is_the_good_end_of_a_turn_agent(daemon: Daemon, name: str) -> None:
    agent = turn(daemon, name, "sh -c 'echo bye; echo stop > $CTX_SELF/ctl; sleep 1000'")
    write(agent / "inbox", "x")
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("done\n", "self_stop\n")
    assert read(agent, "session/latest.md") == "bye\n"


def test_at_its_end_every_message_ends(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = turn(daemon, name, "sh -c 'cat; sleep 1000'")
    talk = talk_to(daemon, name)
    talk.ask(op="send", id="runs", input="x")
    assert talk.frame()["type"] == "start"
    talk.ask(op="send", id="waits", input="y")
    wait_until(lambda: read(agent, "queue"), "it is queued")
    write(agent / "ctl", "stop")
    ended: dict[str, str] = {}
    while len(ended) < 2:
        frame = talk.frame()
        if frame["type"] == "done":
            ended[frame["id"]] = frame["status"]
    assert ended == {"runs": "aborted", "waits": "dropped"}
    assert refusal(agent / "inbox", "z") == "EBUSY"


def test_a_message_that_is_too_long_or_malformed(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = turn(daemon, name, "wc -c")
    assert refusal(agent / "inbox", "x" * (1 << 20) + "yy") == "EMSGSIZE"
    with pytest.raises(OSError, match="Invalid argument"):
        (agent / "inbox").write_bytes(b"\xff\xfe")
    talk = talk_to(daemon, name)
    for request, code in (
        ({"op": "send", "input": "x"}, "EINVAL"),
        ({"op": "send", "id": "a b", "input": "x"}, "EINVAL"),
        ({"op": "send", "id": "m"}, "EINVAL"),
        ({"op": "send", "id": "m", "input": 7}, "EINVAL"),
        ({"op": "send", "id": "m", "input": "x", "priority": "urgent"}, "EINVAL"),
    ):
        talk.ask(**request)
        assert talk.frame()["code"] == code, request
    write(agent / "inbox", "x" * (1 << 20))
    wait_until(lambda: read(agent, "session/latest.md"), "it replied")
    assert read(agent, "session/latest.md") == f"{(1 << 20) + 1}\n"


def test_a_hundred_messages_at_once(daemon: Daemon, name: str) -> None:
    agent = turn(daemon, name)
    for number in range(100):
        write(agent / "inbox", f"n{number}")
    wait_until(lambda: read(agent, "status") == "idle\n" and not read(agent, "queue"), "all done",
               timeout=4 * TIMEOUT)  # a hundred runs
    contents = [
        json.loads(line)["content"]
        for line in read(agent, "session/messages.jsonl").splitlines()
    ]
    assert contents[1::2] == [f"r{number + 1}: n{number}\n" for number in range(100)]


# resident


def test_a_resident_program_is_spoken_to(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = resident(daemon, name)
    pid = read(agent, "pid")
    talk = talk_to(daemon, name)
    for number in (1, 2):
        frames = talk.send(f"hello {number}", f"m{number}")
        assert [f["type"] for f in frames] == ["start", "delta", "delta", "message", "done"] or (
            [f["type"] for f in frames] == ["start", "delta", "message", "done"]
        )
        assert text_of(frames, "delta") == text_of(frames, "message") == f"you said hello {number}"
    done = talk.send("fail", "bad")[-1]
    assert (done["status"], done["reason"]) == ("failed", "it cannot be done")
    assert read(agent, "pid") == pid
    assert read(agent, "run") == "r1\n"
    assert read(agent, "status") == "ready\n"
    assert read(agent, "session/latest.md") == "you said hello 2"
    assert read(agent, "out") == "".join(
        f"working on {text}\n" for text in ("hello 1", "hello 2", "fail")
    )


def test_a_resident_that_dies_fails_its_message_and_is_restarted(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = resident(daemon, name, restart="on-failure")
    talk = talk_to(daemon, name)
    done = talk.send("die", "last")[-1]
    assert (done["status"], done["reason"]) == ("failed", "exit:7")
    wait_status(agent, "ready")
    assert read(agent, "run") == "r2\n"
    assert talk.send("again", "next")[-1]["status"] == "processed"


def test_a_resident_is_aborted_and_respawned(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = resident(daemon, name)
    talk = talk_to(daemon, name)
    talk.ask(op="send", id="stuck", input="never")
    assert talk.frame()["type"] == "start"
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    assert read(agent, "status") == "paused\n"
    wait_until(lambda: not read(agent, "run"), "the run is over")
    write(agent / "ctl", "resume")
    wait_status(agent, "ready")
    assert read(agent, "run") == "r2\n"
    assert talk.send("hello", "after")[-1]["status"] == "processed"


def test_a_cancelled_message_of_a_resident_lets_it_go_on(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = resident(daemon, name)
    talk = talk_to(daemon, name)
    talk.ask(op="send", id="stuck", input="never")
    assert talk.frame()["type"] == "start"
    talk.ask(op="cancel", id="stuck")
    assert talk.frame()["status"] == "aborted"
    assert talk.send("hello", "after")[-1]["status"] == "processed"
    assert read(agent, "run") == "r1\n"


@pytest.mark.parametrize("cancelled", [False, True], ids=["aborted", "cancelled"])
def test_a_program_that_takes_cancels_ends_its_message_and_goes_on(
    daemon: Daemon, name: str, talk_to: TalkTo, cancelled: bool
) -> None:
    agent = heedful(daemon, name, "Loading.", limits="grace=1000s")
    pid = read(agent, "pid")
    talk = talk_to(daemon, name)
    begin(talk, "hold", "held")
    if cancelled:
        talk.ask(op="cancel", id="held")
        why = "message_cancelled"
    else:
        write(agent / "ctl", "abort r1")
        why = "operator_aborted"
    assert talk.frame() == {"type": "done", "id": "held", "status": "aborted", "reason": why}
    assert read(agent, "out") == "Loading.\ntold to cancel held\n"
    assert read(agent, "session/latest.md") == ""
    end = next(e for e in daemon.events(name) if e["type"] == "message.end")
    assert (end["by"], end["reason"]) == ("operator uid:0", why)
    assert read(agent, "status") == ("ready\n" if cancelled else "paused\n")
    if not cancelled:
        write(agent / "ctl", "resume")
    assert read(agent, "status") == "ready\n"
    assert talk.send("hello", "after")[-1]["status"] == "processed"
    assert (read(agent, "run"), read(agent, "pid")) == ("r1\n", pid)
    assert kinds(daemon.events(name), "run.start", "run.end") == ["run.start"]


def test_a_program_that_ignores_an_abort_is_ended(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = heedful(daemon, name, limits="grace=2s")  # in which it cannot be resumed
    talk = talk_to(daemon, name)
    begin(talk, "deaf", "deaf")
    write(agent / "ctl", "abort")
    assert refusal(agent / "ctl", "resume") == "EBUSY"
    assert read(agent, "status") == "paused\n"
    assert talk.frame()["status"] == "aborted"
    wait_until(lambda: not read(agent, "run"), "the run is over")
    assert "told to cancel deaf\n" in read(agent, "out")
    (end,) = [e for e in daemon.events(name) if e["type"] == "run.end"]
    assert (end["outcome"], end["reason"]) == ("cancelled", "operator_aborted")
    assert end["by"] == "operator uid:0"
    write(agent / "ctl", "resume")
    wait_status(agent, "ready")
    assert read(agent, "run") == "r2\n"
    write(agent / "limits", "grace=1000s")
    begin(talk, "hold", "held")
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    assert read(agent, "run") == "r2\n"


def test_a_second_abort_waits_for_nothing(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = heedful(daemon, name, limits="grace=1000s")
    talk = talk_to(daemon, name)
    begin(talk, "deaf", "deaf")
    write(agent / "ctl", "abort")
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    wait_until(lambda: not read(agent, "run"), "the run is over")


def test_a_program_that_ignores_a_cancel_is_asked_no_more(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = heedful(daemon, name)
    talk = talk_to(daemon, name)
    begin(talk, "deaf", "deaf")
    talk.ask(op="cancel", id="deaf")
    assert talk.frame()["status"] == "aborted"
    assert talk.send("hello", "after")[-1]["status"] == "processed"
    assert read(agent, "run") == "r1\n"
    # the second one does not wait
    write(agent / "limits", "grace=1000s")
    begin(talk, "deaf", "again")
    talk.ask(2, op="cancel", id="again")
    assert talk.frame()["status"] == "aborted"
    wait_until(lambda: "told to cancel again" in read(agent, "out"), "it was told all the same")


def test_a_program_that_ends_when_it_is_told_to_cancel(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    """Of an abort that is the end of the run; else it is the end of the agent, as ever."""
    agent = heedful(daemon, name, limits="grace=1000s")
    talk = talk_to(daemon, name)
    begin(talk, "die", "one")
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    wait_until(lambda: not read(agent, "run"), "the run is over")
    assert read(agent, "status") == "paused\n"
    write(agent / "ctl", "resume")
    wait_status(agent, "ready")
    begin(talk, "die", "two")
    talk.ask(op="cancel", id="two")
    assert talk.frame()["type"] == "done"
    wait_dead(agent)
    assert read(agent, "reason") == "exit:3\n"


def test_what_does_not_begin_with_a_hello_takes_no_cancels(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = heedful(daemon, name, "'{\"something\": \"else\"}'", limits="grace=1000s")
    talk = talk_to(daemon, name)
    begin(talk, "hold", "held")
    talk.ask(op="cancel", id="held")
    assert talk.frame()["status"] == "aborted"
    assert talk.send("hello", "after")[-1]["status"] == "processed"
    out = read(agent, "out")
    assert out.startswith('{"something": "else"}\n{"type": "hello"'), "an ordinary line"
    assert "told to cancel" not in out


def test_a_frozen_program_is_not_waited_for(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = heedful(daemon, name, limits="grace=1000s")
    talk = talk_to(daemon, name)
    begin(talk, "hold", "held")
    write(agent / "ctl", "pause")
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    wait_until(lambda: not read(agent, "run"), "the run is over")


def test_a_program_that_is_to_end_its_message_can_be_stopped(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = heedful(daemon, name, limits="grace=1000s")
    talk = talk_to(daemon, name)
    begin(talk, "deaf", "deaf")
    write(agent / "ctl", "abort")
    write(agent / "ctl", "kill")
    assert talk.frame()["type"] == "done"
    wait_dead(agent)
    assert read(agent, "outcome") == "cancelled\n"


def test_a_resident_goes_on_without_the_daemon(talk_to: TalkTo) -> None:
    with daemon_of() as daemon:
        agent = resident(daemon, "r")
        talk = talk_to(daemon, "r")
        talk.ask(op="send", id="before", input="never")
        assert talk.frame()["type"] == "start"
        write(agent / "inbox", "queued")
        daemon.kill()
        daemon.start()
        assert read(agent, "status") == "busy\n"
        assert "queued" in read(agent, "queue")
        talk = talk_to(daemon, "r")
        talk.ask(op="cancel", id="before")
        wait_until(lambda: read(agent, "session/latest.md"), "the queued one is answered")
        assert read(agent, "session/latest.md") == "you said queued"
        assert read(agent, "out") == "working on never\nworking on queued\n"


# once


def test_a_once_agent_takes_no_messages(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = daemon.run(name, "sleep 1000")
    wait_status(agent, "busy")
    assert refusal(agent / "inbox", "x") == "EBUSY"
    talk = talk_to(daemon, name)
    assert talk.send("x", "m")[-1]["code"] == "EBUSY"


def test_a_once_agent_is_aborted_and_runs_again(daemon: Daemon, name: str) -> None:
    script = "cat; echo $CTX_RUN; test $CTX_RUN = r3 || sleep 1000"
    agent = daemon.run(name, f"sh -c '{script}'", "the task\n")
    wait_status(agent, "busy")
    (agent / "task" / "T").mkdir()
    write(agent / "task/T/cmd", "sleep 1000")
    write(agent / "task/T/ctl", "start")
    wait_until(lambda: read(agent, "task/T/pid"), "the task runs")

    def says(run: str) -> bool:
        return run in read(agent, "out")

    for run in ("r1", "r2"):
        wait_until(partial(says, run), "the run says so")
        wait_status(agent, "busy")  # what it says may be there first
        write(agent / "ctl", f"abort {run}")
        wait_until(lambda: not read(agent, "run"), "the run is over")
        assert read(agent, "status") == "paused\n"
        assert read(agent, "task/T/status") == "running\n"
        write(agent / "ctl", "resume")
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("done\n", "exit:0\n")
    assert read(agent, "out") == "".join(f"the task\n{run}\n" for run in ("r1", "r2", "r3"))
    assert read(agent, "task/T/status") == "cancelled\n"


# sessions


def test_sessions_are_switched(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = turn(daemon, name, "sh -c 'cat; echo $CTX_SESSION'")
    talk = talk_to(daemon, name)
    assert text_of(talk.send("a", "m"), "message") == "a\ndefault\n"
    write(agent / "ctl", "session other")
    assert os.readlink(agent / "session").endswith("/session/other")
    # an id is one of a session
    assert text_of(talk.send("b", "m"), "message") == "b\nother\n"
    assert len(read(agent, "session/messages.jsonl").splitlines()) == 2
    write(agent / "ctl", "session default")
    assert os.readlink(agent / "session").endswith("/session/default")
    assert refusal(agent / "ctl", "session current") == "EINVAL"
    write(agent / "ctl", "stop")
    wait_dead(agent)
    base = daemon.path("home", read(agent, "owner").strip(), "agent", name, "session")
    assert {read(base / s, "state") for s in ("default", "other")} == {"cancelled\n"}
    write(agent / "ctl", "reset")
    assert refusal(agent / "ctl", "session other") == "EACCES"


# from a shell


def test_the_name_of_an_agent_is_a_command(daemon: Daemon, name: str) -> None:
    agent = turn(daemon, name)
    command = [str(daemon.path("agent", name))]
    said = subprocess.run([*command, "fix", "it"], capture_output=True, text=True, timeout=TIMEOUT)
    assert (said.returncode, said.stdout, said.stderr) == (0, "r1: fix it\n", "")
    piped = subprocess.run(command, input="from a pipe\n", capture_output=True, text=True,
                           timeout=TIMEOUT)
    assert (piped.returncode, piped.stdout) == (0, "r2: from a pipe\n")
    write(agent / "ctl", "stop")
    wait_dead(agent)
    late = subprocess.run([*command, "x"], capture_output=True, text=True, timeout=TIMEOUT)
    assert late.returncode == 69


def test_a_connection_that_closes_cancels_nothing(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = turn(daemon, name, "sh -c 'read -r x; sleep 0.3; echo done'")
    talk = talk_to(daemon, name)
    talk.ask(op="send", id="m", input="x")
    assert talk.frame()["type"] == "start"
    talk.close()
    wait_until(lambda: read(agent, "session/latest.md"), "it replied")
    assert read(agent, "session/latest.md") == "done\n"


def test_a_slow_reader_slows_nobody(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = turn(daemon, name, "sh -c 'read -r x; yes | head -c 3000000'")
    slow = talk_to(daemon, name)
    slow.ask(op="send", id="much", input="x")
    began = time.monotonic()
    wait_until(lambda: kinds(daemon.events(name), "message.end"), "it ended")
    assert time.monotonic() - began < TIMEOUT
    assert read(agent, "status") == "idle\n"
    frames = slow.frames()
    assert frames[-1]["status"] == "processed"
    assert len(text_of(frames, "message")) == 512 << 10

