"""Payers of requests: whether one may go out, and what it cost. Pure.

The *payers* of a request are the agent that makes it and all above it by lineage. Cost is in 10⁻⁹
of the operator's unit.

A request holds an estimate at each account until its answer has ended. Who would be above a limit
with what is held waits for the end of another one there: near its limit a subtree works one
request at a time, and exceeds it by what one estimate was short by.

Trouble of an account is why its agent, or one below it, was refused, which ctxd tells of when it
changes. It is over when a request passes; a model without a rate stays what it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from runtime.metering.counters import Payer
from runtime.metering.reading import Asked, Reader, Usage
from runtime.metering.settings import Rate, Rates
from runtime.records.spent import COST_USED, NO_LIMIT, NO_RATE, TOKENS_USED, TROUBLE_SHIFT
from runtime.texts.limits import show_cost

#: bytes of text in a token, for what is held, and for what is charged: that is on the safe side
_HELD_BYTES: Final = 4
_CHARGED_BYTES: Final = 3
#: tokens of an answer that are held at most
_HELD_OUTPUT: Final = 4096
#: tokens that a model may make in a second, as far as is charged for an answer that breaks off
_A_SECOND: Final = 100


def rate_of(rates: Rates, model: str) -> Rate | None:
    return next((rate for pattern, rate in rates.items() if fnmatchcase(model, pattern)), None)


class Request:
    """One request, from its judgement until its answer has ended."""

    def __init__(self, payers: Sequence[Payer], rates: Rates, asked: Asked) -> None:
        self._payers = payers
        self._rates = rates
        self._model, self._most = asked.model, asked.most
        self._rate = rate_of(rates, asked.model)
        self._size = asked.size
        output = _HELD_OUTPUT if asked.most is None else min(asked.most, _HELD_OUTPUT)
        estimate = Usage(self._size // _HELD_BYTES, output=output)
        self._held = sum(estimate)
        self._held_cost = self._rate.of(estimate) if self._rate else 0
        self._charged = Usage()
        self._cost = 0
        self._flies = False

    def judge(self) -> str | Payer | None:
        """Why it does not go out, in one sentence; the account of which it waits for an end; None
        once it goes out, until ``end``."""
        for number, payer in enumerate(self._payers):
            kind, sentence = self._refused(payer)
            if kind:
                for each in self._payers:
                    each.add("refused", 1)
                payer.tell(kind << TROUBLE_SHIFT)
                self._payers[0].tell(kind << TROUBLE_SHIFT | number)
                return sentence
        for payer in self._payers:
            if payer.flying and payer.is_above(self._held, self._held_cost):
                return payer
        self._flies = True
        for payer in self._payers:
            payer.flying += 1
            if payer["trouble"] >> TROUBLE_SHIFT != NO_RATE:
                payer.tell(0)
        self._hold(self._held, self._held_cost)
        return None

    def _refused(self, payer: Payer) -> tuple[int, str]:
        """Why, and the sentence; 0 if it may go out."""
        of = f"of agent:{payer.name}"
        most, cost_max = payer["tokens_max"], payer["cost_max"]
        if payer.tokens >= most != NO_LIMIT:
            return TOKENS_USED, f"ctxfs: tokens.max={most} {of} is used up ({payer.tokens})"
        limit = f"cost.max={show_cost(cost_max)} {of}"
        if self._rate is None and cost_max != NO_LIMIT:
            model = json.dumps(self._model[:128])
            return NO_RATE, f"ctxfs: no rate for model {model}, and {limit}"
        if (cost := payer["cost"]) >= cost_max != NO_LIMIT:
            return COST_USED, f"ctxfs: {limit} is used up ({show_cost(cost)})"
        return 0, ""

    def sent(self) -> None:
        """It is with those who may charge for it."""
        for payer in self._payers:
            payer.add("requests", 1)
            payer.add("unpriced", self._rate is None)

    def _hold(self, tokens: int, cost: int) -> None:
        for payer in self._payers:
            payer.held += tokens
            payer.held_cost += cost

    def charge(self, usage: Usage, model: str = "", *, estimated: bool = False) -> None:
        """Charges what is known of its answer now: only what is more than before is added."""
        now = Usage(*map(max, self._charged, usage))
        if now == self._charged:
            return
        more = Usage(*(new - old for new, old in zip(now, self._charged, strict=True)))
        rate = rate_of(self._rates, model or self._model) or self._rate
        cost = max(0, (rate.of(now) if rate else 0) - self._cost)
        tokens = more.input + more.output
        for payer in self._payers:
            for number, count in more._asdict().items():
                payer.add(number, count)
            payer.add("cost", cost)
            payer.add("estimated", tokens if estimated else 0)
        self._charged, self._cost = now, self._cost + cost
        freed, freed_cost = min(tokens, self._held), min(cost, self._held_cost)
        self._held, self._held_cost = self._held - freed, self._held_cost - freed_cost
        self._hold(-freed, -freed_cost)

    def settle(self, seen: Reader, seconds: float) -> None:
        """Charges what is known, and, if the answer broke off, what may have been used."""
        self.charge(seen.usage, seen.model)
        if seen.exact:
            return
        output = max(seen.text // _CHARGED_BYTES, int(seconds * _A_SECOND))
        output = output if self._most is None else min(output, self._most)
        given = seen.usage.input or self._size // _CHARGED_BYTES
        guess = seen.usage._replace(input=given, output=max(seen.usage.output, output))
        self.charge(guess, seen.model, estimated=True)

    def end(self) -> None:
        """Nothing more comes of it."""
        if self._flies:
            self._flies = False
            self._hold(-self._held, -self._held_cost)
            for payer in self._payers:
                payer.flying -= 1
                payer.ended.unpark_all()


_DETAIL: Final = "type.googleapis.com/google.rpc."
#: what makes clients try no request again, and show the sentence
_ERRORS: Final[dict[str, dict[str, Any]]] = {
    "anthropic": {"type": "rate_limit_error"},
    "openai": {"type": "usage_limit_reached", "code": "insufficient_quota"},
    "gemini": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [
        {"@type": f"{_DETAIL}QuotaFailure", "violations": [{"quotaId": "ctxfsPerDay"}]},
        {"@type": f"{_DETAIL}ErrorInfo", "reason": "QUOTA_EXHAUSTED", "domain": "ctxfs"},
    ]},
}  # fmt: skip


def refusal(api: str, sentence: str) -> tuple[dict[str, str], bytes]:
    """(headers, body) of an answer 429 as an API refuses what is above a quota."""
    body: dict[str, Any] = {"type": "error"} if api == "anthropic" else {}
    body["error"] = {**_ERRORS[api], "message": sentence}
    headers = {"x-should-retry": "false", "x-codex-promo-message": sentence}
    return headers, json.dumps(body).encode()
