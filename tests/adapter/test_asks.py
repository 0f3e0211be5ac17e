"""Asks as directories: who asks, who answers and who never does, and the inbox of all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pyfuse3
import pytest

from runtime.caller import Caller
from runtime.ids import Incarnation
from runtime.records.change import Change
from runtime.records.items import AskStatus, Message
from runtime.records.lifecycle import Status
from runtime.records.model import Outcome
from tests.adapter.test_who_may import Stage, outcome, staged
from tests.worlds.records import ROOT, add_end, inside
from tests.worlds.tree import STRANGER, USER, Mounted, Waiter, complete, mounted_in, refused

D = "agent/boss.d"
KID = "agent/kid.d"


def mkdir(mounted: Mounted, path: str) -> None:
    directory, name = os.path.split(path)
    context = pyfuse3.RequestContext()
    complete(mounted.ops.mkdir, mounted.inode(directory), os.fsencode(name), 0o755, context)


def rmdir(mounted: Mounted, path: str) -> None:
    directory, name = os.path.split(path)
    complete(mounted.ops.rmdir, mounted.inode(directory), os.fsencode(name),
             pyfuse3.RequestContext())  # fmt: skip


@pytest.fixture
def mounted(mounted: Mounted) -> Mounted:
    """A root agent ``boss`` of mode turn with a child ``kid`` that has a child ``pup``."""
    boss = mounted.world.may_create(mounted.live(mounted.make("boss", USER), run="r1"))
    mounted.agents.journal.update(boss, mode="turn")
    kid = mounted.world.may_create(mounted.live(mounted.make("kid", inside(boss)), run="r2"))
    mounted.live(mounted.make("pup", inside(kid)), run="r3")
    return mounted


def me(mounted: Mounted, name: str) -> Caller:
    return inside(mounted.agent(name))


def ask(mounted: Mounted, name: str = "kid", title: str = "q", **files: str) -> str:
    """An open one, by its path."""
    path = f"agent/{name}.d/ask/{title}"
    with mounted.as_(me(mounted, name)):
        mkdir(mounted, path)
        question = files.pop("question", "May I?\n")
        for file, text in {**files, "question": question}.items():
            mounted.put(f"{path}/{file}", text)
    return path


def inbox(mounted: Mounted, caller: Caller = USER) -> list[dict[str, Any]]:
    with mounted.as_(caller):
        return [json.loads(line) for line in mounted.get("asks").splitlines()]


def events(mounted: Mounted, name: str = "kid") -> list[dict[str, Any]]:
    lines = map(json.loads, mounted.world.lines(mounted.agent(name)))
    return [event for event in lines if event["type"].startswith("ask.")]


def messages(mounted: Mounted, name: str) -> list[Message]:
    return mounted.agents.messages.pending(mounted.agent(name))


# asking


def test_an_agent_asks_with_echo_and_is_answered(mounted: Mounted) -> None:
    path = ask(mounted, options="yes\nno Not today\n", detail="to main\n", default="no\n",
               deadline="1h\n")  # fmt: skip
    assert mounted.get(f"{path}/status") == "open\n"
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "yes\nbut gently\nplease\n")
    shown = {name: mounted.get(f"{path}/{name}") for name in ("status", "answer", "by")}
    assert shown == {
        "status": "answered\n",
        "answer": "yes\nbut gently\nplease\n",
        "by": "operator uid:1000\n",
    }
    assert mounted.get(f"{path}/asked_at") <= mounted.get(f"{path}/ended_at")
    opened, ended = events(mounted)
    assert (opened["type"], opened["ask_kind"]) == ("ask.open", "question")
    assert (ended["type"], ended["status"], ended["answer"]) == ("ask.end", "answered", "yes")
    assert (opened["by"], ended["by"]) == ("agent:kid run:r2", "operator uid:1000")


def test_a_text_is_in_no_event(mounted: Mounted) -> None:
    path = ask(mounted)
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "a secret\n")
    assert mounted.get(f"{path}/answer") == "a secret\n"
    assert "secret" not in "".join(mounted.world.lines(mounted.agent("kid")))


@pytest.mark.parametrize("party", [ROOT, USER, STRANGER, "boss", "pup"])
def test_nobody_asks_in_the_name_of_an_agent(mounted: Mounted, party: Caller | str) -> None:
    caller = me(mounted, party) if isinstance(party, str) else party
    with mounted.as_(me(mounted, "kid")):
        mkdir(mounted, f"{KID}/ask/q")
    with mounted.as_(caller):
        assert outcome(lambda: mkdir(mounted, f"{KID}/ask/x")) in ("EACCES", "ENOENT")
        assert outcome(lambda: mounted.put(f"{KID}/ask/q/question", "x\n")) in ("EACCES", "ENOENT")
    assert mounted.get(f"{KID}/ask/q/status") == "new\n"


ASKED_FILES = (
    *("kind", "question", "detail", "options", "form", "default", "deadline", "life"),
)
FORM = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer", "maximum": 3}},
    "required": ["name"],
})  # fmt: skip


@pytest.mark.parametrize(
    ("files", "text", "said"),
    [
        ({}, "\n", "the question is empty: write one line"),
        ({}, "x" * 2048 + "\n", "one line of at most 1024 bytes"),
        ({}, "a\nb\n", "question takes one value, on one line"),
        ({"options": "a\nb\n", "default": "c\n"}, "x\n", 'default: "c" is no option; use a, b'),
        ({"form": FORM, "default": "{}\n"}, "x\n", 'default: "name" is missing'),
    ],
)
def test_a_bad_question_is_refused_where_it_is_written(
    mounted: Mounted, files: dict[str, str], text: str, said: str
) -> None:
    with mounted.as_(me(mounted, "kid")):
        mkdir(mounted, f"{KID}/ask/q")
        for file, value in files.items():
            mounted.put(f"{KID}/ask/q/{file}", value)
        fh = mounted.open(f"{KID}/ask/q/question", os.O_WRONLY | os.O_TRUNC)
        with refused("EINVAL"):
            mounted.write(fh, text.encode())
        mounted.close(fh)
        assert said in mounted.reason
    assert mounted.get(f"{KID}/ask/q/status") == "new\n"
    assert not inbox(mounted)


@pytest.mark.parametrize(
    ("before", "file", "text", "said"),
    [
        ({}, "options", "".join(f"o{n}\n" for n in range(17)), "17 options are too many"),
        ({}, "options", "yes\nyes Again\n", '"yes" is an option twice'),
        ({}, "options", f"{'x' * 65}\n", "is not an option"),
        ({}, "options", "\u202ex\n", "is not an option"),
        ({"options": "yes\n"}, "form", FORM + "\n", "an ask has options or a form, not both"),
        ({"form": FORM}, "options", "yes\n", "an ask has options or a form, not both"),
        ({}, "form", "yes\n", ""),
        ({}, "form", '{"type":"object"}\n', "is not a form; use"),
        ({}, "form", '{"type":"object","properties":{"a":{"type":"object"}}}\n', "is of no type"),
        ({}, "kind", "order\n", "question, permission"),
        ({}, "to", "somebody\n", "operator, supervisor"),
        ({}, "life", "ever\n", "agent, run"),
        ({}, "deadline", "soon\n", "is not a time"),
    ],
)
def test_a_bad_field_is_refused_where_it_is_written(
    mounted: Mounted, before: dict[str, str], file: str, text: str, said: str
) -> None:
    with mounted.as_(me(mounted, "kid")):
        mkdir(mounted, f"{KID}/ask/q")
        for name, value in before.items():
            mounted.put(f"{KID}/ask/q/{name}", value)
        fh = mounted.open(f"{KID}/ask/q/{file}", os.O_WRONLY | os.O_TRUNC)
        with refused("EINVAL"):
            mounted.write(fh, text.encode())
        mounted.close(fh)
        assert said in mounted.reason


def test_a_form_may_have_several_lines(mounted: Mounted) -> None:
    path = ask(mounted, form=json.dumps(json.loads(FORM), indent=2) + "\n")
    (row,) = inbox(mounted)
    assert row["form"] == json.loads(FORM)
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", '{\n  "name": "x",\n  "count": 2\n}\n')
    assert json.loads(mounted.get(f"{path}/answer")) == {"name": "x", "count": 2}


@pytest.mark.parametrize(
    ("given", "answer", "said"),
    [
        ({"options": "yes\nno\n"}, "maybe\n", '"maybe" is no option; use yes, no'),
        ({"options": "yes\nno\n"}, "\n", '"" is no option; use yes, no'),
        ({}, " \n", "the answer is empty"),
        ({"form": FORM}, "yes\n", "use an object of JSON with the fields name, count"),
        ({"form": FORM}, "{}\n", '"name" is missing'),
        ({"form": FORM}, '{"name":"x","count":"y"}\n', '"count": "y" is not of type integer'),
        ({"form": FORM}, '{"name":1}\n', '"name": "1" is not of type string'),
        ({"form": FORM}, '{"name":"x","count":4}\n', "maximum is 3"),
        ({"form": FORM}, '{"name":"x","size":4}\n', '"size" is no field; use name, count'),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_where_it_is_written(
    mounted: Mounted, given: dict[str, str], answer: str, said: str
) -> None:
    path = ask(mounted, **given)
    with mounted.as_(USER):
        fh = mounted.open(f"{path}/answer", os.O_WRONLY | os.O_TRUNC)
        with refused("EINVAL"):
            mounted.write(fh, answer.encode())
        mounted.close(fh)
        assert said in mounted.reason
    assert mounted.get(f"{path}/status") == "open\n"


def test_what_is_asked_is_not_changed_any_more(mounted: Mounted) -> None:
    path = ask(mounted, options="yes\n")
    with mounted.as_(me(mounted, "kid")):
        for file in ASKED_FILES:
            with refused("EBUSY"):
                mounted.put(f"{path}/{file}", "x\n")
        with refused("EACCES"):
            mounted.put(f"{path}/to", "supervisor\n")


# who answers


def test_by_default_only_operators_answer(mounted: Mounted) -> None:
    path = ask(mounted)
    with mounted.as_(me(mounted, "boss")):
        with refused("EACCES"):
            mounted.put(f"{path}/answer", "yes\n")
        assert 'the ask "q" of "kid" is for operators' in mounted.reason
    with mounted.as_(ROOT):
        mounted.put(f"{path}/answer", "yes\n")
    assert mounted.get(f"{path}/by") == "operator uid:0\n"


def test_a_supervisor_that_is_asked_answers(mounted: Mounted) -> None:
    path = ask(mounted, to="supervisor\n")
    with mounted.as_(me(mounted, "boss")):
        mounted.put(f"{path}/answer", "yes\n")
    assert mounted.get(f"{path}/by") == "agent:boss run:r1\n"


def test_a_supervisor_passes_a_question_on_and_does_not_take_it_back(mounted: Mounted) -> None:
    path = ask(mounted, to="supervisor\n")
    with mounted.as_(me(mounted, "boss")):
        held = mounted.open(f"{path}/answer", os.O_WRONLY | os.O_TRUNC)
        mounted.write(held, b"yes\n")
        mounted.put(f"{path}/to", "operator\n")
        with refused("EACCES"):  # what was staged is not the answer, either
            mounted.close(held)
        with refused("EACCES"):
            mounted.put(f"{path}/to", "supervisor\n")
        with refused("EACCES"):
            mounted.put(f"{path}/answer", "yes\n")
    with mounted.as_(USER):
        mounted.put(f"{path}/to", "supervisor\n")
    with mounted.as_(me(mounted, "boss")):
        mounted.put(f"{path}/answer", "yes\n")
    assert [event["type"] for event in events(mounted)] == [
        "ask.open", "ask.to", "ask.to", "ask.end"
    ]  # fmt: skip


def test_a_root_agent_asks_its_operators(mounted: Mounted) -> None:
    path = ask(mounted, "boss", to="supervisor\n")
    assert mounted.get(f"{path}/to") == "operator\n"
    assert inbox(mounted)[0]["to"] == "operator"


def _as(name: str) -> Callable[[Mounted], Caller]:
    return lambda mounted: me(mounted, name)


def _earlier(mounted: Mounted) -> Caller:
    """What is left of an incarnation of the supervisor that is over."""
    boss = mounted.agent("boss")
    return Caller(boss.uid, boss.gid, 7, boss.index, Incarnation("0123456789abcdef"))


def _unknown(mounted: Mounted) -> Caller:
    return Caller(0, 0, 7, known=False)


#: who never answers what a supervisor is asked, and operators neither
NEVER: dict[str, Callable[[Mounted], Caller]] = {
    "the asker": _as("kid"),
    "its child": _as("pup"),
    "its sister": _as("sister"),
    "an agent of the same owner": _as("other"),
    "one of another owner": _as("foreign"),
    "one with every right by policy": _as("friend"),
    "an earlier incarnation": _earlier,
    "somebody unknown": _unknown,
    "another user": lambda mounted: STRANGER,
}


def _write(mounted: Mounted, path: str) -> None:
    mounted.put(f"{path}/answer", "yes\n")


def _append(mounted: Mounted, path: str) -> None:
    mounted.put(f"{path}/answer", "yes\n", os.O_APPEND)


def _truncate(mounted: Mounted, path: str) -> None:
    mounted.open(f"{path}/answer", os.O_RDWR | os.O_TRUNC)


def _readdress(mounted: Mounted, path: str) -> None:
    mounted.put(f"{path}/to", "operator\n")


def _remove(mounted: Mounted, path: str) -> None:
    """And ask anew in its place."""
    rmdir(mounted, path)
    mkdir(mounted, path)


def _settle(mounted: Mounted, path: str) -> None:
    """As the tool does, without a file."""
    asker = mounted.agent("kid")
    found = mounted.agents.asks.find(asker, "q")
    caller = mounted.identity.caller
    try:
        mounted.agents.asks.answer(caller, asker, found, "yes")
    except Exception as error:
        raise pyfuse3.FUSEError(13) from error


TRIES: dict[str, Callable[[Mounted, str], None]] = {
    "write": _write, "append": _append, "truncate": _truncate, "to": _readdress,
    "rmdir": _remove, "tool": _settle,
}  # fmt: skip


@pytest.mark.parametrize("way", TRIES)
@pytest.mark.parametrize("who", NEVER)
def test_nobody_answers_who_must_not(mounted: Mounted, who: str, way: str) -> None:
    """54 tries, and none leaves an answer; the agent itself may only withdraw."""
    boss = mounted.agent("boss")
    mounted.live(mounted.make("sister", inside(boss)))
    mounted.live(mounted.make("other", USER))
    mounted.live(mounted.make("foreign", STRANGER))
    friend = mounted.live(mounted.make("friend", USER))
    policy = friend.policy + "allow friend_t agent:* create,start,stop,read,write,detach\n"
    mounted.agents.journal.update(friend, policy=policy)
    path = ask(mounted, to="supervisor\n")
    found = mounted.agents.asks.find(mounted.agent("kid"), "q")
    with mounted.as_(NEVER[who](mounted)):
        if way == "rmdir" and who == "the asker":
            TRIES[way](mounted, path)
            assert found.status is AskStatus.WITHDRAWN and not found.answer
            return
        assert outcome(lambda: TRIES[way](mounted, path)) in ("EACCES", "ENOENT", "EPERM")
    assert (found.status, found.answer, found.to) == (AskStatus.OPEN, "", "supervisor")


def test_what_was_opened_before_is_judged_when_it_is_written(mounted: Mounted) -> None:
    """A descriptor is that of who opened it, and only for as long as that one may."""
    path = ask(mounted, to="supervisor\n")
    boss, kid = mounted.agent("boss"), mounted.agent("kid")
    with mounted.as_(inside(boss)):
        held = mounted.open(f"{path}/answer", os.O_WRONLY | os.O_TRUNC)
        looked = mounted.open(f"{path}/answer")
    with mounted.as_(inside(kid)), refused("EACCES"):
        mounted.open(f"{path}/answer", os.O_WRONLY)
    mounted.agents.journal.update(kid, life="detached")  # nobody supervises it any more
    with refused("EACCES"):
        mounted.write(held, b"yes\n")
    mounted.agents.journal.update(kid, life="owned")
    mounted.agents.journal.update(boss, status=Status.DEAD)
    with refused("EACCES"):
        mounted.write(held, b"yes\n")
    with refused("EACCES"):
        mounted.read(looked)
    assert mounted.agents.asks.find(kid, "q").status is AskStatus.OPEN


@pytest.mark.parametrize("gone", ["ask", "asker"])
def test_a_descriptor_answers_only_what_it_was_opened_for(mounted: Mounted, gone: str) -> None:
    """Not what has its name later: another question, or one of another agent."""
    path = ask(mounted, "pup", to="supervisor\n")
    with mounted.as_(me(mounted, "kid")):
        held = mounted.open(f"{path}/answer", os.O_WRONLY | os.O_TRUNC)
        mounted.write(held, b"yes\n")
    if gone == "ask":
        with mounted.as_(me(mounted, "pup")):
            rmdir(mounted, path)
    else:
        mounted.agents.journal.update(mounted.agent("pup"), status=Status.DEAD)
        with mounted.as_(ROOT):
            rmdir(mounted, "agent/pup.d")
        mounted.live(mounted.make("pup", inside(mounted.agent("kid"))))
    ask(mounted, "pup", to="supervisor\n")
    assert outcome(lambda: mounted.close(held)) in ("ENOENT", "ESTALE")
    assert mounted.get(f"{path}/status") == "open\n"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with mounted_in(tmp_path_factory.mktemp("who")) as mounted:
        yield staged(mounted)


#: who may write which file, by what is asked of whom and whether it is open
WRITERS = {
    ("answer", "operator"): "Oo",
    ("answer", "supervisor"): "Oos",
    ("to", "operator"): "Oos",
    ("to", "supervisor"): "Oos",
}


@pytest.mark.parametrize("kind", ["root", "detached", "child"])
@pytest.mark.parametrize(("file", "to"), WRITERS)
def test_who_writes_an_open_ask(stage: Stage, kind: str, file: str, to: str) -> None:
    mounted, agent = stage.mounted, stage.objects[kind]
    asks = mounted.agents.asks
    item = asks.find(agent, "item")
    with mounted.agents.journal.changing() as change:
        change.put(item, status=AskStatus.OPEN, to=to)
    wanted = WRITERS[file, to]
    if kind == "detached" and file == "answer":
        wanted = wanted.replace("s", "")  # it made that one, and does not supervise it
    for party, caller in stage.callers[kind].items():
        with mounted.as_(caller):
            path = f"agent/{kind}.d/ask/item/{file}"
            found = outcome(lambda p=path: stage.open(stage.find(p)[0], os.O_WRONLY))  # type: ignore[misc]
        assert (found == "yes") is (party in wanted), (party, found)


# one answer


def test_the_second_one_is_told_who_was_first(mounted: Mounted) -> None:
    path = ask(mounted, options="yes\nno\n")
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "no\n")
    with mounted.as_(ROOT):
        with refused("EBUSY"):
            mounted.put(f"{path}/answer", "yes\n")
        ended = mounted.get(f"{path}/ended_at").strip()
        assert f'is over: answered by operator uid:1000 at {ended}: "no"' in mounted.reason
    assert mounted.get(f"{path}/answer") == "no\n"


def _two_at_once(mounted: Mounted, count: int) -> None:
    """Each of two opens and writes before the other one closes, in every order."""
    for n in range(count):
        path = ask(mounted, title=f"q{n}", to="supervisor\n")
        sides = [(USER, b"a\n", "operator uid:1000"), (me(mounted, "boss"), b"b\n", "agent:boss")]
        handles = []
        for caller, text, _ in sides if n % 2 else reversed(sides):
            with mounted.as_(caller):
                fh = mounted.open(f"{path}/answer", os.O_WRONLY | os.O_TRUNC)
                mounted.write(fh, text)
                handles.append((fh, caller, text))
        (first, winner, text), (second, loser, _) = handles if n % 3 else reversed(handles)
        with mounted.as_(winner):
            mounted.close(first)
        with mounted.as_(loser):
            with refused("EBUSY"):
                mounted.close(second)
            by = mounted.get(f"{path}/by").strip()
            assert by in mounted.reason
        assert mounted.get(f"{path}/answer") == text.decode()
        with mounted.as_(me(mounted, "kid")):
            rmdir(mounted, path)


def test_of_two_at_once_one_wins(mounted: Mounted) -> None:
    _two_at_once(mounted, 6)


@pytest.mark.long
def test_of_two_at_once_one_wins_a_thousand_times(mounted: Mounted) -> None:
    _two_at_once(mounted, 1000)


# ends


def test_the_end_of_its_agent_withdraws_what_is_asked(mounted: Mounted) -> None:
    path, kid = ask(mounted), mounted.agent("kid")
    change = Change()
    add_end(mounted.agents, change, kid, Outcome.DONE)
    mounted.agents.journal.note(change)
    assert mounted.get(f"{path}/status") == "withdrawn\n"
    with mounted.as_(USER), refused("EBUSY"):
        mounted.put(f"{path}/answer", "yes\n")
    assert not inbox(mounted)


def test_the_end_of_a_run_withdraws_what_that_asks(mounted: Mounted) -> None:
    stays, goes = ask(mounted, title="stays"), ask(mounted, title="goes", life="run\n")
    kid = mounted.agent("kid")
    with mounted.agents.journal.changing() as change:
        mounted.agents.asks.run_over(change, kid)
    assert mounted.get(f"{stays}/status") == "open\n"
    assert mounted.get(f"{goes}/status") == "withdrawn\n"


def test_between_runs_nothing_is_asked_for_a_run(mounted: Mounted) -> None:
    mounted.live(mounted.make("idle", USER))
    with mounted.as_(me(mounted, "idle")):
        mkdir(mounted, "agent/idle.d/ask/q")
        mounted.put("agent/idle.d/ask/q/life", "run\n")
        with refused("EBUSY"):
            mounted.put("agent/idle.d/ask/q/question", "x\n")
        assert "has no run: write agent to life" in mounted.reason


def test_a_paused_agent_can_be_answered(mounted: Mounted) -> None:
    path = ask(mounted)
    mounted.agents.journal.update(mounted.agent("kid"), status=Status.PAUSED, frozen=True)
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "yes\n")
    assert mounted.get(f"{path}/status") == "answered\n"


@pytest.mark.settings(asks=2)
def test_there_are_only_so_many_that_are_not_over(mounted: Mounted) -> None:
    for title in ("a", "b"):
        ask(mounted, title=title)
    with mounted.as_(me(mounted, "kid")):
        with refused("EDQUOT"):
            mkdir(mounted, f"{KID}/ask/c")
        assert '"kid" has 2 asks that have not ended, the configured maximum' in mounted.reason
        rmdir(mounted, f"{KID}/ask/a")
        mkdir(mounted, f"{KID}/ask/c")


@pytest.mark.settings(owner_asks=10)
def test_an_owner_has_only_so_many(mounted: Mounted) -> None:
    for n in range(9):  # a tenth is left
        ask(mounted, "boss" if n % 2 else "kid", title=f"q{n}")
    with mounted.as_(me(mounted, "kid")):
        mkdir(mounted, f"{KID}/ask/more")
        with refused("EDQUOT"):
            mounted.put(f"{KID}/ask/more/question", "x\n")
        for said in ("owner_asks", "has 9 of 10", "answer some", '"kid" holds most (5)'):
            assert said in mounted.reason
    with mounted.as_(USER):
        mounted.put(f"{KID}/ask/q0/answer", "yes\n")
    with mounted.as_(me(mounted, "kid")):
        mounted.put(f"{KID}/ask/more/question", "x\n")


# the supervisor


def test_a_supervisor_gets_a_message_until_it_is_over(mounted: Mounted) -> None:
    path = ask(mounted, to="supervisor\n", options="yes\nno Never\n")
    (message,) = messages(mounted, "boss")
    assert (message.provenance, message.sender) == ("child", "agent:kid")
    assert json.loads(message.text) == {
        "type": "ask", "agent": "kid", "ask": "q", "question": "May I?",
        "options": ["yes", "no Never"], "asked_at": mounted.get(f"{path}/asked_at").strip(),
    }  # fmt: skip
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "yes\n")
    assert not messages(mounted, "boss")


def test_what_operators_are_asked_no_supervisor_is_told(mounted: Mounted) -> None:
    path = ask(mounted)
    assert not messages(mounted, "boss")
    with mounted.as_(USER):
        mounted.put(f"{path}/to", "supervisor\n")
    assert len(messages(mounted, "boss")) == 1
    with mounted.as_(USER):
        mounted.put(f"{path}/to", "operator\n")
    assert not messages(mounted, "boss")


# the inbox


def test_everybody_sees_what_is_asked_of_him_and_what_he_asks(mounted: Mounted) -> None:
    ask(mounted, "pup", "p", to="supervisor\n")
    ask(mounted, "kid", "k")
    ask(mounted, "boss", "b", options="yes\n", deadline="1h\n", default="yes\n",
        detail="x" * 2000)  # fmt: skip
    mounted.live(mounted.make("foreign", STRANGER))
    ask(mounted, "foreign", "f")

    def seen(caller: Caller) -> list[str]:
        return [row["ask"] for row in inbox(mounted, caller)]

    assert seen(ROOT) == ["p", "k", "b", "f"]
    assert seen(USER) == ["p", "k", "b"]
    assert seen(STRANGER) == ["f"]
    assert seen(me(mounted, "boss")) == ["b"]
    assert seen(me(mounted, "kid")) == ["p", "k"]
    assert seen(me(mounted, "pup")) == ["p"]
    assert seen(me(mounted, "foreign")) == ["f"]
    row = inbox(mounted)[2]
    assert list(row) == [
        "agent", "ask", "owner", "kind", "to", "question", "options", "form", "default",
        "deadline", "asked_at", "run", "detail",
    ]  # fmt: skip
    assert (row["agent"], row["owner"], row["run"]) == ("boss", 1000, "r1")
    assert row["detail"] == "x" * 1024 and row["options"] == ["yes"]


def test_control_characters_are_escaped(mounted: Mounted) -> None:
    ask(mounted, question="a\x1b]0;b\x07\u202ec\x9b\n", detail="\x7f\n")
    with mounted.as_(USER):
        text = mounted.get("asks")
    assert text.removesuffix("\n").isprintable()
    assert json.loads(text)["question"] == "a\x1b]0;b\x07\u202ec\x9b"


def test_the_inbox_and_agents_are_told_when_something_is_asked(mounted: Mounted) -> None:
    handles = {path: mounted.open(path) for path in ("asks", "agents")}
    for fh in handles.values():
        mounted.read(fh)
    poller, waiters = mounted.base.cache.poller, {path: Waiter() for path in handles}
    for path, fh in handles.items():
        complete(mounted.ops.poll, mounted.inode(path), fh, waiters[path], None)
    path = ask(mounted)
    for inode in poller._again.copy():
        poller.changed(inode)
    assert all(waiter.notified for waiter in waiters.values())
    rows = {row["name"]: row for row in map(json.loads, mounted.get("agents").splitlines())}
    assert {name: row["asks"] for name, row in rows.items()} == {"boss": 0, "kid": 1, "pup": 0}
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "yes\n")
    rows = {row["name"]: row for row in map(json.loads, mounted.get("agents").splitlines())}
    assert rows["kid"]["asks"] == 0


def test_what_waits_for_its_end_is_let_go(mounted: Mounted) -> None:
    path = ask(mounted)
    found = mounted.agents.asks.find(mounted.agent("kid"), "q")
    file = mounted.agents.wait_files.path(found.wait_token)
    assert complete(mounted.ops.readlink, mounted.inode(f"{path}/wait"),
                    pyfuse3.RequestContext()) == os.fsencode(file)  # fmt: skip
    assert file.is_fifo()
    with mounted.as_(USER):
        mounted.put(f"{path}/answer", "yes\n")
    assert file.is_file()
    with mounted.as_(me(mounted, "kid")):
        rmdir(mounted, path)
    assert not file.exists()
