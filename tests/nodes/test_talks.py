"""What becomes of messages that are out when their link is cut until all is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.making import command_of
from tests.worlds.daemon import TIMEOUT, read, wait_dead, wait_status, wait_until, write
from tests.worlds.pairs import Pair, Took, end_of, pair_of
from tests.worlds.talks import RESIDENT, conversation, ends, lines, sending, wait_ends
from tests.worlds.three import three_of

#: keeps each message that comes in its home at the host, and works on those called "wait"
_KEEPS = r"""
said=$(cat); echo "$said" >> "$HOME/came"; case $said in wait*) sleep 1000;; esac; cat "$HOME/came"
"""
_BOSS = """
case $CTX_PROVENANCE in
operator)
  ctx tool call SpawnAgent "$CALL" > /dev/null
  ctx tool call SendMessage '{"agent_id": "kid", "text": "wait", "wait": true}' > /dev/null;;
esac
"""
_KID = "case $(cat) in wait) sleep 1000;; esac"


@pytest.fixture
def pair(took: Took) -> Iterator[Pair]:
    with pair_of(three_of(n2="5s"), 5, took) as made:
        yield made


def _boss(pair: Pair) -> tuple[Path, Path]:
    """An agent that waits for the reply of its child at the node."""
    boss, kid = pair.daemon.make("boss"), pair.daemon.agent_dir("kid")
    policy = ("agent:* create", "tool:* execute", "node:n2 place")
    call = {"name": "kid", "mode": "turn", "placement": "node=n2",
            "initial_message": "first", "exec": command_of(["sh", "-c", _KID])}  # fmt: skip
    write(boss / "policy", "".join(f"allow boss_t {line}\n" for line in policy))
    write(boss / "mode", "turn")
    write(boss / "env", f"CALL={json.dumps(call)}")
    write(boss / "exec", command_of(["sh", "-c", _BOSS]))
    write(boss / "ctl", "start")
    write(boss / "inbox", "begin")
    wait_until(kid.exists, f"it is made: {read(boss, 'log')}")
    wait_until(lambda: "wait" in read(kid, "message"), "it works on that")
    wait_ends(boss, 1)
    return boss, kid


def _heard(boss: Path) -> list[dict[str, Any]]:
    """Replies that it has waited for."""
    said = lines(boss, "session/messages.jsonl")
    return [json.loads(each["content"]) for each in said if each["provenance"] == "wait"]


def test_messages_that_are_out_when_all_is_lost(pair: Pair) -> None:
    """Each who waits is told why, nothing comes twice, and the session goes on after a reset."""
    turn = pair.place("", mode="turn", homedir="durable", exec=command_of(["sh", "-c", _KEEPS]))
    resident = pair.place("", mode="resident", exec=command_of(["python3", "-c", RESIDENT]))
    wait_status(turn, "idle")
    wait_status(resident, "ready")
    boss, kid = _boss(pair)
    run = [sys.executable, "-IS", str(pair.daemon.root / "bin" / "ctx"), "run", "talk", "--node",
           "n2", "--message", "hi", "--", "sleep", "1000"]  # fmt: skip
    environment = {"CTX_ROOT": str(pair.daemon.root)}
    with (
        subprocess.Popen(run, env=environment, stdin=subprocess.DEVNULL, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as talks,
        sending(pair, turn, "wait for one") as sends,
        sending(pair, resident, "wait") as asks,
    ):  # fmt: skip
        talk = pair.daemon.agent_dir("talk")
        wait_until(talk.exists, "it is made")
        placed = (turn, resident, kid, talk)
        for each in placed:
            wait_status(each, "busy")
        write(turn / "inbox", "two")
        wait_until(lambda: "two" in read(pair.there(turn), "queue"), "it is there")
        began = time.monotonic()
        pair.cut()
        write(turn / "inbox", "three")
        pair.gone_in_time(began, *placed)
        pair.lost_in_time(began, turn, resident, kid)
        for waits in (talks, sends, asks):
            said, _ = waits.communicate(timeout=TIMEOUT)
            assert waits.returncode != 0 and "runtime_lost" in said, said
    assert ends(turn) == [("failed", "runtime_lost"), *[("dropped", "runtime_lost")] * 2]
    assert ends(resident) == [("failed", "runtime_lost")]
    wait_until(lambda: _heard(boss), "it is told")
    (told,) = _heard(boss)
    assert (told["payload"]["outcome"], told["payload"]["reason"]) == ("failed", "runtime_lost")
    pair.heal()
    pair.works()
    for each, text, reply in (
        (turn, "four", "wait for one\nfour\n"), (resident, "five", "you said five\n")
    ):  # fmt: skip
        assert end_of(each) == ("interrupted", "runtime_lost")
        write(each / "ctl", "reset")
        write(each / "ctl", "start")
        wait_status(each, "idle", "ready")
        done = pair.daemon.ctx("send", each.name.removesuffix(".d"), text)
        assert (done.returncode, done.stdout) == (0, reply), done.stderr
        assert conversation(each) == [("user", text), ("assistant", reply.strip())]
        write(each / "ctl", "stop")
        wait_dead(each)
    assert len(_heard(boss)) == 1
    write(boss / "ctl", "stop")
    wait_dead(boss)
