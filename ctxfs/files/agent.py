"""The files of an agent, ``/ctx/agent/NAME.d``, as rows (ctxfs(5), Files of an agent).

The table is in the order in which the files are listed. What sets an agent up is in a module
for each subject: its family, ids, policy, mounts, program and limits.
"""

from __future__ import annotations

from typing import Final

from ctxfs.files import (
    ask,
    family,
    ids,
    limits,
    mounts,
    placement,
    policy,
    program,
    state,
    task,
    waiting,
    work,
)
from ctxfs.files.documents import check_input, check_ref, document, kept_document, lines_document
from ctxfs.files.folders import ARTIFACT
from ctxfs.files.verbs import act, describe_verbs
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.folders import FolderNode
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import RowNode, found, node_of
from ctxfs.tree.rows import NEW, NOT_TERMINAL, Directory, Inlet, Link, Row, Shown, Socket, Verbs
from runtime.agents.messages import REPORTING, SENDING
from runtime.agents.reports import REPORT_MAX
from runtime.authority.guard import Guard
from runtime.caller import CONTROLLERS, PARTIES, Caller, Role
from runtime.errors import ForbiddenError
from runtime.ids import AgentIndex
from runtime.records.lifecycle import Status
from runtime.records.model import Agent

_DELEGATION: Final[Guard[Agent]] = Guard(who=CONTROLLERS, when=NEW, delegated=True)
_RESULT: Final[Guard[Agent]] = Guard(who=Role.SELF, when=NOT_TERMINAL)


def _message(base: Base, agent: Agent, caller: Caller) -> str:
    path = f"{base.runtime.places.mount}/agent/{agent.name}.d/handoff.md"
    return base.agents.messages.render_current(agent, path)


def _receive(
    base: Base, agent: Agent, call: Call, source: Node, name: str, new_name: str
) -> None:
    """rename(2) of a file in ``artifact/`` over ``result.md``."""
    own = base.folders.root(ARTIFACT, agent).folder
    if new_name != "result.md" or not isinstance(source, FolderNode) or source.folder is not own:
        raise ForbiddenError("only a file of artifact/ can be renamed over result.md")
    documents = base.agents.documents
    source.give(call, name, documents.path(agent, "result.md"))
    documents.result_written(agent)
    base.agents.journal.tell_agent(agent.index, ("result.md",))


def _find_child(base: Base, agent: Agent, call: Call, name: str) -> Node | None:
    children = base.agents.registry.children(agent)
    return found(base, CHILD, next((child for child in children if child.name == name), None))


def _session_target(base: Base, agent: Agent) -> str:
    name = base.agents.sessions.name_of(agent) or "default"
    return f"../../home/{agent.owner}/agent/{agent.name}/session/{name}"


_INBOX: Final[Row[Agent]] = Inlet(
    name="inbox", read=Role.ROOT, guard=SENDING,
    send=lambda base, agent, caller, text: base.agents.messages.send(caller, agent, text),
    doc="one message per flush; not in mode once",
)

ROWS: Final[tuple[Row[Agent], ...]] = (
    # the three names in /ctx/agent, then self
    Directory(name=".d", top=True, public=True, receive=_receive),
    Shown(name="", path=lambda agent: f"agent/{agent.name}", kept=False, mode=0o555,
        public=True, render=lambda base, agent, caller: base.client_program),
    # connect(2) does not walk again when it comes to a socket that is gone
    Socket(name=".sock", path=lambda agent: f"agent/{agent.name}.sock", kept=False, public=True),
    Link(name="self", path=lambda agent: f"agent/{agent.name}.d/self", kept=False, public=True,
        target=lambda base, agent: f"agent/{agent.name}.d"),
    *family.ROWS,
    *ids.ROWS,
    *policy.ROWS,
    *placement.ROWS,
    *mounts.ROWS,
    *program.ROWS,
    limits.ROW,
    program.RESTART,
    program.META,
    *state.ROWS,
    Verbs(name="ctl", guard=Guard(who=PARTIES | Role.STARTER | Role.STOPPER, local=True),
        act=act, render=describe_verbs, doc="takes verbs, one per line; reading lists them"),
    Link(name="wait", public=True, listed=False, depends=("wait_token",),
        target=lambda base, agent: str(base.agents.wait_files.path(agent.wait_token)),
        doc="reading it blocks until the agent is dead; by name only, no listing has it"),
    _INBOX,
    Shown(name="queue", instead="inbox", polled=True, generated=True,
        render=lambda base, agent, caller: base.agents.messages.lines(agent),
        doc="waiting messages, one JSON object per line"),
    Shown(name="message", polled=True, generated=True, render=_message,
        doc="the message at hand as a JSON object: {id, ts, from, provenance, priority, run, "
        "text}; empty between messages"),
    Inlet(name="report", guard=REPORTING, what="report", most=REPORT_MAX,
        send=lambda base, agent, caller, text: base.agents.messages.report(caller, agent, text),
        doc="one report to its supervisor per flush, of at most 64 KiB: a message with "
        "the provenance child, and an event agent.report; without a supervisor only the event"),
    document("handoff.md", "the delegated task, UTF-8 without NUL; the program's standard input",
             read=PARTIES, guard=_DELEGATION, shape=shapes.TEXT),
    lines_document("input.jsonl", "references to its inputs, one JSON object per line", check_input,
                   read=PARTIES, guard=_DELEGATION, shape=shapes.JSON_LINES),
    kept_document("inherited.md", "with context=fork: the context inherited from its parent; "
                  "precedes the handoff"),
    kept_document("inherited.json", "the same as a JSON object"),
    document("result.md", "its result", guard=_RESULT),
    lines_document("refs.jsonl", 'references: {"path", "hash"?, "kind"?, "summary"?} per line',
                   check_ref, guard=_RESULT),
    Directory(name="artifact", guard=ARTIFACT.write, folder=ARTIFACT,
        doc="files and directories that are part of its result"),
    Directory(name="child", find=_find_child,
        entries=lambda base, agent, call: (
            child.name for child in base.agents.registry.children(agent)
        ),
        doc="links to the directories of its children"),
    task.LAYOUT.directory("commands that it runs beside its program: mkdir creates a task"),
    work.LAYOUT.directory("what it works on: mkdir creates a work item"),
    work.CURRENT,
    waiting.LAYOUT.directory("what it waits for: mkdir creates a wait"),
    ask.LAYOUT.directory("what it asks people, or its supervisor: mkdir creates an ask"),
    Link(name="session", target=_session_target, depends=("owner",),
        doc="link to the current session"),
)

#: documents that a child's directory and its parent's channel show as one
DOCUMENTS: Final = ("handoff.md", "input.jsonl", "result.md", "refs.jsonl", "artifact")
#: those of them that are its results: its session shows them once it is reset
RESULTS: Final = ("result.md", "refs.jsonl", "artifact")
_OF_ITEMS: Final = {each.LAYOUT.name for each in (task, work, waiting, ask)}


def _find(base: Base, index: int, row: Row[Agent]) -> Agent | None:
    return base.agents.registry.get(AgentIndex(index))


def _find_with_documents(base: Base, index: int, row: Row[Agent]) -> Agent | None:
    """Agents that are gone are there for the documents that their channels and sessions show."""
    there = _find(base, index, row)
    if there is None and row.is_inside and row.name in DOCUMENTS:
        return base.agents.registry.recall(AgentIndex(index))
    return there


def _path(base: Base, agent: Agent) -> str:
    return f"agent/{agent.name}.d"


def _itself(base: Base, agent: Agent) -> Agent:
    return agent


def _is_asked(agent: Agent, row: Row[Agent]) -> bool:
    if not row.is_inside:
        return agent.private
    if row.within in _OF_ITEMS:
        return False  # their directory is
    # below a private name all is for those who know it, but for what is delegated
    return row.guard.delegated if agent.private else not row.public


def _is_unsettled(agent: Agent, row: Row[Agent]) -> bool:
    """It may still become a private one: nothing has to be forgotten then."""
    return agent.status is Status.NEW and not (row.is_inside and row.public)


LAYOUT: Final[Layout[Agent]] = Layout(
    number=1, name="agent", rows=ROWS, told=True, removable=True, find=_find_with_documents,
    path=_path, agent=_itself, asked=_is_asked, unsettled=_is_unsettled,
)  # fmt: skip
#: links to the directories of children
CHILD: Final[Layout[Agent]] = Layout(
    number=2,
    name="child",
    rows=(
        Link(name="child", top=True, target=lambda base, agent: f"../../{agent.name}.d"),
    ),
    find=_find,
    path=_path,
    agent=_itself,
)  # fmt: skip
#: Private agents as the children that they supervise find them: with an inbox, and nothing else.
#: The inodes are others, so that what the kernel keeps of an agent's files stays with those who may
#: see them.
SUPERVISOR: Final[Layout[Agent]] = Layout(
    number=11,
    name="supervisor",
    rows=(Directory(name=".d", mode=0o111, top=True, read=Role.NONE), _INBOX),
    find=_find,
    path=_path,
    agent=_itself,
    asked=lambda agent, row: True,
)


_BESIDE: Final = {".d": LAYOUT.top, **LAYOUT.beside}


def entry(base: Base, agent: Agent, suffix: str) -> RowNode[Agent]:
    """``NAME``, ``NAME.sock`` or ``NAME.d`` in ``/ctx/agent``, or ``self``."""
    return node_of(base, LAYOUT, agent.index, agent, _BESIDE[suffix])


def entry_inode(agent: Agent, suffix: str) -> int:
    """The inode number of that."""
    return LAYOUT.inode(agent.index, _BESIDE[suffix])


def shown_document(base: Base, agent: Agent, name: str) -> Node:
    """One of ``DOCUMENTS``, wherever it is shown: the same inode."""
    row = LAYOUT.row(name)
    if isinstance(row, Directory) and row.folder is not None:
        return base.folders.root(row.folder, agent)
    return node_of(base, LAYOUT, agent.index, agent, LAYOUT.number_of(name))
