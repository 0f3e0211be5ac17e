"""`ctx top`: all agents on the whole screen, and keys for what one does with them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.actions import SkipAction
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.screen import Screen
from textual.widgets import Input, Static

from client.control import control
from client.exits import OK, Failure
from client.installed.asks import AskScreen
from client.installed.feed import Lister, Sampler
from client.installed.model import BY_USE, ENDED, Agent, Snapshot, View, lines
from client.installed.table import AgentTable, Headings
from client.output import decode, escape
from client.root import Root, agent
from client.terminal import attach

NOTICE = 8.0  # seconds for which a notice stays
FRAME = 0.5  # seconds after which ages are drawn anew
TEXT_TICK = 0.5  # seconds between two looks at a text that grows
TEXT_MAX = 64 << 10  # bytes of the end of a text that are shown
LINES_MAX = 2000  # and lines, each of which takes a quarter of a millisecond
HELP = """\
Up Down, j k         the line above, below; PgUp PgDn Home End
Space, Left, Right   fold and unfold what is below the agent
F                    fold everything, or unfold it
s                    sort siblings by name, cpu, memory, tokens, cost, last change
d                    hide the dead agents, or show them
/                    find agents by a part of their names; Esc ends it
r                    the result of the agent
l                    its output: log, then out; follows what comes
t                    be at its terminal; Ctrl-] d comes back
p                    pause it and all that it owns
c                    resume it ("continue")
a                    what agents ask, and your answers
x                    stop it, or kill it; asks first
q, Ctrl-C            quit

STATE is the status of an agent, and of a dead one why it ended.
CPU% (of one processor), MEM and PROCS are of the agent and all that it owns.
TOKENS (in and out) and COST are what models say that it and all below it used,
where a meter counts it: ctxfs-meter(8).
NODE is there if an agent runs at another machine, and SINCE is the time since the status
changed last.
● busy  ◐ starting  ◑ stopping  ‖ paused  ○ idle or ready  · new
✓ done  ✗ error or interrupted  ■ cancelled
"""


class TextScreen(Screen[None]):
    """A text that fills the screen, until Esc or q; one of files follows their growth."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "back"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    DEFAULT_CSS = """
    TextScreen Static { width: 100%; }
    TextScreen .title { height: 1; text-style: reverse; }
    TextScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    """

    def __init__(self, title: str, read: Callable[[], str], follows: bool = False) -> None:
        super().__init__()
        self.heading = title
        self.read = read
        self.follows = follows
        self.shown: str | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self.heading}   (Esc: back)"), classes="title")
        with VerticalScroll():
            yield Static("", classes="text")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.run_worker(self.follow(), exclusive=True)

    async def follow(self) -> None:
        """Show the text, and again when it has changed; stay at its end if that was in sight."""
        while True:
            text = await asyncio.to_thread(self.read)
            if text != self.shown:
                scroll = self.query_one(VerticalScroll)
                at_end = self.shown is None or scroll.max_scroll_y - scroll.scroll_y < 1
                self.shown = text
                self.query_one(".text", Static).update(Text(text or "(nothing yet)"))
                if at_end and self.follows:
                    self.call_after_refresh(scroll.scroll_end, animate=False)
            if not self.follows:
                return
            await asyncio.sleep(TEXT_TICK)

    def action_scroll(self, by: int) -> None:
        """Scroll by some lines."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


class Question(Static, can_focus=True):
    """A question about an agent, answered by one key; any other key leaves the agent alone."""

    DEFAULT_CSS = "Question { height: auto; width: 100%; display: none; text-style: reverse bold; }"

    def ask(self, text: str, answers: dict[str, Callable[[], object]]) -> None:
        """Show a question, with what each key does."""
        self.answers = answers
        self.update(Text(text))
        self.display = True
        self.screen.set_focus(self)  # at once: the next key may be on its way

    def on_key(self, event: Key) -> None:
        event.stop()
        event.prevent_default()
        self.display = False
        self.screen.set_focus(self.screen.query_one(AgentTable))
        self.answers.get(event.key, lambda: None)()


class Top(App[int]):
    """The screen of `ctx top`."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #summary, #keys, #notice, #away {
        height: 1; width: 100%; text-wrap: nowrap; text-overflow: ellipsis;
    }
    #away { text-style: reverse bold; color: ansi_red; display: none; }
    #notice { display: none; text-style: bold; }
    #find { display: none; border: none; height: 1; padding: 0; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "quit", priority=True, show=False),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("left", "fold('in')", show=False),
        Binding("right", "fold('out')", show=False),
        Binding("F", "fold_all", show=False),
        Binding("d", "dead", show=False),
        Binding("escape", "find_all", show=False),
        Binding("s", "sort", show=False),
        Binding("space", "fold('turn')", show=False),
        # those that the last line tells of, which has room for no more
        # with priority, as the keys that follow at once are for what it opens
        Binding("slash", "find", "find", key_display="/", priority=True),
        Binding("r", "result", "result"),
        Binding("l,enter", "log", "log", key_display="l"),
        Binding("t", "terminal", "terminal"),
        Binding("p", "verb('pause')", "pause"),
        Binding("c", "verb('resume')", "resume"),
        Binding("a", "asks", "asks", priority=True),
        Binding("x", "stop", "stop", priority=True),
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, root: Root) -> None:
        super().__init__(ansi_color=True)
        self.root = root
        self.snapshot = Snapshot()
        self.view = View()
        self.away_since: float | None = None
        self.away_why = ""
        self.noticed = 0.0
        self.sampler = Sampler(root, lambda: self.soon(self.learnt))
        self.lister = Lister(
            root,
            lambda found: self.soon(lambda: self.found(found)),
            lambda why: self.soon(lambda: self.away(why)),
        )
        self.table = AgentTable(self.sampler)

    def compose(self) -> ComposeResult:
        yield Static("", id="summary")
        yield Static("", id="away")
        yield Headings(self.table)
        yield self.table
        yield Static("", id="notice")
        yield Question()
        yield Input(placeholder="part of a name", id="find")
        yield Static(self.keys(), id="keys")

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit, 128 + number)
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh())
        self.table.focus()
        self.set_interval(FRAME, self.tick)
        self.draw()
        self.lister.start()
        self.sampler.start()

    def on_unmount(self) -> None:
        self.lister.ended.set()
        self.sampler.ended.set()

    def soon(self, action: Callable[[], object]) -> None:
        """Do something in the thread of the screen, for another thread that does not wait."""
        if self.is_running and self._loop is not None:
            self._loop.call_soon_threadsafe(action)

    @staticmethod
    def keys() -> Text:
        """Return what the keys do, short enough for 80 columns."""
        shown = [each for each in Top.BINDINGS if isinstance(each, Binding) and each.show]
        return Text(" ").join(
            Text.assemble((each.key_display or each.key, "reverse"), f" {each.description}")
            for each in shown
        )

    # what the threads found

    def found(self, snapshot: Snapshot) -> None:
        """Show the agents as they are now."""
        self.snapshot = snapshot
        self.away_since = None
        self.draw()

    def learnt(self) -> None:
        """Show what the agents on the screen use and did; they may have another order now."""
        if self.view.sort in BY_USE:
            self.draw()
        else:
            self.table.refresh()
            self.query_one(Headings).refresh()

    def away(self, why: str) -> None:
        """Say that there is no ctxd; what was found before stays."""
        self.away_since, self.away_why = time.time(), why
        self.draw()

    def tick(self) -> None:
        """Draw what changes with time."""
        if self.noticed and time.monotonic() - self.noticed > NOTICE:
            self.notice("")
        if self.away_since is None and (self.lister.silent or self.sampler.silent):
            self.warn(f"ctxd at {self.root.path} does not answer; this is what was known before")
        elif self.away_since is None:
            self.warn("")
        self.summarize()
        self.look()
        self.table.refresh()

    def draw(self) -> None:
        """Draw everything."""
        self.table.show(lines(self.snapshot, self.view, self.sampler.usage), self.view.sort)
        self.query_one(Headings).refresh()
        if self.away_since is not None:
            when = time.strftime("%H:%M:%S", time.localtime(self.away_since))
            self.warn(f"no ctxd since {when}, waiting for it: {self.away_why}")
        self.summarize()
        self.look()

    def look(self) -> None:
        """Say which agents are on the screen."""
        sorted_by_use = self.view.sort in BY_USE
        others = list(self.snapshot.agents.values()) if sorted_by_use else []
        self.sampler.look_at(self.table.visible_agents, others, self.snapshot)

    def summarize(self) -> None:
        """Tell of all agents in the first line."""
        counts = self.snapshot.counts()
        told = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        asked = sum(each.asks for each in self.snapshot.agents.values())
        number = len(self.snapshot.agents)
        text = self.root.path
        if self.view.without_dead:
            text += "  (dead ones hidden)"
        if self.view.find:
            text += f"  (found: {self.view.find})"
        text += f"  {number} agent{'s' * (number != 1)}{': ' if told else ''}{told}"
        text += f"  ({asked} question{'s' * (asked != 1)}: a)" if asked else ""
        clock = time.strftime("%H:%M:%S")
        room = self.size.width - len(clock) - 1
        text = f"{text[: room - 1]}…" if len(text) > room else text.ljust(room)
        self.query_one("#summary", Static).update(Text(f"{escape(text)} {clock}", style="bold"))

    def warn(self, text: str) -> None:
        """Show a line about ctxd, or none."""
        self.show_line("#away", text)

    def notice(self, text: str) -> None:
        """Show a line about what was just asked, for a while."""
        self.noticed = time.monotonic() if text else 0.0
        self.show_line("#notice", text)

    def show_line(self, name: str, text: str) -> None:
        """Show a text in a line of its own, or hide the line."""
        line = self.query_one(name, Static)
        line.display = bool(text)
        line.update(Text(escape(text)))

    # keys

    @property
    def selected(self) -> Agent:
        """The agent under the cursor, for which the keys are; without one they do nothing."""
        if self.table.current is None:
            raise SkipAction
        return self.table.current.agent

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key is for the table: elsewhere the same one may be a letter of a text."""
        return action not in ("find", "stop", "asks") or self.focused is self.table

    def action_fold(self, how: str) -> None:
        """Fold or unfold what is below the agent; of one that has nothing below it, go to its
        parent."""
        line = self.table.current
        if line is None:
            return
        key, folded = line.agent.key, self.view.folded
        if how == "out" or (how == "turn" and key in folded):
            folded.discard(key)
        elif line.children and key not in folded:
            folded.add(key)
        elif how == "in":
            above = [each.agent.name for each in self.table.lines[: self.table.cursor]]
            for name in reversed(above):
                if line.agent.name in self.snapshot.below.get(name, ()):
                    self.table.action_move(above.index(name) - self.table.cursor)
                    break
        self.draw()

    def action_fold_all(self) -> None:
        """Fold everything, or unfold it if something is folded."""
        if self.view.folded:
            self.view.folded.clear()
        else:
            owners = (self.snapshot.agents[name] for name in self.snapshot.below)
            self.view.folded.update(owner.key for owner in owners)
        self.draw()

    def action_sort(self) -> None:
        """Sort by the next value."""
        self.view.next_sort(self.sampler.metered)
        self.table.cursor = 0
        self.table.lines = ()
        self.notice(f"sorted by {self.view.sort}")
        self.draw()

    def action_dead(self) -> None:
        """Hide the dead agents, or show them."""
        self.view.without_dead = not self.view.without_dead
        self.draw()

    def action_find(self) -> None:
        """Ask for a part of a name."""
        field = self.query_one(Input)
        field.display = True
        self.screen.set_focus(field)

    def action_find_all(self) -> None:
        """Show all names again."""
        self.query_one(Input).value = ""
        self.close_find()

    def close_find(self) -> None:
        """Give the keys back to the table."""
        self.query_one(Input).display = False
        self.screen.set_focus(self.table)

    def on_input_changed(self, event: Input.Changed) -> None:
        self.view.find = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        self.close_find()

    def action_help(self) -> None:
        """Explain keys and columns."""
        self.push_screen(TextScreen("ctx top", lambda: HELP))

    def action_result(self) -> None:
        """Show the result of the agent."""
        name = self.selected.name
        self.push_screen(TextScreen(f"result.md of {name}", lambda: self.end_of(name, "result.md")))

    def action_log(self) -> None:
        """Show what the agent writes."""
        name = self.selected.name

        def read() -> str:
            parts = ((file, self.end_of(name, file)) for file in ("log", "out"))
            return "\n".join(f"==> {file} <==\n{text}" for file, text in parts if text)

        self.push_screen(TextScreen(f"log and out of {name}", read, follows=True))

    def action_asks(self) -> None:
        """Show what agents ask, that of the selected agent first."""
        first = self.table.current.agent.name if self.table.current is not None else ""
        self.push_screen(AskScreen(self.root, first))

    def action_terminal(self) -> None:
        """Be at the terminal of the agent, in place of the screen."""
        name = self.selected.name
        if not self.root.field(name, "tty"):
            self.notice(f"{name} has no terminal; a shell where it is: ctx enter {name}")
            return
        with self.suspend():
            try:
                attach(self.root, agent(name), look=False, raw=False, leave=None)
            except (Failure, OSError) as failure:
                self.notice(str(failure))

    def end_of(self, name: str, file: str) -> str:
        """Return the last part of a file of an agent, or why it cannot be had."""
        try:
            begin, data = self.root.end_of(agent(name, file), TEXT_MAX)
        except (Failure, OSError) as failure:
            return f"({escape(str(failure))})"
        before, *lines = data.rsplit(b"\n", LINES_MAX)
        if len(lines) == LINES_MAX:
            begin, data = begin + len(before) + 1, b"\n".join(lines)
        left = f"({begin} bytes before this are left out)\n" if begin else ""
        return left + escape(decode(data), keep="\n\t")

    def action_verb(self, verb: str) -> None:
        """Say a verb to the agent."""
        self.say(self.selected, verb)

    def action_stop(self) -> None:
        """Stop or kill the agent, after a question."""
        of = self.selected
        if of.status == ENDED:
            self.notice(f"{of.name} is dead")
            return
        below = [self.snapshot.agents[name] for name in self.snapshot.descendants(of.name)]
        number = sum(each.status != ENDED for each in below)
        family = f" and the {number} agent{'s' * (number != 1)} below it" if number else ""
        self.query_one(Question).ask(
            f"Stop {of.name}{family}?  y: stop  K: kill at once  any other key: no",
            {"y": lambda: self.say(of, "stop"), "K": lambda: self.say(of, "kill")},
        )

    def say(self, of: Agent, verb: str) -> None:
        """Write a verb in a thread of its own, and tell what came of it.

        Between the key and the writing the name may have got another agent, for which the verb
        was not meant.
        """

        def write() -> None:
            try:
                control(self.root, agent(of.name), verb)
                told = f"{verb} {of.name}"
            except (Failure, OSError) as failure:
                told = str(failure)
            self.soon(lambda: self.notice(told))

        present = self.snapshot.agents.get(of.name)
        if present is None or present.key != of.key:
            self.notice(f"{of.name} is not there any more")
            return
        self.run_worker(asyncio.to_thread(write))


def run(root: Root) -> int:
    """Show the screen until the user quits, and return the exit status."""
    if not os.environ.get("NO_COLOR"):  # an empty one means nothing, other than for textual
        os.environ.pop("NO_COLOR", None)
    return Top(root).run() or OK
