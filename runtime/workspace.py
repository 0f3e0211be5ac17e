"""Worktrees: a child's own working copy of its parent's repository.

The child sees it at ``/workspace``, on the branch ``ctx/<name>``. Git runs in
the parent's cell, with nothing but the parent's rights, through a callable that
is given (``Run``); whatever it prints is that agent's claim, and is used in that
agent's view only. Neither the repository nor, later, the child can make it
execute anything: what their configuration could name is overridden on every call.

Where things are, below the directory that all worktrees of a repository share
(``common``: ``.git``, mostly)::

    ctx/<name>                the working copy
    ctx/<name>~below/         for the child's own children: see ``binds``
    refs/heads/ctx/<name>     the branch
    worktrees/<name>          what git keeps for the working copy: HEAD, index

Below ``common``, because the parent can write there if it can commit at all, it
lasts as long as the commits do, and git never lists it as untracked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Self

from runtime.authority.mounts import Mount
from runtime.errors import (
    CtxError,
    MalformedError,
    TakenError,
    UnsupportedError,
    WrongStateError,
)
from runtime.model import Agent
from runtime.names import check_absolute, check_name, quote

#: (whose cell, argument vector, working directory there, more environment) ->
#: (exit status, stdout and stderr together: all of it up to 64 KiB at least)
Run = Callable[[Agent, list[str], str, dict[str, str]], Awaitable[tuple[int, str]]]

#: where a child with a worktree has it
WORKSPACE: Final = "/workspace"
#: made afresh for every agent: what the parent has there is none of the child's
_FRESH: Final = ("/tmp", "/proc", "/dev")

_OBJECT_ID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NUMBER: Final = re.compile(r"[0-9]+")
#: how many of the commits that HEAD has been at are looked at
_LOG_MAX: Final = 500
_NOT_FOUND: Final = (126, 127)

_VARIABLES: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_EDITOR": ":",
    # nothing is fetched, not even by a partial clone; protocol.<name>.allow would
    # win over protocol.allow, but not over this
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    # looking must not write: where the child can put links, it would follow them
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_COMMITTER_NAME": "ctxfs",
    "GIT_COMMITTER_EMAIL": "ctxfs@localhost",
}
_SETTINGS: Final = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    # others write in the directory of the logs, and git follows links there
    "core.logAllRefUpdates": "false",
    "core.pager": "cat",
    "core.editor": ":",
    "core.sshCommand": ":",
    "core.askPass": "",
    "credential.helper": "",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    # the parent may work in what another uid owns; nothing there is executed
    "safe.directory": "*",
}
#: what to set for each <x> of filter.<x> and hook.<x> that the repository configures
_DRIVERS: Final = {
    "filter": {"clean": "", "smudge": "", "process": "", "required": "false"},
    "hook": {"enabled": "false"},
}
#: git lists what the command line sets last: without it the list is not whole
_LAST_DRIVER: Final = "filter.~.clean"

_EXISTING: Final = 'for p; do if [ -e "$p" ] || [ -L "$p" ]; then printf "%s\\n" "$p"; fi; done'
_HAS_WORKSPACE: Final = 'test -d "$1" || mkdir "$1"'
_CHECK_OUT: Final = 'mkdir -p "$GIT_DIR/refs" && exec git reset --hard --quiet'
#: Deletes the branch $2 of the repository $1 if it still is at $3, and never what a
#: symbolic ref there refers to. Whose own workspace is a worktree cannot lock packed
#: refs, as git would: what is not packed is then deleted under git's lock of the ref.
_DELETE_BRANCH: Final = """
[ ! -w "$1" ] || exec git update-ref --no-deref -d "$2" "$3"
set -Ce
: > "$1/$2.lock"
trap 'rm -f "$1/$2.lock"' EXIT
if [ "$(cat "$1/$2")" != "$3" ] || cut -s -d' ' -f2 "$1/packed-refs" 2>&- | grep -qxF "$2"; then
    echo "$2 is packed, or has changed"
    exit 1
fi
rm -f "$1/logs/$2" "$1/$2"
"""
#: Prints what a comparison with HEAD would not show: a repository of its own in the
#: place of .git, refs that only this worktree has, worktrees made inside of it.
_UNSEEN: Final = """
[ -f "$1/.git" ] && [ ! -L "$1/.git" ] || printf '%s\\n' "$1/.git"
shift
find "$@" ! -type d -print
"""
#: Prints each file that is not as in the commit $1, ignored ones too. A new index: the
#: child's own may say of a file that it need not be looked at. Submodules are left out
#: of it, so that whatever is in their place shows as untracked.
_FILES: Final = """
rm -f "$GIT_INDEX_FILE"
git ls-tree -r -z "$1" | grep -zv '^160000 ' | git update-index -z --index-info &&
    git ls-files --others --modified --deleted
code=$?
rm -f "$GIT_INDEX_FILE"
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worktree:
    """One worktree, in the parent's view.

    ``root`` is the parent's workspace that it was made of and ``common`` what its
    repository keeps for all worktrees, both without symbolic links; ``base`` the
    commit that the branch began at.
    """

    name: str
    root: str
    common: str
    base: str

    @property
    def branch(self) -> str:
        return f"ctx/{self.name}"

    @property
    def ref(self) -> str:
        return f"refs/heads/{self.branch}"

    @property
    def path(self) -> str:
        """The working copy."""
        return f"{self.common}/ctx/{self.name}"

    @property
    def admin(self) -> str:
        """Git's directory of it."""
        return f"{self.common}/worktrees/{self.name}"

    @property
    def below(self) -> str:
        """What the child's own worktrees are made in; no name has a ``~``."""
        return f"{self.path}~below"

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def check_possible(agent: Agent) -> None:
    """``MalformedError`` if the agent can have no worktree, whatever its parent has."""
    if agent.parent is None:
        raise MalformedError(
            "worktree: a root agent has no parent whose workspace it could be made of; "
            "inherit or explicit_root:/PATH would do"
        )
    if not agent.owned:
        raise MalformedError(
            f"worktree: life {quote(agent.life)}: only an owned or temp child has one; "
            "inherit or explicit_root:/PATH would do"
        )


# the view


def binds(worktree: Worktree) -> list[Mount]:
    """What the child's view has of it, in order. Sources are paths in the parent's view.

    Everything of the repository is read-only but what a commit writes. For ``ctx``
    and ``worktrees`` the child has directories of its own, which hold itself and
    the worktrees of its children: it can make these as its parent made its own,
    and reaches none of its siblings'. The sources of all that lie where the child
    cannot put a link in their place.
    """
    common, below = worktree.common, worktree.below
    found = [Mount(path, path, "rw") for path in _pinned(worktree)]
    found.append(Mount(worktree.root, worktree.root, "ro"))
    if not _is_inside(common, worktree.root):
        found.append(Mount(common, common, "ro"))
    for path in ("objects", "refs/heads/ctx", "logs/refs/heads/ctx"):
        found.append(Mount(f"{common}/{path}", f"{common}/{path}", "rw"))
    found += [
        Mount(f"{below}/worktrees", f"{common}/worktrees", "rw"),
        Mount(worktree.admin, worktree.admin, "rw"),
        Mount(f"{below}/ctx", f"{common}/ctx", "rw"),
        # where git looks for it
        Mount(worktree.path, worktree.path, "rw"),
        Mount(worktree.path, WORKSPACE, "rw"),
    ]
    return found


def _pinned(worktree: Worktree) -> list[str]:
    """Directories above what is read-only, the outermost first.

    A child that may write there could rename them, and put a repository of its own
    in the place of its parent's. A mount point cannot be renamed.
    """
    kept = (worktree.root, worktree.common)
    above = {str(p) for path in kept for p in PurePosixPath(path).parents}
    return sorted(
        path for path in above
        if path != "/" and not any(_is_inside(path, other) for other in (*kept, *_FRESH))
    )


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


# calls


class _Caller:
    """Runs programs in one agent's cell, in an environment that nobody else writes."""

    def __init__(self, run: Run, agent: Agent) -> None:
        self._run = run
        self._agent = agent

    async def call(
        self,
        *words: str,
        cwd: str = "/",
        settings: dict[str, str] | None = None,
        **variables: str,
    ) -> tuple[int, str]:
        """(exit status, what it said); ``UnsupportedError`` if there is no such program."""
        values = {**_VARIABLES, **variables}
        configured = {**_SETTINGS, **(settings or {})}
        # not by -c: a name may have a "="
        values["GIT_CONFIG_COUNT"] = str(len(configured))
        for number, (key, value) in enumerate(configured.items()):
            values[f"GIT_CONFIG_KEY_{number}"] = key
            values[f"GIT_CONFIG_VALUE_{number}"] = value
        # The agent's environment may set anything: GIT_DIR, GIT_TRACE, LD_PRELOAD.
        command = ["env", "-i", *(f"{key}={value}" for key, value in values.items()), *words]
        code, text = await self._run(self._agent, command, cwd, {})
        if code in _NOT_FOUND:
            raise UnsupportedError(
                f"a worktree needs git, sh and coreutils in the view of "
                f"{quote(self._agent.name)}: {_said(text)}"
            )
        return code, text

    async def demand(self, what: str, *words: str, cwd: str = "/", **rest: Any) -> str:
        """What a program said that exited 0; ``WrongStateError`` with its words otherwise."""
        code, text = await self.call(*words, cwd=cwd, **rest)
        if code:
            raise WrongStateError(f"{what}: {_said(text)}")
        return text

    async def script(self, what: str, script: str, *words: str, **rest: Any) -> str:
        return await self.demand(what, "sh", "-c", script, "ctxfs", *words, **rest)

    async def drivers(self, git_dir: str) -> dict[str, str]:
        """Settings that disable each program which the configuration names for files.

        Asked for each directory of git's: a configuration may be for some only.
        """
        text = await self.demand(
            f"the configuration of {quote(git_dir)}",
            *("git", "config", "--name-only", "--get-regexp", r"^(filter|hook)\."),
            settings={_LAST_DRIVER: ""},
            GIT_DIR=git_dir,
        )
        names = text.rstrip("\n").split("\n")
        settings: dict[str, str] = {}
        for name in names:
            section, _, rest = name.partition(".")
            if section not in _DRIVERS or not name.isprintable() or "\ufffd" in name:
                raise WrongStateError(
                    f"{quote(name)} in the configuration of {quote(git_dir)} cannot be "
                    "switched off: its name has to be printable UTF-8"
                )
            driver, dot, _ = rest.rpartition(".")
            if dot:
                found = _DRIVERS[section].items()
                settings.update({f"{section}.{driver}.{key}": value for key, value in found})
        if names[-1] != _LAST_DRIVER:
            raise WrongStateError(
                f"the configuration of {quote(git_dir)} names more filters than can be switched off"
            )
        return settings

    async def existing(self, *paths: str) -> list[str]:
        """Those of the paths at which there is something."""
        text = await self.script("looking for a worktree", _EXISTING, *paths)
        return [path for path in paths if path in text.split("\n")]

    async def has_branch(self, worktree: Worktree, ref: str) -> bool:
        code, text = await self.call(
            "git", "show-ref", "--verify", "--quiet", ref, GIT_DIR=worktree.common
        )
        if code not in (0, 1):
            raise WrongStateError(f"looking for {quote(ref)}: {_said(text)}")
        return code == 0


def _said(text: str) -> str:
    return quote(" ".join(text.split()) or "it said nothing", 300)


# making one


async def plan(run: Run, parent: Agent, child: Agent, root: str) -> Worktree:
    """The worktree that ``add`` will make of ``root``, the parent's workspace in force.

    Changes nothing. ``MalformedError`` if there is no repository or no commit,
    ``TakenError`` if the branch or the worktree is there already.
    """
    name = check_name(child.name)
    # git-check-ref-format(1); the rest of it no name violates
    if ".." in name or name.endswith((".", ".lock")):
        raise MalformedError(
            f'{quote(name)}: the branch of a worktree cannot have "..", nor end in "." or ".lock"'
        )
    caller = _Caller(run, parent)
    text = await caller.demand(f"the workspace {quote(root)}", "pwd", "-P", cwd=root)
    physical = check_absolute(text.removesuffix("\n"), "the workspace")
    code, text = await caller.call(
        *("git", "rev-parse", "--path-format=absolute", "--git-common-dir"), cwd=root
    )
    if code and "not a git repository" in text:
        raise MalformedError(
            f"workspace=worktree: {quote(root)}, the workspace of {quote(parent.name)}, "
            "is in no git repository"
        )
    if code:
        raise WrongStateError(f"the repository of {quote(root)}: {_said(text)}")
    common = check_absolute(text.removesuffix("\n"), "the repository")
    code, text = await caller.call(
        *("git", "rev-parse", "--verify", "--quiet", "HEAD^{commit}"), cwd=root
    )
    if code:
        raise MalformedError(
            f"workspace=worktree: the repository of {quote(root)} has no commit yet to begin at"
        )
    worktree = Worktree(name=name, root=physical, common=common, base=_object_id(text))
    await _check_free(caller, worktree)
    return worktree


async def _check_free(caller: _Caller, worktree: Worktree) -> None:
    for ref in (worktree.ref, "refs/heads/ctx"):
        if await caller.has_branch(worktree, ref):
            raise TakenError(
                f"the branch {quote(ref.removeprefix('refs/heads/'))} is there already: "
                "rename or delete it"
            )
    log = f"{worktree.common}/logs/{worktree.ref}"
    taken = await caller.existing(worktree.path, worktree.below, worktree.admin, log)
    if taken:
        raise TakenError(f"{quote(taken[0], 300)} is there already, perhaps of an earlier worktree")


def _object_id(text: str) -> str:
    found = text.removesuffix("\n")
    if not _OBJECT_ID.fullmatch(found):
        raise WrongStateError(f"git named no commit, but said {_said(text)}")
    return found


async def add(run: Run, parent: Agent, worktree: Worktree) -> None:
    """Makes what ``plan`` returned.

    ``CtxError``: then nothing of it is left, except by a loss of the parent's cell.
    """
    caller = _Caller(run, parent)
    common, name = worktree.common, worktree.name
    code, text = await caller.call("sh", "-c", _HAS_WORKSPACE, "ctxfs", WORKSPACE)
    if code:
        raise UnsupportedError(
            f"the view of {quote(parent.name)} has no {WORKSPACE}, where a child's worktree "
            f"would be: {_said(text)}"
        )
    await caller.demand(
        f"preparing the repository of {quote(worktree.root)}",
        *("mkdir", "-p"),
        # git packs the refs of a directory and removes it, even while it is mounted in
        # a child's view, if nothing else is in it; names with a dot first are no refs
        f"{common}/refs/heads/ctx/.keep",
        f"{common}/logs/refs/heads/ctx/.keep",
        f"{worktree.below}/worktrees/{name}",
        f"{worktree.below}/ctx/{name}",
    )
    try:
        await caller.demand(
            f"making the worktree {quote(name)}",
            # locked: "worktree prune" takes away what it does not see
            *("git", "worktree", "add", "--lock", "--no-checkout", "--no-guess-remote"),
            *("--no-track", "-b", worktree.branch, "--", worktree.path, worktree.base),
            cwd=worktree.root,
            GIT_DIR=common,
            GIT_WORK_TREE=worktree.root,
        )
    except CtxError:
        await _undo(caller, worktree)
        raise
    try:
        await caller.script(
            f"checking out the worktree {quote(name)}",
            _CHECK_OUT,
            cwd=worktree.path,
            settings=await caller.drivers(worktree.admin),
            GIT_DIR=worktree.admin,
            GIT_WORK_TREE=worktree.path,
        )
    except CtxError:
        # checks that what it removes is what git itself made
        await caller.call(
            *("git", "worktree", "remove", "--force", "--force", "--", worktree.path),
            GIT_DIR=common,
        )
        await _undo(caller, worktree)
        raise


async def _undo(caller: _Caller, worktree: Worktree) -> None:
    """After git failed: the branch, which it leaves, if nothing was committed there."""
    await _delete_branch(caller, worktree, worktree.base)
    await caller.call("rm", "-rf", "--", worktree.below)


async def _delete_branch(caller: _Caller, worktree: Worktree, tip: str) -> tuple[int, str]:
    common = worktree.common
    return await caller.call(
        *("sh", "-c", _DELETE_BRANCH, "ctxfs", common, worktree.ref, tip), GIT_DIR=common
    )


# removing it


async def remove(run: Run, parent: Agent, worktree: Worktree) -> str | None:
    """Removes it with its branch; otherwise says where it is kept, and why.

    Removed is only what holds nothing: each file is as in HEAD, no other file is
    there, ignored or not, and neither the branch, nor HEAD, nor anything that HEAD
    has been at, has a commit that the base lacks. Call it when the child is dead.
    """
    caller = _Caller(run, parent)
    try:
        why = await _remove(caller, worktree)
    except (CtxError, OSError) as error:
        why = error.sentence if isinstance(error, CtxError) else str(error)
    if why is None:
        return None
    return f"kept {quote(worktree.path, 300)}, branch {quote(worktree.branch)}: {why}"


async def _remove(caller: _Caller, worktree: Worktree) -> str | None:
    there = await caller.existing(worktree.path, worktree.admin)
    has_branch = await caller.has_branch(worktree, worktree.ref)
    if not there and not has_branch:
        return await _remove_files(caller, worktree)  # it was never made, or is gone
    if not has_branch:
        return "its branch is not there any more"
    for path in (worktree.path, worktree.admin):
        if path not in there:
            return f"{quote(path, 300)} is not there any more"
    tip = await _commit_of(caller, worktree, worktree.ref)
    head = await _commit_of(caller, worktree, f"worktrees/{worktree.name}/HEAD")
    why = await _commits(caller, worktree, tip, head) or await _files(caller, worktree, head)
    if why is not None:
        return why
    # first: if somebody has committed meanwhile, all of it stays
    code, text = await _delete_branch(caller, worktree, tip)
    if code:
        return f"its branch could not be deleted: {_said(text)}"
    return await _remove_files(caller, worktree)


async def _remove_files(caller: _Caller, worktree: Worktree) -> str | None:
    """By path, not by git: what git reads about it is the child's to write."""
    paths = (worktree.path, worktree.admin, worktree.below)
    code, text = await caller.call("rm", "-rf", "--", *paths)
    return f"not all of it could be removed: {_said(text)}" if code else None


async def _commit_of(caller: _Caller, worktree: Worktree, name: str) -> str:
    return _object_id(
        await caller.demand(
            f"the commit of {name}",
            *("git", "rev-parse", "--verify", "--quiet", name + "^{commit}"),
            GIT_DIR=worktree.common,
        )
    )


async def _commits(caller: _Caller, worktree: Worktree, tip: str, head: str) -> str | None:
    """Whether a commit would be lost, or could be."""
    text = await caller.demand(
        "the log of HEAD",
        *("git", "rev-list", f"--max-count={_LOG_MAX + 1}", "--walk-reflogs"),
        *(f"worktrees/{worktree.name}/HEAD", "--"),
        GIT_DIR=worktree.common,
    )
    logged = [_object_id(line) for line in text.splitlines()]
    if len(logged) > _LOG_MAX:
        return f"its HEAD has been at more than {_LOG_MAX} commits"
    text = await caller.demand(
        "the commits of the branch",
        *("git", "rev-list", "--count", *dict.fromkeys((tip, head, *logged))),
        *("--not", worktree.base, "--"),
        GIT_DIR=worktree.common,
    )
    count = text.removesuffix("\n")
    if not _NUMBER.fullmatch(count):
        return f"git counted no commits, but said {_said(text)}"
    if count != "0":
        return f"{count} commits of it are not in its base {worktree.base[:12]}"
    return None


async def _files(caller: _Caller, worktree: Worktree, head: str) -> str | None:
    """Whether a file would be lost, or could be."""
    below = worktree.below
    found = await caller.script(
        "the worktree",
        _UNSEEN,
        *(worktree.path, f"{worktree.admin}/refs", f"{below}/worktrees", f"{below}/ctx"),
    )
    if found:
        return f"there is more in it than git would show: {_said(found)}"
    found = await caller.demand(
        "the index",
        *("git", "diff-index", "--cached", "--no-ext-diff", "--name-only", head, "--"),
        GIT_DIR=worktree.common,
        GIT_INDEX_FILE=f"{worktree.admin}/index",
    )
    if found:
        return f"what is staged is not committed: {_said(found)}"
    found = await caller.script(
        "the files",
        _FILES,
        head,
        cwd=worktree.path,
        settings=await caller.drivers(worktree.common),
        GIT_DIR=worktree.common,
        GIT_WORK_TREE=worktree.path,
        # the child reaches what is in this directory, but not its entries
        GIT_INDEX_FILE=f"{below}/index",
    )
    if found:
        return f"uncommitted: {_said(found)}"
    return None
