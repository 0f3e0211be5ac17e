"""The numbers of rows and tools in inode numbers: part of the format of the state.

The kernel keeps inode numbers for as long as the filesystem is mounted, which may be longer than
one version of ctxd runs. So a number means the same file for ever. A name's number is its place
in the list, from 1 on. Add a new name at the end of its list; never move one, and leave the name
of what is gone where it is. The order in which files are listed is that of the rows.
"""

from __future__ import annotations

from typing import Final

#: the most that a list may have: a row has 8 bits of an inode number
ROWS_MAX: Final = 255

#: by layout: ``.`` is the object's own directory; ``*`` is before what is listed beside that
ROWS: Final[dict[str, tuple[str, ...]]] = {
    "root": (
        ".", "status", "error", "metrics", "agents", "ctxd.sock", "bin", "bin/ctx", "agent",
        "tool", "home", "shared", "trigger", "asks", "events", "nodes",
    ),
    "agent": (
        ".", "*", "*.sock", "*self", "parent", "supervisor", "life", "profile", "visibility",
        "ownership", "families", "ingress", "owner", "uid", "gid", "groups", "label", "policy",
        "policy.effective", "mount", "mount.effective", "root", "iso", "workspace", "cwd",
        "env", "path", "context", "model", "exec", "mode", "homedir", "limits", "restart",
        "meta.json", "status", "outcome", "reason", "incarnation", "pid", "run", "cgroup",
        "usage", "processes", "out", "log", "error", "ctl", "wait", "inbox", "queue", "message",
        "report", "handoff.md", "input.jsonl", "inherited.md", "inherited.json", "result.md",
        "refs.jsonl", "artifact", "child", "task", "work", "work/current", "waiting", "session",
        "author", "tty", "ask", "placement", "node",
    ),
    "child": (".",),
    "session": (
        ".", "messages.jsonl", "events.jsonl", "latest.md", "state", "cwd", "created_at",
        "updated_at", "meta.json", "context", "context/memory.md", "context/episode",
        "context/pack.md", "context/now.md", "context/child",
    ),
    "channel": (".", "agent", "session", "status",),
    "home": (".", "agent", "data",),
    "history": (".", "session",),
    "task": (
        ".", "kind", "title", "cmd", "cwd", "env", "accepts_input", "status", "exit", "reason",
        "agent", "pid", "output", "preview", "input", "ctl", "wait", "work", "worktree",
        "started_at", "ended_at", "tty",
    ),
    "work": (
        ".", "objective", "plan.md", "acceptance.md", "status", "blocked_by", "parent",
        "created_at", "updated_at",
    ),
    "waiting": (".", "on", "work", "deadline", "status", "payload", "token", "*TOKEN",),
    "ask": (
        ".", "kind", "question", "detail", "options", "form", "default", "deadline", "to", "life",
        "answer", "status", "by", "asked_at", "ended_at", "wait",
    ),
    "tool": (".", "*", "description", "schema", "output_schema", "family",),
    "supervisor": (".", "inbox",),
    "space": (".", "owner", "usage", "max", "data",),
}  # fmt: skip

TOOLS: Final = (
    "SpawnAgent", "AgentGet", "AgentList", "SendMessage", "Report", "AgentStop",
    "AgentRemove", "ResultWrite", "WorkCreate", "WorkUpdate", "WorkList", "WorkFocus",
    "ExecCommand", "TaskList", "TaskStatus", "TaskOutput", "TaskInput", "TaskStop",
    "TaskRemove", "WaitFor", "WaitCancel", "WorktreeTake", "WorkRemove",
    "Ask", "AskWithdraw", "AskList", "AskAnswer",
)  # fmt: skip
