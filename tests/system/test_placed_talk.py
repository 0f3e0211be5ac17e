"""Agents at other machines are spoken to as those here: messages, replies, verbs, sessions."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from client.making import command_of
from tests.worlds.daemon import TIMEOUT, read, wait_dead, wait_status, wait_until, write
from tests.worlds.talks import RESIDENT, conversation, ends, lines, sending, wait_ends
from tests.worlds.three import Three, three_of


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    with three_of(n2="30s") as made:
        yield made


def test_a_turn_agent_answers(three: Three) -> None:
    program = "cat; echo $CTX_FROM $CTX_PROVENANCE $CTX_MESSAGE"
    directory = three.place(program, mode="turn", **{"handoff.md": "one"})
    assert wait_ends(directory, 1) == [("processed", "")]
    assert read(directory, "session/latest.md").startswith("one\noperator operator ")
    wait_status(directory, "idle")
    name = directory.name.removesuffix(".d")
    done = three.daemon.ctx("send", name, "two")
    assert (done.returncode, done.stdout[:4]) == (0, "two\n"), done.stderr
    wait_status(directory, "idle")
    write(directory / "inbox", "x" * 300_000)
    assert wait_ends(directory, 3)[2] == ("processed", "")
    said = conversation(directory)
    assert [role for role, _ in said] == ["user", "assistant"] * 3
    assert (said[2], said[4]) == (("user", "two"), ("user", "x" * 300_000))
    assert said[5][1].startswith("x" * 300_000 + "\noperator operator")
    assert [each["run"] for each in lines(directory, "session/messages.jsonl")] == [
        "r1", "r1", "r2", "r2", "r3", "r3",
    ]  # fmt: skip
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert conversation(directory) == said, "nothing is told twice"


def test_a_person_talks_by_run(three: Three) -> None:
    ctx = three.daemon.ctx
    done = ctx("run", "talk", "--node", "n2", "--message", "hi", "--", "sh", "-c", "cat; exit 3")
    assert (done.returncode, done.stdout) == (3, "hi\n"), done.stderr
    assert not three.daemon.agent_dir("talk").exists()


def test_a_message_is_aborted_and_a_run_cancelled(three: Three) -> None:
    directory = three.place("sleep 1000; cat", mode="turn")
    wait_status(directory, "idle")
    write(directory / "inbox", "one")
    wait_status(directory, "busy")
    assert three.runs(directory)
    write(directory / "ctl", "abort")
    wait_status(directory, "paused")
    assert ends(directory) == [("aborted", "operator_aborted")]
    write(directory / "inbox", "two")
    assert [each["text"].strip() for each in lines(directory, "queue")] == ["two"]
    write(directory / "ctl", "resume")
    wait_status(directory, "busy")
    assert (read(directory, "queue"), json.loads(read(directory, "message"))["run"]) == ("", "r2")
    with sending(three, directory, "three") as send:
        wait_until(lambda: "three" in read(three.there(directory), "queue"), "it is there")
        send.send_signal(signal.SIGINT)
        assert send.wait(TIMEOUT) == 130
    wait_until(lambda: read(directory, "queue") == "", "it is cancelled")
    assert ends(directory)[1:] == [("dropped", "message_cancelled")]
    three.go(directory)
    assert wait_ends(directory, 3)[2] == ("processed", "")
    wait_status(directory, "idle")
    with sending(three, directory, "four") as send:
        wait_status(directory, "busy")
        send.send_signal(signal.SIGINT)
        assert send.wait(TIMEOUT) == 130
    wait_status(directory, "idle")
    assert ends(directory)[3] == ("aborted", "message_cancelled")
    write(directory / "ctl", "stop")
    wait_dead(directory)


def test_a_resident_converses(three: Three) -> None:
    directory = three.place("", mode="resident", exec=command_of(["python3", "-c", RESIDENT]))
    wait_status(directory, "ready")
    name = directory.name.removesuffix(".d")
    done = three.daemon.ctx("send", name, "this")
    assert (done.returncode, done.stdout) == (0, "you said this\n"), done.stderr
    with sending(three, directory, "wait") as send:
        assert send.stdout is not None
        assert send.stdout.read(3) == "wai", "a piece of a reply that is not whole"
        send.send_signal(signal.SIGINT)
        assert send.wait(TIMEOUT) == 130
    wait_status(directory, "ready")
    assert ends(directory) == [("processed", ""), ("aborted", "message_cancelled")]
    write(directory / "inbox", "wait")
    wait_status(directory, "busy")
    write(directory / "ctl", "abort")
    assert wait_ends(directory, 3)[2] == ("aborted", "operator_aborted")
    wait_status(directory, "paused")
    write(directory / "ctl", "resume")
    wait_status(directory, "ready")
    done = three.daemon.ctx("send", name, "that")
    assert done.stdout == "you said that\n", done.stderr
    write(directory / "ctl", "stop")
    wait_dead(directory)


@pytest.mark.parametrize(
    "of", ["both", *(pytest.param(one, marks=pytest.mark.long) for one in ("lead", "host"))]
)
def test_a_message_outlives_daemons(three: Three, of: str) -> None:
    directory = three.place("cat; sleep 1000; echo went", mode="turn")
    wait_status(directory, "idle")
    write(directory / "inbox", "one")
    write(directory / "inbox", "two")
    for _ in range(2):
        if of != "host":
            three.daemon.restart()
        if of != "lead":
            three.hosts["n2"].restart()
        wait_status(directory, "busy")
        three.go(directory)
    assert wait_ends(directory, 2) == [("processed", "")] * 2
    said = conversation(directory)
    assert said == [("user", "one"), ("assistant", "one\nwent"),
                    ("user", "two"), ("assistant", "two\nwent")]  # fmt: skip
    write(directory / "ctl", "kill")
    wait_dead(directory)


def test_what_is_said_over_a_cut_link_is_done_once(three: Three) -> None:
    directory = three.place("cat", mode="turn")
    wait_status(directory, "idle")
    three.wires["n2"].stop()
    for text in ("one", "two"):
        write(directory / "inbox", text)
    assert [each["text"].strip() for each in lines(directory, "queue")] == ["one", "two"]
    three.wires["n2"].go_on()
    assert wait_ends(directory, 2) == [("processed", "")] * 2
    assert [text for _, text in conversation(directory)] == ["one", "one", "two", "two"]
    write(directory / "ctl", "kill")
    wait_dead(directory)


def test_sessions_are_kept_on_both_machines(three: Three) -> None:
    directory = three.place("cat; echo at $CTX_SESSION; cat $CTX_SELF/session/messages.jsonl >&2",
                            mode="turn")  # fmt: skip
    wait_status(directory, "idle")

    def say(text: str, session: str) -> None:
        write(directory / "ctl", f"session {session}")
        wait_until(lambda: (directory / "session").readlink().name == session, "it is there")
        write(directory / "inbox", text)
        wait_until(lambda: text in read(directory, "session/messages.jsonl"), "it ended")
        wait_status(directory, "idle")
        assert read(directory, "session/latest.md") == f"{text}\nat {session}\n"

    for text, session in (("one", "default"), ("two", "second"), ("three", "default")):
        say(text, session)
    assert [text for role, text in conversation(directory) if role == "user"] == ["one", "three"]
    wait_until(lambda: '"one' in read(directory, "log"), "the program has its history there")
    write(directory / "ctl", "stop")
    wait_dead(directory)


BOSS = """
case $CTX_PROVENANCE in
operator)
  ctx tool call SpawnAgent "$CALL" > /dev/null
  ctx tool call SendMessage '{"agent_id": "far", "text": "question", "wait": true}' > /dev/null;;
*) cat; echo;;
esac
"""
FAR = """
cat
ctx tool call SendMessage '{"agent_id": "talker@one", "text": "by the way"}' >&2
ctx tool call SendMessage '{"agent_id": "talker", "text": "to another"}' >&2 || :
"""


def test_a_child_at_a_node_talks_to_its_supervisor(three: Three) -> None:
    boss = three.daemon.make("talker")
    policy = ("agent:* create", "tool:* execute", "node:n2 place")
    write(boss / "policy", "".join(f"allow talker_t {line}\n" for line in policy))
    write(boss / "mode", "turn")
    call = {"name": "far", "mode": "turn", "context": "fork", "initial_message": "first",
            "placement": "node=n2", "exec": command_of(["sh", "-c", FAR])}  # fmt: skip
    write(boss / "env", f"CALL={json.dumps(call)}")
    write(boss / "exec", command_of(["sh", "-c", BOSS]))
    write(boss / "ctl", "start")
    write(boss / "inbox", "begin")
    child = three.daemon.agent_dir("far")
    wait_until(child.exists, f"it is made: {read(boss, 'log')}")
    wait_until(lambda: len(ends(child)) == 2, "it has answered twice")
    wait_ends(boss, 4)
    heard = [(each["provenance"], each["content"]) for each in lines(boss, "session/messages.jsonl")
             if each["role"] == "user"]  # fmt: skip
    assert [what for what, _ in heard].count("child") == 2, heard
    (reply,) = [json.loads(text) for what, text in heard if what == "wait"]
    told = reply["payload"]
    assert (told["outcome"], told["reply"]) == ("processed", "question\n")
    assert "to another" not in json.dumps(heard)
    wait_until(lambda: 'no agent "talker"' in read(child, "log"), "that is somebody else there")
    write(boss / "ctl", "kill")
    wait_dead(boss)
    wait_dead(child)
