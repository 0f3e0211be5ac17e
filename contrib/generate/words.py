"""The words of the runtime and the names of files that the client knows: `client/words.py`.

``python -m contrib.generate.words client/words.py`` writes that module from the tables that decide.
The client cannot import these: it runs where the daemon is not installed, and starts fast.
"""

from __future__ import annotations

import pprint
import sys
from typing import Any, Final

from contrib.generate import renewing
from ctxfs import declared
from ctxfs.files import agent
from ctxfs.files.verbs import VERBS
from ctxfs.filesystem import LAYOUTS
from ctxfs.tools.registry import TOOLS
from ctxfs.tools.tool import Does
from ctxfs.tree.items import ItemLayout
from ctxfs.tree.rows import Control, PathControl, Shown
from runtime.kernel.cgroups import CONTROLLERS
from runtime.records.change import EVENT_TYPES
from runtime.records.items import (
    ASK_MOVES,
    PRIORITIES,
    TASK_MOVES,
    WAIT_MOVES,
    WORK_MOVES,
    AskStatus,
    TaskStatus,
    WaitStatus,
    WorkStatus,
)
from runtime.records.lifecycle import Status
from runtime.records.model import LIVES, SESSION_STATES
from runtime.records.modes import MODES
from runtime.records.schema import SCHEMA
from runtime.runtime import VERSION
from runtime.texts import mounts
from runtime.texts.names import JSON_MISTAKES, SECONDS

_HEAD: Final = '''\
"""The words of the runtime's tables: do not edit.

Written by `make words` (contrib/generate/words.py).
"""

from __future__ import annotations

'''


def _plane_files() -> dict[str, tuple[str, ...]]:
    """By directory of an agent, the values of each object in it, in the order of its rows."""
    return {
        layout.name: tuple(
            row.name for _, row in layout.within("") if isinstance(row, Shown | Control)
        )
        for layout in LAYOUTS
        if isinstance(layout, ItemLayout)
    }


def _tools_that(*may: Does) -> tuple[str, ...]:
    return tuple(tool.name for tool in TOOLS if any(each in tool.does for each in may))


def _hints() -> dict[str, tuple[str, ...]]:
    """The effects that calls of tools may have, as the Model Context Protocol calls them."""
    return {
        "readOnlyHint": _tools_that(Does.READS),
        "destructiveHint": _tools_that(Does.DESTROYS),
        "idempotentHint": _tools_that(Does.READS, Does.REPEATS),
        "openWorldHint": _tools_that(Does.REACHES),
    }


def _tools_about_one() -> tuple[str, ...]:
    return tuple(
        tool.name
        for tool in TOOLS
        if "agent_id" in tool.schema["properties"] and "agent_id" not in tool.schema["required"]
    )


def _agent_files() -> tuple[str, ...]:
    """The files that set an agent up, but for the one that says whose it is."""
    return tuple(
        row.name
        for row in agent.ROWS
        if isinstance(row, Control | PathControl) and not row.within and row.name != "parent"
    )


#: by the name in the client: what it is, and the words
WORDS: Final[dict[str, tuple[str, Any]]] = {
    "MODES": ("the values of an agent's file `mode`", tuple(MODES)),
    "LIVES": ("and of `life`", LIVES),
    "STATUSES": ("and of `status`", tuple(status.value for status in Status)),
    "AGENT_FILES": (
        "the files that set an agent up, in an order in which they can be written",
        _agent_files(),
    ),
    "AGENT_FORMS": (
        "the files that can be declared, what their values are in YAML",
        {name: shape.form for name, shape in declared.SHAPES.items()},
    ),
    "AGENT_DEFAULTS": (
        "and of those that are one of a few words, the one that they are at first",
        {
            name: row.default
            for name, row in declared.ROWS.items()
            if row.default in declared.SHAPES[name].schema.get("enum", ())
        },
    ),
    "MOUNT_MODES": ("what a line of `mount` allows", mounts.MODES),
    "PRIORITIES": ("of messages, the most urgent one first", PRIORITIES),
    "EVENT_TYPES": ("the types of events", EVENT_TYPES),
    "SESSION_ENDS": (
        "the states of a session whose agent has ended",
        tuple(dict.fromkeys(SESSION_STATES.values())),
    ),
    "TASK_ENDS": (
        "the statuses in which a task has ended",
        tuple(s.value for s in TaskStatus if s in TASK_MOVES.terminal),
    ),
    "WORK_ENDS": (
        "the statuses in which a work item has ended",
        tuple(s.value for s in WorkStatus if s in WORK_MOVES.terminal),
    ),
    "WAIT_ENDS": (
        "the statuses in which a wait has ended",
        tuple(s.value for s in WaitStatus if s in WAIT_MOVES.terminal),
    ),
    "ASK_ENDS": (
        "the statuses in which an ask is over",
        tuple(s.value for s in AskStatus if s in ASK_MOVES.terminal),
    ),
    "PLANE_FILES": ("the values of an object in a directory of an agent", _plane_files()),
    "CONTROLLERS": ("the cgroup controllers that limits need", CONTROLLERS),
    "VERBS": (
        "the verbs that take no word, as commands",
        {verb.name: verb.told for verb in VERBS.values() if verb.told},
    ),
    "JSON_MISTAKES": (
        "what is wrong with a text of JSON, by how Python's words for it begin", JSON_MISTAKES
    ),
    "SECONDS": ("in each unit of a duration", SECONDS),
    "TOOLS": ("the tools", tuple(tool.name for tool in TOOLS)),
    "HINTS": ("what calls may do, and of which tools", _hints()),
    "VERSION": ("of ctxfs", VERSION),
    "SCHEMA": ("of the state that this version writes", SCHEMA),
    "ABOUT_ONE": (
        "the tools that are about the caller, or the agent of `agent_id`", _tools_about_one()
    ),
}


def module() -> str:
    """The source of ``client.words``."""
    lines = (f"#: {what}\n{name} = {_literal(words)}\n" for name, (what, words) in WORDS.items())
    return _HEAD + "".join(lines)


def _literal(words: Any) -> str:
    text = pprint.pformat(words, width=90, compact=True, sort_dicts=False).replace("'", '"')
    if "\n" in text:
        text = f"{text[0]}\n    " + text[1:-1].replace("\n", "\n   ") + f",\n{text[-1]}"
    return text


def main(argv: list[str] | None = None) -> int:
    what, where = "Write the words that the client knows.", "the module, such as client/words.py"
    return renewing.run(
        "words", what, where, lambda path: iter([(path, module())]), argv, target="words"
    )


if __name__ == "__main__":
    sys.exit(main())
