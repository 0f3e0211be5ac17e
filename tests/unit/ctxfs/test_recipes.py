"""Recipes that agents name: what a directory says, and what is wrong with one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from client.words import AGENT_FILES
from ctxfs import recipes
from ctxfs.recipes import FILES, Recipe

ME = {os.geteuid()}


def made(directory: Path, name: str, **files: str) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    for file, text in {"exec": "cat", **files}.items():
        (path / file.replace("__", ".")).write_text(text)
    return path


def one(directory: Path) -> Recipe:
    (recipe,) = recipes.read([directory], trusted=ME)
    return recipe


def texts(recipe: Recipe, network: str = "", **env: str) -> dict[str, str]:
    return dict(recipe.texts("rev-1", "rev-1_t", network, env, keyed=not network))


def test_every_file_that_sets_an_agent_up_is_known() -> None:
    """But those by which an operator says whose an agent is, and what SpawnAgent says itself, as
    where it is to run; and ``tty``, which in a recipe is a directory."""
    assert {*FILES, "profile", "owner", "uid", "gid", "placement", "tty"} == set(AGENT_FILES)


def test_lines_say_what_the_agent_is_made_of(tmp_path: Path) -> None:
    made(
        tmp_path, "rev", README__md="# Reads changes\n\nmore\n",
        exec="# a comment\n\nsh @files@/run\n",
        policy="allow @label@ agent:@name@-* create\nallow @label@ network:@network@ connect\n",
        needs="key A B\nnetwork api\nprogram sh\n", mount="@program:sh@\n@files@ /recipe ro\n",
        env="LANG=C\nTERM\nNOT_SET\n", workspace="explicit_root:@cwd@\n",
    )  # fmt: skip
    recipe = one(tmp_path)
    files = recipe.directory / "files"
    assert (recipe.lacks, recipe.description) == ("", "Reads changes")
    assert texts(recipe, TERM="dumb", B="k") == {
        "mount": f"{files}\t/recipe\tro\n",
        "env": "LANG=C\nTERM=dumb\nB=k\n",
        "policy": "allow rev-1_t agent:rev-1-* create\n",
        "exec": f"sh {files}/run\n",
    }
    found = texts(recipe, "api", B="k")
    assert "B" not in found["env"], "what answers there adds the key"
    assert "allow rev-1_t network:api connect\n" in found["policy"]
    assert (recipe.lacking_key({}), recipe.lacking_key({"A": "k"})) == ("A or B", "")


def test_a_program_that_is_not_below_usr_is_mounted(tmp_path: Path) -> None:
    recipe = Recipe(1, "x", tmp_path, lines={"mount": ["@program:x@"]}, programs={
        "x": ["/opt/node/bin/node", "/opt/node/lib/node_modules/x/bin.js"],
    })  # fmt: skip
    assert texts(recipe)["mount"].split("\n")[:2] == [
        "/opt/node/bin/node\t/opt/node/bin/node\tro\t-",
        "/opt/node/lib/node_modules\t/opt/node/lib/node_modules\tro\t-",
    ]


def test_the_first_of_a_name_counts(tmp_path: Path) -> None:
    made(tmp_path / "a", "x", README__md="first")
    made(tmp_path / "b", "x", README__md="second")
    made(tmp_path / "b", "y")
    (tmp_path / "b" / ".hidden").mkdir()
    (tmp_path / "b" / "README.md").write_text("no recipe")
    places = [tmp_path / "a", tmp_path / "none", tmp_path / "b"]
    found = recipes.read(places, trusted=ME)
    assert [(each.name, each.description) for each in found] == [("x", "first"), ("y", "")]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"exec": "# nothing\n"}, "exec: missing or empty"),
        ({"uid": "0"}, "uid: an agent of an agent is not given this file"),
        ({"ctl": "start"}, "ctl: an agent of an agent is not given this file"),
        ({"exec": "@program:sh@"}, 'exec: @program:sh@: add "program sh" to needs'),
        ({"exec": "@home@/x"}, "exec: @home@ stands for nothing"),
        ({"mount": "@cwd@ /src ro"}, "mount: @cwd@ is known only where a person"),
        ({"needs": "luck"}, 'needs: "luck" is no need'),
        ({"needs": "program no-such-program"}, "program no-such-program: not found in /usr/local"),
    ],
)
def test_what_is_wrong_with_one_is_said(tmp_path: Path, files: dict[str, str], why: str) -> None:
    made(tmp_path, "x", **files)
    assert why in one(tmp_path).lacks


@pytest.mark.parametrize("what", ["", "x", "x/exec"])
def test_one_that_others_may_write_is_not_used(tmp_path: Path, what: str) -> None:
    made(tmp_path / "agents", "x")
    path = tmp_path / "agents" / what
    path.chmod(0o777)
    assert one(tmp_path / "agents").lacks == f"{path}: others may write it: chmod go-w"


def test_those_that_came_with_ctxfs_can_be_read() -> None:
    found = {each.name: each for each in recipes.read([recipes.shipped()], trusted={0, *ME})}
    assert {"claude", "codex", "gemini"} <= set(found)
    assert all(each.description for each in found.values())
    assert all("not found" in each.lacks or not each.lacks for each in found.values())
