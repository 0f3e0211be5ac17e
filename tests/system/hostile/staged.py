"""Attempts that take more than one hand: somebody ends, is stopped, or looks away."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import Cgroup
from tests.system.hostile.attempts import frame
from tests.system.hostile.stage import SECRETS, Stage, heard
from tests.worlds.daemon import (
    Daemon,
    alive,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.whose import AGENT_UID

#: every library and helper of a view ran as the agent, with nothing to gain
RIGHTS: Final = (
    f"euid:{AGENT_UID} Uid:{AGENT_UID} Gid:{AGENT_UID} "
    "CapPrm:0000000000000000 CapEff:0000000000000000 NoNewPrivs:1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """``play`` stages it, asserts what must still be true, and returns what was told."""

    name: str
    covers: tuple[str, ...]
    expect: str
    play: Callable[[Stage], str]
    needs_root: str = ""


STAGED: Final[list[Staged]] = []


def staged(
    covers: str, expect: str, needs_root: str = ""
) -> Callable[[Callable[[Stage], str]], Callable[[Stage], str]]:
    def note(play: Callable[[Stage], str]) -> Callable[[Stage], str]:
        name = play.__name__.replace("_", " ")
        STAGED.append(Staged(name=name, covers=tuple(covers.split()), expect=expect, play=play,
                             needs_root=needs_root))
        return play

    return note


def tries(stage: Stage, name: str, program: str) -> str:
    """The command of one attempt."""
    words = [stage.expand(word) for word in shlex.split(program)]
    return f"/hostile/hostile {shlex.quote(name)} {shlex.join(words)}"


def told(stage: Stage, agent: str, name: str) -> str:
    """What came of an attempt; it must have been made."""
    found = heard(read(stage.daemon.agent_dir(agent), "out"))
    assert name in found, f"{agent} never tried: {name}"
    said = found[name]
    assert said is not None, f"{agent} was not answered: {name}"
    return said


def has_told(stage: Stage, agent: str, name: str) -> None:
    directory = stage.daemon.agent_dir(agent)
    wait_until(lambda: heard(read(directory, "out")).get(name), f"{agent} is answered: {name}")


def lone(stage: Stage, agent: str, program: str, **files: str) -> str:
    """A root agent whose program is one attempt, to its end."""
    files.setdefault("mount", stage.mounts)
    stage.daemon.finish(agent, tries(stage, agent, program), **files)
    return told(stage, agent, agent)


def node(agent: Path) -> Cgroup:
    return Cgroup(Path(read(agent, "cgroup").strip()))


def processes_named(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text() == f"{name}\n":
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if alive(pid)]


# privileges

#: what made cells at some time, or does
HELPERS = ("bwrap", "setpriv", "test", "enter", "view", "keeper")


def _noted(path: Path) -> list[tuple[str, str]]:
    """(who, with what rights) of everything that noted itself."""
    found = []
    for line in path.read_text().splitlines():
        name, _, rights = line.partition(" ")
        found.append((name, rights))
    return found


@staged("1.loader 1.path", "Uid:@agent.uid,CapPrm:0000000000000000,CapEff:0000000000000000,"
        "CapAmb:0000000000000000,NoNewPrivs:1,")
def what_an_environment_names_runs_as_the_agent(stage: Stage) -> str:
    ran = stage.work / "ran"
    ran.touch()
    ran.chmod(0o666)
    for name in HELPERS:
        shutil.copy(stage.daemon.base / "hostile" / "hostile", stage.work / name)
    environment = (
        "PATH=/desk:/usr/bin:/bin\nLD_PRELOAD=/hostile/preload.so\nLD_AUDIT=/hostile/preload.so\n"
        "LD_LIBRARY_PATH=/desk\nENV=/desk/ran\nBASH_ENV=/desk/ran\nGCONV_PATH=/desk"
    )
    lines = (
        "cd $CTX_ROOT/agent; mkdir envied.d\n"
        f"printf '%s\\n' {shlex.quote(environment)} > envied.d/env\n"
        f"""echo "sh -c 'true; true'" > envied.d/exec; echo start > envied.d/ctl\n"""
        "cat envied.d/wait\n" + tries(stage, "envious", "ids")
    )
    agent = stage.daemon.finish("envious", stage.script("envious", lines), mount=stage.mounts,
                                env=environment)
    assert read(stage.daemon.agent_dir("envied"), "reason") == "exit:0\n"
    noted = _noted(ran)
    assert {"sh", "cat"} <= {name for name, _ in noted}, "the library was taken at all"
    assert {rights for _, rights in noted} == {RIGHTS}
    assert not set(HELPERS) & {name for name, _ in noted}
    assert read(agent, "reason") == "exit:0\n"
    return told(stage, "envious", "envious")


def hostile_root(stage: Stage, name: str) -> Path:
    """A directory for ``root`` with helpers and loader settings of its agent's own; the
    host's programs are at /host."""
    root = stage.daemon.base / name
    programs = root / "usr" / "bin"
    for directory in ("usr/bin", "etc", "log", "host", "hostile", "work", "proc", "dev", "tmp",
                      "home"):
        (root / directory).mkdir(parents=True)
    hostile = stage.daemon.base / "hostile"
    for helper in HELPERS:
        shutil.copy(hostile / "hostile", programs / helper)
    for program in ("sh", "grep", "true"):
        (programs / program).symlink_to(f"/host/bin/{program}")
    for link, target in (("bin", "usr/bin"), ("usr/lib", "/host/lib"), ("lib", "usr/lib"),
                         ("lib64", "/host/lib64")):
        (root / link).symlink_to(target)
    shutil.copy(hostile / "preload.so", root / "evil.so")
    (root / "etc" / "ld.so.preload").write_text("/evil.so\n")
    (root / "log" / "ran").touch()
    for path in (root, *root.rglob("*")):
        os.chown(path, AGENT_UID, AGENT_UID, follow_symlinks=False)
    return root


@staged("1.programs 1.loader", "exit:0 2")
def helpers_of_a_root_are_never_run(stage: Stage) -> str:
    """A child's cell is made in its parent's view, by nothing that is found there."""
    root = hostile_root(stage, "rootfs")
    command = f"exec=sh -c \"grep -c {AGENT_UID} /proc/self/status\""
    lines = tries(stage, "rooted", f"child rootkid '{command}' 'mount=- /log/ran hide'")
    agent = stage.daemon.finish("rooted", stage.script("rooted", lines), root=str(root),
                                mount=f"{stage.mounts}/usr /host ro")
    assert read(agent, "reason") == "exit:0\n"
    noted = _noted(root / "log" / "ran")
    assert {rights for _, rights in noted} == {RIGHTS}
    assert not set(HELPERS) & {name for name, _ in noted}
    return told(stage, "rooted", "rooted")


@staged("2.asked", "refused")
def root_itself_gives_no_uid_0_by_default(stage: Stage) -> str:
    directory = stage.daemon.make("askers")
    said = {refusal(directory / name, "0") for name in ("uid", "gid", "groups")}
    directory.rmdir()
    assert said <= {"EACCES", "EPERM"}
    return "refused"


# paths


@staged("3.rights", "refused exit:1", "it takes two users")
def a_users_mount_is_reached_with_the_users_rights(stage: Stage) -> str:
    """What is open lies in a directory that is root's alone."""
    private = stage.daemon.base / "private"
    (private / "open").mkdir(parents=True)
    (private / "open" / "file").write_text(f"{SECRETS[2]}\n")
    private.chmod(0o700)
    agents = stage.daemon.root / "agent"
    stage.as_user("mkdir", f"{agents}/prying.d")
    stage.as_user("sh", "-c", f"cd {agents}/prying.d; "
                              f"echo '{private}/open /x ro' > mount || echo refused > handoff.md; "
                              "echo cat - /x/file > exec; echo start > ctl")
    wait_dead(agents / "prying.d")
    reason = read(agents / "prying.d", "reason").strip()
    return f"{read(agents / 'prying.d', 'out').strip()} {reason}"


@staged("3.swap 3.view", "ended=8 found=0 ended=8 found=0")
def a_source_changes_between_check_and_use(stage: Stage) -> str:
    """A directory and a link to what the view hides change places all the time."""
    for name in ("swap", "swap-file"):
        (stage.work / name).mkdir()
        (stage.work / name / "secret").write_text("nothing\n")
    (stage.work / "swap-link").symlink_to("hidden")
    os.chown(stage.work, AGENT_UID, AGENT_UID)
    children = f"children 8 {shlex.quote(SECRETS[1])} %s 'mount=/desk/swap /x ro' " \
               "'exec=cat /x/secret'"
    lines = "\n".join((
        tries(stage, "swap", "swap /desk/swap /desk/swap-link"),
        tries(stage, "nested", children % "swapped"),
        tries(stage, "beside", (children % "parted") + " life=detached"),
    ))
    may = "allow swapper_t agent:* create,detach"
    agent = stage.daemon.run("swapper", stage.script("swapper", lines), policy=may,
                             mount=stage.mounts)
    wait_dead(agent)
    assert told(stage, "swapper", "swap") == "ok"
    return f"{told(stage, 'swapper', 'nested')} {told(stage, 'swapper', 'beside')}"


def helpers(daemon: Daemon) -> list[int]:
    """Those who look at operators' paths, where nothing else is."""
    return daemon.cgroup.child("helper").processes()


def _refused(said: list[str], path: Path, text: str) -> None:
    said.append(refusal(path, text))


@staged("4.hangs", "EAGAIN EAGAIN EAGAIN", "it mounts")
def a_source_that_never_answers_holds_up_its_own_line_only(stage: Stage) -> str:
    daemon = stage.daemon
    silent = daemon.base / "silent"
    silent.mkdir()
    host = subprocess.Popen([str(daemon.base / "host"), "silent", str(silent)],
                            stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        assert host.stdout.readline() == "mounted\n"
        stuck = daemon.make("stuck")
        said: list[str] = []
        lines = (("mount", f"{silent}/below /x ro"), ("root", f"{silent}/below"),
                 ("workspace", f"explicit_root:{silent}/below"))
        waiters = [threading.Thread(target=_refused, args=(said, stuck / file, text))
                   for file, text in lines]
        begun = time.monotonic()
        for waiter in waiters:
            waiter.start()
        wait_until(lambda: helpers(daemon), "somebody looks")
        for pid in helpers(daemon):
            with contextlib.suppress(FileNotFoundError):  # one that has looked meanwhile
                assert (Path("/proc") / str(pid) / "environ").read_bytes() == b""
        assert read(daemon.finish("free", "echo free", mount=stage.mounts), "out") == "free\n"
        assert time.monotonic() - begun < 5
        for waiter in waiters:
            waiter.join()
        assert time.monotonic() - begun < 8
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
        subprocess.run(["umount", "-l", str(silent)], check=True)
    wait_until(lambda: refusal(stuck / "mount", f"{silent} /x ro") == "accepted",
               "those who were stuck there are gone")
    return " ".join(said)


@staged("4.hangs", "mount=EACCES")
def a_source_on_the_mount_itself_is_no_trap(stage: Stage) -> str:
    program = "child looped 'mount=@ctx/agent/looper.d/artifact /x rw' 'exec=true'"
    return lone(stage, "looper", program)


# identity


@staged("8.reuse socket.claims", "killed=ok answer=EACCES", "only root chooses a pid")
def the_pid_of_a_gone_peer_is_given_to_another_agent(stage: Stage) -> str:
    """By the time the daemon looks, the number is of a process of the agent it talks to."""
    daemon = stage.daemon
    boss = node(daemon.agent_dir("boss")).child("run")
    program = tries(stage, "orphan", "orphan @agent/boss.sock /desk/orphan.go /desk/orphan.ready "
                                     f"{frame(op='resume')}")
    agent = daemon.run("orphan", program, mount=stage.mounts)
    ready = stage.work / "orphan.ready"
    wait_until(ready.exists, "it waits to connect")
    leaf = node(agent).child("run")
    (pid,) = (p for p in leaf.processes() if p in processes_named("gone-peer"))
    with stage.guard.excused():
        os.kill(daemon.pid, signal.SIGSTOP)
        host = None
        try:
            (stage.work / "orphan.go").touch()
            wait_until(lambda: ready.read_text() == "connected\n", "it has connected")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the maker is gone")
            host = subprocess.Popen([str(daemon.base / "host"), "reuse", str(pid), str(boss.path)],
                                    stdout=subprocess.PIPE, text=True)
            assert host.stdout is not None
            assert host.stdout.readline() == "reused\n"
            assert pid in boss.processes()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    wait_dead(agent)
    os.kill(pid, signal.SIGKILL)
    host.wait()
    host.stdout.close()
    return told(stage, "orphan", "orphan")


def _hand_over(stage: Stage, name: str, give: str, take: str) -> str:
    """A descriptor of one agent, used by another while its opener lives and, after the
    opener was made anew under the same name, again."""
    daemon = stage.daemon
    giver = f"{name}-giver"
    lines = tries(stage, giver, f"give /desk/{name} {give}") + "\nsleep 1000"
    taker = daemon.run(f"{name}-taker",
                       tries(stage, f"{name}-taker", f"take /desk/{name} /desk/{name}.go {take}"),
                       mount=stage.mounts)
    agent = daemon.run(giver, stage.script(giver, lines), mount=stage.mounts)
    wait_until((stage.work / f"{name}.go.used").exists, "it is used")
    # its monitor may be a moment behind
    wait_until(lambda: heard(read(agent, "out")).get(giver), "what was handed over is told")
    assert told(stage, giver, giver).endswith("give=ok")
    write(agent / "ctl", "kill")
    wait_dead(agent)
    write(agent / "ctl", "reset")
    write(agent / "exec", "sleep 1000")
    write(agent / "ctl", "start")
    wait_status(agent, "busy")
    (stage.work / f"{name}.go").touch()
    wait_dead(taker)
    assert read(agent, "result.md") == ""
    write(agent / "ctl", "kill")
    wait_dead(agent)
    return told(stage, f"{name}-taker", f"{name}-taker")


@staged("9.files 10.names result.foreign", "take=ok living=ok dead=EACCES")
def a_file_open_for_writing_dies_with_its_opener(stage: Stage) -> str:
    said = _hand_over(stage, "pen", "write @agent/pen-giver.d/result.md", "write forged")
    old = Path(stage.path("home")) / "agent/pen-giver/session/default/result.md"
    assert old.read_text() == "forged\n", "what its opener's life allowed, once"
    return said


@staged("9.files 10.names", "take=ok living=ok dead=EACCES")
def a_file_open_for_reading_dies_with_its_opener(stage: Stage) -> str:
    return _hand_over(stage, "lens", "read @agent/lens-giver.d/session/messages.jsonl", "read x")


@staged("9.files 10.names policy.wider", "take=ok living=EINVAL dead=EACCES")
def control_of_oneself_dies_with_its_opener(stage: Stage) -> str:
    return _hand_over(stage, "rein", "write @agent/rein-giver.d/ctl", "write fly")


@staged("9.connections 10.names", "take=ok living=pong dead=EACCES")
def a_connection_dies_with_its_maker(stage: Stage) -> str:
    ping = frame(op="ping")
    return _hand_over(stage, "line", "connect @agent/boss.sock", f"ask {ping}")


@staged("9.inherited", "0,1,2,")
def a_program_finds_three_descriptors(stage: Stage) -> str:
    return lone(stage, "finder", "descriptors")


@staged("10.nested", "ok:agent/nested.d ENOENT")
def below_its_own_cgroup_an_agent_is_itself(stage: Stage) -> str:
    """As if it could make one: root does, and moves it there."""
    lines = "\n".join((
        "while ! test -e /desk/nested.go; do sleep 0.02; done",
        tries(stage, "self", "readlink @ctx/self"), tries(stage, "other", "stat @sib"),
    ))
    agent = stage.daemon.run("nested", stage.script("nested", lines), mount=stage.mounts,
                             policy="")
    wait_status(agent, "busy")
    whole = node(agent)
    below = whole.child("run").child("deeper").child("agent-sib")
    below.path.mkdir(parents=True)
    for pid in whole.child("run").processes():
        with contextlib.suppress(ProcessLookupError):  # a sleep of its loop
            below.write("cgroup.procs", str(pid))
    (stage.work / "nested.go").touch()
    wait_dead(agent)
    wait_until(lambda: not whole.exists(), "what is empty is removed")
    return f"{told(stage, 'nested', 'self')} {told(stage, 'nested', 'other')}"


# ends


@staged("20.survivors", "ok")
def a_daemon_of_an_agents_own_does_not_outlive_it(stage: Stage) -> str:
    said = lone(stage, "leaver", "daemonized survivor", limits="grace=200ms")
    assert processes_named("survivor") == []
    assert read(stage.daemon.agent_dir("leaver"), "reason") == "exit:0\n"
    return said


@staged("21.stopped 20.survivors", "ok")
def who_stopped_itself_is_ended(stage: Stage) -> str:
    lines = tries(stage, "frozen", "stopped") + "\ntrap '' TERM; kill -STOP $$; sleep 1000"
    agent = stage.daemon.run("frozen", stage.script("frozen", lines), mount=stage.mounts,
                             limits="grace=200ms")
    has_told(stage, "frozen", "frozen")
    pids = node(agent).child("run").processes()
    begun = time.monotonic()
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert time.monotonic() - begun < 3
    assert not any(alive(pid) for pid in pids)
    return told(stage, "frozen", "frozen")


@staged("20.monitor 20.survivors", "kill=ok")
def a_killed_helper_is_no_end(stage: Stage) -> str:
    """A parent kills what waits for its child's PID 1: the child goes on, or it is all gone."""
    lines = "\n".join((
        "cd $CTX_ROOT/agent; mkdir wrapped.d; echo sleep 1000 > wrapped.d/exec",
        "echo start > wrapped.d/ctl",
        "while [ $(cat wrapped.d/status) != busy ]; do sleep 0.02; done",
        tries(stage, "unwrapper", "kill-all view 9"), "sleep 1000",
    ))
    agent = stage.daemon.run("unwrapper", stage.script("unwrapper", lines), mount=stage.mounts)
    has_told(stage, "unwrapper", "unwrapper")
    child = stage.daemon.agent_dir("wrapped")
    pid = int(read(child, "pid") or 0)
    wait_until(lambda: (read(child, "status") == "busy\n") == alive(pid), "it is told as it is")
    write(agent / "ctl", "kill")
    for directory in (agent, child):
        wait_dead(directory)
    assert not alive(pid)
    return told(stage, "unwrapper", "unwrapper")


@staged("20.claims 20.survivors", "exit:0 ")
def an_end_is_claimed_by_no_helper_of_a_parents(stage: Stage) -> str:
    """What is called as a helper of its child's start is would tell of an end, with a
    line of its own making in it."""
    root = hostile_root(stage, "forgefs")
    (root / "log" / "forge").write_text("claims\n")
    agent = stage.daemon.finish(
        "forger", tries(stage, "forger", "child claimed exec=true limits=grace=200ms"),
        root=str(root), mount=f"{stage.mounts}/usr /host ro",
    )
    assert processes_named("claimed-dead") == []
    assert not set(HELPERS) & {name for name, _ in _noted(root / "log" / "ran")}
    events = [event["type"] for event in stage.daemon.events("claimed")]
    assert events.count("run.end") == events.count("agent.stop") == 1
    assert read(agent, "reason") == "exit:0\n"
    return told(stage, "forger", "forger")


def spoken_to(stage: Stage, name: str, lines: str) -> Path:
    """A turn agent that was sent one message, at the end of that."""
    agent = stage.daemon.run(name, stage.script(name, lines), mount=stage.mounts, mode="turn",
                             limits="grace=200ms")
    write(agent / "inbox", "go")
    wait_until(lambda: "message.end" in {event["type"] for event in stage.daemon.events(name)},
               f"{name} has answered")
    return agent


@staged("20.survivors", "ok")
def a_daemon_of_a_run_does_not_outlive_the_run(stage: Stage) -> str:
    """Its cell goes on: nothing but the leaf tells what was the run's."""
    agent = spoken_to(stage, "strayer", tries(stage, "strayer", "daemonized strayed"))
    assert processes_named("strayed") == []
    assert read(agent, "status") == "idle\n"
    write(agent / "ctl", "stop")
    wait_dead(agent)
    return told(stage, "strayer", "strayer")


@staged("20.survivors", "ok")
def a_daemon_of_a_task_does_not_outlive_the_task(stage: Stage) -> str:
    agent = stage.daemon.run("errands", "sleep 1000", mount=stage.mounts, limits="grace=200ms")
    task = agent / "task" / "t"
    task.mkdir()
    write(task / "cmd", tries(stage, "errand", "daemonized errant"))
    write(task / "ctl", "start")
    wait_dead(task)
    assert processes_named("errant") == []
    assert read(task, "status") == "completed\n"
    said = heard(read(task, "output"))["errand"]
    write(agent / "ctl", "kill")
    wait_dead(agent)
    return said or ""


@staged("15.processes 20.claims", "attach=EPERM seize=EPERM read=EPERM write=EPERM pidfd=ok "
        "getfd=EPERM")
def who_waits_for_a_run_is_not_to_be_traced(stage: Stage) -> str:
    spoken_to(stage, "tracer", "/hostile/hostile trace ptrace $PPID\n"
              "/hostile/hostile memory memory $PPID\n")
    return f"{told(stage, 'tracer', 'trace')} {told(stage, 'tracer', 'memory')}"


@staged("20.claims 20.survivors", "kill=ok")
def a_killed_waiter_is_the_end_of_its_run_only(stage: Stage) -> str:
    left = "/hostile/hostile on daemonized orphan"
    lines = "\n".join((left, tries(stage, "orphaned", "kill-all keeper 9"), "sleep 1000"))
    agent = spoken_to(stage, "orphaned", lines)
    wait_status(agent, "idle")
    assert processes_named("orphan") == []
    ends = [event for event in stage.daemon.events("orphaned") if event["type"] == "run.end"]
    assert [event["outcome"] for event in ends] == ["error"]
    write(agent / "inbox", "again")
    wait_until(lambda: len([event for event in stage.daemon.events("orphaned")
                            if event["type"] == "message.end"]) == 2, "its cell goes on")
    # who did it may meet the end of the run, which it was, before it says so
    return _first_told(agent, "orphaned").replace("killed:TERM", "kill=ok")


def _first_told(agent: Path, name: str) -> str:
    """Of a program that ran, and tried it, more than once."""
    lines = [line.split("\t") for line in read(agent, "out").split("\n")]
    return next(words[2] for words in lines if words[:2] == ["=", name])


@staged("trigger.guessed", "ENOENT ok ENOENT")
def a_token_is_good_once(stage: Stage) -> str:
    agent = stage.daemon.run("belled", "sleep 1000")
    wait = agent / "waiting" / "bell"
    wait.mkdir()
    write(wait / "on", "trigger")
    token = read(wait, "token").strip()
    other = token[:-1] + ("0" if token[-1] != "0" else "1")
    lines = "\n".join(tries(stage, name, f"write @ctx/trigger/{tried} rung") for name, tried in
                      (("guess", other), ("once", token), ("twice", token)))
    stage.daemon.finish("ringer", stage.script("ringer", lines), mount=stage.mounts, policy="")
    assert read(wait, "payload").strip() == "rung"
    assert token not in stage.daemon.log.read_text()
    write(agent / "ctl", "kill")
    wait_dead(agent)
    return " ".join(told(stage, "ringer", name) for name in ("guess", "once", "twice"))


@staged("18.escapes", "failed")
def a_directory_that_is_not_there_is_told_without_control_characters(stage: Stage) -> str:
    agent = stage.daemon.run("lost", "sleep 1000")
    task = agent / "task" / "t"
    task.mkdir()
    write(task / "cmd", "true")
    write(task / "cwd", "/\u009b2J\u202e")
    write(task / "ctl", "start")
    wait_dead(task)
    assert _is_plain(read(task, "output"))
    assert "\\x9b2J\\u202e" in read(task, "output")
    write(agent / "ctl", "kill")
    wait_dead(agent)
    return read(task, "status").strip()


@staged("21.below", "mkdir=EBUSY start=EBUSY")
def nothing_is_made_below_what_is_ending(stage: Stage) -> str:
    lines = "\n".join((
        "trap : TERM; cd $CTX_ROOT/agent; mkdir early.d; echo true > early.d/exec",
        tries(stage, "mkdir", "dying /desk/one.ready mkdir @agent/late.d") + " &",
        tries(stage, "start", "dying /desk/two.ready write @agent/early.d/ctl start") + " &",
        "wait; wait",
    ))
    # who is told to end has the time for both on a busy machine, too
    agent = stage.daemon.run("dying", stage.script("dying", lines), mount=stage.mounts,
                             limits="grace=20s")
    for name in ("one", "two"):
        wait_until((stage.work / f"{name}.ready").exists, "it waits for its end")
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert not stage.daemon.agent_dir("late").exists()
    assert read(stage.daemon.agent_dir("early"), "reason") == "parent_dead\n"
    return f"mkdir={told(stage, 'dying', 'mkdir')} start={told(stage, 'dying', 'start')}"


@staged("22.init", "ok")
def pid_1_does_not_listen_to_its_agent(stage: Stage) -> str:
    lines = "trap '' TERM\n" + tries(stage, "mutineer", "kill 1 15") + "\nsleep 0.5; echo up"
    agent = stage.daemon.finish("mutineer", stage.script("mutineer", lines), mount=stage.mounts,
                                limits="grace=100ms")
    said = told(stage, "mutineer", "mutineer")
    assert read(agent, "out").endswith("up\n"), "it goes on as if nothing had been said"
    return said


@staged("15.processes 22.init", "ok")
def a_signal_for_everybody_is_heard_in_the_cell_only(stage: Stage) -> str:
    lines = "trap '' TERM\n" + tries(stage, "everyone", "kill -1 15")
    stage.daemon.finish("everyone", stage.script("everyone", lines), mount=stage.mounts)
    return told(stage, "everyone", "everyone")


# what is told, and the client


def _is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@staged("18.escapes", "plain")
def a_failed_start_is_told_without_control_characters(stage: Stage) -> str:
    """What a terminal would obey is in a path, which was there when it was written."""
    source = stage.work / "\u009b2J\u202ex"
    source.mkdir()
    painted = stage.daemon.make("painted", "true", mount=f"{source} /x ro")
    source.rmdir()
    write(painted / "ctl", "start")
    wait_dead(painted)
    assert _is_plain(stage.daemon.log.read_text())
    directory = stage.daemon.agent_dir("painted")
    ours = [line for line in read(directory, "log").split("\n") if line.startswith("ctxfs: ")]
    assert ours
    plain = _is_plain(read(directory, "reason") + "\n".join(ours) + read(directory, "error"))
    return "plain" if plain else "raw"


@staged("18.escapes", "EINVAL")
def refusals_are_told_without_control_characters(stage: Stage) -> str:
    said = lone(stage, "screecher", "bytes @screecher/ctl 1b5b324a1b5d303b7807c29b324ae280ae0a")
    error = read(stage.daemon.agent_dir("screecher"), "error")
    assert _is_plain(error)
    assert "\\x1b[2J\\x1b]0;x\\x07\\x9b2J\\u202e" in error
    return said


@staged("18.client", "ok")
def the_client_imports_nothing_of_where_it_is_run(stage: Stage) -> str:
    """An agent leaves modules in a directory where its user runs the client."""
    trap = "open('/desk/imported', 'w')"
    names = ("json", "os", "socket", "select", "argparse", "sitecustomize", "encodings")
    lines = [f"echo {shlex.quote(trap.replace('/desk', str(stage.work)))} > /desk/{name}.py"
             for name in names]
    stage.daemon.finish("planter", stage.script("planter", "\n".join(lines)), mount=stage.mounts)
    environment = {
        "CTX_ROOT": str(stage.daemon.root), "PYTHONPATH": str(stage.work),
        "PYTHONSTARTUP": str(stage.work / "json.py"), "PYTHONHOME": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LANG": "C.UTF-8",
    }
    for command in (["ls"], ["status"], ["tree"]):
        subprocess.run([str(stage.daemon.root / "bin" / "ctx"), *command], cwd=stage.work,
                       env=environment, capture_output=True, timeout=30, check=False)
    assert all((stage.work / f"{name}.py").exists() for name in names)
    assert not (stage.work / "imported").exists()
    return "ok"


# less than before


@staged("24.narrowed", "before=ok after=EACCES")
def an_open_file_is_worth_what_the_policy_is_now(stage: Stage) -> str:
    name = "holder"
    agent = stage.daemon.run(name, tries(stage, name, "hold @other/out /desk/hold.go"),
                             mount=stage.mounts)
    return _narrowed(stage, agent, name)


def _narrowed(stage: Stage, agent: Path, name: str) -> str:
    wait_until((stage.work / "hold.go.used").exists, "it has read")
    write(agent / "policy", "")
    (stage.work / "hold.go").touch()
    wait_dead(agent)
    return told(stage, name, name)


@staged("24.narrowed policy.wider", "EACCES")
def what_a_grandparent_loses_is_lost_below(stage: Stage) -> str:
    low = tries(stage, "lower", "after /desk/narrow.go mkdir @agent/never.d")
    script = stage.script("lower", f"echo ready > /desk/narrow.ready; {low}")
    middle = stage.script("middle", "\n".join((
        "cd $CTX_ROOT/agent; mkdir lower.d; echo 'allow lower_t agent:* create' > lower.d/policy",
        f"echo {script} > lower.d/exec; echo start > lower.d/ctl; cat lower.d/wait",
    )))
    top = stage.script("upper", "\n".join((
        "cd $CTX_ROOT/agent; mkdir middle.d",
        "echo 'allow middle_t agent:* create' > middle.d/policy",
        f"echo {middle} > middle.d/exec; echo start > middle.d/ctl; cat middle.d/wait",
    )))
    upper = stage.daemon.run("upper", top, mount=stage.mounts)
    wait_until((stage.work / "narrow.ready").exists, "the lowest waits")
    write(upper / "policy", "allow upper_t agent:* read")
    (stage.work / "narrow.go").touch()
    wait_dead(upper)
    assert not stage.daemon.agent_dir("never").exists()
    return told(stage, "lower", "lower")


@staged("24.refused network", "EBUSY")
def the_network_is_not_taken_from_what_runs(stage: Stage) -> str:
    agent = stage.daemon.agent_dir("netter")
    assert read(agent, "status") == "busy\n"
    said = refusal(agent / "policy", "")
    assert "network:default connect" in read(agent, "policy.effective")
    return said
