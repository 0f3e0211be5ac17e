"""The files of an agent, ``/ctx/agent/NAME.d``, as rows (ctxfs(5), Files of an agent)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from ctxfs.files import task, waiting, work
from ctxfs.files.documents import (
    check_input,
    check_ref,
    document,
    kept_document,
    lines_document,
)
from ctxfs.files.spaces import ARTIFACT
from ctxfs.files.verbs import act, describe_verbs
from ctxfs.tree.base import Base
from ctxfs.tree.durable import DurableNode
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.planes import Plane
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import (
    NEW,
    NOT_BUSY,
    NOT_TERMINAL,
    Check,
    Control,
    Directory,
    Inlet,
    Link,
    Output,
    PathControl,
    Render,
    Row,
    Shown,
    Size,
    Socket,
    Verbs,
)
from ctxfs.tree.rows import one_line as _one
from runtime.agents.messages import SENDING
from runtime.agents.workspace import check_possible as check_worktree_possible
from runtime.authority.guard import Guard
from runtime.caller import CONTROLLERS, OPERATORS, PARTIES, Caller, Role
from runtime.errors import (
    DeniedError,
    ForbiddenError,
    MalformedError,
    QuotaError,
    UnansweredError,
    UnsupportedError,
    WrongStateError,
)
from runtime.kernel.linux import boot_id
from runtime.records.lifecycle import Status
from runtime.records.model import FAMILIES, LIVES, PROFILES, Agent, Profile
from runtime.records.modes import MODES
from runtime.texts import mounts, names, policy
from runtime.texts.mounts import Source, ancestry
from runtime.texts.names import quote
from runtime.texts.policy import Rules

_LABEL: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._+-]{0,63}")
_LIMIT_KEYS: Final = ("memory.max", "pids.max", "cpu.max", "timeout", "grace", "log_max")
_CPU: Final = re.compile(r"(max|[0-9]{1,12})( [0-9]{1,12})?")

Parse = Callable[[Base, Agent, Caller, str], Any]

_AT_ANY_TIME: Final = Guard(who=CONTROLLERS)
_WHILE_NEW: Final = Guard(who=CONTROLLERS, when=NEW)
_BETWEEN_RUNS: Final = Guard(who=CONTROLLERS, when=NOT_BUSY)
_BY_ROOT: Final = Guard(who=Role.ROOT, when=NEW)
_DELEGATION: Final = Guard(who=CONTROLLERS, when=NEW, delegated=True)
_RESULT: Final = Guard(who=Role.SELF, when=NOT_TERMINAL)


def _value(attribute: str) -> Render[Agent]:
    """The field's text on one line; an empty value is an empty file."""

    def render(base: Base, agent: Agent, caller: Caller) -> str:
        value = str(getattr(agent, attribute))
        return value + "\n" if value else ""

    return render


def _text(attribute: str) -> Render[Agent]:
    def render(base: Base, agent: Agent, caller: Caller) -> str:
        return str(getattr(agent, attribute))

    return render


def _number(attribute: str) -> Render[Agent]:
    def render(base: Base, agent: Agent, caller: Caller) -> str:
        value = int(getattr(agent, attribute))
        return f"{value}\n" if value or attribute != "pid" else ""

    return render


def _setter(
    attribute: str, parse: Parse
) -> tuple[Check[Agent], Check[Agent]]:
    """(check, commit) of a control with one value on one line."""

    def commit(base: Base, agent: Agent, caller: Caller, text: str) -> None:
        value = parse(base, agent, caller, _one(text))
        base.runtime.agents.journal.update(agent, **{attribute: value})

    return _checked(parse), commit


def _checked(parse: Parse) -> Check[Agent]:
    """A check of a line that is good if it can be parsed."""

    def check(base: Base, agent: Agent, caller: Caller, line: str) -> None:
        parse(base, agent, caller, line)

    return check


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


# lineage and life


def _set_parent(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    value = _one(text)
    parent = _parse_parent(base, agent, caller, value)
    if parent is not None or not value.startswith("agent:"):
        base.runtime.agents.births.adopt(agent, parent)


def _parse_parent(base: Base, agent: Agent, caller: Caller, line: str) -> Agent | None:
    word = line.split(" ")[0]
    if word == "operator":
        return None
    if not word.startswith("agent:"):
        raise MalformedError(f"unknown parent {quote(line)}; use operator or agent:NAME")
    parent = base.runtime.agents.registry.named(names.check_name(word.removeprefix("agent:")))
    if parent is None or not base.runtime.agents.identity.roles(caller, parent) & OPERATORS:
        raise DeniedError(f"{quote(word)}: the caller is not an operator of such an agent")
    return parent


def _supervisor(base: Base, agent: Agent, caller: Caller) -> str:
    parent = base.runtime.agents.registry.parent_of(agent)
    if parent is not None and agent.owned:
        return f"agent:{parent.name}\n"
    return "operator\n" if agent.parent is None else "none\n"


def _parse_life(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    life = names.check_choice(line, LIVES)
    if agent.parent is None and life != "detached":
        raise MalformedError(f"{quote(life)}: a root agent is always detached")
    if life == "detached" and agent.parent is not None and caller.agent is not None:
        agents = base.runtime.agents
        maker = agents.registry.get(caller.agent)
        if maker is None or not agents.authority.allows(maker, "agent", agent.name, "detach"):
            raise DeniedError(f"agent:{agent.name} detach is not in your effective policy")
        if "authority_expansion" not in agents.authority.families(maker):
            raise DeniedError(
                f"{quote(maker.name)} is a {maker.profile}, which lacks authority_expansion"
            )
    return life


def _set_life(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    life = _parse_life(base, agent, caller, _one(text))
    profile = Profile.PUBLIC_NAMED if life == "detached" else Profile.PRIVATE_CHILD
    base.runtime.agents.births.set_life(agent, life, profile.value)


def _check_profile(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    profile = names.check_choice(line, PROFILES)
    _parse_life(base, agent, caller, _life_of(agent, profile))


def _life_of(agent: Agent, profile: str) -> str:
    if profile == Profile.PUBLIC_NAMED:
        return "detached"
    return agent.life if agent.life != "detached" else "owned"


def _set_profile(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    profile = names.check_choice(_one(text), PROFILES)
    _set_life(base, agent, caller, _life_of(agent, profile))


def _families(base: Base, agent: Agent, caller: Caller) -> str:
    on = base.runtime.agents.authority.families(agent)
    return "".join(f"{family}\n" for family in FAMILIES if family in on)


# ids


def _parse_owner(base: Base, agent: Agent, caller: Caller, line: str) -> int:
    owner = _parse_id(line)
    base.runtime.agents.privilege.check_ids(f"owner {owner}", owner, agent.owner)
    return owner


def _parse_id(line: str) -> int:
    value = names.parse_number(line)
    if value >= 2**32 - 1:
        raise MalformedError(f"{quote(line)} is not an id: use a number up to {2**32 - 2}")
    return value


def _set_owner(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    owner = _parse_owner(base, agent, caller, _one(text))
    if owner != agent.owner:
        base.runtime.agents.births.change_owner(agent, owner)


def _parse_agent_id(base: Base, agent: Agent, caller: Caller, line: str) -> int:
    value = _parse_id(line)
    if agent.parent is not None:
        raise DeniedError("a child's uid and gid are its parent's")
    if value == 0 and not base.runtime.config.allow_root_agents:
        raise DeniedError("0: agents do not run as root (allow_root_agents is not set)")
    return value


def _parse_uid(base: Base, agent: Agent, caller: Caller, line: str) -> int:
    uid = _parse_agent_id(base, agent, caller, line)
    base.runtime.agents.privilege.check_ids(f"uid {uid}", uid, agent.uid)
    return uid


def _parse_gid(base: Base, agent: Agent, caller: Caller, line: str) -> int:
    gid = _parse_agent_id(base, agent, caller, line)
    base.runtime.agents.privilege.check_ids(f"gid {gid}", gid, agent.gid)
    return gid


def _parse_groups(base: Base, agent: Agent, caller: Caller, line: str) -> tuple[int, ...]:
    groups = tuple(_parse_id(word) for word in names.words(line))
    if len(groups) > 1024:
        raise MalformedError(f"{len(groups)} groups: at most 1024")
    others = sorted(set(groups) - set(agent.groups))
    base.runtime.agents.privilege.check_ids(f"groups {others}", others, [])
    parent = base.runtime.agents.registry.parent_of(agent)
    if parent is not None:
        extra = sorted(set(groups) - set(parent.groups))
        if extra:
            raise DeniedError(f"groups {extra} exceed those of the parent {quote(parent.name)}")
    elif not base.runtime.agents.identity.is_master(caller):
        raise DeniedError("only operators with uid 0 may set the groups of a root agent")
    elif 0 in groups and not base.runtime.config.allow_root_agents:
        raise DeniedError("0: agents do not run as root (allow_root_agents is not set)")
    return groups


def _set_groups(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    groups = _parse_groups(base, agent, caller, " ".join(_lines(text)))
    own = set(agent.groups)
    base.runtime.agents.privilege.check_ids(f"groups {sorted(groups)}", set(groups), own)
    base.runtime.agents.journal.update(agent, groups=groups)


def _groups(base: Base, agent: Agent, caller: Caller) -> str:
    return "".join(f"{group}\n" for group in agent.groups)


# authority


def _parse_label(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if not _LABEL.fullmatch(line):
        raise MalformedError(f"{quote(line)} is not a label: up to 64 letters, digits and . _ + -")
    return line


def _set_label(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    label = _parse_label(base, agent, caller, _one(text))
    rewritten = policy.relabel(agent.policy, agent.label, label)
    base.runtime.agents.journal.update(agent, label=label, policy=rewritten)


class _PolicyCheck:
    """Takes a policy as it is written, some lines after the others: each is read once."""

    def __init__(self, base: Base, agent: Agent, caller: Caller) -> None:
        self._authority = base.runtime.agents.authority
        self._agent = agent
        self._may_delegate = caller.agent is None
        self._lines = 0
        #: what needs a line of its own: kind, class and object
        self._said: set[tuple[str, str, str]] = set()

    def take(self, text: str) -> Rules:
        """The rules of more lines; ``MalformedError``, ``QuotaError``, ``ExceedingError`` or
        ``WrongStateError``."""
        agent = self._agent
        rules = policy.parse(
            text, agent.label, may_delegate=self._may_delegate, before=self._lines
        )
        present = self._authority.own_policy(agent)
        self._said |= {(rule.kind, rule.cls, rule.object) for rule in rules}
        if len(self._said) > max(policy.LINES_MAX, present.lines):
            raise QuotaError(
                f"the policy would have {len(self._said)} lines, doubles not counted; at most "
                f"{max(policy.LINES_MAX, present.lines)}: "
                "say several objects by a prefix, as in agent:rev-*"
            )
        self._authority.check_policy(agent, rules)
        if agent.status is not Status.NEW:
            for rule in rules:
                if not present.covers_as(rule):
                    raise WrongStateError(
                        f"{rule.cls}:{rule.object} {rule.perm} would extend the policy: "
                        "that is possible only while the agent is new"
                    )
        self._lines += text.removesuffix("\n").count("\n") + 1
        return rules


def _set_policy(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    rules = _PolicyCheck(base, agent, caller).take(text)
    authority = base.runtime.agents.authority
    authority.check_network(agent, rules)
    keys = {rule.key for rule in rules}
    # Whoever writes the text anew leaves what is there as it was: only the rules that
    # root adds are root's, those of root that another leaves in stay root's.
    kept = keys & set(agent.policy_of_root)
    if caller.agent is None and caller.uid == 0:
        kept |= keys - {rule.key for rule in authority.own_policy(agent)}
    if text and not text.endswith("\n"):
        text += "\n"
    base.runtime.agents.journal.update(agent, policy=text, policy_of_root=tuple(sorted(kept)))


def _policy_effective(base: Base, agent: Agent, caller: Caller) -> str:
    return policy.render(base.runtime.agents.authority.effective_policy(agent), agent.label)


# what the creator's paths lead to


def _limiting(base: Base, caller: Caller) -> tuple[Agent, str] | None:
    """(agent, its workspace), if the caller may give nothing beside that; "" for none."""
    agents = base.runtime.agents
    maker = agents.registry.get(caller.agent) if caller.agent is not None else None
    if maker is None or "authority_expansion" in agents.authority.families(maker):
        return None
    return maker, base.workspace(maker) or ""


def _look_at(base: Base, caller: Caller, paths: list[str]) -> list[str]:
    """What has to be looked at to take some paths of a caller's."""
    for path in paths:
        _check_source(base, path)
    limited = _limiting(base, caller)
    return [*paths, limited[1]] if paths and limited is not None and limited[1] else paths


def _check_source(base: Base, source: str) -> None:
    """What is forbidden by its name alone, whoever sees it; the rest is found by looking."""
    places = base.runtime.places
    forbidden = ("/proc", str(base.runtime.hierarchy.mount), str(places.state), str(places.runtime))
    for path in forbidden:
        if source == path or source.startswith(path + "/"):
            raise DeniedError(
                f"{quote(source)}: procfs, cgroupfs and the daemon's own directories "
                "cannot be given to an agent"
            )


def _check_expansion(
    base: Base, caller: Caller, what: str, path: str, found: Mapping[str, Source]
) -> None:
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
    agent: Agent, caller: Caller, name: str, paths: list[str], found: Mapping[str, Source]
) -> dict[str, Any]:
    """The agent's ``sources`` with what is known of one file's paths.

    An operator may write them before the parent has a cell: then they are looked at when the
    agent starts.
    """
    boot = boot_id()
    known = mounts.Sources.load(agent.sources.get(name)).joined(boot, found, paths)
    missing = known.missing(paths)
    if missing and caller.agent is not None:
        raise UnansweredError(f"{quote(missing[0])}: the look-up failed: write it again")
    others = {key: value for key, value in agent.sources.items() if key != name}
    return {**others, name: known.dump()} if paths else others


def _sources(table: Iterable[mounts.Mount]) -> list[str]:
    return [mount.source for mount in table if mount.mode != "hide"]


def _mount_lines(text: str) -> list[mounts.Mount]:
    mounts.check_count(text.count("\n") + 1)
    return [mount for line in text.split("\n") if (mount := mounts.parse_line(line))]


def _mount_paths(base: Base, agent: Agent, caller: Caller, text: str) -> list[str]:
    return _look_at(base, caller, _sources(_mount_lines(text)))


def _check_mounts(
    base: Base, agent: Agent, caller: Caller, text: str, found: Mapping[str, Source]
) -> None:
    _check_table(base, agent, caller, _mount_lines(text), mounts.Sources(boot_id(), found))


def _check_table(
    base: Base,
    agent: Agent,
    caller: Caller,
    table: Collection[mounts.Mount],
    known: mounts.Sources,
) -> None:
    for source in _sources(table):
        _check_expansion(base, caller, f"mount source {quote(source)}", source, known.found)
    resolved = [known.resolve(mount, known.boot) for mount in table]
    base.runtime.agents.authority.check_mounts(agent, resolved)


def _set_mount(
    base: Base, agent: Agent, caller: Caller, text: str, found: Mapping[str, Source]
) -> None:
    mounts.check_count(text.removesuffix("\n").count("\n") + bool(text))
    table = mounts.parse(text)
    sources = _found_sources(agent, caller, "mount", _sources(table), found)
    known = mounts.Sources.load(sources.get("mount"))
    limit = {**found, **known.found}
    _check_table(base, agent, caller, table, mounts.Sources(known.boot, limit))
    if text and not text.endswith("\n"):
        text += "\n"
    base.runtime.agents.journal.update(agent, mount=text, sources=sources)


def _mount_effective(base: Base, agent: Agent, caller: Caller) -> str:
    return mounts.render(base.runtime.agents.authority.effective_mounts(agent))


def _parse_path(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    return names.check_absolute(line) if line else ""


def _parse_iso(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    iso = names.check_choice(line, ("sandbox", "shared"))
    if iso == "shared":
        if caller.agent is not None:
            raise DeniedError("only operators may write shared")
        if base.runtime.agents.privilege.rootless:
            raise UnsupportedError(
                "iso=shared: this ctxd runs without root: an agent with its uid and the host's "
                "tree could change what the daemon is started with; mount what it needs"
            )
        parent = base.runtime.agents.registry.parent_of(agent)
        if parent is not None:
            raise DeniedError(f"a child sees what its parent {quote(parent.name)} sees, no more")
    return iso


def _parse_workspace(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if line == "inherit":
        return line
    if line == "worktree":
        check_worktree_possible(agent)
        return line
    if line.startswith(mounts.EXPLICIT_ROOT):
        path = names.check_absolute(line.removeprefix(mounts.EXPLICIT_ROOT))
        if path == "/":
            raise MalformedError("explicit_root:/ would be the whole view; name a directory in it")
        return line
    raise MalformedError(f"{quote(line)} is not inherit, worktree or explicit_root:/PATH")


def _path_row(
    name: str, doc: str, parse: Parse, *, expands: bool, default: str = ""
) -> PathControl[Agent]:
    """A control with one value that may name a path in the creator's view."""

    def paths(base: Base, agent: Agent, caller: Caller, text: str) -> list[str]:
        value = str(parse(base, agent, caller, _one(text)))
        return _look_at(base, caller, _named(value))

    def check_found(
        base: Base, agent: Agent, caller: Caller, text: str, found: Mapping[str, Source]
    ) -> None:
        value = str(parse(base, agent, caller, _one(text)))
        for path in _named(value) if expands else ():
            _check_expansion(base, caller, value, path, found)

    def commit_found(
        base: Base, agent: Agent, caller: Caller, text: str, found: Mapping[str, Source]
    ) -> None:
        value = str(parse(base, agent, caller, _one(text)))
        sources = _found_sources(agent, caller, name, _named(value), found)
        check_found(base, agent, caller, text, found)
        base.runtime.agents.journal.update(agent, **{name: value, "sources": sources})

    return PathControl(
        name=name, doc=doc, default=default, guard=_WHILE_NEW, single=True, render=_value(name),
        check=_checked(parse), paths=paths, check_found=check_found, commit_found=commit_found,
    )  # fmt: skip


def _named(value: str) -> list[str]:
    """The path in a value of ``root`` or ``workspace``."""
    path = value.removeprefix(mounts.EXPLICIT_ROOT)
    return [path] if path.startswith("/") else []


# the program


def _check_env_line(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    if line:
        names.parse_env_line(line)


def _set_env(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    for line in _lines(text):
        names.parse_env_line(line)
    base.runtime.agents.journal.update(agent, env="".join(f"{line}\n" for line in _lines(text)))


def _check_tool_path(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    for item in line.split(":"):
        if item:
            names.check_absolute(item, "tool directory")


def _set_tool_path(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    items = [item for line in _lines(text) for item in line.split(":") if item]
    for item in items:
        names.check_absolute(item, "tool directory")
    base.runtime.agents.journal.update(agent, path="".join(f"{item}\n" for item in items))


def _tool_path(base: Base, agent: Agent, caller: Caller) -> str:
    return agent.path or f"{base.runtime.places.mount}/tool\n"


def _parse_context(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if names.check_choice(line, ("fresh", "fork")) == "fork" and agent.parent is None:
        raise MalformedError("fork: a root agent has no parent to inherit a context from")
    return line


def _parse_model(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if len(line) > 256 or not line.isprintable():
        raise MalformedError(f"{quote(line)} is not a model id; use up to 256 printable characters")
    if line and not base.runtime.agents.authority.allows(agent, "model", line, "use"):
        raise DeniedError(f"model:{line} use is not in the agent's effective policy")
    return line


def _parse_exec(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if any(ord(c) < 32 and c != "\t" for c in line):
        raise MalformedError(f"{quote(line)}: a command line cannot contain control characters")
    names.split_command(line)
    return line


def _parse_mode(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    return names.check_choice(line, tuple(MODES))


def _parse_restart(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    value = names.check_choice(line, ("no", "on-failure", "always"))
    if value != "no" and agent.parent is not None:
        raise MalformedError(f"{quote(line)}: only root agents restart; for a child, use no")
    return value


def _parse_limit(line: str) -> tuple[str, str]:
    key, separator, value = line.partition("=")
    if not separator or key not in _LIMIT_KEYS:
        keys = ", ".join(_LIMIT_KEYS)
        raise MalformedError(f"{quote(line)} is not KEY=VALUE with a key of {keys}")
    if value == "max":
        return key, "max"
    if key in ("timeout", "grace"):
        names.parse_duration(value)
    elif key == "log_max":
        names.parse_size(value)
    elif key == "memory.max":
        value = str(names.parse_size(value))
    elif key == "pids.max":
        value = str(names.parse_number(value))
    elif not _CPU.fullmatch(value):
        raise MalformedError(f"{quote(value)} is not a cpu.max: microseconds, or quota and period")
    return key, value


def _check_limit(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    if line:
        key, value = _parse_limit(line)
        base.runtime.supervisor.check_limits({key: value})


def _set_limits(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    wanted = dict(_parse_limit(line) for line in _lines(text))
    supervisor = base.runtime.supervisor
    supervisor.check_limits(wanted)
    before = {key: agent.limits.get(key, "max") for key in wanted}
    merged = {**agent.limits, **wanted}
    try:
        supervisor.apply_limits(agent, wanted)
        base.runtime.agents.journal.update(
            agent, limits={key: value for key, value in merged.items() if value != "max"}
        )
    except BaseException:
        supervisor.apply_limits(agent, before)
        raise


def _limits(base: Base, agent: Agent, caller: Caller) -> str:
    config = base.runtime.config
    defaults = {
        "timeout": f"{config.timeout:g}s" if config.timeout is not None else "max",
        "grace": f"{config.grace:g}s",
        "log_max": str(config.log_max),
    }
    return "".join(
        f"{key}={agent.limits.get(key, defaults.get(key, 'max'))}\n" for key in _LIMIT_KEYS
    )


def _check_meta(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    if not names.is_unfinished_json(line):
        names.parse_json_object(line)


def _set_meta(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    names.parse_json_object(text)
    base.runtime.agents.journal.update(agent, meta=text if text.endswith("\n") else text + "\n")


def _meta(base: Base, agent: Agent, caller: Caller) -> str:
    return agent.meta if agent.meta.endswith("\n") else agent.meta + "\n"


# what the runtime tells


def _cgroup(base: Base, agent: Agent, caller: Caller) -> str:
    return f"{base.runtime.hierarchy.root.path}/{agent.cgroup}\n" if agent.cgroup else ""


def _usage(base: Base, agent: Agent, caller: Caller) -> str:
    usage = base.runtime.supervisor.usage(agent)
    return "".join(f"{key}={value}\n" for key, value in usage.items())


def _error(base: Base, agent: Agent, caller: Caller) -> str:
    return base.reasons.of_agent(agent.incarnation)


def _visibility(base: Base, agent: Agent, caller: Caller) -> str:
    return "private\n" if agent.private else "public\n"


def _ownership(base: Base, agent: Agent, caller: Caller) -> str:
    return "parent_supervised\n" if agent.private else "self_owned\n"


def _ingress(base: Base, agent: Agent, caller: Caller) -> str:
    return "supervisor_only\n" if agent.private else "operators_and_policy\n"


def _printed(name: str) -> Callable[[Base, Agent, int, int], bytes]:
    return lambda base, agent, offset, size: base.output(agent, name).read(offset, size)


def _printed_size(name: str) -> Size[Agent]:
    return lambda base, agent: base.output(agent, name).size


def _send(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    base.runtime.agents.messages.send(caller, agent, text)


def _queue(base: Base, agent: Agent, caller: Caller) -> Iterator[str]:
    return base.runtime.agents.messages.lines(agent)


# directories and links


def _receive(
    base: Base, agent: Agent, call: Call, source: Node, name: str, new_name: str
) -> None:
    """rename(2) of a file in ``artifact/`` over ``result.md``."""
    own = base.spaces.known(ARTIFACT.place(agent))
    if new_name != "result.md" or not isinstance(source, DurableNode) or source.space is not own:
        raise ForbiddenError("only files of artifact/ can be renamed here, over result.md")
    node = base.durable.find(source, name)
    if node.is_directory():
        raise ForbiddenError("result.md is a file")
    document = base.runtime.agents.documents.path(agent, "result.md")
    own.count()
    os.rename(name, document, src_dir_fd=source.fd)
    base.durable.take_out(node)
    # The kernel believes that the name is the renamed file's now, until it asks that.
    node.changed()
    base.runtime.agents.journal.tell_agent(agent.index, ("result.md",))


def _children(base: Base, agent: Agent, call: Call) -> Iterator[str]:
    for child in base.runtime.agents.registry.children(agent):
        yield child.name


def _find_child(base: Base, agent: Agent, call: Call, name: str) -> Node | None:
    for child in base.runtime.agents.registry.children(agent):
        if child.name == name:
            return RowNode(base, CHILD, child.index, child)
    return None


def _session_target(base: Base, agent: Agent) -> str:
    session = base.runtime.agents.sessions.get(agent.session)
    name = session.name if session is not None else "default"
    return f"../../home/{agent.owner}/agent/{agent.name}/session/{name}"


def _single(
    name: str,
    doc: str,
    parse: Parse,
    *,
    attribute: str = "",
    **more: Any,
) -> Control[Agent]:
    """A control with one value on one line, kept in the field of its name."""
    check, commit = _setter(attribute or name, parse)
    values: dict[str, Any] = {
        "render": _value(attribute or name),
        "check": check,
        "commit": commit,
        "guard": _WHILE_NEW,
        "single": True,
        **more,
    }
    return Control(name=name, doc=doc, depends=(attribute,) if attribute else (), **values)


ROWS: Final[tuple[Row[Agent], ...]] = (
    # the three names in /ctx/agent, then self
    Directory(name=".d", top=True, public=True, receive=_receive),
    Shown(name="", path=lambda agent: f"agent/{agent.name}", kept=False, mode=0o555,
        public=True, render=lambda base, agent, caller: base.client_program),
    # connect(2) does not walk again when it comes to a socket that is gone
    Socket(name=".sock", path=lambda agent: f"agent/{agent.name}.sock", kept=False, public=True),
    Link(name="self", path=lambda agent: f"agent/{agent.name}.d/self", kept=False, public=True,
        target=lambda base, agent: f"agent/{agent.name}.d"),
    Control(name="parent", default="creator", public=True,
        guard=Guard(who=OPERATORS, when=NEW),
        doc="its creator: operator uid:N, or agent:NAME session:NAME run:ID. An "
        "operator of both agents may write agent:NAME; a child's defaults are then "
        "applied",
        render=_value("lineage"), check=_checked(_parse_parent),
        commit=_set_parent, single=True, depends=("lineage",)),
    Shown(name="supervisor", default="creator",
        doc="the owner of its lifetime: agent:NAME; operator, of a root agent; none, "
        "of a detached child",
        render=_supervisor, depends=("parent", "life")),
    Control(name="life", default="owned (child), detached (root)", public=True,
        guard=_WHILE_NEW, render=_value("life"), commit=_set_life,
        check=_checked(_parse_life), single=True,
        doc="owned; temp: removed when its end is recorded, the parent's channel remains; "
            "detached: lives on when its parent ends. A root agent is detached"),
    Control(name="profile", default="private_child (child), public_named (root)", public=True,
        guard=_WHILE_NEW, render=_value("profile"), check=_check_profile,
        commit=_set_profile, single=True,
        doc="private_child for owned and temp, public_named for detached"),
    Shown(name="visibility", default="from profile", public=True, render=_visibility,
        depends=("profile",), doc="private or public"),
    Shown(name="ownership", default="from profile", render=_ownership, depends=("profile",),
        doc="parent_supervised or self_owned"),
    Shown(name="families", default="from profile", render=_families, generated=True,
        doc="enabled tool families, one per line"),
    Shown(name="ingress", default="from profile", render=_ingress, depends=("profile",),
        doc="supervisor_only or operators_and_policy"),
    Control(name="owner", default="creator's", guard=_BY_ROOT,
        render=_number("owner"), commit=_set_owner, doc="uid of the user that owns the agent",
        check=_checked(_parse_owner), single=True),
    _single("uid", "uid of its processes; a child's is its parent's", _parse_uid,
            default="creator's", render=_number("uid"), guard=_BY_ROOT),
    _single("gid", "gid of its processes; a child's is its parent's", _parse_gid,
            default="creator's", render=_number("gid"), guard=_BY_ROOT),
    Control(name="groups", default="creator's", guard=_WHILE_NEW, render=_groups,
        check=_checked(_parse_groups), commit=_set_groups, doc="supplementary gids, one per line"),
    Control(name="label", default="NAME_t", guard=_WHILE_NEW,
        render=_value("label"), commit=_set_label,
        check=_checked(_parse_label), single=True,
        doc="the label of its policy lines"),
    Control(name="policy", default="configured; a child's from its parent",
        guard=Guard(who=CONTROLLERS, when=NOT_TERMINAL), render=_text("policy"),
        checking=_PolicyCheck, commit=_set_policy,
        doc="its authority: allow LABEL CLASS:OBJECT PERM[,PERM...], at most 256 "
        "lines; can be extended only while new"),
    Shown(name="policy.effective", render=_policy_effective, generated=True,
        doc="its policy, as far as its parent's effective policy permits"),
    PathControl(name="mount", guard=_WHILE_NEW, render=_text("mount"),
        paths=_mount_paths, check_found=_check_mounts, commit_found=_set_mount,
        doc="mount table: SOURCE TARGET ro|rw|hide [OPTIONS]"),
    Shown(name="mount.effective", render=_mount_effective, generated=True,
        doc="the tables of its ancestors, then its own"),
    _path_row("root", "directory to use as the root of its view instead of the base view",
              _parse_path, expands=False),
    _single("iso", "sandbox, or shared (the host's tree; set by operators)", _parse_iso,
            default="sandbox"),
    _path_row("workspace", "inherit, worktree or explicit_root:/PATH", _parse_workspace,
              expands=True, default="inherit"),
    _single("cwd", "working directory of its program", _parse_path,
            default="workspace or home"),
    Control(name="env", mode=0o600, read=PARTIES, guard=_WHILE_NEW, render=_text("env"),
        check=_check_env_line, commit=_set_env, doc="environment: KEY=VALUE, one per line"),
    Control(name="path", default="/ctx/tool", guard=_WHILE_NEW, render=_tool_path,
        check=_check_tool_path, commit=_set_tool_path, doc="tool directories, one per line"),
    _single("context", "fresh, or fork", _parse_context, default="fresh"),
    _single("model", "free text for the program, allowed by policy", _parse_model,
            public=True, guard=_BETWEEN_RUNS),
    _single("exec", "the program and its arguments, one line, quoted as in a shell",
            _parse_exec, default="the parent's", guard=_BETWEEN_RUNS),
    _single("mode", "once, turn or resident", _parse_mode, default="once"),
    Control(name="limits", default="configured", guard=_AT_ANY_TIME, render=_limits,
        check=_check_limit, commit=_set_limits, merges=True,
        doc="KEY=VALUE of memory.max pids.max cpu.max timeout grace log_max; merged by key"),
    _single("restart", "no, on-failure or always; root agents only", _parse_restart, default="no",
            guard=_AT_ANY_TIME),
    Control(name="meta.json", default="{}", guard=_AT_ANY_TIME, render=_meta,
        check=_check_meta, first=True, commit=_set_meta, depends=("meta",), doc="any JSON object"),
    Shown(name="status", public=True, polled=True, render=_value("status"),
        doc="new starting ready busy idle paused stopping dead"),
    Shown(name="outcome", public=True, render=_value("outcome"),
        doc="done error cancelled interrupted, once it is dead"),
    Shown(name="reason", render=_value("reason"), doc="why, such as exit:3 or operator_stop"),
    Shown(name="incarnation", render=_value("incarnation"), doc="id of this life of the name"),
    # of a page that is read while the value gets shorter, the kernel shows NULs at the end
    Shown(name="pid", render=_number("pid"), volatile=True,
        doc="its main process, as a PID of the host"),
    Shown(name="run", render=_value("run"), volatile=True, doc="current run"),
    Shown(name="cgroup", render=_cgroup, volatile=True, doc="path of its cgroup"),
    Shown(name="usage", render=_usage, generated=True,
        doc="cpu_usec memory_current memory_peak processes wall_msec"),
    Output(name="out", content=_printed("out"), size=_printed_size("out"),
        doc="standard output"),
    Output(name="log", content=_printed("log"), size=_printed_size("log"),
        doc="standard error, and lines of the runtime"),
    Shown(name="error", render=_error, generated=True, doc="the last rejection, with its time"),
    Verbs(name="ctl", guard=Guard(who=PARTIES | Role.STARTER | Role.STOPPER),
        act=act, render=describe_verbs, doc="takes verbs, one per line; reading lists them"),
    Link(name="wait", public=True, depends=("wait_token",),
        target=lambda base, agent: str(base.runtime.agents.waits.path(agent.wait_token)),
        doc="reading it blocks until the agent is dead"),
    Inlet(name="inbox", guard=SENDING,
        send=_send, doc="one message per flush; not in mode once"),
    Shown(name="queue", polled=True, generated=True, render=_queue,
        doc="waiting messages, one JSON object per line"),
    document("handoff.md", "the delegated task; the program's standard input", read=PARTIES,
             guard=_DELEGATION),
    lines_document("input.jsonl", "references to its inputs, one JSON object per line", check_input,
                   read=PARTIES, guard=_DELEGATION),
    kept_document("inherited.md", "with context=fork: the context inherited from its parent; "
                  "precedes the handoff"),
    kept_document("inherited.json", "the same as a JSON object"),
    document("result.md", "its result", guard=_RESULT),
    lines_document("refs.jsonl", 'references: {"path", "hash"?, "kind"?, "summary"?} per line',
                   check_ref, guard=_RESULT),
    Directory(name="artifact", guard=ARTIFACT.write, space=ARTIFACT,
        doc="files and directories that are part of its result"),
    Directory(name="child", entries=_children, find=_find_child,
        doc="links to the directories of its children"),
    task.PLANE.directory("commands that it runs beside its program: mkdir creates a task"),
    work.PLANE.directory("what it works on: mkdir creates a work item"),
    work.CURRENT,
    waiting.PLANE.directory("what it waits for: mkdir creates a wait"),
    Link(name="session", target=_session_target, depends=("owner",),
        doc="link to the current session"),
)

#: documents that a child's directory and its parent's channel show as one
DOCUMENTS: Final = ("handoff.md", "input.jsonl", "result.md", "refs.jsonl", "artifact")
#: of these what it gave back, shown in its session once it is reset
RESULTS: Final = ("result.md", "refs.jsonl", "artifact")
_OF_ITEMS: Final = {plane.name for plane in (task.PLANE, work.PLANE, waiting.PLANE)}


class _Agents(Plane[Agent]):
    """Agents, and of those that are gone the documents that others show."""

    def find(self, base: Base, index: int, row: Row[Agent]) -> Agent | None:
        agents = base.runtime.agents
        found = agents.registry.get(index)
        if found is None and row.is_inside and row.name in DOCUMENTS:
            return agents.registry.recall(index)
        return found

    def path(self, base: Base, agent: Agent) -> str:
        return f"agent/{agent.name}.d"

    def agent(self, base: Base, agent: Agent) -> Agent:
        return agent

    def asked(self, agent: Agent, row: Row[Agent]) -> bool:
        if not row.is_inside:
            return agent.private
        if row.within in _OF_ITEMS:
            return False  # their directory is
        # below a private name all is for those who know it, but for what is delegated
        return row.guard.delegated if agent.private else not row.public

    def unsettled(self, agent: Agent, row: Row[Agent]) -> bool:
        # it may still become a private one: nothing has to be forgotten then
        return agent.status is Status.NEW and not (row.is_inside and row.public)


class _Children(Plane[Agent]):
    """Links to the directories of children."""

    def find(self, base: Base, index: int, row: Row[Agent]) -> Agent | None:
        return base.runtime.agents.registry.get(index)

    def path(self, base: Base, agent: Agent) -> str:
        return f"agent/{agent.name}.d"

    def agent(self, base: Base, agent: Agent) -> Agent:
        return agent


PLANE: Final = _Agents(number=1, name="agent", rows=ROWS, told=True)
CHILD: Final = _Children(
    number=2,
    name="child",
    rows=(
        Link(name="child", top=True, target=lambda base, agent: f"../../{agent.name}.d"),
    ),
)  # fmt: skip


def entry(base: Base, agent: Agent, suffix: str) -> RowNode[Agent]:
    """``NAME``, ``NAME.sock`` or ``NAME.d`` in ``/ctx/agent``, or ``self``."""
    number = PLANE.top if suffix == ".d" else PLANE.beside(suffix)
    return RowNode(base, PLANE, agent.index, agent, number)


def shown_document(base: Base, agent: Agent, name: str) -> Node:
    """One of ``DOCUMENTS``, wherever it is shown: the same inode."""
    row = PLANE.row(name)
    if isinstance(row, Directory) and row.space is not None:
        return base.root_of(row.space, agent)
    return RowNode(base, PLANE, agent.index, agent, PLANE.number_of(name))
