"""As whom an agent commits: as the user who makes it."""

from __future__ import annotations

import os

from client.files import value_of
from client.types import Sequence


def author_line(files: Sequence[tuple[str, object]]) -> list[tuple[str, bytes]]:
    """Return the file that says as whom git commits, as the user's own configuration of git has
    it; nothing if that does not, or if one of the files says it already."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    places = [os.path.expanduser("~/.gitconfig"), f"{config}/git/config"]
    if "GIT_CONFIG_GLOBAL" in os.environ:
        places = [os.environ["GIT_CONFIG_GLOBAL"]]
    if any(file == "author" for file, _ in files) or not any(map(os.path.exists, places)):
        return []
    try:
        text = printed("git", "config", "--global", "--includes", "-z", "--get-regexp", "^user[.]")
        said = [item.partition("\n") for item in text.decode().split("\0")]
    except (OSError, ValueError):  # no git, or another encoding
        return []
    found = {key: "".join(c for c in text if c.isprintable() and c not in "<>")
             for key, _, text in said}  # fmt: skip
    name, email = found.get("user.name", "").strip(), found.get("user.email", "")
    line = f"{name} <{''.join(email.split())}>"
    return [("author", value_of(line))] if name and email and len(line) <= 256 else []


def printed(*words: str) -> bytes:
    """Return what a program prints; `OSError` if there is no such program.

    `subprocess` takes longer to import than a small program to run.
    """
    read_fd, write_fd = os.pipe()
    try:
        child = os.posix_spawnp(words[0], words, os.environ, file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write_fd, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ])  # fmt: skip
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    with open(read_fd, "rb", buffering=0) as text:
        data = text.readall()
    os.waitpid(child, 0)
    return data
