"""The most that an agent of another machine may have here, and what ``put`` says of it. Pure.

A lead says both as texts, which a stranger may have written: whatever is unknown is refused, so
that nothing is left out that an older daemon would have heeded. What the lead lets an agent do is
narrowed to what this machine offers to others' agents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from runtime.agents.bundles import PACK, Given
from runtime.agents.messages import check_id
from runtime.errors import MalformedError, TooLargeError, UnsupportedError
from runtime.peers.contents import SUPPLIES
from runtime.records.config import Config
from runtime.records.items import DELEGATION
from runtime.records.model import FAMILIES
from runtime.texts import limits, mounts, policy
from runtime.texts.names import (
    check_known,
    check_name,
    parse_duration,
    parse_number,
    parse_size,
    quote,
)
from runtime.texts.policy import Rules
from runtime.texts.said import Said

#: of a message, what it has beside what it says
OF_MESSAGES: Final = frozenset(("op", "n", "agent"))
#: what a lead calls the directory of recipes
RECIPES: Final = "node:recipes"
#: of messages that a lead sends
_PROVENANCES: Final = ("operator", "supervisor", "agent", DELEGATION, "bootstrap")
#: of a run
_RUN_MAX: Final = 1 << 31
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
#: the files of an agent that ``put`` has beside the label, in an order in which they can be
#: written: first the policy, by which others are judged
FILES: Final = (
    *("policy", "limits", "mode", "exec", "model", "env", "path", "cwd", "meta.json", "homedir"),
    "author",
)
_CONFIG: Final = frozenset(
    (*("life", "iso", "workspace", "context", "meta", "mount", "tty", "label", "profile"),
     *FILES)
) - {"meta.json"}  # fmt: skip
_PUT: Final = frozenset(
    (*("name", "session", "run", "config", "supervisor", "takes", "bound", "files", "worktree"),
     "first")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a lead lets an agent have. ``depth`` is of those below it."""

    policy: str
    families: tuple[str, ...]
    depth: int
    limits: Mapping[str, str]

    @classmethod
    def kept(cls, values: Mapping[str, Any]) -> Bound:
        """As the record of an agent has it, of whichever version."""
        return cls(**{name: values[name] for name in cls.__slots__})

    @classmethod
    def read(cls, values: object, label: str, before: Bound | None = None) -> Bound:
        """The bound that a lead says, or what it says anew of one, which can only become less."""
        said = Said(values, "bound")
        known = asdict(before) if before else {}
        said.only((*cls.__slots__, *OF_MESSAGES))
        text = said.get("policy", str, known.get("policy"))
        families = said.get("families", list, list(known.get("families", ())))
        found = cls(
            policy=text,
            families=tuple(each for each in FAMILIES if each in families),
            depth=said.get("depth", int, known.get("depth")),
            limits=said.texts("limits"),
        )
        rules = policy.parse(text, label)
        if before is None:
            return found
        rules = policy.effective(rules, policy.parse(before.policy, label))
        return cls(
            policy=policy.render(rules, label),
            families=tuple(each for each in found.families if each in before.families),
            depth=min(found.depth, before.depth),
            limits=least(found.limits, before.limits),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """An agent as its lead puts it here; ``run`` is the number of its first run, ``first`` what is
    said of its first message."""

    name: str
    session: str
    run: int
    config: Mapping[str, str]
    limits: Mapping[str, str]
    supervisor: str
    takes: bool
    bound: Bound
    files: Mapping[str, tuple[int, str]]
    worktree: Given | None
    first: Mapping[str, str]

    @classmethod
    def read(cls, values: Mapping[str, Any], alias: str) -> Put:
        """``MalformedError`` and ``UnsupportedError``."""
        said = Said(values, "put")
        said.only((*_PUT, *OF_MESSAGES))
        written = Said(said.get("config", dict), "config")
        written.only(_CONFIG)
        limits = written.texts("limits")
        config = said.texts("config", but="limits")
        config.setdefault("label", f"{check_name(said.word('name'))}_t")
        _check_possible(config)
        if "meta" in config:
            config["meta.json"] = config.pop("meta")
        files = dict(_documents(said.get("files", dict, {})))
        return cls(
            name=said.word("name"),
            session=check_name(said.word("session")),
            run=_run(said),
            config=config,
            limits=limits,
            supervisor=at_lead(said.word("supervisor"), alias),
            takes=said.get("takes", bool),
            bound=Bound.read(said.get("bound", dict), config["label"]),
            files=files,
            worktree=_worktree(said, config, files),
            first=_first(said.get("first", dict, {}), alias),
        )


def _worktree(
    said: Said, config: Mapping[str, str], files: Collection[str]
) -> Given | None:
    wanted = config.get("workspace") == "worktree"
    if wanted is not (PACK in files):
        raise MalformedError(f"put is without {PACK}, or without workspace worktree")
    return Given.read(said.get("worktree", dict, {}), said.word("name")) if wanted else None


def _run(said: Said) -> int:
    number: int = said.get("run", int)
    if number > _RUN_MAX:
        raise MalformedError(f"put has the number of a run above {_RUN_MAX}")
    return max(number, 1)


def _check_possible(config: Mapping[str, str]) -> None:
    """``UnsupportedError`` for what no placed agent can be."""
    wanted = {"life": "owned", "iso": "sandbox", "workspace": "inherit", "tty": ""}
    for name, value in wanted.items():
        if (name, config.get(name)) == ("workspace", "worktree"):
            continue
        if config.get(name, value) != value:
            raise UnsupportedError(
                f"{name}={quote(config[name])}: an agent of another machine can only have "
                f"{value or 'none'}"
            )
    if config.get("context", "fresh") not in ("fresh", "fork"):
        raise MalformedError(f"context: {quote(config['context'])} is not fresh or fork")


def _first(values: Mapping[str, Any], alias: str) -> dict[str, str]:
    if not values:
        return {}
    said = Said(values, "first")
    said.only(("id", "from", "provenance"))
    return {
        "name": check_id(said.word("id")),
        "sender": at_lead(said.word("from"), alias),
        "provenance": provenance_of(said),
    }


def provenance_of(said: Said) -> str:
    """The provenance of a message that a lead sends; ``MalformedError``."""
    return check_known(said.word("provenance"), {each: each for each in _PROVENANCES}, "provenance")


def at_lead(text: str, alias: str) -> str:
    """Somebody at a lead, as an agent here is told: the name of an agent says whose it is."""
    if text == "operator":
        return text
    kind, _, name = text.partition(":")
    if kind != "agent":
        raise MalformedError(f"{quote(text)} is not operator or agent:NAME")
    return f"agent:{check_name(name.removesuffix(f'@{alias}'))}@{alias}"


def _documents(values: Mapping[str, Any]) -> Iterable[tuple[str, tuple[int, str]]]:
    for name, value in values.items():
        if name not in SUPPLIES:
            raise MalformedError(f"{quote(name)} is not one of {', '.join(SUPPLIES)}")
        size, digest = value if isinstance(value, list) and len(value) == 2 else (-1, "")
        right = size.__class__ is int and size >= 0 and isinstance(digest, str)
        if not right or not _DIGEST.fullmatch(digest):
            raise MalformedError(f"{name} is without a right size and SHA-256")
        yield name, (size, digest)


def check_sizes(files: Mapping[str, tuple[int, str]], config: Config) -> None:
    """``TooLargeError`` if a document, or a pack, is longer than there may be here."""
    for name, (size, _) in files.items():
        most = config.artifact_max if name == PACK else config.document_max
        if size > most:
            raise TooLargeError(f"{name} has {size} bytes, and at most {most} here")


# limits


_CPU_PERIOD: Final = 100_000


def _share(text: str) -> float:
    """The processors of a ``cpu.max``."""
    quota, _, period = text.partition(" ")
    if quota == "max":
        return math.inf
    # a period of 0 is one that the kernel refuses
    return parse_number(quota) / (parse_number(period or "0") or _CPU_PERIOD)


_MEASURES: Final[dict[str, Callable[[str], float]]] = {
    "cpu.max": _share,
    "timeout": parse_duration,
    "grace": parse_duration,
    "log_max": parse_size,
    "memory.max": parse_size,
    limits.COST: limits.parse_cost,
}


def _amount(key: str, text: str) -> float:
    if text == "max":
        return math.inf
    if limits.network_of(key) is not None:
        return parse_size(text)
    return _MEASURES.get(key, parse_number)(text)


def least(own: Mapping[str, str], bound: Mapping[str, str]) -> dict[str, str]:
    """Limits, none above those of a bound."""
    found = dict(own)
    for key, most in bound.items():
        if key not in found or _amount(key, most) < _amount(key, found[key]):
            found[key] = most
    return found


def settable(wanted: Mapping[str, str]) -> dict[str, str]:
    """The limits of processes: what is used at networks is not limited, but left out."""
    spent = (limits.TOKENS, limits.COST)
    return {
        key: value
        for key, value in wanted.items()
        if key not in spent and limits.network_of(key) is None
    }


def lines_of(limits: Mapping[str, str]) -> str:
    """As in the file ``limits``."""
    return "".join(f"{key}={value}\n" for key, value in limits.items())


# policy


def narrowed(
    rules: Rules,
    bound: Bound,
    label: str,
    *,
    networks: Iterable[str],
    shared: Iterable[str],
    metered: Collection[str],
    limited: Mapping[str, str],
) -> tuple[Rules, list[str]]:
    """A policy as it is here, and which of its objects fell away: only the ``networks`` and
    ``shared`` spaces that this machine offers are there, and none whose use is ``limited``."""
    most = {key: value for key, value in limited.items() if value != "max"}
    closed = {name for key in most if (name := limits.network_of(key)) is not None}
    if not most.keys().isdisjoint((limits.TOKENS, limits.COST)):
        closed |= set(metered)
    offered = {"network": [each for each in networks if each not in closed], "shared": [*shared]}
    offer = Rules(
        {
            ("allow", cls, perm): offered.get(cls, ["*"])
            for cls, perms in policy.PERMS.items()
            for perm in perms
            if cls != "node"
        }
    )
    allowed = policy.effective(rules, policy.parse(bound.policy, label))
    found = policy.effective(allowed, offer)
    lost = [
        f"{cls}:{name}"
        for (_, cls, perm), objects in allowed.groups.items()
        for name in objects.all
        if cls in offered and not found.joined(cls, perm).below(name.removesuffix("*"))
    ]
    return found, sorted(set(lost))


# mounts


def mount_table(text: str, recipes: Path) -> str:
    """A table of offered directories, with where they are; ``MalformedError`` for anything else:
    a lead, or who has its key, finds no file of its uid here."""
    lines = []
    for line in text.split("\n"):
        stripped = line.strip(" \t")
        offered = stripped.startswith(RECIPES)
        mount = mounts.parse_line(stripped.replace(RECIPES, str(recipes), 1))
        if mount is None:
            continue
        inside = offered and f"{mount.source}/".startswith(f"{recipes}/")
        if mount.mode != "hide" and not inside:
            raise MalformedError(f"{quote(line)}: this machine offers only {RECIPES}/PATH")
        if mount.mode == "rw":
            raise MalformedError(f"{quote(line)}: what a machine offers is read-only: use ro")
        lines.append(mount.line())
    mounts.check_count(len(lines))
    table = "".join(lines)
    mounts.parse(table)
    return table
