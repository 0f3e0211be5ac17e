"""The table of statuses and cues, as the tests have it, compared with what a change does."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import NotRunningError, WrongStateError
from runtime.ids import AgentIndex, Incarnation, RunId
from runtime.life.supervisor import PERFORMED
from runtime.records.change import Change
from runtime.records.lifecycle import AGENT_MOVES, LIVE, VERBS, Cue, Effect, Status
from runtime.records.model import Agent
from runtime.records.run import BETWEEN_RUNS, Run, RunCue, RunStatus
from tests.adapter.test_who_may import SAYS

#: the verbs that move an agent
MOVING = {
    verb.split()[0]: says.goes
    for verb, says in SAYS.items()
    if "stays" not in says.goes.values()
}
ALIVE = ("starting", "ready", "idle", "busy", "paused")
#: what the runtime observes, by status; every other pair is refused
OBSERVED = {
    "running": {"starting": "busy", "idle": "busy", "ready": "busy"},
    "idling": {"starting": "idle", "busy": "idle"},
    "readying": {"starting": "ready", "busy": "ready"},
    "ending": {"new": "dead", **dict.fromkeys(ALIVE, "stopping")},
    "owner_ending": {"new": "dead", **dict.fromkeys(ALIVE, "stopping")},
    "ended": {"stopping": "dead"},
    "restarting": {"stopping": "starting"},
    "rebooted": dict.fromkeys((*ALIVE, "stopping"), "dead"),
    "lost": dict.fromkeys((*ALIVE, "stopping"), "dead"),
    "returning": dict.fromkeys(ALIVE, "starting"),
    "removing": {"new": "dead", "starting": "dead"},
}
#: what is done beside the records; every other move has nothing done
EFFECTS = {
    ("new", "start"): ["launch"],
    ("paused", "resume"): ["thaw"],
    ("stopping", "kill"): ["kill"],
    ("stopping", "ended"): ["clear", "release"],
    ("stopping", "restarting"): ["clear"],
    **{("new", cue): ["release"] for cue in ("stop", "kill", "ending", "owner_ending")},
    **{(status, "pause"): ["freeze"] for status in ("ready", "idle", "busy")},
    **{(status, cue): ["refuse", "end"] for status in ALIVE for cue in ("stop", "ending")},
    **{(status, "kill"): ["refuse", "end", "kill"] for status in ALIVE},
    **{(status, "owner_ending"): ["refuse"] for status in ALIVE},
    **{(s, cue): ["release"] for s in (*ALIVE, "stopping") for cue in ("rebooted", "lost")},
}
ERRORS = {"EBUSY": WrongStateError, "ESRCH": NotRunningError}

PAIRS = [
    (status.value, cue, goes.get(status.value, "EBUSY"))
    for cue, goes in (MOVING | OBSERVED).items()
    for status in Status
]


def agent_in(status: str, paused_from: str = "busy") -> Agent:
    return Agent(
        index=AgentIndex(1), incarnation=Incarnation("i"), name="x", owner=1, uid=1, gid=1,
        status=Status(status), paused_from=paused_from if status == "paused" else "",
    )  # fmt: skip


def moved(agent: Agent, cue: str, **why: str) -> Change:
    """A change with this move, applied to the agent as a commit does."""
    change = Change()
    change.move(agent, Cue(cue), **why)
    for _, values in change.agents.values():
        for name, value in values.items():
            setattr(agent, name, value)
    return change


def test_the_test_knows_every_pair() -> None:
    assert {(s, e) for s, e, _ in PAIRS} == {(s.value, e.value) for s in Status for e in Cue}
    assert {verb.value for verb in VERBS} == set(MOVING)


@pytest.mark.parametrize(("status", "cue", "expected"), PAIRS)
def test_each_pair_moves_or_is_refused_as_the_table_of_verbs_says(
    status: str, cue: str, expected: str
) -> None:
    agent = agent_in(status)
    if expected in ERRORS:
        with pytest.raises(ERRORS[expected], match=f"the agent is {status}"):
            moved(agent, cue)
        assert agent.status == status
        return
    change = moved(agent, cue, reason="why")
    assert agent.status == (expected if expected != "same" else "busy")
    assert [effect.value for _, effect in change.effects] == EFFECTS.get((status, cue), [])
    told = [fields for _, _, fields in change.lines]
    to = {"type": "agent.status", "agent": "x", "status": agent.status, "reason": "why"}
    assert told == ([] if agent.status == status else [to])


def test_a_refusal_names_the_verbs_that_would_fit() -> None:
    with pytest.raises(WrongStateError, match=r"is new; use kill, start or stop$"):
        moved(agent_in("new"), "pause")


def test_every_effect_is_performed_and_called_for() -> None:
    assert set(PERFORMED) == set(Effect)
    called = {effect for row in (*EFFECTS.values(), ["follow"]) for effect in row}
    assert called == {e.value for e in Effect}


#: what becomes of a run, by cue and status; every other pair is refused
RUNS = {
    "begin": {"none": "begun"},
    "seen": {
        "begun": "running", **{s: s for s in ("running", "cancelling", "ending")}
    },
    "cancel": dict.fromkeys(("begun", "running", "cancelling"), "cancelling"),
    "spare": {"cancelling": "running"},
    "end": dict.fromkeys(("begun", "running", "cancelling"), "ending"),
    "over": dict.fromkeys(("none", "begun", "running", "cancelling", "ending"), "none"),
}  # fmt: skip


@pytest.mark.parametrize("status", RunStatus)
@pytest.mark.parametrize("cue", RunCue)
def test_a_run_moves_as_its_table_says(status: RunStatus, cue: RunCue) -> None:
    agent, change = agent_in("busy"), Change()
    agent.run = Run(id=RunId("r1"), status=status, pid=7)
    to = RUNS[cue].get(status)
    if to is None:
        with pytest.raises(WrongStateError, match=f"the run is {status}"):
            change.run(agent, cue, cause="why")
        assert not change.agents
        return
    change.run(agent, cue, cause="why")
    over = to == "none"
    expected = BETWEEN_RUNS if over else replace(agent.run, status=RunStatus(to), cause="why")
    assert change.peek_agent(agent, "run") == expected
    assert change.effects == ([(agent, Effect.FOLLOW)] if cue is RunCue.END else [])


@pytest.mark.parametrize("status", ["ready", "idle", "busy"])
def test_what_was_paused_is_frozen_until_it_goes_on_as_what_it_was(status: str) -> None:
    agent = agent_in(status)
    moved(agent, "pause")
    assert (agent.status, agent.frozen) == (Status.PAUSED, True)
    moved(agent, "resume")
    assert (agent.status, agent.frozen, agent.paused_from) == (Status(status), False, "")


def test_an_abort_pauses_and_freezes_nothing() -> None:
    agent = agent_in("busy")
    moved(agent, "abort")
    assert (agent.status, agent.frozen) == (Status.PAUSED, False)


def test_two_moves_in_one_change_see_each_other() -> None:
    agent, change = agent_in("new"), Change()
    change.move(agent, Cue.START)
    part = Change(change)
    part.move(agent, Cue.LOST)
    change.add(part)
    assert change.peek_agent(agent, "status") is Status.DEAD
    assert [effect.value for _, effect in change.effects] == ["launch", "release"]
    assert agent.status is Status.NEW


def test_live_is_everything_but_new_and_dead() -> None:
    assert set(Status) - LIVE == {Status.NEW, Status.DEAD}


@given(st.lists(st.sampled_from(list(Cue)), max_size=40))
def test_no_walk_leaves_dead_but_by_reset(cues: list[Cue]) -> None:
    agent = agent_in("new")
    for cue in cues:
        before = agent.status
        try:
            moved(agent, cue)
        except (WrongStateError, NotRunningError):
            continue
        if before is Status.DEAD:
            assert cue is Cue.RESET
        if before is Status.STOPPING:
            assert agent.status in (Status.STOPPING, Status.DEAD) or cue is Cue.RESTARTING


@given(st.sampled_from(sorted(LIVE)))
def test_every_live_status_reaches_dead(status: Status) -> None:
    agent = agent_in(status)
    moved(agent, "kill")
    moved(agent, "ended")
    assert agent.status is Status.DEAD


def test_a_status_is_set_by_moves_alone() -> None:
    """In the runtime: a record that is made has one, and only ``Change`` gives it another."""
    house = Path(__file__).resolve().parents[4] / "runtime"
    setting = []
    for path in house.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("set", "put", "update") and any(
                keyword.arg == "status" for keyword in node.keywords
            ):
                setting.append(path.name)
    assert set(setting) == {"change.py"}
    assert AGENT_MOVES.terminal == set()
