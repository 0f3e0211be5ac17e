"""A command that leads to a node complains: its words are told, with what to do about them."""

from __future__ import annotations

from typing import Final

from runtime.texts.names import escape

#: of whoever breaks the rules a line in the log is enough for so many seconds
COMPLAINT_SECONDS: Final = 60.0
#: bytes of what a command said that are told
SAID_MAX: Final = 1024
_NOBODY: Final = "make that user there, or name another one in users of this node"
#: by what ssh(1), the shell at the node, and runuser, sudo or docker exec say; ``{}`` is the
#: directory of keys here
_CURES: Final = {
    "has changed and you have requested strict checking": (
        "it was installed anew, or somebody stands between; if you know why, remove the old key "
        "from {}/known_hosts"
    ),
    "key is known for": "compare it with the one there, and add it to {}/known_hosts",
    "Host key verification failed": "log in there once by hand, and compare the key",
    "Permission denied (": (
        "is there such a user? The key in {} is to be in authorized_keys of that one"
    ),
    "does not exist or the user entry": _NOBODY,
    "unknown user": _NOBODY,
    "unable to find user": _NOBODY,
    "ctx: command not found": "install ctxfs there, or name its path in authorized_keys",
    "ctx: not found": "install ctxfs there, or name its path in authorized_keys",
    "No user exists for uid": "make a user ctxfs-link, or name another one as link_user",
    "ssh: connect to host": "is the address right, is the machine up, and its sshd?",
    "Could not resolve hostname": "is the name right? ssh looks for it where ctxd runs",
}
#: what else is to be said where that is the user's own ssh(1)
_OWN: Final = {
    "Permission denied (": (
        "nobody types a passphrase for ctxd: if an agent of ssh has the key, say where with "
        "IdentityAgent in ~/.ssh/config, or start ctxd with SSH_AUTH_SOCK"
    ),
}


def told(said: str, keys: str) -> str:
    """One line of it all, or of what is known how to cure; ``keys`` is the directory of the
    daemon's own keys, empty where the user's ssh has them."""
    cures = _CURES if keys else {**_CURES, **_OWN}
    for line in said.splitlines():
        for mark, cure in cures.items():
            if mark in line:
                cure = cure.format(keys or "~/.ssh")
                return f"{escape(line.strip().removesuffix('.'))}: {cure}"
    return escape(" ".join(said.split()))


def said_instead(line: bytes) -> str:
    """The words of a command that leads to no ``ctx peer``."""
    return escape(line.decode(errors="replace").strip())[:SAID_MAX]


def ended(status: int) -> str:
    """How a command has ended of which nothing else is known."""
    how = f"with status {status}" if status >= 0 else f"by signal {-status}"
    return f"the command ended {how}"
