"""The rows: what is timed, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from bench.clients import FEW as CALM
from bench.clients import mcp_sides, ps_sides, spawn_sides
from bench.durable import agent_clone_pairs, agent_sides, clone_pairs, create_sides
from bench.files import LISTED, commit_sides, list_sides, new, public, read_sides, stat_sides
from bench.links import LINKS, measure_links
from bench.lives import (
    CROWD,
    child_sides,
    crowd_sides,
    run_sides,
    supervised,
    task_sides,
    turn_sides,
)
from bench.many import FEW, MANY, measure_many
from bench.measure import Ratio, compare, compare_episodes
from bench.metering import measure_meter, start_sides, usage_sides
from bench.people import (
    ask_sides,
    flood_sides,
    follow_sides,
    inbox_sides,
    keystroke_sides,
    measure_close,
    terminal_sides,
)
from bench.placed import LISTED as PLACED_LISTED
from bench.placed import MANY as PLACED
from bench.placed import life_sides, measure_out, measure_stop, measure_tree
from bench.placed import ps_sides as ps_placed
from bench.placed import read_sides as read_placed
from bench.setting import MakeSides, Setting
from bench.sizes import size_pairs
from bench.trees import LARGE, SMALL, measure_end, measure_end_large, measure_idle
from bench.web import measure_web

#: agents in the row ``supervised-300``
SUPERVISED: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison, or several of what is timed together."""

    name: str
    doc: str
    #: of the row's name, where things are, and the number of rounds
    measure: Callable[[str, Setting, int], list[Ratio]]
    #: part of the rounds that it gets, for rows whose single call is long
    share: float = 1.0


def _in_batches(sides: MakeSides, times: int = 1) -> Callable[[str, Setting, int], list[Ratio]]:
    """``sides`` makes the subject and its references, and puts on the stack what undoes them. What
    differs by less than a round does from the next takes so many ``times`` the rounds."""

    def measure(row: str, setting: Setting, rounds: int) -> list[Ratio]:
        with ExitStack() as stack:
            subject, references = sides(setting, stack)
            return compare(row, subject, references, times * rounds)

    return measure


def _measure_clone(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with ExitStack() as stack:
        return compare_episodes(clone_pairs(row, setting, stack), rounds)


def _measure_agent_clone(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with ExitStack() as stack:
        return compare_episodes(agent_clone_pairs(row, setting, stack), rounds)


def _measure_sizes(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    return compare_episodes(size_pairs(setting), rounds)


ROWS: Final = (
    Row(
        name="stat",
        doc="stat(2) of an agent's status, names and attributes cached, against the same path "
        "on tmpfs and in the minimal filesystem",
        measure=_in_batches(stat_sides(public)),
    ),
    Row(
        name="stat-new",
        doc="the same of an agent that was not started: its names are looked up for each caller",
        measure=_in_batches(stat_sides(new)),
    ),
    Row(
        name="read-control",
        doc="open, read, close of exec, whose pages ctxfs lets the kernel keep and the minimal "
        "filesystem does not, against the same on tmpfs and there",
        measure=_in_batches(read_sides("exec")),
    ),
    Row(
        name="read-status",
        doc="the same of status, which can be polled and is therefore rendered at every read",
        measure=_in_batches(read_sides("status")),
    ),
    Row(
        name="read-new",
        doc="the same of an agent that was not started: its name is looked up at every read",
        measure=_in_batches(read_sides("status", new)),
    ),
    Row(
        name="commit",
        doc="open to replace, write, close of meta.json, which ctxfs commits durably, against a "
        "file on tmpfs, a file in the minimal filesystem's memory, and a file on tmpfs plus a "
        "commit to a SQLite database (WAL, synchronous=NORMAL) beside the daemon's",
        measure=_in_batches(commit_sides),
    ),
    Row(
        name="run",
        doc="mkdir, exec=true, start, wait, rmdir of an agent, against bubblewrap with the same "
        "namespaces, view and ids run to its end",
        measure=_in_batches(run_sides),
    ),
    Row(
        name="spawn",
        doc="ctx spawn --wait --rm of true, against the same by files, as in run, and against "
        "podman run --rm, without network and cgroups, where it is installed",
        measure=_in_batches(spawn_sides),
    ),
    Row(
        name="ps",
        doc=f"ctx ps of {CALM} agents, against the start of Python",
        measure=_in_batches(ps_sides),
    ),
    Row(
        name="mcp",
        doc="ctx mcp until its first answer, against Python until its first line",
        measure=_in_batches(mcp_sides),
    ),
    Row(
        name="child",
        doc="the same of a child in its parent's cell, against nsenter and bubblewrap in there",
        measure=_in_batches(child_sides),
    ),
    Row(
        name="turn",
        doc="a message to a turn agent and its reply, a run of true, against true run by nsenter "
        "in the same cell, and against bubblewrap with a new one",
        measure=_in_batches(turn_sides),
    ),
    Row(
        name="task",
        doc="mkdir, cmd=true, start, wait, rmdir of a task, against true run by nsenter in there",
        measure=_in_batches(task_sides),
    ),
    Row(
        name="crowd",
        doc=f"{CROWD} agents made, started, waited for and removed together, against as many "
        "bubblewraps started and waited for together, and started by xargs, one per processor",
        measure=_in_batches(crowd_sides),
        share=0.2,
    ),
    Row(
        name="supervised",
        doc="the same as run, against true in a container of crun with the view of an agent, and "
        "against true that s6-supervise sees through, where they are installed",
        measure=_in_batches(supervised(1)),
    ),
    Row(
        name=f"supervised-{SUPERVISED}",
        doc=f"{SUPERVISED} agents made, started, waited for and removed together, against as "
        "many of these at once",
        measure=_in_batches(supervised(SUPERVISED)),
        share=0.2,
    ),
    Row(
        name="list",
        doc=f"listing agent/ with {LISTED} agents, three names each, against as many files in a "
        "directory on tmpfs and in the minimal filesystem",
        measure=_in_batches(list_sides),
    ),
    Row(
        name="end",
        doc=f"end-gone, end-recorded: SIGKILL to the program of an agent with {SMALL} children, "
        "until the last process is gone and until every end is recorded, against one write to "
        "cgroup.kill above such a tree, the daemon stopped, until the last process is gone; "
        f"end-gone also against cgroup.kill of {SMALL} plain processes in {SMALL} cgroups",
        measure=measure_end,
        share=0.34,
    ),
    Row(
        name="end-large",
        doc=f"the same with {LARGE} children; and ...-growth: the time for one of {LARGE} children "
        f"against that for one of {SMALL}, and the same of cgroup.kill",
        measure=measure_end_large,
        share=0.2,
    ),
    Row(
        name="idle",
        doc=f"CPU time of the daemon, its helpers, and all agents, with no agent and with {LARGE} "
        "that do nothing, against one CPU",
        measure=measure_idle,
        share=0.2,
    ),
    Row(
        name="many",
        doc=f"life-{MANY}: mkdir, exec=true, start, wait, rmdir of an agent among {MANY} agents, "
        f"against the same among {FEW} in another daemon; ps-{MANY}: ctx ps there, against Python "
        "that prints one file of as many bytes",
        measure=measure_many,
        share=0.2,
    ),
    Row(
        name="keystroke",
        doc="a byte that is typed at an agent's terminal, until its program has said it again, "
        "against the same at a pair of the kernel's",
        measure=_in_batches(keystroke_sides),
    ),
    Row(
        name="flood",
        doc="100 MB that a program at a terminal shows to one viewer, against the same",
        measure=_in_batches(flood_sides),
        share=0.2,
    ),
    Row(
        name="terminal",
        doc="ctx run --tty of true in a window, against ctx run without one",
        measure=_in_batches(terminal_sides),
    ),
    Row(
        name="window",
        doc="a window with ctx run --tty that is closed, until nothing is left, against one with "
        "bubblewrap under script",
        measure=measure_close,
    ),
    Row(
        name="ask",
        doc="a question from mkdir to rmdir, answered by file, against a wait for a trigger",
        measure=_in_batches(ask_sides),
    ),
    Row(
        name="follow",
        doc="a change of a control until 100 who follow events are told, against one",
        measure=_in_batches(follow_sides),
    ),
    Row(
        name="inbox",
        doc="reading asks among 10,000 agents of which ten ask, against among those ten",
        measure=_in_batches(inbox_sides("asks", 10)),
        share=0.34,
    ),
    Row(
        name="fleet",
        doc="reading events there, with as many lines, against the same",
        measure=_in_batches(inbox_sides("events", 500)),
        share=0.34,
    ),
    Row(
        name="meter",
        doc="requests and streams to an API that answers at once, from a cell through relay, meter "
        "and nginx, where that is installed, against relay and nginx: meter-first, the first byte "
        "of an answer; meter-delay, an event of a stream; meter-body, a request of 1 MiB; "
        "meter-late, the delay that 99 of 100 events of 50 streams do not exceed, against that of "
        "one stream, by both ways; meter-cpu, processor time of a lone event, against nginx's",
        measure=measure_meter,
        share=0.34,
    ),
    Row(
        name="metered-usage",
        doc="reading usage where a network is metered, against where one is not",
        measure=_in_batches(usage_sides),
    ),
    Row(
        name="metered-start",
        doc="the same as run with a metered network, against with one that is not",
        measure=_in_batches(start_sides),
    ),
    Row(
        name="web",
        doc="a download of 100 MB by systemd-socket-proxyd and squid, as networks of contrib/web "
        "lead to hosts, where they are installed, against by squid alone",
        measure=measure_web,
    ),
    Row(
        name="shared-create",
        doc="create, write, close of a file in data of shared/SPACE by root, against the same in "
        "the same directory by its path in the backing filesystem",
        measure=_in_batches(create_sides),
    ),
    Row(
        name="shared-clone",
        doc="git clone of a repository of 100 files into there, against the same",
        measure=_measure_clone,
        share=0.34,
    ),
    Row(
        name="shared-agent",
        doc="create, write, close of a file in a space by root in an agent's view, against the "
        "same in the same directory by its path in the backing filesystem",
        measure=_in_batches(agent_sides),
    ),
    Row(
        name="shared-agent-clone",
        doc="git clone of a repository of 100 files into there, against the same",
        measure=_measure_agent_clone,
        share=0.34,
    ),
    Row(
        name="placed",
        doc="mkdir, exec=true, start, wait, rmdir of an agent at another daemon, the link open, "
        "against the same of an agent of that daemon's own",
        measure=_in_batches(life_sides(1)),
    ),
    Row(
        name="placed-100",
        doc=f"{PLACED} of them at once, over one link, against the same",
        measure=_in_batches(life_sides(PLACED)),
        share=0.34,
    ),
    Row(
        name="placed-status",
        doc="open, read, close of the status of an agent that runs there, against one that runs "
        "here",
        measure=_in_batches(read_placed, times=40),
    ),
    Row(
        name="placed-ps",
        doc=f"ctx ps of {PLACED_LISTED} agents that run there, against as many of a daemon's own",
        measure=_in_batches(ps_placed, times=8),
        share=0.34,
    ),
    Row(
        name="placed-stop",
        doc="stop of an agent that sleeps there, until its program is gone, less one round trip of "
        "the link, against the same of one of that daemon's own; placed-stop-trip: that round "
        "trip, of what a host answers at once, against the same",
        measure=measure_stop,
    ),
    Row(
        name="placed-tree",
        doc=f"SIGKILL to the program of an agent with {PLACED} children there, until these are "
        "gone, and until its end is recorded, against the same tree at that daemon",
        measure=measure_tree,
        share=0.34,
    ),
    Row(
        name="placed-out",
        doc="256 MiB of output of an agent there, until all is here, against as many bytes through "
        "the command of the link alone; placed-out-ssh: the same by ssh, where sshd is installed; "
        "…-cpu: the lead's processor time, against a second for each GiB",
        measure=measure_out,
        share=0.34,
    ),
    Row(
        name="links",
        doc=f"{LINKS} links of a lead on which nothing happens: links-cpu, processor time that the "
        "lead uses beyond one without; links-ask, of that for each time that a lease is asked for; "
        "links-memory, of a link; links-stat, stat of an agent's status, against the one without",
        measure=measure_links,
        share=0.2,
    ),
    Row(
        name="sizes",
        doc="size-cell: memory (PSS) of what runs beside the program of an agent that does "
        "nothing, against that of bubblewrap; size-daemon: the daemon's memory of an agent that is "
        "new, and that runs; size-disk: room on disk of one that never ran; all four also or only "
        "against what they once were",
        measure=_measure_sizes,
        share=0.2,
    ),
)
