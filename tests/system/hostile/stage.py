"""The agents that try, those whom they try it on, and what was said to them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import unified_mount
from tests.system.hostile.attempts import TABLE, WITHOUT_ROOT, Attempt
from tests.system.hostile.compiling import compile_to
from tests.system.hostile.guarded import Guard
from tests.worlds.daemon import TIMEOUT, alive, read, wait_status, wait_until, write
from tests.worlds.whose import AGENT_UID, ROOTLESS

HERE: Final = Path(__file__).parent
OWNER: Final = 4242
#: an abstract socket of the host; another run of these tests has one of its own
ABSTRACT: Final = f"hostile-{os.getpid()}"
#: who tries, and on whom it is tried
ACTORS: Final = tuple(
    name for name in ("kid", "mid", "rogue", "parter", "alien", "netter", "sharer", "boss")
    # alien is another user's, and only root has agents that share the host's view
    if not (ROOTLESS and name in ("alien", "sharer"))
)
#: root agents have rights over all agents of their owner: lines of uid 0 would reach others' too
CONFIG: Final = """\
grace: 1s
policy:
  - agent:* create,start,stop,read,write
  - tool:* execute
  - model:* use
"""
VICTIMS: Final = ("boss", "sib", "kid", "other") + (() if ROOTLESS else ("alien",))
#: ways that make what they name last
MAKING: Final = frozenset(("mkdir", "mknod", "bind", "symlink", "link", "rename", "mount"))
#: of the parent's history, of what its view hides, and of what is the host's
SECRETS: Final = ("the parent's secret", "the hidden secret", "the host's secret")
_TOKEN: Final = re.compile(r"@([a-z][a-z.-]*[a-z])")

#: another user's, and what root alone has
_OTHERS: Final = re.compile(r"alien|@human|@ctx/home/4242|@host\.")
_PATH: Final = re.compile(r"@[a-z][a-z-]*(/[^ \n]*)?")


def compile_programs(directory: Path) -> None:
    """hostile, statically linked, and a library for loaders; both readable by all."""
    directory.mkdir(mode=0o755)
    others = ("preload.c", "host.c", "probe.c")
    sources = sorted(source for source in HERE.glob("*.c") if source.name not in others)
    program = compile_to(directory / "hostile", *sources, flags=("-static", "-pthread"))
    compile_to(directory / "preload.so", HERE / "preload.c", flags=("-shared", "-fPIC"))
    compile_to(directory.parent / "host", HERE / "host.c")
    shutil.copy(program, directory / "setuid")
    (directory / "setuid").chmod(0o4755)


def heard(text: str) -> dict[str, str | None]:
    """What was tried by whoever printed this, and the answer; None if there is none yet."""
    found: dict[str, str | None] = {}
    for line in text.split("\n"):
        mark, _, rest = line.partition("\t")
        name, _, result = rest.partition("\t")
        if mark == "?":
            assert name not in found, f"{name} was tried twice"
            found[name] = None
        elif mark == "=":
            assert name in found, f"{name} was answered and never tried"
            found[name] = result
    return found


def only_of_root(attempt: Attempt) -> bool:
    """Whether it is tried beside a daemon of root's only."""
    return ROOTLESS and (attempt.actor not in ACTORS or attempt.needs_root != ""
                         or bool(_OTHERS.search(attempt.program)))


class Stage:
    """One daemon with a family, its neighbours and another user's agents."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.daemon = daemon = guard.daemon
        self.work = daemon.base / "work"
        self.listener = socket.socket(socket.AF_INET)
        self.services = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        self._answers: dict[str, dict[str, str | None]] = {}
        self.pids: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        #: checks that hold, of what was tried all at once before any of them
        self._held: set[str] = set()
        self.waiter: subprocess.Popen[bytes] | None = None
        self.human: subprocess.Popen[str] | None = None

    # names

    def path(self, token: str) -> str:
        """What ``@token`` stands for."""
        root, daemon = self.daemon.root, self.daemon
        fixed = {
            "ctx": root,
            "agent": root / "agent",
            "home": root / f"home/{os.geteuid()}",
            "history": root / f"home/{os.geteuid()}/agent/kid/session/default",
            "base": daemon.base,
            "state": daemon.state,
            "runtime": daemon.runtime,
            "shared": daemon.runtime / "root",
            "cgroup": daemon.cgroup.path,
            "cgroups": unified_mount(),
            "daemon.pid": daemon.pid,
            "human.pid": self.human.pid if self.human is not None else 0,
            "host.port": self.listener.getsockname()[1],
            "host.abstract": ABSTRACT,
            "agent.uid": AGENT_UID,
        }
        if token in fixed:
            return str(fixed[token])
        name, _, what = token.partition(".")
        directory = daemon.agent_dir(name)
        if what == "pid":
            return read(directory, "pid").strip()
        if what == "inode":
            return str(directory.stat().st_ino)
        return str(directory)

    def expand(self, text: str) -> str:
        return _TOKEN.sub(lambda match: self.path(match[1]), text)

    def line(self, attempt: Attempt) -> str:
        """The shell's line for an attempt."""
        words = [self.expand(word) for word in attempt.words]
        return f"/hostile/hostile {shlex.quote(attempt.name)} {shlex.join(words)}\n"

    # setting

    def set(self) -> None:
        """Makes what the attempts need; nobody has tried anything yet."""
        daemon = self.daemon
        compile_programs(daemon.base / "hostile")
        self.work.mkdir()
        (self.work / "kids").touch()
        for name in ("hidden", "hidden/below"):
            (self.work / name).mkdir()
        (self.work / "hidden" / "secret").write_text(f"{SECRETS[1]}\n")
        secret = daemon.base / "secret"
        secret.mkdir()
        (secret / "file").write_text(f"{SECRETS[2]}\n")
        for name, target in (("secret", secret), ("init", "/proc/1/root"), ("hidden", "hidden")):
            (self.work / f"to-{name}").symlink_to(target)
        for path in (self.work, *self.work.rglob("*")):
            os.chown(path, AGENT_UID, AGENT_UID, follow_symlinks=False)
        self.mounts = (
            f"{daemon.base}/hostile /hostile ro\n{self.work} /desk rw\n- /desk/hidden hide\n"
        )
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        for service, address in zip(
            self.services, (str(daemon.base / "service.sock"), f"\0{ABSTRACT}"), strict=True
        ):
            service.bind(address)
            service.listen()
        os.chmod(daemon.base / "service.sock", 0o666)
        pool = daemon.root / "shared" / "pool"
        pool.mkdir()
        (pool / "data").chmod(0o777)
        (pool / "data" / "file").write_text("pooled\n")

    def as_user(self, *command: str) -> None:
        subprocess.run(
            ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups", *command],
            check=True, timeout=30,
        )

    def script(self, name: str, text: str) -> str:
        """A command that runs this text in a sandbox, where nobody can change it."""
        path = self.daemon.base / "hostile" / f"{name}.sh"
        # who sees the host's tree has no room for a directory at its top
        seen = "/tmp/hostile" if name.startswith("sharer") else "/hostile"
        path.write_text(text.replace("/hostile/", f"{seen}/"))
        return f"sh {seen}/{name}.sh"

    def play(self) -> None:
        """Everybody tries what the table says."""
        daemon = self.daemon
        agents = daemon.root / "agent"
        waiting = "while ! test -e /hostile/go; do sleep 0.02; done\n"
        rest = "\necho over; exec sleep 1000\n"
        message = json.dumps({"role": "user", "content": SECRETS[0]})
        said = (
            f"echo {shlex.quote(message)} >> $CTX_SELF/session/messages.jsonl\n"
            "echo mine > $CTX_SELF/artifact/mine\n"
        )
        programs = {name: self.script(name, f"{said}{waiting}. /hostile/{name}-tries.sh{rest}")
                    for name in ACTORS if name != "boss"}
        child = (
            "cd $CTX_ROOT/agent; mkdir sib.d kid.d mid.d draft.d\n"
            "echo SECRET=sib-secret > sib.d/env\n"
            "echo '/hostile/hostile victim victim /desk/ready 4242 hostile-sib 4242' > sib.d/exec\n"
            "echo the task of sib > sib.d/handoff.md\n"
            f"echo {programs['kid']} > kid.d/exec\n"
            f"echo {programs['mid']} > mid.d/exec\n"
            "echo 'allow mid_t agent:low* create' > mid.d/policy\n"
            "for name in sib kid mid; do echo start > $name.d/ctl; done\n"
        )
        tries = f"{child}{said}{waiting}. /hostile/boss-tries.sh{rest}"
        programs["boss"] = self.script("boss", tries)
        daemon.run("other", "sleep 1000", "the task of other", env="SECRET=others-secret")
        daemon.run("boss", programs["boss"], "the parent's task", mount=self.mounts)
        daemon.run("parter", programs["parter"], mount=self.mounts,
                   policy="allow parter_t agent:* create,detach")
        daemon.run("rogue", programs["rogue"], mount=self.mounts, policy="")
        daemon.run("netter", programs["netter"], mount=self.mounts,
                   policy="allow netter_t network:default connect")
        if not ROOTLESS:
            daemon.run("sharer", programs["sharer"], iso="shared",
                       mount=f"{daemon.base}/hostile /tmp/hostile ro")
            self._make_alien(programs["alien"])
        for name in VICTIMS:
            wait_until((agents / f"{name}.d").exists, f"{name} is made")
            wait_status(agents / f"{name}.d", "busy")
        wait_until((self.work / "ready").exists, "the sibling is ready")
        if not ROOTLESS:
            self.as_user("mkdir", f"{agents}/alien-kid.d")
            write(agents / "alien-kid.d" / "parent", "agent:alien")
        for name in ("other", "boss", "sib"):
            self._plan(daemon.agent_dir(name))
        self._before()
        for name in ACTORS:
            lines = (self.line(attempt) for attempt in TABLE
                     if attempt.actor == name and not only_of_root(attempt))
            self.script(f"{name}-tries", "".join(lines))
        (daemon.base / "hostile" / "go").touch()
        for name in ACTORS:
            agent = agents / f"{name}.d"
            wait_until(partial(_is_over, agent), f"{name} has tried it all", timeout=4 * TIMEOUT)
            self._answers[name] = heard(read(agent, "out"))

    def _plan(self, agent: Path) -> None:
        """What it has in its planes."""
        for path in ("task/errand", "work/plan", "waiting/bell"):
            (agent / path).mkdir()
        write(agent / "task" / "errand" / "cmd", "true")
        write(agent / "waiting" / "bell" / "on", "trigger")

    def _make_alien(self, program: str) -> None:
        daemon = self.daemon
        self.human = subprocess.Popen(
            ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups",
             str(daemon.base / "host"), "human"],
            stdout=subprocess.PIPE, text=True, env={"SECRET": "humans-secret"},
        )
        assert self.human.stdout is not None
        assert self.human.stdout.readline() == "left\n"
        self.as_user("mkdir", f"{daemon.root}/agent/alien.d")
        alien = daemon.agent_dir("alien")
        write(alien / "mount", f"{daemon.base}/hostile /hostile ro\nhome: /kept rw")
        write(alien / "env", "SECRET=aliens-secret")
        write(alien / "exec", program)
        data = daemon.root / "home" / str(OWNER) / "data"
        self.as_user("touch", str(data / "own"))  # with the owner's first look it is made
        (data / "roots").write_text("root's\n")
        write(alien / "ctl", "start")

    def _before(self) -> None:
        """Looks at everything, so that the kernel knows the names, and keeps what is there."""
        for name in VICTIMS:
            directory = self.daemon.agent_dir(name)
            assert read(directory, "result.md") == ""
            self.pids[name] = read(directory, "pid")
            for file in ("session/messages.jsonl", "session/events.jsonl"):
                self.kept[f"{name}/{file}"] = (directory / file).read_text()
        self.waiter = subprocess.Popen(["cat", str(self.daemon.agent_dir("boss") / "wait")])

    def close(self) -> None:
        for process in (self.waiter, self.human):
            if process is not None:
                process.kill()
                process.wait()
        if self.human is not None and self.human.stdout is not None:
            self.human.stdout.close()
        for opened in (self.listener, *self.services):
            opened.close()

    # what came of it

    def answer(self, attempt: Attempt) -> str:
        """What the program was told; fails if it was never tried, or not answered."""
        found = self._answers[attempt.actor]
        assert attempt.name in found, f"{attempt.actor} never tried: {attempt.name}"
        said = found[attempt.name]
        assert said is not None, f"{attempt.actor} was not answered: {attempt.name}"
        return said

    def expected(self, attempt: Attempt) -> str:
        """What it is to be told."""
        other = WITHOUT_ROOT.get(attempt.name) if ROOTLESS else None
        return self.expand(other or attempt.expect)

    def hold(self, name: str) -> None:
        """Makes a check of what the whole table has done, once; it fails again if it failed."""
        if name not in self._held:
            CHECKS[name](self)
            self._held.add(name)

    def targets(self, attempt: Attempt) -> Iterator[tuple[str, bool]]:
        """The paths of /ctx and the host that an attempt names, and whether it makes them."""
        words = attempt.words
        for position, word in enumerate(words):
            if not word.startswith("@ctx/self") and _PATH.fullmatch(word):
                making = bool(MAKING & set(words[:position])) or "creat" in " ".join(words)
                yield self.expand(word), making and position == len(words) - 1


def _is_over(agent: Path) -> bool:
    return "\nover\n" in read(agent, "out") or bool(read(agent, "reason"))


def unharmed(stage: Stage) -> None:
    """Whoever it was tried on lives, with the same process and an empty result."""
    for name in VICTIMS:
        directory = stage.daemon.agent_dir(name)
        assert read(directory, "status") == "busy\n", name
        assert read(directory, "pid") == stage.pids[name], name
        assert alive(int(stage.pids[name])), name
        if name != "kid":
            assert read(directory, "result.md") == "", name
    assert stage.waiter is not None
    assert stage.waiter.poll() is None, "who waits for the parent waits"


def histories(stage: Stage) -> None:
    """What was in a history is there still, and what came after it are whole lines."""
    for name, before in stage.kept.items():
        if name.endswith(".jsonl"):
            now = (stage.daemon.root / "agent" / name.replace("/", ".d/", 1)).read_text()
            assert now.startswith(before), name
            lines = [json.loads(line) for line in now.split("\n")[:-1]]
            ids = [line["id"] for line in lines]
            assert ids == [f"{ids[0][0]}{number}" for number in range(1, len(ids) + 1)], name
            times = [line["ts"] for line in lines]
            assert times == sorted(times), name
            if "messages" in name:
                owner = name.partition("/")[0]
                assert {line["from"] for line in lines} <= {f"agent:{owner}"}, name


CHECKS: Final = {"unharmed": unharmed, "histories": histories}
