"""Where an agent is to run, where it does, and the machines that there are for that: rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Control, Row, Shown
from runtime.agents import placing
from runtime.caller import Caller
from runtime.errors import MalformedError
from runtime.records.model import Agent
from runtime.texts import placement
from runtime.texts.names import dump_json, quote, timestamp

#: lines of ``nodes``, after which others have their turn
_MADE_AT_ONCE: Final = 256


def _parse(base: Base, agent: Agent, caller: Caller, text: str) -> str:
    """The text as it is kept. ``MalformedError``, ``DeniedError`` or ``UnsupportedError``."""
    agents, nodes = base.agents, base.agents.nodes
    if text:
        placing.check_hop(agents, agent)
        pattern = _node(base, agent, caller, text)
        text = f"node={pattern}\n"
        maker = agents.registry.calling(caller)
        if maker is not None:
            usable = nodes.usable(agent.owner)
            meant = [name for name in usable if placement.matches(pattern, name)]
            nodes.covered(maker, pattern, meant)
    else:
        base.runtime.supervisor.check_limits(agent.limits)
    placing.check(agents, agent, *placing.FILES, placement=text)
    return text


def _node(base: Base, agent: Agent, caller: Caller, text: str) -> str:
    """The node, or prefix, of a text; ``MalformedError``, which has the nodes that there are."""
    nodes = base.agents.nodes
    try:
        pattern = placement.parse(text)
        if not any(placement.matches(pattern, name) for name in nodes.usable(agent.owner)):
            what = "no node begins so" if pattern.endswith("*") else "no such node"
            raise MalformedError(f"{quote(text.strip())}: {what}")
    except MalformedError as error:
        listed = placement.listed(nodes.usable_by(caller, agent.owner))
        raise MalformedError(f"{error.sentence}; {listed}") from None
    return pattern


def _set(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    placed = _parse(base, agent, caller, text)
    freely = bool(placed) and caller.agent is None
    # what its lines led to was on another machine: it is looked for when it starts
    base.agents.journal.update(agent, placement=placed, placed_freely=freely, sources={})


def _state(base: Base, agent: Agent, caller: Caller) -> str:
    if not agent.node:
        return ""
    ways = base.agents.nodes.ways
    heard, own = ways.heard(agent.node, agent.owner), ways.of_agent(agent)
    shown = {
        "name": agent.node,
        "link": "up" if heard.get("state") == "up" else "down",
        "seen": _time(heard.get("seen", 0.0)),
        "lease": own.get("lease", 0),
        "pending": own.get("pending", ""),
        "fetch": own.get("fetch", 0),
    }
    return "".join(f"{key}={value}\n" for key, value in shown.items())


def _time(seconds: float) -> str:
    return timestamp(seconds) if seconds else ""


def _list(base: Base, _: Base, caller: Caller) -> Iterator[str]:
    for number, node in enumerate(base.agents.nodes.facts_of(caller), 1):
        times = {key: _time(node[key]) for key in ("since", "seen")}
        yield dump_json({**node, **times}) + "\n"
        if number % _MADE_AT_ONCE == 0:
            yield ""


ROWS: Final[tuple[Row[Agent], ...]] = (
    Control(name="placement", shape=shapes.pairs(lambda line, label: placement.parse_line(line),
                                                 pattern="^node$"),
        guard=fields.WHILE_NEW, render=fields.text("placement"),
        checking=lambda base, agent, caller: fields.Whole(
            lambda text: _parse(base, agent, caller, text)
        ),
        commit=_set,
        doc="where it is to run: node=NAME, or node=PREFIX* for the node with most room; empty for "
        "this machine"),
    Shown(name="node", instead="placement", generated=True, render=_state,
        doc="of an agent at a node, key=value: name; link, up or down; seen, the time at which the "
        "node was heard last; lease, the seconds for which it may go on without being asked "
        "again; pending, verbs that it has not confirmed; fetch, bytes that are to come"),
)

#: of the root
LIST: Final[Shown[Base]] = Shown(
    name="nodes", public=True, generated=True, polled=True, render=_list,
    doc="one JSON object per line for each node and owner that the caller may use: name owner "
        "state since seen agents max directories networks shared version error; state is idle, "
        "up, down or refused, error says why, agents is the number of those that live there",
)  # fmt: skip
