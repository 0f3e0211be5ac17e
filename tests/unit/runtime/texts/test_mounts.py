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


PLACES = mounts.TreePlaces("/run/ctxfs/tree", ("/ctx", "/run/ctxfs/root/ctx"))


@pytest.mark.parametrize(
    ("above", "left"),
    [
        ("", "rw"),
        ("/x /y ro", "rw"),
        ("shared:a /t ro", "rw"),
        ("shared:a /t rw\n- /t hide", "rw"),
        ("- /ctx/shared hide", "hide"),
        ("- /ctx hide", "hide"),
        ("- /ctx/shared/a hide", "hide"),
        ("- /ctx/shared/a/data hide", "hide"),
        ("- /ctx/shared/ab hide", "rw"),
        ("- /run/ctxfs/root/ctx/shared/a hide", "hide"),
        ("- /run/ctxfs/tree/shared hide", "hide"),
        ("/x /run rw", "hide"),
        ("/x /ctx/shared ro", "ro"),
        ("/x /ctx/shared ro\n- /ctx hide", "hide"),
        ("- /ctx hide\n/x /ctx/shared rw", "hide"),
        ("shared:a /run/ctxfs/tree/shared/a ro", "ro"),
        ("- /run/ctxfs/tree/shared/a/x hide", "rw"),
        ("- /ctx/home hide", "rw"),
    ],
)
def test_what_lines_leave_of_a_tree_at_its_own_place(above: str, left: str) -> None:
    # a target may occur again further down the family
    table = [mount for each in above.split("\n") for mount in mounts.parse(each)]
    for _ in range(2):
        assert PLACES.left(mounts.Index(table), "shared:a") == left
        table = [*table, Mount("/z", "/zz", "rw")]


@pytest.mark.parametrize(
    ("path", "tree"),
    [
        ("/run/ctxfs/tree/shared/a", "shared:a"),
        ("/run/ctxfs/tree/shared/a/b/c", "shared:a"),
        ("/run/ctxfs/tree/home/1000/b", "home:1000"),
        ("/run/ctxfs/tree/shared", ""),
        ("/run/ctxfs/tree", ""),
        ("/run/ctxfs/tree/agent/0/x", ""),
        ("/run/ctxfs/trees/shared/a", ""),
        ("/ctx/shared/a/data", "shared:a"),
        ("/ctx/shared/a/data/b/data", "shared:a"),
        ("/run/ctxfs/root/ctx/home/7/data/x", "home:7"),
        ("/ctx/shared/a", ""),
        ("/ctx/shared/a/owner", ""),
        ("/ctx/agent/a/data", ""),
    ],
)
def test_which_tree_a_path_is_in(path: str, tree: str) -> None:
    plain = PLACES.plain(path)
    assert PLACES.tree(plain) == tree
    assert PLACES.plain(plain) == plain
    assert plain.endswith(path.partition("/data")[2])


def test_a_line_shows_the_tree_that_its_source_shows_in_the_parents_view() -> None:
    """Through any number of lines; in a table of a whole family too."""
    text = "shared:a /t rw\n/t/x /u ro noexec\n- /t/y hide\n/u /v rw\n/etc /w ro\nhome: /h rw\n"
    found = list(PLACES.annotated(mounts.parse(text), 7))
    assert [mount.of for mount in found] == [
        "shared:a", "shared:a", "", "shared:a", "", "home:7"
    ]
    above = mounts.Index(found)
    own = Mount("/v/z", "/own", "rw")
    within = mounts.within(own, above.covering(own.source), PLACES.named(own, 7))
    assert (within.of, within.mode) == ("shared:a", "rw")
    own = Mount("/u/z", "/own", "rw")
    within = mounts.within(own, above.covering(own.source), PLACES.named(own, 7))
    assert (within.of, within.mode, within.options) == ("shared:a", "ro", ("noexec",))
