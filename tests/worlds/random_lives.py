"""Operators who do at random what operators do, until the daemon dies, and what dies beside it."""

from __future__ import annotations

import random
import select
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import Daemon, end_process, read, write
from tests.worlds.invariants import COUNTED, GONE, Crashed, Invariants, Operator, told_write
from tests.worlds.stages import PROGRAMS

#: agents that each worker keeps at once, its children's included
_KEPT: Final = 7
_PROGRAMS: Final = (
    "sleep 1000",
    "sh -c 'echo out; exit 0'",
    "sh -c 'sleep 0.1; exit 3'",
    "sh -c 'cat; echo no >&2; kill -9 $$'",
    "sh -c 'trap \"\" TERM; sleep 1000'",
    f"sh -c '{told_write('$$')}; sleep 1000'",
    f"sh -c 'for n in 1 2 3 4 5 6 7 8 9; do {told_write('$n')}; sleep 0.05; done; sleep 1000'",
    "/no/such/program",
)
#: what they are told is a line of the message plane
_TURNS: Final = (
    "sh -c 'read line; echo got $line'",
    "sh -c 'read line; sleep 0.1; exit 3'",
    "sh -c 'sleep 1000'",
)
#: that are run at nodes, too
_COUNTING: Final = (
    f"sh -c 'n=0; while :; do n=$((n+1)); echo {COUNTED}$n; sleep 0.02; done'",
    f"sh -c 'for n in 1 2 3 4 5 6 7 8 9; do echo {COUNTED}$n; done; {told_write('all')}'",
)
#: of agents, how many are for a node
_PLACED: Final = 0.4
_RESIDENTS: Final = (
    PROGRAMS["resident"],
    "sh -c 'while read line; do echo \"{\\\"type\\\":\\\"error\\\"}\"; done'",
    "sh -c 'read line; exit 5'",
    "sleep 1000",
)
_COMMANDS: Final = ("echo out", "sleep 0.1; exit 3", "sleep 1000", "trap '' TERM; sleep 1000")



class Worker:
    """An operator with agents of its own, busy with them until the daemon dies."""

    def __init__(self, number: int, seed: int, operator: Operator, daemon: Daemon,
                 nodes: Sequence[str] = ()) -> None:  # fmt: skip
        """``nodes``: what ``placement`` may name."""
        self.name = f"w{number}"
        self.done: list[str] = []
        self._nodes = nodes
        self._random = random.Random(f"{seed} {number}")
        self._operator = operator
        self._daemon = daemon
        self._made = 0
        self._said = 0
        self._mine: list[str] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread()

    def begin(self) -> None:
        """Another round; what the last one left is known by now."""
        self._mine = [name for name in self._mine if self._daemon.agent_dir(name).exists()]
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                self._step()
                select.select([], [], [], self._random.uniform(0, 0.01))
        except Crashed:
            self.done.append("(the daemon died)")
        except BaseException as error:
            self._failure = error

    def _step(self) -> None:
        operation = self._random.choices(
            (
                *(self._make, self._make_child, self._say, self._write, self._remove),
                *(self._tell, self._task, self._wait),
            ),
            (4, 2, 8, 3, 4, 8, 3, 2),
        )[0]
        try:
            operation()
        except OSError as error:
            # a refusal; EIO would be a bug
            assert error.errno not in (5, 107, 103), self.done[-5:]
            self.done.append(f"refused: {error}")

    def _pick(self) -> str:
        return self._random.choice(self._mine)

    def _next(self) -> str:
        self._made += 1
        return f"{self.name}-{self._made}"

    def _make(self) -> None:
        if len(self._mine) >= _KEPT:
            return
        name = self._next()
        self.done.append(f"make {name}")
        self._operator.make(name)
        self._mine.append(name)
        placed = self._place(name)
        command = self._random.choice(_PROGRAMS + _COUNTING * bool(self._nodes))
        if self._random.random() < 0.3:
            command = self._parent(name, placed=placed)
        elif not placed and self._random.random() < 0.6:
            mode = self._random.choice(("turn", "resident"))
            command = self._random.choice(_TURNS if mode == "turn" else _RESIDENTS)
            self._operator.write(name, "mode", mode)
        self._operator.write(name, "exec", command)
        if self._random.random() < 0.3:
            self._operator.write(name, "handoff.md", f"the task of {name}")
        if not placed and self._random.random() < 0.2:
            self._operator.write(name, "restart", self._random.choice(("on-failure", "always")))
        if self._random.random() < 0.8:
            self._operator.verb(name, "start")

    def _place(self, name: str) -> bool:
        """Whether an agent is for a node."""
        placed = bool(self._nodes) and self._random.random() < _PLACED
        if placed:
            self._operator.write(name, "placement", f"node={self._random.choice(self._nodes)}")
        return placed

    def _parent(self, name: str, *, placed: bool) -> str:
        """The program of one that makes children, also at nodes, if it is not at one itself."""
        places = bool(self._nodes) and not placed
        if places:
            policy = self._daemon.agent_dir(name) / "policy"
            line = f"allow {name}_t node:* place\n"
            self._attempt(lambda: write(policy, policy.read_text() + line))
        lines = ["cd $CTX_ROOT/agent || exit 9"]
        for number in range(self._random.randint(1, 2)):
            kid = f"{name}.k{number}"
            command = shlex.quote(self._random.choice(_PROGRAMS))
            lines.append(f"mkdir {kid}.d && echo made {kid}")
            lines.append(f"printf '%s\\n' {command} > {kid}.d/exec")
            if self._random.random() < 0.3:
                lines.append(f"echo temp > {kid}.d/life")
            if places and self._random.random() < _PLACED:
                lines.append(f"echo node={self._random.choice(self._nodes)} > {kid}.d/placement")
            if self._random.random() < 0.8:
                lines.append(f"echo start > {kid}.d/ctl")
        lines.append(self._random.choice(("sleep 1000", "sleep 0.2", "exit 7")))
        return "sh -c " + shlex.quote("; ".join(lines))

    def _make_child(self) -> None:
        if not self._mine or len(self._mine) >= _KEPT:
            return
        parent, name = self._pick(), self._next()
        self.done.append(f"make {name} below {parent}")
        self._operator.make(name)
        self._mine.append(name)
        self._operator.write(name, "exec", self._random.choice(_PROGRAMS))
        self._operator.write(name, "parent", f"agent:{parent}")
        if (life := self._random.choice(("owned", "owned", "temp", "detached"))) != "owned":
            self._operator.write(name, "life", life)
        if life != "detached":
            self._place(name)
        if self._random.random() < 0.7:
            self._operator.verb(name, "start")

    def _say(self) -> None:
        if not self._mine:
            return
        verbs = ("start", "stop", "kill", "pause", "pause", "resume", "resume", "resume",
                 "abort", "abort", "reset")
        name, verb = self._pick(), self._random.choice(verbs)
        self.done.append(f"{verb} {name}")
        self._operator.verb(name, verb)

    def _tell(self) -> None:
        if not self._mine:
            return
        name = self._pick()
        for _ in range(self._random.choice((1, 1, 5))):
            self._said += 1
            self.done.append(f"tell {name} {self._said}")
            self._operator.say(name, f"message {self._said}")

    def _attempt(self, *operations: Callable[[], object]) -> None:
        """What the operator need not know."""
        for operation in operations:
            try:
                operation()
            except OSError as error:
                if self._daemon.has_ended(5.0 if error.errno in GONE else 0.0):
                    raise Crashed from error
                raise

    def _task(self) -> None:
        if not self._mine:
            return
        name = self._pick()
        self._said += 1
        task = self._daemon.agent_dir(name) / "task" / f"t{self._said}"
        command, verb = self._random.choice(_COMMANDS), self._random.choice(("", "stop", "kill"))
        self.done.append(f"task {name} {command} {verb}")
        self._attempt(
            task.mkdir,
            lambda: write(task / "cmd", command),
            lambda: write(task / "ctl", "start"),
            *([lambda: write(task / "ctl", verb)] if verb else []),
        )

    def _wait(self) -> None:
        if not self._mine:
            return
        name = self._pick()
        self._said += 1
        wait = self._daemon.agent_dir(name) / "waiting" / f"w{self._said}"
        on = self._random.choice(("timer 100ms", "timer 500ms", "message", "trigger"))
        self.done.append(f"wait {name} {on}")
        self._attempt(
            wait.mkdir,
            lambda: write(wait / "deadline", "300ms"),
            lambda: write(wait / "on", on),
        )

    def _write(self) -> None:
        if not self._mine:
            return
        name, number = self._pick(), self._random.randrange(1000)
        file, text = self._random.choice((
            ("label", f"l{number}"),
            ("env", f"N={number}"),
            ("meta.json", f'{{"n": {number}}}'),
            ("handoff.md", f"task {number}\n" * number),
        ))
        self.done.append(f"write {name} {file}")
        self._operator.write(name, file, text)

    def _remove(self) -> None:
        if not self._mine:
            return
        name = self._pick()
        self.done.append(f"remove {name}")
        try:
            self._operator.remove(name)
        except FileNotFoundError:  # temp, or gone with its parent
            self._mine.remove(name)
            self._operator.entries.pop(name, None)
            raise
        self._mine.remove(name)


def disturb(chance: random.Random, daemon: Daemon) -> int:
    """Some programs and monitors end while there is no daemon; how many were chosen."""
    victims = []
    for leaf in ("run", "again", "cell", "task/*"):
        for path in daemon.cgroup.path.glob(f"**/{leaf}/cgroup.procs"):
            victims += Cgroup(path.parent).processes()
    victims += daemon.monitors()
    chosen = chance.sample(victims, min(len(victims), chance.choice((0, 0, 1, 3))))
    for pid in chosen:
        with suppress(ProcessLookupError):  # it ended with one before it
            end_process(pid)
    return len(chosen)


def hold(chance: random.Random, invariants: Invariants, daemon: Daemon) -> None:
    """Somebody waits for the end of one that lives."""
    directories: list[Path] = list((daemon.root / "agent").glob("*.d"))
    if not directories:
        return
    directory = chance.choice(directories)
    try:
        if read(directory, "status").strip() not in ("new", "dead"):
            invariants.hold(directory.name.removesuffix(".d"))
    except FileNotFoundError:
        return  # temp


@contextmanager
def told_of(workers: Sequence[Worker], daemon: Daemon, where: str) -> Iterator[None]:
    """Whatever is found wrong is noted with what was done last, and the daemon killed."""
    try:
        yield
    except BaseException as error:
        if daemon.process is not None:
            daemon.kill()
        said = [where, *(f"{worker.name}: {', '.join(worker.done[-12:])}" for worker in workers)]
        error.add_note("\n".join(said))
        raise
