"""The status, processes and output of an agent, as the runtime tells of them: rows."""

from __future__ import annotations

from typing import Final

from ctxfs.files import fields
from ctxfs.reasons import late_line
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Gathered, Output, Row, Shown
from runtime.agents import placing
from runtime.caller import PARTIES, Caller
from runtime.kernel.output import Segments
from runtime.life import room
from runtime.records.model import Agent


def _cgroup(base: Base, agent: Agent, caller: Caller) -> str:
    if agent.away or not agent.cell.cgroup:
        return ""
    return f"{base.runtime.hierarchy.root.path}/{agent.cell.cgroup}\n"


def _since(base: Base, agent: Agent) -> float:
    return agent.since or agent.created


async def _usage(base: Base, agent: Agent, caller: Caller) -> bytes:
    payer = base.agents.identity.payer(caller).owner
    found = await base.runtime.supervisor.meter.usage(agent, payer)
    shown = {k: f"{value:.6f}" if isinstance(value, float) else value for k, value in found.items()}
    return "".join(f"{key}={value}\n" for key, value in shown.items()).encode()


async def _processes(base: Base, agent: Agent, caller: Caller) -> bytes:
    placing.check_here(agent, "its processes are")
    payer = base.agents.identity.payer(caller).owner
    return await base.runtime.supervisor.meter.processes(agent, caller.pid, payer)


def _error(base: Base, agent: Agent, caller: Caller) -> str:
    """The latest of what was refused, a start that failed after it had been answered, a pause for
    want of room, and what is wrong with a network."""
    found = [base.reasons.of_agent(agent.incarnation)]
    if agent.reason.startswith("start_failed: "):
        found.append(late_line(agent.ended, f"agent/{agent.name}.d/ctl", agent.reason))
    if refusal := agent.heard.get("refused"):
        when, sentence = refusal
        found.append(late_line(when, f"agent/{agent.name}.d/ctl", sentence))
    if no_room := room.describe(agent):
        found.append(late_line(agent.since, f"agent/{agent.name}.d/ctl", no_room))
    trouble = base.runtime.supervisor.networks.trouble(agent)
    if trouble is not None:
        found.append(late_line(trouble.when, f"agent/{agent.name}.d/limits", trouble.what))
    return max(found)  # all begin with their times


def _printed(name: str, doc: str) -> Output[Agent]:
    """The output of its program, as it is at each read."""

    def kept(base: Base, agent: Agent) -> Segments:
        last = agent.last_line if name == "log" else ""
        return Segments(base.agents.documents.directory(agent) / name, last=last)

    return Output(
        name=name, doc=doc, size=lambda base, agent: kept(base, agent).size,
        content=lambda base, agent: lambda offset, size: kept(base, agent).read(offset, size),
    )  # fmt: skip


ROWS: Final[tuple[Row[Agent], ...]] = (
    Shown(name="status", instead="ctl", public=True, polled=True, changed=_since,
        render=fields.value("status"), doc="new starting ready busy idle paused stopping dead"),
    Shown(name="outcome", public=True, render=fields.value("outcome"),
        doc="done error cancelled interrupted, once it is dead"),
    Shown(name="reason", render=fields.value("reason"), doc="why, such as exit:3 or operator_stop"),
    Shown(name="incarnation", render=fields.value("incarnation"),
        doc="id of this life of the name"),
    # of a page that is read while the value gets shorter, the kernel shows NULs at the end
    Shown(name="pid", render=fields.value("run.pid"), volatile=True, depends=("run",),
        doc="its main process, as a PID of the host"),
    Shown(name="run", render=fields.value("run.id"), volatile=True, doc="current run"),
    Shown(name="cgroup", render=_cgroup, volatile=True, depends=("cell",),
        doc="path of its cgroup"),
    Gathered(name="usage", gather=_usage,
        doc="cpu_usec memory_current memory_peak memory_tmp processes wall_msec, and "
            "net.NAME.connections net.NAME.sent net.NAME.received of networks, of the agent and "
            "all that it owns. "
            "memory_tmp is what cells have in files in memory, such as in /tmp; the memory has it, "
            "too. Without the memory controller, memory counts shared pages in parts (PSS), and "
            "memory_peak_sampled is the highest value that was read or sampled. If a network is "
            "metered, what models say was used by the agent and all below it, detached ones too: "
            "tokens.in tokens.cached tokens.written tokens.out tokens.estimated cost requests "
            "requests.refused requests.unpriced, and with a limit tokens.left cost.left"),
    Gathered(name="processes", read=PARTIES, gather=_processes,
        doc="processes of the agent and of all that it owns, one JSON object per line: agent, pid "
            "(as the reader sees it), name, state, cpu in seconds, memory (PSS) in bytes, age in "
            "seconds, command; null for a value that is not available. While a program of an agent "
            "is being started, none of that agent's processes are listed"),
    _printed("out", "standard output"),
    _printed("log", "standard error, and lines of the runtime"),
    Shown(name="error", render=_error, generated=True, doc="the last rejection, with its time"),
)
