"""The program of an agent, its environment, mode, model and home, as rows."""

from __future__ import annotations

from typing import Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Control, Row
from runtime.agents import placing
from runtime.caller import PARTIES, Caller
from runtime.errors import DeniedError, MalformedError
from runtime.records.model import HOMEDIRS, Agent
from runtime.records.modes import MODES
from runtime.texts import names
from runtime.texts.names import quote

_CONTEXTS: Final = ("fresh", "fork")
#: a refusal goes on so
_LINES: Final = r"""; a line break in it is \n within $'...', as in: sh -c $'date\nls'"""
_RESTARTS: Final = ("no", "on-failure", "always")


def _check_tools(line: str, _: str = "") -> None:
    for item in line.split(":"):
        if item:
            names.check_absolute(item, "tool directory")


def _set_tool_path(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    items = [item for line in fields.lines(text) for item in line.split(":") if item]
    for item in items:
        names.check_absolute(item, "tool directory")
    base.agents.journal.update(agent, path="".join(f"{item}\n" for item in items))


def _parse_context(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if names.check_choice(line, _CONTEXTS) == "fork" and agent.parent is None:
        raise MalformedError("fork: a root agent has no parent to inherit from; use fresh")
    return line


def _check_model(line: str, _: str = "") -> None:
    if len(line) > 256 or not line.isprintable():
        raise MalformedError(f"{quote(line)} is not a model id; use up to 256 printable characters")


def _parse_model(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    _check_model(line)
    if line and not base.agents.authority.allows(agent, "model", line, "use"):
        raise DeniedError(f"model:{line} use is not in the agent's effective policy")
    return line


def _check_author(line: str, _: str = "") -> str:
    return line and names.parse_author(line) and line


def _check_exec(line: str, _: str = "") -> str:
    if any(ord(c) < 32 and c != "\t" for c in line):
        raise MalformedError(
            f"{quote(line)}: a command line cannot contain control characters; in $'...' write "
            "\\n, \\t or \\xHH for them"
        )
    names.split_command(line)
    return line


def _parse_mode(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if names.check_choice(line, tuple(MODES)) != "once" and agent.tty:
        raise MalformedError(
            f"mode: with tty ({agent.tty}) it can only be once: empty tty first for {quote(line)}"
        )
    return line


def _check_tty(line: str, _: str = "") -> str:
    if line:
        names.parse_screen(line)
    return line


def _parse_tty(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    if _check_tty(line) and agent.mode != "once":
        raise MalformedError(f"tty: only with the mode once; mode is {agent.mode}")
    placing.check(base.agents, agent, tty=line)
    return line


def _parse_restart(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    value = names.check_choice(line, _RESTARTS)
    if value != "no" and agent.parent is not None:
        raise MalformedError(f"{quote(line)}: only root agents restart; for a child, use no")
    placing.check(base.agents, agent, restart=value)
    return value


def _check_meta(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    try:
        names.parse_json_object(line)
    except MalformedError:
        if not names.is_unfinished_json(line):
            raise


def _set_meta(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    names.parse_json_object(text)
    base.agents.journal.update(agent, meta=text if text.endswith("\n") else text + "\n")


def _meta(base: Base, agent: Agent, caller: Caller) -> str:
    return agent.meta if agent.meta.endswith("\n") else agent.meta + "\n"


ROWS: Final[tuple[Row[Agent], ...]] = (
    Control(name="env", shape=shapes.pairs(lambda line, label: names.parse_env_line(line),
                                           pattern="^[A-Za-z_][A-Za-z0-9_]*$"),
        mode=0o600, read=PARTIES, guard=fields.WHILE_NEW,
        render=fields.text("env"), check=fields.alone(fields.check_variable),
        commit=lambda base, agent, caller, text: base.agents.journal.update(
            agent, env=fields.variables(text)
        ),
        doc="environment: KEY=VALUE, one per line; root of a node can read it, too"),
    Control(name="path", default="/ctx/tool", shape=shapes.lines(_check_tools),
        guard=fields.WHILE_NEW, check=fields.alone(_check_tools),
        render=lambda base, agent, caller: agent.path or f"{base.runtime.places.mount}/tool\n",
        commit=_set_tool_path, doc="tool directories, one per line"),
    fields.single("context", "fresh, or fork", _parse_context,
                  shape=shapes.choice(_CONTEXTS), default="fresh"),
    fields.single("model", "free text for the program; its policy must allow it", _parse_model,
                  shape=shapes.word(_check_model), public=True, guard=fields.BETWEEN_RUNS),
    fields.single("exec", "the program and its arguments, one line, quoted as in bash, without "
                  "expansions", fields.alone(_check_exec),
                  shape=shapes.word(_check_exec, hint=_LINES),
                  default="the parent's", guard=fields.BETWEEN_RUNS),
    fields.single("mode", "once, turn or resident", _parse_mode,
                  shape=shapes.choice(tuple(MODES)), default="once"),
    fields.single("tty", "COLSxROWS, in mode once: its program has a terminal, of this size at "
                  "first", _parse_tty, shape=shapes.word(_check_tty)),
    fields.single("homedir", "private: HOME is empty at first and goes with the agent; durable: "
                  "it stays for the next agent of this name",
                  fields.alone(lambda line: names.check_choice(line, HOMEDIRS)),
                  shape=shapes.choice(HOMEDIRS), default="private"),
    fields.single("author", "as whom git commits in its sandbox: NAME <EMAIL>",
                  fields.alone(_check_author), shape=shapes.word(_check_author),
                  default="the parent's; empty for the owner's account"),
)

#: listed after the limits
RESTART: Final = fields.single(
    "restart", "no, on-failure or always; root agents only", _parse_restart,
    shape=shapes.choice(_RESTARTS), default="no", guard=fields.AT_ANY_TIME,
)  # fmt: skip
META: Final[Control[Agent]] = Control(
    name="meta.json", default="{}", shape=shapes.JSON, guard=fields.AT_ANY_TIME, first=True,
    depends=("meta",), render=_meta, check=_check_meta, commit=_set_meta, doc="any JSON object",
)  # fmt: skip
