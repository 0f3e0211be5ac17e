"""The examples of pages: what is typed at a shell there, and what it says, done as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from client.help import unescape
from tests.worlds.daemon import TIMEOUT, Daemon
from tests.worlds.ordinary import OrdinaryDaemon
from tests.worlds.readiness import readable

CHECKOUT: Final = Path(__file__).parents[2]
MAN: Final = CHECKOUT / "man"
_INSTALLED: Final = {
    "/usr/share/doc/ctxfs/examples": str(CHECKOUT / "contrib" / "examples"),
}
#: what only looks: it is typed again until the agents have got where the page sees them
_LOOKS: Final = re.compile(
    r"(cat|ls|ctx (get|log|now|ps|result|status|timeline|tree|work show))\b[^;&<>]*"
)
_SHELL: Final = """
while IFS= read -r -d '' command <&3; do
    eval "$command" 3<&-
    printf '\\0'
done
"""
#: what is another one each time: points in time, and ages in tables
_TIME: Final = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?"
_TIMES: Final = ((_TIME, _TIME), (r"(?<= )\d+s$", r"(\d+m)?\d+s"))


class Step(NamedTuple):
    """A command, and what it says."""

    command: str
    says: str


def mdoc_blocks(page: str, section: str = "") -> list[str]:
    """The literal texts of a man page, or of a section of it."""
    text = (MAN / page).read_text()
    if section:
        text = text.partition(f".Sh {section}\n")[2].partition("\n.Sh ")[0]
    assert text, f"{page} has no section {section}"
    return [unescape(block) for block in re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", text,
                                                    re.M | re.S)]


def markdown_blocks(page: Path, section: str) -> list[str]:
    """The indented texts of a section of a page, as they are without the indentation."""
    text = re.split(r"^## ", page.read_text(), flags=re.M)
    found = [part.partition("\n")[2] for part in text if part.startswith(f"{section}\n")]
    assert found, f"{page} has no section {section}"
    lines = re.sub(r"^(?!    |$).*", "\0", found[0], flags=re.M)
    blocks = (re.sub(r"^    ", "", block, flags=re.M) for block in re.split(r"\0\n?", lines))
    return [f"{block.strip()}\n" for block in blocks if block.strip()]


def _complete(command: str) -> bool:
    """Whether a shell would not wait for more of it."""
    said = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    return said.returncode == 0 and not said.stderr


def steps_of(blocks: Sequence[str]) -> list[Step]:
    """What is typed in some texts: after each prompt a command, which may have more lines."""
    found = []
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, says = part.partition("\n")
            while not _complete(command):
                assert says, f"a command without an end: {command}"
                more, _, says = says.partition("\n")
                command += f"\n{more}"
            found.append(Step(command, says))
    return found


def fits(said: str, says: str, other: Mapping[str, str]) -> bool:
    """Whether a command said what a page says.

    Three dots stand for anything, spaces in a table for any number of them. ``other`` has what is
    another one each time, with a regular expression for it.
    """
    says = re.sub(r" +$", "", says, flags=re.M)
    known = [(re.escape(text), pattern) for text, pattern in other.items()]
    kinds = [*known, *_TIMES, (r"\.\.\.", r"(.|\n)*?"), (r" +(?=\S)", " +")]
    splits = re.compile("|".join(f"(?P<k{n}>{text})" for n, (text, _) in enumerate(kinds)), re.M)
    pattern, end = "", 0
    for match in splits.finditer(says):
        kind = match.lastgroup
        assert kind is not None
        pattern += re.escape(says[end : match.start()]) + kinds[int(kind[1:])][1]
        end = match.end()
    return bool(re.fullmatch(pattern + re.escape(says[end:]), re.sub(r" +$", "", said, flags=re.M)))


class Shell:
    """A shell in which one command is typed after the other, without a terminal."""

    def __init__(
        self, process: subprocess.Popen[bytes], commands: int, places: Mapping[str, str]
    ) -> None:
        self._process, self._commands = process, commands
        self._places = {rf"(?<!\w){re.escape(path)}(?!\.?\w)": to for path, to in places.items()}

    def here(self, text: str) -> str:
        """A text of a page with the paths that its places have here."""
        for path, to in self._places.items():
            text = re.sub(path, lambda _, to=to: to, text)  # type: ignore[misc]
        return text

    def say(self, command: str) -> str:
        """What a command says, errors too."""
        assert self._process.stdout is not None
        os.write(self._commands, command.encode() + b"\0")
        said, ends = b"", time.monotonic() + TIMEOUT
        while not said.endswith(b"\0"):
            left = max(ends - time.monotonic(), 0)
            ready = readable([self._process.stdout.fileno()], left)
            assert ready, f"{command}\ndoes not end; it has said:\n{said.decode()}"
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            assert more, f"{command}\nhas ended the shell, and said:\n{said.decode()}"
            said += more
        # a shell at a terminal does not number its lines
        return re.sub(r"^bash: line \d+: ", "bash: ", said[:-1].decode(), flags=re.M)

    def walk(
        self,
        steps: Sequence[Step],
        other: Mapping[str, str] | None = None,
        *,
        patient: bool = True,
    ) -> None:
        """Types all commands of a page; fails where one says something else. Without being
        ``patient``, it types each once, as one who pastes the page."""
        for step in steps:
            command, says = self.here(step.command), self.here(step.says)
            said, ends = self.say(command), time.monotonic() + TIMEOUT
            while not (right := fits(said, says, other or {})):
                if not patient or not _LOOKS.fullmatch(step.command) or time.monotonic() > ends:
                    break
                said = self.say(command)
            assert right, f"$ {command}\nsays:\n{said}\nand on the page:\n{says}"


@contextmanager
def reader(
    daemon: Daemon, places: Mapping[str, str] | None = None, **env: str
) -> Iterator[Shell]:
    """A reader of pages who types what is there, in an empty home directory of its own.

    The tree of this daemon stands for ``/ctx``, the checkout for what the package installs, and
    ``places`` for others. The daemon of an ordinary user has that user as its reader.
    """
    home = daemon.home if isinstance(daemon, OrdinaryDaemon) else daemon.base / "home"
    home.mkdir(exist_ok=True)
    before = daemon.run_as_user() if isinstance(daemon, OrdinaryDaemon) else []
    given = {"LANG": "C.UTF-8", "HOME": str(home), **daemon.env, **env,
             "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if not isinstance(daemon, OrdinaryDaemon):
        given["CTX_ROOT"] = str(daemon.root)
    reads, commands = os.pipe()
    process = subprocess.Popen(
        [*before, "bash", "-c", f"exec 3<&{reads} {reads}<&-; {_SHELL}", "bash"],
        cwd=daemon.base, env=given, pass_fds=[reads],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(reads)
    try:
        there = {"/ctx": str(daemon.root), **_INSTALLED, **(places or {})}
        opened = Shell(process, commands, there)
        opened.say(f"cd {home}")
        yield opened
    finally:
        os.close(commands)
        assert process.stdout is not None
        process.stdout.close()
        process.wait(TIMEOUT)
