"""Mounts, root and workspace of an agent, as rows: all that it sees of the host's tree.

A path is looked at in the creator's view before the file that names it is taken;
runtime/texts/mounts.py parses the lines of ``mount``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Found, PathControl, Row, Shown, one_line
from runtime.agents import placing
from runtime.agents.workspace import check_possible as check_worktree_possible
from runtime.caller import Caller
from runtime.cell import trees
from runtime.cell.cell import workspace
from runtime.errors import DeniedError, ExceedingError, MalformedError, UnsupportedError
from runtime.kernel.linux import boot_id
from runtime.records.model import Agent
from runtime.texts import mounts, names
from runtime.texts.mounts import Source, ancestry
from runtime.texts.names import quote


def _limiting(base: Base, caller: Caller) -> tuple[Agent, str] | None:
    """(agent, its workspace), if the caller may give nothing beside that; "" for none."""
    agents = base.agents
    maker = agents.registry.calling(caller)
    if maker is None or "authority_expansion" in agents.authority.families(maker):
        return None
    return maker, workspace(base.agents, maker) or ""


def _look_at(base: Base, caller: Caller, paths: list[str]) -> list[str]:
    """The paths that have to be looked at before some of a caller's are taken."""
    for path in paths:
        _check_source(base, path)
    limited = _limiting(base, caller)
    return [*paths, limited[1]] if paths and limited is not None and limited[1] else paths


def _check_source(base: Base, source: str) -> None:
    """Refuses a path that is forbidden to all by its name; others are looked at."""
    places, trees = base.runtime.places, base.agents.authority.places
    source = trees.plain(source)
    forbidden = ("/proc", str(base.runtime.hierarchy.mount), str(places.state), str(places.runtime))
    for path in forbidden:
        if (source == path or source.startswith(path + "/")) and not trees.tree(source):
            raise ExceedingError(
                f"{quote(source)}: procfs, cgroupfs and the daemon's own directories "
                "cannot be given to an agent"
            )


def _check_expansion(base: Base, caller: Caller, what: str, path: str, found: Found) -> None:
    """A private child hands on its own workspace, and nothing beside it."""
    limited = _limiting(base, caller)
    if limited is None:
        return
    maker, root = limited
    inside = found.get(root)
    source = found.get(path)
    if source is not None and inside is not None and inside.path in ancestry(source.path):
        return
    raise DeniedError(
        f"{what} is outside the workspace of {quote(maker.name)}, whose profile "
        f"{maker.profile} lacks authority_expansion"
    )


def _found_sources(
    agent: Agent, caller: Caller, name: str, paths: Collection[str], found: Found
) -> dict[str, Any]:
    """The agent's ``sources`` with what is known of one file's paths.

    An operator may write them before the parent has a cell: then they are looked at when the
    agent starts.
    """
    boot = boot_id()
    known = mounts.Sources.load(agent.sources.get(name)).joined(boot, found, paths)
    if caller.agent is not None:
        mounts.check_found(known.found, paths)
    others = {key: value for key, value in agent.sources.items() if key != name}
    return {**others, name: known.dump()} if paths else others


def _sources(table: Iterable[mounts.Mount]) -> list[str]:
    return [mount.source for mount in table if mount.mode != "hide"]


def _trees(
    base: Base, agent: Agent, table: Iterable[mounts.Mount]
) -> dict[str, Source]:
    """The durable trees of a table, as they are now; ``MissingError``. At a node there are
    others."""
    sources = {mount.source for mount in table if mount.tree and not agent.placement}
    return {source: trees.look(base.agents.spaces, source) for source in sources}


def _mount_lines(base: Base, agent: Agent, text: str) -> list[mounts.Mount]:
    """The mounts of some lines, if the agent can have them where it is to run."""
    mounts.check_count(text.count("\n") + 1)
    table = [mount for line in text.split("\n") if (mount := mounts.parse_line(line))]
    placing.check(base.agents, agent, mount=mounts.render(table))
    return table


def _mount_paths(base: Base, agent: Agent, caller: Caller, text: str) -> list[str]:
    table = _mount_lines(base, agent, text)
    return _look_at(base, caller, [mount.source for mount in table if mount.path])


def _check_mounts(base: Base, agent: Agent, caller: Caller, text: str, found: Found) -> None:
    table = _mount_lines(base, agent, text)
    found = {**found, **_trees(base, agent, table)}
    _check_table(base, agent, caller, table, mounts.Sources(boot_id(), found))


def _check_table(
    base: Base, agent: Agent, caller: Caller, table: Collection[mounts.Mount], known: mounts.Sources
) -> None:
    for source in _sources(mount for mount in table if not mount.at_node):
        _check_expansion(base, caller, f"mount source {quote(source)}", source, known.found)
    resolved = [known.resolve(mount, known.boot) for mount in table]
    base.agents.authority.check_mounts(agent, resolved)


def _set_mount(base: Base, agent: Agent, caller: Caller, text: str, found: Found) -> None:
    mounts.check_count(text.removesuffix("\n").count("\n") + bool(text))
    placing.check(base.agents, agent, mount=text)
    table = mounts.parse(text)
    found = {**found, **_trees(base, agent, table)}
    wanted = () if agent.placement else _sources(table)
    sources = _found_sources(agent, caller, "mount", wanted, found)
    known = mounts.Sources.load(sources.get("mount"))
    limit = {**found, **known.found}
    _check_table(base, agent, caller, table, mounts.Sources(known.boot, limit))
    base.agents.journal.update(agent, mount=fields.ended(text), sources=sources)


def _parse_iso(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    iso = names.check_choice(line, ("sandbox", "shared"))
    placing.check(base.agents, agent, iso=iso)
    if iso == "shared":
        if caller.agent is not None:
            raise DeniedError("only operators may write shared")
        if base.agents.privilege.rootless:
            raise UnsupportedError(
                "iso=shared: this ctxd runs without root, so an agent that sees the host's tree "
                "could change the files that ctxd starts from; mount the paths that it needs"
            )
        parent = base.agents.registry.parent_of(agent)
        if parent is not None:
            raise DeniedError(f"a child cannot see more than its parent {quote(parent.name)}")
    return iso


def _parse_workspace(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if line == "worktree":
        check_worktree_possible(agent)
    placing.check(base.agents, agent, workspace=_check_workspace(line))
    return line


def _parse_root(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    placing.check(base.agents, agent, root=fields.check_path(line))
    return line


def _check_workspace(line: str, _: str = "") -> str:
    if line in ("inherit", "worktree"):
        return line
    if line.startswith(mounts.EXPLICIT_ROOT):
        path = names.check_absolute(line.removeprefix(mounts.EXPLICIT_ROOT))
        if path == "/":
            raise MalformedError("explicit_root:/ would be the whole view; name a directory in it")
        return line
    raise MalformedError(f"{quote(line)} is not inherit, worktree or explicit_root:/PATH")


def _path_row(
    name: str,
    doc: str,
    parse: fields.Parse[Agent],
    *,
    shape: shapes.Shape,
    expands: bool,
    default: str = "",
) -> PathControl[Agent]:
    """A control with one value that may name a path in the creator's view."""

    def paths(base: Base, agent: Agent, caller: Caller, text: str) -> list[str]:
        value = str(parse(base, agent, caller, one_line(text)))
        return _look_at(base, caller, _named(value))

    def check_found(base: Base, agent: Agent, caller: Caller, text: str, found: Found) -> None:
        value = str(parse(base, agent, caller, one_line(text)))
        for path in _named(value):
            if expands:
                _check_expansion(base, caller, value, path, found)
            if path in found:
                base.agents.authority.path_mode(agent, found[path].path)

    def commit_found(base: Base, agent: Agent, caller: Caller, text: str, found: Found) -> None:
        value = str(parse(base, agent, caller, one_line(text)))
        sources = _found_sources(agent, caller, name, _named(value), found)
        check_found(base, agent, caller, text, found)
        base.agents.journal.update(agent, **{name: value, "sources": sources})

    return PathControl(
        name=name, doc=doc, default=default, shape=shape, guard=fields.WHILE_NEW, single=True,
        render=fields.value(name), check=parse,
        paths=paths, check_found=check_found, commit_found=commit_found,
    )  # fmt: skip


def _named(value: str) -> list[str]:
    """The path in a value of ``root`` or ``workspace``."""
    path = value.removeprefix(mounts.EXPLICIT_ROOT)
    return [path] if path.startswith("/") else []


ROWS: Final[tuple[Row[Agent], ...]] = (
    PathControl(name="mount", shape=shapes.lines(lambda line, label: mounts.parse_line(line)),
        guard=fields.WHILE_NEW, render=fields.text("mount"),
        paths=_mount_paths, check_found=_check_mounts, commit_found=_set_mount,
        doc="mount table: SOURCE TARGET ro|rw|hide [OPTIONS]; a SOURCE is a path, shared:SPACE "
        "or home:"),
    Shown(name="mount.effective", instead="mount", generated=True,
        render=lambda base, agent, caller: mounts.render(
            base.agents.authority.effective_mounts(agent)
        ),
        doc="the tables of its ancestors, then its own, as they are in force"),
    _path_row("root", "directory to use as the root of its view instead of the base view",
              _parse_root, shape=shapes.word(fields.check_path), expands=False),
    fields.single("iso", "sandbox, or shared (the host's tree; set by operators)", _parse_iso,
                  shape=shapes.choice(("sandbox", "shared")), default="sandbox"),
    _path_row("workspace", "inherit, worktree or explicit_root:/PATH", _parse_workspace,
              shape=shapes.word(_check_workspace), expands=True, default="inherit"),
    fields.single("cwd", "working directory of its program", fields.alone(fields.check_path),
                  shape=shapes.word(fields.check_path), default="workspace or home"),
)
