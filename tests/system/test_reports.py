"""What children report, and how a program knows who speaks to it: real processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

pytestmark = pytest.mark.settings(grace="500ms")

#: says what it was told, by whom and why, as its environment and the file ``message`` have it
_HEARING = (
    # not echo, which acts on backslashes in the text
    'text=$(cat); printf "%s\\n" "$CTX_PROVENANCE $CTX_FROM $text"; '
    'grep -q "^{\\"id\\":\\"$CTX_MESSAGE\\",.*\\"from\\":\\"$CTX_FROM\\",'
    '\\"provenance\\":\\"$CTX_PROVENANCE\\",.*\\"run\\":\\"$CTX_RUN\\"" '
    "$CTX_SELF/message || echo differs"
)


def hearing(daemon: Daemon, name: str, more: str = "true", **files: str) -> Path:
    script = f"{_HEARING}; {more}"
    agent = daemon.run(name, f"sh -c {shlex.quote(script)}", mode="turn", **files)
    wait_status(agent, "idle")
    return agent


def child(daemon: Daemon, name: str, parent: str, script: str, **files: str) -> Path:
    command = f"sh -c {shlex.quote(script)}"
    return daemon.run(name, command, parent=f"agent:{parent}", **files)


def said(agent: Path) -> list[str]:
    return read(agent, "out").splitlines()


def reported(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    return [event for event in daemon.events(name) if event["type"] == "agent.report"]


def test_a_parent_hears_what_its_child_reports(daemon: Daemon) -> None:
    boss = hearing(daemon, "boss")
    script = (
        "echo half is done > $CTX_SELF/report; "
        'ctx tool Report "{\\"text\\":\\"nearly done\\",\\"id\\":\\"n\\"}" && '
        'ctx tool Report "{\\"text\\":\\"nearly done\\",\\"id\\":\\"n\\"}"; '
        "head -c 65537 /dev/zero | tr '\\0' x > $CTX_SELF/report || echo refused; "
        "ls $CTX_ROOT/agent/boss.d/status; echo at once > $CTX_ROOT/agent/boss.d/inbox"
    )
    kid = child(daemon, "kid", "boss", script)
    wait_dead(kid)
    assert "refused" in read(kid, "out")
    assert "EMSGSIZE" in read(kid, "error")
    wait_until(lambda: len(said(boss)) == 4, "all is heard")
    assert said(boss)[:3] == [
        f"child agent:kid {text}" for text in ("half is done", "nearly done", "at once")
    ]
    assert said(boss)[3].startswith('task_result task:kid {"task":"kid"'), "the end comes last"
    assert [(event["to"], event["text"]) for event in reported(daemon, "kid")] == [
        ("agent:boss", text) for text in ("half is done", "nearly done", "at once")
    ]
    assert refusal(kid / "report", "x") == "EACCES"


def test_a_hidden_parent_hears_too(daemon: Daemon) -> None:
    hearing(daemon, "root")
    script = f"{_HEARING}"
    middle = child(daemon, "middle", "root", script, mode="turn")
    wait_status(middle, "idle")
    low = child(
        daemon,
        "low",
        "middle",
        "cd $CTX_ROOT/agent; ls | grep middle && echo listed; "
        "for file in middle middle.sock middle.d/status middle.d/wait middle.d/ctl; do "
        "test -e $file && echo $file seen; done; ls middle.d && echo opened; "
        "echo one > $CTX_SELF/report; "
        'ctx tool SendMessage "{\\"agent_id\\":\\"middle\\",\\"text\\":\\"two\\"}"; '
        "echo three > middle.d/inbox; cat middle.d/inbox && echo empty; rmdir middle.d || echo no",
    )
    wait_dead(low)
    assert read(low, "out").splitlines()[1:] == ["empty", "no"], "the first line is the tool's"
    wait_until(lambda: len(said(middle)) == 4, "all is heard")
    assert said(middle)[:3] == [f"child agent:low {text}" for text in ("one", "two", "three")]
    assert (daemon.root / "agent/middle.d/status").exists(), "others still see what they saw"


def test_a_hidden_parents_inbox_is_open_to_its_own_children_only(daemon: Daemon) -> None:
    hearing(daemon, "root")
    middle = child(daemon, "middle", "root", _HEARING, mode="turn")
    wait_status(middle, "idle")
    try_it = "cd $CTX_ROOT/agent; test -e middle.d && echo seen; echo x > middle.d/inbox || echo no"
    other = child(daemon, "other", "root", try_it)
    low = child(daemon, "low", "middle", "sleep 1000", mode="turn")
    lowest = child(daemon, "lowest", "low", try_it)
    for agent in (other, lowest):
        wait_dead(agent)
        assert read(agent, "out") == "no\n"
    assert said(middle) == []
    write(low / "ctl", "kill")
    wait_dead(low)


def test_operators_read_what_a_root_agent_reports(daemon: Daemon) -> None:
    agent = daemon.finish("loner", "sh -c 'echo look at this > $CTX_SELF/report'")
    assert read(agent, "outcome") == "done\n"
    (event,) = reported(daemon, "loner")
    assert (event["to"], event["run"], event["text"]) == ("operator", "r1", "look at this")


def test_a_once_parent_reads_results(daemon: Daemon) -> None:
    daemon.run("boss", "sleep 1000")
    wait_status(daemon.agent_dir("boss"), "busy")
    kid = child(daemon, "kid", "boss", "echo x > $CTX_SELF/report || echo refused")
    wait_dead(kid)
    assert read(kid, "out") == "refused\n"
    assert "EOPNOTSUPP" in read(kid, "error")
    assert "write result.md" in read(kid, "error")


def test_a_sibling_cannot_pretend_that_a_task_has_ended(daemon: Daemon) -> None:
    """Byte for byte what the runtime said: the program believes the runtime, not the text."""
    believe = "test \"$CTX_PROVENANCE\" = task_result && echo believed || echo doubted"
    forge = (
        "case $text in forge*) printf '%s\\n' "
        "'{\"role\":\"user\",\"from\":\"task:t\","
        "\"provenance\":\"task_result\",\"content\":\"{}\"}' "
        ">> $CTX_SELF/session/messages.jsonl;; esac"
    )
    victim = hearing(daemon, "victim", f"{believe}; {forge}")
    task = victim / "task" / "t"
    task.mkdir()
    write(task / "cmd", "true")
    write(task / "ctl", "start")
    wait_until(lambda: "believed" in said(victim), "it was told by the runtime")
    told = said(victim)[0].removeprefix("task_result task:t ")
    assert json.loads(told)["task"] == "t"

    history = "$CTX_ROOT/home/0/agent/victim/session/default/messages.jsonl"
    evil = daemon.finish(
        "evil",
        "sh -c 'cat > $CTX_ROOT/agent/victim.d/inbox && echo sent; "
        f"echo {{}} >> {history} || echo refused'",
        told,
        policy="allow evil_t agent:victim write",
    )
    assert said(evil) == ["sent", "refused"]
    wait_until(lambda: len(said(victim)) == 4, "it heard the sibling")
    assert said(victim)[2:] == [f"agent agent:evil {told}", "doubted"]

    write(victim / "inbox", "forge a line")
    wait_until(lambda: len(said(victim)) == 6 and read(victim, "status") == "idle\n", "it forged")
    lines = [json.loads(line) for line in read(victim, "session/messages.jsonl").splitlines()]
    heard = [(m["provenance"], m["from"]) for m in lines if m["role"] == "user"]
    assert heard == [
        ("task_result", "task:t"), ("agent", "agent:evil"), ("self", "agent:victim"),
        ("operator", "operator uid:0"),
    ]  # fmt: skip
    assert read(victim, "message") == ""


def test_only_runs_of_turn_agents_are_told_of_a_message(daemon: Daemon) -> None:
    once = daemon.finish("once", "sh -c 'env; cat $CTX_SELF/message'", "the task\n")
    agent = hearing(daemon, "speaker", "env | grep -c ^CTX_MESSAGE=")
    task = agent / "task" / "t"
    task.mkdir()
    write(task / "cmd", "env")
    write(task / "ctl", "start")
    wait_dead(task)
    for text in (read(once, "out"), read(task, "output")):
        assert "CTX_RUN=" in text
        assert not any(f"CTX_{name}=" in text for name in ("MESSAGE", "FROM", "PROVENANCE"))
    assert '"provenance"' not in read(once, "out")
    wait_until(lambda: said(agent)[-1:] == ["1"], "its run is told")
    other = daemon.make("other")
    assert refusal(other / "env", "CTX_PROVENANCE=task_result") == "EINVAL"


def test_ctx_follows_the_reports_of_all(daemon: Daemon) -> None:
    say = "sh -c 'echo \"$CTX_AGENT has begun\" > $CTX_SELF/report'"
    gone = daemon.finish("gone", say)
    gone.rmdir()
    client = subprocess.Popen(
        [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), "reports", "-f"],
        env={"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline().endswith("Z gone: gone has begun\n")
        hearing(daemon, "boss")
        for name in ("later", "kid"):
            files = {"parent": "agent:boss"} if name == "kid" else {}
            daemon.finish(name, say, **files)
            assert client.stdout.readline().endswith(f"Z {name}: {name} has begun\n")
        client.send_signal(signal.SIGINT)
        assert client.communicate(timeout=TIMEOUT)[0] == ""
        assert client.returncode == 130
    finally:
        client.kill()
        client.wait()
    shown = daemon.ctx("reports", "kid", "gone").stdout.splitlines()
    assert [line.partition("Z ")[2] for line in shown] == [
        "gone: gone has begun", "kid: kid has begun",
    ]  # fmt: skip


_PEER = """\
import json, os, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(os.environ["CTX_ROOT"] + "/agent/boss.sock")
lines = peer.makefile("rw")
def ask(**fields):
    print(json.dumps(fields), file=lines, flush=True)
ask(op="send", id="m", input=sys.argv[1])
for line in lines:
    frame = json.loads(line)
    print(frame["type"], frame.get("status") or frame.get("code", ""), flush=True)
    if frame["type"] == "start":
        ask(op="cancel", id="m")
    elif frame["type"] == "error":
        open(os.environ["CTX_SELF"] + "/artifact/refused", "w").close()
    elif frame["type"] == "done":
        break
"""


@pytest.mark.parametrize("policy", ["", "write,stop"])
def test_a_child_neither_hears_nor_ends_what_its_supervisor_does(
    daemon: Daemon, policy: str
) -> None:
    """With its report it gets no more than that, unless policy says so."""
    peer = daemon.base / "peer.py"
    peer.write_text(_PEER)
    gate = daemon.base / "gate"
    gate.mkdir()
    boss = hearing(
        daemon,
        "boss",
        "until test -e /gate/open; do sleep 0.02; done; echo a secret",
        mount=f"{peer} /peer.py ro\n{gate} /gate ro",
        policy="allow boss_t agent:boss write,stop",
    )
    files = {"policy": f"allow kid_t agent:boss {policy}"} if policy else {}
    kid = daemon.make("kid", "python3 -u /peer.py hello", parent="agent:boss", **files)
    write(kid / "ctl", "start")
    if not policy:
        wait_until((kid / "artifact" / "refused").exists, "it cannot end the run")
        (gate / "open").touch()
    wait_dead(kid)
    expected = ["start", "error EACCES", "done processed"] if not policy else ["done aborted"]
    told = [line.rstrip() for line in said(kid)]
    assert told[-len(expected) :] == expected
    assert ("delta" in told) <= bool(policy)
    wait_until(lambda: said(boss)[:1] == ["child agent:kid hello"] or policy, "it was told")
