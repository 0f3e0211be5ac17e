"""What must hold of the agents of a daemon that may die at any instruction.

``Operator`` performs an operator's operations and keeps what was acknowledged.
``Invariants`` watches processes, cgroups, waiters and histories over crashes of
the daemon, and says what is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import subprocess
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from runtime.cell.record import RunRecord, read_record
from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import TIMEOUT, Daemon, alive, discarded, wait_dead, wait_until, write
from tests.worlds.histories import kept_histories, mistold

#: recorded ends, adopted agents: all that a daemon does by itself after its start
SETTLE_SECONDS: Final = 60.0
#: a look costs the daemon a moment, in which it could get on
_INTERVAL: Final = 0.05
_LOOKS: Final = 3
#: what most files fit in
_BLOCK: Final = 1 << 16

#: agents of a soak that only disturb
_HOSTILE: Final = re.compile(r"h[0-9]+-[0-9]+")
GONE: Final = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
_LIVE: Final = frozenset({"starting", "ready", "busy", "idle", "paused", "stopping"})
_ENDING: Final = frozenset({"stopping", "dead"})
#: what an agent can be after an acknowledged verb, if nobody says another
_AFTER: Final = {
    "start": frozenset({"starting", "busy", "idle", "ready"}) | _ENDING,
    "stop": _ENDING,
    "kill": _ENDING,
    "pause": frozenset({"paused"}) | _ENDING,
    "resume": frozenset({"starting", "busy", "idle", "ready"}) | _ENDING,
    "abort": frozenset({"busy", "paused"}) | _ENDING,  # it is paused once its run has ended
    "reset": frozenset({"new"}),
}
#: of one at a node, of which a host tells later what became of a verb that is no end
_AFTER_THERE: Final = _LIVE | {"dead"}
#: of whose run nothing is known that was not heard before
_UNHEARD: Final = ("incomplete", "unconfirmed", "runtime_lost")
#: what a program says that counts
COUNTED: Final = "counted "
_CHANNEL: Final = {"interrupted": "cancelled"}

#: by an agent's directory, what its files say
AllFacts = dict[Path, dict[str, str]]

#: cgroups that are no agent's
_OWN: Final = ("monitor", "daemon", "helper")


def told_write(text: str) -> str:
    """Shell commands that give a result back, and say what they were told of it.

    The shell's own echo does not look at what close(2) says, where the write is committed.
    """
    return (
        f"echo try result.md {text}; /bin/echo {text} > $CTX_SELF/result.md "
        f"&& echo ack result.md {text}"
    )


class Crashed(Exception):
    """The daemon died during an operation, which it may or may not have done."""


@dataclass
class Entry:
    """What is known of one agent by what was said to it, and answered."""

    present: set[bool]
    statuses: frozenset[str] = frozenset({"new"})
    #: the acknowledged content, then attempts of which nobody knows
    files: dict[str, list[str | None]] = field(default_factory=dict)
    #: messages to it, each text once, and whether they were acknowledged
    said: dict[str, bool] = field(default_factory=dict)
    parent: str = ""
    #: whether it is known that ``parent`` owns it, if it has one
    adopted: bool = True
    life: str = ""
    #: whether it is, or may be, for a node
    placed: bool = False
    started: bool = False
    must_end: bool = False
    #: (outcome, reason) that it is to have once it is dead
    end: tuple[str, str] | None = None


class Operator:
    """An operator. A refusal is an ``OSError``, a crash meanwhile ``Crashed``."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.entries: dict[str, Entry] = {}
        #: what was said to each name, and what came of it
        self.said: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=40))

    def _attempt(
        self, name: str, what: str, operation: Callable[[], object],
        unknown: Callable[[], object],
    ) -> None:
        try:
            operation()
            self.said[name].append(what)
        except OSError as error:
            self.said[name].append(f"{what}: {error.strerror}")
            if error.errno in GONE and self._daemon.has_ended(TIMEOUT):
                unknown()
                raise Crashed from error
            raise

    def make(self, name: str) -> Path:
        directory = self._daemon.agent_dir(name)
        earlier = self.entries.get(name)
        entry = Entry(present={True, False})

        def unknown() -> None:
            self.entries[name] = entry

        try:
            self._attempt(name, "mkdir", directory.mkdir, unknown)
        except OSError:
            if earlier is not None:
                self.entries[name] = earlier
            raise
        entry.present = {True}
        self.entries[name] = entry
        return directory

    def write(self, name: str, file: str, text: str) -> None:
        entry = self.entries[name]
        before = entry.files.get(file, [None])

        def unknown() -> None:
            entry.files[file] = [*before, text]
            entry.placed |= file == "placement"
            if file == "parent":
                self._adopt(entry, text, acknowledged=False)
            elif file == "life":
                entry.adopted = False
                entry.life = "temp" if text == "temp" else entry.life

        path = self._daemon.agent_dir(name) / file
        self._attempt(name, f"{file} {text[:40]}", lambda: write(path, text), unknown)
        entry.files[file] = [text]
        entry.placed |= file == "placement"
        if file == "parent":
            self._adopt(entry, text, acknowledged=True)
        elif file == "life":
            entry.life = text

    @staticmethod
    def _adopt(entry: Entry, text: str, *, acknowledged: bool) -> None:
        entry.parent, entry.life = text.removeprefix("agent:"), "owned"
        entry.adopted = acknowledged
        entry.statuses |= {"dead"}
        # what a child may have is its parent's to say
        for file in ("parent", "policy", "life"):
            entry.files.pop(file, None)

    def verb(self, name: str, verb: str) -> None:
        entry = self.entries[name]
        ends = verb in ("stop", "kill")
        after = _AFTER_THERE if entry.placed and not ends and verb != "reset" else _AFTER[verb]

        def unknown() -> None:
            entry.statuses |= after
            entry.started |= verb == "start"
            if verb == "reset":
                entry.end, entry.must_end = None, False
                self._forget(name, acknowledged=False)

        path = self._daemon.agent_dir(name) / "ctl"
        self._attempt(name, verb, lambda: write(path, verb), unknown)
        entry.statuses = after | ({"dead"} if entry.parent else set())
        if "restart" in entry.files and verb in ("pause", "resume", "abort"):
            # it may end, by whatever, and be started again
            entry.statuses |= _AFTER["start"]
        entry.started |= verb == "start"
        entry.must_end = ends
        if verb == "reset":
            entry.started, entry.end = False, None
            self._forget(name, acknowledged=True)

    def say(self, name: str, text: str) -> None:
        """A message."""
        said = self.entries[name].said

        def unknown() -> None:
            said[text] = False

        path = self._daemon.agent_dir(name) / "inbox"
        self._attempt(name, f"inbox {text}", lambda: write(path, text), unknown)
        said[text] = True

    def remove(self, name: str) -> None:
        entry = self.entries[name]

        def unknown() -> None:
            entry.present.add(False)
            entry.statuses |= {"dead"}  # a new one is cancelled first
            self._forget(name, acknowledged=False)

        self._attempt(name, "rmdir", self._daemon.agent_dir(name).rmdir, unknown)
        entry.present = {False}
        self._forget(name, acknowledged=True)

    def _forget(self, name: str, *, acknowledged: bool) -> None:
        """What it owned goes with it, or with the life that a reset ends."""
        for entry, known in self._owned(name):
            if acknowledged and known:
                entry.present = {False}
            else:
                entry.present.add(False)

    def _owned(self, name: str, known: bool = True) -> Iterator[tuple[Entry, bool]]:
        """And whether all between are known to be owned, too."""
        for other, entry in list(self.entries.items()):
            if entry.parent == name and entry.life != "detached":
                sure = known and entry.adopted
                yield entry, sure
                yield from self._owned(other, sure)

    def lost(self) -> list[str]:
        """What was acknowledged and is not so any more."""
        found = []
        for name, entry in self.entries.items():
            directory = self._daemon.agent_dir(name)
            present = directory.is_dir()
            if present not in entry.present and not (not present and self._may_go(entry)):
                found.append(f"{name}: {'is there again' if present else 'is not there any more'}")
            if not present:
                continue
            entry.present = {True}
            with contextlib.suppress(FileNotFoundError):
                status = _read(directory / "status")
                if status not in entry.statuses:
                    found.append(f"{name}: is {status}, not one of {sorted(entry.statuses)}")
                found += self._lost_files(name, entry, directory)
        return found

    def _may_go(self, entry: Entry | None) -> bool:
        """Whether it goes by itself: temp, or owned by one that goes."""
        while entry is not None and entry.life != "detached":
            if entry.life == "temp" and (entry.started or entry.parent):
                return True
            if not entry.parent:
                return False
            entry = self.entries.get(entry.parent)
        # without its owner, found gone before, it has gone too
        return entry is None

    @staticmethod
    def _lost_files(name: str, entry: Entry, directory: Path) -> Iterator[str]:
        for file, possible in entry.files.items():
            if None in possible:
                continue
            text = _text(directory / file)
            wanted = [value for value in possible if value is not None]
            if file == "limits":
                good = any(set(value.split("\n")) <= set(text.split("\n")) for value in wanted)
            elif file == "meta.json":
                good = json.loads(text) in [json.loads(value) for value in wanted]
            else:
                good = text.rstrip("\n") in [value.rstrip("\n") for value in wanted]
                # a document is written in place: the last write may have begun
                good |= file == "handoff.md" and any(value.startswith(text) for value in wanted[1:])
            if not good:
                yield f"{name}/{file} is {text!r}, acknowledged was {possible!r}"

    def misheard(self) -> list[str]:
        """Messages that were acknowledged and not queued, or queued twice."""
        found = []
        for name, entry in self.entries.items():
            if not entry.said or entry.present != {True}:
                continue
            # an agent that never ran has no file of them
            sessions = [s for s in _shown_sessions(self._daemon) if s.parts[-3] == name]
            events = [event for each in sessions for event in _lines(each / "events.jsonl")]
            # the task that each start queues comes before what was said
            mine = [event for event in events if event["type"] == "message.queued"
                    and event["from"].startswith("operator uid:")
                    and event["priority"] != "interject"]
            least = sum(entry.said.values())
            if not least <= len(mine) <= len(entry.said):
                found.append(f"{name}: of {len(entry.said)} messages {least} were acknowledged, "
                             f"{len(mine)} are told of")
        return found

    def unended(self, all_facts: AllFacts) -> Iterator[str]:
        """What was to end by an acknowledged verb and has not, or not so."""
        for name, entry in self.entries.items():
            facts = all_facts.get(self._daemon.agent_dir(name))
            if facts is None:
                continue
            status, end = facts["status"], (facts["outcome"], facts["reason"])
            if entry.must_end and status != "dead":
                yield f"{name}: an end was acknowledged, it is {status}"
            elif status == "dead" and entry.end not in (None, end):
                yield f"{name}: ended as {end}, not {entry.end}"


@dataclass(frozen=True)
class Process:
    """A pid and when it began: no other process has both."""

    pid: int
    began: str

    def lives(self) -> bool:
        return alive(self.pid) and _began(self.pid) == self.began


class Invariants:
    """Observes one daemon, alive or dead, and checks what must always hold."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        #: whether an agent of another machine is held, since one that it belongs to is paused there
        self.is_held_from_there: Callable[[str], bool] = lambda name: False
        self._processes: dict[str, set[Process]] = {}
        self._histories: dict[Path, bytes] = {}
        self._waiters: list[tuple[str, str, subprocess.Popen[bytes]]] = []
        #: results by agent and session, as programs said that they gave them back, and whether
        #: that was after their end
        self._results: dict[tuple[str, str], tuple[list[str], bool]] = {}
        #: of ended children: parent, its session, child
        self._cancelled: dict[tuple[str, str], tuple[str, str, str]] = {}
        #: what has ended and was found good, with its size: looked at again in the end
        self._verified: dict[Path, int] = {}
        #: of lives that were over, and looked at, before this one looks
        self._earlier = set(map(self._stored, _shown_sessions(self._daemon)))
        self._settled: set[Path] = set()

    # observing

    def observe(self) -> None:
        """Remembers processes and histories; the daemon may be alive or dead."""
        for name, path in self._nodes():
            found = self._processes.setdefault(name, set())
            found |= {Process(pid, _began(pid)) for pid in Cgroup(path).processes()}
        # what is kept may be more than was ever delivered to a reader
        self._histories.update(kept_histories(self._daemon.state))

    def _nodes(self) -> Iterator[tuple[str, Path]]:
        for directory, _, _ in os.walk(self._daemon.cgroup.path):
            path = Path(directory)
            if path.name.startswith("agent-"):
                yield path.name.removeprefix("agent-"), path

    def hold(self, name: str) -> None:
        """A ``cat wait`` that blocks in the kernel from now on."""
        directory = self._daemon.agent_dir(name)
        incarnation = _read(directory / "incarnation")
        waiter = subprocess.Popen(["cat", str(directory / "wait")], stdout=subprocess.DEVNULL)
        self._waiters.append((name, incarnation, waiter))

        def blocked() -> bool:
            with contextlib.suppress(OSError):
                return "wait_for_partner" in Path(f"/proc/{waiter.pid}/wchan").read_text()
            return False

        wait_until(lambda: blocked() or waiter.poll() is not None, "cat blocks in open")

    def record(self, name: str) -> RunRecord:
        """The monitor's record of the agent's current run."""
        directory = self._daemon.agent_dir(name)
        run = f"{_read(directory / 'incarnation')}-{_read(directory / 'run')}"
        return read_record(self._daemon.runtime / "record" / run)

    def close(self) -> None:
        """Ends the waiters that are left."""
        for _, _, waiter in self._waiters:
            waiter.kill()
            waiter.wait()
        self._waiters.clear()

    # checking

    def check(self, operator: Operator) -> None:
        """After a start: at once what may not wait, then what the daemon has to do."""
        lost = list(operator.lost())
        wrong = [*self._torn(), *lost]
        assert not wrong, "\n".join(["once it is ready:", *wrong, *self._lives(lost, operator)])
        self.settle(operator)

    def settle(self, operator: Operator) -> None:
        """Fails with all that is still wrong when there was time to put it right."""
        begun = time.monotonic()
        #: what was found wrong first until then, where it was something else
        before: list[str] = []

        def look() -> Iterator[str]:
            facts: AllFacts = {}
            yield from self._contradictions(facts)
            yield from operator.unended(facts)
            yield from self._unwritten(facts)

        # who may go before all is well is looked at once, whatever else is wrong
        first = list(look())[:1]

        def settled() -> bool:
            # the first that is wrong says that it is too early, and the rest need not be read
            now = list(itertools.islice(look(), 1))
            if now != first:
                before.append(f"until {time.monotonic() - begun:.1f} s: {'; '.join(first)}")
            first[:] = now
            return not now

        try:
            # to look once may take long where many have lived, and more has happened meanwhile
            if first and not any(settled() for _ in range(_LOOKS)):
                wait_until(settled, "nothing contradicts", SETTLE_SECONDS, _INTERVAL)
        except AssertionError:
            wrong = list(look()) or first  # unless just now it was put right
            text = "\n".join(["contradictions that stay:", *wrong, *self._details(wrong),
                              *before[-5:]])
            raise AssertionError(text) from None
        wrong = [*self._torn(), *operator.lost(), *operator.misheard(), *self._bugs()]
        assert not wrong, "\n".join(["once it is settled:", *wrong])
        self.observe()

    def dismantle(self, operator: Operator) -> None:
        """Everything can still be stopped and removed, and nothing is left then."""
        base = self._daemon.root / "agent"
        for directory in _directories(base):
            if _status(directory) not in (None, "dead", "stopping"):
                _tolerate(directory / "ctl", "kill")
        left = _directories(base)
        waits = [str(directory / "wait") for directory in left]
        if subprocess.run(["cat", *waits], timeout=TIMEOUT, check=False,
                          stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            for directory in left:
                if directory.exists():  # not one that is temp
                    wait_dead(directory)
        for entry in operator.entries.values():
            entry.statuses |= {"dead"}
        self.settle(operator)
        for directory in _directories(base):
            with contextlib.suppress(FileNotFoundError):  # its parent's removal was its own
                directory.rmdir()
        operator.entries.clear()
        self._verified.clear()
        self._settled.clear()

        def look() -> Iterator[str]:
            facts: AllFacts = {}
            yield from self._leftovers()
            yield from self._contradictions(facts)
            yield from self._unwritten(facts)

        try:
            wait_until(lambda: not any(look()), "nothing is left", SETTLE_SECONDS, _INTERVAL)
        except AssertionError:
            raise AssertionError("\n".join(["left when all is removed:", *look()])) from None
        wrong = [*self._torn(), *self._bugs()]
        assert not wrong, "\n".join(wrong)

    def _details(self, wrong: list[str]) -> Iterator[str]:
        """What else there is to know of agents that are not as they must be."""
        for name, path in self._nodes():
            if any(f"{name}:" in line or f"{name} " in line for line in wrong):
                yield f"{path}:"
                for pid in Cgroup(path).processes():
                    yield f"    {_describe(pid)} in state {_stat(pid, 3)}"
        for path in (self._daemon.runtime / "record").iterdir():
            yield f"{path.name}: {path.read_text().splitlines()}"

    def _lives(self, lost: list[str], operator: Operator) -> Iterator[str]:
        """What was said to those that a line is about, and to their parents, and what they are."""
        for name in [re.split("[:/]", line, maxsplit=1)[0] for line in lost]:
            for each in filter(None, (name, operator.entries[name].parent)):
                directory = self._daemon.agent_dir(each)
                yield f"{each}: {operator.entries.get(each)}, said {list(operator.said[each])}"
                with contextlib.suppress(OSError):
                    for file in ("status", "parent", "life", "reason", "incarnation"):
                        yield f"    {file} {_read(directory / file)}"
                    yield (directory / "session" / "events.jsonl").read_text()[-1500:]

    def _torn(self) -> Iterator[str]:
        """4: a history begins with all that was ever read of it, and logs have the same once."""
        kept = kept_histories(self._daemon.state)
        for path, before in self._histories.items():
            now = kept.get(path)
            if now is None and "@" in path.parent.parent.name:
                pass  # it was a copy of its lead's
            elif now is None:
                yield f"{path} is gone"
            elif not now.startswith(before):
                yield f"{path} was {before[-200:]!r} at its end, now {now[len(before) - 200 :]!r}"
        yield from mistold(self._daemon.state, kept, self._earlier)

    def _bugs(self) -> Iterator[str]:
        log = self._daemon.log.read_text(errors="replace")
        for word in ("a bug in ctxfs", "Traceback"):
            if word in log:
                yield f"the daemon's log has {word!r}:\n{log[max(0, log.index(word) - 500) :]}"

    def _contradictions(self, all_facts: AllFacts) -> Iterator[str]:
        """2, 3: states, cgroups and processes, as they are now.

        Fills ``all_facts``: read once for all that is compared with them in one look.
        """
        directories = _directories(self._daemon.root / "agent")
        nodes = dict(self._nodes())
        for directory in directories:
            with contextlib.suppress(FileNotFoundError):
                facts = all_facts[directory] = _facts(directory)
                name = directory.name.removesuffix(".d")
                for what in self._state(directory, facts, nodes.get(name)):
                    yield f"{name}: {what} ({facts})"
        for directory, facts in all_facts.items():
            name = directory.name.removesuffix(".d")
            if facts["status"] == "dead":
                for child in _owned_children(directory, all_facts):
                    if (status := _status(child)) in _LIVE | {"new"}:
                        yield f"{name} is dead, its child {child.name} {status}"
            # nothing has run for one that is new
            if facts["status"] != "new":
                yield from self._acknowledged_inside(directory, name, facts["status"] == "dead")
        for name, path in nodes.items():
            if self._daemon.agent_dir(name) not in all_facts:
                yield f"{path} is the cgroup of no agent"
        for name, processes in self._processes.items():
            known = all_facts.get(self._daemon.agent_dir(name))
            if known is None or known["status"] in ("new", "dead"):
                for process in processes:
                    if process.lives():
                        yield f"{name} has ended, its process {_describe(process.pid)} has not"
        yield from self._waiting()

    def _state(self, directory: Path, facts: dict[str, str], node: Path | None) -> Iterator[str]:
        status = facts["status"]
        held = self.is_held_from_there(directory.name.removesuffix(".d"))
        if (status == "dead") != bool(facts["outcome"]):
            yield "an outcome goes with dead, and only that"
        if status in ("new", "dead"):
            if node is not None or facts["cgroup"]:
                yield f"has the cgroup {node}"
            if facts["pid"] or facts["run"]:
                yield "has a pid or a run"
            return
        if _read(directory / "node"):  # its processes are elsewhere
            if node is not None or facts["cgroup"] or facts["pid"]:
                yield f"has the cgroup {node} or a pid"
            if status == "stopping" or (status == "starting" and not _waits(directory)):
                yield "does not get on"
            return
        if status == "starting":
            mine = _read(directory / "restart") == "no" and not _waits(directory)
            if mine and not held and not _is_held(node):
                yield "does not get on"
            return
        if status == "stopping":
            yield "does not get on"
        if node is None or str(node) != facts["cgroup"]:
            yield f"its cgroup is {node}"
            return
        if not Cgroup(node).populated():
            yield "its cgroup is empty"
        frozen = held or is_frozen(directory)
        freeze = (Cgroup(node).read("cgroup.freeze") or "").strip()
        if freeze != ("1" if frozen else "0"):
            yield f"cgroup.freeze is {freeze}"
        if frozen and not Cgroup(node).keys("cgroup.events").get("frozen"):
            yield "not all of it is frozen"
        # what is killed in a frozen cell is noticed once it thaws
        if status == "busy" and not _is_held(node):
            pid = facts["pid"]
            if not pid or not alive(int(pid)):
                yield "its program does not live"
            elif not any(
                int(pid) in Cgroup(node).child(leaf).processes() for leaf in ("run", "again")
            ):
                yield "its program is not in its leaf"

    def _acknowledged_inside(self, directory: Path, name: str, final: bool) -> Iterator[str]:
        """1: what programs were told to be done, until now or, ``final``, ever.

        They say ``try FILE TEXT`` before and ``ack FILE TEXT`` after a write on
        their standard output, and ``made NAME`` after a mkdir.
        """
        wanted: dict[str, list[str]] = {}
        if _HOSTILE.fullmatch(name):
            return  # it says nothing of this kind, and perhaps more than can be read
        with contextlib.suppress(FileNotFoundError):
            # a line that is not ended may still grow
            lines = _text(directory / "out").split("\n")[:-1]
            # its children are at its node, and its result comes at its end, if it does
            there = bool(lines and _read(directory / "placement"))
            heard = not there or (final and not _read(directory / "reason").endswith(_UNHEARD))
            for line in lines:
                match line.split(" ", 2):
                    case ["try", file, text]:
                        if file in wanted:
                            # between its truncation and its write it may have been killed
                            wanted[file] += ["", text]
                    case ["ack", file, text]:
                        wanted[file] = [text]
                    case ["made", child]:
                        if not there and not any(
                            s.parts[-3] == child for s in _shown_sessions(self._daemon)
                        ):
                            yield f"{name} made {child}, which is not there"
            if not heard:
                return
            if "result.md" in wanted:
                if "" in wanted["result.md"]:  # of an empty one its output is made, in the end
                    wanted["result.md"].append(_read(directory / "out"))
                session = os.path.basename(os.readlink(directory / "session"))
                self._results[name, session] = (wanted["result.md"], final)
            for file, texts in wanted.items():
                if (text := _read(directory / file)) not in texts:
                    yield f"{name} wrote one of {texts} to {file}, there is {text!r}"

    def _waiting(self) -> Iterator[str]:
        """5: who waits is let go at the end, and not before."""
        for name, incarnation, waiter in self._waiters:
            directory = self._daemon.agent_dir(name)
            try:
                ended = (_read(directory / "incarnation") != incarnation
                         or _read(directory / "status") == "dead")
            except FileNotFoundError:
                ended = True
            if ended != (waiter.poll() is not None):
                yield f"{name} has {'' if ended else 'not '}ended, its waiter {waiter.returncode=}"

    # histories

    def _unwritten(self, all_facts: AllFacts) -> Iterator[str]:
        """4: each history tells one life, each thing once, and agrees with the states."""
        told: dict[tuple[str, str], list[dict[str, Any]]] = {}
        wanted: Counter[tuple[str, str, str]] = Counter()
        there = set(self._daemon.state.glob("home/*/agent/*/*/"))
        for directory in sorted(there | set(map(self._stored, _shown_sessions(self._daemon)))):
            if directory in self._earlier:
                continue
            key = (directory.parts[-2], directory.parts[-1])
            with contextlib.ExitStack() as stack:
                try:
                    shown = stack.enter_context(_within(self._shown(directory)))
                except FileNotFoundError:
                    continue  # made for a session that was then not committed
                # a control may also be written to one that is dead, which is no part of its life
                told[key] = [event for event in _lines(self._shown(directory) / "events.jsonl")
                             if event["type"] != "agent.control"]
                yield from self._session(directory, shown, told[key])
            if key in self._cancelled:
                wanted[self._cancelled[key]] += 1
        found: Counter[tuple[str, str, str]] = Counter()
        for (agent, session), events in told.items():
            for event in events:
                if event["type"] == "agent.child.cancel":
                    found[agent, session, event["child"]] += 1
        for who in wanted | found:
            if found[who] != wanted[who]:
                yield f"{who}: {found[who]} agent.child.cancel, not {wanted[who]}"
        yield from self._channels(told)
        for directory, facts in all_facts.items():
            key = (directory.name.removesuffix(".d"), facts["session"])
            if any(agent == key[0] and _is_other(session) for agent, session in told):
                continue  # its life is told in several sessions
            for what in _agrees(facts, told.get(key, [])):
                yield f"{key[0]}: {what} ({facts})"

    def _is_current(self, agent: str, session: str) -> bool:
        with contextlib.suppress(OSError):
            link = os.readlink(self._daemon.agent_dir(agent) / "session")
            return os.path.basename(link) == session
        return False

    def _session(
        self, directory: Path, shown: int, events: list[dict[str, Any]]
    ) -> Iterator[str]:
        """One session on the disk, and the directory that the mount shows of it."""
        size = sum(self._size(name, shown) for name in ("events.jsonl", "messages.jsonl"))
        if self._verified.get(directory) == size:
            return
        agent, session = directory.parts[-2:]
        wrong: list[str] = []
        for name in ("events.jsonl", "messages.jsonl"):
            wrong += _check_lines(self._shown(directory) / name)
            there = (directory / name).exists()  # or it is held in the store
            if there and self._size(name, shown) != self._size(directory / name):
                wrong.append(f"{self._shown(directory) / name} is not what is on the disk")
        if not _is_other(session):
            wrong += [f"{agent} {session}: {what}" for what in _check_life(events)]
        wrong += [f"{agent} {session}: {what}" for what in _check_items(events)]
        if events and events[-1]["type"] == "agent.stop":
            if "parent_dead" in events[-1].get("reason", ""):
                lineage = json.loads(_text("meta.json", shown)).get("parent", "")
                words = [word.partition(":")[2] for word in lineage.split()]
                # of one that was placed here a copy was told, which goes
                if lineage.startswith("agent:") and "@" not in words[0]:
                    self._cancelled[agent, session] = (words[0], words[1], agent)
            state, status = _read("state", shown), events[-1]["status"]
            if state != _CHANNEL.get(status, status):
                wrong.append(f"{agent} {session}: its state is {state}, it ended {status}")
            if not wrong:
                self._verified[directory] = size
        yield from wrong

    def _shown(self, directory: Path) -> Path:
        """Where the mount shows a session's directory."""
        owner, _, agent, session = directory.parts[-4:]
        return self._daemon.root / "home" / owner / "agent" / agent / "session" / session

    def _stored(self, shown: Path) -> Path:
        """Where the state has it, if something of it was written to a file."""
        owner, _, agent, _, session = shown.parts[-5:]
        return self._daemon.state / "home" / owner / "agent" / agent / session

    @staticmethod
    def _size(path: Path | str, directory: int | None = None) -> int:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path, dir_fd=directory).st_size
        return 0

    def _channels(self, told: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[str]:
        sessions = set(_shown_sessions(self._daemon))
        sessions -= {self._shown(directory) for directory in self._earlier}
        for channel in (c for s in sorted(sessions) for c in _listed(s / "context" / "child")):
            if channel in self._settled:
                continue
            with contextlib.suppress(FileNotFoundError), _within(channel) as fd:
                key = (_read("agent", fd), _read("session", fd))
                status, last = _read("status", fd), (told.get(key) or [{}])[-1]
                if last.get("type") == "agent.stop":
                    wanted = _CHANNEL.get(last["status"], last["status"])
                else:
                    wanted = "pending" if _status(self._daemon.agent_dir(key[0])) == "new" else (
                        "active"
                    )
                if status != wanted:
                    yield f"{channel}: its status is {status}, not {wanted}"
                results, final = self._results.get(key, ([], False))
                if not final and not self._is_current(*key):
                    results = []  # it may have written more before it was removed
                if results and (result := _read("result.md", fd)) not in results:
                    yield f"{channel}: {key[0]} wrote one of {results}, there is {result!r}"
                elif status == wanted and status not in ("pending", "active"):
                    self._settled.add(channel)

    def _leftovers(self) -> Iterator[str]:
        """5: nothing of an agent is left but its histories and the channels' documents."""
        daemon = self._daemon
        for directory, names, _ in os.walk(daemon.cgroup.path):
            if "link" in names:
                names.remove("link")  # a link is kept for a while when nobody needs it
            for name in names:
                if not name.startswith("user-") and name not in _OWN:
                    yield f"cgroup {directory}/{name}"
        for pid in daemon.monitors():
            yield f"monitor {_describe(pid)}"
        for path in (daemon.runtime / "root" / "wait").iterdir():
            yield f"wait file {path.name}"
        for name in ("record", "monitor"):
            for path in (daemon.runtime / name).iterdir():
                yield f"{name} {path.name}"
        for path in (daemon.root / "agent").iterdir():
            yield f"agent {path.name}"
        for path in discarded(daemon.state):
            yield f"trash {path.name}"
        sessions = list(_shown_sessions(self._daemon))
        shown = {(s.parts[-3], s.name) for s in sessions if (s / "artifact").exists()}
        for channel in (c for s in sessions for c in (s / "context" / "child").iterdir()):
            shown.add((_read(channel / "agent"), _read(channel / "session")))
        kept = list((daemon.state / "agent").iterdir())
        for path in kept:
            if [p.name for p in path.iterdir()] != ["doc"]:
                yield f"{path}: {sorted(p.name for p in path.iterdir())}"
        # those who never wrote have none
        if len(kept) > len(shown):
            yield f"{len(kept)} directories of documents, shown are those of {sorted(shown)}"


def _check_life(events: list[dict[str, Any]]) -> Iterator[str]:
    """The events of one session are one life, told once and in order."""
    types = [event["type"] for event in events]
    if types[:1] != ["agent.create"] or types.count("agent.create") != 1:
        yield f"not one agent.create at its beginning: {types}"
    if types.count("agent.stop") > 1 or "agent.stop" in types[:-1]:
        yield f"more than one agent.stop, or something after it: {types}"
    dead = types[-1:] == ["agent.stop"]
    running = ""
    ended: set[str] = set()
    for event in events:
        if event["type"] == "run.start":
            if running or event["run"] in ended:
                yield f"run.start of {event['run']} after {running or ended}"
            running = event["run"]
        elif event["type"] == "run.end":
            if event["run"] != running:
                yield f"run.end of {event['run']}, running is {running or 'none'}"
            ended.add(event["run"])
            running = ""
    if dead and running:
        yield f"run.end of {running} is missing"


#: what begins, by which field it is named, and what ends it
_PAIRS: Final = (
    ("message.queued", "message", ("message.end",)),
    ("task.start", "task", ("task.end",)),
    ("wait.armed", "wait", ("wait.fired", "wait.cancelled", "wait.expired")),
)


def _check_items(events: list[dict[str, Any]]) -> Iterator[str]:
    """What belongs to an agent begins once and ends once, at the latest with its agent."""
    dead = [event["type"] for event in events[-1:]] == ["agent.stop"]
    for beginning, field_name, endings in _PAIRS:
        begun: set[str] = set()
        ended: set[str] = set()
        children: set[str] = set()
        for event in events:
            name = event.get(field_name, "")
            if event["type"] == beginning:
                if event.get("pid") == "":
                    children.add(name)
                    if name in ended:  # another child of the name
                        begun.discard(name)
                        ended.discard(name)
                if name in begun | ended:
                    yield f"{beginning} of {name} again"
                begun.add(name)
            elif event["type"] in endings:
                # a task may end before it is seen to start, and a child before it starts
                if beginning == "task.start" and name not in begun:
                    continue
                if name in ended:
                    # a child that was reset may be stopped before it starts again
                    if name in children and event["status"] == "cancelled" and not event["exit"]:
                        continue
                    yield f"{event['type']} of {name} after an end"
                if name not in begun:
                    yield f"{event['type']} of {name}, which never began"
                ended.add(name)
        if dead and begun - ended:
            yield f"no end of {beginning} {sorted(begun - ended)}"


def _is_other(session: str) -> bool:
    """Whether somebody made it by the verb, beside the one that every life has."""
    return session.partition(".")[0] != "default"


def is_frozen(directory: Path) -> bool:
    """Whether it is to be frozen: paused by itself, rather than by the end of its run."""
    with contextlib.suppress(FileNotFoundError):
        events = _lines(directory / "session" / "events.jsonl")
        statuses = [event for event in events if event["type"] == "agent.status"]
        return bool(statuses) and statuses[-1]["status"] == "paused" and (
            statuses[-1].get("reason") != "operator_aborted"
        )
    return False


def is_below(directory: Path, is_so: Callable[[Path], bool]) -> bool:
    """Whether that is so of an agent that it belongs to."""
    with contextlib.suppress(FileNotFoundError):
        while (parent := _read(directory / "parent")).startswith("agent:"):
            directory = directory.parent / f"{parent.removeprefix('agent:').split()[0]}.d"
            if is_so(directory):
                return True
    return False


def _waits(directory: Path) -> bool:
    """Whether it starts only when an agent that it belongs to goes on."""
    return is_below(directory, lambda above: _status(above) == "paused")


def _agrees(facts: dict[str, str], events: list[dict[str, Any]]) -> Iterator[str]:
    """The state of an agent is the one that its history tells last."""
    statuses = [event for event in events if event["type"] == "agent.status"]
    last = statuses[-1]["status"] if statuses else "new"
    if last != facts["status"]:
        yield f"its history says {last}"
    stopped = events[-1:] if events[-1:] and events[-1]["type"] == "agent.stop" else []
    if (facts["status"] == "dead") != bool(stopped):
        yield "agent.stop goes with dead"
    elif stopped:
        told = (stopped[0]["status"], stopped[0]["reason"])
        if told != (facts["outcome"], facts["reason"]):
            yield f"agent.stop tells {told}"
    runs = [event["run"] for event in events if "run" in event]
    # what is begun below one that is paused begins when that goes on
    if facts["run"] and facts["run"] not in runs and not _is_held(Path(facts["cgroup"])):
        yield f"its history does not tell of {facts['run']}"


def _check_lines(path: Path) -> Iterator[str]:
    """Whole lines of JSON with consecutive ids."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        yield f"{path} ends in the middle of a line: {text[-100:]!r}"
        return
    letter = path.name[0]
    identifiers = [json.loads(line)["id"] for line in text.splitlines()]
    if identifiers != [f"{letter}{number + 1}" for number in range(len(identifiers))]:
        yield f"{path}: the ids are {identifiers}"


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _directories(base: Path) -> list[Path]:
    return [base / name for name in sorted(os.listdir(base)) if name.endswith(".d")]


def _shown_sessions(daemon: Daemon) -> Iterator[Path]:
    for user in _listed(daemon.root / "home"):
        for name in _listed(user / "agent"):
            yield from _listed(name / "session")


def _listed(directory: Path) -> list[Path]:
    """What is in a directory; nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return [directory / name for name in os.listdir(directory)]
    return []


def _owned_children(directory: Path, all_facts: AllFacts) -> Iterator[Path]:
    """Those that it owns, but for what was dead already when that was read."""
    for link in _listed(directory / "child"):
        child = directory.parent / f"{link.name}.d"
        if child in all_facts and all_facts[child]["status"] == "dead":
            continue
        with contextlib.suppress(FileNotFoundError):
            if _read(child / "life") != "detached":
                yield child


@contextlib.contextmanager
def _within(directory: Path) -> Iterator[int]:
    """A descriptor from which several files of a directory are found by one lookup each."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield fd
    except OSError as error:
        if error.errno == errno.ESTALE:  # what a path would say of one that is gone
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(directory)) from None
        raise
    finally:
        os.close(fd)


def _text(path: Path | str, directory: int | None = None) -> str:
    """By one open(2) and, of most files, one read(2): each is a request to the daemon."""
    fd = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        data = part = os.read(fd, _BLOCK)
        while len(part) == _BLOCK:
            part = os.read(fd, _BLOCK)
            data += part
        return data.decode()
    finally:
        os.close(fd)


def _read(path: Path | str, directory: int | None = None) -> str:
    return _text(path, directory).strip()


def _status(directory: Path) -> str | None:
    """None if there is no such agent."""
    try:
        return _read(directory / "status")
    except FileNotFoundError:
        return None


def _facts(directory: Path) -> dict[str, str]:
    """Some files of an agent, read in one state of it."""
    with _within(directory) as fd:
        while True:
            names = ("status", "outcome", "reason", "pid", "run", "cgroup")
            facts = {name: _read(name, fd) for name in names}
            facts["session"] = os.path.basename(os.readlink("session", dir_fd=fd))
            if all(_read(name, fd) == facts[name] for name in ("status", "run")):
                return facts


def _is_held(node: Path | None) -> bool:
    """Whether something above a cgroup, or itself, is frozen."""
    return node is not None and any(
        (Cgroup(path).read("cgroup.freeze") or "").strip() == "1" for path in (node, *node.parents)
    )


def _tolerate(path: Path, text: str) -> None:
    """Writes; the agent may have ended, or gone, just now."""
    try:
        write(path, text)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOENT):
            raise


def _stat(pid: int, number: int) -> str:
    """A field of proc_pid_stat(5), by its number there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[number - 3]


def _began(pid: int) -> str:
    return _stat(pid, 22)


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        command = ""
    return f"{pid} ({command.strip()})"
