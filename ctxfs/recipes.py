"""Recipes by which agents make agents: directories with the files that an agent is made of.

They are those of ``ctx run --agent`` (ctx(1), RECIPES), as far as the machine has them: an agent
names one, and never a path. What is written for it is written by whoever makes the agent, so it
gets no more than if its maker wrote the same lines. All of this reads the disk: it is not for the
event loop.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ctxfs.trusted import read_trusted, why_not_trusted
from runtime.errors import MalformedError
from runtime.texts.mounts import AT_NODE
from runtime.texts.names import is_name, quote

#: files of an agent, in an order in which they can be written
FILES: Final = (
    *("life", "label", "iso", "root", "mount", "workspace", "cwd", "env", "path", "policy"),
    *("context", "model", "exec", "mode", "homedir", "author", "limits", "restart", "groups"),
    "meta.json",
)
_EXTRAS: Final = ("README.md", "needs", "files", "ask", "tty")
#: where programs are looked for; what is below the others, every sandbox shows
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_SHOWN: Final = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")
_MODULES: Final = "/node_modules/"
_WORD: Final = re.compile(r"@([a-z]+(?::[^@\s]+)?)@")
#: a child works there by default
_AT_PARENTS: Final = "explicit_root:@cwd@"


@dataclass(slots=True)
class Recipe:
    """A recipe, as its directory has it; ``wrong`` says what is wrong with that, if anything is."""

    index: int
    name: str
    directory: Path
    description: str = ""
    #: of each file of an agent that it has
    lines: dict[str, list[str]] = field(default_factory=dict)
    #: the words that execute each program
    programs: dict[str, list[str]] = field(default_factory=dict)
    #: of each group, one variable is needed
    keys: list[list[str]] = field(default_factory=list)
    #: the first one that there is, is used
    networks: list[str] = field(default_factory=list)
    wrong: str = ""

    @property
    def lacks(self) -> str:
        """Why it cannot be used; empty if it can."""
        missing = next((name for name, words in self.programs.items() if not words), "")
        return self.wrong or (missing and f"program {missing}: not found in {_PATH}")

    def at_node(self) -> Recipe:
        """The recipe of this name that came with ctxfs at a node, where programs are found by their
        names."""
        programs = {name: [name] for name in self.programs}
        return replace(self, directory=Path(f"{AT_NODE}recipes/{self.name}"), programs=programs)

    def lacking_key(self, env: Mapping[str, str]) -> str:
        """The first group of which neither these variables nor its own have one; empty if there is
        none."""
        own = {line.partition("=")[0] for line in self.lines.get("env", ()) if "=" in line}
        for group in self.keys:
            if not any(name in own or env.get(name) for name in group):
                return " or ".join(group)
        return ""

    def texts(
        self, name: str, label: str, network: str, env: Mapping[str, str], *, keyed: bool
    ) -> Iterator[tuple[str, str]]:
        """Files of an agent of this recipe, and what to write; without a network, no line that
        names one. ``env`` is what its maker has: of that it gets what the recipe asks for, the keys
        only if it is ``keyed``."""
        words = {"name": name, "label": label, "network": network}
        words["files"] = str(self.directory / "files")
        asked = [key for group in self.keys for key in group] if keyed else []
        lines = {**self.lines, "env": [*self.lines.get("env", ()), *asked]}
        for file in FILES:
            found = [
                text
                for line in lines.get(file, ())
                if network or "@network@" not in line
                for text in self._made(file, line, words, env)
            ]
            if found and found != [_AT_PARENTS]:
                yield file, "".join(f"{text}\n" for text in found)

    def _made(
        self, file: str, line: str, words: Mapping[str, str], env: Mapping[str, str]
    ) -> list[str]:
        """The lines that one of the recipe stands for."""
        if line == _AT_PARENTS:
            return [line]

        def value(match: re.Match[str]) -> str:
            kind, _, program = match[1].partition(":")
            found = self.programs[program] if kind == "program" else [words[kind]]
            return shlex.join(found) if file == "exec" else " ".join(found)

        if file == "mount" and line.startswith("@program:") and _WORD.fullmatch(line):
            return _mounts(self.programs[line[len("@program:") : -1]])
        if file == "mount":
            fields = line.split("\t") if "\t" in line else line.split()
            return ["\t".join(_WORD.sub(value, each) for each in fields)]
        if file == "env" and "=" not in line:
            return [f"{line}={env[line]}"] if env.get(line) else []
        return [_WORD.sub(value, line)]


def shipped() -> Path:
    """The directory of the recipes that came with ctxfs: of a checkout, or installed."""
    house = Path(__file__).parents[1]
    shares = [prefix / "share" for prefix in (*house.parents, Path(sys.prefix))]
    places = [house / "contrib/agents", *(share / "ctxfs/agents" for share in shares)]
    return next((place for place in places if place.is_dir()), places[0])


def read(directories: Collection[Path], *, trusted: Collection[int]) -> list[Recipe]:
    """The recipes in some directories, by name; the first one of a name counts."""
    found: dict[str, Path] = {}
    for directory in directories:
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            if is_name(name) and (directory / name).is_dir():
                found.setdefault(name, directory / name)
    return [
        _read(Recipe(number, name, path.resolve()), trusted)
        for number, (name, path) in enumerate(sorted(found.items()), 1)
    ]


def _read(recipe: Recipe, trusted: Collection[int]) -> Recipe:
    place = recipe.directory
    try:
        for above in (place.parent, place):
            if why := why_not_trusted(os.stat(above), trusted):
                place = above
                raise MalformedError(why)
        for file in sorted(os.listdir(recipe.directory)):
            if file.startswith(".") or file in ("files", "ask", "tty"):
                continue
            place = recipe.directory / file
            if file not in FILES and file not in _EXTRAS:
                raise MalformedError("an agent of an agent is not given this file")
            _take(recipe, file, read_trusted(place, trusted))
        if not recipe.lines.get("exec"):
            place = recipe.directory / "exec"
            raise MalformedError("missing or empty: it names the program")
        for file, lines in recipe.lines.items():
            place = recipe.directory / file
            for line in lines:
                _check_words(recipe, line)
    except MalformedError as error:
        recipe.wrong = f"{place}: {error.sentence}"
    except OSError as error:
        recipe.wrong = f"{place}: {error.strerror or error}"
    return recipe


def _take(recipe: Recipe, file: str, text: str) -> None:
    if file == "README.md":
        recipe.description = text.partition("\n")[0].lstrip("# ")
        return
    lines = [
        line.strip()
        for line in text.split("\n")
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if file != "needs":
        recipe.lines[file] = lines
        return
    for line in lines:
        kind, *words = line.split()
        if kind == "program" and len(words) in (1, 2):
            recipe.programs[words[0]] = _program(words[0])
        elif kind == "key" and words:
            recipe.keys.append(words)
        elif kind == "network" and words:
            recipe.networks += words
        else:
            raise MalformedError(f"{quote(line)} is no need")


def _check_words(recipe: Recipe, line: str) -> None:
    for word in _WORD.findall(line):
        kind, _, program = word.partition(":")
        if kind == "cwd" and line != _AT_PARENTS:
            raise MalformedError("@cwd@ is known only where a person makes the agent")
        if kind == "program" and program not in recipe.programs:
            raise MalformedError(f'@{word}@: add "program {program}" to needs')
        if kind not in ("name", "label", "files", "network", "program", "cwd"):
            raise MalformedError(f"@{word}@ stands for nothing")


def _program(name: str) -> list[str]:
    """The words that execute a program of the machine: its file without links, and before it the
    interpreter that its first line has env(1) look for; none if it is not there."""
    path = shutil.which(name, path=_PATH)
    if path is None:
        return []
    path = os.path.realpath(path)
    with open(path, "rb") as file:
        first = os.fsdecode(file.readline(256))
    words = first[2:].split() if first.startswith("#!") else []
    if len(words) > 1 and os.path.basename(words[0]) == "env":
        sought = words[2:] if words[1] in ("-S", "--split-string", "-i") else words[1:]
        interpreter = shutil.which(sought[0], path=_PATH) if sought else None
        if interpreter is not None:
            return [os.path.realpath(interpreter), *sought[1:], path]
    return [path]


def _mounts(words: list[str]) -> list[str]:
    """The lines that show a program in a sandbox where it is here, with the modules that npm
    installed with it."""
    sources = [
        word.partition(_MODULES)[0] + _MODULES[:-1] if _MODULES in word else word
        for word in words
        if word.startswith("/") and not word.startswith(_SHOWN)
    ]
    return [f"{source}\t{source}\tro\t-" for source in dict.fromkeys(sources)]
