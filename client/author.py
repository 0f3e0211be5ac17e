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
    import subprocess

    try:
        done = subprocess.run(
            ["git", "config", "--global", "--includes", "-z", "--get-regexp", "^user[.]"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=True,
        )  # fmt: skip
        said = [item.partition("\n") for item in done.stdout.decode().split("\0")]
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, or its file is damaged
        return []
    found = {key: "".join(c for c in text if c.isprintable() and c not in "<>")
             for key, _, text in said}  # fmt: skip
    name, email = found.get("user.name", "").strip(), found.get("user.email", "")
    line = f"{name} <{''.join(email.split())}>"
    return [("author", value_of(line))] if name and email and len(line) <= 256 else []
