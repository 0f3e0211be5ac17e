"""Worktrees of real repositories. A cell is a plain process here; below, a view."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from runtime import cell, workspace
from runtime.authority.mounts import Mount
from runtime.cell import Places
from runtime.errors import (
    CtxError,
    MalformedError,
    TakenError,
    UnsupportedError,
    WrongStateError,
)
from runtime.model import Agent
from runtime.workspace import Run, Worktree
from tests.unit.fakes import World, inside, operator, world_in

_T = TypeVar("_T")
_SECONDS = 60
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
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path / "world") as made:
        yield made


@pytest.fixture
def parent(world: World) -> Agent:
    made = world.agents.create(operator(1000), "boss")
    world.agents.update(made, exec="true")
    return world.live(made)


@pytest.fixture
def child(world: World, parent: Agent) -> Agent:
    made = world.agents.create(inside(parent), "kid")
    world.agents.update(made, workspace="worktree")
    return made


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return repository(tmp_path / "repo")


@pytest.fixture
def make(parent: Agent, child: Agent) -> Callable[..., Worktree]:
    def make(root: Path, run: Run = run_here) -> Worktree:
        planned = call(workspace.plan, run, parent, child, str(root))
        call(workspace.add, run, parent, planned)
        return planned

    return make


@pytest.fixture
def made(make: Callable[..., Worktree], repo: Path) -> Worktree:
    return make(repo)


@pytest.fixture
def remove(parent: Agent) -> Callable[..., str | None]:
    def remove(worktree: Worktree, run: Run = run_here) -> str | None:
        return call(workspace.remove, run, parent, worktree)

    return remove


# making one


def test_it_is_a_worktree_on_a_branch_of_its_own(repo: Path, made: Worktree) -> None:
    assert git(made.path, "branch", "--show-current") == "ctx/kid"
    assert git(made.path, "rev-parse", "HEAD") == made.base == git(repo, "rev-parse", "main")
    assert git(made.path, "status", "--porcelain", "--ignored") == ""
    assert (Path(made.path) / "tool").read_text() == "#!/bin/sh\n"
    assert made.path in git(repo, "worktree", "list")


def test_the_parent_does_not_see_it_as_untracked(repo: Path, made: Worktree) -> None:
    assert git(repo, "status", "--porcelain", "--ignored") == ""
    assert git(repo, "branch", "--show-current") == "main"


def test_the_record_can_be_kept_as_values(made: Worktree) -> None:
    assert Worktree.load(made.dump()) == made


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
    make: Callable[..., Worktree], repo: Path, tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    git(repo, "worktree", "add", "-q", "-b", "other", str(linked))
    here = commit(linked, "new")
    found = make(linked)
    assert (found.common, found.base) == (f"{repo}/.git", here)
    assert git(linked, "status", "--porcelain") == ""


def test_a_repository_kept_elsewhere(make: Callable[..., Worktree], tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--separate-git-dir", str(tmp_path / "kept"), "work")
    commit(tmp_path / "work", "file")
    found = make(tmp_path / "work")
    assert found.common == str(tmp_path / "kept")
    commit(Path(found.path), "more")


def test_a_directory_of_a_repository(make: Callable[..., Worktree], repo: Path) -> None:
    found = make(repo / "sub")
    assert (found.root, found.common) == (f"{repo}/sub", f"{repo}/.git")
    assert (Path(found.path) / "sub/file").exists()


def test_a_bare_repository(
    make: Callable[..., Worktree],
    remove: Callable[..., str | None],
    repo: Path,
    tmp_path: Path,
) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repo), "bare")
    found = make(tmp_path / "bare")
    assert found.common == str(tmp_path / "bare")
    assert remove(found) is None


def test_what_it_needs_is_there_even_after_the_refs_are_packed(repo: Path, made: Worktree) -> None:
    git(repo, "pack-refs", "--all", "--prune")
    git(repo, "gc", "-q")
    git(repo, "fsck", "--strict")
    for path in ("refs/heads/ctx", "logs/refs/heads/ctx"):
        assert (Path(made.common) / path).is_dir()
    assert git(repo, "branch", "--format=%(refname)").split() == [
        "refs/heads/ctx/kid",
        "refs/heads/main",
    ]


def test_no_repository(make: Callable[..., Worktree], tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=f'"{tmp_path}".*is in no git repository'):
        make(tmp_path)


def test_no_commit(make: Callable[..., Worktree], tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "empty")
    with pytest.raises(MalformedError, match="no commit yet"):
        make(tmp_path / "empty")


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
    with pytest.raises(TakenError, match=f'"{branch}" is there already'):
        make(repo)
    assert git(repo, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize(
    "path", ["ctx/kid", "ctx/kid~below", "worktrees/kid", "logs/refs/heads/ctx/kid"]
)
def test_something_is_in_its_place(
    make: Callable[..., Worktree], repo: Path, path: str, tmp_path: Path
) -> None:
    taken = repo / ".git" / path
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TakenError, match="is there already"):
        make(repo)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["a..b", "a.", "a.lock"])
def test_names_that_git_does_not_take(world: World, parent: Agent, repo: Path, name: str) -> None:
    child = world.agents.create(inside(parent), name)
    with pytest.raises(MalformedError, match="branch of a worktree"):
        call(workspace.plan, run_here, parent, child, str(repo))


@pytest.mark.parametrize("programs", [(), ("pwd",)])
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


@pytest.mark.parametrize("claim", ["relative\n", "/a/../b\n", "/a\n/b\n", "", "warning: x\n/a\n"])
def test_a_path_that_is_none_is_not_believed(
    make: Callable[..., Worktree], repo: Path, claim: str
) -> None:
    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        if "--git-common-dir" in argv:
            return 0, claim
        return await run_here(agent, argv, cwd, variables)

    with pytest.raises(MalformedError):
        make(repo, run)


@pytest.mark.parametrize("step", ["add", "reset", "filter"])
def test_what_fails_half_way_leaves_nothing(
    make: Callable[..., Worktree], repo: Path, step: str
) -> None:
    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        code, text = await run_here(agent, argv, cwd, variables)
        return (1, "it\nbroke\x1b[") if any(step in word for word in argv[-7:]) else (code, text)

    if step == "add":
        (repo / ".git/worktrees").write_text("in the way")
        with pytest.raises(CtxError):
            make(repo)
        (repo / ".git/worktrees").unlink()
    else:
        with pytest.raises(WrongStateError, match=r'"it broke\\x1b\['):
            make(repo, run)
    assert git(repo, "branch", "--format=%(refname:short)") == "main"
    assert git(repo, "worktree", "list").count("\n") == 0
    make(repo)


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
    remove: Callable[..., str | None],
    repo: Path,
    tmp_path: Path,
    what: str,
) -> None:
    script, marker = _script(tmp_path)
    HOSTILE[what](repo, script)
    if what == "lazy fetch":
        with pytest.raises(WrongStateError):
            make(repo)
    else:
        worktree = make(repo)
        assert (Path(worktree.path) / "tool").exists()
        os.utime(Path(worktree.path) / "tool", (1, 1))
        remove(worktree)
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
def test_a_filter_that_cannot_be_named_is_refused(
    make: Callable[..., Worktree], repo: Path, tmp_path: Path, name: str
) -> None:
    with open(repo / ".git/config", "ab") as file:
        file.write(b'[filter "' + os.fsencode(name) + b'"]\n\tsmudge = true\n')

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        done = subprocess.run(
            argv, cwd=cwd, env=ENVIRONMENT, capture_output=True, timeout=_SECONDS, check=False
        )
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")

    with pytest.raises(WrongStateError, match="cannot be switched off"):
        make(repo, run)
    assert git(repo, "worktree", "list").count("\n") == 0


def test_a_list_of_filters_that_is_cut_off_is_refused(
    make: Callable[..., Worktree], repo: Path
) -> None:
    with open(repo / ".git/config", "a") as file:
        file.writelines(f'[filter "f{n}"]\n\tsmudge = true\n' for n in range(100))

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        code, text = await run_here(agent, argv, cwd, variables)
        return code, text[: len("filter.f0.smudge\n") * 10]

    with pytest.raises(WrongStateError, match="more filters"):
        make(repo, run)
    make(repo)


def test_a_work_tree_set_in_the_configuration_is_left_alone(
    make: Callable[..., Worktree],
    remove: Callable[..., str | None],
    repo: Path,
    tmp_path: Path,
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "tool").write_text("mine\n")
    git(repo, "config", "core.worktree", str(precious))
    worktree = make(repo)
    assert (Path(worktree.path) / "tool").read_text() == "#!/bin/sh\n"
    assert remove(worktree) is None
    assert [p.name for p in precious.iterdir()] == ["tool"]
    assert (precious / "tool").read_text() == "mine\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another uid")
def test_the_repository_of_another_uid(
    make: Callable[..., Worktree], remove: Callable[..., str | None], repo: Path
) -> None:
    for path in (repo, repo / ".git"):
        os.chown(path, _UID, _UID)
    code, text = execute(["git", "status"], str(repo), ENVIRONMENT)
    assert code != 0 and "dubious ownership" in text
    assert remove(make(repo)) is None


def test_nothing_is_written_where_siblings_can_put_links(made: Worktree) -> None:
    """Git follows a link in the place of a log."""
    assert not Path(made.common, "logs", made.ref).exists()


def test_an_alias_is_none(make: Callable[..., Worktree], repo: Path, tmp_path: Path) -> None:
    script, marker = _script(tmp_path)
    for name in ("rev-parse", "worktree", "reset", "config"):
        git(repo, "config", f"alias.{name}", f"!{script}")
    make(repo)
    assert not marker.exists()


# removing one


def test_what_holds_nothing_is_removed(
    repo: Path, made: Worktree, remove: Callable[..., str | None]
) -> None:
    assert remove(made) is None
    for path in (made.path, made.admin, made.below):
        assert not os.path.lexists(path)
    assert git(repo, "branch", "--format=%(refname:short)") == "main"
    assert git(repo, "worktree", "list").count("\n") == 0
    assert git(repo, "status", "--porcelain") == ""


def test_it_can_be_made_again(
    repo: Path,
    made: Worktree,
    make: Callable[..., Worktree],
    remove: Callable[..., str | None],
) -> None:
    assert remove(made) is None
    assert make(repo) == made


def test_what_was_never_made_needs_no_removal(
    parent: Agent, child: Agent, repo: Path, remove: Callable[..., str | None]
) -> None:
    assert remove(call(workspace.plan, run_here, parent, child, str(repo))) is None


def test_touched_files_are_the_same_files(
    made: Worktree, remove: Callable[..., str | None]
) -> None:
    os.utime(Path(made.path) / "tool", (1, 1))
    git(made.path, "checkout", "-q", "--detach")
    git(made.path, "checkout", "-q", "-b", "ctx/kid-2")
    assert remove(made) is None


def _untracked(tree: Path) -> None:
    (tree / "new").write_text("x")


def _ignored(tree: Path) -> None:
    (tree / "x.o").write_text("x")


def _ignored_by_itself(tree: Path) -> None:
    (tree / "sub/deep").mkdir()
    (tree / "sub/deep/.gitignore").write_text("*\n")


def _modified(tree: Path) -> None:
    (tree / "tool").write_text("other\n")


def _same_size_and_time(tree: Path) -> None:
    before = os.stat(tree / "tool")
    (tree / "tool").write_text("#!/bin/no\n"[: before.st_size])
    os.utime(tree / "tool", ns=(before.st_atime_ns, before.st_mtime_ns))


def _not_looked_at(tree: Path, flag: str) -> None:
    git(tree, "update-index", flag, "tool")
    _modified(tree)


def _deleted(tree: Path) -> None:
    (tree / "tool").unlink()


def _executable(tree: Path) -> None:
    (tree / "tool").chmod(0o755)


def _linked(tree: Path) -> None:
    (tree / "tool").unlink()
    (tree / "tool").symlink_to("sub/file")


def _staged_only(tree: Path) -> None:
    text = (tree / "tool").read_text()
    _modified(tree)
    git(tree, "add", "tool")
    (tree / "tool").write_text(text)


def _committed(tree: Path) -> None:
    commit(tree, "new")


def _committed_detached(tree: Path) -> None:
    git(tree, "checkout", "-q", "--detach")
    commit(tree, "new")


def _committed_detached_and_left(tree: Path) -> None:
    _committed_detached(tree)
    git(tree, "checkout", "-q", "ctx/kid")


def _committed_and_reset(tree: Path) -> None:
    commit(tree, "new")
    git(tree, "reset", "-q", "--hard", "HEAD~")


def _committed_on_another(tree: Path) -> None:
    git(tree, "checkout", "-q", "-b", "ctx/other")
    commit(tree, "new")


def _unborn(tree: Path) -> None:
    git(tree, "checkout", "-q", "--orphan", "ctx/other")


def _renamed_branch(tree: Path) -> None:
    git(tree, "branch", "-m", "ctx/other")


def _own_repository(tree: Path) -> None:
    (tree / ".git").unlink()
    git(tree, "init", "-q")


def _inner_repository(tree: Path) -> None:
    repository(tree / "inner")
    (tree / "inner/tool").unlink()


def _submodule(tree: Path) -> None:
    inner = repository(tree / "inner")
    git(tree, "add", "inner")
    git(tree, "commit", "-q", "-m", "inner")
    assert git(tree, "ls-files", "-s", "inner").startswith("160000")
    (inner / "new").write_text("x")


def _own_ref(tree: Path) -> None:
    found = git(tree, "commit-tree", "-m", "x", "HEAD^{tree}")
    git(tree, "update-ref", "refs/worktree/mine", found)


def _no_index(tree: Path) -> None:
    Path(git(tree, "rev-parse", "--git-path", "index")).unlink()


def _broken_index(tree: Path) -> None:
    Path(git(tree, "rev-parse", "--git-path", "index")).write_text("nothing")


def _broken_head(tree: Path) -> None:
    Path(git(tree, "rev-parse", "--git-path", "HEAD")).write_text("nothing")


def _no_directory(tree: Path) -> None:
    shutil.rmtree(tree)


KEPT: dict[str, tuple[Callable[[Path], None], str]] = {
    "untracked": (_untracked, "new"),
    "ignored": (_ignored, "x.o"),
    "ignored by itself": (_ignored_by_itself, "sub/deep/.gitignore"),
    "modified": (_modified, "tool"),
    "same size and time": (_same_size_and_time, "tool"),
    "assumed unchanged": (partial(_not_looked_at, flag="--assume-unchanged"), "tool"),
    "skipped": (partial(_not_looked_at, flag="--skip-worktree"), "tool"),
    "deleted": (_deleted, "tool"),
    "executable": (_executable, "tool"),
    "a link": (_linked, "tool"),
    "staged only": (_staged_only, "staged"),
    "committed": (_committed, "1 commits of it are not in its base"),
    "detached": (_committed_detached, "1 commits of it"),
    "detached and left": (_committed_detached_and_left, "1 commits of it"),
    "reset": (_committed_and_reset, "1 commits of it"),
    "another branch": (_committed_on_another, "1 commits of it"),
    "unborn": (_unborn, "HEAD"),
    "renamed branch": (_renamed_branch, "its branch is not there"),
    "its own repository": (_own_repository, ".git"),
    "inner repository": (_inner_repository, "inner"),
    "submodule": (_submodule, "1 commits of it"),
    "a ref of its own": (_own_ref, "refs/worktree/mine"),
    "no index": (_no_index, "staged"),
    "broken index": (_broken_index, "index"),
    "broken HEAD": (_broken_head, "HEAD"),
    "no directory": (_no_directory, "not there any more"),
}


def _everything(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize("what", KEPT)
def test_what_could_be_lost_is_kept(
    repo: Path, made: Worktree, remove: Callable[..., str | None], what: str
) -> None:
    act, why = KEPT[what]
    act(Path(made.path))
    before = _everything(repo)
    said = remove(made)
    assert said is not None
    assert said.startswith(f'kept "{made.path}", branch "ctx/kid": ')
    assert why in said
    assert said.isprintable()
    assert _everything(repo) == before


def test_what_is_in_a_submodule_is_kept(
    make: Callable[..., Worktree], remove: Callable[..., str | None], repo: Path, tmp_path: Path
) -> None:
    inner = repository(tmp_path / "inner")
    git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "inner")
    git(repo, "commit", "-q", "-m", "inner")
    worktree = make(repo)
    git(
        worktree.path,
        *("-c", "protocol.file.allow=always", "submodule", "update", "-q", "--init"),
    )
    (Path(worktree.path) / "inner/x.o").write_text("x")
    said = remove(worktree)
    assert said is not None and "inner" in said


def test_an_empty_submodule_holds_nothing(
    make: Callable[..., Worktree], remove: Callable[..., str | None], repo: Path, tmp_path: Path
) -> None:
    inner = repository(tmp_path / "inner")
    git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "inner")
    git(repo, "commit", "-q", "-m", "inner")
    assert remove(make(repo)) is None


def test_a_commit_between_the_checks_and_the_removal_is_kept(
    made: Worktree, remove: Callable[..., str | None]
) -> None:
    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        if any("update-ref" in word for word in argv):
            commit(Path(made.path), "new")
        return await run_here(agent, argv, cwd, variables)

    said = remove(made, run)
    assert said is not None and "could not be deleted" in said
    assert (Path(made.path) / "new").exists()


@pytest.mark.parametrize("number", range(9))
def test_whatever_fails_it_is_kept(
    made: Worktree, remove: Callable[..., str | None], number: int
) -> None:
    """``number`` is the call that fails; the last is the one that removes the files."""
    calls = 0

    async def run(
        agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise WrongStateError("the cell is gone")
        return await run_here(agent, argv, cwd, variables)

    said = remove(made, run)
    assert calls == number + 1
    assert said is not None and said.endswith("the cell is gone")
    assert (Path(made.path) / "tool").exists()


# a hostile child: what it wrote is not obeyed by what looks at it


def test_its_configuration_is_not_read(
    made: Worktree, remove: Callable[..., str | None], tmp_path: Path
) -> None:
    script, marker = _script(tmp_path)
    fake = tmp_path / "fake"
    git(tmp_path, "init", "-q", "--bare", "fake")
    git(fake, "config", "core.fsmonitor", script)
    git(fake, "config", "filter.x.clean", script)
    (Path(made.admin) / "commondir").write_text(str(fake))
    (Path(made.path) / ".gitattributes").write_text("* filter=x\n")
    said = remove(made)
    assert said is not None and ".gitattributes" in said
    assert not marker.exists()


def test_a_filter_of_its_parent_is_not_executed(
    repo: Path, made: Worktree, remove: Callable[..., str | None], tmp_path: Path
) -> None:
    script, marker = _script(tmp_path)
    git(repo, "config", "filter.x.clean", script)
    (Path(made.path) / ".gitattributes").write_text("* filter=x\n")
    assert remove(made) is not None
    assert not marker.exists()


def test_links_are_not_followed(
    repo: Path, made: Worktree, remove: Callable[..., str | None]
) -> None:
    before = (repo / ".git/config").read_bytes()
    for name in ("index.lock", "ORIG_HEAD", "config.worktree"):
        Path(made.admin, name).unlink(missing_ok=True)
        Path(made.admin, name).symlink_to(repo / ".git/config")
    log = Path(made.common, "logs", made.ref)
    log.unlink(missing_ok=True)
    log.symlink_to(repo / ".git/config")
    remove(made)
    assert (repo / ".git/config").read_bytes() == before


def test_a_branch_that_is_another_does_not_take_that_with_it(
    repo: Path, made: Worktree, remove: Callable[..., str | None]
) -> None:
    (repo / ".git/refs/heads/ctx/kid").write_text("ref: refs/heads/main\n")
    assert remove(made) is None
    assert git(repo, "rev-parse", "main") == made.base


# the view


def test_what_the_child_sees_of_it() -> None:
    worktree = Worktree(name="kid", root="/data/a/w", common="/data/a/w/.git", base="0" * 40)
    common, below = "/data/a/w/.git", "/data/a/w/.git/ctx/kid~below"
    assert workspace.binds(worktree) == [
        Mount("/data", "/data", "rw"),
        Mount("/data/a", "/data/a", "rw"),
        Mount("/data/a/w", "/data/a/w", "ro"),
        Mount(f"{common}/objects", f"{common}/objects", "rw"),
        Mount(f"{common}/refs/heads/ctx", f"{common}/refs/heads/ctx", "rw"),
        Mount(f"{common}/logs/refs/heads/ctx", f"{common}/logs/refs/heads/ctx", "rw"),
        Mount(f"{below}/worktrees", f"{common}/worktrees", "rw"),
        Mount(f"{common}/worktrees/kid", f"{common}/worktrees/kid", "rw"),
        Mount(f"{below}/ctx", f"{common}/ctx", "rw"),
        Mount(f"{common}/ctx/kid", f"{common}/ctx/kid", "rw"),
        Mount(f"{common}/ctx/kid", "/workspace", "rw"),
    ]


@pytest.mark.parametrize(
    ("root", "common", "first"),
    [
        ("/w", "/w/.git", ["ro /w"]),
        ("/w", "/git/w", ["rw /git", "ro /w", "ro /git/w"]),
        ("/repo/sub", "/repo/.git", ["rw /repo", "ro /repo/sub", "ro /repo/.git"]),
        ("/workspace", "/w/.git", ["rw /w", "ro /workspace", "ro /w/.git"]),
        ("/w/.git/ctx/x", "/w/.git", ["rw /w", "ro /w/.git/ctx/x", "ro /w/.git"]),
        ("/tmp/a/w", "/tmp/a/w/.git", ["ro /tmp/a/w"]),
        ("/bare", "/bare", ["ro /bare"]),
    ],
)
def test_the_parents_workspace_and_repository_are_read_only(
    root: str, common: str, first: list[str]
) -> None:
    found = workspace.binds(Worktree(name="kid", root=root, common=common, base="0" * 40))
    assert [f"{mount.mode} {mount.target}" for mount in found[: len(first)]] == first
    assert found[len(first)].target == f"{common}/objects"


def test_who_can_have_one(world: World, parent: Agent, child: Agent) -> None:
    workspace.check_possible(child)
    with pytest.raises(MalformedError, match="a root agent"):
        workspace.check_possible(parent)
    world.agents.update(child, life="detached", profile="public_named")
    with pytest.raises(MalformedError, match='life "detached"'):
        workspace.check_possible(child)


# real views, as the cells of agents are made


class Views:
    """Agents' views, with two directories of the host; no cgroups, no daemon."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.data = directory / "data"  # at /data
        (self.data / "run/root").mkdir(parents=True)
        self.mine = directory / "mine"  # at /tmp/mine
        self.mine.mkdir()
        self.places = Places(
            mount=Path("/ctx"), state=Path("/data/state"), runtime=Path("/data/run")
        )

    def own(self) -> None:
        """All that is there belongs to the agents' uid."""
        if os.geteuid() == 0:
            for path in (self.directory, *self.directory.rglob("*")):
                os.chown(path, _UID, _UID, follow_symlinks=False)

    def command(self, agent: Agent) -> list[str]:
        parent = self.world.agents.parent_of(agent)
        if parent is not None:
            found = cell.plan(self.world.agents, agent, self.places, hidden={})
            return [*self.command(parent), "bwrap", *found.view, "--"]
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

    async def run(
        self, agent: Agent, argv: list[str], cwd: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        words = [*self.command(agent), "env", "-C", cwd, *argv]
        return execute(words, "/", {**ENVIRONMENT, **variables})

    def sh(self, agent: Agent, script: str, cwd: str = "/workspace") -> tuple[int, str]:
        return call(self.run, agent, ["sh", "-ec", script], cwd, {})

    def child(self, parent: Agent, name: str) -> Agent:
        agents = self.world.agents
        self.world.may_create(parent)
        child = agents.create(inside(parent), name)
        agents.update(child, workspace="worktree", exec="true")
        root = cell.workspace(agents, parent)
        assert root is not None
        worktree = call(workspace.plan, self.run, parent, child, root)
        call(workspace.add, self.run, parent, worktree)
        agents.update(child, worktree=worktree.dump())
        return self.world.live(child)

    def remove(self, parent: Agent, child: Agent) -> str | None:
        assert child.worktree is not None
        return call(workspace.remove, self.run, parent, Worktree.load(child.worktree))


@pytest.fixture
def views(world: World) -> Iterator[Views]:
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    # not below tmp_path, where the agents' uid does not get
    directory = Path(tempfile.mkdtemp(prefix="ctxfs-workspace-"))
    try:
        yield Views(world, directory)
    finally:
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
    world.agents.update(parent, workspace="explicit_root:/data/src/work")
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
        git checkout -q -b ctx/kid-2
        echo more >> tool
        git commit -q -a -m two
        git checkout -q ctx/kid
        git branch -d ctx/none 2>/dev/null || true
        git worktree prune
        git branch --format='%(refname:short)'
        """,
    )
    assert code == 0, text
    assert text.split() == ["ctx/kid", "ctx/kid-2", "main"]
    assert _log(views, kid, "", "/workspace") == ["one", "tool"]
    assert _log(views, boss, "ctx/kid-2", "/data/src/work") == ["two", "one", "tool"]
    assert views.sh(boss, "git status --porcelain --ignored", "/data/src/work") == (0, "")
    said = views.remove(boss, kid)
    assert said is not None and "commits of it" in said
    assert _log(views, kid, "", "/workspace") == ["one", "tool"], "it can go on"


def test_a_childs_untouched_worktree_is_removed(views: Views, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    assert views.sh(kid, "git status")[0] == 0
    assert views.remove(boss, kid) is None
    script = "git branch --format='%(refname:short)'; git worktree list | wc -l"
    assert views.sh(boss, script, "/data/src/work") == (0, "main\n1\n")


FORBIDDEN = {
    "the configuration": 'git config core.fsmonitor "touch /tmp/x"',
    "the file of it": "echo x >> $C/config",
    "the file of it, moved": "rename $C/config $C/config.old",
    "hooks": "echo x > $C/hooks/post-commit",
    "another's branch": "git update-ref refs/heads/main $(git commit-tree -m x HEAD^{tree})",
    "a new branch outside": "git branch mine",
    "packed refs": "echo x > $C/packed-refs",
    "attributes": "mkdir -p $C/info; echo x > $C/info/attributes",
    "the stash": "echo x >> tool; git stash",
    "its parent's HEAD": "echo x > $C/HEAD",
    "its parent's index": "echo x > $C/index",
    "its parent's files": "echo x > /data/src/work/tool",
    "its parent's .git": "rename /data/src/work/.git /data/src/work/old",
    "the workspace": "rename /data/src/work /data/src/old",
    "what is above it": "rename /data/src /data/old",
    "what is above the repository": "rename $(dirname $C) /data/old",
    "its sibling's files": "echo x > $C/ctx/sib/tool",
    "its sibling's HEAD": "echo x > $C/worktrees/sib/HEAD",
    "its sibling's common directory": "echo /tmp > $C/worktrees/sib/commondir",
    "what is mounted on": "ls $C/ctx/kid~below/ctx",
}


def test_what_a_child_cannot_do(views: Views, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    views.child(boss, "sib")
    shared = "C=$(git rev-parse --path-format=absolute --git-common-dir)\n"
    # mv(1) copies what it cannot rename
    shared += "rename() { perl -e 'rename $ARGV[0], $ARGV[1] or die $!' \"$@\"; }\n"
    views.sh(boss, shared + "git config maintenance.auto false", "/data/src/work")
    assert views.sh(kid, shared + "echo x > /tmp/a; rename /tmp/a /tmp/b; cat /tmp/b") == (0, "x\n")
    before = _everything(views.data)
    for what, script in FORBIDDEN.items():
        code, text = views.sh(kid, shared + script)
        assert code != 0, f"{what}: {text}"
        views.sh(kid, "git checkout -q -- .")
    after = _everything(views.data)
    own = {"objects", "kid", "kid~below"}
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert {path for path in changed if not own & set(path.split("/"))} == set()


def test_a_child_of_a_child(views: Views, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    views.child(boss, "sib")
    assert views.sh(kid, "echo more >> tool; git commit -q -a -m one")[0] == 0
    low = views.child(kid, "low")
    other = views.child(kid, "other")
    script = "echo most >> tool; git commit -q -a -m two; git log --format=%s"
    assert views.sh(low, script) == (0, "two\none\ntool\n")
    # its parent's is read-only, and the names of others lead nowhere
    worktree = Worktree.load(low.worktree or {})
    for path in ("config", "worktrees/kid/HEAD", "worktrees/other/HEAD", "ctx/kid/tool"):
        code, text = views.sh(low, f"echo x > {worktree.common}/{path}")
        assert code != 0, (path, text)
    assert views.sh(kid, "git worktree list | wc -l") == (0, "4\n")
    assert views.sh(kid, "git status --porcelain --ignored") == (0, "")
    assert _log(views, boss, "ctx/low", "/data/src/work") == ["two", "one", "tool"]
    assert views.remove(kid, other) is None
    said = views.remove(kid, low)
    assert said is not None and "1 commits" in said
    # what it holds for its children is not lost with it
    logs = "logs/HEAD --git-path logs/refs/heads/ctx/kid"
    script = f"git reset -q --hard HEAD~; rm $(git rev-parse --git-path {logs})"
    assert views.sh(kid, script) == (0, "")
    said = views.remove(boss, kid)
    assert said is not None and "there is more in it" in said
    assert _log(views, low, "", "/workspace") == ["two", "one", "tool"]


def test_a_child_that_inherits_a_worktree(views: Views, world: World, boss: Agent) -> None:
    kid = views.child(boss, "kid")
    world.may_create(kid)
    heir = world.agents.create(inside(kid), "heir")
    world.agents.update(heir, exec="true")
    world.live(heir)
    assert views.sh(heir, "echo more >> tool; git commit -q -a -m one")[0] == 0
    assert _log(views, kid, "", "/workspace") == ["one", "tool"]
    assert views.sh(heir, "echo x >> $(git rev-parse --git-common-dir)/config")[0] != 0


def test_a_repository_below_tmp(views: Views, world: World, parent: Agent) -> None:
    repository(views.mine / "work")
    views.own()
    world.agents.update(parent, workspace="explicit_root:/tmp/mine/work")
    kid = views.child(parent, "kid")
    world.may_create(kid)
    heir = world.agents.create(inside(kid), "heir")
    world.agents.update(heir, exec="true")
    world.live(heir)
    low = views.child(heir, "low")
    for agent in (kid, heir, low):
        assert views.sh(agent, "echo more >> tool; git commit -q -a -m one") == (0, "")
        assert views.sh(agent, "echo $(ls /tmp) $(ls /tmp/mine)") == (0, "home mine work\n")
        for path in (".git/config", "tool"):
            assert views.sh(agent, f"echo x > /tmp/mine/work/{path}")[0] != 0
    assert _log(views, parent, "ctx/low", "/tmp/mine/work") == ["one", "tool"]
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
