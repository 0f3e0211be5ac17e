"""The command lines by one API through the proxy of contrib/proxy, which adds the key."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, Cli, User, scripted
from tests.system.test_proxy import HOSTS, KEY, nginx
from tests.worlds.daemon import daemon_of, read
from tests.worlds.lists import certify

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is missing")


@pytest.fixture(params=CLIS, ids=str)
def proxied(request: pytest.FixtureRequest, socket: Path) -> Iterator[tuple[User, Model]]:
    """A user of a machine on which the network leads to the proxy, and that to the model by TLS."""
    cli: Cli = request.param
    base = socket.parent
    certificate, key = certify(base, *HOSTS.values())
    options = ("--certificate", str(certificate), "--key", str(key))
    with (
        closing(Model(base, socket, *options)) as model,
        nginx(base / "proxy", model.port, certificate) as sockets,
    ):
        path = sockets / f"{cli.network}.sock"
        config = f"networks: {{{cli.network}: {{socket: {path}, port: 18081}}}}\n"
        with daemon_of(config=config) as daemon:
            yield User(daemon, model, cli), model


LOOK = {
    "shell": "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'; "
    "echo looked"
}


def test_the_key_is_added_and_never_seen(proxied: tuple[User, Model]) -> None:
    user, model = proxied
    child = {"tool": "SpawnAgent", "input": {
        "name": "boss-kid", "model": user.cli.model,
        "initial_message": scripted("Look.", LOOK, {"text": "the kid has looked"}),
    }}  # fmt: skip
    wait = {"tool": "TaskOutput", "input": {"task_id": "boss-kid", "block": True, "timeout": 60}}
    task = scripted("Have it looked at.", LOOK, child, wait, {"text": "said: {last}"})
    options = ("--agent", user.cli.name, "--model", user.cli.model, "--name", "boss", "--wait")
    said = user.ctx("spawn", *options, task)
    assert "the kid has looked" in said, said
    # what the API got
    assert {request["key"].removeprefix("Bearer ") for request in model.requests} == {KEY}
    # what the agents have, and what is written anywhere
    results = [result for request in model.requests for result in request["results"]]
    looked = [result for result in results if "looked" in result and "CTX_NET_" in result]
    assert {f"CTX_AGENT={name}" for name in ("boss", "boss-kid")} <= {
        line for result in looked for line in result.splitlines()
    }
    proxy = model.socket.parent / "proxy"
    asked = (proxy / "asked").read_text()
    assert " POST " in asked and " 200 " in asked
    seen = [said, *results, asked, (proxy / "said").read_text(), user.daemon.log.read_text()]
    for name in ("boss", "boss-kid"):
        agent = user.agent(name)
        seen += [read(agent, file) for file in ("env", "out", "log", "result.md", "usage")]
        seen += [read(agent, "session/messages.jsonl"), read(agent, "session/events.jsonl")]
    for text in seen:
        assert KEY not in text
    found = user.daemon.state.rglob("*")
    kept = [path for path in found if path.is_file() and not path.is_symlink()]
    assert kept and not [path for path in kept if KEY.encode() in path.read_bytes()]
    sent = f"net.{user.cli.network}.sent="
    assert sent in read(user.agent("boss"), "usage")
