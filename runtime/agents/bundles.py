"""Worktrees of agents on other machines: what crosses is a pack of objects, and a commit id.

At the lead the child has its branch, its place and a repository, as one that is there
(``runtime.agents.workspace``); what it lacks is files. All that its branch leads to goes to the
host. There a repository is made of it, an ordinary one, in durable trees that the agent has at
``/workspace`` and ``/repository``: by git in a sandbox like the agent's, with no more rights than
that. In another one git packs what was committed, once the agent has ended. At the lead that
becomes the child's repository, and is taken over as if it had been committed there.

Neither side obeys anything of the other's but those two: no ref, no configuration, no hook. A host
may make up whatever objects it likes: ``receive`` unpacks them where nothing else is, with bounded
memory, and ``take`` judges them as an agent's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from runtime.agents.gitcalls import (
    OBJECT_ID,
    Answer,
    RunInside,
    ask,
    number,
    object_id,
    said,
    script,
)
from runtime.agents.parts import Agents
from runtime.agents.workspace import (
    DIFFERENCES,
    GONE,
    REPOSITORY,
    WORKSPACE,
    Worktree,
    check_branch,
)
from runtime.errors import MalformedError, WrongStateError
from runtime.records.model import Agent
from runtime.texts.names import escape, quote
from runtime.texts.said import Said

#: the file that crosses, in both directions
PACK: Final = "worktree.pack"
#: what git is configured with on the other side, as here
KEYS: Final = frozenset(
    f"{section}.{key}".lower()
    for section, keys in {
        "user": ("name", "email"),
        "core": ("autocrlf", "eol", "safecrlf", "symlinks", "ignoreCase", "precomposeUnicode"),
        "i18n": ("commitEncoding",),
    }.items()
    for key in keys
)
#: of a value of these
_VALUE_MAX: Final = 1024
_WHY_MAX: Final = 1000
#: what a hash of so many digits is called
_FORMATS: Final = {40: "sha1", 64: "sha256"}

_RECEIVE: Final = script("bounded", "receive")
_UNPACK: Final = script("bounded", "apart", "unpack")
_KEEP: Final = script("bounded", "apart", "keep", "judge") + "say end\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A worktree as a host is told of it: whose branch, where that begins, what git is configured
    with, and what it lacks of that of its parent (``DIFFERENCES``)."""

    name: str
    base: str
    config: Mapping[str, str]
    differs: Mapping[str, str]

    @classmethod
    def of(cls, worktree: Worktree) -> Self:
        config = {key: value for key, value in worktree.config.items() if _is_right(value)}
        differs = {key: escape(value)[:_VALUE_MAX] for key, value in worktree.differs.items()}
        return cls(
            name=worktree.name,
            base=worktree.sent,
            config={key: value for key, value in config.items() if key in KEYS},
            differs=differs,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str) -> Self:
        """From ``put``, which says the rest of it; ``MalformedError``."""
        said = Said(values, "worktree")
        said.only(("base", "config", "differs"))
        base, config, differs = said.word("base"), said.texts("config"), said.texts("differs")
        right = config.keys() <= KEYS and differs.keys() <= {*DIFFERENCES, "unknown"}
        right = right and all(map(_is_right, (*config.values(), *differs.values())))
        if not right or not OBJECT_ID.fullmatch(base):
            raise MalformedError("worktree is without a right base, config, or what it differs in")
        check_branch(name)
        return cls(name=name, base=base, config=config, differs=differs)

    def said(self) -> dict[str, Any]:
        """The field of ``put``."""
        return {"base": self.base, "config": dict(self.config), "differs": dict(self.differs)}

    def told(self) -> dict[str, str]:
        """As the agent is told of it."""
        branch = {"path": WORKSPACE, "branch": f"ctx/{self.name}", "base": self.base}
        return {**branch, **self.differs}


def _is_right(value: str) -> bool:
    return len(value) <= _VALUE_MAX and value.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """An agent on another machine has left this: the commit of its branch, the directory there,
    for how many seconds that is kept, and why it is to be; ``size`` is that of the pack, 0 if
    nothing was committed."""

    commit: str = ""
    size: int = 0
    path: str = ""
    keep: float = 0.0
    why: str = ""

    @classmethod
    def read(cls, values: Any) -> Self:
        """As a host says it; ``MalformedError``."""
        said = Said(values if isinstance(values, dict) else {}, "worktree")
        commit, path, why = (said.get(key, str, "") for key in ("commit", "path", "why"))
        if commit and not OBJECT_ID.fullmatch(commit):
            raise MalformedError("worktree is without a right commit")
        path, why = escape(path)[:_WHY_MAX], escape(" ".join(why.split()))[:_WHY_MAX]
        size, keep = said.get("size", int, 0), min(said.amount("keep", 0.0), 1e9)
        return cls(commit=commit, size=size, path=path, keep=keep, why=why)

    def where(self, node: str) -> str:
        """Where that is, in the words of a sentence."""
        days = f" for {self.keep / 86400:.3g} days" if self.keep else ""
        return f"kept at {node}{days}" + (f", in {quote(self.path, 300)}" if self.path else "")


def _format(base: str) -> str:
    return _FORMATS[len(base)]


def _lines(config: Mapping[str, str]) -> str:
    return "\n".join(f"{key}={value}" for key, value in config.items())


def _check(answer: Answer, what: str) -> None:
    if not answer.whole:
        raise WrongStateError(f"{what}: {said(answer.text)}")


async def receive(
    run: RunInside, parent: Agent, worktree: Worktree, commit: str, most: int
) -> None:
    """At the lead: what ``run`` gives as standard input, of at most so many bytes, is what the
    child committed, and becomes that; ``CtxError``."""
    words = worktree.place, worktree.ref, commit
    answer = await ask(run, parent, _RECEIVE, *words, GIT_DIR=worktree.common, MOST=str(most))
    if answer.code != GONE:  # then nobody wants it any more, as ``take`` says
        _check(answer, "what it committed cannot be unpacked")


async def unpack(run: RunInside, agent: Agent, given: Given) -> None:
    """At the host: makes a repository, and its files, of what ``run`` gives as standard input;
    ``CtxError``."""
    answer = await ask(
        run,
        agent,
        _UNPACK,
        *(given.name, given.base, _format(given.base)),
        cwd=WORKSPACE,
        REPOSITORY=REPOSITORY,
        CONFIG=_lines(given.config),
        MOST="",
    )
    _check(answer, "its repository cannot be made of what its lead has sent")


async def keep(
    run: RunInside, agent: Agent, given: Given, program: str, settled: Iterable[str], most: int
) -> Left:
    """At the host: what an agent that has ended committed, which ``run`` keeps as a pack; also why
    what else is there is not to be lost. ``program`` is where its view has gather (gather.c),
    ``settled`` are worktrees of its children that may go with it."""
    answer = await ask(
        run,
        agent,
        _KEEP,
        *(given.name, given.base, _format(given.base), program, *settled),
        cwd=WORKSPACE,
        REPOSITORY=REPOSITORY,
        CONFIG=_lines(given.config),
        MOST=str(most),
    )
    _check(answer, "git could not look at it")
    size = number(answer.one("bytes")) if "bytes" in answer.words else 0
    commit = object_id(answer.one("commit")) if "commit" in answer.words else ""
    return Left(commit=commit, size=size, why=" ".join(answer.words.get("kept", [])))


# where these are


def made(agents: Agents, agent: Agent) -> Path:
    """The directory with the pack that this side made, in a file ``FIRST``."""
    return agents.documents.directory(agent) / "pack"


def came(agents: Agents, agent: Agent) -> Path:
    """The pack that the other side made, once all of it is here."""
    return agents.documents.directory(agent) / "came"


def size_of(path: Path) -> int:
    """Bytes of a pack; 0 if there is none."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def open_pack(path: Path) -> int:
    """For git to read. Without root the file is the agents' own uid's, who could hold up who opens
    it (F_SETLEASE): this waits for nobody."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
