"""A terminal of a test's own: tmux runs a program in it, and tells what is on its screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from tests.worlds.daemon import MARK, wait_until

#: what a program may change of a terminal
STATE = "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{keypad_cursor_flag} #{insert_flag}"


class Terminal:
    """A shell in a terminal of some columns and lines."""

    def __init__(
        self, columns: int, lines: int, environment: Mapping[str, str], shell: Sequence[str]
    ) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp")
        self.socket = f"{self.directory.name}/tmux"
        size = ("-x", str(columns), "-y", str(lines))
        kept = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PS1": "$ ", "HOME": "/nonexistent"}
        command = ["env", "-i", *(f"{key}={text}" for key, text in {
            **kept, "TERM": "screen-256color", **environment}.items()), *shell]
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, *command)

    def tmux(self, *words: str) -> str:
        """What a command of tmux says."""
        result = subprocess.run(["tmux", "-S", self.socket, *words], text=True, check=False,
                                capture_output=True, env={**os.environ, "LANG": "C.UTF-8"})
        assert result.returncode == 0, (words, result.stderr)
        return result.stdout

    def screen(self, *options: str) -> str:
        """What is on the screen; with ``-e``, with the sequences that colour it."""
        return self.tmux("capture-pane", "-p", *options)

    def type(self, *keys: str) -> None:
        """Presses keys, by tmux's names of them; other words are typed."""
        self.tmux("send-keys", *keys)

    def run(self, command: str) -> None:
        """Has the shell run a command."""
        self.tmux("send-keys", "-l", command)
        self.tmux("send-keys", "Enter")

    def resize(self, columns: int, lines: int) -> None:
        self.tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def state(self) -> str:
        """What programs have changed of the terminal."""
        return self.tmux("display-message", "-p", STATE).strip()

    def tty(self) -> str:
        """The settings of the line, as stty(1) has them."""
        path = self.tmux("display-message", "-p", "#{pane_tty}").strip()
        return subprocess.check_output(["stty", "-g", "-F", path], text=True)

    def wait_for(self, *texts: str) -> str:
        """Waits until all texts are on the screen, and returns what is on it."""
        return self.wait(lambda screen: all(text in screen for text in texts), f"{texts}")

    def wait_gone(self, text: str) -> str:
        """Waits until a text is not on the screen any more."""
        return self.wait(lambda screen: text not in screen, f"no {text!r}")

    def wait(self, condition: Callable[[str], object], what: str) -> str:
        screen = ""

        def fits() -> object:
            nonlocal screen
            screen = self.screen()
            return condition(screen)

        try:
            wait_until(fits, f"the screen has {what}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it has:\n{screen}") from None
        return screen

    def close(self) -> None:
        server = int(self.tmux("display-message", "-p", "#{pid}"))
        self.tmux("kill-server")
        wait_until(lambda: not os.path.exists(f"/proc/{server}"), "tmux has ended")
        self.directory.cleanup()


@contextmanager
def terminal(
    columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None,
    shell: Sequence[str] = ("sh",),
) -> Iterator[Terminal]:
    """A terminal; without tmux the test is skipped, aloud."""
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux: apt-get install tmux")
    opened = Terminal(columns, lines, environment or {}, shell)
    try:
        opened.wait_for("$")
        yield opened
    finally:
        opened.close()


def lines_with(screen: str, texts: Sequence[str]) -> list[str]:
    """The lines of a screen that have one of the texts."""
    return [line for line in screen.splitlines() if any(text in line for text in texts)]
