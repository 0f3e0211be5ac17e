"""Worktrees: a child's own repository, made of its parent's.

The child sees it at ``/workspace``, on the branch ``ctx/<name>``. Nothing of its
parent's repository is writable for it, and nothing that it writes is obeyed by any
git but its own: its parent's side takes single commits over, checked, by way of a
repository of ours. Git runs in the parent's cell, with nothing but the parent's
rights, through a callable that is given (``RunInside``); whatever it prints is that
agent's claim, and is used in that agent's view only. The parent's repository cannot
make it execute anything either: what a configuration could name is overridden.

Where things are, below the directory that all worktrees of a repository share
(``common``: ``.git``, mostly)::

    refs/heads/ctx/<name>     the branch, which keeps what the child borrows
    ctx/<name>/work           its files; the child has them at /workspace
    ctx/<name>/git            its repository: objects, refs, HEAD, index are its own
    ctx/<name>/config dotgit  what is in that repository's config, and in /workspace/.git
    ctx/<name>/copied         an index of the parent's ignored files that were copied to work
    ctx/<name>/fetch          while something is taken over: the repository of ours

Below ``common``, because the parent can write there if it can commit at all; it
lasts as long as the commits do, is on the disk of the user that pays for these, is reached
by the parent's view alone, and git looks for nothing there. The child has its ``git``
at ``common/ctx``: so its siblings' are covered, and its own children get theirs in
the same way, one level further down.

Three things pass between the two repositories:

- Objects, downwards: ``objects/info/alternates`` and read-only mounts name every object directory
  that the parent has or borrows, eldest first. Git reads the alternates of each in turn, and gives
  up at the seventh link of a chain; in this order it has nothing left to read there. The branch in
  the parent's repository protects the objects from ``git gc``.
- One commit id, upwards: gather.c reads it from the child's repository without following links,
  with the parent's ids, in its view and its cgroup: the daemon resolves no path of an agent.
- Objects, upwards: git packs them from the repository of ours and indexes them in the parent's.
  Git does not check the hashes of objects that it finds; ``index-pack`` computes all of them. A
  forged object arrives under its true name, and the object that it replaced is missing. The branch
  moves, with its old value given, if everything that it needs is there and the move loses nothing.

What git does not keep has another way down: carry.c copies the ignored files that the parent's
``.ctxfs-copy`` names, and nothing that the child's view has not. What else the parent has, and the
child has not, is told to both.

Our git never reads the child's index, attributes or refs. The child's configuration is ours. An
index of ours decides what is clean. The child's files have an empty file in place of ``.git``,
which only the child's view covers with one that leads to its repository: so the parent's git does
not start there by accident and obey what the child left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Final, Self

from runtime.agents.gitcalls import (
    TIME_OVER,
    Answer,
    RunInside,
    ask,
    number,
    object_id,
    said,
    script,
    without_hooks,
)
from runtime.errors import (
    CtxError,
    MalformedError,
    TakenError,
    TooLargeError,
    UnsupportedError,
    WrongStateError,
)
from runtime.records.model import Agent
from runtime.records.stored import loaded
from runtime.texts.mounts import Mount
from runtime.texts.names import check_absolute, check_name, escape, quote, some_of

#: where a child with a worktree has it
WORKSPACE: Final = "/workspace"
#: where one of another machine has the repository of that: its own children cover the workspace
REPOSITORY: Final = "/repository"
#: made afresh for every agent: what the parent has there is none of the child's
_FRESH: Final = ("/tmp", "/proc", "/dev")
#: in the child's repository, but not its own
_OURS: Final = ("config", "hooks", "info")
#: directories of objects that a repository may borrow from, its own included
_OBJECTS_MAX: Final = 64
_WHY_MAX: Final = 500
#: in what a child's workspace differs from its parent's, as handles and the child itself are told
DIFFERENCES: Final = (
    *("copied", "not_copied", "uncommitted", "empty_submodules", "hooks_not_run"),
    *("filters_not_run", "links_into_git", "refs_left_out", "config_left_out"),
)
#: bytes of names that are told of each
_NAMES_MAX: Final = 300
#: seconds to look for that: a child starts all the same
_LOOKING: Final = 20
#: what an operator does when he has repaired what was kept
_FETCH: Final = "write fetch to ctl"

#: exit statuses of the scripts
_NO_PATH, _NO_REPOSITORY, _NO_COMMIT, _SHALLOW, _PARTIAL, _NO_WORKSPACE, _TAKEN = range(21, 28)
GONE, _NOT_OURS, _NO_BRANCH = range(28, 31)
_TOO_LARGE: Final = 31

_LOOK, _DISCARD, _GATHER = map(script, ("look", "discard", "gather"))
_MAKE: Final = script("make", "tree", "copy")
_SEND: Final = script("apart", "make", "send")
_AGAIN: Final = script("bounded", "apart", "again", "send")
_LACKS: Final = script("tree", "lacks")
_HOOKS: Final = script() + "hooks\n"
_TAKE: Final = script("take") + "say end\n"
_TAKE_FAR: Final = script("bounded", "take") + "say end\n"
_JUDGE: Final = script("take", "judge") + "say end\n"


class WorktreeState(StrEnum):
    """The state of what a child committed."""

    OPEN = "open"
    FETCHING = "fetching"
    FETCHED = "fetched"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worktree:
    """One worktree, in the parent's view.

    ``root`` is the parent's workspace that it was made of and ``common`` what its
    repository keeps for all worktrees, both without symbolic links; ``base`` the
    commit that the branch began at; ``objects`` the directories that the child
    borrows objects from, its parent's last. ``commit`` is where the parent's branch
    was left, ``reason`` why it, or something else, is kept. ``differs`` is what the child has
    not, or has besides the commit, by key (``DIFFERENCES``).
    """

    name: str
    root: str
    common: str
    base: str
    objects: tuple[str, ...] = ()
    state: WorktreeState = WorktreeState.OPEN
    commit: str = ""
    reason: str = ""
    differs: dict[str, str] = field(default_factory=dict)
    #: of a child that is placed there, and what crosses: the commit that it begins with, the size
    #: of the pack of that, its SHA-256, and what git is configured with
    node: str = ""
    sent: str = ""
    size: int = 0
    digest: str = ""
    config: dict[str, str] = field(default_factory=dict)

    @property
    def branch(self) -> str:
        return f"ctx/{self.name}"

    @property
    def ref(self) -> str:
        return f"refs/heads/{self.branch}"

    @property
    def place(self) -> str:
        """All that there is of it."""
        return f"{self.common}/ctx/{self.name}"

    @property
    def path(self) -> str:
        """The child's files."""
        return f"{self.place}/work"

    @property
    def left(self) -> str:
        """The commit that the parent's branch was left at."""
        return self.commit or self.base

    def describe(self) -> str:
        """The text that the handle shows: ``key=value``, one per line."""
        values = {
            "state": self.state.value,
            "path": "" if self.node else self.path,
            "branch": self.branch,
            "base": self.base,
            "commit": self.commit,
            "reason": self.reason,
            **self.differs,
        }
        return "".join(f"{key}={value}\n" for key, value in values.items())

    def facts(self) -> dict[str, str]:
        """Its outcome, as notices and tools tell it to the parent."""
        return {
            "state": self.state.value,
            "branch": self.branch,
            "path": "" if self.node else self.path,
            "commit": self.commit,
            "reason": self.reason.replace(_FETCH, "call WorktreeTake"),
        }

    def kept(self, why: str) -> Self:
        """This worktree as one that is kept; ``reason`` then says what can be done, too."""
        remedy = (
            "repair that, or copy what you need from there without git, and remove "
            f"{quote(self.place, 300)}; then {_FETCH}"
        )
        return replace(self, state=WorktreeState.KEPT, reason=f"{why}; {remedy}")

    def dump(self) -> dict[str, Any]:
        """As it comes back from the store, too."""
        return {**asdict(self), "objects": list(self.objects), "state": self.state.value}

    @classmethod
    def load(cls, values: dict[str, Any]) -> Self:
        """The worktree that ``dump`` wrote, of any version."""
        return loaded(cls, values)


def check_possible(agent: Agent) -> None:
    """``MalformedError`` if the agent can have no worktree, whatever its parent has."""
    if agent.parent is None:
        raise MalformedError(
            "worktree: a root agent has no parent to make a worktree from; "
            "use inherit or explicit_root:/PATH"
        )
    if not agent.owned:
        raise MalformedError(
            f"worktree: life {quote(agent.life)}: only an owned or temp child can have one; "
            "use inherit or explicit_root:/PATH"
        )


def check_branch(name: str) -> None:
    """``MalformedError`` if an agent's name cannot name a branch (git-check-ref-format(1))."""
    check_name(name)
    # the rest of what git forbids no name has
    if ".." in name or name.endswith((".", ".lock")):
        raise MalformedError(
            f'{quote(name)}: the branch of a worktree cannot contain "..", or end in "." or ".lock"'
        )


# the view


def binds(worktree: Worktree) -> list[Mount]:
    """The mounts that the child's view has of it, in order.

    Sources are paths in the parent's view, without symbolic links, and are opened there
    as the parent would, with all that is mounted below them; the last of each list is on
    top. Directories are bound on directories and files on files, all of which are there
    once it is made: the targets below ``common/ctx`` and ``/workspace`` are in what an
    earlier line of the list binds. They carry no recorded identity: they are made by the
    parent's git just before, below what the parent may write, and no child can put a link
    in the place of any of them.

    All of the parent's repository is read-only, and all that it borrows from. The child's
    own repository is in the place of ``ctx`` there, whatever is the same for all of git's
    own files read-only on top; and what leads from its files to that repository is not in
    the child's hands, neither in its view nor in its parent's.
    """
    common, place = worktree.common, worktree.place
    found = [Mount(path, path, "rw") for path in _pinned(worktree)]
    covered: list[str] = []
    for path in (worktree.root, common, *worktree.objects):
        if not any(_is_inside(path, other) for other in covered):
            covered.append(path)
            found.append(Mount(path, path, "ro"))
    own = f"{common}/ctx"
    found.append(Mount(f"{place}/git", own, "rw"))
    found += [Mount(f"{place}/git/{name}", f"{own}/{name}", "ro") for name in _OURS]
    found.append(Mount(f"{place}/work", WORKSPACE, "rw"))
    found.append(Mount(f"{place}/dotgit", f"{WORKSPACE}/.git", "ro"))
    return found


def _pinned(worktree: Worktree) -> list[str]:
    """Directories above what is read-only, the outermost first.

    A child that may write there could rename them, and put a repository of its own
    in the place of its parent's. A mount point cannot be renamed.
    """
    kept = (worktree.root, worktree.common, *worktree.objects)
    above = {str(p) for path in kept for p in PurePosixPath(path).parents}
    return sorted(
        path for path in above
        if path != "/" and not any(_is_inside(path, other) for other in (*kept, *_FRESH))
    )


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


# making one


async def plan(run: RunInside, parent: Agent, child: Agent, root: str) -> Worktree:
    """The worktree that ``add`` will make of ``root``, the parent's workspace in force.

    Changes nothing in it. ``MalformedError`` if there is no repository or no commit,
    ``UnsupportedError`` if it is shallow or a partial clone, ``TakenError`` if the branch
    or the worktree is there already.
    """
    check_branch(child.name)
    answer = await ask(run, parent, _LOOK, child.name, cwd=root)
    whose = f"{quote(root)}, the workspace of {quote(parent.name)}"
    if answer.code == _NO_REPOSITORY and "not a git repository" in answer.text:
        raise MalformedError(f"workspace=worktree: {whose}, is not in a git repository")
    if answer.code == _NO_COMMIT:
        raise MalformedError(
            f"workspace=worktree: the repository of {whose}, has no commit yet"
        )
    if answer.code in (_SHALLOW, _PARTIAL):
        what = "shallow" if answer.code == _SHALLOW else "a partial clone"
        raise UnsupportedError(
            f"workspace=worktree: the repository of {whose}, is {what}: "
            "fetch all of it there (git fetch --unshallow, git clone without --filter)"
        )
    if answer.code == _NO_WORKSPACE:
        raise UnsupportedError(
            f"the view of {quote(parent.name)} has no {WORKSPACE} for a child's worktree"
            f": {said(answer.text)}"
        )
    if answer.code == _TAKEN and "branch" in answer.words:
        raise TakenError(
            f"the branch {quote(answer.one('branch'))} already exists: rename or delete it"
        )
    if answer.code == _TAKEN:
        there = quote(answer.one("there"), 300)
        raise TakenError(f"{there} already exists, perhaps from an earlier worktree")
    if not answer.whole:
        raise WrongStateError(f"the repository of {whose}: {said(answer.text)}")
    without_hooks(answer.words.get("hook", []))
    said_objects = answer.words.get("objects", [])
    objects = [check_absolute(path, "a directory of objects") for path in said_objects]
    if len(objects) > _OBJECTS_MAX:
        raise UnsupportedError(
            f"the repository of {whose}, borrows from {len(objects) - 1} others, more than "
            f"{_OBJECTS_MAX - 1}: run git repack -a there"
        )
    return Worktree(
        name=child.name,
        root=check_absolute(answer.one("root"), "the workspace"),
        common=check_absolute(answer.one("common"), "the repository"),
        base=object_id(answer.one("base")),
        objects=tuple(dict.fromkeys(objects)),
    )


async def add(
    run: RunInside,
    parent: Agent,
    worktree: Worktree,
    program: str,
    covered: Iterable[str] = (),
    *,
    send: RunInside | None = None,
    most: int = 0,
) -> Worktree:
    """Makes what ``plan`` returned, which is returned with what it differs in; ``CtxError`` if it
    cannot: then ``discard`` it.

    ``program`` is where the parent's view has carry (carry.c), ``covered`` are paths at which the
    child has nothing of its parent's view, or something else. Of a child that is placed elsewhere
    no files are made, but what ``send`` prints is a pack of all that its branch leads to, of at
    most so many bytes.
    """
    hooks = await _hooks(run, parent, worktree)
    answer = await ask(
        send or run,
        parent,
        _SEND if send else _MAKE,
        *(worktree.name, worktree.base, "0" * len(worktree.base)),
        "sha1" if len(worktree.base) == 40 else "sha256",
        *worktree.objects,
        hooks=hooks,
        GIT_DIR=worktree.common,
        ROOT=worktree.root,
        CARRY=program,
        COVERED="\n".join(covered),
        FAR="yes" if send else "",
        MOST=str(most),
    )
    if answer.code != _TOO_LARGE and answer.code:
        raise WrongStateError(f"making the worktree {quote(worktree.name)}: {said(answer.text)}")
    if send:
        worktree = _sent(worktree, answer, most)
    return replace(worktree, differs=await _differences(run, parent, worktree))


async def _hooks(run: RunInside, parent: Agent, worktree: Worktree) -> list[str]:
    answer = await ask(run, parent, _HOOKS, GIT_DIR=worktree.common)
    return answer.words.get("hook", [])


def _sent(worktree: Worktree, answer: Answer, most: int) -> Worktree:
    if answer.code == _TOO_LARGE:
        raise TooLargeError(
            f"what the branch of {quote(worktree.name)} leads to is a pack of more than {most} "
            "bytes (artifact_max), which does not go to a node: raise that at both machines"
        )
    lines = (line.partition("=") for line in answer.words.get("config", []))
    config = {key: value for key, _, value in lines}
    sent = object_id(answer.one("base")) if "base" in answer.words else worktree.base
    size, digest = number(answer.one("bytes")), object_id(answer.one("digest"))
    return replace(worktree, sent=sent, size=size, digest=digest, config=config)


async def send_again(
    run: RunInside, send: RunInside, parent: Agent, worktree: Worktree, most: int
) -> Worktree:
    """For a child that goes on: ``send`` prints what its branch has led to; ``CtxError``."""
    hooks = await _hooks(run, parent, worktree)
    words, where = (worktree.place, worktree.ref), worktree.common
    answer = await ask(send, parent, _AGAIN, *words, hooks=hooks, GIT_DIR=where, MOST=str(most))
    if answer.code != _TOO_LARGE and answer.code:
        raise WrongStateError(f"sending {quote(worktree.name)}: {said(answer.text)}")
    return _sent(worktree, answer, most)


async def _differences(run: RunInside, parent: Agent, worktree: Worktree) -> dict[str, str]:
    """Each of ``DIFFERENCES`` and what is told of it; ``unknown`` says why not all of it is."""
    answer = await ask(
        run,
        parent,
        _LACKS,
        *(worktree.place, worktree.base, worktree.common),
        cwd=worktree.root,
        seconds=_LOOKING,
    )
    names: dict[str, list[str]] = {}
    for line in answer.words.get("told", []):
        key, _, name = line.partition(":")
        names.setdefault(key, []).append(name)
    counts = (line.partition(":") for line in answer.words.get("count", []))
    count = {key: number(found) for key, _, found in counts}
    found = {
        key: some_of(names.get(key, []), count.get(key, 0), _NAMES_MAX)
        for key in DIFFERENCES
    }
    if not answer.whole:
        late = answer.code == TIME_OVER
        why = f"it took more than {_LOOKING} s" if late else said(answer.text)
        found["unknown"] = f"not all was looked at: {why}"
    return found


async def discard(run: RunInside, parent: Agent, worktree: Worktree) -> None:
    """Takes away all that is there of one, and the branch if that is at its base still.

    ``CtxError`` if it could not be: it can be tried again.
    """
    answer = await ask(
        run, parent, _DISCARD, worktree.name, worktree.base, GIT_DIR=worktree.common
    )
    if answer.code:
        raise WrongStateError(f"removing {quote(worktree.place, 300)}: {said(answer.text)}")


# taking over


async def take(
    run: RunInside,
    parent: Agent,
    worktree: Worktree,
    program: str,
    *,
    settled: list[str] | None,
    most: int = 0,
) -> Worktree:
    """The worktree with its outcome: the parent's repository has the child's commits and the
    branch, or the reason why not. ``program`` is where the parent's view has gather (gather.c).

    The worktree of a child that has ended is also kept if its removal would lose something:
    each file must be as in the branch, no other file may be there, ignored or not, and every
    commit of the child must be on a branch of the parent. ``settled`` are the worktrees of the
    child's own children that may go with it. Of a child that is placed elsewhere, ``most`` are the
    bytes of a pack.
    """
    try:
        return await _take(run, parent, worktree, program, settled=settled, most=most)
    except CtxError as error:
        return worktree.kept(error.sentence)


async def _take(
    run: RunInside,
    parent: Agent,
    worktree: Worktree,
    program: str,
    *,
    settled: list[str] | None,
    most: int,
) -> Worktree:
    answer = await ask(
        run, parent, _GATHER, *(worktree.place, worktree.ref, program), GIT_DIR=worktree.common
    )
    if answer.code == GONE:
        return replace(worktree, state=WorktreeState.FETCHED, reason="its directory was removed")
    if answer.code == _NOT_OURS:
        return worktree.kept("it is not as ctxd made it, or an earlier version did")
    if answer.code == _NO_BRANCH:
        return worktree.kept(f"it has no branch {quote(worktree.branch)} any more")
    if not answer.whole:
        return worktree.kept(f"it cannot be read: {said(answer.text)}")
    commit = object_id(answer.one("commit"))
    answer = await ask(
        run,
        parent,
        _TAKE_FAR if most else _TAKE if settled is None else _JUDGE,
        *(worktree.place, worktree.ref, commit, worktree.left, worktree.base),
        *(settled or ()),
        hooks=answer.words.get("hook", []),
        GIT_DIR=worktree.common,
        MOST=str(most),
    )
    if answer.words.get("moved") == [commit]:
        worktree = replace(worktree, commit=commit)
    if not answer.whole:
        return worktree.kept(f"git could not compare it with its branch: {said(answer.text)}")
    if "kept" in answer.words:
        why = " ".join(answer.one("kept").split())
        more = f" ({said(answer.text)})" if answer.text.strip() else ""
        return worktree.kept(escape(why)[:_WHY_MAX] + more)
    return replace(worktree, state=WorktreeState.FETCHED, reason="")
