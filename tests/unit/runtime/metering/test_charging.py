"""Who pays, what waits, what is refused, and what is charged for an answer that breaks off."""

from __future__ import annotations

import json
import os
import random
import struct

import pytest

from runtime.metering.charging import Request, refusal
from runtime.metering.counters import Payer
from runtime.metering.reading import Asked, Reader, Usage, form_of
from runtime.metering.settings import Rate, Rates
from runtime.records.spent import (
    NO_LIMIT,
    NO_RATE,
    PLACES,
    SIZE,
    SPENT,
    TOKENS_USED,
    TROUBLE_SHIFT,
)

RATES = {"m-*": Rate(5000, 25000, 500, 6250), "*": Rate(1000, 1000)}


def account(name: str, tokens: int = NO_LIMIT, cost: int = NO_LIMIT) -> Payer:
    fd = os.memfd_create(name)
    os.truncate(fd, SIZE)
    os.pwrite(fd, name.encode(), SPENT)
    os.pwrite(fd, struct.pack("=2Q", tokens, cost), PLACES["tokens_max"])
    made = Payer(fd)
    os.close(fd)
    return made


def request(*payers: Payer, model: str = "m-1", most: int | None = 50, size: int = 40,
            rates: Rates = RATES) -> Request:  # fmt: skip
    return Request(payers, rates, Asked(model, most, size))


def go(made: Request) -> Request:
    assert made.judge() is None
    made.sent()
    return made


def test_all_payers_are_charged_what_is_more_than_before() -> None:
    kid, boss = account("kid"), account("boss")
    made = go(request(kid, boss))
    for usage in (Usage(10, 4, 2, 1), Usage(10, 4, 2, 30), Usage(10, 4, 2, 30), Usage(9, 0, 0, 3)):
        made.charge(usage)
    made.end()
    for each in (kid, boss):
        assert [each[n] for n in ("input", "cached", "output", "requests")] == [10, 4, 30, 1]
        assert each["cost"] == 4 * 5000 + 4 * 500 + 2 * 6250 + 30 * 25000
        assert (each.held, each.held_cost, each.flying) == (0, 0, 0)


def test_the_model_that_answers_says_the_rate() -> None:
    one = account("one")
    made = go(request(one))
    made.charge(Usage(10, 0, 0, 10), "other")
    assert one["cost"] == 20 * 1000


def test_a_payer_above_its_limit_refuses_all_below_and_is_named() -> None:
    kid, boss = account("kid"), account("boss", tokens=100)
    made = go(request(kid, boss))
    made.charge(Usage(60, 0, 0, 55))
    made.end()
    refused = request(kid, boss).judge()
    said = "ctxfs: tokens.max=100 of agent:boss is used up (115)"
    assert refused == said
    assert kid["refused"] == boss["refused"] == 1
    assert kid["trouble"] == TOKENS_USED << TROUBLE_SHIFT | 1
    assert boss["trouble"] == TOKENS_USED << TROUBLE_SHIFT
    assert request(account("stranger")).judge() is None


def test_a_limit_of_cost_needs_a_rate() -> None:
    one = account("one", cost=1_000_000)
    said = 'ctxfs: no rate for model "m-1", and cost.max=0.001000 of agent:one'
    assert request(one, rates={}).judge() == said
    assert one["trouble"] == NO_RATE << TROUBLE_SHIFT
    made = go(request(one))
    made.charge(Usage(0, 0, 0, 40))
    made.end()
    said = "ctxfs: cost.max=0.001000 of agent:one is used up (0.001000)"
    assert request(one).judge() == said
    free = account("free")
    go(request(free, rates={})).charge(Usage(1, 0, 0, 1))
    assert (free["unpriced"], free["cost"]) == (1, 0)


def test_near_a_limit_requests_go_one_after_the_other() -> None:
    one = account("one", tokens=100)
    first = go(request(one))  # holds 10 + 50
    assert request(one).judge() is one
    first.charge(Usage(10, 0, 0, 5))
    assert (one.held, request(one).judge()) == (45, one)
    first.end()
    second = go(request(one, most=10_000))  # alone it may be more than is left
    assert request(one).judge() is one
    second.end()
    assert one.held == 0


@pytest.mark.parametrize(("usage", "text", "seconds", "most", "wanted"), [
    (Usage(), 0, 0.0, 50, Usage(13, 0, 0, 0)),
    (Usage(), 300, 0.0, 50, Usage(13, 0, 0, 50)),
    (Usage(), 300, 0.0, None, Usage(13, 0, 0, 100)),
    (Usage(7, 0, 0, 1), 30, 3.0, None, Usage(7, 0, 0, 300)),
    (Usage(7, 0, 0, 60), 30, 0.1, 50, Usage(7, 0, 0, 60)),
])  # fmt: skip
def test_what_breaks_off_is_charged_on_the_safe_side(
    usage: Usage, text: int, seconds: float, most: int | None, wanted: Usage
) -> None:
    one = account("one")
    made = go(request(one, most=most))
    form = form_of("anthropic", "/v1/messages")
    assert form is not None
    made.charge(usage)
    seen = Reader(form)
    seen.usage, seen.text = usage, text
    made.settle(seen, seconds)
    made.end()
    assert (one["input"], one["output"]) == (wanted.input, wanted.output)
    assert one["estimated"] == sum(wanted) - sum(usage)


def test_a_number_that_would_wrap_stays_at_its_most() -> None:
    one = account("one")
    one.add("input", NO_LIMIT - 1)
    one.add("input", 5)
    assert one["input"] == NO_LIMIT


@pytest.mark.parametrize("seed", range(30))
def test_no_subtree_uses_more_than_its_limit_and_what_was_in_flight(seed: int) -> None:
    """Random trees, requests whose estimates are right: the sum is at most the limit, and one
    answer for each that went out alone."""
    chance = random.Random(seed)
    limit = chance.randrange(200, 5000)
    boss = account("boss", tokens=limit)
    kids = [account(f"k{n}", tokens=chance.choice((NO_LIMIT, 900))) for n in range(5)]
    flying: list[tuple[Request, int]] = []
    largest = total = 0
    for _ in range(600):
        if chance.random() < 0.6:
            size, most = chance.randrange(4, 400), chance.randrange(1, 200)
            made = request(chance.choice(kids), boss, size=size, most=most)
            if made.judge() is None:
                used = size // 4 + chance.randrange(most + 1)
                flying.append((made, used))
                largest = max(largest, size // 4 + most)
        elif flying:
            made, used = flying.pop(chance.randrange(len(flying)))
            made.charge(Usage(used // 2, output=used - used // 2))
            made.end()
            total += used
    for made, used in flying:
        made.charge(Usage(used))
        made.end()
        total += used
    assert boss.tokens == total == sum(kid.tokens for kid in kids) <= limit + largest
    assert (boss.held, boss.flying) == (0, 0)


@pytest.mark.parametrize("api", ["anthropic", "openai", "gemini"])
def test_each_api_says_it_in_its_own_words(api: str) -> None:
    headers, body = refusal(api, "a sentence")
    said = json.loads(body)["error"]
    assert said["message"] == "a sentence" and headers["x-should-retry"] == "false"
    assert headers["x-codex-promo-message"] == "a sentence"
    found = said.get("type") or [each["@type"].rpartition(".")[2] for each in said["details"]]
    assert found in ("rate_limit_error", "usage_limit_reached", ["QuotaFailure", "ErrorInfo"])
