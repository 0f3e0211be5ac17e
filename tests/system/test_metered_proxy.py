"""What APIs say was used arrives in `usage` through relay, meter and nginx, to the token."""

from __future__ import annotations

import contextlib
import http.server
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.metering.reading import Usage
from tests.system.test_proxy import HOSTS, metered, nginx, serving
from tests.unit.runtime.metering.answers import ANSWERS, Answer
from tests.worlds.daemon import MARK, Daemon, daemon_of, read, wait_dead, write
from tests.worlds.lists import certify

_MISSING: Final = [name for name in ("nginx", "openssl") if not shutil.which(name)]

pytestmark = pytest.mark.skipif(
    bool(_MISSING), reason=f"{' and '.join(_MISSING)} missing: make test-proxy installs nginx"
)

#: whole or streamed, and packed
SAID: Final = {
    **ANSWERS,
    **{f"{name}, packed": answer.packed() for name, answer in ANSWERS.items()},
}

#: where agents have each API
PORTS: Final = {"anthropic": 8081, "openai": 8082, "gemini": 8083}

#: asks for each answer, and reads `usage` once it has the last byte, and nothing behind it
ASKS: Final = """
import http.client, json, os, sys
for port, path, body, size in json.loads(sys.argv[1]):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    got = answer.read(size)
    usage = open(os.environ["CTX_SELF"] + "/usage").read()
    print(json.dumps([answer.status, len(got), usage]))
"""


class _Api(http.server.BaseHTTPRequestHandler):
    """Any of them: the request says which answer is wanted."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = SAID[asked["wanted"]]
        self.send_response(200)
        self.send_header("Content-Type", answer.kind)
        if answer.encoding:
            self.send_header("Content-Encoding", answer.encoding)
        streams = answer.kind.startswith("text/event-stream")
        length = ("Transfer-Encoding", "chunked") if streams else (
            "Content-Length", str(len(answer.body)))  # fmt: skip
        self.send_header(*length)
        self.end_headers()
        with contextlib.suppress(OSError):
            if streams:
                half = len(answer.body) // 2
                for part in (answer.body[:half], answer.body[half:], b""):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            else:
                self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _daemon() -> Iterator[Daemon]:
    """A daemon whose networks lead through a meter and a proxy to the API."""
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory:
        base = Path(directory)
        base.chmod(0o755)
        certificate, key = certify(base, *HOSTS.values())
        with (
            serving(certificate, key, _Api) as port,
            nginx(base, port, certificate) as behind,
            metered(base, behind) as sockets,
        ):
            lines = "".join(
                f"  {name}: {{socket: {sockets}/{name}.sock, port: {number}, header: counters}}\n"
                for name, number in PORTS.items()
            )
            with daemon_of(config=f"networks:\n{lines}") as daemon:
                yield daemon


def _asked(name: str, answer: Answer) -> tuple[int, str, str, int]:
    streams = answer.kind.startswith("text/event-stream")
    body = {"model": answer.model, "wanted": name, "stream": streams}
    if "chat" in answer.path:
        body["stream_options"] = {"include_usage": True}
    return PORTS[answer.api], answer.path, json.dumps(body), len(answer.body)


def _used(usage: str) -> Usage:
    said = dict(line.split("=") for line in usage.splitlines())
    assert said["tokens.estimated"] == "0"
    return Usage(*(int(said[f"tokens.{key}"]) for key in ("in", "cached", "written", "out")))


def test_usage_has_what_each_api_said_once_its_last_byte_was_read() -> None:
    asked = json.dumps([_asked(*each) for each in SAID.items()])
    with _daemon() as daemon:
        policy = "\n".join(f"allow one_t network:{name} connect" for name in PORTS)
        agent = daemon.make("one", policy=policy)
        write(agent / "exec", f"python3 -c {shlex.quote(f'exec({ASKS!r})')} {shlex.quote(asked)}")
        write(agent / "ctl", "start")
        wait_dead(agent)
        lines = read(agent, "out").splitlines()
        last = read(agent, "usage")
    assert len(lines) == len(SAID), lines
    before = Usage()
    for line, (name, answer) in zip(lines, SAID.items(), strict=True):
        status, size, usage = json.loads(line)
        assert (status, size) == (200, len(answer.body)), name
        now = _used(usage)
        assert Usage(*(new - old for new, old in zip(now, before, strict=True))) == answer.usage, (
            name
        )
        before = now
    assert _used(last) == before
    assert f"\nrequests={len(SAID)}\n" in last
