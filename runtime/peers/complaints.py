"""A command that leads to a node complains: its words are told, with what to do about them."""

from __future__ import annotations

from typing import Final

from runtime.texts.names import escape

#: by what ssh(1) and the shell at the node say; ``{}`` is the directory of keys here
_CURES: Final = {
    "has changed and you have requested strict checking": (
        "it was installed anew, or somebody stands between; if you know why, remove the old key "
        "from {}/known_hosts"
    ),
    "key is known for": "compare it with the one there, and add it to {}/known_hosts",
    "Permission denied (": "the key in {} is to be in authorized_keys there",
    "ctx: command not found": "install ctxfs there, or name its path in authorized_keys",
    "ctx: not found": "install ctxfs there, or name its path in authorized_keys",
    "No user exists for uid": "make a user ctxfs-link, or name another one as link_user",
    "ssh: connect to host": "is the address right, is the machine up, and its sshd?",
}


def told(said: str, keys: str) -> str:
    """One line of it all, or of what is known how to cure; ``keys`` is the directory of keys."""
    for line in said.splitlines():
        for mark, cure in _CURES.items():
            if mark in line:
                return f"{escape(line.strip().removesuffix('.'))}: {cure.format(keys)}"
    return escape(" ".join(said.split()))
