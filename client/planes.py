"""The objects in the directories task, work, waiting and ask of an agent."""

from __future__ import annotations

import os

from client.declaring import Arguments
from client.exits import Misuse
from client.output import headed
from client.root import PARTS, Root, agent, below, label, own_name
from client.types import Iterable, Sequence
from client.words import ASK_ENDS, PLANE_FILES, TASK_ENDS, WAIT_ENDS, WORK_ENDS


class Plane:
    """A directory in each agent that holds objects of one kind.

    `over` holds the final statuses. `files` describe an object, with `first` before the others;
    `texts` are longer files. `columns` has files by the heading of a table: the first one that is
    not empty is shown.
    """

    def __init__(
        self, directory: str, over: Sequence[str], first: str, texts: str, columns: dict[str, str]
    ) -> None:
        self.directory = directory
        self.over = over
        self.texts = texts.split()
        before = first.split()
        rest = (f for f in PLANE_FILES[directory] if f not in before and f not in self.texts)
        self.files = [*before, *rest]
        self.columns = columns


PLANES = {
    "task": Plane(
        "task",
        TASK_ENDS,
        "kind status exit pid title cmd",
        "env preview",
        {**headed("kind", "status", "exit"), "TITLE": "title cmd"},
    ),
    "work": Plane(
        "work",
        WORK_ENDS,
        "status objective",
        "plan.md acceptance.md",
        {"STATUS": "status", "BLOCKED BY": "blocked_by", **headed("parent", "objective")},
    ),
    "waits": Plane(
        "waiting", WAIT_ENDS, "status", "payload", headed("status", "on", "work", "deadline")
    ),
    "ask": Plane(
        "ask",
        ASK_ENDS,
        "status kind question",
        "detail options form answer",
        headed("status", "to", "question"),
    ),
}


def plane_path(root: Root, args: Arguments) -> str:
    """Return the path of the command's plane in the agent that it names."""
    return agent(args.agent or own_name(root, "-a NAME"), PLANES[args.group].directory)


def path_of(root: Root, args: Arguments, name: str, file: str = "") -> str:
    """Return the path of the agent or object that a command names, or of its `file`."""
    if not args.group:
        return agent(name, file)
    if not name or "/" in name:
        kind = PARTS[PLANES[args.group].directory]
        raise Misuse(f'"{name}" cannot be the name of {kind}')
    owner = below(plane_path(root, args), name)
    return below(owner, file) if file else owner


def number_last(name: str) -> tuple[str, int]:
    """Return a sort key that puts task-10 after task-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def objects(root: Root, directory: str) -> list[str]:
    """Return the paths of the objects in a plane."""
    names = sorted(root.call(directory, os.listdir), key=number_last)
    owners = (f"{directory}/{name}" for name in names)
    return [owner for owner in owners if os.path.isdir(root.join(owner))]


def describe(root: Root, owner: str, files: Iterable[str]) -> dict[str, str]:
    """Return the name and the files of an object."""
    return {"name": label(owner), **{file: root.value(f"{owner}/{file}") for file in files}}
