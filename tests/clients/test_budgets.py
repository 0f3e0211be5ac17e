"""The command lines behind relay, meter and proxy: counted to the token, and ended at the limit by
one refusal.

What makes each of them end is its own, and may change with each version of it (``PARTS``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, SECONDS, Cli, User, scripted
from tests.system.test_proxy import HOSTS, metered, nginx
from tests.worlds.daemon import daemon_of, read, wait_dead, wait_until
from tests.worlds.lists import certify

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is missing")

#: what an answer of the model costs
IN, OUT = 10, 5


@dataclass(frozen=True)
class Part:
    """What of a refusal (``runtime/metering/charging.py``) a command line obeys, and what it
    shows."""

    ends: str
    shown: str


PARTS = {
    "claude": Part("the header x-should-retry: false", "error.message of the body"),
    "codex": Part(
        "the error type usage_limit_reached of the body", "the header x-codex-promo-message"
    ),
    "gemini": Part(
        "QuotaFailure with a quotaId that ends in PerDay, and ErrorInfo QUOTA_EXHAUSTED, among the "
        "details of the body",
        "error.message of the body",
    ),
}


@pytest.fixture(params=CLIS, ids=str)
def counted(request: pytest.FixtureRequest, socket: Path) -> Iterator[tuple[User, Model]]:
    """A user of a machine whose network leads to the meter, that to the proxy, and that to the
    model by TLS."""
    cli: Cli = request.param
    base = socket.parent
    certificate, key = certify(base, *HOSTS.values())
    options = ("--certificate", str(certificate), "--key", str(key))
    with (
        closing(Model(base, socket, *options)) as model,
        nginx(base / "proxy", model.port, certificate) as behind,
        metered(base, behind) as sockets,
    ):
        path = sockets / f"{cli.network}.sock"
        network = f"{{socket: {path}, port: 18081, header: counters}}"
        with daemon_of(config=f"networks: {{{cli.network}: {network}}}\n") as daemon:
            yield User(daemon, model, cli), model


def usage(user: User, name: str) -> dict[str, str]:
    lines = read(user.agent(name), "usage").splitlines()
    return dict(line.split("=") for line in lines if line.startswith(("tokens.", "requests")))


def answered(model: Model) -> int:
    """How often the model answered, and said so what that cost: not what is free."""
    return sum("step" in json.loads(line) for line in model.log.read_text().splitlines())


LOOK = {"shell": "echo looked at $PWD"}


def options(user: User, *more: str) -> list[str]:
    return ["--agent", user.cli.name, "--model", user.cli.model, "--name", "bot", *more]


def test_what_it_uses_is_counted_to_the_token(counted: tuple[User, Model]) -> None:
    user, model = counted
    task = scripted("Look.", LOOK, LOOK, {"text": "done: {last}"})
    assert "looked at" in user.ctx("spawn", *options(user, "--wait"), task)
    count = answered(model)
    assert count >= 3
    wanted = {"tokens.in": IN * count, "tokens.out": OUT * count, "tokens.estimated": 0,
              "requests": count, "requests.refused": 0}  # fmt: skip
    found = usage(user, "bot")
    assert {key: int(found[key]) for key in wanted} == wanted


@pytest.mark.parametrize("before", [0, 1], ids=["at once", "after an answer"])
def test_at_the_limit_one_refusal_ends_it(counted: tuple[User, Model], before: int) -> None:
    user, model = counted
    limit = (IN + OUT) * before
    task = scripted("Look.", LOOK, LOOK, {"text": "never"})
    user.ctx("spawn", *options(user, "--limit", f"tokens.max={limit}"), task)
    agent = user.agent("bot")
    wait_dead(agent, timeout=SECONDS)
    part = PARTS[user.cli.name]
    name, said = user.cli.name, read(agent, "out") + read(agent, "log")
    refused = int(usage(user, "bot")["requests.refused"])
    assert answered(model) == before, "more than the limit passes"
    assert refused == 1, f"{name} asks {refused} times: it no longer obeys {part.ends}"
    sentence = f"ctxfs: tokens.max={limit} of agent:bot is used up ({limit})"
    assert sentence in said, f"{name} no longer shows {part.shown}: {said}"
    reason = read(agent, "reason").strip()
    assert reason.startswith("exit:") and reason != "exit:0", (
        f"{name} ends with {reason} after a refusal: it no longer obeys {part.ends}"
    )
    seconds = since_the_limit(user)
    assert seconds < 5, f"{name} goes on for {seconds} s: it no longer obeys {part.ends}"
    print(f"  {name}: {reason} {seconds:.1f} s after it was refused")


def since_the_limit(user: User) -> float:
    """From the refusal to the end of the run."""
    wait_until(
        lambda: any(event["type"] == "agent.limit" for event in user.daemon.events("bot")),
        "the limit is told", timeout=SECONDS,
    )  # fmt: skip
    events = user.daemon.events("bot")
    (limit,) = (event for event in events if event["type"] == "agent.limit")
    (end,) = (event for event in events if event["type"] == "run.end")
    return (_time(end) - _time(limit)).total_seconds()


def _time(event: dict[str, str]) -> datetime:
    return datetime.fromisoformat(event["ts"])
