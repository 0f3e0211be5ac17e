"""Policy texts: parsing, coverage, and the effective policy. Pure.

A policy is a text of lines ``allow|delegate SUBJECT CLASS:OBJECT PERM[,PERM…]``,
comments and blank lines. Everything not allowed is denied; order is of no
meaning. An object is a name, or a prefix ending in ``*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from runtime.errors import MalformedError
from runtime.names import quote

PERMS: Final[dict[str, tuple[str, ...]]] = {
    "agent": ("create", "start", "stop", "read", "write", "detach"),
    "shared": ("read", "write"),
    "network": ("connect",),
    "tool": ("execute",),
    "session": ("read",),
    "model": ("use",),
}

_OBJECT: Final = re.compile(r"[a-zA-Z0-9._+:/@-]{0,128}\*?")


@dataclass(frozen=True, slots=True)
class Rule:
    """One permission on one object or prefix."""

    kind: str
    cls: str
    object: str
    perm: str

    @property
    def key(self) -> str:
        """The rule in words, without its subject."""
        return f"{self.kind} {self.cls}:{self.object} {self.perm}"

    def matches(self, name: str) -> bool:
        if self.object.endswith("*"):
            return name.startswith(self.object[:-1])
        return name == self.object

    def covers(self, other: Rule) -> bool:
        """Whether everything that ``other`` names is named by this rule too."""
        if (self.cls, self.perm) != (other.cls, other.perm):
            return False
        if self.object.endswith("*"):
            return other.object.removesuffix("*").startswith(self.object[:-1])
        return self.object == other.object


def _parse_line(line: str, label: str, may_delegate: bool) -> tuple[Rule, ...]:
    words = line.split()
    if len(words) != 4 or words[0] not in ("allow", "delegate"):
        raise MalformedError(
            f"{quote(line)} is no policy line such as: allow {label} agent:rev-* create,start"
        )
    kind, subject, target, perms = words
    if kind == "delegate" and not may_delegate:
        raise MalformedError(f"{quote(line)}: only an operator may delegate; write allow")
    if subject != label:
        raise MalformedError(f"{quote(subject)} is a foreign subject: this agent's is {label}")
    cls, separator, name = target.partition(":")
    if not separator or cls not in PERMS:
        raise MalformedError(f"{quote(target)}: the class is none of: {', '.join(PERMS)}")
    if not name or not _OBJECT.fullmatch(name):
        raise MalformedError(f"{quote(target)}: the object is no name, or prefix ending in *")
    if cls == "network" and name != "default":
        raise MalformedError(f"{quote(target)}: the only network is network:default")
    wanted = perms.split(",")
    for perm in wanted:
        if perm not in PERMS[cls]:
            raise MalformedError(
                f"{quote(perm)} is no permission on {cls}, which has: {', '.join(PERMS[cls])}"
            )
    return tuple(Rule(kind, cls, name, perm) for perm in wanted)


def parse_question(perm: str, target: str) -> tuple[str, str]:
    """(class, name) of an object such as ``agent:coder``; ``MalformedError``."""
    cls, separator, name = target.partition(":")
    if not separator or cls not in PERMS:
        raise MalformedError(f"{quote(target)} is no CLASS:NAME with a class of {', '.join(PERMS)}")
    if not name or not _OBJECT.fullmatch(name):
        raise MalformedError(f"{quote(target)}: the object is no name")
    if perm not in PERMS[cls]:
        raise MalformedError(
            f"{quote(perm)} is no permission on {cls}, which has: {', '.join(PERMS[cls])}"
        )
    return cls, name


def parse(text: str, label: str, *, may_delegate: bool = True) -> tuple[Rule, ...]:
    """The rules of a policy text; ``MalformedError`` naming the first bad line."""
    rules: list[Rule] = []
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            rules.extend(_parse_line(stripped, label, may_delegate))
        except MalformedError as error:
            if len(lines) == 1:
                raise
            raise MalformedError(f"line {number}: {error.sentence}") from None
    return tuple(rules)


def render(rules: Iterable[Rule], label: str) -> str:
    """A policy text with one line for each kind and object, permissions in table order."""
    grouped: dict[tuple[str, str, str], set[str]] = {}
    for rule in rules:
        grouped.setdefault((rule.kind, rule.cls, rule.object), set()).add(rule.perm)
    lines = []
    for (kind, cls, name), perms in sorted(grouped.items()):
        ordered = ",".join(p for p in PERMS[cls] if p in perms)
        lines.append(f"{kind} {label} {cls}:{name} {ordered}\n")
    return "".join(lines)


def relabel(text: str, old: str, new: str) -> str:
    """The text with the subject of its rules changed; comments and layout kept."""
    subject = re.compile(rf"^([ \t]*(?:allow|delegate)[ \t]+){re.escape(old)}(?=[ \t])", re.M)
    return subject.sub(lambda match: match[1] + new, text)


def default_root(lines: Iterable[str], label: str) -> str:
    """The configured policy of a root agent: each line a target and its permissions."""
    return "".join(f"allow {label} {line}\n" for line in lines)


def default_child(parent: Iterable[Rule], label: str) -> str:
    """A child's default: its parent's allowances without authority over others.

    No ``agent:*``, no ``session:*`` and no writing to shared spaces.
    """
    kept = (
        rule
        for rule in parent
        if rule.kind == "allow"
        and rule.cls not in ("agent", "session")
        and not (rule.cls == "shared" and rule.perm == "write")
    )
    return render(kept, label)


def _narrower(one: Rule, other: Rule) -> str | None:
    if one.covers(other):
        return other.object
    if other.covers(one):
        return one.object
    return None


def _intersections(own: Iterable[Rule], parent: tuple[Rule, ...]) -> Iterator[Rule]:
    for rule in own:
        for bound in parent:
            common = _narrower(rule, bound)
            if common is not None:
                yield Rule(rule.kind, rule.cls, common, rule.perm)


def effective(own: tuple[Rule, ...], parent: tuple[Rule, ...] | None) -> tuple[Rule, ...]:
    """What an agent may: its own rules within its parent's effective and delegated ones.

    ``parent`` is the parent's effective policy, delegations included; None for
    a root agent, whose own policy is the bound.
    """
    if parent is None:
        return own
    return tuple(dict.fromkeys(_intersections(own, parent)))


def uncovered(rules: Iterable[Rule], bound: tuple[Rule, ...]) -> Rule | None:
    """The first rule that no single one of ``bound`` covers."""
    return next((r for r in rules if not any(b.covers(r) for b in bound)), None)


def find_line(
    text: str, label: str, kinds: tuple[str, ...], cls: str, name: str, perm: str
) -> tuple[int, str] | None:
    """(number, line) of the first line of these kinds for ``perm`` on ``cls:name``."""
    for number, line in enumerate(text.split("\n"), 1):
        for rule in parse(line, label):
            if rule.kind in kinds and (rule.cls, rule.perm) == (cls, perm) and rule.matches(name):
                return number, " ".join(line.split())
    return None


def as_bound(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """What bounds the children of an agent with these rules: delegations included."""
    return tuple(Rule("allow", rule.cls, rule.object, rule.perm) for rule in rules)


def allows(rules: Iterable[Rule], cls: str, name: str, perm: str) -> bool:
    """Whether an ``allow`` rule grants ``perm`` on ``cls:name``."""
    return any(
        r.kind == "allow" and r.cls == cls and r.perm == perm and r.matches(name) for r in rules
    )
