"""Mount tables: one mount a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import MalformedError
from runtime.texts import mounts
from runtime.texts.mounts import MODES, OPTIONS, Mount


@pytest.mark.parametrize(
    ("line", "mount"),
    [
        ("/a /b ro", Mount("/a", "/b", "ro")),
        ("/a /b rw -", Mount("/a", "/b", "rw")),
        ("  /a   /b  rw  nosuid,nodev ", Mount("/a", "/b", "rw", ("nosuid", "nodev"))),
        ("/a\t/b\tro\tbind", Mount("/a", "/b", "ro", ("bind",))),
        ("/a b\t/c d\tro", Mount("/a b", "/c d", "ro")),
        ("\t/a\t\t/b\tro", Mount("/a", "/b", "ro")),
        ("- /b hide", Mount("-", "/b", "hide")),
        ("whatever /b hide -", Mount("whatever", "/b", "hide")),
    ],
)
def test_lines_that_are_mounts(line: str, mount: Mount) -> None:
    assert mounts.parse_line(line) == mount


@pytest.mark.parametrize("line", ["", "  ", "\t", "# /a /b ro", "  # x"])
def test_blank_lines_and_comments_mount_nothing(line: str) -> None:
    assert mounts.parse_line(line) is None


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("/a /b", "is not a mount line; use: source target ro|rw|hide"),
        ("/a /b ro - x", "is not a mount line"),
        ("/a b /c ro", "; use ro, rw, hide"),
        ("/a /b RO", 'unknown mode "RO"; use ro, rw, hide'),
        ("a /b ro", 'source "a" must begin with'),
        ("/a/.. /b ro", "source .* must begin with"),
        ("/a b ro", 'target "b" must begin with'),
        ("/a /b/ ro", "target .* must begin with"),
        ("/a /b/../c ro", "target .* must begin with"),
        ("x y hide", 'target "y" must begin with'),
        ("/a / ro", "are the agent's own"),
        ("/a /proc ro", "are the agent's own"),
        ("/a /proc/1 ro", "are the agent's own"),
        ("x /dev/shm hide", "are the agent's own"),
        ("/a /b ro suid", 'unknown mount option "suid"'),
        ("/a /b ro bind,", 'unknown mount option ""'),
        ("/a /b ro bind,rbind", "exclude each other"),
        ("/a /b ro\r", "; use ro, rw, hide"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(line: str, wrong: str) -> None:
    wrong = wrong.replace("|", "\\|")
    with pytest.raises(MalformedError, match=f"^line 2: .*{wrong}"):
        mounts.parse(f"# table\n{line}\n")


@pytest.mark.parametrize("target", ["/process", "/devices", "/home/proc"])
def test_names_that_only_begin_like_the_agents_own_are_free(target: str) -> None:
    assert mounts.parse_line(f"/a {target} ro") == Mount("/a", target, "ro")


def test_a_target_is_there_once() -> None:
    with pytest.raises(MalformedError, match='line 3: target "/b" occurs twice'):
        mounts.parse("/a /b ro\n\n/c /b rw\n")


def test_the_agents_own_lines_come_after_the_parents() -> None:
    parent, own = mounts.parse("/a /b rw\n"), mounts.parse("/a /b ro\n/c /d rw\n")
    assert mounts.effective(parent, own) == parent + own


# any plain character may be in a path, blanks only inside it
letters = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/"), min_size=1, max_size=6
).filter(lambda t: t == t.strip(" ") and t not in (".", ".."))
paths = st.lists(letters, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
options = st.lists(st.sampled_from(OPTIONS), unique=True, max_size=3).filter(
    lambda found: not {"bind", "rbind"} <= set(found)
)
tables = st.lists(
    st.builds(
        Mount, paths, paths.map(lambda p: "/t" + p), st.sampled_from(MODES), options.map(tuple)
    ),
    unique_by=lambda mount: mount.target,
    max_size=4,
)


@given(tables)
def test_a_rendered_table_is_parsed_back(table: list[Mount]) -> None:
    assert mounts.parse(mounts.render(table)) == tuple(table)


@given(st.text("/ab \t.#-ro,whide\n\r", max_size=40))
def test_parsing_raises_nothing_but_malformed(text: str) -> None:
    try:
        found = mounts.parse(text)
    except MalformedError as error:
        assert error.sentence.startswith("line ")
        return
    assert len({mount.target for mount in found}) == len(found)


@pytest.mark.parametrize(
    ("line", "mount"),
    [
        ("shared:a /b ro", Mount("shared:a", "/b", "ro")),
        ("home: /b rw noexec", Mount("home:", "/b", "rw", ("noexec",))),
    ],
)
def test_durable_trees_are_no_paths(line: str, mount: Mount) -> None:
    assert mounts.parse_line(line) == mount
    assert mount.tree
    assert mounts.parse(mount.line()) == (mount,)
    assert mounts.paths_of(line, "", "")["mount"] == []


@pytest.mark.parametrize(
    "line", ["shared: /b ro", "shared:a/b /b ro", "shared:.. /b ro", "home:x /b ro",
             "shared:a /b rw rbind", "shared:a* /b ro"],
)
def test_bad_trees_are_refused(line: str) -> None:
    with pytest.raises(MalformedError):
        mounts.parse_line(line)


SHOWN = ("/ctx/shared/a", "/run/ctx/shared/a")


@pytest.mark.parametrize(
    ("above", "mode", "why", "left"),
    [
        ("", "rw", "", "rw"),
        ("/x /y ro", "rw", "", "rw"),
        ("shared:b /t ro", "rw", "", "rw"),
        ("shared:a /t ro", "ro", "", "ro"),
        ("shared:a /t ro", "rw", "it is read-only there", "ro"),
        ("shared:a /t ro\nshared:a /u rw", "rw", "", "rw"),
        ("shared:a /t rw\n- /t hide", "ro", "it is hidden there", "hide"),
        ("shared:a /d/t rw\n- /d hide", "ro", "it is hidden there", "hide"),
        ("shared:a /t rw\n/t /t ro", "rw", "it is read-only there", "ro"),
        ("- /ctx/shared hide", "ro", "it is hidden there", "hide"),
        ("- /run/ctx/shared/a hide", "ro", "it is hidden there", "hide"),
        ("/x /ctx/shared ro", "rw", "it is read-only there", "ro"),
        ("shared:a /t rw\n- /t/x hide", "ro", '"/t/x" in it is hidden there', "ro"),
        ("- /ctx/shared/a/x hide", "ro", '"/ctx/shared/a/x" in it is hidden there', "ro"),
        ("shared:a /t rw\n/y /t/x ro", "rw", '"/t/x" in it is read-only there', "rw"),
        ("shared:a /t rw\n/y /t/x ro", "ro", "", "ro"),
        ("shared:a /t rw\n- /tx hide", "rw", "", "rw"),
    ],
)
def test_what_a_parent_has_of_a_tree(above: str, mode: str, why: str, left: str) -> None:
    # a target may occur again further down the family
    table = [mount for each in above.split("\n") for mount in mounts.parse(each)]
    for _ in range(2):  # in any order of names
        bound = mounts.TreeBound(mounts.Index(table), "shared:a", SHOWN)
        own = Mount("shared:a", "/own", mode)
        assert bound.excess(own).partition(": ")[0] == why
        assert bound.within(own).mode == left
        table = [*table, Mount("/z", "/zz", "rw")]


def test_options_of_all_lines_of_a_tree_stick() -> None:
    own = [Mount("shared:a", "/own", "ro")]
    both = mounts.parse("shared:a /t rw noexec\nshared:a /u ro noexec")
    assert mounts.effective(both, own)[-1].options == ("noexec",)
    one = mounts.parse("shared:a /t rw noexec\nshared:a /u ro")
    assert mounts.effective(one, own)[-1] == own[0]
