"""What answers say that was used, however they come, and what requests ask for."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.metering import reading
from runtime.metering.reading import Form, Reader, UncountableError, Usage, asked, form_of
from tests.unit.runtime.metering.answers import ANSWERS, Answer


def form(answer: Answer) -> Form:
    found = form_of(answer.api, answer.path)
    assert found is not None
    return found


def reader(answer: Answer, *, hides: bool = False) -> Reader:
    return Reader(form(answer), answer.kind, answer.encoding, hides)


def pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[begin:end] for begin, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("packed", [False, True])
def test_any_cut_gives_what_the_answer_says(name: str, packed: bool) -> None:
    answer = ANSWERS[name].packed() if packed else ANSWERS[name]
    for cut in range(len(answer.body) + 1):
        read = reader(answer)
        shown = b"".join(map(read.feed, (answer.body[:cut], answer.body[cut:])))
        assert (shown + read.finish(), read.exact) == (answer.body, True)
        assert (read.usage, read.model) == (answer.usage, answer.model)


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cuts_give_the_same(name: str, cuts: list[int]) -> None:
    answer = ANSWERS[name]
    read, before = reader(answer), Usage()
    shown = b""
    for piece in pieces(answer.body, cuts):
        shown += read.feed(piece)
        assert all(now >= then for now, then in zip(read.usage, before, strict=True))
        before = read.usage
    assert (shown + read.finish(), read.usage) == (answer.body, answer.usage)


@pytest.mark.parametrize("name", ANSWERS)
def test_who_has_the_last_byte_finds_all_of_it_counted(name: str) -> None:
    answer = ANSWERS[name]
    read = reader(answer)
    shown = b""
    for at in range(len(answer.body)):
        shown += read.feed(answer.body[at : at + 1])
        if shown == answer.body:
            assert read.exact or answer.api == "gemini"
            assert read.usage == answer.usage


@pytest.mark.parametrize("name", ANSWERS)
def test_what_breaks_off_is_not_exact_and_says_how_much_was_seen(name: str) -> None:
    answer = ANSWERS[name]
    read = reader(answer)
    read.feed(answer.body[: len(answer.body) // 2])
    assert not read.exact
    assert read.text > 0 or answer.kind.startswith("text")
    assert all(a <= b for a, b in zip(read.usage, answer.usage, strict=True))


@pytest.mark.parametrize(("said", "exact"), [
    ('"promptTokenCount":9,"totalTokenCount":9', True),  # it did not want to answer
    ('"promptTokenCount":9,"candidatesTokenCount":4,"totalTokenCount":13', True),
    ('"promptTokenCount":9', False), ('"candidatesTokenCount":4', False),
    ('"promptTokenCount":9,"totalTokenCount":13', False), ('"totalTokenCount":13', False),
    ('"promptTokenCount":9,"candidatesTokenCount":4,"totalTokenCount":20', False), ("", False),
])  # fmt: skip
def test_what_is_left_out_of_an_answer_makes_it_inexact(said: str, exact: bool) -> None:
    """A client may choose which fields of an answer Gemini shows: ``?fields=``."""
    read = reader(ANSWERS["gemini"])
    read.feed(b'{"usageMetadata":{%s}}' % said.encode())
    read.finish()
    assert read.exact is exact


@given(cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_a_chunk_that_nobody_asked_for_is_not_shown(cuts: list[int]) -> None:
    answer = ANSWERS["chat, streamed"]
    read = reader(answer, hides=True)
    shown = b"".join(map(read.feed, pieces(answer.body, cuts))) + read.finish()
    events = shown.split(b"\n\n")
    assert read.usage == answer.usage and b'"choices": []' not in shown
    wanted = answer.body.split(b"\n\n")
    assert events == [event for event in wanted if b'"choices": []' not in event]


@pytest.mark.parametrize("value", ["-1", "1.5", "1e3", '"7"', "true", "null", "[]", str(1 << 41)])
def test_what_is_no_number_of_tokens_counts_nothing(value: str) -> None:
    body = f'{{"type":"message","usage":{{"input_tokens":{value},"output_tokens":3}}}}'.encode()
    read = reader(ANSWERS["messages"])
    read.feed(body)
    read.finish()
    assert read.usage == Usage(output=3)


@given(
    st.binary(max_size=300), st.sampled_from(sorted(ANSWERS)), st.sampled_from(["", "gzip", "br"])
)
def test_nothing_that_an_upstream_says_is_an_error(body: bytes, name: str, encoding: str) -> None:
    read = reader(ANSWERS[name]._replace(encoding=encoding))
    assert read.feed(body) + read.finish() == body


def test_what_is_too_long_passes_and_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EVENT_MAX", 200)
    for name in ("messages", "messages, streamed", "gemini, streamed"):
        answer = ANSWERS[name]
        read = reader(answer)
        body = answer.body.replace(b"9999999", b"9" * 300)
        shown = b"".join(read.feed(body[at : at + 7]) for at in range(0, len(body), 7))
        assert shown + read.finish() == body
        assert not read.exact and read.text >= 200


def test_what_follows_on_something_too_long_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EVENT_MAX", 200)
    read = reader(ANSWERS["gemini, streamed"])
    read.feed(b'data: {"usageMetadata":{"promptTokenCount":9,"totalTokenCount":9}}\n\n')
    read.feed(b"data: " + b"x" * 300)
    read.finish()
    assert (read.usage, read.exact) == (Usage(9), False)


# requests


@pytest.mark.parametrize(("api", "path"), [
    ("anthropic", "/v1/messages/batches"), ("anthropic", "/v1/messages/"),
    ("openai", "/v1/messages"), ("openai", "/v1/files"),
    ("openai", "//v1/responses"), ("gemini", "/v1beta/models"),
    ("gemini", "/v1beta/models/a/b:generateContent"), ("gemini", "/v1beta/models/a:embedContent"),
    ("anthropic", "/v1/%6dessages"),
])  # fmt: skip
def test_what_cannot_be_counted_has_no_form(api: str, path: str) -> None:
    assert form_of(api, path) is None


def ask(name: str, **values: Any) -> reading.Asked:
    return asked(form(ANSWERS[name]), json.dumps(values).encode())[0]


def test_what_is_asked_for() -> None:
    found = ask("messages", model="m", max_tokens=5)
    assert (found.model, found.most) == ("m", 5)
    assert ask("responses", model="m", max_output_tokens=5).most == 5
    assert ask("chat", max_tokens=5, max_completion_tokens=6).most == 6
    assert ask("gemini", generationConfig={"maxOutputTokens": 7}).most == 7
    assert ask("gemini", contents=[]).model == "gemini-2.5-pro"
    assert ask("messages", model="m").most is None
    assert asked(form(ANSWERS["messages"]), b"{ }") == (reading.Asked("", None, 3), b"{ }")
    assert ask("chat", max_tokens=5, n=3).most == 15
    assert ask("gemini", generationConfig={"maxOutputTokens": 7, "candidateCount": 2}).most == 14


def test_a_stream_of_chat_says_what_it_used() -> None:
    for asks, options, hides in (
        ("", {"include_usage": True}, True),
        (',"stream_options":{"include_usage":false}', {"include_usage": True}, True),
        (',"stream_options":{"include_usage":true,"x":1}', {"include_usage": True, "x": 1}, False),
    ):
        found, body = asked(form(ANSWERS["chat"]), b'{"stream":true%s}' % asks.encode())
        assert (json.loads(bytes(body))["stream_options"], found.hides) == (options, hides)
        assert found.size == len(body)
    assert not ask("chat", model="m").hides


@pytest.mark.parametrize(("body", "status"), [
    (b"", 400), (b'{"\x9c":1}', 400), (b"[]", 400),
    (b"{", 400), (b"[" * 100_000, 400), (b'{"background":true}', 403),
    (b'{"background":false,"background":true}', 403), (b'{"background":1}', 403),
])  # fmt: skip
def test_what_cannot_be_counted_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(UncountableError) as refused:
        asked(form(ANSWERS["responses"]), body)
    assert refused.value.args[0] == status


def test_of_two_values_with_one_name_one_goes_out() -> None:
    body = b'{"background":true,"background":false,"a":[1, 2]}'
    _, sent = asked(form(ANSWERS["responses"]), body)
    assert sent == b'{"background":false,"a":[1, 2]}'
