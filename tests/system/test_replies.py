"""A parent asks a child, and is woken by the answer (ctxfs-tasks(5), Waits)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.system.test_tools import said, script
from tests.worlds import stages
from tests.worlds.daemon import Daemon, alive, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import CRASH_AT

QUESTION = {"agent_id": "kid", "text": "why?", "id": "q1", "wait": True}
#: answers the question once the gate is open, and everything else at once
KID = f"sh -c 'read -r text; case $text in why*) {stages.AT_GATE};; esac; echo kid $text'"
_MAKE = said("SpawnAgent", name="kid", mode="turn", exec=KID, initial_message="look")
#: does what it is told, and repeats what wakes it; a daemon that dies is asked again
PARENT = script(
    "read -r text",
    f"""case $text in
make) {_MAKE}; until grep -q look $CTX_ROOT/agent/kid.d/out; do sleep 0.02; done;;
ask) until {said('SendMessage', **QUESTION)}; do sleep 0.02; done;;
*) printf "woken: %s\\n" "$text"; esac""".replace("\n", " "),
)


def told(daemon: Daemon) -> list[str]:
    """The outputs of the parent's runs, so far, by line."""
    return read(daemon.agent_dir("boss"), "out").splitlines()


def notices(daemon: Daemon) -> list[dict[str, Any]]:
    lines = [line.removeprefix("woken: ") for line in told(daemon) if line.startswith("woken: ")]
    return [notice for notice in map(json.loads, lines) if "wait" in notice]


def fired(daemon: Daemon) -> list[str]:
    return [e["wait"] for e in daemon.events("boss") if e["type"] == "wait.fired"]


def tell(daemon: Daemon, word: str) -> None:
    """A message of the operator's to the parent, which waits for nothing else."""
    wait_status(daemon.agent_dir("boss"), "idle")
    write(daemon.agent_dir("boss") / "inbox", word)


@pytest.fixture
def gate(daemon: Daemon) -> Path:
    """What lets the child of a parent answer."""
    path = daemon.base / "gate"
    path.mkdir()
    daemon.run("boss", PARENT, mode="turn", mount=f"{path} /gate ro")
    tell(daemon, "make")
    wait_until(lambda: len(told(daemon)) == 1, "it has made its child")
    return path


def ask(daemon: Daemon) -> None:
    """Until the child is asked, and the parent has nothing to do."""
    tell(daemon, "ask")
    check_asked(daemon)


def check_asked(daemon: Daemon) -> None:
    boss = daemon.agent_dir("boss")
    wait_until(lambda: "wait_id" in "".join(told(daemon)), "it has asked")
    wait_status(boss, "idle")
    answer = json.loads(told(daemon)[-1])
    assert (answer["message_id"], answer["wait_id"]) == ("q1", "wait-1")
    kid = daemon.agent_dir("kid")
    wait_until(lambda: read(kid, "queue") == "", "the child is told")
    wait_status(kid, "busy")
    assert os.listdir(boss / "waiting") == ["wait-1"]
    assert read(boss / "waiting" / "wait-1", "on") == "reply kid q1\n"
    assert fired(daemon) == []


def the_payload(daemon: Daemon) -> dict[str, Any]:
    """What woke the parent: one notice of one wait."""
    wait_until(lambda: notices(daemon), "the parent is woken")
    wait_status(daemon.agent_dir("boss"), "idle")
    assert fired(daemon) == ["wait-1"]
    (notice,) = notices(daemon)
    payload: dict[str, Any] = notice["payload"]
    wait = daemon.agent_dir("boss") / "waiting" / "wait-1"
    assert json.loads(read(wait, "payload")) == payload
    assert (notice["wait"], read(wait, "status")) == ("wait-1", "fired\n")
    assert (payload["child"], payload["message"]) == ("kid", "q1")
    return payload


def check_answer(daemon: Daemon) -> None:
    payload = the_payload(daemon)
    assert (payload["outcome"], payload["reply"]) == ("processed", "kid why?\n")
    assert (payload["reason"], payload["truncated"]) == ("", False)
    assert payload["path"] == f"{daemon.root}/agent/boss.d/task/kid/output"
    assert Path(payload["path"]).read_text() == payload["reply"]


def test_a_parent_is_woken_by_the_answer(daemon: Daemon, gate: Path) -> None:
    ask(daemon)
    (gate / "open").touch()
    check_answer(daemon)
    tell(daemon, "ask")  # again, by the same id
    wait_until(lambda: not told(daemon)[-1].startswith("woken"), "it has asked again")
    again = json.loads(told(daemon)[-1])
    assert (again["status"], again["wait_id"]) == ("processed", "wait-1")
    check_answer(daemon)


def test_a_parent_hears_of_children_whose_first_message_fails(daemon: Daemon) -> None:
    """One it makes itself, one with a wait for the reply, and one that a shell makes for it."""
    failing = {"mode": "turn", "exec": "sh -c 'echo tried; exit 3'", "initial_message": "look"}
    program = script(
        "read -r text",
        f"""case $text in
make) {said("SpawnAgent", name="kid", **failing)};;
wait) {said("SpawnAgent", name="kid2", wait=True, **failing)};;
*) printf "woken: %s\\n" "$text"; esac""".replace("\n", " "),
    )
    boss = daemon.run("boss", program, mode="turn")

    def woken() -> list[dict[str, Any]]:
        return [json.loads(line.removeprefix("woken: ")) for line in told(daemon)
                if line.startswith("woken: ")]  # fmt: skip

    tell(daemon, "make")
    wait_until(lambda: len(woken()) == 1, "it is told")
    tell(daemon, "wait")
    wait_until(lambda: len(woken()) == 2, "it is told")
    kid = daemon.make("kid3", failing["exec"], parent="agent:boss", mode="turn")
    write(kid / "handoff.md", "look")
    write(kid / "ctl", "start")
    wait_until(lambda: len(woken()) == 3, "it is told")
    first, second, third = woken()
    for name, notice in (("kid", first), ("kid3", third)):
        assert (notice["task"], notice["status"], notice["exit"]) == (name, "failed", "exit:3")
        assert notice["preview"] == "tried\n"
    assert (second["wait"], second["payload"]["reason"]) == ("wait-1", "exit:3")
    wait_status(boss, "idle")
    assert [read(boss / "task" / name, "status") for name in ("kid", "kid2", "kid3")] == [
        "running\n", "running\n", "running\n",
    ]  # fmt: skip
    assert len(woken()) == 3


def test_the_child_dies_between_question_and_answer(daemon: Daemon, gate: Path) -> None:
    ask(daemon)
    kid = daemon.agent_dir("kid")
    write(kid / "ctl", "kill")
    wait_dead(kid)
    payload = the_payload(daemon)
    assert payload["outcome"] in ("aborted", "failed")
    assert (payload["reply"], payload["path"]) == ("", "")
    assert payload["reason"] == read(kid, "reason").strip()


@pytest.mark.parametrize("crash_at", ["", "run.ended", "run.recorded"])
def test_the_daemon_dies_between_question_and_answer(
    daemon: Daemon, gate: Path, crash_at: str
) -> None:
    """Before the child answers, once it has, and once that is recorded."""
    ask(daemon)
    kid = daemon.agent_dir("kid")
    wait_until(lambda: read(kid, "pid") != "", "its run is seen")
    run = int(read(kid, "pid"))
    daemon.kill()
    if crash_at:
        daemon.env[CRASH_AT] = crash_at
        daemon.start()
        del daemon.env[CRASH_AT]
    (gate / "open").touch()
    if crash_at:
        daemon.wait_killed()
    else:
        wait_until(lambda: not alive(run), "the child has answered")
    daemon.start()
    check_answer(daemon)
    daemon.restart()
    check_answer(daemon)


def test_the_daemon_dies_as_the_question_is_sent(daemon: Daemon, gate: Path) -> None:
    """The parent does not know whether it is sent, and asks again."""
    wait_status(daemon.agent_dir("boss"), "idle")
    daemon.kill()
    daemon.env[CRASH_AT] = "message.queued:2"  # the first is what the parent is told
    daemon.start()
    del daemon.env[CRASH_AT]
    tell(daemon, "ask")
    daemon.wait_killed()
    daemon.start()
    check_asked(daemon)
    (gate / "open").touch()
    check_answer(daemon)
    ends = [e["message"] for e in daemon.events("kid") if e["type"] == "message.end"]
    assert ends.count("q1") == 1
