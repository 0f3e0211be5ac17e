"""Policies as sets of concrete permissions: what is written, covered, inherited."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import MalformedError
from runtime.texts import policy
from runtime.texts.policy import PERMS, Rule, Rules

#: every short name of a small alphabet: on these, rules are compared as sets
NAMES = ["".join(letters) for n in range(4) for letters in product("ab", repeat=n)]

objects = st.builds(
    lambda text, star: text + star, st.text("ab", max_size=2), st.sampled_from(["", "*"])
).filter(bool)
pairs = st.sampled_from([(c, p) for c in ("agent", "shared", "tool") for p in PERMS[c][:2]])
rules = st.builds(
    lambda kind, pair, name: Rule(kind, pair[0], name, pair[1]),
    st.sampled_from(["allow", "allow", "delegate"]),
    pairs,
    objects,
)
policies = st.lists(rules, max_size=5).map(Rules.of)


@cache
def named(rule: Rule) -> frozenset[tuple[str, str, str]]:
    return frozenset((rule.cls, rule.perm, name) for name in NAMES if rule.matches(name))


def covers(rule: Rule, other: Rule) -> bool:
    """Whether everything that the other one names is named by this rule too."""
    return Rules.of([rule]).covers(other)


def meaning(found: Rules, kind: str | None = None) -> set[tuple[str, str, str]]:
    """The (class, perm, name) that the rules stand for."""
    return set().union(*(named(rule) for rule in found if kind in (None, rule.kind)))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("allow", '"allow" is not a policy line'),
        ("deny t agent:* create", "is not a policy line"),
        ("allow t agent:* create extra", "is not a policy line"),
        ("allow u agent:* create", '"u" is another agent\'s label; use t'),
        ("allow t files:* read", '"files:\\*": unknown class; use agent, shared'),
        ("allow t agent create", "unknown class"),
        ("allow t agent: create", "the object is not a name"),
        ("allow t agent:a*b create", "the object is not a name"),
        ("allow t agent:ä create", "the object is not a name"),
        ("allow t tool:x read", 'unknown permission "read" on tool; use execute'),
        ("allow t agent:x create,", 'unknown permission "" on agent'),
        ("allow t agent:x create,fly", 'unknown permission "fly" on agent'),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(line: str, wrong: str) -> None:
    with pytest.raises(MalformedError, match=f"^line 3: .*{wrong}"):
        policy.parse(f"# comment\n\n{line}\n", "t")
    with pytest.raises(MalformedError, match=f"^{wrong}|^[^l].*{wrong}"):
        policy.parse(line, "t")


def test_delegation_is_the_operators() -> None:
    line = "delegate t network:default connect"
    assert [rule.kind for rule in policy.parse(line, "t")] == ["delegate"]
    with pytest.raises(MalformedError, match="only an operator may write delegate"):
        policy.parse(line, "t", may_delegate=False)


def test_comments_and_blank_lines_say_nothing() -> None:
    assert policy.parse("# allow t agent:* create\n\n   \n\t# x\n", "t") == policy.EMPTY


def test_each_permission_is_a_rule_of_its_own() -> None:
    assert tuple(policy.parse("allow t agent:rev-* create,start\n", "t")) == (
        Rule("allow", "agent", "rev-*", "create"),
        Rule("allow", "agent", "rev-*", "start"),
    )


def test_only_a_newline_ends_a_line() -> None:
    """A comment stays one, whatever Unicode calls a line break."""
    assert policy.parse("# note\u2028allow t agent:* create\n", "t") == policy.EMPTY


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("a*", "a*", True),
        ("a*", "a", True),
        ("a*", "ab", True),
        ("a*", "ab*", True),
        ("*", "a", True),
        ("a", "a", True),
        ("ab*", "a*", False),
        ("a", "a*", False),
        ("a", "b", False),
        ("ab*", "a", False),
    ],
)
def test_a_prefix_covers_what_it_begins(one: str, other: str, wanted: bool) -> None:
    rule = Rule("allow", "agent", one, "read")
    assert covers(rule, Rule("allow", "agent", other, "read")) is wanted


def test_nothing_is_covered_by_another_class_or_permission() -> None:
    rule = Rule("allow", "shared", "*", "read")
    assert not covers(rule, Rule("allow", "agent", "a", "read"))
    assert not covers(rule, Rule("allow", "shared", "a", "write"))


@given(rules, rules)
def test_covering_is_being_a_superset(one: Rule, other: Rule) -> None:
    same = (one.cls, one.perm) == (other.cls, other.perm)
    contained = {n for n in NAMES if other.matches(n)} <= {n for n in NAMES if one.matches(n)}
    if covers(one, other):
        assert same
        assert contained
    elif same and not other.object.endswith("*"):
        assert not contained


@given(policies, policies)
def test_the_effective_policy_is_the_intersection(
    own: Rules, parent: Rules
) -> None:
    assert meaning(policy.effective(own, parent)) == meaning(own) & meaning(parent)


@given(policies, policies)
def test_an_effective_rule_is_covered_by_its_own_and_by_the_parents(
    own: Rules, parent: Rules
) -> None:
    for rule in policy.effective(own, parent):
        assert any(covers(have, rule) and have.kind == rule.kind for have in own)
        assert any(covers(bound, rule) for bound in parent)


@given(policies, policies)
def test_what_is_delegated_only_is_not_allowed(
    own: Rules, parent: Rules
) -> None:
    assert meaning(policy.effective(own, parent), "allow") <= meaning(own, "allow")


@given(policies)
def test_a_root_agents_own_policy_is_the_bound(own: Rules) -> None:
    assert policy.effective(own, None) == own


@given(policies, policies, policies)
def test_a_grandchild_has_no_more_than_any_above(
    a: Rules, b: Rules, c: Rules
) -> None:
    lowest = policy.effective(a, policy.effective(b, c))
    assert meaning(lowest) <= meaning(a) & meaning(b) & meaning(c)


@given(policies)
def test_a_rendered_policy_means_the_same_when_parsed(found: Rules) -> None:
    assert set(policy.parse(policy.render(found, "t"), "t")) == set(found)


@given(policies)
def test_rendering_is_the_same_for_the_same_rules(found: Rules) -> None:
    assert policy.render(found, "t") == policy.render(Rules.of(reversed(list(found))), "t")


def test_rendering_joins_permissions_in_the_order_of_the_class() -> None:
    found = policy.parse("allow t agent:a write\nallow t agent:a create,start\n", "t")
    assert policy.render(found, "t") == "allow t agent:a create,start,write\n"


def test_allows_needs_an_allow_rule_that_matches() -> None:
    found = policy.parse("allow t tool:A* execute\ndelegate t tool:B execute\n", "t")
    assert policy.allows(found, "tool", "AgentGet", "execute")
    assert not policy.allows(found, "tool", "B", "execute")
    assert not policy.allows(found, "tool", "C", "execute")
    assert not policy.allows(policy.EMPTY, "tool", "A", "execute")


def test_a_childs_default_has_no_authority_over_others() -> None:
    parent = policy.parse(
        "allow p agent:* create,start,stop,read,write,detach\n"
        "allow p session:x read\n"
        "allow p shared:s read,write\n"
        "allow p tool:* execute\n"
        "allow p model:m use\n"
        "allow p node:* place\n"
        "delegate p network:default connect\n",
        "p",
    )
    assert policy.default_child(parent, "c") == (
        "allow c model:m use\nallow c shared:s read\nallow c tool:* execute\n"
    )


@given(policies)
def test_a_childs_default_is_within_its_parents_allowances(parent: Rules) -> None:
    child = policy.parse(policy.default_child(parent, "c"), "c")
    assert meaning(child) <= meaning(parent, "allow")
    assert {rule.kind for rule in child} <= {"allow"}


def test_a_root_agents_default_is_the_configured() -> None:
    text = policy.default_root(("agent:* create,start", "tool:* execute"), "r")
    assert text == "allow r agent:* create,start\nallow r tool:* execute\n"
    assert len(policy.parse(text, "r")) == 3


def test_relabelling_changes_the_subject_and_nothing_else() -> None:
    text = "# allow old agent:* read\n\n  allow   old agent:old create\nallow other tool:* execute"
    assert policy.relabel(text, "old", "new") == (
        "# allow old agent:* read\n\n  allow   new agent:old create\nallow other tool:* execute"
    )


@pytest.mark.parametrize("old", ["allow", "a", "delegate", "low"])
def test_relabelling_does_not_mistake_the_verb_for_the_subject(old: str) -> None:
    text = f"allow {old} agent:x create\n"
    assert policy.relabel(text, old, "new") == "allow new agent:x create\n"


def test_only_space_and_tab_are_blanks() -> None:
    """What Unicode calls blank is part of a word, as for every other parser here."""
    tabbed = policy.parse("\tallow\tt  agent:a\tcreate \n", "t")
    assert tabbed == policy.parse("allow t agent:a create", "t")
    for other in ("\u00a0", "\u2003", "\x0b", "\r"):
        with pytest.raises(MalformedError):
            policy.parse(f"allow t{other}agent:a create", "t")
        with pytest.raises(MalformedError):
            policy.parse(f"{other}", "t")


def test_a_text_of_an_earlier_version_stays_in_force() -> None:
    text = policy.as_written("allow\u00a0t agent:a create\r\n# a\u00a0comment\n\x0b\n")
    assert text == "allow t agent:a create\n# a\u00a0comment\n\n"
    assert len(policy.parse(text, "t")) == 1
    assert policy.as_written("allow t  agent:a\tcreate\n") == "allow t  agent:a\tcreate\n"


def test_lines_are_counted_without_doubles() -> None:
    text = "allow t agent:a create\n" * 3 + "allow t agent:a stop,create\ndelegate t agent:a stop\n"
    assert policy.parse(text, "t").lines == 2


WIDE = "".join(
    f"allow t agent:{prefix}{n}{star} create,start,stop,read,write,detach\n"
    for n in range(128)
    for prefix, star in (("a" * 40, ""), ("b", "*"))
)


def test_comparing_two_policies_looks_at_few_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    own, parent = policy.parse(WIDE, "t"), policy.parse(WIDE.replace("agent:b", "agent:c"), "t")
    looked = 0
    begins = policy._Objects.covers

    def counting(objects: policy._Objects, wanted: str) -> bool:
        nonlocal looked
        looked += 1
        return begins(objects, wanted)

    monkeypatch.setattr(policy._Objects, "covers", counting)
    found = policy.effective(own, parent)
    assert {rule.object[0] for rule in found} == {"a"}
    assert looked <= len(own)


@given(st.lists(rules, max_size=12), st.lists(rules, max_size=12))
def test_what_is_covered_is_found_as_if_all_were_looked_at(
    bound: list[Rule], wanted: list[Rule]
) -> None:
    found = Rules.of(bound)
    for rule in wanted:
        assert found.covers(rule) == any(covers(have, rule) for have in bound)
        assert found.covers_as(rule) == any(
            have.kind == rule.kind and covers(have, rule) for have in bound
        )
    for name in NAMES:
        for cls, perm in {(rule.cls, rule.perm) for rule in wanted}:
            assert policy.allows(found, cls, name, perm) == any(
                (r.kind, r.cls, r.perm) == ("allow", cls, perm) and r.matches(name) for r in bound
            )
