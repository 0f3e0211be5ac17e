"""The proxy that adds a key (contrib/proxy): what passes, with which key, and what does not.

nginx runs with the files as they are, but for paths and the address of the API, which is a server
of the test. All is so with and without a meter before it.
"""

from __future__ import annotations

import array
import contextlib
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from client import networks
from runtime.records.spent import SIZE, VERSION
from tests.worlds.daemon import MARK, TIMEOUT, Daemon, read, running, wait_dead, wait_until
from tests.worlds.lists import certify
from tests.worlds.models import start_meter

PROXY: Final = Path(__file__).resolve().parents[2] / "contrib" / "proxy"
#: what a relay says first, of nobody
GREETING: Final = bytes.fromhex("0d0a0d0a000d0a515549540a21210024") + bytes(36)
JOURNAL: Final = "syslog:server=unix:/run/systemd/journal/dev-log,tag=ctxfs_proxy,nohostname"
KEY: Final = "the-operators-own-key"
HOSTS: Final = {
    "anthropic": "api.anthropic.com",
    "openai": "api.openai.com",
    "gemini": "generativelanguage.googleapis.com",
}
KEYS: Final = {
    "anthropic": ("x-api-key", KEY),
    "openai": ("authorization", f"Bearer {KEY}"),
    "gemini": ("x-goog-api-key", KEY),
}
_MISSING: Final = [name for name in ("nginx", "openssl") if not shutil.which(name)]

pytestmark = pytest.mark.skipif(
    bool(_MISSING), reason=f"{' and '.join(_MISSING)} missing: make test-proxy installs nginx"
)


@dataclass
class Asked:
    """A request as the API got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Upstream:
    """An API: answers each request with a stream of two parts, the second when it is told."""

    asked: list[Asked] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    port: int = 0


def _handler(api: Upstream) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            headers = {key.lower(): value for key, value in self.headers.items()}
            api.asked.append(Asked(self.command, self.path, headers, body))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Set-Cookie", "session=1")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._part(b"data: one\n\n")
            assert api.go_on.wait(TIMEOUT)
            self._part(b"data: two\n\n")
            self._part(b"")

        do_GET = do_PUT = do_DELETE = do_POST

        def _part(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving(
    certificate: Path, key: Path, handler: type[http.server.BaseHTTPRequestHandler]
) -> Iterator[int]:
    """A server that speaks TLS; yields its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True,
                                        do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join(TIMEOUT)
        server.server_close()


@contextlib.contextmanager
def upstream(certificate: Path, key: Path) -> Iterator[Upstream]:
    api = Upstream()
    with serving(certificate, key, _handler(api)) as api.port:
        try:
            yield api
        finally:
            api.go_on.set()


@contextlib.contextmanager
def nginx(base: Path, port: int, trusted: Path) -> Iterator[Path]:
    """The proxy; yields the directory of its sockets."""
    sockets, cache, etc = base / "run", base / "cache", base / "etc"
    for directory in (sockets, cache, etc / "apis"):
        directory.mkdir(parents=True)
    (etc / "keys").mkdir(mode=0o700)
    for name, (header, value) in KEYS.items():
        path = etc / "keys" / f"{name}.conf"
        path.touch(mode=0o600)
        path.write_text(f'proxy_set_header {header} "{value}";\n')
    for path in (PROXY / "nginx.conf", PROXY / "headers.conf", *PROXY.glob("apis/*.conf")):
        text = path.read_text()
        for before, after in (
            ("/etc/ctxfs/proxy", str(etc)),
            ("/run/ctxfs-proxy", str(sockets)),
            ("/var/cache/ctxfs-proxy", str(cache)),
            (JOURNAL, f"{base}/asked"),
            ("/etc/ssl/certs/ca-certificates.crt", str(trusted)),
            *((f"server {host}:443;", f"server 127.0.0.1:{port};") for host in HOSTS.values()),
        ):
            text = text.replace(before, after)
        (etc / path.relative_to(PROXY)).write_text(text)
    with open(base / "said", "wb") as said:
        process = subprocess.Popen(
            ["nginx", "-c", str(etc / "nginx.conf")], stdout=said, stderr=said
        )
    try:
        wait_until(
            lambda: process.poll() is not None
            or all((sockets / f"{name}.sock").exists() for name in HOSTS),
            "the proxy listens",
        )
        assert process.poll() is None, (base / "said").read_text()
        yield sockets
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)


@contextlib.contextmanager
def metered(base: Path, sockets: Path) -> Iterator[Path]:
    """The meter before the proxy; yields the directory of its sockets."""
    there = base / "meter"
    there.mkdir()
    text = (PROXY / "meter.yaml").read_text()
    text = text.replace("/run/ctxfs-meter", str(there)).replace("/run/ctxfs-proxy", str(sockets))
    config = base / "meter.yaml"
    config.write_text(text)
    process = start_meter(config)
    try:
        yield there
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT)


@dataclass
class Proxy:
    base: Path
    #: where relays connect to, and how they are told to in the configuration
    sockets: Path
    header: str
    api: Upstream

    def connect(self, name: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(TIMEOUT)
        connection.sock.connect(str(self.sockets / f"{name}.sock"))
        if self.header == "counters":
            self._greet(connection.sock)
        return connection

    def _greet(self, connection: socket.socket) -> None:
        """As a relay does it, with new counters."""
        with tempfile.TemporaryFile(dir=self.base) as file:
            file.write(VERSION.to_bytes(8, "little").ljust(SIZE, b"\0"))
            # no limits
            os.pwrite(file.fileno(), b"\xff" * 16, 8192 + 128)
            file.flush()
            fds = array.array("i", [file.fileno()])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            connection.sendmsg([GREETING], rights)

    def ask(
        self,
        name: str,
        method: str,
        path: str,
        body: bytes = b'{"model": "m"}',
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        self.api.go_on.set()
        with contextlib.closing(self.connect(name)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            assert answer.getheader("Set-Cookie") is None
            return answer.status, answer.read()


@contextlib.contextmanager
def proxy_of(header: str, *, trusted: bool = True) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory:
        base = Path(directory)
        base.chmod(0o755)
        certificate, key = certify(base, *HOSTS.values())
        other = certify(base, "elsewhere")[0]
        with contextlib.ExitStack() as stack:
            api = stack.enter_context(upstream(certificate, key))
            believed = certificate if trusted else other
            sockets = stack.enter_context(nginx(base, api.port, believed))
            if header == "counters":
                sockets = stack.enter_context(metered(base, sockets))
            yield Proxy(base, sockets, header, api)


@pytest.fixture(scope="module", params=["none", "counters"])
def shared(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    with proxy_of(request.param) as made:
        yield made


@pytest.fixture
def proxy(shared: Proxy) -> Proxy:
    shared.api.asked.clear()
    shared.api.go_on.clear()
    return shared


PASSES: Final = [
    ("anthropic", "/v1/messages", "/v1/messages"),
    ("anthropic", "/v1/messages?beta=true", "/v1/messages?beta=true"),
    ("anthropic", "/v1/messages/count_tokens?key=x&beta=true",
     "/v1/messages/count_tokens?beta=true"),
    ("openai", "/v1/responses?key=x", "/v1/responses"),
    ("openai", "/v1/responses/input_tokens", "/v1/responses/input_tokens"),
    ("openai", "/v1/chat/completions?key=x", "/v1/chat/completions"),
    ("gemini", "/v1beta/models/gemini-3.1-pro:generateContent?key=x",
     "/v1beta/models/gemini-3.1-pro:generateContent"),
    ("gemini", "/v1beta/models/g:streamGenerateContent?alt=sse&key=x",
     "/v1beta/models/g:streamGenerateContent?alt=sse"),
    ("gemini", "/v1beta/models/g:countTokens", "/v1beta/models/g:countTokens"),
]


@pytest.mark.parametrize(("name", "path", "arrives"), PASSES)
def test_a_request_to_a_model_arrives_with_the_key(
    proxy: Proxy, name: str, path: str, arrives: str
) -> None:
    own = {
        "Authorization": "Bearer an agent's", "x-api-key": "an agent's",
        "x-goog-api-key": "an agent's", "Cookie": "an agent's", "Proxy-Authorization": "an agent's",
        "anthropic-version": "2023-06-01",
    }
    body = b'{"text": "%s"}' % (b"x" * 2_000_000)
    status, said = proxy.ask(name, "POST", path, body, own)
    assert (status, said) == (200, b"data: one\n\ndata: two\n\n")
    (asked,) = proxy.api.asked
    assert (asked.method, asked.path) == ("POST", arrives)
    assert json.loads(asked.body) == json.loads(body)
    assert asked.headers["host"] == HOSTS[name]
    header, value = KEYS[name]
    assert asked.headers[header] == value
    assert asked.headers["anthropic-version"] == "2023-06-01"
    assert "an agent's" not in "".join(asked.headers.values())


@pytest.mark.parametrize(
    ("name", "method", "path"),
    [
        ("anthropic", "GET", "/v1/files"),
        ("anthropic", "POST", "/v1/files"),
        ("anthropic", "GET", "/v1/messages"),
        ("anthropic", "DELETE", "/v1/messages"),
        ("anthropic", "POST", "/v1/messages/batches"),
        ("anthropic", "POST", "/v1/messages/../organizations"),
        ("anthropic", "POST", "/v1/messages/"),
        ("anthropic", "GET", "/"),
        ("openai", "GET", "/v1/models"),
        ("openai", "GET", "/v1/responses/resp_1"),
        ("openai", "GET", "/v1/chat/completions"),
        ("openai", "POST", "/v1/chat/completions/x"),
        ("gemini", "GET", "/v1beta/models"),
        ("gemini", "POST", "/v1beta/models/a/b:generateContent"),
        ("gemini", "POST", "/v1beta/models/g:batchGenerateContent"),
        ("gemini", "GET", "/v1beta/models/g:generateContent"),
    ],
)
def test_everything_else_is_refused(proxy: Proxy, name: str, method: str, path: str) -> None:
    assert proxy.ask(name, method, path)[0] == 403
    assert proxy.api.asked == []


def test_an_upgrade_is_refused_so_that_a_client_does_without(proxy: Proxy) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert proxy.ask("openai", "GET", "/v1/responses", headers=upgrade)[0] == 426
    assert proxy.api.asked == []


def test_a_stream_arrives_as_it_is_sent(proxy: Proxy) -> None:
    with contextlib.closing(proxy.connect("anthropic")) as connection:
        connection.request("POST", "/v1/messages", b'{"stream": true}')
        answer = connection.getresponse()
        assert answer.readline() == b"data: one\n"
        proxy.api.go_on.set()
        assert answer.read() == b"\ndata: two\n\n"


@pytest.mark.parametrize("header", ["none", "counters"])
def test_another_certificate_is_not_believed(header: str) -> None:
    with proxy_of(header, trusted=False) as proxy:
        assert proxy.ask("anthropic", "POST", "/v1/messages")[0] == 502
        assert proxy.api.asked == []


def test_an_agent_reaches_the_model_and_never_has_the_key(proxy: Proxy) -> None:
    path = proxy.sockets / "anthropic.sock"
    config = f"networks: {{api: {{socket: {path}, port: 8081, header: {proxy.header}}}}}\n"
    proxy.api.go_on.set()
    with running(Daemon(config=config)) as daemon:
        script = (
            'curl -sS -m 30 -d "{\\"model\\": 1}" "$CTX_NET_API/v1/messages"; '
            'curl -sS -m 30 -o /dev/null -w "%{http_code}\\n" "$CTX_NET_API/v1/files"; '
            "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null"
        )
        agent = daemon.make("a", policy="allow a_t network:api connect")
        (agent / "exec").write_text(f"sh -c '{script}'\n")
        (agent / "ctl").write_text("start\n")
        wait_dead(agent)
        out = read(agent, "out")
        assert out.startswith("data: one\n\ndata: two\n\n403\n")
        assert proxy.api.asked[0].headers["x-api-key"] == KEY
        logs = [(proxy.base / name).read_text() for name in ("said", "asked")]
        assert "POST /v1/messages 200" in logs[1] and "key" not in logs[1]
        for said in (out, read(agent, "log"), daemon.log.read_text(), *logs):
            assert KEY not in said


@pytest.mark.parametrize("shared", ["none"], indirect=True)
def test_the_doctor_judges_it(proxy: Proxy) -> None:
    path = str(proxy.sockets / "anthropic.sock")
    found = [(level, what) for level, what, _ in networks.check_network("n", 61001, path)]
    assert found[1] == ("ok", "n: answers GET / with 403")
    assert found[0][0] == "warn", "its directory is open in this test"
    os.chmod(proxy.sockets, 0o700)
    try:
        level, what, _ = next(networks.check_network("n", 61001, path))
    finally:
        os.chmod(proxy.sockets, 0o755)
    assert (level, "may not connect" in what) == ("warn", True)


@pytest.mark.parametrize("shared", ["counters"], indirect=True)
def test_the_doctor_judges_a_meter(proxy: Proxy) -> None:
    path = str(proxy.sockets / "anthropic.sock")
    _, listens = networks.check_network("n", 61001, path, "counters")
    assert listens[:2] == ("ok", "n: a meter listens")


def test_the_meters_networks_are_those_of_the_proxy() -> None:
    settings = yaml.safe_load((PROXY / "meter.yaml").read_text())
    assert settings["networks"] == {
        name: {
            "api": name,
            "socket": f"/run/ctxfs-meter/{name}.sock",
            "upstream": f"/run/ctxfs-proxy/{name}.sock",
        }
        for name in HOSTS
    }
