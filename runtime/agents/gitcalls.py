"""Git is run in the cell of an agent, with that agent's rights, by scripts of ours.

A script (``runtime/agents/worktree``) says what it found in lines that begin with ``=``; whatever
else is printed is git's, for people. Neither the agent's environment nor a configuration of a
repository can have git execute anything: what these could name is overridden.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from runtime.errors import UnsupportedError, WrongStateError
from runtime.records.model import Agent
from runtime.texts.names import quote

#: (whose cell, argument vector, working directory there, more environment) ->
#: (exit status, stdout and stderr together: all of it up to 64 KiB at least)
RunInside = Callable[[Agent, list[str], str, dict[str, str]], Awaitable[tuple[int, str]]]


class RunFiles(Protocol):
    """As ``RunInside``, with bytes.

    ``open_input`` gives standard input. With ``out`` that directory gets standard output, in one
    file of at most ``most`` bytes (``FIRST``), and only what is said on standard error is returned.
    With a ``lease`` it runs under that in a cell of its own, as of the agent, which has none now.
    """

    def __call__(
        self,
        agent: Agent,
        words: list[str],
        cwd: str,
        env: dict[str, str],
        *,
        out: Path | None = None,
        most: int = 0,
        open_input: Callable[[], int] | None = None,
        lease: int | None = None,
    ) -> Awaitable[tuple[int, str]]: ...


OBJECT_ID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_NOT_FOUND: Final = (126, 127)
#: of timeout(1)
TIME_OVER: Final = 124
#: where ``RunFiles`` puts standard output
FIRST: Final = f"{0:020d}"

_VARIABLES: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_EDITOR": ":",
    # nothing is fetched, not even by a partial clone; protocol.<name>.allow would
    # win over protocol.allow, but not over this
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_COMMITTER_NAME": "ctxfs",
    "GIT_COMMITTER_EMAIL": "ctxfs@localhost",
}
_SETTINGS: Final = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.untrackedCache": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.alternateRefsCommand": ":",
    "core.pager": "cat",
    "core.editor": ":",
    "core.sshCommand": ":",
    "core.askPass": "",
    "credential.helper": "",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "pack.threads": "1",
    # the parent may work in what another uid owns; nothing there is executed
    "safe.directory": "*",
}

def script(*names: str) -> str:
    """One of the scripts, of these files."""
    directory = Path(__file__).with_name("worktree")
    return "\n".join((directory / f"{name}.sh").read_text() for name in ("say", *names))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a script: its exit status, its words, and what else was printed."""

    code: int
    words: dict[str, list[str]]
    text: str

    def one(self, word: str) -> str:
        found = self.words.get(word, [])
        if len(found) != 1:
            raise WrongStateError(f"git did not report {word}, but said {said(self.text)}")
        return found[0]

    @property
    def whole(self) -> bool:
        return self.code == 0 and "end" in self.words


async def ask(
    run: RunInside,
    agent: Agent,
    script: str,
    *words: str,
    cwd: str = "/",
    hooks: Iterable[str] = (),
    seconds: int = 0,
    **variables: str,
) -> Answer:
    """Runs a script in an agent's cell, in an environment that nobody else writes.

    ``hooks`` are names that the configuration has, to be switched off; ``seconds`` are what it has
    until it is killed, 0 for as many as it takes. ``UnsupportedError`` if there is no git, or no
    shell.
    """
    values = {**_VARIABLES, **variables}
    configured = {**_SETTINGS, **without_hooks(hooks)}
    # not by -c: a name may have a "="
    values["GIT_CONFIG_COUNT"] = str(len(configured))
    for number, (key, value) in enumerate(configured.items()):
        values[f"GIT_CONFIG_KEY_{number}"] = key
        values[f"GIT_CONFIG_VALUE_{number}"] = value
    # The agent's environment may set anything: GIT_DIR, GIT_TRACE, LD_PRELOAD.
    command = ["env", "-i", *(f"{key}={value}" for key, value in values.items())]
    limit = ["timeout", str(seconds)] if seconds else []
    code, text = await run(agent, [*command, *limit, "sh", "-c", script, "ctxfs", *words], cwd, {})
    found: dict[str, list[str]] = {}
    rest = []
    for line in text.split("\n"):
        word, _, value = line.removeprefix("=").partition(" ")
        if line.startswith("=") and word:
            found.setdefault(word, []).append(value)
        else:
            rest.append(line)
    answer = Answer(code, found, "\n".join(rest))
    if code in _NOT_FOUND or "git: not found" in answer.text:
        raise UnsupportedError(
            f"a worktree needs git, sh, coreutils, findutils, grep and sed in the view of "
            f"{quote(agent.name)}: {said(answer.text)}"
        )
    return answer


def without_hooks(names: Iterable[str]) -> dict[str, str]:
    """Settings that disable each hook which a configuration names."""
    settings: dict[str, str] = {}
    for name in names:
        section, _, rest = name.partition(".")
        hook, dot, _ = rest.rpartition(".")
        if section != "hook" or not name.isprintable() or "\ufffd" in name:
            raise UnsupportedError(
                f"cannot disable the hook {quote(name)} of the git configuration: its name must be "
                "printable UTF-8"
            )
        if dot:
            settings[f"hook.{hook}.enabled"] = "false"
    return settings


def said(text: str) -> str:
    return quote(" ".join(text.split()) or "no output", 300)


def number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise WrongStateError(f"git did not report a number, but said {said(text)}")
    return int(text)


def object_id(text: str) -> str:
    if not OBJECT_ID.fullmatch(text):
        raise WrongStateError(f"git did not report a commit, but said {said(text)}")
    return text
