"""Mount tables: ``source target ro|rw|hide [options]``, one mount a line. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from runtime.errors import MalformedError
from runtime.names import check_absolute, quote

MODES: Final = ("ro", "rw", "hide")
OPTIONS: Final = ("bind", "rbind", "nosuid", "nodev", "noexec")
RESTRICTIONS: Final = ("nosuid", "nodev", "noexec")
_OWN: Final = ("/proc", "/dev")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a table. ``source`` is a path in the creator's view."""

    source: str
    target: str
    mode: str
    options: tuple[str, ...] = ()

    def line(self) -> str:
        options = ",".join(self.options) or "-"
        return f"{self.source}\t{self.target}\t{self.mode}\t{options}\n"


def parse_line(line: str) -> Mount | None:
    """The mount of one line, None for a blank line or comment; ``MalformedError``."""
    stripped = line.strip(" \t")
    if not stripped or stripped.startswith("#"):
        return None
    # With a TAB anywhere, TABs alone separate, so that a path may hold blanks.
    words = [w for w in stripped.split("\t") if w] if "\t" in stripped else stripped.split(" ")
    words = [w.strip(" ") for w in words if w.strip(" ")]
    if not 3 <= len(words) <= 4:
        raise MalformedError(
            f"{quote(line)} is no mount line: source target ro|rw|hide [options], "
            "separated by blanks or TABs"
        )
    source, target, mode = words[:3]
    if mode not in MODES:
        raise MalformedError(f"{quote(mode)} is none of: {', '.join(MODES)}")
    if mode != "hide":
        check_absolute(source, "source")
    check_absolute(target, "target")
    if target == "/" or any(target == own or target.startswith(own + "/") for own in _OWN):
        raise MalformedError(
            f"target {quote(target)}: /, /proc and /dev are the agent's own and take no mount"
        )
    options: tuple[str, ...] = ()
    if len(words) == 4 and words[3] != "-":
        options = tuple(words[3].split(","))
        for option in options:
            if option not in OPTIONS:
                raise MalformedError(
                    f"{quote(option)} is no mount option: - or a list of {', '.join(OPTIONS)}"
                )
        if {"bind", "rbind"} <= set(options):
            raise MalformedError(f"{quote(words[3])}: bind and rbind exclude each other")
    return Mount(source, target, mode, options)


def parse(text: str) -> tuple[Mount, ...]:
    """The mounts of a table; ``MalformedError`` naming the first bad line."""
    mounts: list[Mount] = []
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        try:
            mount = parse_line(line)
            if mount is None:
                continue
            if mount.target in seen:
                raise MalformedError(f"target {quote(mount.target)} is there twice")
        except MalformedError as error:
            raise MalformedError(f"line {number}: {error.sentence}") from None
        seen.add(mount.target)
        mounts.append(mount)
    return tuple(mounts)


def covering(table: Iterable[Mount], path: str) -> Mount | None:
    """The line that decides about a path: the last whose target it is, or is below."""
    found = None
    for mount in table:
        if path == mount.target or path.startswith(mount.target.rstrip("/") + "/"):
            found = mount
    return found


def excess(own: Mount, above: Iterable[Mount], base: Iterable[str]) -> str:
    """What a child's line wants more than its parent has; empty if nothing.

    ``above`` is the parent's effective table, ``base`` the read-only entries of
    its base view. What neither knows is left to the sandbox, which is made
    inside the parent's and can name no more.
    """
    if own.mode == "hide":
        return ""
    cover = covering(above, own.source)
    if cover is not None and cover.mode == "hide":
        return "it is hidden there"
    if own.mode == "rw":
        if cover is not None and cover.mode == "ro":
            return "it is read-only there"
        if cover is None and any(own.source == b or own.source.startswith(b + "/") for b in base):
            return "it is read-only there"
    return ""


def effective(parent: Iterable[Mount], own: Iterable[Mount]) -> tuple[Mount, ...]:
    """The table in force: the parent's, then the agent's own within it.

    A line's source is a path in the parent's view: what is read-only there stays
    so, and restrictive options stick.
    """
    above = tuple(parent)
    return (*above, *(_within(mount, covering(above, mount.source)) for mount in own))


def _within(own: Mount, cover: Mount | None) -> Mount:
    if own.mode == "hide" or cover is None:
        return own
    mode = "ro" if cover.mode == "ro" else own.mode
    kept = tuple(o for o in cover.options if o in RESTRICTIONS and o not in own.options)
    return Mount(own.source, own.target, mode, (*own.options, *kept))


def render(mounts: Iterable[Mount]) -> str:
    return "".join(mount.line() for mount in mounts)
