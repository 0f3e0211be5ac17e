"""The words of the runtime's tables: do not edit.

Written by `make words` (contrib/generate/words.py).
"""

from __future__ import annotations

#: the values of an agent's file `mode`
MODES = ("once", "turn", "resident")
#: and of `life`
LIVES = ("owned", "temp", "detached")
#: and of `status`
STATUSES = ("new", "starting", "ready", "busy", "idle", "paused", "stopping", "dead")
#: the files that set an agent up, in an order in which they can be written
AGENT_FILES = (
    "life", "profile", "owner", "uid", "gid", "groups", "label", "policy", "placement",
    "mount", "root", "iso", "workspace", "cwd", "env", "path", "context", "model", "exec",
    "mode", "tty", "homedir", "author", "limits", "restart", "meta.json",
)
#: the files that can be declared, what their values are in YAML
AGENT_FORMS = {
    "parent": "parent",
    "life": "word",
    "profile": "word",
    "owner": "number",
    "uid": "number",
    "gid": "number",
    "groups": "numbers",
    "label": "word",
    "policy": "lines",
    "placement": "pairs",
    "mount": "lines",
    "root": "word",
    "iso": "word",
    "workspace": "word",
    "cwd": "word",
    "env": "pairs",
    "path": "lines",
    "context": "word",
    "model": "word",
    "exec": "word",
    "mode": "word",
    "tty": "word",
    "homedir": "word",
    "author": "word",
    "limits": "pairs",
    "restart": "word",
    "meta.json": "json",
    "handoff.md": "text",
    "input.jsonl": "json_lines",
}
#: and of those that are one of a few words, the one that they are at first
AGENT_DEFAULTS = {
    "iso": "sandbox",
    "context": "fresh",
    "mode": "once",
    "homedir": "private",
    "restart": "no",
}
#: what a line of `mount` allows
MOUNT_MODES = ("ro", "rw", "hide")
#: of messages, the most urgent one first
PRIORITIES = ("interject", "next", "normal", "background")
#: the types of events
EVENT_TYPES = (
    "agent.create", "agent.control", "agent.start", "agent.status", "agent.stop",
    "agent.child.cancel", "agent.report", "agent.limit", "run.start", "run.end",
    "message.queued", "message.end", "task.start", "task.end", "work.status", "wait.armed",
    "wait.fired", "wait.cancelled", "wait.expired", "ask.open", "ask.to", "ask.end",
    "terminal.attach", "terminal.leave",
)
#: the states of a session whose agent has ended
SESSION_ENDS = ("done", "error", "cancelled")
#: the statuses in which a task has ended
TASK_ENDS = ("completed", "failed", "cancelled", "interrupted")
#: the statuses in which a work item has ended
WORK_ENDS = ("done", "cancelled")
#: the statuses in which a wait has ended
WAIT_ENDS = ("fired", "cancelled", "expired")
#: the statuses in which an ask is over
ASK_ENDS = ("answered", "expired", "withdrawn")
#: the values of an object in a directory of an agent
PLANE_FILES = {
    "task": ("kind", "title", "cmd", "cwd", "env", "accepts_input", "tty", "status", "exit",
             "reason", "agent", "pid", "preview", "work", "worktree", "started_at",
             "ended_at"),
    "work": ("objective", "plan.md", "acceptance.md", "status", "blocked_by", "parent",
             "created_at", "updated_at"),
    "waiting": ("on", "work", "deadline", "status", "payload", "token"),
    "ask": ("kind", "question", "detail", "options", "form", "default", "deadline", "to",
            "life", "answer", "status", "by", "asked_at", "ended_at"),
}
#: the cgroup controllers that limits need
CONTROLLERS = ("memory", "pids", "cpu")
#: the verbs that take no word, as commands
VERBS = {
    "start": "start agents",
    "stop": "stop agents; kill them after their grace period",
    "kill": "stop agents at once",
    "pause": "freeze agents and all that they own",
    "resume": "let paused agents continue",
    "reset": "replace dead agents with new ones",
}
#: what is wrong with a text of JSON, by how Python's words for it begin
JSON_MISTAKES = {
    "Expecting value": "a value is missing here, or a text is not in double quotes",
    "Expecting property name": "a key in double quotes belongs here",
    "Expecting ": "a comma or a colon belongs here, or the end of a list or an object",
    "Illegal trailing comma": "no comma belongs before the end of a list or an object",
    "Extra data": "the text ought to end here",
    "Unterminated string": "the text that begins here has no closing double quote",
    "Invalid control character": "a text cannot have a line break or TAB: write \\n or \\t",
    "Invalid \\": "JSON has no such escape: write \\\\ for a backslash",
    "": "nothing that JSON knows is here",
}
#: in each unit of a duration
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: the tools
TOOLS = (
    "SpawnAgent", "AgentGet", "AgentList", "SendMessage", "Report", "AgentStop",
    "AgentRemove", "ResultWrite", "WorkCreate", "WorkUpdate", "WorkList", "WorkFocus",
    "ExecCommand", "TaskList", "TaskStatus", "TaskOutput", "TaskInput", "TaskStop",
    "TaskRemove", "WaitFor", "WaitCancel", "WorktreeTake", "WorkRemove", "Ask",
    "AskWithdraw", "AskList", "AskAnswer",
)
#: what calls may do, and of which tools
HINTS = {
    "readOnlyHint": ("AgentGet", "AgentList", "WorkList", "TaskList", "TaskStatus",
                     "TaskOutput", "AskList"),
    "destructiveHint": ("AgentStop", "AgentRemove", "ResultWrite", "WorkUpdate",
                        "ExecCommand", "TaskInput", "TaskStop", "TaskRemove", "WaitCancel",
                        "WorktreeTake", "WorkRemove", "AskWithdraw"),
    "idempotentHint": ("AgentGet", "AgentList", "AgentStop", "AgentRemove", "ResultWrite",
                       "WorkUpdate", "WorkList", "WorkFocus", "TaskList", "TaskStatus",
                       "TaskOutput", "TaskStop", "TaskRemove", "WaitCancel", "WorktreeTake",
                       "WorkRemove", "AskWithdraw", "AskList"),
    "openWorldHint": ("SpawnAgent", "SendMessage", "ExecCommand", "TaskInput", "Ask",
                      "AskAnswer"),
}
#: of ctxfs
VERSION = "0.2.0"
#: of the state that this version writes
SCHEMA = 10
#: the tools that are about the caller, or the agent of `agent_id`
ABOUT_ONE = (
    "SpawnAgent", "AgentGet", "ResultWrite", "WorkCreate", "WorkUpdate", "WorkList",
    "WorkFocus", "ExecCommand", "TaskList", "TaskStatus", "TaskOutput", "TaskInput",
    "TaskStop", "TaskRemove", "WaitFor", "WaitCancel", "WorktreeTake", "WorkRemove", "Ask",
    "AskWithdraw",
)
