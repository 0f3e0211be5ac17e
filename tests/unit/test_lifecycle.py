"""The table of verbs and states, written out once more and compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import NotRunningError, WrongStateError
from runtime.lifecycle import LIVE, TABLE, VERBS, Effect, Event, Status, move

#: the ABI's table of verbs: a next status, "same" (what it was before), or an errno's name
VERB_NAMES = ("start", "stop", "kill", "pause", "resume", "abort", "reset")
EXPECTED = {
    "new": ("starting", "dead", "dead", "EBUSY", "EBUSY", "ESRCH", "EBUSY"),
    "starting": ("EBUSY", "stopping", "stopping", "EBUSY", "EBUSY", "ESRCH", "EBUSY"),
    "ready": ("EBUSY", "stopping", "stopping", "paused", "EBUSY", "ESRCH", "EBUSY"),
    "idle": ("EBUSY", "stopping", "stopping", "paused", "EBUSY", "ESRCH", "EBUSY"),
    "busy": ("EBUSY", "stopping", "stopping", "paused", "EBUSY", "paused", "EBUSY"),
    "paused": ("EBUSY", "stopping", "stopping", "EBUSY", "same", "paused", "EBUSY"),
    "stopping": ("EBUSY", "EBUSY", "stopping", "EBUSY", "EBUSY", "EBUSY", "EBUSY"),
    "dead": ("EBUSY", "EBUSY", "EBUSY", "EBUSY", "EBUSY", "ESRCH", "new"),
}
#: what the runtime observes, by status; every other pair is refused
OBSERVED = {
    "running": {"starting": "busy", "idle": "busy", "ready": "busy"},
    "idling": {"starting": "idle", "busy": "idle"},
    "readying": {"starting": "ready", "busy": "ready"},
    "ending": {
        "new": "dead",
        "starting": "stopping",
        "ready": "stopping",
        "idle": "stopping",
        "busy": "stopping",
        "paused": "stopping",
    },
    "ended": {"stopping": "dead"},
    "restarting": {"stopping": "starting"},
}
ERRORS = {"EBUSY": WrongStateError, "ESRCH": NotRunningError}

PAIRS = [
    (status, verb, expected)
    for status, row in EXPECTED.items()
    for verb, expected in zip(VERB_NAMES, row, strict=True)
] + [
    (status.value, event, goes.get(status.value, "EBUSY"))
    for event, goes in OBSERVED.items()
    for status in Status
]


def test_the_test_knows_every_pair() -> None:
    assert {(s, e) for s, e, _ in PAIRS} == {(s.value, e.value) for s in Status for e in Event}
    assert {verb.value for verb in VERBS} == set(VERB_NAMES)


@pytest.mark.parametrize(("status", "event", "expected"), PAIRS)
def test_each_pair_moves_or_is_refused_as_the_abi_says(
    status: str, event: str, expected: str
) -> None:
    if expected in ERRORS:
        with pytest.raises(ERRORS[expected]):
            move(Status(status), Event(event))
        return
    to = move(Status(status), Event(event)).status
    assert (to.value if to is not None else "same") == expected


@pytest.mark.parametrize(
    ("status", "event"), [(s, e) for s in Status for e in Event if (s, e) not in TABLE]
)
def test_a_refusal_names_the_status_it_is_in(status: Status, event: Event) -> None:
    with pytest.raises((WrongStateError, NotRunningError), match=f"the agent is {status}"):
        move(status, event)


def test_a_refusal_names_the_verbs_that_would_fit() -> None:
    with pytest.raises(WrongStateError, match="takes kill, start, stop"):
        move(Status.NEW, Event.PAUSE)


@pytest.mark.parametrize("status", [Status.PAUSED])
@pytest.mark.parametrize("event", [Event.STOP, Event.KILL, Event.ENDING])
def test_what_is_frozen_is_thawed_before_it_is_ended(status: Status, event: Event) -> None:
    effects = move(status, event).effects
    assert effects.index(Effect.THAW) < effects.index(Effect.END)


@pytest.mark.parametrize("status", sorted(LIVE))
def test_kill_skips_the_grace_of_whatever_lives(status: Status) -> None:
    assert Effect.SKIP_GRACE in move(status, Event.KILL).effects


@pytest.mark.parametrize("status", [Status.BUSY, Status.READY, Status.IDLE])
def test_pause_freezes_and_resume_thaws(status: Status) -> None:
    assert move(status, Event.PAUSE).effects == (Effect.FREEZE,)
    assert move(Status.PAUSED, Event.RESUME).effects == (Effect.THAW,)


def test_live_is_everything_but_new_and_dead() -> None:
    assert set(Status) - LIVE == {Status.NEW, Status.DEAD}


def test_an_end_that_is_recorded_comes_after_stopping_only() -> None:
    recorded = [pair for pair, to in TABLE.items() if Effect.RECORD_END in to.effects]
    assert recorded == [(Status.STOPPING, Event.ENDED)]


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_no_walk_leaves_dead_but_by_reset(events: list[Event]) -> None:
    status, before = Status.NEW, Status.BUSY
    for event in events:
        try:
            to = move(status, event)
        except (WrongStateError, NotRunningError):
            continue
        if status is Status.DEAD:
            assert event is Event.RESET
        if status is Status.STOPPING:
            assert to.status in (Status.STOPPING, Status.DEAD) or event is Event.RESTARTING
        if to.status is Status.PAUSED and status is not Status.PAUSED:
            before = status
        status = to.status if to.status is not None else before


@given(st.sampled_from(sorted(LIVE)))
def test_every_live_status_reaches_dead(status: Status) -> None:
    ending = move(status, Event.KILL).status
    assert ending is not None
    assert move(ending, Event.ENDED).status is Status.DEAD
