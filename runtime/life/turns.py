"""The turn of a child to start: of what an agent owns, no more runs at once than its limits say.

The line is in the records alone: each child that waits has its place there, so that a new daemon
finds the same order. Who leads a child that waits looks again when a sibling has ended, when a
limit above it has changed, and when what it would run in is resumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.registry import Registry
from runtime.texts.limits import running_limit


def _most(registry: Registry, parent: Agent) -> int | None:
    """How many children of an agent may run at once: no more than of whatever owns it."""
    above = (*registry.ancestors(parent), parent)
    limits = (running_limit(each.limits) for each in above)
    return min((limit for limit in limits if limit is not None), default=None)


def has_turn(registry: Registry, agent: Agent) -> bool:
    """Whether nothing keeps an agent waiting that may start, or waits already."""
    above = registry.ancestors(agent)
    if not above:
        return True
    if any(owner.status is Status.PAUSED for owner in above):
        return False
    most = _most(registry, above[-1])
    if most is None:
        return True
    others = [each for each in registry.children(above[-1]) if each.owned and each is not agent]
    running = sum(each.live and not each.queued for each in others)
    before = sum(
        each.waits_its_turn and (not agent.queued or each.queued < agent.queued)
        for each in others
    )
    return running + before < most


def last_place(registry: Registry, agent: Agent) -> int:
    """The place in the line after all of its siblings."""
    return 1 + max(each.queued for each in registry.children(registry.ancestors(agent)[-1]))


def due(registry: Registry, agent: Agent, names: set[str]) -> Iterator[Agent]:
    """The agents whose turn it is since these fields of ``agent`` changed."""
    owners: list[Agent] = []
    owner = registry.supervisor_of(agent)
    if owner is not None and not agent.live and "status" in names:
        owners = [owner]
    elif not names.isdisjoint(("limits", "paused_from")):
        owners = [agent, *registry.descendants(agent)]
    for each in owners:
        # each of many that end at once asks, and mostly none of the others waits
        waiting = [c for c in registry.children(each) if c.queued and c.waits_its_turn]
        waiting.sort(key=lambda child: child.queued)
        yield from itertools.takewhile(lambda child: has_turn(registry, child), waiting)
