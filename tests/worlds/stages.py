"""Parts of lives that have messages, tasks and waits in them, for a daemon that may die.

A stage appends to ``Scene.after`` what is to hold in the end, however far it got.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import socketserver
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    AGENT_UID,
    TIMEOUT,
    Daemon,
    alive,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.fates import PORT, SLEEP, Scene
from tests.worlds.histories import kept_histories
from tests.worlds.invariants import Crashed
from tests.worlds.leads import put
from tests.worlds.nodes import node, peer
from tests.worlds.scripted import ScriptedLead
from tests.worlds.viewers import Viewer

#: waits for the scene's gate to open
AT_GATE: Final = "until test -e /gate/open; do sleep 0.02; done"
_TURN: Final = (
    'read -r line; echo "got $line"; '
    f'case $line in hold*) {SLEEP};; gate*) {AT_GATE};; fail*) exit 3;; esac'
)
#: says what it is told, something that is no reply, and a reply in two parts
_RESIDENT: Final = (
    'while read -r line; do id=${line#*\\"id\\":\\"}; id=${id%%\\"*}; text=${line##*:\\"}; '
    'case $line in *\\"type\\":\\"cancel\\"*) test "$held" != "$id" || '
    'echo "{\\"type\\":\\"message\\",\\"id\\":\\"$id\\"}"; continue;; esac; '
    'echo "told $id"; echo "got ${text%%[\\"\\\\]*}"; '
    f'case $text in hold*) held=$id; continue;; deaf*) continue;; gate*) {AT_GATE};; '
    'exit*) last=1;; esac; '
    'echo "{\\"note\\":\\"$id\\"}"; '
    'echo "{\\"type\\":\\"delta\\",\\"id\\":\\"$id\\",\\"text\\":\\"re\\"}"; '
    'echo "{\\"type\\":\\"message\\",\\"id\\":\\"$id\\"}"; test -z "$last" || exit 4; done'
)
#: the same, and ends what it holds when it is told to
_HEEDFUL: Final = (
    'echo "{\\"type\\":\\"hello\\",\\"takes\\":[\\"cancel\\"]}"; echo hi; ' + _RESIDENT
)
PROGRAMS: Final = {
    "turn": f"sh -c {shlex.quote(_TURN)}",
    "resident": f"sh -c {shlex.quote(_RESIDENT)}",
    "once": "sh -c 'echo got $CTX_RUN; sleep 1000'",
}
#: what an agent is between messages
BETWEEN: Final = {"turn": "idle", "resident": "ready"}


def gate(scene: Scene) -> Path:
    """A directory that agents see as /gate."""
    path = scene.daemon.base / "gate"
    path.mkdir(exist_ok=True)
    return path


def agent(scene: Scene, name: str, mode: str, program: str = "", **files: str) -> Path:
    """A started agent of a mode."""
    mount = f"{gate(scene)} /gate ro"
    return scene.run(name, program or PROGRAMS[mode], mode=mode, mount=mount, **files)


def task(scene: Scene, name: str, title: str, command: str) -> Path:
    """A command of an agent's, started."""
    directory = scene.daemon.agent_dir(name) / "task" / title
    scene.do(directory.mkdir)
    scene.do(lambda: write(directory / "cmd", command))
    scene.do(lambda: write(directory / "ctl", "start"))
    return directory


def wait(scene: Scene, name: str, title: str, on: str, **files: str) -> Path:
    """Something that an agent waits for, armed."""
    directory = scene.daemon.agent_dir(name) / "waiting" / title
    scene.do(directory.mkdir)
    for file, text in {**files, "on": on}.items():
        scene.do(lambda f=file, t=text: write(directory / f, t))  # type: ignore[misc]
    return directory


# what was told


def history(scene: Scene, name: str, file: str = "events.jsonl") -> list[dict[str, Any]]:
    """Of all sessions of a name, as it is kept."""
    return [
        json.loads(line)
        for path, data in sorted(kept_histories(scene.daemon.state).items())
        if (path.parts[-3], path.name) == (name, file)
        for line in data.decode().splitlines()
    ]


def ends(scene: Scene, name: str) -> list[str]:
    """What became of the messages that have ended, in this order."""
    return [e["outcome"] for e in history(scene, name) if e["type"] == "message.end"]


def output(scene: Scene, name: str) -> list[str]:
    return read(scene.daemon.agent_dir(name), "out").splitlines()


def conversed(scene: Scene, name: str, mode: str) -> None:
    """Every message that was acknowledged is told and answered, once; no other more than that."""
    directory = scene.daemon.agent_dir(name)

    def done() -> bool:
        # in this order: what left the queue in between would show in the status
        queue, status = read(directory, "queue"), read(directory, "status").strip()
        return status == BETWEEN[mode] and not queue

    def told_of(kind: str) -> Counter[str]:
        return Counter(e["message"] for e in history(scene, name) if e["type"] == kind)

    # what it waited for may end, and be told it, after it was seen to have nothing to do
    wait_until(
        lambda: done() and told_of("message.queued") == told_of("message.end"),
        f"{name} has nothing to do, and all that was queued has ended",
    )
    ended = told_of("message.end")
    assert set(ended.values()) <= {1}
    contents = Counter(
        line["content"].strip()
        for line in history(scene, name, "messages.jsonl")
        if line["role"] == "user"
    )
    got = Counter(line.removeprefix("got ") for line in output(scene, name) if line[:3] == "got")
    for text, acknowledged in scene.operator.entries[name].said.items():
        assert contents[text] in ((1,) if acknowledged else (0, 1)), (text, contents)
        assert contents[text] <= got[text] <= 1, (text, got)
    assert set(contents.values()) <= {1}
    if mode == "resident":
        _check_told(scene, name)


def _check_told(scene: Scene, name: str) -> None:
    lines = Counter(output(scene, name))
    said = history(scene, name, "messages.jsonl")
    replies = [line["content"] for line in said if line["role"] == "assistant"]
    assert replies == ["re"] * ends(scene, name).count("processed"), "each reply is whole"
    for event in history(scene, name):
        if event["type"] == "message.end":
            message = event["message"]
            assert lines[f"told {message}"] == 1
            if event["outcome"] == "processed":
                # a daemon that dies while it keeps a block that is no reply repeats that
                assert lines[json.dumps({"note": message}, separators=(",", ":"))] >= 1


# the stages


def _talk(scene: Scene, mode: str, name: str) -> None:
    agent(scene, name, mode, **{"handoff.md": "the task"})
    scene.after.append(lambda: conversed(scene, name, mode))
    for number in range(4):
        scene.operator.say(name, f"word {number}")
    scene.wait_until(lambda: len(ends(scene, name)) == 5, "all is answered")


def talking(scene: Scene) -> None:
    """A run for each message."""
    _talk(scene, "turn", "talker")


def residing(scene: Scene) -> None:
    """One run for all messages."""
    _talk(scene, "resident", "resident")


def _abort(scene: Scene, mode: str) -> None:
    """Everything but the run goes on; then the agent does, too."""
    directory = agent(scene, "aborted", mode)
    scene.wait("aborted", BETWEEN.get(mode, "busy"))
    scene.new("beside", SLEEP, parent="agent:aborted")
    scene.operator.verb("beside", "start")
    scene.wait("beside", "busy")
    long = task(scene, "aborted", "long", SLEEP)
    scene.wait_until(lambda: read(long, "status") == "running\n", "the task runs")
    first = "r1"
    if mode != "once":
        scene.operator.say("aborted", "hold on")
        first = "hold on"
    scene.wait_until(lambda: f"got {first}" in output(scene, "aborted"), "its run is there")
    if mode != "once":
        scene.operator.say("aborted", "go on")
    pids = (read(daemon_dir(scene, "beside"), "pid"), read(long, "pid"))

    def goes_on() -> None:
        if "resume" not in said:
            wait_status(directory, "paused")
            wait_until(lambda: read(directory, "run") == "", "its run has ended")
            assert "go on" in read(directory, "queue") or mode == "once"
            scene.operator.verb("aborted", "resume")
        elif read(directory, "status") == "paused\n":
            scene.operator.verb("aborted", "resume")
        if mode == "once":
            wait_status(directory, "busy")
            wait_until(lambda: output(scene, "aborted") == ["got r1", "got r2"], "the next run")
        else:
            conversed(scene, "aborted", mode)
            assert Counter(ends(scene, "aborted")) == {"aborted": 1, "processed": 1}
        told = [e["reason"] for e in history(scene, "aborted") if e["type"] == "run.end"]
        assert told.count("operator_aborted") == 1
        assert (read(daemon_dir(scene, "beside"), "pid"), read(long, "pid")) == pids
        assert read(long, "status") == "running\n"
        assert all(alive(int(pid)) for pid in pids)

    said: list[str] = []
    scene.after.append(goes_on)
    scene.operator.verb("aborted", "abort")
    scene.wait_until(lambda: read(directory, "run") == "", "its run has ended")
    said.append("resume")
    scene.operator.verb("aborted", "resume")
    scene.wait("aborted", "busy")
    if mode != "once":
        scene.wait_until(lambda: len(ends(scene, "aborted")) == 2, "all is answered")


def heeded(scene: Scene) -> None:
    """A program that takes cancels ends one message when it is told to, and not another."""
    program = f"sh -c {shlex.quote(_HEEDFUL)}"
    # one that heeds it has all the time that a busy machine takes
    graces = {"hold on": "grace=1h", "deaf to it": "grace=300ms"}
    directory = agent(scene, "heedful", "resident", program)
    said: list[str] = []

    def goes_on() -> None:
        for text, grace in graces.items():
            if text not in said:
                scene.operator.write("heedful", "limits", grace)
                scene.operator.say("heedful", text)
                wait_until(lambda t=text: f"got {t}" in output(scene, "heedful"), "it is told")  # type: ignore[misc]
                scene.operator.verb("heedful", "abort")
                said.append(text)
            wait_until(lambda: len(ends(scene, "heedful")) >= len(said), "it is over")
            if read(directory, "status") == "paused\n":
                wait_until(lambda: _obeys(scene), "it goes on")
        conversed(scene, "heedful", "resident")
        assert ends(scene, "heedful") == ["aborted", "aborted"]
        ended = [e["reason"] for e in history(scene, "heedful") if e["type"] == "run.end"]
        assert ended == ["operator_aborted"], "the first was heeded, the second was not"

    scene.after.append(goes_on)
    scene.wait("heedful", "ready")
    # else the daemon may die of the greeting when the first message is in its queue
    scene.wait_until(lambda: "hi" in output(scene, "heedful"), "its greeting was heard")
    for text, grace in graces.items():
        scene.operator.write("heedful", "limits", grace)
        scene.operator.say("heedful", text)
        scene.wait_until(lambda t=text: f"got {t}" in output(scene, "heedful"), "it is told")  # type: ignore[misc]
        said.append(text)
        scene.operator.verb("heedful", "abort")
        scene.wait_until(lambda: len(ends(scene, "heedful")) == len(said), "it is over")
        scene.wait_until(lambda: _obeys(scene), "it goes on")


def _obeys(scene: Scene) -> bool:
    """Whether it was said to resume; not while its run is still ending."""
    try:
        scene.operator.verb("heedful", "resume")
    except OSError:
        return False
    return True


#: says again and again whether the network `api` answers
_CALLER: Final = f"""
import socket, time
while True:
    try:
        with socket.create_connection(("127.0.0.1", {PORT}), 5) as s:
            s.sendall(b"x")
            print("in" if s.recv(1) else "out", flush=True)
    except OSError:
        print("out", flush=True)
    time.sleep(0.02)
"""


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(data)


def wired(scene: Scene) -> None:
    """A network whose relay is killed, and that is taken away; then the agent ends."""
    path = str(scene.daemon.base / "api.sock")
    server = socketserver.ThreadingUnixStreamServer(path, _Echo)
    os.chmod(path, 0o666)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (gate(scene) / "caller.py").write_text(_CALLER)
    line, directory = "allow wired_t network:api connect", scene.daemon.agent_dir("wired")

    def settle(waiting: Callable[[Callable[[], object], str], None], wanted: str) -> None:
        """From now on, it is in or out."""
        said = len(output(scene, "wired"))
        waiting(
            lambda: output(scene, "wired")[said + 1 :][-2:] == [wanted, wanted], f"it is {wanted}"
        )

    def relays() -> list[int]:
        return Cgroup(Path(read(directory, "cgroup").strip(), "net")).processes()

    def goes_on() -> None:
        """Whatever has happened, what the policy says holds, by one relay."""
        try:
            if read(directory, "status") in ("new\n", "dead\n"):
                return
            settle(wait_until, "in" if read(directory, "policy").strip() else "out")
            scene.operator.write("wired", "policy", "")
            settle(wait_until, "out")
            assert len(relays()) == 1
            assert re.search("^net.api.connections=[1-9]", read(directory, "usage"), re.MULTILINE)
        finally:
            server.shutdown()
            server.server_close()

    scene.after.append(goes_on)
    agent(scene, "wired", "once", "python3 /gate/caller.py", policy=line)
    scene.do(lambda: settle(scene.wait_until, "in"))
    (relay,) = scene.do(relays)
    os.kill(relay, signal.SIGKILL)
    scene.wait_until(lambda: relays() not in ([], [relay]), "there is another relay")
    scene.do(lambda: settle(scene.wait_until, "in"))
    scene.operator.write("wired", "policy", "")
    scene.do(lambda: settle(scene.wait_until, "out"))
    scene.operator.verb("wired", "kill")
    scene.wait("wired", "dead")


#: says which of its reports were acknowledged
_REPORTER: Final = (
    "for n in 1 2 3 4 5; do /bin/echo report $n > $CTX_SELF/report && echo ack $n; done; "
    f"exec {SLEEP}"
)


def reporting(scene: Scene) -> None:
    """A child that reports; each report that was acknowledged is there, and none is twice."""
    agent(scene, "boss", "turn")
    scene.wait("boss", "idle")
    scene.new("reporter", f"sh -c {shlex.quote(_REPORTER)}", parent="agent:boss")

    def reported() -> None:
        directory = daemon_dir(scene, "reporter")
        wait_status(directory, "busy")
        conversed(scene, "boss", "turn")
        got = Counter(line for line in output(scene, "boss") if line.startswith("got report"))
        told = [e for e in history(scene, "reporter") if e["type"] == "agent.report"]
        assert Counter(f"got {e['text']}" for e in told) == got
        assert set(got.values()) <= {1}
        acknowledged = [line.partition(" ")[2] for line in output(scene, "reporter")]
        assert {f"got report {number}" for number in acknowledged} <= got.keys()
        queued = [e["message"] for e in history(scene, "boss") if e["type"] == "message.queued"]
        assert [e["message"] for e in told] == queued

    scene.operator.verb("reporter", "start")
    scene.after.append(reported)
    scene.wait_until(lambda: len(ends(scene, "boss")) == 5, "all reports are read")


def daemon_dir(scene: Scene, name: str) -> Path:
    return scene.daemon.agent_dir(name)


def aborted(scene: Scene) -> None:
    _abort(scene, "turn")


def resident_aborted(scene: Scene) -> None:
    _abort(scene, "resident")


def once_aborted(scene: Scene) -> None:
    _abort(scene, "once")


def paused_aborted(scene: Scene) -> None:
    """What is frozen ends, and its PID 1 has not heard yet that the cell stays.

    The program honours no SIGTERM: something is left to kill after the grace period.
    """
    deaf = """sh -c 'trap "" TERM; echo got $CTX_RUN; sleep 1000; sleep 1000'"""
    directory = agent(scene, "aborted", "once", deaf)
    scene.wait_until(lambda: "got r1" in output(scene, "aborted"), "its run is there")
    scene.wait("aborted", "busy")
    scene.operator.verb("aborted", "pause")
    scene.wait("aborted", "paused")

    def goes_on() -> None:
        wait_until(lambda: read(directory, "run") == "", "its run has ended")
        scene.operator.verb("aborted", "resume")
        wait_until(lambda: output(scene, "aborted") == ["got r1", "got r2"], "the next run")
        wait_status(directory, "busy")

    scene.after.append(goes_on)
    scene.operator.verb("aborted", "abort")
    scene.wait_until(lambda: read(directory, "run") == "", "its run has ended")


#: commands, what is then said to them, and how they end
_TASKS: Final = {
    "good": ("echo up", "", "completed", "exit:0"),
    "bad": ("echo up; exit 3", "", "failed", "exit:3"),
    "killed": ("echo up; kill -9 $$", "", "failed", "signal:9"),
    "stopped": (f"echo up; exec {SLEEP}", "stop", "cancelled", "signal:15"),
    "deaf": (f'trap "" TERM; echo up; {SLEEP}; {SLEEP}', "stop", "cancelled", "signal:9"),
    "long": (f"echo up; exec {SLEEP}", "", "running", ""),
}


def tasked(scene: Scene) -> None:
    """Commands that end in every way, beside one that goes on."""
    agent(scene, "tasker", "turn")
    scene.wait("tasker", "idle")
    # those whose start, and whose stop, was acknowledged
    started: dict[str, Path] = {}
    stopped: set[str] = set()

    def ended() -> None:
        for title, directory in started.items():
            _, verb, status, exit_text = _TASKS[title]
            if verb and title not in stopped:
                with contextlib.suppress(PermissionError, OSError):  # it may have been heard
                    write(directory / "ctl", verb)
            if status != "running":
                wait_dead(directory)
            else:
                wait_until(lambda d=directory: read(d, "status") == "running\n", "it runs")  # type: ignore[misc]
                assert alive(int(read(directory, "pid")))
            found = (read(directory, "status").strip(), read(directory, "exit").strip())
            assert found == (status, exit_text), (title, found)
            wait_until(lambda d=directory: read(d, "output") == "up\n", "its output is there")  # type: ignore[misc]
        conversed(scene, "tasker", "turn")
        told = [e["task"] for e in history(scene, "tasker") if e["type"] == "task.end"]
        results = [e["from"] for e in history(scene, "tasker") if e["type"] == "message.queued"]
        assert Counter(results) == Counter(f"task:{title}" for title in told)
        assert set(started) - {"long"} <= set(told)

    scene.after.append(ended)
    for title, (command, verb, _, _) in _TASKS.items():
        directory = task(scene, "tasker", title, command)
        started[title] = directory
        scene.wait_until(lambda d=directory: "up" in read(d, "output"), f"{title} has begun")  # type: ignore[misc]
        if verb:
            scene.do(lambda d=directory, v=verb: write(d / "ctl", v))  # type: ignore[misc]
            stopped.add(title)
    for title, directory in started.items():
        status = _TASKS[title][2]
        scene.wait_until(lambda d=directory, s=status: read(d, "status").strip() == s, title)  # type: ignore[misc]


#: asks whether it may go on, and says what it was answered
_ASKER: Final = (
    'q=$CTX_SELF/ask/q; mkdir $q && printf "yes\\nno\\n" > $q/options && echo ok > $q/question; '
    "cat $q/wait; until a=$(cat $q/answer); do sleep 0.05; done; echo answered $a; sleep 1000"
)


def _link(scene: Scene, lead: Daemon, host: Daemon, name: str) -> None:
    """Whichever dies meanwhile, they know each other afterwards, by one link."""

    def known() -> None:
        again = lead.ctx("nodes", "check", name)
        assert again.returncode == 0, again.stdout + again.stderr
        kept = json.loads((lead.state / "peers.json").read_text())
        there = json.loads((host.state / "peers.json").read_text())
        assert set(kept["hosts"].values()) <= set(there["leads"])
        engines = lead.cgroup.path.glob("link/*/cgroup.procs")
        assert len([pid for procs in engines for pid in procs.read_text().split()]) == 1

    scene.after.append(known)
    done = lead.ctx("nodes", "check", name)
    if done.returncode and scene.daemon.has_ended(TIMEOUT):
        raise Crashed
    assert done.returncode == 0, done.stdout + done.stderr


def linked(scene: Scene) -> None:
    """A link from the daemon to another one."""
    other = scene.beside.enter_context(daemon_of())
    (scene.daemon.base / "other").write_text(str(other.root))
    _link(scene, scene.daemon, other, "other")


def linked_to(scene: Scene) -> None:
    """A link from another daemon to this one."""
    nodes = {"here": node(peer(scene.daemon))}
    other = scene.beside.enter_context(daemon_of(config=f"nodes: {json.dumps(nodes)}\n"))
    _link(scene, other, scene.daemon, "here")


def placed_here(scene: Scene) -> None:
    """An agent of another machine: whatever dies, its lead is told once what becomes of it."""
    lead, agent = ScriptedLead(scene.daemon, lease=60.0), "a" * 16
    before = lead.lost
    scene.beside.callback(lead.close)

    def stop() -> None:
        said = {"by": "agent:boss", "reason": "enough", "outcome": "cancelled"}
        lead.until(lambda: "busy" in lead.statuses(agent), "it runs")
        lead.say("verb", agent, verb="stop", **said)

    def over() -> None:
        lead.lost = before
        if lead.stream.sent == 2:
            stop()
        ended = lead.ended(agent)
        assert (ended["outcome"], ended["reason"]) == ("cancelled", "enough")
        assert lead.statuses(agent) == ["busy"]
        assert lead.told("refused", agent) == []
        lead.say("forget", agent)
        # of a registration that was made and not heard of, a lead makes another one
        there = scene.daemon.agent_dir(f"x@{lead.hello['alias']}")
        lead.until(lambda: not there.exists(), "it is forgotten")

    def lost() -> None:
        if scene.daemon.has_ended(TIMEOUT):
            raise Crashed

    scene.after.append(over)
    lead.lost = lost
    lead.say("put", agent, **put(config={"exec": "sleep 1000"}))
    lead.say("start", agent)
    stop()
    lead.ended(agent)


def placed(scene: Scene) -> None:
    """Agents of the daemon, at another one: one that ends by itself, one that is stopped, and one
    that answers. Each ends once, as the lead says, each message is answered once, and nothing of
    them is left at the host."""
    lead, host = scene.daemon, scene.beside.enter_context(daemon_of())
    (lead.base / "other").write_text(str(host.root))
    far, halted = lead.agent_dir("far"), lead.agent_dir("halted")
    talker = lead.agent_dir("talker")

    def ended() -> None:
        with contextlib.suppress(OSError):  # it may have been heard
            write(halted / "ctl", "stop")
        if talker.exists() and read(talker, "status") != "new\n":
            wait_until(lambda: read(talker, "queue") == read(talker, "message") == "", "it is done")
            lines = read(talker, "session/messages.jsonl").splitlines()
            said = [json.loads(line)["content"].strip() for line in lines]
            assert said in ([], ["hello", "hello"]), said
            write(talker / "ctl", "kill")
            wait_dead(talker)
        for directory, outcome, reason in (
            (far, "error", "exit:3"), (halted, "cancelled", "operator_stop")
        ):  # fmt: skip
            if not directory.exists() or read(directory, "status") == "new\n":
                continue  # the daemon died before
            wait_dead(directory)
            assert read(directory, "outcome").strip() == outcome, read(directory, "reason")
            assert read(directory, "reason").strip() == reason
            told = [event["type"] for event in lead.events(directory.name[:-2])]
            assert told.count("run.end") <= 1
        wait_until(lambda: not [*(host.root / "agent").iterdir()], "no copy is left at the host")

    def is_so(directory: Path, status: str) -> None:
        scene.wait_until(lambda: read(directory, "status").strip() == status, f"it is {status}")

    def begin() -> None:
        for directory, command in ((far, "sh -c 'echo up; exit 3'"), (halted, SLEEP)):
            lead.make(directory.name[:-2], placement="node=other", exec=command)
            write(directory / "ctl", "start")

    def talk() -> None:
        lead.make("talker", placement="node=other", exec="cat", mode="turn")
        write(talker / "ctl", "start")
        write(talker / "inbox", "hello")

    scene.after.append(ended)
    scene.do(begin)
    is_so(halted, "busy")
    scene.do(talk)
    scene.wait_until(lambda: "assistant" in read(talker, "session/messages.jsonl"), "it answers")
    scene.do(lambda: write(halted / "ctl", "stop"))
    is_so(halted, "dead")
    is_so(far, "dead")


def asked(scene: Scene) -> None:
    """A question; whether or not its operator was told, it is answered once."""
    directory = agent(scene, "asker", "once", f"sh -c {shlex.quote(_ASKER)}")
    ask = directory / "ask" / "q"

    def over() -> None:
        wait_until(lambda: "answered yes" in output(scene, "asker"), "it has the answer")
        assert read(ask, "answer") == "yes\n"
        for text in ("yes", "no"):
            with pytest.raises(OSError) as refused:
                write(ask / "answer", text)
            assert refused.value.errno == errno.EBUSY
        told = Counter(e["type"] for e in history(scene, "asker") if e["type"].startswith("ask."))
        assert told == {"ask.open": 1, "ask.end": 1}
        assert not (scene.daemon.path("asks")).read_text()

    scene.after.append(over)
    scene.wait_until(
        lambda: (ask / "status").exists() and read(ask, "status") == "open\n", "it is asked"
    )
    scene.do(lambda: write(ask / "answer", "yes"))


def waited(scene: Scene) -> None:
    """Waits of every kind; one ends too late, one is given up."""
    directory = agent(scene, "waiter", "turn")
    scene.wait("waiter", "idle")
    armed: dict[str, Path] = {}

    def over() -> None:
        (gate(scene) / "open").touch()
        for title, path in armed.items():
            if title == "given-up":
                if path.exists():
                    path.rmdir()
                continue
            if title == "trigger" and read(path, "status") == "armed\n":
                write(scene.daemon.path("trigger", read(path, "token").strip()), "now")
            if title == "message" and read(path, "status") == "armed\n":
                scene.operator.say("waiter", "at last")
            wanted = "expired\n" if title == "late" else "fired\n"
            wait_until(lambda p=path, w=wanted: read(p, "status") == w, title)  # type: ignore[misc]
        conversed(scene, "waiter", "turn")
        events = history(scene, "waiter")
        left = Counter(e["wait"] for e in events if e["type"] in ("wait.fired", "wait.expired"))
        told = Counter(
            e["from"].removeprefix("wait:")
            for e in events
            if e["type"] == "message.queued" and e["provenance"] == "wait"
        )
        assert left == told
        assert set(left) >= set(armed) - {"given-up"}
        assert set(left.values()) <= {1}

    scene.after.append(over)
    # so that the daemon dies before or after it is said, and the program never
    for title in ("one", "two"):
        task(scene, "waiter", title, AT_GATE)
    scene.new("waited", f"sh -c '{AT_GATE}'", parent="agent:waiter")
    scene.operator.verb("waited", "start")
    scene.wait("waited", "busy")
    task_of_child = {"handoff.md": "gate"}
    scene.new("asked", PROGRAMS["turn"], parent="agent:waiter", mode="turn", **task_of_child)
    scene.operator.verb("asked", "start")
    scene.wait("asked", "busy")
    for title, on, files in (
        ("given-up", "trigger", {}),
        ("timer", "timer 200ms", {}),
        ("late", "trigger", {"deadline": "300ms"}),
        ("task", "task one", {}),
        ("child", "child waited", {}),
        ("reply", "reply asked", {}),
        ("trigger", "trigger", {}),
        ("message", "message", {}),
    ):
        armed[title] = wait(scene, "waiter", title, on, **files)
    scene.do(armed["given-up"].rmdir)
    token = scene.do(lambda: read(armed["trigger"], "token").strip())
    scene.do(lambda: write(scene.daemon.path("trigger", token), "now"))
    scene.operator.say("waiter", "hello")
    (gate(scene) / "open").touch()
    for title, path in armed.items():
        if title != "given-up":
            scene.wait_until(lambda p=path: read(p, "status") != "armed\n", title)  # type: ignore[misc]
    scene.wait_until(lambda: read(directory, "queue") == "", "all is told")


def switched(scene: Scene) -> None:
    """From one session to another, and back."""
    directory = agent(scene, "switcher", "turn")
    scene.wait("switcher", "idle")

    def back() -> None:
        conversed(scene, "switcher", "turn")
        if (directory / "session").readlink().name != "default":
            write(directory / "ctl", "session default")
        scene.operator.say("switcher", "at home")
        conversed(scene, "switcher", "turn")

    scene.after.append(back)
    for session in ("other", "default", "other", "default"):
        scene.do(lambda s=session: write(directory / "ctl", f"session {s}"))  # type: ignore[misc]
        number = len(ends(scene, "switcher"))
        scene.operator.say("switcher", f"in {session} after {number}")
        scene.wait_until(lambda n=number: len(ends(scene, "switcher")) > n, "it is answered")  # type: ignore[misc]
        scene.wait("switcher", "idle")


def stopped(scene: Scene) -> None:
    """Stopped with a run, a queue, tasks and waits."""
    directory = agent(scene, "ending", "turn")
    scene.wait("ending", "idle")
    for title in ("long", "deaf"):
        begun = task(scene, "ending", title, _TASKS[title][0])
        # the deaf one would hear the stop before it is deaf
        scene.wait_until(lambda d=begun: "up" in read(d, "output"), f"{title} has begun")  # type: ignore[misc]
    wait(scene, "ending", "for-ever", "timer 1h")
    scene.operator.say("ending", "hold on")
    scene.wait_until(lambda: "got hold on" in output(scene, "ending"), "its run is there")
    scene.operator.say("ending", "too late")

    def over() -> None:
        wait_dead(directory)
        assert Counter(ends(scene, "ending")) == {"dropped": 1, "aborted": 1}
        for title in ("long", "deaf"):
            assert read(directory / "task" / title, "status") == "cancelled\n"
        assert read(directory / "waiting" / "for-ever", "status") == "cancelled\n"

    scene.after.append(over)
    scene.operator.verb("ending", "stop")
    scene.promise("ending", "cancelled", "operator_stop")
    scene.wait("ending", "dead")


# worktrees


def worktree(scene: Scene) -> None:
    """A child has a worktree, made at its start, which goes with its parent's handle of it."""
    repository = scene.daemon.base / "repository"
    _make_repository(repository)
    boss, kid = scene.daemon.agent_dir("boss"), scene.daemon.agent_dir("kid")
    handle = boss / "task" / "kid"

    def settle() -> None:
        """Whatever was interrupted can be done again, and nothing is left in the end."""
        if not kid.exists():
            return
        if read(kid, "status") == "new\n":
            if read(kid, "workspace") != "worktree\n":
                return
            write(kid / "ctl", "start")
        wait_dead(kid)
        assert (read(kid, "outcome"), read(kid, "out")) == ("done\n", "/workspace\n")
        if handle.exists():
            handle.rmdir()
        # beside the removal
        wait_until(lambda: not _git(repository, "branch", "--list", "ctx/*"), "no branch is left")
        assert not (repository / ".git/ctx/kid").exists()

    scene.run("boss", SLEEP, workspace=f"explicit_root:{repository}")
    scene.wait("boss", "busy")
    scene.after.append(settle)
    files = {"parent": "agent:boss", "workspace": "worktree"}
    scene.run("kid", "sh -c 'test -e file && pwd'", **files)
    scene.wait("kid", "dead")
    scene.do(handle.rmdir)


def worktree_at(scene: Scene) -> None:
    """A child of the daemon's, at another one, whose commits come back once."""
    lead, host = scene.daemon, scene.beside.enter_context(daemon_of())
    (lead.base / "other").write_text(str(host.root))
    _commit_there(scene, lead, host, "other")


def worktree_for(scene: Scene) -> None:
    """The same of an agent that another daemon has placed at this one."""
    nodes = {"here": node(peer(scene.daemon))}
    lead = scene.beside.enter_context(daemon_of(config=f"nodes: {json.dumps(nodes)}\n"))
    _commit_there(scene, lead, scene.daemon, "here")


def _commit_there(scene: Scene, lead: Daemon, host: Daemon, where: str) -> None:
    repository, kid = lead.base / "repository", lead.agent_dir("kid")
    _make_repository(repository)
    files = {"parent": "agent:boss", "placement": f"node={where}", "workspace": "worktree"}
    program = "sh -c 'git log --format=%s; echo two > file; git commit -qam Two'"

    def over() -> None:
        if not kid.exists() or read(kid, "status") == "new\n":
            return  # the lead died before
        wait_dead(kid)
        assert (read(kid, "outcome"), read(kid, "out")) == ("done\n", "One\n"), read(kid, "reason")
        handle = lead.agent_dir("boss") / "task" / "kid"
        assert read(handle, "worktree").startswith("state=fetched\n"), read(handle, "worktree")
        assert _git(repository, "log", "--format=%s", "ctx/kid").split() == ["Two", "One"]
        wait_until(lambda: not [*(host.root / "agent").iterdir()], "no copy is left at the host")

    lead.run("boss", SLEEP, workspace=f"explicit_root:{repository}")
    wait_status(lead.agent_dir("boss"), "busy")
    scene.after.append(over)
    scene.do(lambda: lead.run("kid", program, **files))
    scene.wait_until(lambda: read(kid, "status") == "dead\n", "it is dead")


def _make_repository(path: Path) -> None:
    path.mkdir()
    _git(path, "init", "--quiet", "--initial-branch=main")
    (path / "file").write_text("content\n")
    _git(path, "add", "file")
    identity = ("-c", "user.name=you", "-c", "user.email=you@localhost")
    _git(path, *identity, "commit", "--quiet", "--message", "One")
    for each in (path, *path.rglob("*")):
        os.chown(each, AGENT_UID, AGENT_UID)


def _git(path: Path, *words: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(path), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# terminals


def visited(scene: Scene) -> None:
    """Somebody looks at a terminal, and is gone."""
    scene.run("shell", "sh", tty="80x24")
    scene.wait("shell", "busy")
    scene.promise("shell", "cancelled", "hangup")

    def told() -> None:
        wait_dead(scene.daemon.agent_dir("shell"))
        kinds = Counter(event["type"] for event in history(scene, "shell"))
        assert kinds["terminal.attach"] == kinds["terminal.leave"] <= 1

    scene.after.append(told)
    with scene.do(lambda: Viewer(scene.daemon, "shell", hangup=True)):
        """It closes without a word."""
    scene.wait("shell", "dead")


def _is_heard(scene: Scene, viewer: Viewer) -> None:
    try:
        viewer.enter("echo $((6*7))\n")
        viewer.wait_for("42")
    except (AssertionError, OSError):
        if scene.daemon.has_ended(TIMEOUT):  # before there was a terminal
            raise Crashed from None
        raise


def tied(scene: Scene) -> None:
    """A program begins with who looks at its terminal, and goes with them."""
    directory = scene.daemon.agent_dir("tied")

    scene.after.append(lambda: wait_until(lambda: not directory.exists(), "it is removed"))
    scene.do(lambda: scene.daemon.make("tied", "sh", tty="80x24"))
    wanted = {"start": True, "hangup": True, "remove": True}
    with scene.do(lambda: Viewer(scene.daemon, "tied", **wanted)) as viewer:
        _is_heard(scene, viewer)
    scene.wait_until(lambda: not directory.exists(), "it is removed")


def entered(scene: Scene) -> None:
    """So does one in an agent that goes on."""
    host = agent(scene, "host", "turn")
    scene.wait("host", "idle")
    directory = host / "task" / "enter-1"

    def gone() -> None:
        wait_status(host, "idle")
        wait_until(lambda: not directory.exists(), "it is removed")
        assert not ends(scene, "host"), "no message tells of it"

    scene.after.append(gone)
    scene.do(directory.mkdir)
    for file, text in {"cmd": "sh", "tty": "80x24"}.items():
        scene.do(lambda f=file, t=text: write(directory / f, t))  # type: ignore[misc]
    wanted = {"start": True, "hangup": True, "remove": True}
    with scene.do(lambda: Viewer(scene.daemon, "host", task="enter-1", **wanted)) as viewer:
        _is_heard(scene, viewer)
    scene.wait_until(lambda: not directory.exists(), "it is removed")
