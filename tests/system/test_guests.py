"""Agents of another machine at a real daemon, whose lead says what a test says."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, daemon_of, read, refusal, wait_until
from tests.worlds.leads import put
from tests.worlds.nodes import LEASE
from tests.worlds.pairs import LATE
from tests.worlds.scripted import ScriptedLead

TASK = b"count to three"


@pytest.fixture(scope="module")
def host() -> Iterator[Daemon]:
    with daemon_of(config="node_name: two\ngrace: 300ms\n") as made:
        yield made


@pytest.fixture
def lead(host: Daemon) -> Iterator[ScriptedLead]:
    # it says nothing while a test does something else
    made = ScriptedLead(host, lease=60.0)
    made.until(lambda: made.hello)
    yield made
    made.close()


_numbers = count(1)


def place(
    lead: ScriptedLead, program: str, *, mount: str = "", **more: object
) -> tuple[str, str]:
    """Puts and starts an agent; its incarnation, and its name here."""
    number = next(_numbers)
    agent, name = f"{time.time_ns() & 0xFFFFFFFF:08x}{number:08x}", f"x{number}"
    config = {"exec": f"sh -c '{program}'", "label": f"{name}_t", "mount": mount}
    config["policy"] = f"allow {name}_t tool:* execute\nallow {name}_t agent:* create\n"
    given = put(name=name, run=number, config=config, **more)
    given["bound"]["policy"] = config["policy"]
    lead.say("put", agent, **given)
    lead.say("start", agent)
    return agent, f"{name}@{lead.hello['alias']}"


def is_busy(lead: ScriptedLead, agent: str) -> Callable[[], bool]:
    return lambda: lead.statuses(agent)[-1:] == ["busy"]


def gone(host: Daemon, name: str) -> bool:
    """Whether no process of an agent is left."""
    return not host.processes_of(name)


def test_it_runs_as_anywhere_and_is_led_from_elsewhere(host: Daemon, lead: ScriptedLead) -> None:
    digest = hashlib.sha256(TASK).hexdigest()
    agent, name = place(
        lead,
        "cat; echo; echo $CTX_AGENT; echo whole > $CTX_SELF/result.md;"
        " cd $CTX_ROOT/agent; mkdir child.d && cat child.d/parent; cat $CTX_SELF/supervisor;"
        " test ! -w /r/claude && ls /r | grep claude; echo half > $CTX_SELF/report;"
        " until test -e $CTX_SELF/artifact/go; do sleep 0.05; done",
        files={"handoff.md": [len(TASK), digest]},
        mount="node:recipes /r ro\n",
    )
    lead.files[agent, "handoff.md"] = TASK
    lead.until(is_busy(lead, agent), "it runs")
    directory = host.agent_dir(name)
    for file, text in (("exec", "id"), ("handoff.md", "other"), ("policy", ""), ("inbox", "hi")):
        assert refusal(directory / file, text).startswith("EPERM"), file
    with pytest.raises(OSError) as refused:
        os.rmdir(directory)
    assert refused.value.errno in (errno.EPERM, errno.EBUSY)
    lead.until(lambda: lead.told("report", agent), "it reports")
    (report,) = lead.told("report", agent)
    assert report["text"].strip() == "half" and report["run"] == f"r{int(name[1:].split('@')[0])}"
    lead.until(lambda: lead.grown.get((agent, "out"), 0) > 20, "it says something")
    lead.say("verb", agent, verb="stop", by="agent:boss", reason="enough", outcome="cancelled")
    ended = lead.ended(agent)
    assert (ended["outcome"], ended["reason"]) == ("cancelled", "enough")
    assert ended["files"]["result.md"][0] == 6
    lead.want(agent, "out", ended["out"])
    lead.until(lambda: len(lead.came[agent, "out"]) == ended["out"], "all that it said")
    said = lead.came[agent, "out"].decode().splitlines()
    supervisor = f"agent:boss@{lead.hello['alias']}"
    assert said[:2] == [TASK.decode(), name]
    assert said[2].startswith(f"agent:{name} session:default") and said[3] == supervisor
    assert said[4] == "claude"
    assert lead.statuses(agent) == ["busy"]
    happened = [fact["type"] for fact in lead.told("event", agent)]
    assert happened == ["run.start", "run.end"]
    lead.say("forget", agent)
    lead.until(lambda: not directory.exists(), "it is forgotten")
    assert lead.told("refused", agent) == []


def test_what_cannot_start_says_why(host: Daemon, lead: ScriptedLead) -> None:
    agent, _ = place(lead, "true", session="a/b")
    lead.until(lambda: len(lead.told("refused", agent)) == 2)
    assert [fact["code"] for fact in lead.told("refused", agent)] == ["EINVAL", "ENOENT"]
    given = put(name="missing", run=1, config={"exec": "/nothing"})
    lead.say("put", "f" * 16, **given)
    lead.say("start", "f" * 16)
    ended = lead.ended("f" * 16)
    assert ended["outcome"] == "error" and "/nothing" in ended["reason"], ended
    assert host.ctx("ping").returncode == 0


@pytest.mark.parametrize("how", ["restart", "reexec"])
def test_it_outlives_the_daemon(host: Daemon, lead: ScriptedLead, how: str) -> None:
    agent, name = place(lead, "until test -e $CTX_SELF/artifact/go; do sleep 0.05; done")
    lead.until(is_busy(lead, agent), "it runs")
    pid = (host.agent_dir(name) / "pid").read_text()
    if how == "restart":
        host.restart()
    else:
        assert host.ctx("reexec").returncode == 0
    assert read(host.agent_dir(name), "status") == "busy\n"
    assert (host.agent_dir(name) / "pid").read_text() == pid
    lead.say("verb", agent, verb="pause", by="agent:boss", reason="", outcome="")
    lead.until(lambda: lead.statuses(agent)[-1] == "paused", "it is paused")
    lead.say("verb", agent, verb="kill", by="agent:boss", reason="enough", outcome="cancelled")
    ended = lead.ended(agent)
    assert (ended["outcome"], ended["reason"]) == ("cancelled", "enough")


@pytest.mark.parametrize("alive", [pytest.param(True, marks=pytest.mark.long), False])
def test_without_its_lead_it_ends_with_the_lease(alive: bool) -> None:
    with daemon_of(config="node_name: two\ngrace: 300ms\n") as host:
        lead = ScriptedLead(host)
        lead.until(lambda: lead.hello)
        agent, name = place(lead, "trap : TERM; while :; do sleep 0.1; done")
        lead.until(is_busy(lead, agent), "it runs")
        lead.close()
        began = time.monotonic()
        if not alive:
            host.kill()
        lease = float(LEASE.removesuffix("s"))
        wait_until(lambda: gone(host, name), "nothing is left", timeout=lease + 5)
        assert time.monotonic() - began < lease + 0.3 + LATE
        if not alive:
            host.start()
        ended = lead.ended(agent)
        lead.close()
        assert (ended["outcome"], ended["reason"]) == ("interrupted", "lease_over")


def test_a_durable_home_is_there_for_the_next_life(host: Daemon, lead: ScriptedLead) -> None:
    for life in range(2):
        agent, number = f"{life:016x}", 1000 + life
        config = {"exec": "sh -c 'cat ~/lives; echo life >> ~/lives'", "homedir": "durable"}
        lead.say("put", agent, **put(name="durable", run=number, config=config))
        lead.say("start", agent)
        ended = lead.ended(agent)
        assert ended["outcome"] == "done", ended
        assert ended["out"] == life * len("life\n")
        lead.say("forget", agent)
        lead.until(lambda: not host.agent_dir("durable@one").exists(), "it is forgotten")


def test_what_its_lead_calls_lost_ends_at_once(host: Daemon) -> None:
    lead = ScriptedLead(host, "four", lease=6.0)
    lead.until(lambda: lead.hello)
    agent, name = place(lead, "trap : TERM; while :; do sleep 0.1; done")
    lead.until(is_busy(lead, agent), "it runs")
    lead.grants.over = lead.stream.sent
    lead.until(lambda: lead.overs, "the host says that it is over")
    assert gone(host, name)
    lead.grants.over = None
    assert lead.ended(agent)["reason"] == "lease_over"
    again, _ = place(lead, "true")
    assert lead.ended(again)["outcome"] == "done"
    lead.close()


def test_a_lead_that_was_put_back_has_nothing_here(host: Daemon) -> None:
    first = ScriptedLead(host, "three", lease=60.0)
    first.until(lambda: first.hello)
    agent, name = place(first, "sleep 1000")
    first.until(is_busy(first, agent), "it runs")
    second = ScriptedLead(host, "three")
    second.known = first.known
    first.close()
    with pytest.raises(AssertionError, match="does not know it"):
        second.until(lambda: False, timeout=10)
    reason = Path(host.agent_dir(name), "reason")
    wait_until(lambda: gone(host, name) and reason.read_text(), "it ends, and that is recorded")
    assert reason.read_text() == "lease_over\n"
    second.close()
