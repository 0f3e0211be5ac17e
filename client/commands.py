"""The table of commands. A module is loaded only when one of its commands is used."""

from __future__ import annotations

from client.declaring import DECLARED, Command
from client.exits import USAGE, Failure
from client.types import Iterator
from client.words import VERBS

#: the module of each command by the first word of its name, by chapter, in the order of help
CHAPTERS = {
    "Looking": {
        **dict.fromkeys(("ps", "tree"), "ps"),
        **{name: name for name in ("top", "status")},
        "get": "agents",
        **dict.fromkeys(("result", "now", "log", "logs"), "log"),
        **{name: name for name in ("events", "reports", "timeline")},
    },
    "Making and changing": {
        **dict.fromkeys(("new", "set"), "agents"),
        "session": "verbs",
        "rm": "agents",
        "agents": "recipes",
        "export": "export",
    },
    "Running and ending": {
        **dict.fromkeys(("spawn", "run"), "spawn"),
        **dict.fromkeys((*VERBS, "abort", "wait"), "verbs"),
    },
    "Talking": {
        **dict.fromkeys(("send", "chat"), "messages"),
        "attach": "attach",
        "queue": "messages",
        **{name: name for name in ("acp", "bridge")},
    },
    "Tasks, work items and waits": {"task": "tasks", "work": "work", "waits": "waits"},
    "Tools": {"tool": "tools", "mcp": "mcp"},
    "Rights and accounts": {"why": "asking", "audit": "audit", "quota": "asking"},
    "The daemon and help": {
        **dict.fromkeys(("ping", "reexec"), "asking"),
        **dict.fromkeys(("backup", "restore"), "backup"),
        **{name: name for name in ("doctor", "help")},
    },
}
SUBJECTS = {
    **{word: module for words in CHAPTERS.values() for word, module in words.items()},
    "__complete": "complete",
}


class Group:
    """Commands whose names begin with the same word; this word alone runs `list`.

    `other` is the command to run if the second word is not the name of one.
    """

    def __init__(self, summary: str, notes: str = "", other: str = "") -> None:
        self.summary = summary
        self.notes = notes
        self.other = other


GROUPS = {
    "task": Group("commands that run inside an agent"),
    "work": Group("what an agent has to do"),
    "waits": Group("what an agent waits for"),
    "tool": Group(
        "programs for models: JSON in, JSON out", "ctx tool NAME JSON also calls a tool.", "call"
    ),
}


def commands_of(word: str) -> dict[str, Command]:
    """Return the commands whose names begin with a word, by the words after it."""
    __import__(f"client.{SUBJECTS[word]}")  # importlib itself is slow to import
    return DECLARED[word]


def all_commands() -> Iterator[Command]:
    """Yield every command that people use, in the order of help."""
    for word in SUBJECTS:
        if not word.startswith("_"):
            yield from commands_of(word).values()


def no_command(name: str) -> Failure:
    """Return the failure of an unknown command."""
    group = name.partition(" ")[0]
    return Failure(
        f'unknown command "{name}"; see: ctx help{f" {group}" * (group in GROUPS)}', USAGE
    )


def find_command(words: list[str]) -> tuple[Command, list[str]]:
    """Return the command at the beginning of `words`, and the words after its name."""
    first, second = words[0], " ".join(words[1:2])
    if first not in SUBJECTS:
        raise no_command(first)
    rows, group = commands_of(first), GROUPS.get(first)
    if group is None:
        return rows[""], words[1:]
    if second in rows:
        return rows[second], words[2:]
    if not second or second.startswith("-"):
        return rows["list"], words[1:]
    if not group.other:
        raise no_command(f"{first} {second}")
    return rows[group.other], words[1:]
