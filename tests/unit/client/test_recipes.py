"""Recipes: which there are, what they say, what they lack, and the agents that are made by them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from client import recipes, shipped
from client.exits import Failure
from client.words import AGENT_FILES
from ctxfs.files.agent import ROWS
from ctxfs.tree.rows import Control, PathControl
from tests.unit.client.fakes import FILES, FakeRoot, Run, refuse

SHIPPED = Path(recipes.__file__).parents[1] / "contrib" / "agents"
#: of an agent that only these tests make
MORE = ("label", "policy", "homedir", "uid", "gid")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a program in the PATH, in the directory of a project."""
    for name in ("home", "bin", "project"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("XDG_CONFIG_HOME", "KEY", "OTHER_KEY", "URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path / "project")
    install(tmp_path / "opt" / "prog", tmp_path / "bin" / "prog")
    return tmp_path / "home"


def install(path: Path, link: Path, text: str = "#!/bin/sh\necho prog version 7.2\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    link.symlink_to(path)


def recipe(home: Path, name: str = "r", **files: str) -> Path:
    """One of the user's; in names of files, _ stands for a dot."""
    directory = home / ".config" / "ctxfs" / "agents" / name
    directory.mkdir(parents=True)
    for file, text in {"exec": "prog\n", **files}.items():
        (directory / file.replace("_", ".")).write_text(text)
    return directory


@pytest.fixture
def agents_take_all(
    root: FakeRoot, made_agents_are_full: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = root.fill

    def more(directory: Path, **values: str) -> None:
        fill(directory, **values)
        for file in MORE:
            (directory / file).write_text("\n")

    monkeypatch.setattr(root, "fill", more)


def made(root: FakeRoot, name: str = "r-1") -> dict[str, str]:
    """The files of an agent that are not empty."""
    directory = root.path / "agent" / f"{name}.d"
    found = {file: (directory / file).read_text() for file in (*FILES, *MORE, "handoff.md")}
    return {file: text for file, text in found.items() if text.strip()}


def configure(root: FakeRoot, *networks: str) -> None:
    with (root.path / "status").open("a") as status:
        status.write("".join(f"network.{name}=18000 /run/{name}.sock\n" for name in networks))


def test_the_files_of_a_recipe_are_those_that_set_an_agent_up() -> None:
    rows = {row.name for row in ROWS if isinstance(row, Control | PathControl) and not row.within}
    assert rows - {"parent"} == set(AGENT_FILES)


# listing


def test_recipes_are_listed_with_what_they_lack(root: FakeRoot, run: Run, home: Path) -> None:
    recipe(home, "good", README_md="# A good one\n\nmore\n", needs="program prog 7\n")
    recipe(
        home, "lacking",
        needs="# what it needs\nprogram none\n\nprogram prog 8\nnetwork a b\nkey KEY OTHER_KEY\n",
    )  # fmt: skip
    recipe(home, "claude", exec="x @nonsense@\n")
    status, out, err = run("agents", "--json")
    assert (status, err) == (0, "")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows.keys() == {"good", "lacking", "claude", "codex", "gemini"}
    assert rows["good"]["summary"] == "A good one"
    assert rows["good"]["lacks"] == []
    assert rows["lacking"]["lacks"] == [
        "program none: not found in PATH",
        f"program prog: {home.parent}/bin/prog has version 7, older than 8",
        "network: a or b is not configured (or use: --network default)",
        "key: KEY or OTHER_KEY is not set",
    ]
    [bad] = rows["claude"]["lacks"]
    assert "ctxfs/agents/claude/exec:1: @nonsense@ is not one of @name@, " in bad
    lines = run("agents")[1].splitlines()
    assert lines[0].split() == ["AGENT", "DIRECTORY", "ALSO", "LACKS"]
    assert next(line.split()[2:] for line in lines if line.startswith("good")) == ["-", "-"]


def test_a_network_of_a_name_adds_the_key(root: FakeRoot, run: Run, home: Path) -> None:
    recipe(home, needs="network a b\nkey KEY\n")
    configure(root, "b")
    [row] = [row for row in json.loads(run("agents", "--json")[1]) if row["name"] == "r"]
    assert row["lacks"] == []


@pytest.mark.parametrize("name", ["claude", "codex", "gemini"])
def test_the_shipped_ones_are_sound(name: str) -> None:
    found = recipes.read(str(SHIPPED / name))
    assert found.summary and name in found.programs
    assert {"exec", "policy", "mount", "homedir", "workspace", "limits"} <= found.lines.keys()
    assert (SHIPPED / name / "files" / "run").is_file()
    for variant in found.variants:  # people take their time
        assert not recipes.read(str(SHIPPED / name), [variant]).lines.get("limits")


# mistakes


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"polcy": "x\n"}, "r/polcy: not a file that sets an agent up"),
        ({"exec": "# nothing\n\n"}, "r/exec: missing or empty: it names the program"),
        ({"exec": "a\n", "env": "\nA=@x@\n"}, "r/env:2: @x@ is not one of @name@, @label@,"),
        ({"mount": "@program:prog@\n"}, 'r/mount:1: @program:prog@: add "program prog" to needs'),
        ({"needs": "program\n"}, 'r/needs:1: "program" is not: program NAME [MAJOR_VERSION],'),
        ({"needs": "# x\nprogram a b\n"}, 'r/needs:2: "program a b" is not: '),
        ({"needs": "key\n"}, 'r/needs:1: "key" is not: '),
        ({"needs": "network\n"}, 'r/needs:1: "network" is not: '),
        ({"needs": "disk 5G\n"}, 'r/needs:1: "disk 5G" is not: '),
    ],
)
def test_a_bad_recipe_is_refused_with_file_and_line(
    root: FakeRoot, run: Run, home: Path, files: dict[str, str], said: str
) -> None:
    recipe(home, **files)
    status, out, err = run("spawn", "--agent", "r", "do it")
    assert (status, out) == (2, "") and said in err
    assert os.listdir(root.path / "agent") == []


def test_what_is_not_text_is_refused(root: FakeRoot, run: Run, home: Path) -> None:
    (recipe(home) / "env").write_bytes(b"A=\xff\n")
    assert run("spawn", "--agent", "r", "do it")[2].endswith("r/env: not UTF-8\n")


def test_what_is_no_small_file_is_refused(root: FakeRoot, run: Run, home: Path) -> None:
    """And nobody waits for the writer of a FIFO, or for the end of a device."""
    for file in ("env", "README.md", "needs"):
        for number, said in enumerate(("not a regular file", "not a regular file", "larger than")):
            path = recipe(home, f"{file}{number}") / file
            if number == 0:
                os.mkfifo(path)
            elif number == 1:
                path.symlink_to("/dev/zero")
            else:
                with path.open("wb") as large:
                    large.truncate(1 << 40)
            _, _, err = run("spawn", "--agent", path.parent.name, "do it")
            assert (f"{path}: {said}" in err) is (file != "README.md"), err
    rows = {row["name"]: row for row in json.loads(run("agents", "--json")[1])}
    assert [rows[f"README.md{number}"]["summary"] for number in range(3)] == [""] * 3
    linked = recipe(home, "linked")
    (linked / "env").symlink_to(home / "env")
    (home / "env").write_text("A=@nonsense@\n")
    assert f"{linked}/env:1: @nonsense@" in run("spawn", "--agent", "linked", "do it")[2]


@pytest.mark.usefixtures("agents_take_all")
@pytest.mark.parametrize(
    "name", ["x\nLD_PRELOAD=evil.so", "x\t", "x\n#", "\n"]
)
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("env", "A=@cwd@\n"), ("workspace", "explicit_root:@cwd@\n"),
        ("mount", "@cwd@ /w ro\n"), ("mount", "@program:evil@\n"),
    ],
)  # fmt: skip
def test_no_directory_has_a_name_of_several_lines_or_fields(
    root: FakeRoot,
    run: Run,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    file: str,
    text: str,
) -> None:
    """Somebody else may have made it, and no line of the agent is theirs to write."""
    project = home.parent / "project" / name
    install(project / "evil", home.parent / "bin" / "evil")
    monkeypatch.chdir(project)
    recipe(home, needs="program evil\n", **{file: text})
    status, _, err = run("spawn", "--agent", "r", "do it")
    assert (status, "has a newline or a TAB: use another path" in err) == (2, True), err
    assert os.listdir(root.path / "agent") == []


@pytest.mark.usefixtures("agents_take_all")
def test_a_key_is_one_line(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(home, needs="key KEY\n")
    monkeypatch.setenv("KEY", "k\tk")
    assert run("spawn", "--agent", "r", "do it")[0] == 0
    assert made(root)["env"] == "KEY=k\tk\n"
    monkeypatch.setenv("KEY", "k\nLD_PRELOAD=evil.so")
    status, _, err = run("spawn", "--agent", "r", "do it")
    assert (status, err) == (2, "ctx: KEY has a newline, which a line of env cannot have\n")


@pytest.mark.usefixtures("agents_take_all")
@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a;b", "a:b", "#", "$x", "@name@"])
def test_a_directory_is_one_word_of_a_program(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (home.parent / "project" / name).mkdir()
    monkeypatch.chdir(home.parent / "project" / name)
    recipe(home, exec="prog --dir @cwd@ @files@\n", env="A=@cwd@\n")
    assert run("spawn", "--agent", "r", "do it")[0] == 0
    words = ["prog", "--dir", os.getcwd(), f"{home}/.config/ctxfs/agents/r/files"]
    assert shlex.split(made(root)["exec"]) == words
    assert made(root)["env"] == f"A={os.getcwd()}\n"


@pytest.mark.usefixtures("agents_take_all")
@pytest.mark.parametrize(
    ("text", "at_close", "where"),
    [
        ("# long\n\ntimeout=1h\n", False, "{0}/limits:3"),
        ("# long\n\ntimeout=1h\n", True, "{0}/limits"),
        ("", False, "the options for limits"),
    ],
)
def test_a_refusal_of_the_daemon_names_the_line(
    root: FakeRoot,
    run: Run,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    at_close: bool,
    where: str,
) -> None:
    directory = recipe(home, **({"limits": text} if text else {}))
    refuse(monkeypatch, "limits", 22, at_close)
    status, _, err = run("spawn", "--agent", "r", "--limit", "grace=x", "do it")
    said = f"ctx: {where.format(directory)}: agent/r-1.d/limits: "
    assert (status, said in err) == (1, True), err
    assert os.listdir(root.path / "agent") == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--agent", "none", "x"], 'no recipe "none" in '),
        (["--agent", "./none", "x"], 'no recipe "./none"; see: ctx agents'),
        (["--network", "default", "x", "--", "true"], "--set 'policy=allow NAME_t network:default"),
        (["--name", "x", "y", "--", "true"], "--name needs --agent; without a recipe, the first"),
        (["x", "y", "--", "true"], "give the NAME of the agent, and its program after --"),
        (["--", "true"], "give the NAME of the agent, and its program after --"),
    ],
)
def test_arguments_that_do_not_go_together(
    root: FakeRoot, run: Run, home: Path, argv: list[str], said: str
) -> None:
    status, _, err = run("spawn", *argv)
    assert status == 2 and said in err


# making agents


@pytest.mark.usefixtures("agents_take_all")
def test_an_agent_is_made_of_the_files(root: FakeRoot, run: Run, home: Path) -> None:
    directory = recipe(
        home,
        exec="sh /recipe/run @program:prog@\n",
        needs="program prog\n",
        policy="# may\nallow @label@ network:@network@ connect\n"
        "allow @label@ agent:@name@-* create\n",
        mount="@files@ /recipe ro\n@program:prog@\n",
        workspace="explicit_root:@cwd@\n",
        env="URL\nA=@cwd@ b\n",
        homedir="durable\n",
        limits="timeout=1h\n",
    )
    project, program = os.getcwd(), home.parent / "opt" / "prog"
    assert run("spawn", "--agent", "r", "--name", "x", "fix", "it") == (0, "x\n", "")
    assert made(root, "x") == {
        "exec": f"sh /recipe/run {program}\n",
        "policy": "allow x_t agent:x-* create\n",
        "mount": f"{directory}/files\t/recipe\tro\n{program}\t{program}\tro\t-\n",
        "workspace": f"explicit_root:{project}\n",
        "env": f"A={project} b\n",
        "homedir": "durable\n",
        "limits": "timeout=1h\n",
        "handoff.md": "fix it",
        "ctl": "start\n",
    }


@pytest.mark.usefixtures("agents_take_all")
def test_at_a_node_a_recipe_is_that_of_the_node(root: FakeRoot, run: Run, home: Path) -> None:
    recipe(
        home,
        exec="sh /recipe/run @program:other@\n",
        needs="program other 7\nnetwork far\n",
        policy="allow @label@ network:@network@ connect\n",
        mount="@files@ /recipe ro\n@program:other@\n",
        workspace="explicit_root:@cwd@\n",
    )
    argv = ("spawn", "--agent", "r", "--name", "x", "--node", "n2", "fix", "it")
    assert run(*argv) == (0, "x\n", "")
    assert made(root, "x") == {
        "placement": "node=n2\n",
        "exec": "sh /recipe/run other\n",
        "policy": "allow x_t network:far connect\n",
        "mount": "node:recipes/r/files\t/recipe\tro\n",
        "handoff.md": "fix it",
        "ctl": "start\n",
    }


@pytest.mark.usefixtures("agents_take_all")
def test_options_add_or_replace(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(
        home, exec="prog\n", mount="/a b\trw\n", env="URL\nA=1\n", limits="timeout=1h\n",
        model="big\n", cwd="/r\n", policy="allow @label@ network:@network@ connect\n",
        needs="key KEY OTHER_KEY\nnetwork a\n",
    )  # fmt: skip
    monkeypatch.setenv("URL", "http://u")
    monkeypatch.setenv("OTHER_KEY", "k")
    argv = ["spawn", "--agent", "r", "--mount", "/m", "--env", "B=2", "--limit", "grace=1s"]
    argv += ["--model", "small", "--cwd", "/w", "--network", "default", "--set", "label=l"]
    assert run(*argv, "-", "--", "--more", "a b", stdin=b"the task")[:2] == (0, "r-1\n")
    found = made(root)
    assert found["exec"] == "prog --more 'a b'\n"
    assert found["env"] == "URL=http://u\nA=1\nOTHER_KEY=k\nB=2\n"
    assert found["limits"] == "timeout=1h\ngrace=1s\n"
    assert (found["model"], found["cwd"], found["label"]) == ("small\n", "/w\n", "l\n")
    assert found["policy"] == "allow l network:default connect\n"
    assert found["mount"].endswith("/m\t/m\tro\t-\n")
    assert found["handoff.md"] == "the task"


@pytest.mark.usefixtures("agents_take_all")
def test_keys_stay_here_where_the_network_adds_them(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(home, needs="key KEY\nnetwork a b\n", policy="allow @label@ network:@network@ connect\n")
    monkeypatch.setenv("KEY", "secret")
    configure(root, "b", "c")
    assert run("spawn", "--agent", "r", "do it")[0] == 0
    assert made(root)["policy"] == "allow r-1_t network:b connect\n"
    assert "env" not in made(root)


def test_nothing_is_made_where_something_is_missing(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(home, needs="key KEY\nnetwork a\nprogram none\n")
    status, _, err = run("spawn", "--agent", "r", "do it")
    assert status == 1
    assert "lacks program none: not found in PATH; network: a is not configured; --network" in err
    err = run("spawn", "--agent", "r", "--network", "b", "do it")[2]
    assert 'lacks program none: not found in PATH; network: "b" is not configured; --net' in err
    err = run("spawn", "--agent", "r", "--network", "default", "do it")[2]
    assert err.endswith("not found in PATH; key: KEY is not set\n")
    err = run("spawn", "--agent", "r", "--network", "none", "--env", "KEY=k", "do it")[2]
    assert err.endswith("not found in PATH\n")
    assert os.listdir(root.path / "agent") == []


@pytest.mark.usefixtures("agents_take_all")
def test_an_agent_without_a_network_has_no_such_line_nor_the_default_policy(
    root: FakeRoot, run: Run, home: Path
) -> None:
    line = "allow @label@ network:@network@ connect\n"
    directory = recipe(home, policy=line, homedir="durable\n")
    assert run("spawn", "--agent", str(directory), "do it")[0] == 0
    assert (root.path / "agent" / "r-1.d" / "policy").read_text() == "\n"
    assert "homedir" not in made(root), "it was not named: the next of this name is another's"


@pytest.mark.usefixtures("agents_take_all")
@pytest.mark.parametrize("where", ["", "..", "/"])
def test_the_directory_with_the_users_settings_is_not_given(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    recipe(home, workspace="explicit_root:@cwd@\n")
    monkeypatch.chdir(home / where)
    status, _, err = run("spawn", "--agent", "r", "do it")
    assert status == 2 and "has your settings: change to the directory of a project" in err
    assert run("spawn", "--agent", "r", "--workspace", "inherit", "do it")[0] == 0
    assert made(root)["workspace"] == "inherit\n"


@pytest.mark.usefixtures("agents_take_all", "inside")
def test_what_an_agent_makes_has_a_name_that_begins_with_its_own(
    root: FakeRoot, run: Run, home: Path
) -> None:
    recipe(home)
    root.agent("x-r-1")
    assert run("spawn", "--agent", "r", "do it") == (0, "x-r-2\n", "")


@pytest.mark.usefixtures("agents_take_all")
def test_a_name_that_cannot_be_had_is_passed_over(
    root: FakeRoot, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(home)
    mkdir = os.mkdir

    def refused(path: Any, mode: int = 0o777) -> None:
        if str(path).endswith("/r-1.d"):
            raise PermissionError(13, "history of another user")
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", refused)
    assert run("spawn", "--agent", "r", "do it") == (0, "r-2\n", "")
    assert run("spawn", "--agent", "r", "--name", "r-1", "do it")[0] == 1


@pytest.mark.usefixtures("agents_take_all")
@pytest.mark.parametrize(("mode", "said"), [(0o755, True), (0o757, False)])
def test_who_cannot_change_its_directory_is_told_of(
    root: FakeRoot, run: Run, home: Path, mode: int, said: bool
) -> None:
    recipe(home, workspace="explicit_root:@cwd@\n", uid="12345\n", gid="12345\n")
    os.chmod(".", mode)
    status, out, err = run("spawn", "--agent", "r", "do it")
    assert (status, out) == (0, "r-1\n")
    assert (f"r-1 has uid 12345, which cannot change {os.getcwd()}; to let it" in err) == said


# programs


def test_a_script_comes_with_its_interpreter_and_modules(home: Path) -> None:
    base = home.parent
    install(base / "lib/node_modules/@c/cli/main.js", base / "bin" / "cli",
            "#!/usr/bin/env -S thing --flag\n")  # fmt: skip
    install(base / "opt" / "thing", base / "bin" / "thing")
    script, thing = f"{base}/lib/node_modules/@c/cli/main.js", f"{base}/opt/thing"
    assert recipes.program_words("cli") == [thing, "--flag", script]
    modules = f"{base}/lib/node_modules"
    assert recipes.program_mounts("cli") == [
        f"{path}\t{path}\tro\t-" for path in (thing, modules)
    ]
    assert recipes.program_mounts("sh") == [], "every sandbox shows it"


def test_a_version_that_is_not_told_is_too_old(home: Path) -> None:
    install(home.parent / "opt" / "mute", home.parent / "bin" / "mute", "#!/bin/sh\nexit 1\n")
    recipe(home, needs="program mute 1\n")
    [said] = recipes.lacking_programs(recipes.find("r"))
    assert said.endswith("has version 0, older than 1")


def test_a_recipe_of_the_user_goes_before_the_shipped_one(home: Path) -> None:
    assert recipes.find("claude").directory == str(SHIPPED / "claude")
    directory = recipe(home, "claude")
    assert recipes.find("claude").directory == str(directory)
    assert recipes.directories()[1] == "/etc/ctxfs/agents"


def test_recipes_of_another_users_home_do_not_count(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with sudo(8), which may keep HOME."""
    recipe(home, "claude")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert recipes.find("claude").directory == str(SHIPPED / "claude")


def test_a_link_to_what_others_may_write_does_not_count(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's: as above, and the directory is the caller's nevertheless."""
    recipe(home, "claude")
    own, public = Path(recipes.own_directory()), tmp_path / "public"
    own.rename(public)
    own.symlink_to(public)
    assert recipes.find("claude").directory == str(own / "claude")
    public.chmod(0o1777)
    assert recipes.find("claude").directory == str(SHIPPED / "claude")
    public.chmod(0o755)
    (public / "claude").chmod(0o777)
    assert recipes.find("claude").directory == str(SHIPPED / "claude")


def test_the_packed_client_finds_the_shipped_ones(home: Path, program: Path, spawned: Any) -> None:
    process = spawned("agents", "--json", env={**os.environ, "CTX_ROOT": str(home)})
    out, _ = process.communicate()
    assert {row["directory"] for row in json.loads(out)} >= {str(SHIPPED / "claude")}


def test_without_the_shipped_ones_the_others_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "shipped", lambda checkout, installed: iter(()))
    assert recipes.directories() == [recipes.own_directory(), "/etc/ctxfs/agents"]
    with pytest.raises(Failure, match=r'no recipe "claude" in .*, /etc/ctxfs/agents; see'):
        recipes.find("claude")
