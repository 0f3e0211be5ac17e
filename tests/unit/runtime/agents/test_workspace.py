"""Worktrees of real repositories. A cell is a plain process here; below, a view."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from runtime.agents import workspace
from runtime.agents.gitcalls import RunInside, script
from runtime.agents.workspace import Worktree, WorktreeState
from runtime.cell import cell, networks
from runtime.cell.cell import Places
from runtime.errors import (
    MalformedError,
    TakenError,
    UnsupportedError,
    WrongStateError,
)
from runtime.records.model import Agent
from runtime.texts.mounts import Mount
from tests.worlds.records import World, inside, operator

_T = TypeVar("_T")
_SECONDS = 60
CARRY = str(cell.native("carry"))
_UID = 61000
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "LC_ALL": "C",
    **{f"GIT_{who}_NAME": "somebody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "somebody@localhost" for who in ("AUTHOR", "COMMITTER")},
}

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def execute(words: list[str], cwd: str, variables: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        words,
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def git(directory: Path | str, *words: str) -> str:
    code, text = execute(["git", *words], str(directory), ENVIRONMENT)
    assert code == 0, text
    return text.strip()


def repository(directory: Path) -> Path:
    git(directory.parent, "init", "-q", "-b", "main", directory.name)
    (directory / ".gitignore").write_text("*.o\n")
    (directory / "sub").mkdir()
    (directory / "sub/file").write_text("text\n")
    commit(directory, "tool", "#!/bin/sh\n")
    return directory


def commit(directory: Path, name: str, text: str = "text\n") -> str:
    (directory / name).write_text(text)
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", name)
    return git(directory, "rev-parse", "HEAD")


async def run_here(
    agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
) -> tuple[int, str]:
    """A cell without walls, whose agent sets what it likes."""
    own = {"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "GIT_CONFIG_COUNT": "x"}
    return execute(argv, cwd, {"PATH": "/nowhere:/usr/bin:/bin", **own, **variables})


def call(function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
    return trio.run(partial(function, *arguments))


@pytest.fixture
def parent(world: World) -> Agent:
    made = world.agents.births.create(operator(1000), "boss")
    world.agents.journal.update(made, exec="true")
    return world.live(made)


@pytest.fixture
def child(world: World, parent: Agent) -> Agent:
    made = world.agents.births.create(inside(parent), "kid")
    world.agents.journal.update(made, workspace="worktree")
    return made


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return repository(tmp_path / "repo")


class Kid:
    """A child that works in its repository; without a view it has to name that."""

    def __init__(self, worktree: Worktree) -> None:
        self.worktree = worktree
        self.tree = Path(worktree.path)
        self.repository = Path(worktree.place) / "git"

    def git(self, *words: str) -> str:
        where = {"GIT_DIR": str(self.repository), "GIT_WORK_TREE": str(self.tree)}
        code, text = execute(["git", *words], str(self.tree), {**ENVIRONMENT, **where})
        assert code == 0, text
        return text.strip()

    def commit(self, name: str = "new", text: str = "text\n") -> str:
        (self.tree / name).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", name)
        return self.git("rev-parse", "HEAD")

    def object(self, name: str) -> Path:
        """The loose object of a revision."""
        found = self.git("rev-parse", name)
        return self.repository / "objects" / found[:2] / found[2:]


@pytest.fixture
def make(parent: Agent, child: Agent) -> Callable[..., Worktree]:
    def make(root: Path, run: RunInside = run_here, covered: tuple[str, ...] = ()) -> Worktree:
        planned = call(workspace.plan, run, parent, child, str(root))
        return call(workspace.add, run, parent, planned, CARRY, covered)

    return make


@pytest.fixture
def made(make: Callable[..., Worktree], repo: Path) -> Worktree:
    return make(repo)


@pytest.fixture
def kid(made: Worktree) -> Kid:
    return Kid(made)


Take = Callable[..., Worktree]


@pytest.fixture
def take(parent: Agent) -> Take:
    def take(
        worktree: Worktree,
        run: RunInside = run_here,
        settled: list[str] | None = None,
        live: bool = False,
    ) -> Worktree:
        names = None if live else settled or []
        program = str(cell.native("gather"))
        taken = partial(workspace.take, settled=names)
        return call(taken, run, parent, worktree, program)

    return take


@pytest.fixture
def discard(parent: Agent) -> Callable[..., None]:
    def discard(worktree: Worktree, run: RunInside = run_here) -> None:
        call(workspace.discard, run, parent, worktree)

    return discard


def branches(repo: Path) -> list[str]:
    return git(repo, "branch", "--format=%(refname:short)").split()


# making one


def test_it_is_a_repository_of_its_own(repo: Path, kid: Kid) -> None:
    worktree = kid.worktree
    assert kid.git("branch", "--show-current") == "ctx/kid"
    assert kid.git("rev-parse", "HEAD") == worktree.base == git(repo, "rev-parse", "main")
    assert kid.git("status", "--porcelain", "--ignored") == ""
    assert (kid.tree / "tool").read_text() == "#!/bin/sh\n"
    assert git(repo, "worktree", "list").count("\n") == 0
    assert branches(repo) == ["ctx/kid", "main"]
    assert not [path for path in (kid.repository / "objects").rglob("*") if path.suffix == ".pack"]


def test_the_parent_does_not_see_it_as_untracked(repo: Path, made: Worktree) -> None:
    assert git(repo, "status", "--porcelain", "--ignored") == ""
    assert git(repo, "branch", "--show-current") == "main"


def test_the_record_can_be_kept_as_values(made: Worktree) -> None:
    assert Worktree.load(made.dump()) == made
    kept = made.kept("so")
    assert Worktree.load(kept.dump()) == kept


def test_the_record_of_an_earlier_version_can_be_read(made: Worktree) -> None:
    assert Worktree.load({**made.dump(), "earlier": False}) == made


def test_it_begins_where_the_parent_is(make: Callable[..., Worktree], repo: Path) -> None:
    git(repo, "checkout", "-q", "-b", "topic")
    here = commit(repo, "new")
    assert make(repo).base == here


def test_a_workspace_reached_by_a_link(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(repo)
    assert make(link).root == str(repo)


def test_a_linked_worktree_as_the_parents_workspace(
    make: Callable[..., Worktree], take: Take, repo: Path, tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    git(repo, "worktree", "add", "-q", "-b", "other", str(linked))
    here = commit(linked, "new")
    found = make(linked)
    assert (found.common, found.base) == (f"{repo}/.git", here)
    assert git(linked, "status", "--porcelain") == ""
    assert take(found).state is WorktreeState.FETCHED


def test_a_repository_kept_elsewhere(
    make: Callable[..., Worktree], take: Take, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q", "--separate-git-dir", str(tmp_path / "kept"), "work")
    commit(tmp_path / "work", "file")
    found = make(tmp_path / "work")
    assert found.common == str(tmp_path / "kept")
    new = Kid(found).commit()
    assert take(found).commit == new == git(tmp_path / "work", "rev-parse", "ctx/kid")


def test_a_directory_of_a_repository(make: Callable[..., Worktree], repo: Path) -> None:
    found = make(repo / "sub")
    assert (found.root, found.common) == (f"{repo}/sub", f"{repo}/.git")
    assert (Path(found.path) / "sub/file").exists()


def test_a_bare_repository(
    make: Callable[..., Worktree], take: Take, repo: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repo), "bare")
    found = make(tmp_path / "bare")
    assert found.common == str(tmp_path / "bare")
    assert take(found).state is WorktreeState.FETCHED


def test_a_repository_with_longer_ids(
    make: Callable[..., Worktree], take: Take, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q", "--object-format=sha256", "long")
    commit(tmp_path / "long", "file")
    found = make(tmp_path / "long")
    assert len(found.base) == 64
    new = Kid(found).commit()
    taken = take(found)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, new)


def test_what_it_borrows_from(
    make: Callable[..., Worktree], take: Take, repo: Path, tmp_path: Path
) -> None:
    """The eldest first, so that git reads each of them at once."""
    git(tmp_path, "clone", "-q", "--shared", str(repo), "second")
    git(tmp_path, "clone", "-q", "--shared", str(tmp_path / "second"), "third")
    here = commit(tmp_path / "third", "more")
    found = make(tmp_path / "third")
    assert set(found.objects[:-1]) == {f"{tmp_path}/second/.git/objects", f"{repo}/.git/objects"}
    assert found.objects[-1] == f"{tmp_path}/third/.git/objects"
    assert Kid(found).git("rev-parse", "HEAD") == here
    new = Kid(found).commit()
    assert take(found).commit == new


def test_it_commits_as_who_its_parent_does(repo: Path, make: Callable[..., Worktree]) -> None:
    git(repo, "config", "user.name", 'A "person" # of sorts')
    git(repo, "config", "filter.x.clean", "false")
    kid = Kid(make(repo))
    assert kid.git("config", "user.name") == 'A "person" # of sorts'
    config = (kid.repository / "config").read_text()
    assert "filter" not in config and config == (Path(kid.worktree.place) / "config").read_text()


def test_no_repository(make: Callable[..., Worktree], tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=f'"{tmp_path}".*is not in a git repository'):
        make(tmp_path)


def test_no_commit(make: Callable[..., Worktree], tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "empty")
    with pytest.raises(MalformedError, match="no commit yet"):
        make(tmp_path / "empty")


def test_a_shallow_clone(make: Callable[..., Worktree], repo: Path, tmp_path: Path) -> None:
    commit(repo, "more")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repo}", "shallow")
    with pytest.raises(UnsupportedError, match="is shallow"):
        make(tmp_path / "shallow")


def test_a_partial_clone(make: Callable[..., Worktree], repo: Path, tmp_path: Path) -> None:
    git(repo, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--filter=blob:none", f"file://{repo}", "partial")
    with pytest.raises(UnsupportedError, match="is a partial clone"):
        make(tmp_path / "partial")


def test_no_such_workspace(make: Callable[..., Worktree], tmp_path: Path) -> None:
    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        return await run_here(agent, ["env", "-C", cwd, *argv], "/", variables)

    with pytest.raises(WrongStateError, match="No such file"):
        make(tmp_path / "missing", run)


@pytest.mark.parametrize("branch", ["ctx/kid", "ctx"])
def test_the_branch_is_there(make: Callable[..., Worktree], repo: Path, branch: str) -> None:
    git(repo, "branch", branch)
    git(repo, "pack-refs", "--all")
    with pytest.raises(TakenError, match=f'"{branch}" already exists'):
        make(repo)


def test_the_branch_comes_in_between(
    parent: Agent, child: Agent, repo: Path, discard: Callable[..., None]
) -> None:
    planned = call(workspace.plan, run_here, parent, child, str(repo))
    other = commit(repo, "new")
    git(repo, "branch", "ctx/kid")
    with pytest.raises(WrongStateError, match="already exists"):
        call(workspace.add, run_here, parent, planned, CARRY)
    discard(planned)
    assert git(repo, "rev-parse", "ctx/kid") == other


def test_something_is_in_its_place(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path
) -> None:
    (repo / ".git/ctx").mkdir()
    (repo / ".git/ctx/kid").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TakenError, match="already exists"):
        make(repo)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["a..b", "a.", "a.lock"])
def test_names_that_git_does_not_take(world: World, parent: Agent, repo: Path, name: str) -> None:
    child = world.agents.births.create(inside(parent), name)
    with pytest.raises(MalformedError, match="branch of a worktree"):
        call(workspace.plan, run_here, parent, child, str(repo))


@pytest.mark.parametrize("programs", [(), ("sh",)])
def test_no_git_in_the_view(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path, programs: tuple[str, ...]
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for program in programs:
        (bin_ / program).symlink_to(f"/usr/bin/{program}")

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        argv = [f"PATH={bin_}" if word.startswith("PATH=") else word for word in argv]
        return await run_here(agent, argv, cwd, variables)

    with pytest.raises(UnsupportedError, match="needs git"):
        make(repo, run)


@pytest.mark.parametrize("claim", ["relative", "/a/../b", "", "/a/\x01"])
def test_a_path_that_is_none_is_not_believed(
    make: Callable[..., Worktree], repo: Path, claim: str
) -> None:
    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        code, text = await run_here(agent, argv, cwd, variables)
        return code, text.replace(f"=common {repo}/.git\n", f"=common {claim}\n")

    with pytest.raises(MalformedError):
        make(repo, run)


def test_a_path_of_two_lines_is_refused(make: Callable[..., Worktree], tmp_path: Path) -> None:
    (tmp_path / "two\nlines").mkdir()
    with pytest.raises(WrongStateError, match="control characters"):
        make(repository(tmp_path / "two\nlines/repo"))


def test_what_fails_half_way_can_be_taken_away(
    make: Callable[..., Worktree], discard: Callable[..., None], parent: Agent, child: Agent,
    repo: Path,
) -> None:  # fmt: skip
    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        code, text = await run_here(agent, argv, cwd, variables)
        return (1, "it\nbroke\x1b[") if any("reset" in word for word in argv) else (code, text)

    planned = call(workspace.plan, run_here, parent, child, str(repo))
    with pytest.raises(WrongStateError, match=r'"it broke\\x1b\['):
        call(workspace.add, run, parent, planned, CARRY)
    discard(planned)
    assert branches(repo) == ["main"]
    make(repo)


# what git does not keep


def _told(text: str) -> list[str]:
    return text.split(", ") if text else []


@pytest.fixture
def full(repo: Path) -> Path:
    """A repository with something of everything that a clone of it does not have."""
    git(repo.parent, "init", "-q", "-b", "main", "inner")
    commit(repo.parent / "inner", "file")
    git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", "../inner", "lib/in")
    (repo / ".gitattributes").write_text("*.bin filter=lfs\n*.txt text\n")
    (repo / ".gitignore").write_text(".env\n*.o\ncache/\nconf/*.local\n.ctxfs-copy\n")
    (repo / "a.bin").write_text("pointer\n")
    (repo / "conf").mkdir()
    (repo / "conf/plain").write_text("text\n")
    (repo / "big").symlink_to(".git/annex/objects/x")
    commit(repo, "more")
    git(repo, "tag", "v1")
    git(repo, "config", "commit.gpgSign", "false")
    git(repo, "config", "http.https://user:secret@host/.extraHeader", "x")
    for hook, mode in (("pre-commit", 0o755), ("commit-msg", 0o644), ("pre-push.sample", 0o755)):
        (repo / ".git/hooks" / hook).write_text("#!/bin/sh\n")
        (repo / ".git/hooks" / hook).chmod(mode)
    (repo / "cache/deep").mkdir(parents=True)
    for name in (".env", "conf/it.local", "conf/other.local", "cache/deep/x", "x.o", "sub/y.o"):
        (repo / name).write_text(f"{name} of the parent\n")
    (repo / "conf/it.local").chmod(0o750)
    os.utime(repo / ".env", (1000, 1000))
    (repo / "tool").write_text("changed\n")
    (repo / "notes").write_text("not ignored\n")
    return repo


def test_what_the_child_lacks_is_told(make: Callable[..., Worktree], full: Path) -> None:
    found = make(full)
    assert found.differs == {
        "copied": "",
        "not_copied": ".env, cache/, conf/it.local, conf/other.local, sub/y.o, x.o",
        "uncommitted": "tool, notes",
        "empty_submodules": "lib/in",
        "hooks_not_run": "pre-commit",
        "filters_not_run": "lfs (1)",
        "links_into_git": "big",
        "refs_left_out": "main, v1",
        "config_left_out": "commit, http",
    }
    text = found.describe()
    assert "\nempty_submodules=lib/in\nhooks_not_run=pre-commit\n" in text
    assert Worktree.load(found.dump()) == found
    assert not (Path(found.place) / "copy").exists()
    assert git(full, "status", "--porcelain").split() == ["M", "tool", "??", "notes"]


def test_nothing_is_told_of_what_is_whole(made: Worktree) -> None:
    assert made.differs == {**dict.fromkeys(workspace.DIFFERENCES, ""), "refs_left_out": "main"}


def test_only_some_of_much_is_told(make: Callable[..., Worktree], repo: Path) -> None:
    for number in range(200):
        (repo / f"{number:03}.o").write_text("x")
    (repo / ("é" * 120 + ".o")).write_text("x")
    told = make(repo).differs["not_copied"]
    assert told == ", ".join(f"{number:03}.o" for number in range(16)) + " and 185 more"


def test_names_that_are_too_long_are_counted(make: Callable[..., Worktree], repo: Path) -> None:
    for number in range(3):
        (repo / ("é" * 120 + f"{number}.o")).write_text("x")
    told = make(repo).differs["not_copied"]
    assert told.startswith("é" * 100) and told.endswith(" and 2 more")


def test_ignored_files_are_copied(
    make: Callable[..., Worktree], take: Take, full: Path
) -> None:
    patterns = "# settings\n.env\nconf/*\n!other.local\ncache/\nnotes\ntool\nnone\n"
    (full / ".ctxfs-copy").write_text(patterns)
    worktree = make(full)
    assert _told(worktree.differs["copied"]) == [".env", "cache/deep/x", "conf/it.local"]
    assert _told(worktree.differs["not_copied"]) == [
        ".ctxfs-copy", "conf/other.local", "sub/y.o", "x.o",
    ]  # fmt: skip
    kid = Kid(worktree)
    for name in (".env", "cache/deep/x", "conf/it.local"):
        assert (kid.tree / name).read_text() == f"{name} of the parent\n"
    assert (kid.tree / ".env").stat().st_mtime == 1000
    assert (kid.tree / "conf/it.local").stat().st_mode & 0o7777 == 0o750
    assert (kid.tree / "tool").read_text() == "#!/bin/sh\n", "what git has is git's"
    assert kid.git("status", "--porcelain") == ""
    assert take(worktree).state is WorktreeState.FETCHED
    # what the parent's becomes is its own matter
    (full / ".env").write_text("other\n")
    (full / ".ctxfs-copy").unlink()
    assert take(worktree).state is WorktreeState.FETCHED
    os.utime(kid.tree / ".env")
    (kid.tree / "cache/deep/x").unlink()
    assert take(worktree).state is WorktreeState.FETCHED, "a lost copy is no loss"
    before = os.stat(kid.tree / ".env")
    (kid.tree / ".env").write_text("." * (before.st_size - 1) + "\n")
    os.utime(kid.tree / ".env", ns=(before.st_atime_ns, before.st_mtime_ns))
    taken = take(worktree)
    assert taken.state is WorktreeState.KEPT and "uncommitted: .env;" in taken.reason


def test_what_became_of_a_copy_is_judged(
    make: Callable[..., Worktree], take: Take, full: Path
) -> None:
    """Committed, it is as it was committed; in the place of its directory there may be a file."""
    (full / ".ctxfs-copy").write_text(".env\ncache\n")
    kid = Kid(make(full))
    (kid.tree / ".env").write_text("of the child\n")
    shutil.rmtree(kid.tree / "cache")
    (kid.tree / "cache").write_text("of the child\n")
    kid.git("add", "-f", ".env", "cache")
    kid.git("commit", "-q", "-m", "Copies")
    assert take(kid.worktree).state is WorktreeState.FETCHED
    (kid.tree / ".env").write_text(".env of the parent\n")
    taken = take(kid.worktree)
    assert taken.state is WorktreeState.KEPT and "uncommitted: .env;" in taken.reason


def test_names_of_files_that_are_copied(make: Callable[..., Worktree], repo: Path) -> None:
    names = (":x.o", "a b.o", "two\nlines.o", "-z.o", "\udcff.o", "é.o", ":(top)y.o", "*.o", "'.o")
    for name in names:
        (repo / name).write_text(name, errors="surrogateescape")
    (repo / ".ctxfs-copy").write_text("*.o\n")
    worktree = make(repo)
    for name in names:
        path = Path(worktree.path) / name
        assert path.read_text(errors="surrogateescape") == name
    assert worktree.differs["not_copied"] == ""
    assert all(char.isprintable() for char in worktree.differs["copied"])


def test_copies_are_handed_down(
    make: Callable[..., Worktree], take: Take, parent: Agent, world: World, repo: Path
) -> None:
    """The files of a child are the workspace that its own child's are made of."""
    (repo / ".ctxfs-copy").write_text("*.o\n")
    commit(repo, "other")
    (repo / "x.o").write_text("x")
    kid = Kid(make(repo))
    (kid.tree / ".git").write_text(f"gitdir: {kid.repository}\n")
    low = world.agents.births.create(inside(parent), "low")
    found = call(workspace.plan, run_here, parent, low, str(kid.tree))
    found = call(workspace.add, run_here, parent, found, CARRY)
    assert (Path(found.path) / "x.o").read_text() == "x"
    assert (found.differs["copied"], found.differs["refs_left_out"]) == ("x.o", "")


def test_nothing_above_the_workspace_is_copied(
    make: Callable[..., Worktree], full: Path
) -> None:
    """The list is that of the repository, whose patterns begin at its top."""
    (full / ".ctxfs-copy").write_text("*.o\n.env\n/other.local\n")
    worktree = make(full / "sub")
    tree = Path(worktree.path)
    assert (tree / "sub/y.o").exists() and not (tree / "x.o").exists()
    assert not (tree / ".env").exists()
    assert (worktree.differs["copied"], worktree.differs["not_copied"]) == ("sub/y.o", "")
    worktree = make_of(make, full / "conf", worktree)
    assert worktree.differs["not_copied"] == "conf/it.local, conf/other.local"


def make_of(make: Callable[..., Worktree], root: Path, before: Worktree) -> Worktree:
    """Another one, of the same name."""
    shutil.rmtree(before.place)
    git(root, "branch", "-q", "-D", "ctx/kid")
    return make(root)


def test_a_work_tree_elsewhere_is_not_looked_at(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for where in (elsewhere, repo):
        (where / ".ctxfs-copy").write_text("*.o\n")
        (where / "x.o").write_text("x")
    git(repo, "config", "core.worktree", str(elsewhere))
    worktree = make(repo)
    assert not (Path(worktree.path) / "x.o").exists()
    git(repo, "config", "core.worktree", "/")
    worktree = make_of(make, repo, worktree)
    assert not (Path(worktree.path) / "x.o").exists()
    assert not list(Path(worktree.path).glob("**/*.o"))


@pytest.mark.parametrize("key", ["core.splitIndex", "core.untrackedCache", "index.sparse"])
def test_an_index_that_is_kept_otherwise(
    make: Callable[..., Worktree], full: Path, key: str
) -> None:
    git(full, "config", key, "true")
    if key == "index.sparse":
        git(full, "sparse-checkout", "set", "sub", "--sparse-index")
    git(full, "add", "notes")
    (full / ".ctxfs-copy").write_text("*.o\n")
    worktree = make(full)
    assert {"sub/y.o"} <= set(_told(worktree.differs["copied"]))
    assert set(_told(worktree.differs["uncommitted"])) == {"notes", "tool"}
    assert (Path(worktree.path) / "conf/plain").exists(), "sparse is its parent's alone"


def test_hooks_elsewhere(make: Callable[..., Worktree], repo: Path) -> None:
    """As husky has them."""
    (repo / ".husky/_").mkdir(parents=True)
    for name in ("pre-push", "husky.sh"):
        (repo / ".husky/_" / name).write_text("#!/bin/sh\n")
        (repo / ".husky/_" / name).chmod(0o755)
    git(repo, "config", "core.hooksPath", ".husky/_")
    git(repo, "config", "hook.mine.command", "true")
    assert make(repo / "sub").differs["hooks_not_run"] == "pre-push, hook.mine.command"


def test_what_is_not_looked_at_in_time(
    make: Callable[..., Worktree], repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_LACKS", "say count copied:2; exec sleep 60\n")
    monkeypatch.setattr(workspace, "_LACKS", script() + workspace._LACKS)
    monkeypatch.setattr(workspace, "_LOOKING", 1)
    worktree = make(repo)
    assert worktree.differs["unknown"] == "not all was looked at: it took more than 1 s"
    assert worktree.differs["copied"] == "2"


# hostile workspaces: others may change what is copied while it is


def _link(repo: Path, secret: Path) -> str:
    (repo / "x.o").symlink_to(secret)
    return "x.o (no link is followed)"


def _link_above(repo: Path, secret: Path) -> str:
    """Git lists no file behind it: it was a directory a moment ago."""
    (repo / "cache").symlink_to(secret.parent)
    return ""


def _fifo_in_place(repo: Path, secret: Path) -> str:
    os.mkfifo(repo / "x.o")
    return ""


def _linked_list(repo: Path, secret: Path) -> str:
    (repo / ".ctxfs-copy").rename(secret.parent / "list")
    (repo / ".ctxfs-copy").symlink_to(secret.parent / "list")
    (repo / "x.o").write_text("x")
    return ".ctxfs-copy (no link is followed), x.o"


def _list_that_is_a_fifo(repo: Path, secret: Path) -> str:
    (repo / ".ctxfs-copy").unlink()
    os.mkfifo(repo / ".ctxfs-copy")
    (repo / "x.o").write_text("x")
    return ".ctxfs-copy (not a regular file), x.o"


def _patterns_that_lead_out(repo: Path, secret: Path) -> str:
    (repo / ".ctxfs-copy").write_text(f"../*\n../secret\n{secret}\n/..\n.git/\n.git/config\n")
    (repo / ".gitignore").write_text("*\n")
    return ""


def _covered(repo: Path, secret: Path) -> str:
    (repo / "cache").mkdir()
    (repo / "cache/x.o").write_text("x")
    (repo.parent / "by-a-link").symlink_to(repo)
    return "cache/x.o (not in the child's view)"


def _in_the_way(repo: Path, secret: Path) -> str:
    """Where the branch has a link, the parent has a directory now."""
    (repo / "cache").symlink_to(secret.parent)
    git(repo, "add", "cache")
    git(repo, "commit", "-q", "-m", "cache")
    (repo / "cache").unlink()
    (repo / "cache").mkdir()
    (repo / "cache/secret.o").write_text("x")
    return "cache/secret.o (a link or a file is where a directory should be)"


HOSTILE_TREES: dict[str, Callable[[Path, Path], str]] = {
    "a link": _link,
    "a link above": _link_above,
    "a FIFO": _fifo_in_place,
    "a list that is a link": _linked_list,
    "a list that is a FIFO": _list_that_is_a_fifo,
    "patterns that lead out": _patterns_that_lead_out,
    "what the child has not": _covered,
    "a link in the branch": _in_the_way,
}


@pytest.mark.parametrize("what", HOSTILE_TREES)
def test_nothing_else_is_copied(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path, what: str
) -> None:
    secret = tmp_path / "outside/secret"
    secret.parent.mkdir()
    secret.write_text("secret")
    (repo / ".ctxfs-copy").write_text("*.o\ncache/\n")
    commit(repo, "other")
    told = HOSTILE_TREES[what](repo, secret)
    worktree = make(repo, covered=(str(tmp_path / "by-a-link/cache"),) if "has not" in what else ())
    if what != "patterns that lead out":
        assert worktree.differs["not_copied"] == told
    files = [path for path in Path(worktree.path).rglob("*") if path.is_file()]
    assert "secret" not in [path.read_text() for path in files if not path.is_symlink()]
    tracked = {"tool", "other", ".ctxfs-copy", ".gitignore", "sub/file", ".git"}
    assert {str(p.relative_to(worktree.path)) for p in files} <= tracked
    assert not any(path.name in ("x.o", "secret.o") for path in secret.parent.iterdir())


def test_a_filter_is_not_run_on_what_has_changed(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path
) -> None:
    script, marker = _script(tmp_path)
    (repo / ".ctxfs-copy").write_text("*.o\n")
    (repo / "x.o").write_text("x")
    _filter(repo, script, key="clean")
    git(repo, "config", "core.fsmonitor", script)
    (repo / "tool").write_text("#!/bin/no\n")
    worktree = make(repo)
    assert worktree.differs["copied"] == "x.o"
    assert worktree.differs["uncommitted"].startswith("tool, ")
    assert worktree.differs["filters_not_run"].startswith("x (")
    assert not marker.exists()


# hostile repositories: nothing that they name is executed


def _script(directory: Path) -> tuple[str, Path]:
    marker = directory / "executed"
    script = directory / "script"
    script.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    script.chmod(0o755)
    return str(script), marker


def _hooks(repo: Path, script: str) -> None:
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (repo / ".git/hooks" / hook).symlink_to(script)


def _hooks_path(repo: Path, script: str) -> None:
    hooks = repo.parent / "hooks"
    hooks.mkdir()
    (hooks / "reference-transaction").symlink_to(script)
    git(repo, "config", "core.hooksPath", str(hooks))


def _filter(repo: Path, script: str, *, key: str, name: str = "x", extra: str = "") -> None:
    git(repo, "config", f"filter.{name}.required", "true")
    (repo / ".git/info/attributes").write_text(f"* filter={name}\n")
    git(repo, "config", f"filter.{name}.{key}", script)
    for other in {"clean", "smudge"} - {key}:
        git(repo, "config", f"filter.{name}.{other}", "cat")


def _filter_of_the_branch(repo: Path, script: str) -> None:
    (repo / ".git/info/attributes").write_text("* filter=x\n")
    included = repo.parent / "included"
    included.write_text(f'[filter "x"]\n\tsmudge = {script}\n\tclean = {script}\n')
    git(repo, "config", "includeIf.onbranch:ctx/**.path", str(included))


def _fsmonitor(repo: Path, script: str) -> None:
    git(repo, "config", "core.fsmonitor", script)


def _lazy_fetch(repo: Path, script: str) -> None:
    git(repo, "config", "extensions.partialClone", "origin")
    Path(script).write_text(Path(script).read_text().replace("cat", "exit 1"))
    git(repo, "config", "remote.origin.url", f"ext::{script}")
    git(repo, "config", "remote.origin.promisor", "true")
    git(repo, "config", "protocol.ext.allow", "always")
    blob = git(repo, "rev-parse", "HEAD:tool")
    (repo / ".git/objects" / blob[:2] / blob[2:]).unlink()


HOSTILE: dict[str, Callable[[Path, str], None]] = {
    "hooks": _hooks,
    "hooksPath": _hooks_path,
    "smudge": partial(_filter, key="smudge"),
    "clean": partial(_filter, key="clean"),
    "process": partial(_filter, key="process"),
    "a strange name": partial(_filter, key="smudge", name='a=b.c"d'),
    "another name": partial(_filter, key="smudge", name="~"),
    "only on the branch": _filter_of_the_branch,
    "fsmonitor": _fsmonitor,
    "lazy fetch": _lazy_fetch,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_is_executed(
    make: Callable[..., Worktree],
    take: Take,
    discard: Callable[..., None],
    repo: Path,
    tmp_path: Path,
    what: str,
) -> None:
    script, marker = _script(tmp_path)
    HOSTILE[what](repo, script)
    if what == "lazy fetch":
        with pytest.raises(UnsupportedError, match="partial"):
            make(repo)
    else:
        worktree = make(repo)
        kid = Kid(worktree)
        assert (kid.tree / "tool").exists()
        assert not marker.exists()
        os.utime(kid.tree / "tool", (1, 1))
        kid.commit()
        assert take(worktree).state is WorktreeState.FETCHED
        discard(worktree)
    assert not marker.exists()


@pytest.mark.parametrize("what", HOSTILE)
def test_by_others_it_would_be(repo: Path, tmp_path: Path, what: str) -> None:
    """What the test above depends on."""
    script, marker = _script(tmp_path)
    HOSTILE[what](repo, script)
    path = tmp_path / "other"
    words = ["git", "worktree", "add", "-b", "ctx/other", str(path)]
    execute(words, str(repo), ENVIRONMENT)
    if path.exists():
        os.utime(path / "tool", (1, 1))
        execute(["git", "status"], str(path), ENVIRONMENT)
    assert marker.exists()



@pytest.mark.parametrize("name", ["a\tb", "\udcff"])
def test_a_hook_that_cannot_be_named_is_refused(
    make: Callable[..., Worktree], repo: Path, name: str
) -> None:
    """Newer versions of git have hooks in the configuration."""
    with open(repo / ".git/config", "ab") as file:
        file.write(b'[hook "' + os.fsencode(name) + b'"]\n\tcommand = true\n')

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        done = subprocess.run(
            argv, cwd=cwd, env=ENVIRONMENT, capture_output=True, timeout=_SECONDS, check=False
        )
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")

    with pytest.raises(UnsupportedError, match="cannot disable the hook"):
        make(repo, run)
    assert branches(repo) == ["main"]


def test_configured_hooks_are_switched_off(make: Callable[..., Worktree], repo: Path) -> None:
    git(repo, "config", "hook.a=b.command", "true")
    seen = []

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        seen.append(argv)
        return await run_here(agent, argv, cwd, variables)

    make(repo, run)
    assert any(word.endswith("=hook.a=b.enabled") for word in seen[-2])


def test_a_work_tree_set_in_the_configuration_is_left_alone(
    make: Callable[..., Worktree],
    take: Take,
    discard: Callable[..., None],
    repo: Path,
    tmp_path: Path,
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "tool").write_text("mine\n")
    git(repo, "config", "core.worktree", str(precious))
    worktree = make(repo)
    assert (Path(worktree.path) / "tool").read_text() == "#!/bin/sh\n"
    assert take(worktree).state is WorktreeState.FETCHED
    discard(worktree)
    assert [p.name for p in precious.iterdir()] == ["tool"]
    assert (precious / "tool").read_text() == "mine\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another uid")
def test_the_repository_of_another_uid(
    make: Callable[..., Worktree], take: Take, repo: Path
) -> None:
    for path in (repo, repo / ".git"):
        os.chown(path, _UID, _UID)
    code, text = execute(["git", "status"], str(repo), ENVIRONMENT)
    assert code != 0 and "dubious ownership" in text
    assert take(make(repo)).state is WorktreeState.FETCHED


def test_an_alias_is_none(make: Callable[..., Worktree], repo: Path, tmp_path: Path) -> None:
    script, marker = _script(tmp_path)
    for name in ("rev-parse", "update-ref", "reset", "config"):
        git(repo, "config", f"alias.{name}", f"!{script}")
    make(repo)
    assert not marker.exists()


# taking over


def test_nothing_was_done(
    repo: Path, made: Worktree, take: Take, discard: Callable[..., None]
) -> None:
    taken = take(made)
    assert (taken.state, taken.commit, taken.reason) == (WorktreeState.FETCHED, made.base, "")
    assert not (Path(made.place) / "fetch").exists()
    discard(taken)
    assert not os.path.lexists(made.place)
    assert branches(repo) == ["main"]


def test_commits_are_taken_over(
    repo: Path, kid: Kid, take: Take, discard: Callable[..., None]
) -> None:
    kid.commit("one")
    new = kid.commit("two")
    taken = take(kid.worktree)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, new)
    discard(taken)
    assert git(repo, "log", "--format=%s", "ctx/kid").split() == ["two", "one", "tool"]
    git(repo, "fsck", "--strict")
    assert not list((repo / ".git/objects").rglob("*.keep"))
    git(repo, "merge", "-q", "--ff-only", "ctx/kid")
    assert (repo / "two").exists()


def test_commits_are_taken_over_while_it_goes_on(repo: Path, kid: Kid, take: Take) -> None:
    one = kid.commit("one")
    (kid.tree / "dirt").write_text("x")
    taken = take(kid.worktree, live=True)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, one)
    assert git(repo, "rev-parse", "ctx/kid") == one
    (kid.tree / "dirt").unlink()
    two = kid.commit("two")
    taken = take(taken)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, two)


def test_packs_and_packed_refs_are_taken_over(repo: Path, kid: Kid, take: Take) -> None:
    new = kid.commit("one")
    kid.git("gc", "-q")
    assert not (kid.repository / "refs/heads/ctx/kid").exists()
    assert take(kid.worktree).commit == new == git(repo, "rev-parse", "ctx/kid")


def test_it_can_follow_its_parent(repo: Path, kid: Kid, take: Take) -> None:
    """What it merges is borrowed."""
    theirs = commit(repo, "theirs")
    kid.commit("mine")
    kid.git("merge", "-q", "-m", "both", theirs)
    assert take(kid.worktree).state is WorktreeState.FETCHED


def test_it_can_be_moved_to_a_commit_of_its_parent(repo: Path, kid: Kid, take: Take) -> None:
    theirs = commit(repo, "theirs")
    kid.git("merge", "-q", "--ff-only", theirs)
    taken = take(kid.worktree)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, theirs)


def test_again_after_a_death_in_between(repo: Path, kid: Kid, take: Take) -> None:
    """The branch was moved, and nobody knows."""
    new = kid.commit()
    take(kid.worktree)
    taken = take(kid.worktree)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, new)


def test_touched_files_are_the_same_files(kid: Kid, take: Take) -> None:
    os.utime(kid.tree / "tool", (1, 1))
    kid.git("checkout", "-q", "--detach")
    kid.git("checkout", "-q", "-b", "ctx/kid-2")
    assert take(kid.worktree).state is WorktreeState.FETCHED


def test_files_with_converted_line_ends_are_the_same(
    make: Callable[..., Worktree], take: Take, repo: Path
) -> None:
    git(repo, "config", "core.autocrlf", "true")
    (repo / ".gitattributes").write_text("*.txt text eol=crlf\n")
    commit(repo, "a.txt")
    kid = Kid(make(repo))
    assert (kid.tree / "a.txt").read_bytes() == b"text\r\n"
    assert take(kid.worktree).state is WorktreeState.FETCHED


def test_what_is_only_staged_is_no_file(kid: Kid, take: Take) -> None:
    """The index is the child's, and nothing of ours reads it."""
    (kid.tree / "tool").write_text("other\n")
    kid.git("add", "tool")
    (kid.tree / "tool").write_text("#!/bin/sh\n")
    (kid.repository / "index").write_bytes(b"DIRC garbage")
    assert take(kid.worktree).state is WorktreeState.FETCHED


def _untracked(kid: Kid) -> None:
    (kid.tree / "new").write_text("x")


def _ignored(kid: Kid) -> None:
    (kid.tree / "x.o").write_text("x")


def _ignored_by_itself(kid: Kid) -> None:
    (kid.tree / "sub/deep").mkdir()
    (kid.tree / "sub/deep/.gitignore").write_text("*\n")


def _modified(kid: Kid) -> None:
    (kid.tree / "tool").write_text("other\n")


def _same_size_and_time(kid: Kid) -> None:
    before = os.stat(kid.tree / "tool")
    (kid.tree / "tool").write_text("#!/bin/no\n"[: before.st_size])
    os.utime(kid.tree / "tool", ns=(before.st_atime_ns, before.st_mtime_ns))


def _not_looked_at(kid: Kid, flag: str) -> None:
    kid.git("update-index", flag, "tool")
    _modified(kid)


def _deleted(kid: Kid) -> None:
    (kid.tree / "tool").unlink()


def _executable(kid: Kid) -> None:
    (kid.tree / "tool").chmod(0o755)


def _linked(kid: Kid) -> None:
    (kid.tree / "tool").unlink()
    (kid.tree / "tool").symlink_to("sub/file")


def _fifo(kid: Kid) -> None:
    (kid.tree / "tool").unlink()
    os.mkfifo(kid.tree / "tool")


def _unreadable(kid: Kid) -> None:
    (kid.tree / "secret").mkdir()
    (kid.tree / "secret/file").write_text("x")


def _committed_detached(kid: Kid) -> None:
    kid.git("checkout", "-q", "--detach")
    kid.commit()


def _committed_detached_and_left(kid: Kid) -> None:
    _committed_detached(kid)
    kid.git("checkout", "-q", "ctx/kid")


def _committed_and_reset(kid: Kid) -> None:
    kid.commit()
    kid.git("reset", "-q", "--hard", "HEAD~")


def _amended(kid: Kid) -> None:
    kid.commit()
    kid.git("commit", "-q", "--amend", "-m", "better")


def _stashed(kid: Kid) -> None:
    _modified(kid)
    kid.git("stash", "-q")


def _committed_on_another(kid: Kid) -> None:
    kid.git("checkout", "-q", "-b", "ctx/other")
    kid.commit()


def _unborn(kid: Kid) -> None:
    kid.git("checkout", "-q", "--orphan", "ctx/other")
    kid.commit()


def _renamed_branch(kid: Kid) -> None:
    kid.git("branch", "-m", "ctx/other")


def _inner_repository(kid: Kid) -> None:
    repository(kid.tree / "inner")
    (kid.tree / "inner/tool").unlink()


def _hidden_below_git(kid: Kid) -> None:
    (kid.tree / "sub/.git").mkdir()
    (kid.tree / "sub/.git/file").write_text("x")


def _submodule(kid: Kid) -> None:
    inner = repository(kid.tree / "inner")
    kid.git("add", "inner")
    kid.git("commit", "-q", "-m", "inner")
    assert kid.git("ls-files", "-s", "inner").startswith("160000")
    (inner / "new").write_text("x")


def _own_ref(kid: Kid) -> None:
    found = kid.git("commit-tree", "-m", "x", "HEAD^{tree}")
    kid.git("update-ref", "refs/worktree/mine", found)


def _child_of_its_own(kid: Kid) -> None:
    (kid.repository / "ctx/low").mkdir(parents=True)


def _no_repository(kid: Kid) -> None:
    shutil.rmtree(kid.repository)


def _no_objects(kid: Kid) -> None:
    kid.commit()
    shutil.rmtree(kid.repository / "objects")


def _objects_elsewhere(kid: Kid) -> None:
    """They would be read, if what leads there was followed."""
    kid.commit()
    elsewhere = kid.repository.parents[4] / "elsewhere"
    (kid.repository / "objects").rename(elsewhere)
    (kid.repository / "objects").symlink_to(elsewhere)


def _alternates(kid: Kid) -> None:
    kid.commit()
    elsewhere = kid.repository.parents[4] / "elsewhere"
    (kid.repository / "objects").rename(elsewhere)
    (kid.repository / "objects/info").mkdir(parents=True)
    (kid.repository / "objects/info/alternates").write_text(f"{elsewhere}\n")


def _linked_object(kid: Kid) -> None:
    kid.commit()
    path = kid.object("HEAD^{tree}")
    path.rename(kid.repository.parents[4] / "object")
    path.symlink_to(kid.repository.parents[4] / "object")


def _object_that_is_a_fifo(kid: Kid) -> None:
    kid.commit()
    path = kid.object("HEAD^{tree}")
    path.unlink()
    os.mkfifo(path)


def _forge(kid: Kid, name: str, kind: str, text: bytes) -> None:
    """An object in the place of another one."""
    path = kid.object(name)
    header = f"{kind} {len(text)}\0".encode()
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(zlib.compress(header + text))


def _forged_file(kid: Kid) -> None:
    kid.commit("new", "its own\n")
    _forge(kid, "HEAD:new", "blob", b"evil\n")


def _forged_commit(kid: Kid) -> None:
    kid.commit("new")
    text = execute(["git", "cat-file", "commit", "HEAD"], str(kid.tree),
                   {**ENVIRONMENT, "GIT_DIR": str(kid.repository)})[1]  # fmt: skip
    _forge(kid, "HEAD", "commit", text.replace("somebody", "nobody").encode())


def _unsound(kid: Kid) -> None:
    """A tree that names .git, as only a forger makes it."""
    blob = bytes.fromhex(kid.git("rev-parse", "HEAD:tool"))
    text = b"100644 .git\0" + blob
    name = hashlib.sha1(f"tree {len(text)}\0".encode() + text).hexdigest()
    path = kid.repository / "objects" / name[:2] / name[2:]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(f"tree {len(text)}\0".encode() + text))
    kid.git("update-ref", "HEAD", kid.git("commit-tree", "-p", "HEAD", "-m", "x", name))


def _ref(kid: Kid, text: bytes) -> None:
    (kid.repository / "refs/heads/ctx/kid").write_bytes(text)


def _ref_that_is_a_link(kid: Kid) -> None:
    ref = kid.repository / "refs/heads/ctx/kid"
    secret = kid.repository.parents[4] / "secret"
    secret.write_text(ref.read_text())
    ref.unlink()
    ref.symlink_to(secret)


def _ref_below_a_link(kid: Kid) -> None:
    heads = kid.repository / "refs/heads"
    heads.rename(kid.repository.parents[4] / "heads")
    heads.symlink_to(kid.repository.parents[4] / "heads")


def _ref_that_is_a_fifo(kid: Kid) -> None:
    (kid.repository / "refs/heads/ctx/kid").unlink()
    os.mkfifo(kid.repository / "refs/heads/ctx/kid")


def _endless_ref(kid: Kid) -> None:
    with open(kid.repository / "refs/heads/ctx/kid", "r+b") as file:
        file.truncate(1 << 40)


def _endless_packed_refs(kid: Kid) -> None:
    (kid.repository / "refs/heads/ctx/kid").unlink()
    with open(kid.repository / "packed-refs", "wb") as file:
        file.truncate(1 << 40)


def _no_directory(kid: Kid) -> None:
    shutil.rmtree(kid.tree)


_OWN = "of its commits are on no branch here"
_MISSING = "missing, or do not match their names"
_NOT_OURS = "not as ctxd made it"
_NO_REF = 'no branch "ctx/kid"'

KEPT: dict[str, tuple[Callable[[Kid], None], str]] = {
    "untracked": (_untracked, "uncommitted: new"),
    "ignored": (_ignored, "x.o"),
    "ignored by itself": (_ignored_by_itself, "sub/deep/.gitignore"),
    "modified": (_modified, "tool"),
    "same size and time": (_same_size_and_time, "tool"),
    "assumed unchanged": (partial(_not_looked_at, flag="--assume-unchanged"), "tool"),
    "skipped": (partial(_not_looked_at, flag="--skip-worktree"), "tool"),
    "deleted": (_deleted, "tool"),
    "executable": (_executable, "tool"),
    "a link": (_linked, "tool"),
    "a FIFO": (_fifo, "tool"),
    "detached": (_committed_detached, "1 " + _OWN),
    "detached and left": (_committed_detached_and_left, "1 " + _OWN),
    "reset": (_committed_and_reset, "1 " + _OWN),
    "amended": (_amended, "1 " + _OWN),
    "stashed": (_stashed, "2 " + _OWN),
    "another branch": (_committed_on_another, "1 " + _OWN),
    "unborn": (_unborn, "1 " + _OWN),
    "renamed branch": (_renamed_branch, _NO_REF),
    "inner repository": (_inner_repository, "inner"),
    "hidden below .git": (_hidden_below_git, "./sub/.git"),
    "submodule": (_submodule, "inner"),
    "a ref of its own": (_own_ref, "1 " + _OWN),
    "a child of its own": (_child_of_its_own, "worktrees of its own children"),
    "no repository": (_no_repository, _NOT_OURS),
    "no objects": (_no_objects, _MISSING),
    "objects elsewhere": (_objects_elsewhere, _MISSING),
    "alternates": (_alternates, _MISSING),
    "an object that is a link": (_linked_object, _MISSING),
    "an object that is a FIFO": (_object_that_is_a_fifo, _MISSING),
    "a forged file": (_forged_file, "found errors"),
    "a forged commit": (_forged_commit, _MISSING),
    "an unsound tree": (_unsound, "found errors"),
    "a symbolic ref": (partial(_ref, text=b"ref: refs/heads/main\n"), _NO_REF),
    "no id": (partial(_ref, text=b"a" * 39 + b"\n"), _NO_REF),
    "an id of nothing": (partial(_ref, text=b"a" * 40 + b"\n"), _MISSING),
    "an id and more": (partial(_ref, text=b"a" * 40 + b" --all\n"), _NO_REF),
    "a ref that is a link": (_ref_that_is_a_link, _NO_REF),
    "a ref below a link": (_ref_below_a_link, _NO_REF),
    "a ref that is a FIFO": (_ref_that_is_a_fifo, _NO_REF),
    "an endless ref": (_endless_ref, _NO_REF),
    "endless packed refs": (_endless_packed_refs, _NO_REF),
    "no directory": (_no_directory, _NOT_OURS),
}


def _everything(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Of each file its size and what it begins with."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                found[str(path.relative_to(directory))] = (path.stat().st_size, file.read(1 << 16))
    return found


@pytest.mark.parametrize("what", KEPT)
def test_what_could_be_lost_is_kept(repo: Path, kid: Kid, take: Take, what: str) -> None:
    act, why = KEPT[what]
    act(kid)
    before = _everything(kid.tree), _everything(kid.repository)
    taken = take(kid.worktree)
    assert taken.state is WorktreeState.KEPT
    assert why in taken.reason and "write fetch to ctl" in taken.reason
    assert taken.reason.isprintable()
    assert (_everything(kid.tree), _everything(kid.repository)) == before
    git(repo, "fsck", "--strict")
    assert git(repo, "rev-parse", "main") == kid.worktree.base
    assert git(repo, "status", "--porcelain") == ""
    if taken.commit in ("", kid.worktree.base):
        assert git(repo, "rev-parse", "ctx/kid") == kid.worktree.base
    assert not (Path(kid.worktree.place) / "fetch").exists() or not taken.commit


@pytest.mark.skipif(os.geteuid() == 0, reason="reads everything")
def test_what_cannot_be_read_is_kept(kid: Kid, take: Take) -> None:
    _unreadable(kid)
    (kid.tree / "secret").chmod(0)
    try:
        assert take(kid.worktree).state is WorktreeState.KEPT
    finally:
        (kid.tree / "secret").chmod(0o700)


def _moved(repo: Path, base: str) -> None:
    git(repo, "branch", "-f", "ctx/kid", commit(repo, "new"))


def _gone(repo: Path, base: str) -> None:
    git(repo, "branch", "-q", "-D", "ctx/kid")


def _symbolic(repo: Path, base: str) -> None:
    git(repo, "symbolic-ref", "refs/heads/ctx/kid", "refs/heads/main")


def _checked_out(repo: Path, base: str) -> None:
    git(repo, "checkout", "-q", "ctx/kid")


def _checked_out_elsewhere(repo: Path, base: str) -> None:
    git(repo, "worktree", "add", "-q", str(repo.parent / "else"), "ctx/kid")


def _pruned(repo: Path, base: str) -> None:
    """What is borrowed goes if the branch goes: the parent did that to itself."""
    git(repo, "checkout", "-q", "--orphan", "other")
    commit(repo, "new")
    git(repo, "branch", "-q", "-D", "ctx/kid", "main")
    git(repo, "reflog", "expire", "--expire=now", "--all")
    git(repo, "prune", "--expire=now")


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (_moved, "was moved"),
        (_gone, "no longer exists"),
        (_symbolic, "was moved"),
        (_checked_out, "checked out"),
        (_checked_out_elsewhere, "checked out"),
        (_pruned, "no longer exists"),
    ],
)
def test_what_the_parent_did_with_the_branch_is_left_alone(
    repo: Path, kid: Kid, take: Take, act: Callable[[Path, str], None], why: str
) -> None:
    kid.commit("work")
    act(repo, kid.worktree.base)
    refs = git(repo, "for-each-ref")
    taken = take(kid.worktree)
    assert (taken.state, taken.commit) == (WorktreeState.KEPT, "")
    assert why in taken.reason
    assert git(repo, "for-each-ref") == refs
    assert git(repo, "status", "--porcelain") == ""


def test_commits_that_only_the_branch_has_are_not_lost(repo: Path, kid: Kid, take: Take) -> None:
    """Neither what was taken over earlier, nor where the parent was."""
    git(repo, "checkout", "-q", "-b", "topic")
    git(repo, "commit", "-q", "--amend", "-m", "other")
    git(repo, "branch", "-q", "-f", "main")
    kid.git("checkout", "-q", "--orphan", "fresh")
    kid.commit()
    kid.git("branch", "-q", "-f", "ctx/kid")
    kid.git("checkout", "-q", "ctx/kid")
    taken = take(kid.worktree)
    assert taken.state is WorktreeState.KEPT and "would be lost" in taken.reason
    assert git(repo, "rev-parse", "ctx/kid") == kid.worktree.base


def test_once_it_was_mended_it_is_fetched(repo: Path, kid: Kid, take: Take) -> None:
    _untracked(kid)
    taken = take(kid.worktree)
    assert taken.state is WorktreeState.KEPT
    (kid.tree / "new").unlink()
    assert take(taken).state is WorktreeState.FETCHED


def test_once_somebody_has_its_commits_it_is_fetched(repo: Path, kid: Kid, take: Take) -> None:
    _amended(kid)
    taken = take(kid.worktree)
    assert taken.state is WorktreeState.KEPT and taken.commit == kid.git("rev-parse", "HEAD")
    git(repo, "fetch", "-q", str(kid.repository), kid.git("rev-parse", "HEAD@{1}") + ":rescued")
    assert take(taken).state is WorktreeState.FETCHED


def test_once_its_directory_is_gone_it_is_done_with(
    made: Worktree, take: Take, discard: Callable[..., None]
) -> None:
    shutil.rmtree(made.place)
    taken = take(made)
    assert (taken.state, taken.reason) == (WorktreeState.FETCHED, "its directory was removed")
    discard(taken)


def test_one_of_an_earlier_version_is_looked_after_by_hand(
    repo: Path, take: Take, discard: Callable[..., None]
) -> None:
    path = repo / ".git/ctx/kid"
    git(repo, "worktree", "add", "-q", "-b", "ctx/kid", str(path))
    values = {"name": "kid", "root": str(repo), "common": f"{repo}/.git"}
    old = Worktree.load({**values, "base": git(repo, "rev-parse", "HEAD")})
    assert take(old).state is WorktreeState.KEPT
    assert (path / "tool").exists()
    git(repo, "worktree", "remove", "--force", str(path))
    assert take(old).state is WorktreeState.FETCHED


def test_worktrees_of_its_children_that_hold_nothing_go_with_it(kid: Kid, take: Take) -> None:
    _child_of_its_own(kid)
    assert take(kid.worktree, settled=["high", "low"]).state is WorktreeState.FETCHED
    assert take(kid.worktree, settled=["high"]).state is WorktreeState.KEPT


@pytest.mark.parametrize("number", range(2))
def test_whatever_fails_it_is_kept(kid: Kid, take: Take, number: int) -> None:
    """``number`` is the call that fails."""
    kid.commit()
    calls = 0

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise WrongStateError("the cell is gone")
        return await run_here(agent, argv, cwd, variables)

    taken = take(kid.worktree, run)
    assert calls == number + 1
    assert taken.state is WorktreeState.KEPT and taken.reason.startswith("the cell is gone")
    assert take(taken).state is WorktreeState.FETCHED


def test_a_branch_with_commits_stays(
    repo: Path, kid: Kid, take: Take, discard: Callable[..., None]
) -> None:
    kid.commit()
    discard(take(kid.worktree))
    assert branches(repo) == ["ctx/kid", "main"]


def test_what_cannot_be_entered_is_removed_all_the_same(
    made: Worktree, discard: Callable[..., None]
) -> None:
    (Path(made.path) / "sub").chmod(0)
    discard(made)
    assert not os.path.lexists(made.place)


# a hostile child: what it wrote is not obeyed by what looks at it


def _own_configuration(kid: Kid, script: str) -> None:
    """Its own git would obey it, if it could be written there."""
    for key in ("core.fsmonitor", "filter.x.clean", "diff.x.textconv", "alias.cat-file"):
        kid.git("config", key, f"{script} #")
    kid.git("config", "core.hooksPath", str(Path(script).parent))
    (kid.tree / ".gitattributes").write_text("* filter=x diff=x\n")


def _common_directory(kid: Kid, script: str) -> None:
    fake = kid.tree.parents[4] / "fake"
    git(fake.parent, "init", "-q", "--bare", "fake")
    git(fake, "config", "core.fsmonitor", script)
    git(fake, "config", "filter.x.clean", script)
    (kid.repository / "commondir").write_text(str(fake))
    (kid.repository / "config.worktree").write_text(f"[core]\n\tfsmonitor = {script}\n")


def _attributes(kid: Kid, script: str) -> None:
    (kid.repository / "info/attributes").write_text("* filter=x\n")
    (kid.tree / ".gitattributes").write_text("* filter=x\n")


def _own_git(kid: Kid, script: str) -> None:
    (kid.tree / ".git").unlink()
    git(kid.tree, "init", "-q")
    git(kid.tree, "config", "core.fsmonitor", script)


OBEYED: dict[str, Callable[[Kid, str], None]] = {
    "its configuration": _own_configuration,
    "a common directory": _common_directory,
    "attributes": _attributes,
    "a repository of its own": _own_git,
}


@pytest.mark.parametrize("what", OBEYED)
def test_nothing_of_a_childs_is_executed(
    repo: Path, kid: Kid, take: Take, tmp_path: Path, what: str
) -> None:
    script, marker = _script(tmp_path)
    git(repo, "config", "filter.x.clean", script)
    new = kid.commit("work")
    OBEYED[what](kid, script)
    marker.unlink(missing_ok=True)
    for _ in range(2):
        os.utime(kid.tree / "tool", (1, 1))
        taken = take(kid.worktree)
        assert taken.commit == new
        assert not marker.exists()


def test_git_does_not_begin_to_work_in_its_files(kid: Kid, tmp_path: Path) -> None:
    """Where its parent sees them, that is: in the child's view it does."""
    script, marker = _script(tmp_path)
    _own_configuration(kid, script)
    marker.unlink(missing_ok=True)
    code, text = execute(["git", "status"], str(kid.tree), ENVIRONMENT)
    assert code != 0 and "invalid gitfile" in text
    assert not marker.exists()


def test_a_forged_object_of_its_parents_commits_is_not_taken_over(
    repo: Path, kid: Kid, take: Take
) -> None:
    """Git checks no hash when it checks out."""
    _forge(kid, "HEAD:tool", "blob", b"#!/bin/sh\nevil\n")
    kid.git("checkout", "-q", "-f", "HEAD")
    new = kid.commit("work")
    taken = take(kid.worktree)
    git(repo, "fsck", "--strict")
    assert git(repo, "show", "main:tool") == "#!/bin/sh"
    assert taken.commit in ("", new)
    if taken.commit:
        assert git(repo, "show", "ctx/kid:tool") == "#!/bin/sh"


def test_the_parent_collects_its_garbage(repo: Path, kid: Kid, take: Take) -> None:
    """The branch keeps what is borrowed."""
    git(repo, "checkout", "-q", "--orphan", "other")
    commit(repo, "new")
    git(repo, "branch", "-q", "-D", "main")
    git(repo, "reflog", "expire", "--expire=now", "--all")
    git(repo, "gc", "-q", "--prune=now")
    git(repo, "pack-refs", "--all", "--prune")
    kid.git("fsck", "--strict")
    new = kid.commit("work")
    assert kid.git("log", "--format=%s").split() == ["work", "tool"]
    taken = take(kid.worktree)
    assert (taken.state, taken.commit) == (WorktreeState.FETCHED, new)


# the view


def test_what_the_child_sees_of_it() -> None:
    common = "/data/a/w/.git"
    worktree = Worktree(
        name="kid", root="/data/a/w", common=common, base="0" * 40,
        objects=("/other/objects", f"{common}/objects"),
    )  # fmt: skip
    place = f"{common}/ctx/kid"
    assert workspace.binds(worktree) == [
        Mount("/data", "/data", "rw"),
        Mount("/data/a", "/data/a", "rw"),
        Mount("/other", "/other", "rw"),
        Mount("/data/a/w", "/data/a/w", "ro"),
        Mount("/other/objects", "/other/objects", "ro"),
        Mount(f"{place}/git", f"{common}/ctx", "rw"),
        Mount(f"{place}/git/config", f"{common}/ctx/config", "ro"),
        Mount(f"{place}/git/hooks", f"{common}/ctx/hooks", "ro"),
        Mount(f"{place}/git/info", f"{common}/ctx/info", "ro"),
        Mount(f"{place}/work", "/workspace", "rw"),
        Mount(f"{place}/dotgit", "/workspace/.git", "ro"),
    ]


@pytest.mark.parametrize(
    ("root", "common", "first"),
    [
        ("/w", "/w/.git", ["ro /w"]),
        ("/w", "/git/w", ["rw /git", "ro /w", "ro /git/w"]),
        ("/repo/sub", "/repo/.git", ["rw /repo", "ro /repo/sub", "ro /repo/.git"]),
        ("/workspace", "/w/.git/ctx", ["rw /w", "rw /w/.git", "ro /workspace", "ro /w/.git/ctx"]),
        ("/tmp/a/w", "/tmp/a/w/.git", ["ro /tmp/a/w"]),
        ("/bare", "/bare", ["ro /bare"]),
    ],
)
def test_the_parents_workspace_and_repository_are_read_only(
    root: str, common: str, first: list[str]
) -> None:
    found = workspace.binds(Worktree(name="kid", root=root, common=common, base="0" * 40))
    assert [f"{mount.mode} {mount.target}" for mount in found[: len(first)]] == first
    assert found[len(first)].target == f"{common}/ctx"


def test_who_can_have_one(world: World, parent: Agent, child: Agent) -> None:
    workspace.check_possible(child)
    with pytest.raises(MalformedError, match="a root agent"):
        workspace.check_possible(parent)
    world.agents.journal.update(child, life="detached", profile="public_named")
    with pytest.raises(MalformedError, match='life "detached"'):
        workspace.check_possible(child)


# real views, as the cells of agents are made


def as_bubblewrap(view: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    """Operations of view.c as arguments of bwrap(1), which does the same without root."""
    yield from ("--unshare-user", "--unshare-pid", "--as-pid-1")
    for operation in view:
        match operation:
            case ("network",):
                yield "--unshare-net"
            case ("bind", options, _, source, target):
                kind = "--ro-bind" if "r" in options else "--bind"
                yield from (f"{kind}-try" if "t" in options else kind, source, target)
            case ("root", source):
                yield from ("--bind", source, "/")
            case ("tmpfs" | "dir" as word, mode, target):
                yield from ("--perms", mode, f"--{word}", target)
            case ("symlink", text, target):
                yield from ("--symlink", text, target)
            case ("proc" | "dev" as word, target):
                yield from (f"--{word}", target)
            case ("hide", networks.DIRECTORY | "/run/ctxfs/tree"):
                pass  # there is none here
            case ("file" | "memory", *_):
                pass  # git is told of no system configuration here, and nothing is bounded
            case _:
                raise AssertionError(f"{operation}: not in these tests")


class Views:
    """Agents' views, with two directories of the host; no cgroups, no daemon."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        #: by the commands that made them, views that stay: a process in each, that waits
        self._kept: dict[tuple[str, ...], subprocess.Popen[str]] = {}
        self._inside: dict[tuple[str, ...], int] = {}
        #: whether views stay; only root may enter them
        self.keeps = False
        self.data = directory / "data"  # at /data
        (self.data / "run/root").mkdir(parents=True)
        self.mine = directory / "mine"  # at /tmp/mine
        self.mine.mkdir()
        for name in ("carry", "gather"):
            shutil.copy(cell.native(name), self.data / "run/root" / name)
        self.places = Places(
            mount=Path("/ctx"), state=Path("/data/state"), runtime=Path("/data/run")
        )

    def own(self) -> None:
        """All that is there belongs to the agents' uid."""
        if os.geteuid() == 0:
            for path in (self.directory, *self.directory.rglob("*")):
                os.chown(path, _UID, _UID, follow_symlinks=False)

    def command(self, agent: Agent) -> list[str]:
        parent = self.world.agents.registry.parent_of(agent)
        if parent is not None:
            found = cell.plan(self.world.agents, agent, self.places)
            around = self.entering(parent) if self.keeps else self.command(parent)
            return [*around, "bwrap", *as_bubblewrap(found.view), "--"]
        user = [f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups", "--"]
        words = ["setpriv", *user] if os.geteuid() == 0 else []
        words += ["bwrap", "--unshare-user", "--unshare-pid", "--die-with-parent"]
        for name in ("bin", "lib", "lib64", "sbin"):
            if os.path.islink(f"/{name}"):
                words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            else:
                words += ["--ro-bind-try", f"/{name}", f"/{name}"]
        words += ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
        words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        words += ["--bind", str(self.data), "/data", "--bind", str(self.mine), "/tmp/mine"]
        return [*words, "--"]

    def entering(self, agent: Agent) -> list[str]:
        """Into the agent's view as it is kept: each is made once, in that of its parent."""
        command = tuple(self.command(agent))
        if command not in self._kept:
            made = self._kept[command] = subprocess.Popen(
                [*command, "sh", "-c", "echo up; read -r line"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd="/",
            )
            assert made.stdout is not None and made.stdout.readline() == "up\n"
            pid = made.pid  # later, the shell is also the parent of what git leaves behind
            while below := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                pid = int(below[0])
            self._inside[command] = pid
        ids = [f"--setuid={_UID}", f"--setgid={_UID}"]
        target = f"--target={self._inside[command]}"
        return ["nsenter", target, "--user", "--mount", "--pid", *ids, "--"]

    def close(self) -> None:
        """Ends what is in kept views."""
        for made in self._kept.values():
            with made:
                assert made.stdin is not None
                made.stdin.close()

    async def run(
        self, agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        inside = self.entering(agent) if self.keeps else self.command(agent)
        words = [*inside, "env", "-C", cwd, *argv]
        return execute(words, "/", {**ENVIRONMENT, **variables})

    def sh(self, agent: Agent, script: str, cwd: str = "/workspace") -> tuple[int, str]:
        return call(self.run, agent, ["sh", "-ec", script], cwd, {})

    def child(self, parent: Agent, name: str) -> Agent:
        agents = self.world.agents
        self.world.may_create(parent)
        child = agents.births.create(inside(parent), name)
        agents.journal.update(child, workspace="worktree", exec="true")
        root = cell.workspace(agents, parent)
        assert root is not None
        worktree = call(workspace.plan, self.run, parent, child, root)
        covered = agents.authority.covered(child)
        worktree = call(
            workspace.add, self.run, parent, worktree, "/data/run/root/carry", covered
        )
        agents.journal.update(child, worktree=worktree.dump())
        return self.world.live(child)

    def take(self, parent: Agent, child: Agent, *settled: str) -> Worktree:
        assert child.worktree is not None
        worktree = Worktree.load(child.worktree)
        taken = partial(workspace.take, settled=list(settled))
        found = call(taken, self.run, parent, worktree, "/data/run/root/gather")
        self.world.agents.journal.update(child, worktree=found.dump())
        return found


@pytest.fixture
def views(world: World) -> Iterator[Views]:
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    # not below tmp_path, where the agents' uid does not get
    directory = Path(tempfile.mkdtemp(prefix="ctxfs-workspace-"))
    made = Views(world, directory)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory)


@pytest.fixture(params=["inside", "elsewhere"])
def boss(world: World, views: Views, parent: Agent, request: pytest.FixtureRequest) -> Agent:
    """An agent whose repository is /data/src/work, kept there or in /data/git/kept."""
    (views.data / "src").mkdir()
    (views.data / "git").mkdir()
    repo = repository(views.data / "src/work")
    if request.param == "elsewhere":
        (repo / ".git").rename(views.data / "git/kept")
        (repo / ".git").write_text("gitdir: ../../git/kept\n")
    views.own()
    world.agents.journal.update(parent, workspace="explicit_root:/data/src/work")
    return parent


def _log(views: Views, agent: Agent, branch: str, cwd: str) -> list[str]:
    code, text = views.sh(agent, f"git log --format=%s {branch} --", cwd)
    assert code == 0, text
    return text.split()


def test_a_child_commits_on_its_branch(views: Views, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    code, text = views.sh(
        kid,
        """
        test "$PWD" = /workspace
        test "$(git rev-parse --show-toplevel)" = /workspace
        test -z "$(git status --porcelain --ignored)"
        echo more >> tool
        git commit -q -a -m one
        git checkout -q -b mine
        git checkout -q ctx/kid
        git stash list
        git gc -q --prune=now
        git fsck --strict
        git branch --format='%(refname:short)'
        """,
    )
    assert code == 0, text
    assert text.split() == ["ctx/kid", "mine"]
    assert _log(views, kid, "", "/workspace") == ["one", "tool"]
    assert _log(views, boss, "ctx/kid", "/data/src/work") == ["tool"]
    assert views.take(boss, kid).state is WorktreeState.FETCHED
    assert _log(views, boss, "ctx/kid", "/data/src/work") == ["one", "tool"]
    assert views.sh(boss, "git status --porcelain --ignored", "/data/src/work") == (0, "")
    assert views.sh(kid, "git commit -q --allow-empty -m two") == (0, ""), "it can go on"
    script = "git worktree list | wc -l; cd $(git rev-parse --git-common-dir)/ctx/kid/work; git log"
    code, text = views.sh(boss, script, "/data/src/work")
    assert code != 0 and text.startswith("1\n") and "invalid gitfile" in text


FORBIDDEN = {
    "its configuration": 'git config core.fsmonitor "touch /tmp/x"',
    "the file of it": "echo x >> $C/config",
    "the file of it, moved": "rename $C/config $C/config.old",
    "its hooks": "echo x > $C/hooks/post-commit",
    "its hooks, moved": "rename $C/hooks $C/hooks.old",
    "its attributes": "echo x > $C/info/attributes",
    "what leads to its repository": "echo gitdir: /tmp > /workspace/.git",
    "the same, removed": "rm -f /workspace/.git",
    "the same, moved": "rename /workspace/.git /workspace/old",
    "its parent's configuration": "echo x >> $P/config",
    "its parent's hooks": "echo x > $P/hooks/post-commit",
    "its parent's branch": "GIT_DIR=$P git update-ref refs/heads/main HEAD~0 && git -C $P branch x",
    "the branch there": "echo x > $P/refs/heads/ctx/kid",
    "its sibling's branch": "echo x > $P/refs/heads/ctx/sib",
    "its sibling's branch, removed": "rm $P/refs/heads/ctx/sib",
    "packed refs": "echo x > $P/packed-refs",
    "an object of its parent's": "rm -f $P/objects/*/*",
    "a new object there": "mkdir $P/objects/zz",
    "objects, moved": "rename $P/objects $P/old",
    "its parent's HEAD": "echo x > $P/HEAD",
    "its parent's index": "echo x > $P/index",
    "its parent's files": "echo x > /data/src/work/tool",
    "its parent's .git": "rename /data/src/work/.git /data/src/work/old",
    "the workspace": "rename /data/src/work /data/src/old",
    "what is above it": "rename /data/src /data/old",
    "what is above the repository": "rename $(dirname $P) /data/old",
    "its sibling": "ls $P/ctx/sib",
}


def test_what_a_child_cannot_do(views: Views, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    views.child(boss, "sib")
    shared = "C=$(git rev-parse --absolute-git-dir); P=$(dirname $C)\n"
    # mv(1) copies what it cannot rename
    shared += "rename() { perl -e 'rename $ARGV[0], $ARGV[1] or die $!' \"$@\"; }\n"
    assert views.sh(kid, shared + "echo x > /tmp/a; rename /tmp/a /tmp/b; cat /tmp/b") == (0, "x\n")
    before = _everything(views.data)
    for what, forbidden in FORBIDDEN.items():
        code, text = views.sh(kid, shared + forbidden)
        assert code != 0, f"{what}: {text}"
    after = _everything(views.data)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    own = ("ctx/kid/work/", "ctx/kid/git/")
    assert [path for path in changed if not any(name in path for name in own)] == []
    assert not [path for path in changed if path.endswith(("/.git", "git/config"))]


def test_a_child_of_a_child(views: Views, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    views.child(boss, "sib")
    assert views.sh(kid, "echo more >> tool; git commit -q -a -m one")[0] == 0
    low = views.child(kid, "low")
    views.child(kid, "other")
    script = "echo most >> tool; git commit -q -a -m two; git log --format=%s"
    assert views.sh(low, script) == (0, "two\none\ntool\n")
    worktree = Worktree.load(low.worktree or {})
    assert len(worktree.objects) == 2
    for path in ("config", "HEAD", "refs/heads/ctx/kid", "../HEAD", "ctx/config"):
        code, text = views.sh(low, f"echo x > {worktree.common}/{path}")
        assert code != 0, (path, text)
    assert views.sh(kid, "git status --porcelain --ignored") == (0, "")
    said = views.take(boss, kid)
    assert said.state is WorktreeState.KEPT and "its own children" in said.reason
    assert views.take(kid, low).state is WorktreeState.FETCHED
    assert views.sh(kid, "git log --format=%s ctx/low") == (0, "two\none\ntool\n")
    said = views.take(boss, kid, "low", "other")
    assert said.state is WorktreeState.KEPT and "1 of its commits are on no branch" in said.reason
    assert views.sh(kid, "git merge -q --ff-only ctx/low") == (0, "")
    said = views.take(boss, kid, "low", "other")
    assert said.state is WorktreeState.FETCHED
    assert _log(views, boss, "ctx/kid", "/data/src/work") == ["two", "one", "tool"]


@pytest.mark.long
@pytest.mark.parametrize("boss", ["inside"], indirect=True)
def test_as_deep_as_there_are_agents(views: Views, boss: Agent) -> None:
    """Git gives up at the seventh link of a chain of what is borrowed."""
    views.keeps = os.geteuid() == 0  # each costs twice as much to make as the one around it
    line = [boss]
    for number in range(1, 7):
        agent = views.child(line[-1], f"gen{number}")
        assert views.sh(agent, f"git commit -q --allow-empty -m {number}") == (0, "")
        line.append(agent)
    deepest = views.child(line[-1], "gen7")
    line.append(deepest)
    script = "git commit -q --allow-empty -m 7; git log --format=%s; git fsck --strict"
    assert views.sh(deepest, script) == (
        0, "".join(f"{number}\n" for number in range(7, 0, -1)) + "tool\n",
    )  # fmt: skip
    # meanwhile others above tidy up
    for agent in (boss, line[3]):
        cwd = "/data/src/work" if agent is boss else "/workspace"
        assert views.sh(agent, "git gc -q --prune=now", cwd) == (0, ""), agent.name
    assert views.sh(deepest, "git fsck --strict; git commit -q --allow-empty -m last") == (0, "")
    for child, parent in zip(reversed(line), list(reversed(line))[1:], strict=False):
        settled = [each.name for each in line[line.index(child) + 1 :][:1]]
        taken = views.take(parent, child, *settled)
        assert taken.state is WorktreeState.FETCHED, (child.name, taken.reason)
        if parent is not boss:
            assert views.sh(parent, f"git merge -q --ff-only ctx/{child.name}") == (0, "")
    log = _log(views, boss, "ctx/gen1", "/data/src/work")
    assert log == ["last", *(str(number) for number in range(7, 0, -1)), "tool"]


def test_a_child_that_inherits_a_worktree(views: Views, world: World, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    world.may_create(kid)
    heir = world.agents.births.create(inside(kid), "heir")
    world.agents.journal.update(heir, exec="true")
    world.live(heir)
    assert views.sh(heir, "echo more >> tool; git commit -q -a -m one")[0] == 0
    assert _log(views, kid, "", "/workspace") == ["one", "tool"]
    assert views.sh(heir, "echo x >> $(git rev-parse --git-dir)/config")[0] != 0


def test_a_repository_below_tmp(views: Views, world: World, parent: Agent) -> None:
    repository(views.mine / "work")
    views.own()
    world.agents.journal.update(parent, workspace="explicit_root:/tmp/mine/work")
    kid = views.child(parent, "kid")
    world.may_create(kid)
    heir = world.agents.births.create(inside(kid), "heir")
    world.agents.journal.update(heir, exec="true")
    world.live(heir)
    low = views.child(heir, "low")
    for agent in (kid, heir, low):
        assert views.sh(agent, "echo more >> tool; git commit -q -a -m one") == (0, "")
        assert views.sh(agent, "echo $(ls /tmp) $(ls /tmp/mine)") == (0, "home mine work\n")
        for path in (".git/config", "tool"):
            assert views.sh(agent, f"echo x > /tmp/mine/work/{path}")[0] != 0
    assert views.take(heir, low).state is WorktreeState.FETCHED
    assert views.sh(kid, "git log --format=%s") == (0, "one\none\ntool\n")


def test_a_view_in_which_there_can_be_no_workspace(
    views: Views, world: World, boss: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = views.command

    def command(agent: Agent) -> list[str]:
        words = made(agent)
        return [*words[:-1], "--remount-ro", "/", "--"]

    monkeypatch.setattr(views, "command", command)
    with pytest.raises(UnsupportedError, match="no /workspace"):
        views.child(boss, "kid")
