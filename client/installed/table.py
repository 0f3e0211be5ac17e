"""The tree of agents as a table that fills the screen, drawn line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from client.installed.feed import Sampler
from client.installed.model import Agent, Line, Usage, percent, size
from client.output import age, tokens

#: by the kind of an agent: the mark at the beginning of its line, and the style, of which NO_COLOR
#: leaves bold and dim
LOOKS = {
    "busy": ("●", Style(color="green", bold=True)),
    "starting": ("◐", Style(color="blue", bold=True)),
    "stopping": ("◑", Style(color="magenta", bold=True)),
    "paused": ("‖", Style(color="yellow", bold=True)),
    "error": ("✗", Style(color="red", bold=True)),
    "interrupted": ("✗", Style(color="red")),
    "done": ("✓", Style(dim=True)),
    "cancelled": ("■", Style(dim=True)),
    "new": ("·", Style(color="cyan")),
    "ready": ("○", Style(color="cyan")),
    "idle": ("○", Style(color="cyan")),
}
PLAIN = Style()
QUIET = Style(dim=True)
HEAD = CURSOR = Style(reverse=True)
UNKNOWN = "?", PLAIN
#: shares of the width that the texts get, and their least and largest widths
NAME_WIDTH, STATE_WIDTH = (24, 48), (13, 24)
WIDE = 110  # columns from which on there is room for PROCS, RUN and QUEUE


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, its width in cells, and what it says; numbers stand at the right."""

    title: str
    width: int
    text: Callable[[Line], str]
    right: bool = False
    sort: str = ""  # the name of the sorting that it shows


def fitted(text: str, width: int, right: bool) -> str:
    """Return a text in exactly so many cells, shortened with an ellipsis."""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, width)
    return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)


def drawn_name(line: Line) -> str:
    """Return branches, mark, name, and what is folded below."""
    fold = f" [+{line.hidden}]" if line.hidden else ""
    mark, _ = LOOKS.get(line.agent.kind, UNKNOWN)
    return f"{line.branches}{mark} {line.agent.name}{fold}"


class Headings(Widget):
    """The headings of the columns."""

    DEFAULT_CSS = "Headings { height: 1; }"

    def __init__(self, table: AgentTable) -> None:
        super().__init__()
        self.table = table

    def render_line(self, y: int) -> Strip:
        cells = []
        for column in self.table.columns(self.table.scrollable_content_region.width):
            mark = "▾" if column.sort == self.table.sort else ""
            cells.append(fitted(column.title + mark, column.width, column.right))
        return Strip([Segment(fitted(" ".join(cells), self.size.width, False), HEAD)])


class AgentTable(ScrollView, can_focus=True):
    """The lines of agents; one of them is under the cursor, and stays so when lines move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("pageup", "move_page(-1)"),
        Binding("pagedown", "move_page(1)"),
        Binding("home,g", "move(-1000000)"),
        Binding("end,G", "move(1000000)"),
    ]
    DEFAULT_CSS = "AgentTable { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }"

    cursor = reactive(0)

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler
        self.lines: Sequence[Line] = ()
        self.sort = ""

    def columns(self, width: int) -> list[Column]:
        """Return the columns that a width has room for."""
        wide = width >= WIDE
        name = max(NAME_WIDTH[0], min(NAME_WIDTH[1], width // 4))
        state = max(STATE_WIDTH[0], min(STATE_WIDTH[1], width // 8))
        columns = [
            Column("NAME", name, drawn_name, sort="name"),
            Column("STATE", state, lambda line: line.agent.state),
            self.used("CPU%", lambda used: percent(used.cpu), sort="cpu"),
            self.used("MEM", lambda used: size(used.memory), sort="memory"),
        ]
        if self.sampler.metered:
            columns += [
                self.used("TOKENS", lambda used: tokens(used.tokens or 0), sort="tokens", width=7),
                self.used("COST", lambda used: f"{used.cost or 0:.2f}", sort="cost", width=7),
            ]
        if wide:
            columns += [
                self.used("PROCS", lambda used: str(used.processes)),
                Column("RUN", 6, lambda line: line.agent.run or ""),
                Column("QUEUE", 5, lambda line: str(line.agent.queue or ""), right=True),
            ]
        if any(line.agent.node for line in self.lines):
            columns.append(Column("NODE", 10, lambda line: line.agent.node))
        columns.append(Column("SINCE", 6, self.since, right=True, sort="change"))
        left = width - sum(column.width + 1 for column in columns)
        columns.append(Column("LAST EVENT", max(1, left), self.event))
        return columns

    def used(
        self, title: str, text: Callable[[Usage], str], sort: str = "", width: int = 5
    ) -> Column:
        """Return a column with what living agents use."""

        def shown(line: Line) -> str:
            used = self.sampler.usage.get(line.agent.key) if line.agent.lives else None
            return text(used) if used else ""

        return Column(title, width, shown, right=True, sort=sort)

    def since(self, line: Line) -> str:
        return age(time.time() - line.agent.since)

    def event(self, line: Line) -> str:
        event = self.sampler.last.get(line.agent.key)
        return f"{age(time.time() - event.time):>3} {event.text}" if event else ""

    @property
    def current(self) -> Line | None:
        """The line under the cursor."""
        return self.lines[self.cursor] if self.cursor < len(self.lines) else None

    @property
    def visible_agents(self) -> list[Agent]:
        """The agents whose lines are on the screen."""
        first = int(self.scroll_offset.y)
        shown = self.lines[first : first + self.scrollable_content_region.height]
        return [line.agent for line in shown]

    def show(self, lines: Sequence[Line], sort: str) -> None:
        """Show lines; the cursor stays on its agent, else where it was on the screen."""
        current = self.current
        self.lines, self.sort = lines, sort
        self.virtual_size = Size(self.size.width, len(lines))
        places = {line.agent.key: place for place, line in enumerate(lines)}
        last = max(0, len(lines) - 1)
        place = places.get(current.agent.key) if current else None
        self.cursor = min(self.cursor, last) if place is None else place
        self.keep_in_sight()
        self.refresh()

    def action_move(self, by: int) -> None:
        """Move the cursor by some lines."""
        self.cursor = max(0, min(len(self.lines) - 1, self.cursor + by))
        self.keep_in_sight()
        self.refresh()

    def keep_in_sight(self) -> None:
        """Scroll until the line under the cursor is on the screen."""
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)

    def action_move_page(self, by: int) -> None:
        """Move the cursor by pages."""
        self.action_move(by * max(1, self.scrollable_content_region.height - 1))

    def on_click(self, event: Click) -> None:
        """Move the cursor to the line under the mouse."""
        self.action_move(event.y + int(self.scroll_offset.y) - self.cursor)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self.lines))
        self.call_after_refresh(self.keep_in_sight)

    def render_line(self, y: int) -> Strip:
        place = y + int(self.scroll_offset.y)
        width = self.scrollable_content_region.width
        if place >= len(self.lines):
            return Strip.blank(width)
        line = self.lines[place]
        at_cursor = place == self.cursor
        _, style = LOOKS.get(line.agent.kind, UNKNOWN)
        quiet = QUIET if line.agent.status == "dead" else PLAIN
        segments = []
        for column in self.columns(width):
            text = fitted(column.text(line), column.width, column.right)
            of = style if column.title in ("NAME", "STATE") else quiet
            if column.title == "NAME" and line.branches:
                branches = len(line.branches)
                segments.append(Segment(text[:branches], CURSOR if at_cursor else QUIET))
                text = text[branches:]
            segments.append(Segment(text + " ", CURSOR if at_cursor else of))
        return Strip(segments).adjust_cell_length(width, CURSOR if at_cursor else PLAIN)
