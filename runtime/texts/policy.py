"""Policy texts: parsing, coverage, and the effective policy. Pure.

A policy is a text of lines ``allow|delegate SUBJECT CLASS:OBJECT PERM[,PERM…]``,
comments and blank lines. Everything not allowed is denied; order is of no
meaning. An object is a name, or a prefix ending in ``*``.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from runtime.errors import MalformedError
from runtime.texts.names import BLANKS, quote, words

#: lines with a rule; a policy with more is refused when it is written, but kept if it was before
LINES_MAX: Final = 256
PERMS: Final[dict[str, tuple[str, ...]]] = {
    "agent": ("create", "start", "stop", "read", "write", "detach"),
    "shared": ("read", "write"),
    "network": ("connect",),
    "tool": ("execute",),
    "session": ("read",),
    "model": ("use",),
    "recipe": ("use",),
    "node": ("place",),
}

_OBJECT: Final = re.compile(r"[a-zA-Z0-9._+:/@-]{0,128}\*?")
_OTHER_BLANKS: Final = re.compile(r"[^\S \t\n]")


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


class _Objects:
    """Names and prefixes that one permission is on, so that what covers a name is found
    without looking at all of them.

    No character of an object sorts before ``*``: whatever begins with a prefix follows it.
    """

    __slots__ = ("all", "names", "prefixes")

    def __init__(self, objects: Iterable[str]) -> None:
        self.all = sorted(set(objects))
        self.names = frozenset(self.all)
        #: without their stars, and without those that another one covers
        self.prefixes: list[str] = []
        for found in self.all:
            if found[-1:] == "*" and not (
                self.prefixes and found.startswith(self.prefixes[-1])
            ):
                self.prefixes.append(found[:-1])

    def covers(self, wanted: str) -> bool:
        """Whether a name, or all that a prefix stands for, is among them."""
        if wanted in self.names:
            return True
        base = wanted.removesuffix("*")
        at = bisect_right(self.prefixes, base)
        return at > 0 and base.startswith(self.prefixes[at - 1])

    def below(self, base: str) -> list[str]:
        """Those that begin so."""
        return self.all[bisect_left(self.all, base) : bisect_left(self.all, base + "\x7f")]


_NONE: Final = _Objects(())
_Group = tuple[str, str, str]


class Rules:
    """The rules of a policy, by kind, class and permission; doubles count once."""

    __slots__ = ("_groups", "_joined")

    def __init__(self, groups: Mapping[_Group, Sequence[str]]) -> None:
        # permissions of one class are mostly on the same objects
        same = {names: _Objects(names) for names in {tuple(found) for found in groups.values()}}
        self._groups = {key: same[tuple(names)] for key, names in groups.items() if names}
        #: the objects of both kinds, by class and permission
        self._joined: dict[tuple[str, str], _Objects] = {}

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> Rules:
        groups: dict[_Group, list[str]] = {}
        for rule in rules:
            groups.setdefault((rule.kind, rule.cls, rule.perm), []).append(rule.object)
        return cls(groups)

    def __iter__(self) -> Iterator[Rule]:
        for (kind, cls, perm), objects in self._groups.items():
            for name in objects.all:
                yield Rule(kind, cls, name, perm)

    def __len__(self) -> int:
        return sum(len(objects.all) for objects in self._groups.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and set(self) == set(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def lines(self) -> int:
        """How many lines are needed to say it: one for each kind and object."""
        said: dict[tuple[str, str], set[str]] = {}
        for (kind, cls, _), objects in self._groups.items():
            said.setdefault((kind, cls), set()).update(objects.all)
        return sum(map(len, said.values()))

    @property
    def groups(self) -> Mapping[_Group, _Objects]:
        """Objects by kind, class and permission."""
        return self._groups

    def objects(self, kind: str, cls: str, perm: str) -> _Objects:
        return self._groups.get((kind, cls, perm), _NONE)

    def joined(self, cls: str, perm: str) -> _Objects:
        """The objects of both kinds."""
        key = (cls, perm)
        found = self._joined.get(key)
        if found is None:
            allow, delegate = (self.objects(kind, cls, perm) for kind in ("allow", "delegate"))
            found = _Objects((*allow.all, *delegate.all)) if delegate.all else allow
            self._joined[key] = found
        return found

    def covers(self, rule: Rule) -> bool:
        """Whether a single rule of any kind covers this one."""
        return self.joined(rule.cls, rule.perm).covers(rule.object)

    def covers_as(self, rule: Rule) -> bool:
        """Whether one of its own kind does."""
        return self.objects(rule.kind, rule.cls, rule.perm).covers(rule.object)


EMPTY: Final = Rules({})


def _parse_line(line: str, label: str, may_delegate: bool) -> tuple[str, str, str, list[str]]:
    """(kind, class, object, permissions) of one line; ``MalformedError``."""
    found = words(line)
    if len(found) != 4 or found[0] not in ("allow", "delegate"):
        raise MalformedError(
            f"{quote(line)} is not a policy line such as: allow {label} agent:rev-* create,start"
        )
    kind, subject, target, perms = found
    if kind == "delegate" and not may_delegate:
        raise MalformedError(f"{quote(line)}: only an operator may write delegate; use allow")
    if subject != label:
        raise MalformedError(f"{quote(subject)} is another agent's label; use {label}")
    cls, name = _split_target(target, ": unknown class; use", "a name or a prefix ending in *")
    wanted = perms.split(",")
    for perm in wanted:
        _check_permission(perm, cls)
    # all policies are made of the same few words
    return sys.intern(kind), sys.intern(cls), name, [sys.intern(perm) for perm in wanted]


def parse_question(perm: str, target: str) -> tuple[str, str]:
    """(class, name) of an object such as ``agent:coder``; ``MalformedError``."""
    cls, name = _split_target(target, " is not CLASS:NAME; use the class", "a name")
    _check_permission(perm, cls)
    return cls, name


def _split_target(target: str, why: str, wanted: str) -> tuple[str, str]:
    cls, separator, name = target.partition(":")
    if not separator or cls not in PERMS:
        raise MalformedError(f"{quote(target)}{why} {', '.join(PERMS)}")
    if not name or not _OBJECT.fullmatch(name):
        raise MalformedError(f"{quote(target)}: the object is not {wanted}")
    return cls, name


def _check_permission(perm: str, cls: str) -> None:
    if perm not in PERMS[cls]:
        raise MalformedError(
            f"unknown permission {quote(perm)} on {cls}; use {', '.join(PERMS[cls])}"
        )


def parse(text: str, label: str, *, may_delegate: bool = True, before: int = 0) -> Rules:
    """The rules of a policy text; ``MalformedError`` naming the first bad line, of a text
    that goes on after so many lines ``before``."""
    groups: dict[_Group, list[str]] = {}
    lines = text.removesuffix("\n").split("\n")
    for line in dict.fromkeys(lines):
        stripped = line.strip(BLANKS)
        if not stripped or stripped[0] == "#":
            continue
        try:
            kind, cls, name, perms = _parse_line(stripped, label, may_delegate)
        except MalformedError as error:
            if before + len(lines) == 1:
                raise
            number = before + lines.index(line) + 1
            raise MalformedError(f"line {number}: {error.sentence}") from None
        for perm in perms:
            groups.setdefault((kind, cls, perm), []).append(name)
    return Rules(groups)


def as_written(text: str) -> str:
    """A text that an earlier version took, whose blanks were all that Unicode calls so."""
    if not _OTHER_BLANKS.search(text):
        return text
    return "\n".join(
        line if line.strip().startswith("#") else " ".join(line.split())
        for line in text.split("\n")
    )


def render(rules: Rules, label: str) -> str:
    """A policy text with one line for each kind and object, permissions in table order."""
    lines = []
    for kind in ("allow", "delegate"):
        for cls in sorted(PERMS):
            perms: dict[str, str] = {}
            for perm in PERMS[cls]:
                for name in rules.objects(kind, cls, perm).all:
                    perms[name] = f"{perms[name]},{perm}" if name in perms else perm
            lines += [f"{kind} {label} {cls}:{name} {perms[name]}\n" for name in sorted(perms)]
    return "".join(lines)


def relabel(text: str, old: str, new: str) -> str:
    """The text with the subject of its rules changed; comments and layout kept."""
    subject = re.compile(rf"^([ \t]*(?:allow|delegate)[ \t]+){re.escape(old)}(?=[ \t])", re.M)
    return subject.sub(lambda match: match[1] + new, text)


def default_root(lines: Iterable[str], label: str) -> str:
    """The configured policy of a root agent: each line a target and its permissions."""
    return "".join(f"allow {label} {line}\n" for line in lines)


def default_child(parent: Rules, label: str) -> str:
    """A child's default: its parent's allowances without authority over others.

    No ``agent:*``, no ``session:*``, no ``node:*`` and no writing to shared spaces.
    """
    kept = {
        (kind, cls, perm): objects.all
        for (kind, cls, perm), objects in parent.groups.items()
        if kind == "allow"
        and cls not in ("agent", "session", "node")
        and not (cls == "shared" and perm == "write")
    }
    return render(Rules(kept), label)


def _within(own: _Objects, bound: _Objects) -> list[str]:
    """The rules that are in both, said by the objects of either."""
    found: list[str] = []
    widest: str | None = None
    for wanted in own.all:
        if bound.covers(wanted):
            found.append(wanted)
        elif wanted[-1:] == "*" and (widest is None or not wanted.startswith(widest)):
            widest = wanted[:-1]
            found += bound.below(widest)
    return found


def effective(own: Rules, parent: Rules | None) -> Rules:
    """The rights of an agent: its own rules within its parent's effective and delegated ones.

    ``parent`` is the parent's effective policy, delegations included; None for
    a root agent, whose own policy is the bound.
    """
    if parent is None:
        return own
    same: dict[tuple[int, int], list[str]] = {}
    groups: dict[_Group, list[str]] = {}
    for (kind, cls, perm), objects in own.groups.items():
        bound = parent.joined(cls, perm)
        pair = id(objects), id(bound)
        if pair not in same:
            same[pair] = _within(objects, bound)
        groups[kind, cls, perm] = same[pair]
    return Rules(groups)


def uncovered(rules: Iterable[Rule], bound: Rules) -> Rule | None:
    """The first rule that no single one of ``bound`` covers."""
    return next((rule for rule in rules if not bound.covers(rule)), None)


@lru_cache(maxsize=64)
def _lines_of(cls: str, perm: str) -> re.Pattern[str]:
    return re.compile(
        rf"^[ \t]*(allow|delegate)[ \t]+[^ \t\n]+[ \t]+{cls}:([^ \t\n]+)[ \t]+"
        rf"(?:[a-z]+,)*{perm}(?:,[a-z]+)*[ \t]*$",
        re.M,
    )


def find_line(
    text: str, kinds: tuple[str, ...], cls: str, name: str, perm: str
) -> tuple[int, str] | None:
    """(number, line) of the first line of these kinds for ``perm`` on ``cls:name``."""
    for match in _lines_of(cls, perm).finditer(text):
        if match[1] in kinds and Rule(match[1], cls, match[2], perm).matches(name):
            return text.count("\n", 0, match.start()) + 1, " ".join(words(match[0]))
    return None


def as_bound(rules: Rules) -> Rules:
    """The rules that bound the children of an agent with these rules: delegations included."""
    return Rules(
        {
            ("allow", cls, perm): rules.joined(cls, perm).all
            for _, cls, perm in rules.groups
        }
    )


def allows(rules: Rules, cls: str, name: str, perm: str) -> bool:
    """Whether an ``allow`` rule grants ``perm`` on ``cls:name``."""
    return rules.objects("allow", cls, perm).covers(name)
