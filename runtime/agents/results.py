"""The results of tasks and children, in a bounded space: previews, results, references, artifacts.

Ends are recorded in the loop, so of each thing no more is looked at than is shown, however
much there is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runtime.agents.workspace import Worktree
from runtime.authority.facts import Part
from runtime.errors import MalformedError
from runtime.kernel.output import Segments
from runtime.records.change import Change
from runtime.records.items import TASK_ENDS, Task, TaskCue, TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.texts.names import check_absolute, dump_json, parse_json_object, quote

COMMAND: Final = "command_task"
CHILD: Final = "child_agent_task"
#: bytes of a text that is shown, and of each end of one that does not fit
_SHOWN_MAX: Final = 8 << 10
_PART: Final = 4000
#: of the output of a child that has not replied
_TAIL_MAX: Final = 64 << 10
#: bytes of the references, and of the artifacts, that go along with an end
_LIST_MAX: Final = 8 << 10
#: bytes of references, and files and directories of artifacts, that are looked at
_REFS_READ: Final = 16 << 10
_ENTRIES: Final = 512
#: of a handoff: where its first line is looked for, and how much of that is a title
_TITLE_WITHIN: Final = 4096
_TITLE_MAX: Final = 200

_EXIT: Final = re.compile(r"(?:exit|signal):\d+(?=,|$)", re.ASCII)

#: makes what an end is told with; only if somebody is told
EndFacts = Callable[[], dict[str, Any]]


def exit_of(reason: str) -> str:
    """``exit:N`` or ``signal:N``, empty if a program did not end by itself."""
    found = _EXIT.match(reason)
    return found[0] if found is not None else ""


# texts of which only the ends may be shown


@dataclass(frozen=True, slots=True)
class Source:
    """A text that may be long. ``path`` is absolute, where programs read it. Of one that is
    ``running`` only the end is of interest; ``cut`` says that it begins somewhere within."""

    size: Callable[[], int]
    read: Callable[[int, int], bytes]
    path: str
    running: bool = False
    cut: bool = False


def ends_of(source: Source, part: int, maximum: int, where: str) -> tuple[str, bool]:
    """Head and tail, ``part`` bytes of each, or all of at most ``maximum`` bytes; and whether
    something was left out, which the text says, and ``where`` all of it is, unless that is
    empty."""
    size = source.size()
    if source.running:
        start = max(0, size - 2 * part)
        text = source.read(start, 2 * part).decode(errors="ignore")
        return text, start > 0 or source.cut
    if size <= maximum:
        text = source.read(0, size).decode(errors="replace")
        # bytes that are not UTF-8 grow by that
        if len(text.encode()) <= maximum:
            return text, False
    head = source.read(0, part).decode(errors="ignore")
    start = max(part, size - part)
    tail = source.read(start, part).decode(errors="ignore")
    left = size - len(head.encode()) - len(tail.encode())
    see = f": see {where}" if where else ""
    return f"{head}\n[{left} bytes left out{see}]\n{tail}", True


def file_source(path: Path, shown: str = "") -> Source:
    """A file, which need not be there."""

    def size() -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(offset: int, length: int) -> bytes:
        try:
            with open(path, "rb") as file:
                return os.pread(file.fileno(), length, offset)
        except FileNotFoundError:
            return b""

    return Source(size, read, shown)


def _kept_source(directory: Path, shown: str) -> Source:
    """The output that a monitor keeps, as it grows."""
    return Source(
        lambda: Segments(directory).size,
        lambda offset, length: Segments(directory).read(offset, length),
        shown,
    )


def _tail_source(directory: Path, since: int, shown: str) -> Source:
    """The end that an output has now, and what follows it."""
    start = max(since, Segments(directory).end - _TAIL_MAX)
    cut = start > since
    if cut:
        data, after = Segments(directory).since(start, 3)
        # not the rest of a character
        start = after - len(data)
        start += len(data) - len(data.lstrip(bytes(range(0x80, 0xC0))))

    def read(offset: int, length: int) -> bytes:
        return Segments(directory).since(start + offset, length)[0]

    def size() -> int:
        return max(0, Segments(directory).end - start)

    return Source(size, read, shown, running=True, cut=cut)


# references and artifacts


def check_ref(line: str) -> None:
    """A line of ``refs.jsonl``: ``{path, hash?, kind?, summary?}``, with relative paths only below
    ``artifact/``; ``MalformedError``."""
    if not line.strip():
        return
    ref = parse_json_object(line)
    for key, value in ref.items():
        if key not in ("path", "hash", "kind", "summary"):
            raise MalformedError(f"unknown key {quote(key)}; use path, hash, kind or summary")
        if not isinstance(value, str):
            raise MalformedError(f"{key} is not a string")
    path = ref.get("path")
    if not path:
        raise MalformedError(f"{quote(line)} has no path")
    if path.startswith("/"):
        check_absolute(path)
    elif not path.startswith("artifact/") or any(
        part in ("", ".", "..") for part in path.split("/")
    ):
        raise MalformedError(f"{quote(path)}: a relative path must be below artifact/")


def refs_of(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """The first references of a ``refs.jsonl`` of which so much is looked at; and whether there
    are more."""
    data = file_source(path).read(0, size + 1)
    more = len(data) > size
    if more:
        data = data[: data.rfind(b"\n", 0, size) + 1]
    found = []
    for line in data.decode(errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            found.append(parse_json_object(line))
        except MalformedError:
            continue  # as an earlier version took it
    return found, more


def artifacts_of(root: Path, entries: Iterator[int]) -> tuple[list[str], bool]:
    """The paths of files below ``artifact/``, and whether there are more that were not
    looked at."""
    found: list[str] = []
    left = ["artifact"]
    while left:
        directory = left.pop()
        try:
            with os.scandir(root.parent / directory) as there:
                for entry in there:
                    if next(entries, None) is None:
                        return sorted(found), True
                    path = f"{directory}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        left.append(path)
                    else:
                        found.append(path)
        except OSError:
            continue  # removed meanwhile
    return sorted(found), False


def _within(entries: list[Any], limit: int) -> tuple[list[Any], bool]:
    """The first entries that take at most so many bytes as JSON; and whether there are more."""
    for number, entry in enumerate(entries):
        limit -= len(dump_json(entry).encode(errors="replace")) + 1
        if limit < 1:  # the brackets
            return entries[:number], True
    return entries, False


class Results(Part):
    """The results of tasks and children, for the records that tell of their ends."""

    def child_of(self, task: Task) -> Agent | None:
        """The child that a handle supervises, None for a command."""
        return self._registry.recall(task.child) if task.child else None

    def directory(self, agent: Agent, task: Task) -> Path:
        """Where the output of a command is kept."""
        return self._documents.directory(agent) / "task" / task.name

    def title(self, task: Task) -> str:
        """A handle's is the first line of its child's task."""
        child = self.child_of(task)
        return self._title_of(child) if child is not None else task.title

    def _title_of(self, child: Agent) -> str:
        head = self._documents.read(child, "handoff.md", _TITLE_WITHIN)
        lines = head.decode(errors="replace").splitlines()
        return next((line.strip() for line in lines if line.strip()), "")[:_TITLE_MAX]

    def source(self, task: Task) -> Source:
        """The output of a task; for a child the best that there is: of one that runs its latest
        reply, of one that has ended its result, and the end of its output before both."""
        agent = self._registry.recall(task.agent)
        assert agent is not None
        path = self.output_path(agent, task.name)
        child = self.child_of(task)
        if child is not None:
            return self._source_of(child, path, dead=child.status is Status.DEAD)
        return _kept_source(self.directory(agent, task), path)

    def output_path(self, agent: Agent, task: str) -> str:
        """The path of the file ``output`` of one of its tasks."""
        return f"{self._facts.mount}/agent/{agent.name}.d/task/{task}/output"

    def _source_of(self, child: Agent, path: str, *, dead: bool) -> Source:
        session = self._sessions.get(child.session)
        found = []
        if session is not None:
            found.append(file_source(self._sessions.directory(session) / "latest.md", path))
        result = self._result_of(child, path)
        for source in (result, *found) if dead else (*found, result):
            if source.size():
                return source
        out = self._documents.directory(child) / "out"
        return _tail_source(out, child.said.output_start, path)

    def _result_of(self, child: Agent, path: str) -> Source:
        above = self._session_above(child)
        if above is not None:
            directory = f"{self._facts.mount}/home/{above.owner}/agent/{above.agent}"
            path = f"{directory}/session/{above.name}/context/child/{child.channel}/result.md"
        return file_source(self._documents.path(child, "result.md"), path)

    def _session_above(self, child: Agent) -> Session | None:
        """That of its parent, which keeps what it gave back when it is gone."""
        return self._sessions.get(child.parent_session) if child.parent_session else None

    def preview(self, task: Task) -> tuple[str, bool]:
        """Head and tail of the output, at most 8 KiB, saying what was left out; and whether
        something was."""
        return _shown(self.source(task), "output")

    def of_task(
        self, change: Change, agent: Agent, task: Task, status: TaskStatus | None = None
    ) -> dict[str, Any]:
        """``{task, kind, title, status, exit, reason, preview, truncated, output_path}``, and of
        a child ``{agent, result, refs, artifacts, worktree?}``: what its end is told with."""
        if status is None:
            status = change.peek(task, "status")
        child = self.child_of(task)
        reason = change.peek(task, "reason")
        exit_text = change.peek(task, "exit")
        if child is not None:
            path = self.output_path(agent, task.name)
            return self._of_child(change, child, status, exit_text, reason, path)
        source = self.source(task)
        preview, truncated = _shown(source, "output_path")
        return {
            **_facts(task.name, task.task_kind, task.title, status, exit_text, reason),
            "preview": preview,
            "truncated": truncated,
            "output_path": source.path,
        }

    def of_child(self, change: Change, parent: Agent, child: Agent) -> dict[str, Any]:
        """The facts, as of a task, that the end of a child is told with: it has ended, or is its
        parent's no more."""
        reason = change.peek_agent(child, "reason")
        dead = change.peek_agent(child, "status") is Status.DEAD
        cue = TaskCue(change.peek_agent(child, "outcome")) if dead else TaskCue.CANCELLED
        path = self.output_path(parent, child.name)
        if not child.owned:  # it has no handle
            path = f"{self._facts.mount}/agent/{child.name}.d/out"
        return self._of_child(change, child, TASK_ENDS[cue], exit_of(reason), reason, path)

    def of_failed(
        self, change: Change, parent: Agent, child: Agent, status: TaskStatus, reason: str
    ) -> dict[str, Any]:
        """The facts, as of a task, that a parent is told when its child goes on, and what it was
        made for was not done."""
        path = self.output_path(parent, child.name)
        return self._of_child(change, child, status, exit_of(reason), reason, path)

    def _of_child(
        self,
        change: Change,
        child: Agent,
        status: TaskStatus,
        exit_text: str,
        reason: str,
        path: str,
    ) -> dict[str, Any]:
        source = self._source_of(child, path, dead=True)
        preview, cut = _shown(source, "output_path")
        given = self._result_of(child, path)
        result, cut_result = _shown(given, "result.md")
        refs, more_refs = refs_of(self._documents.path(child, "refs.jsonl"), _REFS_READ)
        refs, left_refs = _within(refs, _LIST_MAX)
        root = self._documents.path(child, "artifact")
        paths, more_paths = artifacts_of(root, iter(range(_ENTRIES)))
        # names are bytes; a text has no other
        paths = [os.fsencode(path).decode(errors="replace") for path in paths]
        paths, left_paths = _within(paths, _LIST_MAX)
        return {
            **_facts(child.name, CHILD, self._title_of(child), status, exit_text, reason),
            "preview": preview,
            "truncated": any((cut, cut_result, more_refs, left_refs, more_paths, left_paths)),
            "output_path": source.path,
            "agent": child.name,
            "result": result,
            "refs": refs,
            "artifacts": paths,
            **({"worktree": worktree} if (worktree := self.worktree_of(child, change)) else {}),
        }

    @staticmethod
    def worktree_of(child: Agent | None, change: Change | None = None) -> dict[str, str] | None:
        """The outcome of a child's worktree, None if it has none."""
        if child is None or not child.worktree_made:
            return None
        values = (change or Change()).peek_agent(child, "worktree")
        return Worktree.load(values).facts() if values is not None else None


def _facts(
    name: str, kind: str, title: str, status: TaskStatus, exit_text: str, reason: str
) -> dict[str, Any]:
    return {
        "task": name,
        "kind": kind,
        "title": title,
        "status": status.shown,
        "exit": exit_text,
        "reason": reason,
    }


def shortened(text: str, where: str) -> tuple[str, bool]:
    """The part of a text that is shown: ``ends_of`` in at most 8 KiB."""
    data = text.encode()
    return _shown(Source(lambda: len(data), lambda at, size: data[at : at + size], ""), where)


def _shown(source: Source, where: str) -> tuple[str, bool]:
    return ends_of(source, _PART, _SHOWN_MAX, where)
