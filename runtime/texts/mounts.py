"""Mount tables: ``source target ro|rw|hide [options]``, one mount a line. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from runtime.errors import MalformedError, QuotaError, UnansweredError
from runtime.ids import NO_BOOT, BootId
from runtime.texts.names import check_absolute, check_name, quote

MODES: Final = ("ro", "rw", "hide")
OPTIONS: Final = ("bind", "rbind", "nosuid", "nodev", "noexec")
RESTRICTIONS: Final = ("nosuid", "nodev", "noexec")
#: in force for one agent, its parents' with its own: each costs the kernel a mount
LINES_MAX: Final = 2048
#: lines of durable trees of one agent, and spaces at their own places: each is a descriptor while
#: its cell is made (DESCRIPTORS_MAX in common.h)
TREES_MAX: Final = 16
SPACES_MAX: Final = 32
#: what is no path but a durable tree: of a space, and of the owner's own files
SHARED_TREE: Final = "shared:"
HOME_TREE: Final = "home:"
#: a directory that the node of a placed agent offers
AT_NODE: Final = "node:"
_OWN: Final = ("/proc", "/dev")
_BELOW_OWN: Final = ("/proc/", "/dev/")
#: of durable trees that can be given to agents
_KINDS: Final = ("shared", "home")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a table. ``source`` is a path in the creator's view, or a durable tree.

    ``identity`` says which file the path must lead to (look.c): ``DEVICE:INODE``, ``*`` for
    any, if no link is on the way, ``-`` for any. Of a space it is the number of the record. ``of``
    is the durable tree that the line shows something of, ``KIND:NAME``; it is looked for when what
    is in force is asked for.
    """

    source: str
    target: str
    mode: str
    options: tuple[str, ...] = ()
    identity: str = "-"
    of: str = ""

    @property
    def tree(self) -> bool:
        """Whether it is a durable tree, which the daemon hands in."""
        return self.mode != "hide" and is_tree(self.source)

    @property
    def path(self) -> bool:
        """Whether its source is a path in the creator's view."""
        return self.mode != "hide" and not self.tree and not self.at_node

    @property
    def at_node(self) -> bool:
        """Whether its source is a directory of the node at which the agent is placed."""
        return self.mode != "hide" and self.source.startswith(AT_NODE)

    def line(self) -> str:
        options = ",".join(self.options) or "-"
        return f"{self.source}\t{self.target}\t{self.mode}\t{options}\n"


def is_tree(source: str) -> bool:
    """Whether a source names a durable tree, and no path."""
    return source == HOME_TREE or source.startswith(SHARED_TREE)


def space_of(source: str) -> str:
    """The space of a durable tree; empty for the owner's own files."""
    return source.removeprefix(SHARED_TREE) if source.startswith(SHARED_TREE) else ""


def _check_source(source: str) -> None:
    if source.startswith(SHARED_TREE):
        check_name(source.removeprefix(SHARED_TREE))
    elif source.startswith(HOME_TREE):
        if source != HOME_TREE:
            raise MalformedError(
                f"{quote(source)}: home: has no name after it; it is the owner's own tree"
            )
    elif source.startswith(AT_NODE):
        name, slash, path = source.removeprefix(AT_NODE).partition("/")
        check_name(name)
        if slash:
            check_absolute(slash + path, "what follows the name")
    else:
        check_absolute(source, "source")


def parse_line(line: str) -> Mount | None:
    """The mount of one line, None for a blank line or comment; ``MalformedError``."""
    stripped = line.strip(" \t")
    if not stripped or stripped.startswith("#"):
        return None
    # With a TAB anywhere, TABs alone separate, so that a path may hold blanks.
    if "\t" in stripped:
        words = [word for w in stripped.split("\t") if (word := w.strip(" "))]
    else:
        words = [word for word in stripped.split(" ") if word]
    if not 3 <= len(words) <= 4:
        raise MalformedError(
            f"{quote(line)} is not a mount line; use: source target ro|rw|hide [options], "
            "separated by blanks or TABs"
        )
    source, target, mode = words[:3]
    if mode not in MODES:
        raise MalformedError(f"unknown mode {quote(mode)}; use {', '.join(MODES)}")
    if mode != "hide":
        _check_source(source)
        if source.startswith(AT_NODE) and mode != "ro":
            raise MalformedError(f"{quote(source)} {mode}: what a node offers is read-only; use ro")
    check_absolute(target, "target")
    if target == "/" or target in _OWN or target.startswith(_BELOW_OWN):
        raise MalformedError(
            f"target {quote(target)}: /, /proc and /dev cannot be targets: they are the agent's own"
        )
    options: tuple[str, ...] = ()
    if len(words) == 4 and words[3] != "-":
        options = tuple(words[3].split(","))
        for option in options:
            if option not in OPTIONS:
                raise MalformedError(
                    f"unknown mount option {quote(option)}; use - or a list of {', '.join(OPTIONS)}"
                )
        if {"bind", "rbind"} <= set(options):
            raise MalformedError(f"{quote(words[3])}: bind and rbind exclude each other")
    mount = Mount(source, target, mode, options)
    if mount.tree and not set(options) <= set(RESTRICTIONS):
        raise MalformedError(
            f"{quote(source)} is bound as a whole: use - or a list of {', '.join(RESTRICTIONS)}"
        )
    return mount


def check_count(count: int, above: int = 0) -> None:
    """``QuotaError`` for more lines than there may be, ``above`` of them its parents'."""
    if count + above > LINES_MAX:
        raise QuotaError(
            f"the mount tables of a child and its ancestors have at most {LINES_MAX} lines in all; "
            f"this would make {count + above}: mount a directory that holds several"
        )


def parse_bound(text: str) -> tuple[Mount, ...]:
    """The lines of a rendered table, which may have a target of several ancestors."""
    return tuple(mount for line in text.split("\n") if (mount := parse_line(line)))


@lru_cache(maxsize=8)
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
                raise MalformedError(f"target {quote(mount.target)} occurs twice")
        except MalformedError as error:
            raise MalformedError(f"line {number}: {error.sentence}") from None
        seen.add(mount.target)
        mounts.append(mount)
    return tuple(mounts)


@dataclass(frozen=True, slots=True)
class Source:
    """The object that a source was when it was written: its path without links, and
    ``DEVICE:INODE``."""

    path: str
    identity: str


class Sources:
    """The objects that the sources of one value were when it was written, and in which boot."""

    def __init__(self, boot: BootId, found: Mapping[str, Source]) -> None:
        self.boot = boot
        self.found = found

    @classmethod
    def load(cls, record: Mapping[str, Any] | None) -> Sources:
        """From a record; None if nobody has looked at the value."""
        if record is None:
            return cls(NO_BOOT, {})
        found = {
            source: Source(path or source, identity) for source, path, identity in record["found"]
        }
        return cls(record["boot"], found)

    def dump(self) -> dict[str, Any]:
        return {
            "boot": self.boot,
            "found": [
                (source, "" if found.path == source else found.path, found.identity)
                for source, found in self.found.items()
            ],
        }

    def joined(
        self, boot: BootId, more: Mapping[str, Source], paths: Iterable[str]
    ) -> Sources:
        """The knowledge of some paths, with what was looked at in this boot."""
        known = {**self._of_boot(boot), **more}
        return Sources(boot, {path: known[path] for path in paths if path in known})

    def _of_boot(self, boot: BootId) -> Mapping[str, Source]:
        """Numbers mean nothing in another boot."""
        if self.boot == boot:
            return self.found
        return {source: replace(found, identity="*") for source, found in self.found.items()}

    def missing(self, paths: Iterable[str]) -> list[str]:
        """Those that were not looked at, each once."""
        return [path for path in dict.fromkeys(paths) if path not in self.found]

    def paths(self) -> list[str]:
        """Those that were looked at, without links."""
        return [found.path for found in self.found.values()]

    def path(self, source: str) -> str:
        """Without links, or as it was written if nobody looked."""
        found = self.found.get(source)
        return source if found is None else found.path

    def resolve(self, mount: Mount, boot: BootId) -> Mount:
        """The line as it is to be mounted in a boot: numbers mean nothing in another one."""
        found = self.found.get(mount.source)
        if found is None or mount.mode == "hide":
            return mount
        identity = found.identity if self.boot == boot else "*"
        return Mount(found.path, mount.target, mount.mode, mount.options, identity)


def check_found(found: Collection[str], paths: Iterable[str]) -> None:
    """``UnansweredError`` for a path that nobody could look at."""
    for path in paths:
        if path not in found:
            raise UnansweredError(f"{quote(path)}: the look-up failed: write the line again")


EXPLICIT_ROOT: Final = "explicit_root:"


def paths_of(mount: str, root: str, workspace: str) -> dict[str, list[str]]:
    """The paths in the creator's view that the values of an agent's files name, by file."""
    return {
        "mount": [
            line.source for line in parse(mount) if line.path
        ],
        "root": [root] if root else [],
        "workspace": (
            [workspace.removeprefix(EXPLICIT_ROOT)] if workspace.startswith(EXPLICIT_ROOT) else []
        ),
    }


def ancestry(path: str) -> list[str]:
    """The directories that a path is in, from the root down, and itself."""
    found = ["/"]
    at = path.find("/", 1)
    while at > 0:
        found.append(path[:at])
        at = path.find("/", at + 1)
    if path != "/":
        found.append(path)
    return found


class Index:
    """A table to look paths up in, at a cost that does not depend on its length."""

    def __init__(self, table: Iterable[Mount]) -> None:
        self.table = tuple(table)
        self._last = {mount.target: number for number, mount in enumerate(self.table)}
        #: sorted, by mode
        self._targets: dict[str, list[str]] = {}
        #: by target
        self._least: dict[str, str] | None = None

    def last(self, path: str) -> int:
        """The number of the last line whose target it is, or is below; -1 for none."""
        last = self._last
        return max([last.get(above, -1) for above in ancestry(path)])

    def least(self, path: str) -> str:
        """The mode that gives least, of the lines whose target it is, or is below."""
        if self._least is None:
            self._least = {}
            for mount in self.table:
                self._least[mount.target] = least((mount.mode, self._least.get(mount.target, "rw")))
        found = self._least
        return least(found.get(above, "rw") for above in ancestry(path))

    def below(self, directory: str, mode: str) -> str:
        """The first target of a mode in a directory; empty if there is none."""
        targets = self._targets.get(mode)
        if targets is None:
            targets = sorted(mount.target for mount in self.table if mount.mode == mode)
            self._targets[mode] = targets
        at = bisect_left(targets, directory + "/")
        found = targets[at] if at < len(targets) else ""
        return found if found.startswith(directory + "/") else ""

    def covering(self, path: str) -> Mount | None:
        """The line that decides about a path."""
        number = self.last(path)
        return self.table[number] if number >= 0 else None


def excess(own: Mount, above: Index, base: Iterable[str]) -> str:
    """A sentence on what a child's line wants more than its parent has; empty if nothing.

    ``above`` is the parent's effective table, ``base`` the read-only entries of
    its base view. What neither knows is left to the sandbox, which is made
    inside the parent's and can name no more.
    """
    if own.mode == "hide":
        return ""
    cover = above.covering(own.source)
    if cover is not None and cover.mode == "hide":
        return "it is hidden there"
    if own.mode == "rw":
        if cover is not None and cover.mode == "ro":
            return "it is read-only there"
        if cover is None and any(own.source == b or own.source.startswith(b + "/") for b in base):
            return "it is read-only there"
    return ""


#: what gives least comes first
_LEAST: Final = ("hide", "ro", "rw")


def least(modes: Iterable[str]) -> str:
    """The mode that gives least; ``rw`` of none."""
    return min(modes, key=_LEAST.index, default="rw")


def most(modes: Iterable[str]) -> str:
    """The mode that gives most; ``hide`` of none."""
    return max(modes, key=_LEAST.index, default="hide")


@dataclass(frozen=True, slots=True)
class TreePlaces:
    """Where every view has durable trees: ``KIND:NAME`` at ``KIND/NAME`` below one directory, to
    which the filesystem, at ``roots``, has links."""

    directory: str
    roots: tuple[str, ...]

    def place(self, tree: str) -> str:
        """The own place of a tree."""
        return f"{self.directory}/{place_of(tree)}"

    def names(self, tree: str) -> list[str]:
        """All paths that the runtime gives a tree."""
        return [self.place(tree), *(f"{root}/{place_of(tree)}/data" for root in self.roots)]

    def plain(self, path: str) -> str:
        """The path behind the link ``data``, if it leads through that."""
        for root in self.roots:
            parts = path.removeprefix(f"{root}/").split("/", 3)
            if path.startswith(f"{root}/") and parts[0] in _KINDS and parts[2:3] == ["data"]:
                return "/".join([self.directory, *parts[:2], *parts[3:]])
        return path

    def tree(self, path: str) -> str:
        """The tree in whose own place a path is; empty if it is in none."""
        parts = path.removeprefix(f"{self.directory}/").split("/", 2)
        inside = path.startswith(f"{self.directory}/") and parts[0] in _KINDS and parts[1:]
        return f"{parts[0]}:{parts[1]}" if inside else ""

    def holds(self, path: str) -> bool:
        """Whether it is something in a tree, or in the directory of all, by any name."""
        kinds = [self.directory, *(f"{root}/{kind}" for root in self.roots for kind in _KINDS)]
        return any(path == kind or path.startswith(f"{kind}/") for kind in kinds)

    def left(self, table: Index, tree: str) -> str:
        """The mode that a table leaves of a tree at its own place: a line that hides or narrows
        any of its names, or a directory above, counts; what covers the directory of all trees
        hides it."""
        if table.last(self.directory) >= 0:
            return "hide"
        return least(table.least(name) for name in self.names(tree))

    def annotated(self, table: Iterable[Mount], owner: int) -> Iterator[Mount]:
        """A table of lines that were in force, with the trees that they show something of."""
        known: list[Mount] = []
        last: dict[str, int] = {}
        for mount in table:
            above = max(last.get(path, -1) for path in ancestry(mount.source or "/"))
            cover = known[above].of if above >= 0 else ""
            last[mount.target] = len(known)
            known.append(replace(mount, of=self.named(mount, owner) or cover))
            yield known[-1]

    def named(self, mount: Mount, owner: int) -> str:
        """The tree that the source of a line names; empty if it names none by itself."""
        if mount.mode == "hide":
            return ""
        if mount.source == HOME_TREE:
            return f"{HOME_TREE}{owner}"
        return mount.source if mount.tree else self.tree(mount.source)


def place_of(tree: str) -> str:
    """Where it is, below the directory of all trees."""
    return tree.replace(":", "/", 1)


def within(own: Mount, cover: Mount | None, tree: str) -> Mount:
    """An agent's line, as far as its parent has what it names.

    The source is a path in the parent's view: what is read-only there stays so, and restrictive
    options stick. ``cover`` is the line that decides about that path, ``tree`` the durable tree
    that the line names. A durable tree is handed in: no line of the parent's restricts it.
    """
    if own.mode == "hide":
        return own
    if own.tree or cover is None:
        return replace(own, of=tree) if tree else own
    kept = tuple(o for o in cover.options if o in RESTRICTIONS and o not in own.options)
    mode = "ro" if cover.mode == "ro" else own.mode
    return replace(own, mode=mode, options=(*own.options, *kept), of=tree or cover.of)


def render(mounts: Iterable[Mount]) -> str:
    return "".join(mount.line() for mount in mounts)
