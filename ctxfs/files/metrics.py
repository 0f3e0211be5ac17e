"""The text of ``metrics``: the facts of ``status`` and the daemon's own, for Prometheus.

Whoever adds up or compares samples over time takes one that is missing for one that is not
known. So a sample that is there once is always there, at 0 if there is nothing to count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import psutil

from ctxfs.tree.base import Base
from runtime.authority.accounts import Resource
from runtime.cell.spending import KEYS
from runtime.kernel.cgroups import CONTROLLERS
from runtime.kernel.linux import descriptors
from runtime.records.items import Ask, Message, Wait
from runtime.records.model import Outcome
from runtime.runtime import STATES
from runtime.texts.limits import UNIT

_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class _Sample(NamedTuple):
    """One value, and what tells it from others of its family."""

    figure: float
    labels: dict[str, str]


class _Family(NamedTuple):
    """Samples of one name; ``kind`` is ``gauge`` or ``counter``."""

    name: str
    kind: str
    doc: str
    samples: list[_Sample]


def text(base: Base) -> str:
    """All families in the Prometheus text format, sizes in bytes and times in seconds."""
    lines = []
    for family in (
        *_of_status(base.runtime.status()),
        *_of_accounts(base),
        *_of_loop(base),
        *_of_agents(base),
        *_of_models(base),
        *_of_links(base),
        *_of_process(base),
    ):
        lines.append(f"# HELP ctxfs_{family.name} {family.doc}\n")
        lines.append(f"# TYPE ctxfs_{family.name} {family.kind}\n")
        lines += [f"ctxfs_{family.name}{_labels(s)} {_figure(s.figure)}\n" for s in family.samples]
    return "".join(lines)


def _labels(sample: _Sample) -> str:
    labels = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in sample.labels.items())
    return f"{{{','.join(labels)}}}" if sample.labels else ""


def _figure(figure: float) -> str:
    if figure == float("inf"):
        return "+Inf"
    return f"{figure:.6f}" if isinstance(figure, float) else str(figure)


def _plain(*families: tuple[str, str, float, str]) -> Iterator[_Family]:
    """Metrics of one sample each: name, kind, figure and doc."""
    for name, kind, figure, doc in families:
        yield _Family(name, kind, doc, [_Sample(figure, {})])


def _of_status(status: dict[str, str]) -> Iterator[_Family]:
    """Texts become labels of samples that are 1, or one sample for each text that may be."""
    words = {key: status[key] for key in ("version", "cgroup", "mount")}
    yield _Family("info", "gauge", "Version and places of the daemon.", [_Sample(1, words)])
    yield _Family("state", "gauge", "1 for the state that the daemon is in, 0 for others.", [
        _Sample(int(state == status["state"]), {"state": state}) for state in STATES
    ])  # fmt: skip
    uptime = float(status["uptime"])
    yield from _plain(("uptime_seconds", "gauge", uptime, "Time since the daemon started."))
    yield _Family("agents", "gauge", "Agents by status.", [
        _Sample(int(value), {"status": key.removeprefix("agents.")})
        for key, value in status.items() if key.startswith("agents.")
    ])  # fmt: skip
    there = status["controllers"].split(",")
    yield _Family("controller", "gauge", "1 for each cgroup controller that agents have.", [
        _Sample(int(name in there), {"controller": name}) for name in CONTROLLERS
    ])  # fmt: skip
    limits = (limit.partition("=") for limit in status["limits"].split(","))
    yield _Family("limit", "gauge", "Built-in and configured limits.", [
        _Sample(float(value[:-1]) if value.endswith("s") else int(value), {"limit": name})
        for name, _, value in limits
    ])  # fmt: skip


def _of_accounts(base: Base) -> Iterator[_Family]:
    accounts = base.runtime.accounts
    yield _Family("account_used", "gauge", "What all owners hold of a resource.", [
        _Sample(accounts.used(resource), {"account": resource}) for resource in Resource
    ])  # fmt: skip
    totals = {resource: accounts.total(resource) for resource in Resource}
    yield _Family("account_total", "gauge", "What they may hold together.", [
        _Sample(float("inf") if total is None else total, {"account": resource})
        for resource, total in totals.items()
    ])  # fmt: skip


def _of_loop(base: Base) -> Iterator[_Family]:
    loop = base.runtime.loop
    step, whole = loop.recent
    yield from _plain(
        ("requests_total", "counter", base.requests, "Requests of the kernel that were answered."),
        ("requests_at_hand", "gauge", len(base.at_hand), "Requests that are not answered yet."),
        ("refusals_total", "counter", base.reasons.count, "Requests and calls that were refused."),
        ("loop_steps_total", "counter", loop.steps, "Steps of the event loop."),
        ("loop_cpu_seconds_total", "counter", loop.total,
         "Processor time of these steps, and of looking for events."),
        ("loop_step_longest_seconds", "gauge", loop.longest,
         "Processor time of the longest step since the start."),
        ("loop_step_recent_seconds", "gauge", step,
         "Processor time of the longest step of the last minute."),
        ("loop_lag_seconds", "gauge", whole,
         "The longest that the event loop did not look for requests in the last minute."),
    )  # fmt: skip


def _of_agents(base: Base) -> Iterator[_Family]:
    agents = base.agents
    recorder, windows = base.runtime.supervisor.recorder, base.runtime.supervisor.windows
    yield _Family("agent_ends_total", "counter", "Agents that ended since the start, by outcome.", [
        _Sample(recorder.ends[outcome], {"outcome": outcome}) for outcome in Outcome if outcome
    ])  # fmt: skip
    yield from _plain(
        ("agent_restarts_total", "counter", recorder.restarts,
         "Agents that were started again since the start, as their restart says."),
        ("terminals", "gauge", windows.terminals, "Programs that have a terminal."),
        ("viewers", "gauge", windows.viewers, "Those who look at terminals."),
        ("messages_waiting", "gauge", len(agents.items.pending(Message)),
         "Messages in the queues of agents."),
        ("waits_armed", "gauge", len(agents.items.pending(Wait)), "Waits that may still fire."),
        ("asks_open", "gauge", len(agents.items.pending(Ask)),
         "Questions that nobody has answered yet."),
        ("event_readers", "gauge", agents.fleet.readers,
         "Requests for the events of all agents that are being answered."),
        ("changes_waiting", "gauge", agents.journal.behind,
         "Changes and lines of histories that wait for room on the disk."),
    )  # fmt: skip


#: samples of ``usage``, by a family of metrics: its doc, the name of the label, and its values
_MODELS: Final = {
    "tokens": ("Tokens of models that meters counted since the start, by owner; cached and written "
               "are part of in, estimated of in and out.",
               "kind", {key: key.removeprefix("tokens.") for key in KEYS if "tokens" in key}),
    "cost": ("Their cost, in the unit of the meters' rates.", "", {"cost": ""}),
    "model_requests": ("Requests to models since the start, by owner; unpriced ones were passed.",
                       "answer", {"requests": "passed", "requests.refused": "refused",
                                  "requests.unpriced": "unpriced"}),
}  # fmt: skip


def _of_models(base: Base) -> Iterator[_Family]:
    owners = base.runtime.supervisor.spending.of_owner
    for name, (doc, label, values) in _MODELS.items():
        samples = []
        for owner, sums in sorted(owners.items()):
            for key, value in values.items():
                count = sums[KEYS.index(key)]
                labels = {"owner": str(owner)} | ({label: value} if label else {})
                samples.append(_Sample(count / UNIT if key == "cost" else count, labels))
        yield _Family(f"{name}_total", "counter", doc, samples)


#: of the links to nodes: family, kind, what it counts, and the doc
_LINKS: Final = (
    ("link_up", "gauge", {"up": ""}, "Links to a node that are up."),
    ("link_wanted", "gauge", {"wanted": ""}, "Links to a node that ought to be up."),
    ("link_lease_seconds", "gauge", {"lease": ""},
     "Time after which agents at a node that nothing is heard of are lost."),
    ("link_operations", "gauge", {"operations": ""},
     "What a node was told, or is to be, and has not said that it has done."),
    ("link_agents_lost_total", "counter", {"lost": ""}, "Agents at a node that were lost."),
    ("link_bytes_total", "counter", {"read": "in", "written": "out"}, "Bytes of links to a node."),
)  # fmt: skip


def _of_links(base: Base) -> Iterator[_Family]:
    counted = sorted(base.runtime.links.counted().items())
    for name, kind, keys, doc in _LINKS:
        yield _Family(name, kind, doc, [
            _Sample(counts[key], {"node": node} | ({"direction": label} if label else {}))
            for node, counts in counted for key, label in keys.items()
        ])  # fmt: skip


def _of_process(base: Base) -> Iterator[_Family]:
    process, disk = psutil.Process(), base.agents.disk
    held, most = descriptors()
    with process.oneshot():
        times = process.cpu_times()
        families = _plain(
            ("process_resident_bytes", "gauge", process.memory_info().rss,
             "Memory of the daemon."),
            ("process_cpu_seconds_total", "counter", times.user + times.system,
             "Processor time of the daemon, of all threads."),
            ("process_threads", "gauge", process.num_threads(), "Threads of the daemon."),
            ("process_start_time_seconds", "gauge", process.create_time(),
             "When the daemon was started, since 1970."),
            ("descriptors", "gauge", held, "Descriptors that the daemon holds."),
            ("descriptors_max", "gauge", most, "How many it may hold."),
            ("state_free_bytes", "gauge", disk.free,
             "What others than root may still write below the state; -1 until it is known."),
            ("state_size_bytes", "gauge", disk.size,
             "Size of that file system; -1 until it is known."),
            ("trees_hard", "gauge", int(disk.quotas is not None),
             "Whether the kernel bounds durable trees."),
        )  # fmt: skip
    yield from families
