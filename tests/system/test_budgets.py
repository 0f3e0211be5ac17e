"""What is used of models is counted for an agent and all above it, and ends at their limits."""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import networks
from tests.worlds.daemon import (
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.models import Metered, metered
from tests.worlds.spenders import TOKENS, spend, tokens, usage

#: asks a model as often as it is told, and says what it got
ASKS = """
import json, sys, urllib.request, urllib.error
for model in sys.argv[1:]:
    body = json.dumps({"model": model, "max_tokens": 50, "stream": model.endswith("7")}).encode()
    try:
        with urllib.request.urlopen("http://127.0.0.1:8080/v1/messages", body) as answer:
            said = answer.read().decode()
            print(answer.status, len(said))
    except urllib.error.HTTPError as error:
        print(error.code, json.loads(error.read())["error"]["message"])
    except OSError as error:
        print("error", error)
"""
#: both have it; argv: a path that no agent is to reach
_ASKS_AS = """
import os, socket, sys, time
BODY = b'{"model": "m-5-20", "max_tokens": 9}'
HEAD = b"POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n"
REQUEST = HEAD % len(BODY) + BODY
PROXY = b"\\r\\n\\r\\n\\0\\r\\nQUIT\\n\\x21\\x21\\0\\x24" + bytes.fromhex(
    "fd6374786673" + "0000" + sys.argv[2]) * 2 + b"\\0\\1\\0\\1"
def ask(made, before=b""):
    try:
        made.sendall(before + REQUEST)
        return made.recv(12)[9:].decode() or "closed"
    except OSError as error:
        return "closed"
def local(path="/run/ctx/net/models"):
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(path)
    except OSError as error:
        return None
    return made
"""
_HANDS_ON = f"""{_ASKS_AS}
hand = socket.socket(socket.AF_UNIX)
hand.bind("/gate/hand")
hand.listen()
print("listening", flush=True)
peer, _ = hand.accept()
held = socket.create_connection(("127.0.0.1", 8080)), local()
fds = [*(each.fileno() for each in held), os.open("/run/ctx/net", os.O_PATH)]
socket.send_fds(peer, [b"x"], fds)
time.sleep(1000)
"""
_IS_HANDED = f"""{_ASKS_AS}
hand = local("/gate/hand")
_, (tcp, unix, directory), _, _ = socket.recv_fds(hand, 1, 3)
print("handed on", *(ask(socket.socket(fileno=fd)) for fd in (tcp, unix)))
other = local(f"/proc/self/fd/{{directory}}/models")
print("another's", ask(other) if other else "closed")
print("own", ask(local()), ask(socket.create_connection(("127.0.0.1", 8080))))
print("as another", ask(local(), PROXY))
print("the meter", local(sys.argv[1]))
print("over", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def models() -> Iterator[Metered]:
    with (
        tempfile.TemporaryDirectory(prefix="ctxtest-models-") as directory,
        metered(Path(directory)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def daemon(models: Metered) -> Iterator[Daemon]:
    network = f"{{socket: {models.socket}, port: 8080, header: counters}}"
    with daemon_of(config=f"networks: {{models: {network}}}\n") as made:
        yield made


def ask(daemon: Daemon, name: str, *models: str, **files: str) -> Path:
    """An agent that asks these models, one after the other."""
    program = f"exec({ASKS!r})"  # on one line
    return daemon.make(name, f"python3 -c {shlex.quote(program)} {' '.join(models)}",
                       **files, policy=f"allow {name}_t network:models connect")


def start(agent: Path) -> list[str]:
    """What its program said, once it is over."""
    write(agent / "ctl", "start")
    wait_dead(agent)
    return read(agent, "out").splitlines()


def said(agent: Path, line: str) -> str:
    """Why a limit is refused."""
    with pytest.raises(OSError):
        write(agent / "limits", line)
    return read(agent, "error")


def told(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    return [event for event in daemon.events(name) if event["type"] == "agent.limit"]


def test_what_is_used_is_counted_and_ends_at_the_limit(daemon: Daemon) -> None:
    agent = ask(daemon, "one", "m-10-20", "m-1-7", "m-70-900", "m-1-1", "m-1-1")
    write(agent / "limits", "tokens.max=1000\ncost.max=2.5")
    said = start(agent)
    assert [line.split()[0] for line in said] == ["200", "200", "200", "429", "429"]
    assert said[3] == "429 ctxfs: tokens.max=1000 of agent:one is used up (1008)"
    assert usage(agent) == {
        "tokens.in": "81", "tokens.cached": "0", "tokens.written": "0", "tokens.out": "927",
        "tokens.estimated": "0", "cost": "0.023580", "requests": "3", "requests.refused": "2",
        "requests.unpriced": "0", "tokens.left": "0", "cost.left": "2.476420",
    }  # fmt: skip
    (event,) = told(daemon, "one")
    assert {key: event[key] for key in ("limit", "of", "max", "used")} == {
        "limit": "tokens.max", "of": "one", "max": "1000", "used": "1008",
    }  # fmt: skip
    sentence = 'tokens.max=1000 of "one" is used up (1008)'
    assert [read(agent, name).count(sentence) for name in ("log", "error")] == [1, 1]
    write(agent / "limits", "tokens.max=2000\ncost.max=max")
    found = usage(agent)
    assert found["tokens.left"] == "992" and "cost.left" not in found, "as limits are now"


def test_what_is_used_is_shown_everywhere(daemon: Daemon, models: Metered) -> None:
    boss = daemon.make("shown", "sleep 1000", policy="delegate shown_t network:models connect")
    write(boss / "ctl", "start")
    wait_status(boss, "busy")
    before = samples(daemon)
    kid = ask(daemon, "small", "m-5-20", "m-1-7", parent="agent:shown")
    assert start(kid)[1].startswith("200")
    after = samples(daemon)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        'tokens_total{owner="0",kind="in"}': 6, 'tokens_total{owner="0",kind="out"}': 27,
        'cost_total{owner="0"}': pytest.approx(0.000705),
        'model_requests_total{owner="0",answer="passed"}': 2,
    }  # fmt: skip
    daemon.ctx("rm", "small")
    assert samples(daemon) == after, "what is gone was used"
    lines = daemon.ctx("tree", "--sort", "tokens", "shown").stdout.splitlines()
    assert [line.split()[-2:] for line in lines] == [["TOKENS", "COST"], ["33", "0.00"]]
    status = json.loads(daemon.ctx("status", "--json", "shown").stdout)
    assert (status["usage"]["tokens.in"], status["usage"]["cost"]) == (6, 0.000705)
    assert "33 (6 in, 27 out), cost 0.00" in daemon.ctx("status", "shown").stdout
    called = daemon.ctx("tool", "call", "AgentGet", '{"agent_id": "shown"}')
    answer = json.loads(called.stdout)
    assert answer["usage"]["tokens.out"] == 27 and answer["usage"]["processes"] >= 1
    incarnation = read(boss, "incarnation").strip()
    parts = (incarnation[at : at + 4] for at in range(0, 16, 4))
    who = daemon.ctx("who", f"fd63:7478:6673:0:{':'.join(parts)}").stdout
    assert who == f"shown of uid 0, life {incarnation}, busy\n"
    found = networks.check_networks(dict(
        line.split("=", 1) for line in (daemon.root / "status").read_text().splitlines()
    ))  # fmt: skip
    judged = {what.replace(str(models.socket.parent), ""): level for level, what, _ in found}
    assert judged["network:models: a meter listens"] == "ok"
    assert judged["the networks in /meter.yaml are those of ctxd"] == "ok"
    write(boss / "ctl", "kill")
    wait_dead(boss)


def samples(daemon: Daemon) -> dict[str, float]:
    """What metrics tell of models."""
    lines = (line.removeprefix("ctxfs_") for line in read(daemon.root, "metrics").splitlines())
    told = (line.rpartition(" ") for line in lines)
    families = ("tokens_total{", "cost_total{", "model_requests_total{")
    return {name: float(value) for name, _, value in told if name.startswith(families)}


def test_a_limit_covers_all_below_it_detached_ones_too(daemon: Daemon) -> None:
    boss = daemon.make("boss", "sleep 1000", policy="delegate boss_t network:models connect",
                       limits="tokens.max=30")
    write(boss / "ctl", "start")
    wait_status(boss, "busy")
    kid = ask(daemon, "kid", "m-5-20", "m-5-20", "m-5-20", parent="agent:boss", life="detached")
    sister = ask(daemon, "sister", "m-5-20", parent="agent:boss")
    write(sister / "limits", "tokens.max=1000")
    said = start(kid)
    assert [line.split()[0] for line in said] == ["200", "200", "429"], (said, read(kid, "log"))
    assert start(sister) == ["429 ctxfs: tokens.max=30 of agent:boss is used up (50)"]
    write(boss / "limits", "tokens.max=60")
    again = ask(daemon, "again", "m-5-20", "m-5-20", parent="agent:boss")
    assert [line.split()[0] for line in start(again)] == ["200", "429"]
    assert (usage(boss)["tokens.in"], usage(boss)["tokens.out"]) == ("15", "60")
    assert usage(boss)["tokens.left"] == usage(sister)["tokens.left"] == "0"
    assert [event["max"] for event in told(daemon, "boss")] == ["30", "60"]
    write(boss / "ctl", "kill")
    wait_dead(boss)
    assert usage(boss)["tokens.out"] == "60"


@pytest.mark.parametrize(("line", "why"), [
    ("tokens.max=1M", "1000000"), ("tokens.max=-1", "digits"), ("tokens.max=1e6", "digits"),
    ("tokens.max=٣", "digits"), ("cost.max=1.0000001", "6 more"), ("cost.max=+1", "cost"),
])  # fmt: skip
def test_what_is_no_limit_is_refused_and_the_old_one_stays(
    daemon: Daemon, line: str, why: str
) -> None:
    agent = daemon.agent_dir("limits")
    if not agent.exists():
        agent = daemon.make("limits", "true", limits="tokens.max=5\ncost.max=2")
    told = said(agent, line)
    assert " EINVAL " in told and why in told
    assert "tokens.max=5\ncost.max=2\n" in read(agent, "limits")


def test_without_a_metered_network_there_is_no_such_limit() -> None:
    with daemon_of() as daemon:
        agent = daemon.make("x", "true")
        told = said(agent, "tokens.max=5")
        assert " EOPNOTSUPP " in told and "header: counters" in told
        assert "tokens" not in read(agent, "usage")


def test_a_meter_that_is_killed_loses_nothing_and_lets_nothing_pass(
    daemon: Daemon, models: Metered
) -> None:
    agent = daemon.run("long", "sleep 1000", policy="allow long_t network:models connect")
    wait_status(agent, "busy")
    first = ask(daemon, "before", "m-3-4")
    assert start(first)[0].startswith("200")
    models.end(signal.SIGKILL)
    between = ask(daemon, "between", "m-3-4")
    assert not start(between)[0].startswith("200")
    models.start()
    after = ask(daemon, "after", "m-3-4")
    assert start(after)[0].startswith("200")
    assert [usage(each)["tokens.out"] for each in (first, between, after)] == ["4", "0", "4"]


# whatever an agent says or holds, it is counted as itself and those above it


def test_what_it_holds_or_says_makes_it_nobody_else(daemon: Daemon, models: Metered) -> None:
    gate = daemon.base / "gate"
    gate.mkdir()
    gate.chmod(0o777)
    (gate / "boss.py").write_text(_HANDS_ON)
    (gate / "kid.py").write_text(_IS_HANDED)
    other = daemon.run("other", "sleep 1000", policy="allow other_t network:models connect")
    wait_status(other, "busy")
    whose = read(other, "incarnation").strip()
    lines = [f"{verb} holder_t network:models connect" for verb in ("allow", "delegate")]
    boss = daemon.run("holder", f"python3 /gate/boss.py {models.socket} {whose}",
                      mount=f"{gate} /gate rw", policy="\n".join(lines))
    wait_until(lambda: "listening" in read(boss, "out"), "it listens")
    kid = daemon.run("taker", f"python3 /gate/kid.py {models.socket} {whose}",
                     parent="agent:holder", policy="allow taker_t network:models connect")
    wait_until(lambda: "over" in read(kid, "out"), "it has tried all")
    assert read(kid, "out").splitlines() == [
        "handed on 200 200", "another's closed", "own 200 200", "as another 400",
        "the meter None", "over",
    ], read(kid, "log")  # fmt: skip
    # it reads no answer to its end
    wait_until(lambda: tokens(boss) == 4 * TOKENS, "what was said is counted")
    assert (tokens(other), tokens(kid), usage(boss)["requests"]) == (0, 2 * TOKENS, "4")


def test_who_has_the_name_of_another_one_has_used_nothing(daemon: Daemon) -> None:
    lines = [f"{verb} above_t network:models connect" for verb in ("allow", "delegate")]
    above = daemon.run("above", "sleep 1000", policy="\n".join(lines))
    wait_status(above, "busy")
    for count in (1, 2):
        same = spend(daemon, "same", "plain", parent="agent:above", limits="tokens.max=20")
        wait_dead(same)
        assert (tokens(same), tokens(above)) == (TOKENS, count * TOKENS)
        same.rmdir()
    write(above / "ctl", "kill")
    wait_dead(above)
    assert tokens(above) == 2 * TOKENS
