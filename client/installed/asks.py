"""The questions of agents, one after the other, as a screen of `ctx top`, and their answers."""

from __future__ import annotations

import asyncio
import shlex
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Input, Static

from client.asks import Ask, answer_text, described, open_asks, path_of, send_answer
from client.exits import Failure
from client.output import escape
from client.root import Root

TICK = 1.0  # seconds between two looks at what is asked


def key_of(row: Ask) -> tuple[str, str]:
    """Return what tells an ask from others of its name."""
    return path_of(row), row["asked_at"]


class AskScreen(Screen[None]):
    """The open questions, until Esc; Enter sends the answer to the one that is shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "back", priority=True),
        Binding("tab,down", "next(1)", "next", priority=True),
        Binding("shift+tab,up", "next(-1)", "previous", priority=True),
    ]
    DEFAULT_CSS = """
    AskScreen Static { width: 100%; }
    AskScreen .title { height: 1; text-style: reverse; }
    AskScreen VerticalScroll { height: 1fr; }
    AskScreen Input, AskScreen Input:focus {
        border: none; height: 1; padding: 0; background: ansi_default;
    }
    AskScreen .told { height: 1; text-style: bold; }
    """

    def __init__(self, root: Root, first: str) -> None:
        super().__init__()
        self.root = root
        self.first = first
        self.rows: list[Ask] = []
        self.shown: Ask | None = None

    def compose(self) -> ComposeResult:
        yield Static("", classes="title")
        with VerticalScroll():
            yield Static("", classes="text")
        yield Static("", classes="told")
        yield Input(placeholder="your answer: a word or a text; of a form FIELD=VALUE ...")

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self.run_worker(self.look(), exclusive=True)

    async def look(self) -> None:
        """Look at what is asked, again and again."""
        while True:
            await self.read()
            await asyncio.sleep(TICK)

    async def read(self) -> None:
        """Look at what is asked; what is shown stays as long as it is open."""
        try:
            self.rows = await asyncio.to_thread(open_asks, self.root)
        except (Failure, OSError, ValueError) as failure:
            self.tell(str(failure))
            return
        keys = [key_of(row) for row in self.rows]
        if self.shown is None or key_of(self.shown) not in keys:
            of_first = [row for row in self.rows if row["agent"] == self.first]
            self.show(next(iter(of_first or self.rows), None))
        self.head()

    def show(self, row: Ask | None) -> None:
        """Show a question, or that there is none; what was typed was for another one."""
        self.shown = row
        lines = described(row) if row is not None else ["(nothing is asked)"]
        self.query_one(".text", Static).update(Text("\n".join(map(escape, lines))))
        self.query_one(Input).value = ""
        self.head()

    def head(self) -> None:
        """Tell which one of how many is shown."""
        keys = [key_of(row) for row in self.rows]
        at = keys.index(key_of(self.shown)) + 1 if self.shown and key_of(self.shown) in keys else 0
        told = f"question {at} of {len(keys)}   (Tab: next  Enter: answer  Esc: back)"
        self.query_one(".title", Static).update(Text(told))

    def tell(self, text: str) -> None:
        """Tell what came of an answer."""
        self.query_one(".told", Static).update(Text(escape(text)))

    def action_next(self, by: int) -> None:
        """Show the next question."""
        keys = [key_of(row) for row in self.rows]
        if self.shown is not None and key_of(self.shown) in keys:
            self.show(self.rows[(keys.index(key_of(self.shown)) + by) % len(keys)])

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()  # it is no part of a name, which the table would look for

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        row, typed = self.shown, event.value.strip()
        if row is None or not typed:
            return

        async def send() -> None:
            try:
                words = shlex.split(typed) if row["form"] else [typed]
                text = answer_text(row["form"], words)
                await asyncio.to_thread(send_answer, self.root, row, text)
                self.tell(f"answered {path_of(row)}: {typed}")
                self.shown = None
            except (Failure, OSError, ValueError) as failure:
                self.tell(str(failure))
            await self.read()

        self.run_worker(send())
