"""An upstream that answers as models do, behind a meter: the numbers it says are what it was told.

The last word of a request's ``model`` says the tokens: ``m-IN-OUT``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.worlds.daemon import wait_until
from tests.worlds.readiness import readable

RATES = "rates: {'m-*': {in: 5, cached: 0.5, out: 25}}\n"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def log_message(self, *words: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, given, made = asked["model"].split("-")
        usage = {"input_tokens": int(given), "output_tokens": int(made)}
        with self.server.lock:
            self.server.asked.append(asked)
        self.server.may_answer.wait(60)
        if not asked.get("stream"):
            said = {"type": "message", "model": asked["model"], "content": [], "usage": usage}
            self._send("application/json", json.dumps(said).encode())
            return
        start = {"model": asked["model"], "usage": {**usage, "output_tokens": 1}}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": start},
                  {"type": "content_block_delta", "delta": {"text": '{"usage":{"in":1}}' * 4}},
                  {"type": "message_delta", "usage": {"output_tokens": int(made)}},
                  {"type": "message_stop"}]  # fmt: skip
        text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        self._send("text/event-stream", text.encode())

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        with contextlib.suppress(OSError):  # it was cut
            super().finish()


class Upstream(socketserver.ThreadingUnixStreamServer):
    """Each request that came is in ``asked``; ``may_answer`` holds answers back."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, path: Path) -> None:
        self.asked: list[Any] = []
        self.lock = threading.Lock()
        self.open: set[socket.socket] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__(str(path), _Answers)

    def cut(self) -> None:
        """What a proxy that is killed leaves of its connections."""
        for each in tuple(self.open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a connection that was cut."""

    def get_request(self) -> tuple[Any, Any]:
        connection, _ = super().get_request()
        return connection, ("unix", 0)


def start_meter(config: Path, *before: str) -> subprocess.Popen[bytes]:
    """Returns when it takes connections. ``before`` becomes the command."""
    program = "import sys; from runtime.metering.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [*before, sys.executable, "-c", program, "--config", str(config)],
        stderr=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stderr is not None
    assert readable([process.stderr.fileno()], 30)
    assert process.stderr.readline() == b"ready\n"
    return process


class Nginx:
    """A proxy between a meter and an upstream, which only passes on."""

    def __init__(self, directory: Path, upstream: Path) -> None:
        self.socket = directory / "nginx.sock"
        self._config = directory / "nginx.conf"
        self._config.write_text(
            f"user root; daemon off; pid {directory}/nginx.pid; error_log {directory}/nginx.log;\n"
            "worker_processes 1; events {}\n"
            f"http {{ access_log off; client_body_temp_path {directory}/body;\n"
            f"server {{ listen unix:{self.socket}; location / {{ proxy_buffering off;\n"
            f"proxy_http_version 1.1; proxy_pass http://unix:{upstream}; }} }} }}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it takes connections."""
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(["nginx", "-c", self._config], start_new_session=True,
                                         stderr=subprocess.DEVNULL)  # fmt: skip
        with socket.socket(socket.AF_UNIX) as trying:
            wait_until(lambda: not trying.connect_ex(str(self.socket)), "the proxy listens")

    def restart(self) -> None:
        """After a crash."""
        self.end()
        self.start()

    def end(self) -> None:
        """Kills it, and those of its processes that answer."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(40)
            self._process = None


class Metered:
    """A meter before an upstream, both in one directory; between them a proxy, if that is wanted
    and installed."""

    def __init__(self, directory: Path, drain: str = "300ms", *, proxied: bool = False) -> None:
        self.drain = drain
        self.socket = directory / "meter.sock"
        path = directory / "upstream.sock"
        self.upstream = Upstream(path)
        self.nginx = Nginx(directory, path) if proxied and shutil.which("nginx") else None
        if self.nginx:
            self.nginx.start()
        self.behind = self.nginx.socket if self.nginx else path
        self.config = directory / "meter.yaml"
        self.configure(RATES)
        threading.Thread(target=self.upstream.serve_forever, daemon=True).start()
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, rates: str) -> None:
        sockets = f"socket: {self.socket}, upstream: {self.behind}"
        self.config.write_text(
            f"networks: {{models: {{api: anthropic, {sockets}}}}}\ndrain: {self.drain}\n{rates}"
        )

    def start(self) -> None:
        """Returns when it takes connections."""
        self.process = start_meter(self.config)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.communicate(timeout=40)
            self.process = None

    def close(self) -> None:
        self.end()
        if self.nginx:
            self.nginx.end()
        self.upstream.shutdown()
        self.upstream.server_close()


@contextmanager
def metered(
    directory: Path, drain: str = "300ms", *, proxied: bool = False
) -> Iterator[Metered]:
    made = Metered(directory, drain, proxied=proxied)
    try:
        os.chmod(directory, 0o755)
        made.start()
        yield made
    finally:
        made.close()
