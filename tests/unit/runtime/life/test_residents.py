"""What a resident program says is heard in steps that are short, whatever it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import trio

from runtime.authority.loop import Gentle, LoopMeter
from runtime.ids import MessageId, RunId
from runtime.life.residents import Listener
from runtime.life.streams import Streams
from runtime.records.change import Change
from runtime.records.items import BY_ABORT, BY_CANCEL, Message, MessageStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import Run, RunStatus, Said
from tests.worlds.records import ROOT, World, world_in
from tests.worlds.uncollected import uncollected

#: of processor time, of one step
SECONDS: Final = 0.050
SAID: Final = 256 << 10
#: what costs most to hear: very many lines, and lines that are hard to read
LINES: Final = {
    "pieces": '{"type":"delta","text":"a"}',
    "empty pieces": '{"type":"delta"}',
    "replies": '{"type":"message","text":"a"}',
    "replies to others": '{"type":"message","id":"q"}',
    "no replies": '"type"',
    "brackets": '{"type":' + "[" * 60_000 + "}",
    "lists": '{"type":[' + "[]," * 5000 + "0]}",
    "numbers": '{"type":[' + "1e1," * 3900 + "0]}",
    "escapes": '{"type":"delta","text":"' + r"\u00e4" * 2600 + '"}',
    "quotes": '{"type":"delta","text":"' + r"\"" * 8000 + '"}',
}


RUNNING: Final = Run(id=RunId("run-1"), status=RunStatus.RUNNING)


def resident(world: World, waiting: int = 0) -> tuple[Agent, Message]:
    """One that works on a message, and has others that wait."""
    agent = world.live(world.agents.births.create(ROOT, "talker"))
    world.agents.journal.update(agent, mode="resident", run=RUNNING)
    change = Change()
    for number in range(waiting + 1):
        message = Message(
            agent=agent.index, name=MessageId(f"q{number}"), session=agent.session,
            sender="operator uid:0", provenance="operator", text="a question",
        )  # fmt: skip
        change.make(message)
    world.agents.journal.commit(change)
    first = world.agents.messages.pending(agent)[0]
    change = Change()
    world.agents.messages.deliver(change, agent, first, agent.run.id)
    world.agents.journal.commit(change)
    return agent, first


def listening(world: World, agent: Agent, said: bytes) -> tuple[Listener, Streams]:
    streams = Streams(Gentle(world.agents.accounts.time))
    listener = Listener(world.agents, streams, agent)
    listener.directory.mkdir(parents=True)
    (listener.directory / f"{0:020d}").write_bytes(said)
    return listener, streams


@pytest.mark.parametrize("kind", LINES)
def test_what_is_left_at_the_end_is_heard_in_short_steps(tmp_path: Path, kind: str) -> None:
    line = LINES[kind].encode() + b"\n"
    longest: list[float] = []
    # a machine that does other things is no fault of what is tested
    while (not longest or longest[-1] >= SECONDS) and len(longest) < 3:
        with world_in(tmp_path / str(len(longest))) as world:
            agent, _ = resident(world, waiting=1000)
            listener, _ = listening(world, agent, line * (SAID // len(line)))
            meter = LoopMeter()
            with uncollected():
                trio.run(listener.hear_all, instruments=[meter])
            longest.append(meter.longest)
    assert min(longest) < SECONDS


def test_all_pieces_of_a_reply_are_heard_in_order(world: World) -> None:
    agent, message = resident(world)
    said = b"".join(b'{"type":"delta","text":"%d "}\n' % number for number in range(5000))
    listener, streams = listening(world, agent, said)
    trio.run(listener.hear_all)
    assert streams.of(message.index).text == "".join(f"{number} " for number in range(5000))
    assert message.status is MessageStatus.RUNNING


def test_a_reply_ends_its_message_with_the_pieces_before_it(world: World) -> None:
    agent, message = resident(world)
    said = b'before\n{"type":"delta","text":"one, "}\n{"type":"delta","text":"two"}\n'
    said += b'{"type":"message"}\n{"type":"delta","text":"to nobody"}\n'
    listener, _ = listening(world, agent, said)
    trio.run(listener.hear_all)
    assert (message.status, message.reply) == (MessageStatus.PROCESSED, "one, two")
    kept = (world.agents.documents.directory(agent) / "out" / f"{0:020d}").read_bytes()
    assert kept == b'before\n{"type":"delta","text":"to nobody"}\n'


def test_no_more_than_the_end_of_very_much_is_heard(world: World) -> None:
    agent, message = resident(world)
    listener, _ = listening(world, agent, b'{"type":"error"}\n' + b"x" * SAID)
    trio.run(listener.hear_all)
    assert message.status is MessageStatus.RUNNING


HELLO: Final = b'{"type":"hello","takes":["cancel"]}\n'


@pytest.mark.parametrize(
    ("said", "takes"),
    [
        (HELLO, True),
        (HELLO[:-1], False),
        (b'{"type":"hello","takes":["more","cancel"]}\n', True),
        (b'{"type":"hello","takes":[]}\n', False),
        (b'{"type":"hello","takes":"cancel"}\n', False),
        (b'{"type":"hello"}\n', False),
        (b'{"type":"hallo","takes":["cancel"]}\n', False),
        (b'{"type":"hello","takes":["cancel"]\n', False),
        (b"\n" + HELLO, False),
        (b'{"type":"delta","text":"x"}\n' + HELLO, False),
    ],
)
def test_the_first_line_says_what_a_program_takes(world: World, said: bytes, takes: bool) -> None:
    agent, _ = resident(world)
    listener, _ = listening(world, agent, said)
    trio.run(listener.hear_all)
    assert agent.said.takes_cancel is takes
    out = world.agents.documents.directory(agent) / "out" / f"{0:020d}"
    assert not takes or not out.exists(), "that is no output"


def test_a_line_in_two_pieces_and_a_second_daemon(world: World) -> None:
    agent, _ = resident(world)
    world.agents.journal.update(agent, said=Said(reply_start=7, reply_offset=7))
    listener, streams = listening(world, agent, b"before\n" + HELLO[:9])
    listener.hear()
    with (listener.directory / f"{0:020d}").open("ab") as said:
        said.write(HELLO[9:] + b"more\n")
    again = Listener(world.agents, streams, agent)
    trio.run(again.hear_all)
    assert agent.said.takes_cancel
    world.agents.journal.update(agent, said=replace(agent.said, takes_cancel=False))
    trio.run(Listener(world.agents, streams, agent).hear_all)
    assert not agent.said.takes_cancel, "it was heard, and noted"


@pytest.mark.parametrize("why", [BY_ABORT, BY_CANCEL])
@pytest.mark.parametrize("kind", ["message", "error"])
def test_what_is_being_cancelled_is_aborted_whatever_is_said(
    world: World, why: str, kind: str
) -> None:
    agent, message = resident(world)
    said = Said(takes_cancel=True)
    run = replace(
        RUNNING, status=RunStatus.CANCELLING, cause=why, caused_by="operator uid:7"
    )
    world.agents.journal.update(agent, status=Status.BUSY, run=run, said=said)
    listener, _ = listening(world, agent, b'{"type":"%s","text":"well"}\n' % kind.encode())
    trio.run(listener.hear_all)
    assert (message.status, message.reason) == (MessageStatus.ABORTED, why)
    assert (agent.status, agent.run) == (Status.READY, RUNNING)
    assert '"by":"operator uid:7"' in world.lines(agent)[-1]
