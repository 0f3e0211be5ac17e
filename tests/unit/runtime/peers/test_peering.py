"""Both sides of a connection, and strangers at either."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import MalformedError
from runtime.kernel.handover import Descriptors, read_back, written
from runtime.peers.lease import RATE, SLACK, Grants, Lease
from runtime.peers.peering import (
    CREDIT_MAX,
    PART_MAX,
    Acknowledged,
    BrokenLinkError,
    Bytes,
    Event,
    Hello,
    Host,
    Lead,
    Message,
    Over,
    Peering,
    Want,
)
from runtime.peers.streams import MESSAGE_MAX, Stream
from runtime.peers.talking import _together
from runtime.texts.names import dump_json

_HELLO = {"name": "n1", "as": "", "owner": "ada", "ttl": 30.0, "grace": 5.0}


class Pair:
    """A lead and a host whose connection can be lost; what each side was told."""

    def __init__(self) -> None:
        self.operations, self.facts = Stream(), Stream()
        self.lease = Lease(30.0, 0)
        self.grants = Grants(30.0, 5.0, 0.0)
        self.known = ""
        self.now = 100.0
        self.at_lead: list[Event] = []
        self.at_host: list[Event] = []
        self.connect()

    def connect(self) -> None:
        self.lead = Lead({**_HELLO, "as": self.known}, self.operations, self.grants)
        self.host = Host()

    def exchange(self, size: int = 1 << 20) -> None:
        """Until neither has anything to say, in pieces of ``size`` bytes at most."""
        while toward := [
            (to, told, data)
            for of, to, told in (
                (self.host, self.lead, self.at_lead),
                (self.lead, self.host, self.at_host),
            )
            if (data := of.outgoing())
        ]:
            for to, told, data in toward:
                for at in range(0, len(data), size):
                    for event in to.feed(data[at : at + size], self.now):
                        told.append(event)
                        self._act(to, event)

    def _act(self, at: Peering, event: Event) -> None:
        if isinstance(event, Hello) and isinstance(at, Host):
            self.known = self.known or "r1"
            at.go_on({"as": self.known}, self.facts, self.lease, event)
        elif isinstance(event, Hello) and isinstance(at, Lead):
            at.go_on(event)
        elif isinstance(event, Message):
            (self.facts if at is self.host else self.operations).done(event.number, event.line)
            self.lease.reach(self.facts.got, self.now)

    @property
    def done(self) -> list[tuple[str, str]]:
        return [(each.op, each.agent) for each in self.at_host if isinstance(each, Message)]


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.operations.record("put", "a", what="x")
    made.operations.record("start", "a")
    made.exchange()
    return made


def test_what_was_recorded_before_the_first_hello_is_done_once(pair: Pair) -> None:
    assert pair.done == [("put", "a"), ("start", "a")]
    assert Acknowledged(2) in pair.at_lead and not pair.operations.kept
    pair.facts.record("ended", "a", outcome="done")
    pair.exchange()
    assert [each.said["outcome"] for each in pair.at_lead if isinstance(each, Message)] == ["done"]
    assert not pair.facts.kept and (pair.operations.got, pair.facts.got) == (1, 2)


def test_a_connection_goes_on_where_the_last_one_ended(pair: Pair) -> None:
    pair.operations.record("verb", "a", verb="stop")
    pair.lead.outgoing()  # is lost with the connection
    pair.connect()
    pair.exchange()
    pair.connect()
    pair.exchange()
    assert pair.done == [("put", "a"), ("start", "a"), ("verb", "a")]


def test_lines_before_the_greeting_are_skipped() -> None:
    pair = Pair()
    assert list(pair.lead.feed(b"Welcome to n2!\r\n\xff\xfe\n", 0.0)) == []
    assert pair.lead.outgoing() == b"", "it says nothing before that"
    pair.exchange()
    assert isinstance(pair.at_lead[0], Hello)


@pytest.mark.parametrize(
    ("said", "mistake"),
    [
        (b"ctxfs-peer 4 5\n", "speaks 4-5, here 1-3"),
        (b"ctxfs-peer 0 0\n", "speaks 0-0, here 1-3"),
        (b"ctxfs-peer one\n", "the greeting has no versions"),
        (b"x" * 1000 + b"\n", ""),
        (b"no such command\n" * 5000, "no ctx peer answers"),
        (b"x" * 300_000, "a line of more than"),
    ],
)
def test_other_programs_than_a_peer(said: bytes, mistake: str) -> None:
    lead = Pair().lead
    if not mistake:
        assert list(lead.feed(said, 0.0)) == []
        return
    with pytest.raises(BrokenLinkError, match=mistake):
        list(lead.feed(said, 0.0))


# the lease


def test_a_lease_counts_from_the_request(pair: Pair) -> None:
    pair.host.tick(100.0)
    asked = pair.host.outgoing()
    pair.now = 110.0
    list(pair.lead.feed(asked, 110.0))
    granted = pair.lead.outgoing()
    assert pair.lease.end is None
    list(pair.host.feed(granted, 112.0))
    assert pair.lease.end == 130.0
    assert pair.grants.lost_at() == 110.0 + (30.0 + 5.0 + SLACK) * RATE
    assert pair.host.tick(112.0) == pytest.approx(113.0), "it was due, and is asked for again"


def test_a_grant_waits_for_the_operations_before_it(pair: Pair) -> None:
    pair.operations.record("verb", "a", verb="stop")
    pair.host.tick(100.0)
    list(pair.lead.feed(pair.host.outgoing(), 100.0))
    for event in pair.host.feed(pair.lead.outgoing(), 100.0):
        assert isinstance(event, Message)
    assert pair.lease.end is None, "the stop came, and was not done"
    pair.lease.reach(3, 101.0)
    assert pair.lease.end == 130.0


def test_an_answer_after_the_end_changes_nothing(pair: Pair) -> None:
    pair.host.tick(100.0)
    pair.exchange()
    pair.host.tick(125.0)
    asked = pair.host.outgoing()
    list(pair.lead.feed(asked, 125.0))
    list(pair.host.feed(pair.lead.outgoing(), 130.0))
    assert pair.lease.end == 130.0 and pair.lease.is_over(130.0)
    new = Lease(30.0, 2)
    pair.host.renew(new)
    pair.host.tick(131.0)
    pair.now = 131.0
    pair.exchange()
    assert new.end == 161.0


def test_an_unanswered_request_is_repeated(pair: Pair) -> None:
    assert pair.host.tick(100.0) == 101.0
    assert pair.host.tick(100.5) == 101.0 and pair.host.tick(101.0) == 102.0
    assert pair.host.outgoing().count(b'"ask"') == 2 * 2


def test_who_answers_nothing_or_too_early_is_not_remembered_for_ever() -> None:
    lease = Lease(30.0, 0)
    for number in range(1000):
        lease.ask(number, float(number))
    assert len(lease._asked) <= 64
    lease.granted(0, 0, 1000.0)
    assert lease.end is None, "it is as if that was not answered"
    for number in range(990, 1000):
        lease.granted(number, 0, 1000.0)
    assert lease.end == 999.0 + 30.0
    for number in range(1000, 2000):
        lease.ask(number, float(number))
        lease.granted(number, 1 << 60, float(number))
    assert len(lease._held) <= 64


def test_a_hello_that_nobody_answered_is_read_again() -> None:
    host = Host()
    hello = {"op": "hello", "version": 1, "as": "", "sent": 0, "got": 0, "seen": "", "name": "one"}
    line, rest = json.dumps(hello).encode() + b"\n", b'{"op":"ack","got":0}\n'
    (found,) = host.feed(line, 0.0)
    assert isinstance(found, Hello)
    list(host.feed(rest[:5], 0.0))
    saved, after = host.save(Descriptors(), again=found), Host()
    after.restore(saved)
    (again,) = after.feed(b"", 0.0)
    assert again == found
    stream = Stream()
    after.go_on({"as": "r"}, stream, Lease(30.0, 0), again)
    assert list(after.feed(rest[5:], 0.0)) == [Acknowledged(0)]


def test_who_was_said_to_be_lost_is_over(pair: Pair) -> None:
    pair.grants.over = 2
    pair.host.tick(100.0)
    pair.exchange()
    assert pair.at_host[-1] == Over(2) and pair.lease.end is None
    pair.host.ended(2)
    pair.exchange()
    assert pair.at_lead[-1] == Over(2)
    pair.connect()
    pair.operations.record("put", "b")
    pair.at_host.clear()
    pair.exchange()
    assert pair.at_host[1] == Over(2), "before operations that put new agents there"


# bytes


def test_bytes_come_after_all_else(pair: Pair) -> None:
    pair.lead.want("a", "out", 7, CREDIT_MAX)
    pair.exchange()
    assert pair.at_host[-1] == Want("a", "out", 7, CREDIT_MAX)
    assert pair.lead.credit == 0
    for number in range(4):
        pair.host.give("a", "out", 7 + number * PART_MAX, bytes([number]) * PART_MAX)
    first = pair.host.outgoing(1)
    pair.host.tick(100.0)
    pair.facts.record("ended", "a")
    rest = pair.host.outgoing(10_000)
    assert b"ask" in rest and b"ended" in rest and len(first) > PART_MAX > len(rest)
    got = list(pair.lead.feed(first + rest, 100.0))
    assert isinstance(got[0], Bytes) and got[0].data == bytes(PART_MAX) and got[0].offset == 7
    pair.exchange(1000)
    parts = [each for each in pair.at_lead if isinstance(each, Bytes)]
    whole = b"".join(bytes([number]) * PART_MAX for number in (1, 2, 3))
    assert b"".join(each.data for each in parts) == whole
    assert [each.offset for each in parts[:2]] == [7 + PART_MAX, 7 + PART_MAX + len(parts[0].data)]
    assert pair.lead.credit == 4 * PART_MAX


def test_bytes_may_look_like_frames(pair: Pair) -> None:
    pair.lead.want("a", "out", 0, 100)
    pair.exchange()
    pair.host.give("a", "out", 0, b'\n{"op":"over","upto":9}\n')
    pair.exchange(3)
    got = b"".join(each.data for each in pair.at_lead if isinstance(each, Bytes))
    assert got == b'\n{"op":"over","upto":9}\n'


def test_a_few_bytes_of_a_file_keep_nothing_else_in_memory(pair: Pair) -> None:
    """Who is told of them keeps them until they are written."""
    pair.lead.want("a", "out", 0, CREDIT_MAX)
    pair.exchange()
    for number in range(9):
        pair.host.give("a", "out", number * 70_000, bytes(70_000 if number % 2 else 1))
    pair.exchange()
    pieces = [each.data for each in pair.at_lead if isinstance(each, Bytes)]
    assert [len(each) for each in pieces] == [1, 70_000] * 4 + [1]
    for each in pieces:
        whole = memoryview(each.obj if isinstance(each, memoryview) else each)
        assert whole.nbytes <= 5 * len(each)


@pytest.mark.parametrize("at", [1, 50, 200, PART_MAX, PART_MAX + 100, PART_MAX + 200])
def test_the_next_daemon_goes_on_in_the_midst_of_a_frame(pair: Pair, at: int) -> None:
    pair.lead.want("a", "out", 7, CREDIT_MAX)
    pair.exchange()
    whole = bytes(range(256)) * (PART_MAX // 128)
    for begin in (0, PART_MAX):
        pair.host.give("a", "out", 7 + begin, whole[begin : begin + PART_MAX])
    pair.facts.record("ended", "a", outcome="done")
    said = pair.host.outgoing(1) + pair.host.outgoing(1 << 20)
    found = list(pair.lead.feed(said[:at], pair.now))
    left = read_back(b"".join(written(pair.lead.save(Descriptors()))))
    pair.connect()
    pair.lead.restore(left)
    found += pair.lead.feed(said[at:], pair.now)
    pieces = [each for each in found if isinstance(each, Bytes)]
    assert b"".join(each.data for each in pieces) == whole
    assert [each.offset - 7 for each in pieces] == [
        sum(len(each.data) for each in pieces[:number]) for number in range(len(pieces))
    ]
    assert [each.op for each in found if isinstance(each, Message)] == ["ended"]
    assert pair.lead.lacks and pair.lead.credit == 2 * PART_MAX


def test_one_acknowledgement_is_for_all_that_is_heard(pair: Pair) -> None:
    for agent in "abc":
        pair.operations.record("start", agent)
    pair.host.hears = True
    for event in pair.host.feed(pair.lead.outgoing(1 << 20), pair.now):
        assert isinstance(event, Message)
        pair.facts.done(event.number, event.line)
        if event.agent != "b":
            assert pair.host.outgoing(1 << 20) == b""
        else:
            pair.facts.record("dead", "b")
            assert pair.host.outgoing(1 << 20).count(b'"ack"') == 1, "before what is said"
    pair.host.hears = False
    assert json.loads(pair.host.outgoing(1 << 20)) == {"op": "ack", "got": pair.facts.got}


def test_a_host_does_ends_at_once_and_anything_else_by_itself(pair: Pair) -> None:
    for verb in ("stop", "kill", "stop", "pause", "stop"):
        pair.operations.record("verb", "a", verb=verb)
    pair.operations.record("start", "b")
    pair.lead.want("a", "out", 0, 1)
    for verb in 70 * ("stop",):
        pair.operations.record("verb", "a", verb=verb)
    for _ in range(20):
        pair.operations.record("forget", "a")
    came = pair.host.feed(pair.lead.outgoing(1 << 20), pair.now)
    groups = [
        [each.said.get("verb", each.op) if isinstance(each, Message) else "want" for each in group]
        for group in _together(came, pair.host)
    ]
    assert groups == [
        ["want"], ["stop", "kill", "stop"], ["pause"], ["stop"], ["start"],
        ["stop"] * 64, ["stop"] * 6 + ["forget"] * 10, ["forget"] * 10,
    ]  # fmt: skip


# strangers


def _line(**said: Any) -> bytes:
    return dump_json(said).encode() + b"\n"


@pytest.mark.parametrize(
    ("said", "mistake"),
    [
        (b"hello\n", "no frame"),
        (b"[1]\n", "no frame"),
        (b'{"op":"ask","ask":NaN}\n', "no frame"),
        (b"\xff\n", "no frame"),
        (_line(ask=1), "a frame without an op"),
        (_line(op="grant", ask=1, after=0), "'grant' is nothing that is said here"),
        (_line(op="put", n=1, agent="a"), "'put' is nothing"),
        (_line(op="hello", sent=0, got=0, seen="", version=1, **{"as": ""}), "'hello' is nothing"),
        (_line(op="ask", ask=-1), "'ask' without a right ask"),
        (_line(op="ask", ask=True), "'ask' without a right ask"),
        (_line(op="ask", ask=1 << 63), "'ask' without a right ask"),
        (_line(op="state", n=2, agent="a"), "message 2 comes after 0"),
        (_line(op="state", n=1, agent="a" * 5000), "'state' without a right agent"),
        (_line(op="state", n=1, agent="a", x="y" * MESSAGE_MAX), "a message of more than"),
        (_line(op="state", n=1, agent="a", x="y" * 200_000), "a line of more than"),
        (_line(op="ack", got=3), "message 3 is done, of 2"),
        (_line(op="want", agent="a", file="f", offset=0, credit=CREDIT_MAX + 1), "are asked for"),
        (_line(op="want", agent="a", file="f", offset=0, credit=0), "are asked for"),
        (_line(op="bytes", agent="a", file="f", offset=0, length=1), "1 bytes, of 0"),
        (_line(op="ask", ask=1) * 65, "it asks, and does not read"),
    ],
)
def test_whatever_breaks_the_rules_ends_the_connection(
    pair: Pair, said: bytes, mistake: str
) -> None:
    with pytest.raises(BrokenLinkError, match=mistake):
        list(pair.lead.feed(said, 0.0))


def test_a_host_that_was_greeted_wrongly() -> None:
    for said in (_line(op="put", n=1, agent="a"), _line(op="hello"), b"ctxfs-peer 1 1\n"):
        with pytest.raises(BrokenLinkError):
            list(Host().feed(said, 0.0))
    with pytest.raises(BrokenLinkError, match="hello in version 4"):
        hello = {**_HELLO, "op": "hello", "version": 4, "sent": 0, "got": 0, "seen": ""}
        list(Host().feed(_line(**hello), 0.0))


def test_a_grant_that_was_not_asked_for(pair: Pair) -> None:
    with pytest.raises(BrokenLinkError, match="which was not asked"):
        list(pair.host.feed(_line(op="grant", ask=1, after=0), 0.0))


def test_a_message_that_is_too_long_is_not_recorded() -> None:
    stream = Stream()
    with pytest.raises(MalformedError):
        stream.record("put", "a", text="x" * MESSAGE_MAX)
    assert stream.sent == 0 and not stream.kept


# states of before


def _copy(stream: Stream) -> Stream:
    first = (stream._done, stream._mark_of_done)
    return Stream(stream.kept, first=first, got=(stream.got, stream.seen))


def test_a_state_of_before_does_not_fit(pair: Pair) -> None:
    before = _copy(pair.operations), _copy(pair.facts)
    assert before[0].fits(pair.facts.hello()) and pair.facts.fits(before[0].hello())
    pair.operations.record("verb", "a", verb="stop")
    pair.facts.record("ended", "a")
    pair.exchange()
    assert pair.operations.fits(pair.facts.hello()) and pair.facts.fits(pair.operations.hello())
    assert not pair.facts.fits(before[0].hello()), "the lead was put back"
    assert not pair.operations.fits(before[1].hello()), "the host was put back"
    before[0].record("verb", "a", verb="kill")
    before[0].record("forget", "a")
    assert not before[0].fits(pair.facts.hello()), "other messages with the numbers of old ones"


# any order of what may happen


@given(st.lists(st.tuples(st.sampled_from("lhfcx"), st.integers(1, 400)), max_size=40))
def test_each_message_is_done_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    pair = Pair()
    for step, number in steps:
        if step == "l":
            pair.operations.record("verb", f"a{number}")
        elif step == "h":
            pair.facts.record("state", f"a{number}")
        elif step == "f":
            pair.exchange(number)
        elif step == "c":
            pair.connect()
        else:  # a part of what is sent is lost with the connection
            pair.exchange(number)
            pair.operations.record("verb", "lost")
            for event in pair.host.feed(pair.lead.outgoing()[:number], pair.now):
                pair.at_host.append(event)
                pair._act(pair.host, event)
            pair.connect()
    pair.connect()
    pair.exchange()
    for told, sent, stream in (
        (pair.at_host, pair.operations, pair.facts),
        (pair.at_lead, pair.facts, pair.operations),
    ):
        numbers = [each.number for each in told if isinstance(each, Message)]
        assert numbers == list(range(1, sent.sent + 1)) and stream.got == sent.sent
        assert not sent.kept and not sent.undone
