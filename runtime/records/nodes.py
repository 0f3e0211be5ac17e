"""Other machines on which agents may run, and what others' agents may do here (ctxfs.yaml(5)).

A node is reached by a command, whose input and output lead to the daemon there. What the command
is made of comes from the configuration; nothing of it comes from an agent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from runtime.errors import MalformedError
from runtime.kernel.users import find_user
from runtime.texts.names import check_absolute, check_name, quote
from runtime.texts.yaml_marks import MisplacedError
from runtime.texts.yaml_marks import Path as Place
from runtime.texts.yaml_values import choice, count, duration, flag, list_of, map_of, record, text

#: seconds of a lease
_LEASE_MIN: Final = 5.0
_LEASE_MAX: Final = 86400.0
#: characters of what a lead calls itself at its hosts
_ALIAS_MAX: Final = 16
_ALIAS: Final = re.compile(rf"[a-z0-9-]{{1,{_ALIAS_MAX}}}")
#: no option can begin so, and nothing of a shell is in it
_LOGIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]*\$?")
_OPTION: Final = re.compile(r"-o[A-Za-z0-9]+=[^\x00\n]+")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: keys of a node, and the one without which they say nothing
_ONLY_WITH: Final = {"options": "ssh", "env": "command", "as": "command"}
_USERS: Final = "write it as users: {OWNER: LOGIN}"
#: what a link executes at a node
PEER: Final = ("ctx", "peer")
#: A site may count connections, or ask a person for each: where the user's ssh shares one
#: (ControlPath) that is gone, none is made instead, now or between two commands of this.
_OWN_SSH: Final = """\
shared=-oProxyCommand=false
if ! said=$(LC_ALL=C ssh -O check "$@" 2>&1); then
    case $said in
    *"No ControlPath specified"*) shared=-oConnectTimeout=10 ;;
    *"Control socket"*) echo "$said: log in, no connection is open that is shared" >&2; exit 255 ;;
    *) echo "$said" >&2; exit 255 ;;
    esac
fi
exec ssh -T -oBatchMode=yes "$shared" "$@" ctx peer
"""


def _word(value: Any) -> str:
    """A word of a command, or a value of its environment."""
    if "\0" in text(value):
        raise MalformedError(f"{quote(value)}: a NUL byte cannot be in it")
    return str(value)


def _lease(value: Any) -> float:
    seconds = duration(value)
    if not _LEASE_MIN <= seconds <= _LEASE_MAX:
        raise MalformedError(f"{quote(str(value))} is not from 5s to 1d")
    return seconds


def _address(value: Any) -> str:
    if not text(value) or value[0] == "-" or " " in value or not value.isprintable():
        raise MalformedError(
            f"{quote(value)} is not an address; use a name that ssh knows, without blanks, and "
            'not "-" first'
        )
    if "@" in value:
        raise MalformedError(f"{quote(value)} has a login: {_USERS}")
    return str(value)


def _command(value: Any) -> tuple[str, ...]:
    found = _words(value)
    if not found:
        raise MalformedError("the list is empty; use [/PROGRAM, ARGUMENT, ...]")
    check_absolute(found[0], "the program")
    return found


_words: Final = list_of(_word)


def _option(value: Any) -> str:
    if not _OPTION.fullmatch(text(value)):
        raise MalformedError(f"{quote(value)} is not an option of ssh such as -oPort=2222")
    if value.lower().startswith("-ouser="):
        raise MalformedError(f"{quote(value)} is a login: {_USERS}")
    return str(value)


def check_login(name: Any) -> str:
    """The name of a user, here or at a node; ``MalformedError`` if it is none."""
    if not _LOGIN.fullmatch(text(name)):
        raise MalformedError(
            f'{quote(name)} is not the name of a user; use a-z A-Z 0-9 . _ @ + \\ -, but not "-" '
            "first"
        )
    return str(name)


def _name(value: Any) -> str:
    return check_name(text(value))


def _check_variable(key: str) -> None:
    if not _VARIABLE.fullmatch(key):
        raise MalformedError(f"{quote(key)} is not the name of a variable; use A-Z a-z 0-9 _")


def check_alias(value: Any) -> str:
    """The name of a lead at its hosts; ``MalformedError`` if it is none."""
    if not _ALIAS.fullmatch(text(value)):
        raise MalformedError(f"{quote(value)} is not 1 to {_ALIAS_MAX} of a-z 0-9 -")
    return str(value)


def host_alias() -> str:
    """The name of this machine, as far as it can be what a lead calls itself."""
    name, _, _ = os.uname().nodename.lower().partition(".")
    return re.sub("[^a-z0-9-]", "-", name)[:_ALIAS_MAX] or "ctxfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Another machine, and how it is reached: by either ``ssh`` or ``command``.

    ``users`` are those who may use it, and their names there; without it all may but root, and
    have the names that they have here. ``max`` is of the placed agents of all owners that live.
    ``as_`` says as whom ``command`` is executed.
    """

    ssh: Annotated[str, _address] = ""
    command: Annotated[tuple[str, ...], _command] = ()
    users: Annotated[
        Mapping[str, str] | None, map_of(check_login, check_login, "OWNER: LOGIN")
    ] = None
    max: Annotated[int, count] = 1024
    lease: Annotated[float, _lease] = 30.0
    options: Annotated[tuple[str, ...], list_of(_option)] = ()
    env: Annotated[Mapping[str, str], map_of(_check_variable, _word, "KEY: VALUE")] = field(
        default_factory=dict
    )
    as_: Annotated[str, choice("link", "owner")] = "link"

    def login(self, owner: int) -> str | None:
        """The name there of a user of this machine; None if the user may not use the node."""
        entry = find_user(owner)
        name = entry.pw_name if entry else str(owner)
        if self.users is not None:
            return self.users.get(name) or self.users.get(str(owner))
        return name if entry and owner and _LOGIN.fullmatch(name) else None


def argv(
    node: Node, login: str, *, rootless: bool, there: Sequence[str] = PEER
) -> list[str]:
    """The command that leads to the daemon at a node, for a user with this name there; with root,
    ssh is executed where the key of the daemon is. ``there``: what it is to execute at the node.

    Without root it is the user's own ssh, which knows by itself as whom to log in.
    """
    if node.command:
        return [word.replace("{user}", login) for word in node.command]
    if rootless:
        named = [] if node.users is None else ["-l", login]
        return ["/bin/sh", "-c", _OWN_SSH, "ssh", *node.options, *named, "--", node.ssh]
    # ssh takes the first value of an option
    return [
        "ssh", "-T", "-F", "none", "-oBatchMode=yes", "-oIdentitiesOnly=yes",
        "-oStrictHostKeyChecking=yes", "-oUserKnownHostsFile=known_hosts",
        "-oClearAllForwardings=yes", "-oControlPath=none", "-oConnectTimeout=10",
        "-i", "key", *node.options, "-l", login, "--", node.ssh, *there,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Rights of agents that other machines place here. ``max`` is of those of one owner."""

    allow: Annotated[bool, flag] = True
    max: Annotated[int, count] = 1024
    lease_max: Annotated[float, _lease] = 3600.0
    networks: Annotated[tuple[str, ...], list_of(_name, "names")] = ()
    shared: Annotated[tuple[str, ...], list_of(_name, "names")] = ()


_read_node: Final = record(Node)
_read_placed: Final = record(Placed)


def _node(value: Any) -> Node:
    node = _read_node(value)
    if bool(node.ssh) == bool(node.command):
        raise MalformedError("use either ssh: ADDRESS or command: [/PROGRAM, ARGUMENT, ...]")
    for key, needed in _ONLY_WITH.items():
        if key in value and needed not in value:
            raise MisplacedError({(key,): f"means nothing without {needed}; leave it out"})
    return node


read_nodes: Final = map_of(check_name, _node, "names to {ssh: ADDRESS}")


def read_placed(value: Any) -> Placed:
    if isinstance(value, dict) and "directories" in value:
        why = "no directories can be offered yet; placed agents find node:recipes"
        raise MisplacedError({("directories",): why})
    return _read_placed(value)


def doubts(nodes: Mapping[str, Node]) -> Iterator[tuple[Place, str]]:
    """Sentences on settings that are likely to be meant otherwise, with their places."""
    for name, node in nodes.items():
        first: dict[str, str] = {}
        for owner, login in (node.users or {}).items():
            other = first.setdefault(login, owner)
            if other != owner:
                yield (
                    ("nodes", name, "users", owner),
                    f"{other} is {login} there too, so agents of both have one uid; give each "
                    "owner a login of its own",
                )
