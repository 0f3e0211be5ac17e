"""A child never has more than its parent, in any tree, after any edits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import DeniedError, WrongStateError
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts import mounts, policy
from runtime.texts.policy import PERMS, Rule, Rules
from tests.worlds.records import World, inside, operator, world_in

NAMES = ["".join(letters) for n in range(1, 4) for letters in product("ab", repeat=n)]
PAIRS = [(c, p) for c in ("agent", "shared", "tool") for p in PERMS[c][:2]]
Meaning = set[tuple[str, str, str]]

rules = st.builds(
    lambda kind, pair, text, star: Rule(kind, pair[0], (text + star) or "*", pair[1]),
    st.sampled_from(["allow", "allow", "delegate"]),
    st.sampled_from(PAIRS),
    st.text("ab", max_size=2),
    st.sampled_from(["", "*"]),
)
policies = st.lists(rules, max_size=5)


def family(world: World, *names: str) -> list[Agent]:
    """A root agent, its child, its grandchild, …, all live and with empty policies."""
    found: list[Agent] = []
    for name in names:
        caller = inside(found[-1]) if found else operator(1000)
        found.append(world.may_create(world.live(world.agents.births.create(caller, name))))
    for agent in found:
        world.agents.journal.update(agent, policy="")
    return found


def meaning(found: Iterable[Rule], *kinds: str) -> Meaning:
    return {
        (r.cls, r.perm, n) for r in found if r.kind in kinds for n in NAMES if r.matches(n)
    }


def text(agent: Agent, found: list[Rule]) -> str:
    return policy.render(Rules.of(found), agent.label)


@given(st.lists(st.tuples(st.integers(0, 3), policies), min_size=1, max_size=8))
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_effective_is_own_within_what_the_parent_may_use_or_delegate(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, list[Rule]]]
) -> None:
    with world_in(tmp_path_factory.mktemp("world")) as world:
        chain = family(world, "p", "c", "g", "h")
        own: list[list[Rule]] = [[] for _ in chain]
        for position, written in edits:
            own[position] = written
            world.agents.journal.update(chain[position], policy=text(chain[position], written))
            above: Meaning | None = None
            delegable: Meaning = set()
            for agent, mine in zip(chain, own, strict=True):
                use, hand_on = meaning(mine, "allow"), meaning(mine, "delegate")
                if above is not None:
                    use &= above | delegable
                    hand_on &= above | delegable
                effective = world.agents.authority.effective_policy(agent)
                assert meaning(effective, "allow") == use
                assert meaning(effective, "delegate") == hand_on
                for cls, perm in PAIRS:
                    for name in NAMES:
                        allowed = world.agents.authority.allows(agent, cls, name, perm)
                        assert allowed == ((cls, perm, name) in use)
                        told, _ = world.agents.authority.explain(agent, cls, name, perm)
                        if cls != "agent":
                            assert told == allowed
                above, delegable = use, hand_on


@given(policies, policies)
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_is_accepted_for_a_child_is_covered(
    tmp_path_factory: pytest.TempPathFactory, above: list[Rule], wanted: list[Rule]
) -> None:
    with world_in(tmp_path_factory.mktemp("world")) as world:
        parent, child = family(world, "p", "c")
        world.agents.journal.update(parent, policy=text(parent, above))
        try:
            world.agents.authority.check_policy(child, wanted)
        except DeniedError as error:
            assert 'exceeds what the parent "p" may use or delegate' in error.sentence
            assert not all(map(Rules.of(above).covers, wanted))
        else:
            assert meaning(wanted, "allow", "delegate") <= meaning(above, "allow", "delegate")


def test_a_root_agents_policy_has_no_bound(world: World) -> None:
    (agent,) = family(world, "p")
    world.agents.authority.check_policy(agent, policy.parse("allow p_t agent:* stop", "p_t"))


def test_a_detached_childs_bound_stays_what_it_was(world: World) -> None:
    parent, child = family(world, "p", "c")
    world.agents.journal.update(child, life="detached", bound_policy="allow c_t tool:a* execute\n")
    world.agents.journal.update(parent, policy="allow p_t tool:* execute\n")
    authority = world.agents.authority
    authority.check_policy(child, policy.parse("allow c_t tool:ab execute", "c_t"))
    with pytest.raises(DeniedError, match=r"tool:b execute exceeds"):
        authority.check_policy(child, policy.parse("allow c_t tool:b execute", "c_t"))


def test_a_child_of_a_removed_parent_has_nothing(world: World) -> None:
    parent, child = family(world, "p", "c")
    world.agents.journal.update(child, life="detached", policy="allow c_t tool:x execute\n")
    world.agents.journal.update(parent, policy="allow p_t tool:* execute\n")
    assert world.agents.authority.effective_policy(child)
    world.agents.journal.update(parent, status=Status.DEAD)
    world.agents.removals.remove(parent)
    assert world.agents.authority.effective_policy(child) == policy.EMPTY


NETWORK = "network:default connect\n"


def test_the_network_is_not_taken_from_what_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child = family(world, "p", "c")
    authority = world.agents.authority
    world.agents.journal.update(parent, policy=f"delegate p_t {NETWORK}")
    world.agents.journal.update(child, policy=f"allow c_t {NETWORK}")
    with pytest.raises(WrongStateError, match='"c" is running with the network'):
        authority.check_taking(parent, policy.EMPTY)
    with pytest.raises(WrongStateError, match='"c" is running with the network'):
        authority.check_taking(child, policy.EMPTY)
    assert authority.allows(child, "network", "default", "connect"), "nothing is changed"
    with monkeypatch.context() as patched, pytest.raises(WrongStateError):
        patched.setattr(Agent, "__setattr__", None)  # whoever looks on meanwhile sees no other
        authority.check_taking(parent, policy.EMPTY)
    world.agents.journal.update(child, status=Status.DEAD)
    authority.check_taking(parent, policy.EMPTY)


def test_a_network_with_a_name_is_taken_from_what_runs(world: World) -> None:
    parent, child = family(world, "p", "c")
    authority = world.agents.authority
    world.agents.journal.update(parent, policy="allow p_t network:* connect\n")
    world.agents.journal.update(child, policy="allow c_t network:api connect\n")
    with pytest.raises(WrongStateError, match='"p" is running with the network'):
        authority.check_taking(parent, policy.parse("allow p_t network:a* connect", "p_t"))
    authority.check_taking(child, policy.EMPTY)
    kept = "allow p_t network:default connect\n"
    authority.check_taking(parent, policy.parse(kept, "p_t"))
    world.agents.journal.update(parent, policy=kept)
    assert not authority.allows(child, "network", "api", "connect")


def has(world: World, *names: str) -> None:
    """There are these spaces."""
    for name in names:
        world.agents.spaces.adopt(name, 1000)


def begin(world: World, *agents: Agent) -> None:
    """As if they were started now."""
    for agent in agents:
        trees, _ = world.agents.authority.trees(agent)
        world.agents.journal.update(agent, trees=trees)


def test_a_mounted_space_is_not_taken_from_what_runs(world: World) -> None:
    parent, child = family(world, "p", "c")
    authority = world.agents.authority
    has(world, "a", "b")
    world.agents.journal.update(parent, policy="allow p_t shared:* read,write\n")
    world.agents.journal.update(child, policy="allow c_t shared:a read\n")
    begin(world, parent, child)
    assert parent.trees == {"shared:a": "rw", "shared:b": "rw"}
    assert child.trees == {"shared:a": "ro"}
    lesser = policy.parse("allow p_t shared:* read", "p_t")
    with pytest.raises(WrongStateError, match='"p" is running with shared:a mounted'):
        authority.check_taking(parent, lesser)
    with pytest.raises(WrongStateError, match='"c" is running with shared:a mounted'):
        authority.check_taking(child, policy.EMPTY)
    world.agents.journal.update(child, status=Status.DEAD)
    authority.check_taking(child, policy.EMPTY)
    world.agents.journal.update(parent, status=Status.DEAD)
    authority.check_taking(parent, policy.EMPTY)


def test_a_space_that_is_made_later_is_in_no_cell_and_can_be_taken(world: World) -> None:
    (agent,) = family(world, "p")
    world.agents.journal.update(agent, policy="allow p_t shared:* read\n")
    begin(world, agent)
    has(world, "a")
    world.agents.authority.check_taking(agent, policy.EMPTY)


def test_a_line_of_a_space_is_held_even_where_the_cell_is_of_an_older_version(
    world: World,
) -> None:
    parent, child = family(world, "p", "c")
    authority = world.agents.authority
    both = "shared:a read,write\n"
    world.agents.journal.update(parent, policy=f"allow p_t {both}", mount="shared:a /t rw\n")
    world.agents.journal.update(child, policy="allow c_t shared:a read\n")
    with pytest.raises(WrongStateError, match='"p" is running with shared:a mounted'):
        authority.check_taking(parent, policy.parse("allow p_t shared:a read", "p_t"))
    with pytest.raises(WrongStateError, match='"c" is running with shared:a mounted'):
        authority.check_taking(child, policy.EMPTY)
    assert [m.mode for m in authority.effective_mounts(child)] == ["ro"]


def trees(world: World, agent: Agent) -> dict[str, str]:
    return world.agents.authority.trees(agent)[0]


def test_a_child_has_what_its_own_policy_gives_whatever_its_parent_has(world: World) -> None:
    parent, child = family(world, "p", "c")
    has(world, "a", "b", "c")
    world.agents.journal.update(
        parent, policy="allow p_t shared:a read\ndelegate p_t shared:b read,write\n"
    )
    world.agents.journal.update(child, policy="allow c_t shared:* read,write\n")
    assert trees(world, parent) == {"shared:a": "ro"}
    assert trees(world, child) == {"shared:a": "ro", "shared:b": "rw"}
    world.agents.journal.update(parent, mount="- /ctx/shared/b hide\n")
    assert trees(world, child) == {"shared:a": "ro"}, "what a line hides counts for the tree"
    world.agents.journal.update(child, policy="")
    assert trees(world, child) == {}


def test_a_cell_has_32_spaces_those_that_are_named_first(world: World) -> None:
    (agent,) = family(world, "p")
    has(world, *(f"s{n:02}" for n in range(40)), "z")
    world.agents.journal.update(agent, policy="allow p_t shared:* read\nallow p_t shared:z write")
    found, left_out = world.agents.authority.trees(agent)
    assert found == {"shared:z": "rw", **{f"shared:s{n:02}": "ro" for n in range(31)}}
    assert left_out == [f"s{n:02}" for n in range(31, 40)]


def test_homes_come_by_lines_and_to_a_child_only_if_its_parent_has_one(world: World) -> None:
    parent, child, grandchild = family(world, "p", "c", "g")
    authority = world.agents.authority
    line = mounts.parse("home: /h rw")
    with pytest.raises(DeniedError, match='"home:" rw exceeds the view of the parent "p"'):
        authority.check_mounts(child, line)
    authority.check_mounts(parent, line)
    world.agents.journal.update(parent, mount="home: /h ro\n")
    assert trees(world, parent) == {"home:1000": "ro"}
    assert trees(world, child) == {}, "it has the parent's line, and none of its own"
    with pytest.raises(DeniedError, match="it is read-only there"):
        authority.check_mounts(child, line)
    own = mounts.parse("home: /own ro")
    authority.check_mounts(child, own)
    world.agents.journal.update(child, mount="home: /own ro\n", owner=2000)
    with pytest.raises(DeniedError, match="it is hidden there"):
        authority.check_mounts(child, own)
    with pytest.raises(DeniedError, match="files of another user"):
        authority.check_mounts(grandchild, mounts.parse("/run/ctxfs/tree/home/0/x /x ro"))


@pytest.mark.parametrize("source", ["shared:a", "/run/ctxfs/tree/shared/a/b", "/t/b", "/u/b"])
def test_a_line_of_a_space_needs_the_childs_own_policy(world: World, source: str) -> None:
    """By whatever path of its parent's view it names it."""
    parent, child = family(world, "p", "c")
    authority = world.agents.authority
    world.agents.journal.update(
        parent,
        policy="allow p_t shared:a read,write\n",
        mount="shared:a /t rw\n/run/ctxfs/tree/shared/a /u rw\n",
    )
    for text, missing in (("", "ro"), ("shared:a read", "rw")):
        world.agents.journal.update(child, policy=text and f"allow c_t {text}\n")
        with pytest.raises(DeniedError, match=f"{source} {missing}: shared:a .* is not in the"):
            authority.check_mounts(child, mounts.parse(f"{source} /x {missing}"))
    authority.check_mounts(child, mounts.parse(f"{source} /x ro"))
    assert authority.path_mode(child, "/t/b") == authority.path_mode(child, "/u") == "ro"
    assert authority.path_mode(child, "/usr") == "rw"


def test_what_a_parent_has_less_of_in_a_tree_is_not_handed_in(world: World) -> None:
    parent, child = family(world, "p", "c")
    for agent in (parent, child):
        policy_text = f"allow {agent.label} shared:a read,write\n"
        world.agents.journal.update(agent, policy=policy_text)
    check = world.agents.authority.check_mounts
    said = '"/run/ctxfs/tree/shared/a/x" in it is hidden there'
    for hidden in ("/ctx/shared/a/data/x", "/run/ctxfs/tree/shared/a/x"):
        world.agents.journal.update(parent, mount=f"- {hidden} hide\n")
        with pytest.raises(DeniedError, match=said):
            check(child, mounts.parse("shared:a /x ro"))
    world.agents.journal.update(parent, mount="/y /ctx/shared/a/data/x ro\n")
    check(child, mounts.parse("shared:a /x ro"))
    with pytest.raises(DeniedError, match="in it is read-only there"):
        check(child, mounts.parse("shared:a /x rw"))


def test_why_names_the_lines_and_what_is_missing(world: World) -> None:
    top, middle, bottom = family(world, "top", "mid", "low")
    world.agents.journal.update(top, policy="# a comment\ndelegate top_t tool:* execute\n")
    world.agents.journal.update(middle, policy="allow mid_t  tool:Work* execute\n")
    world.agents.journal.update(bottom, policy="allow low_t tool:WorkList execute\n")
    why = world.agents.authority.explain
    assert why(bottom, "tool", "WorkList", "execute") == (
        True,
        [
            "low: line 1: allow low_t tool:WorkList execute",
            "mid: line 1: allow mid_t tool:Work* execute",
            "top: line 2: delegate top_t tool:* execute",
        ],
    )
    allowed, lines = why(bottom, "tool", "TaskList", "execute")
    assert not allowed
    assert lines[:2] == [
        "low: no line to allow tool:TaskList execute",
        "mid: no line to allow or delegate tool:TaskList execute",
    ]
    assert why(top, "tool", "WorkList", "execute")[0] is False, "delegated, not allowed"


def test_why_tells_of_another_owner(world: World) -> None:
    (agent,) = family(world, "p")
    world.agents.births.create(operator(1001), "foreign")
    world.agents.journal.update(agent, policy="allow p_t agent:* read\n")
    allowed, lines = world.agents.authority.explain(agent, "agent", "foreign", "read")
    assert not allowed
    assert '"foreign" belongs to uid 1001' in lines[-1]
    world.agents.journal.update(agent, policy_of_root=("allow agent:* read",))
    assert world.agents.authority.explain(agent, "agent", "foreign", "read")[0]


# mounts

ABOVE = mounts.parse("/a /ro ro\n/b /rw rw nosuid,noexec\n- /rw/secret hide\n/c /ro/open rw\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/rw/x /m rw", ""),
        ("/rw /m ro", ""),
        ("/ro/x /m ro", ""),
        ("/ro /m rw", "it is read-only there"),
        ("/ro/x /m rw", "it is read-only there"),
        ("/ro/open/x /m rw", ""),
        ("/rw/secret /m ro", "it is hidden there"),
        ("/rw/secret/x /m ro", "it is hidden there"),
        ("/rw/secrets /m rw", ""),
        ("/usr/bin /m rw", "it is read-only there"),
        ("/usr /m ro", ""),
        ("/elsewhere /m rw", ""),
        ("- /ro hide", ""),
    ],
)
def test_a_childs_line_is_within_its_parents_view(line: str, why: str) -> None:
    mount = mounts.parse_line(line)
    assert mount is not None
    assert mounts.excess(mount, mounts.Index(ABOVE), ("/usr",)) == why


def test_what_is_in_force_keeps_what_restricts() -> None:
    own = mounts.parse("/ro/x /m1 rw\n/rw/x /m2 rw nodev\n/rw /m3 ro noexec\n- /m4 hide\n")
    above = mounts.Index(ABOVE)
    found = [mounts.within(line, above.covering(line.source), "") for line in own]
    assert [(m.target, m.mode, m.options) for m in found] == [
        ("/m1", "ro", ()),
        ("/m2", "rw", ("nodev", "nosuid", "noexec")),
        ("/m3", "ro", ("noexec", "nosuid")),
        ("/m4", "hide", ()),
    ]


def test_a_line_that_exceeds_the_parent_names_it(world: World) -> None:
    parent, child = family(world, "p", "c")
    world.agents.journal.update(parent, mount="/srv /data ro\n")
    with pytest.raises(DeniedError, match='"/data/x" rw exceeds the view of the parent "p"'):
        world.agents.authority.check_mounts(child, mounts.parse("/data/x /m rw\n"))


def test_what_a_parent_lost_is_found_at_the_start(world: World) -> None:
    parent, child = family(world, "p", "c")
    world.agents.journal.update(parent, policy="allow p_t tool:* execute\n")
    world.agents.journal.update(child, policy="allow c_t tool:x execute\n")
    world.agents.authority.check_start(child)
    world.agents.journal.update(parent, policy="")
    with pytest.raises(DeniedError, match="tool:x execute exceeds"):
        world.agents.authority.check_start(child)


def test_what_is_known_of_a_policy_outlives_what_others_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir, rmdir and the policies of strangers make nobody's policy be read again."""
    parent, child, other = family(world, "p", "c", "o")
    world.agents.journal.update(parent, policy="allow p_t agent:* create\n")
    world.agents.journal.update(child, policy="allow c_t agent:x create\n")
    authority = world.agents.authority
    authority.effective_policy(child)
    parsed: list[str] = []
    parse = policy.parse

    def counting(text: str, label: str, *, may_delegate: bool = True) -> Rules:
        parsed.append(label)
        return parse(text, label, may_delegate=may_delegate)

    monkeypatch.setattr(policy, "parse", counting)
    world.agents.removals.remove(world.agents.births.create(operator(1000), "x"))
    world.agents.journal.update(other, policy="allow o_t agent:y create\n")
    before = authority.effective_policy(child)
    assert authority.effective_policy(child) is before
    assert not parsed
    world.agents.journal.update(parent, policy="")
    assert authority.effective_policy(child) == policy.EMPTY, "of it, all below is another"
    assert parsed == ["p_t"]


def test_what_is_known_of_policies_is_bounded(world: World) -> None:
    world.agents.authority._known._most = 100
    agents = [world.agents.births.create(operator(1000), f"a{n}") for n in range(30)]
    for agent in agents:
        world.agents.journal.update(
            agent, policy=f"allow {agent.label} tool:{agent.name} execute\n"
        )
        world.agents.authority.effective_policy(agent)
    assert len(world.agents.authority._known) <= 10
    for agent in agents:
        assert world.agents.authority.allows(agent, "tool", agent.name, "execute")
