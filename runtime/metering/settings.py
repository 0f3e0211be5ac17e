"""The configuration of the meter: its networks, and what tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Final

from runtime.errors import MalformedError, StartupError
from runtime.kernel.users import find_user
from runtime.metering.reading import APIS, Usage
from runtime.records.config import FALLBACK_RELAY_ID
from runtime.texts.names import quote
from runtime.texts.yaml_marks import MisplacedError
from runtime.texts.yaml_values import choice, duration, map_of, read_settings, record, socket

_RELAY_USER: Final = "ctxfs-relay"
_PRICE_MAX: Final = 10**6


@dataclass(frozen=True, slots=True)
class Network:
    """Where relays come in, and where what they ask goes out."""

    api: Annotated[str, choice(*APIS)]
    socket: Annotated[str, socket]
    upstream: Annotated[str, socket]


def _price(value: Any) -> int:
    """Cost of a million tokens, as 10⁻⁹ of the unit for one."""
    if type(value) not in (int, float) or not 0 <= value <= _PRICE_MAX:
        raise MalformedError(f"{value!r} is no price of a million tokens, from 0 to {_PRICE_MAX}")
    price = Decimal(str(value)) * 1000
    if price != int(price):
        raise MalformedError(f"{value!r} is finer than a thousandth")
    return int(price)


@dataclass(frozen=True, slots=True)
class Rate:
    """Cost of a token, in 10⁻⁹ of the unit; ``cached`` and ``written`` may be as ``in_``."""

    in_: Annotated[int, _price]
    out: Annotated[int, _price]
    cached: Annotated[int | None, _price] = None
    written: Annotated[int | None, _price] = None

    def of(self, usage: Usage) -> int:
        rates = self.in_, self.cached, self.written, self.out
        plain = usage._replace(input=max(0, usage.input - usage.cached - usage.written))
        return sum(map(mul, plain, (self.in_ if rate is None else rate for rate in rates)))


#: patterns of names of models; the first that matches counts
Rates = Mapping[str, Rate]


def _networks(value: Any) -> dict[str, Network]:
    found = _read_networks(value)
    taken = {network.upstream: name for name, network in found.items()}
    for name, network in found.items():
        if other := taken.get(network.socket):
            said = f"socket {quote(network.socket)} is that of {other}"
            raise MisplacedError({(name,): said})
        taken[network.socket] = name
    return {network.socket: network for network in found.values()}


_read_networks: Final = map_of(str, record(Network), "names to {api, socket, upstream}")


def _relay(value: Any) -> int:
    user = find_user(str(value))
    if user is None and value != _RELAY_USER:
        raise MalformedError(f"no user {quote(str(value))}")
    return FALLBACK_RELAY_ID if user is None else user.pw_uid


@dataclass(slots=True)
class Settings:
    """``networks`` by their sockets; ``relay_user`` is the uid of relays; ``drain`` is seconds: how
    long an answer is read that nobody waits for any more."""

    networks: Annotated[dict[str, Network], _networks] = field(default_factory=dict)
    drain: Annotated[float, duration] = 5.0
    relay_user: Annotated[int, _relay] = field(default_factory=lambda: _relay(_RELAY_USER))
    rates: Annotated[
        Rates, map_of(str, record(Rate), "patterns to {in, cached, written, out}")
    ] = field(default_factory=dict)


def load(path: Path) -> Settings:
    """The settings in a file; ``StartupError`` names it, the line, and what is wrong."""
    settings, marked = read_settings(path, Settings)
    if not marked.mistakes and not settings.networks:
        marked.mistake((), "no networks: write networks: {NAME: {api, socket, upstream}}")
    if marked.mistakes:
        raise StartupError("\n".join(map(str, marked.in_order())))
    return settings
