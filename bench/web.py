"""A download by systemd-socket-proxyd and squid, as networks of contrib/web lead to hosts, against
one by squid alone."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from contextlib import ExitStack, suppress
from threading import Thread
from typing import Final

from bench.measure import Ratio, Side, compare
from bench.setting import Setting, serving

_SIZE: Final = 100_000_000
_PART: Final = 1 << 20
_SECONDS: Final = 60.0
_PROXYD: Final = "/lib/systemd/systemd-socket-proxyd"
#: what relays say first, of nobody
_GREETING: Final = bytes.fromhex("0d0a0d0a000d0a515549540a21210024") + bytes(36)
#: squid as contrib/web has it, but for whom it serves and where to
_CONFIGURATION: Final = """\
http_port 127.0.0.1:{port} require-proxy-header
proxy_protocol_access allow localhost
http_access allow all
cache deny all
access_log none
cache_log /dev/null
pid_filename none
netdb_filename none
pinger_enable off
shutdown_lifetime 0 seconds
"""


def _serve(listening: socket.socket) -> None:
    """Sends the bytes to whoever comes."""
    part = bytes(_PART)
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                left = _SIZE
                while left:
                    left -= connection.send(part[:left])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _reaches(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def _download(connection: socket.socket, target: str) -> None:
    with connection:
        connection.settimeout(_SECONDS)
        connection.sendall(_GREETING + f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1 << 10)
        got = len(head.partition(b"\r\n\r\n")[2])
        into = bytearray(_PART)
        while more := connection.recv_into(into):
            got += more
    if got != _SIZE:
        raise RuntimeError(f"a download of the bench has {got} bytes: {head!r}")


def measure_web(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    missing = [name for name in ("squid", "systemd-socket-activate", _PROXYD)
               if shutil.which(name) is None]  # fmt: skip
    if missing:
        print(f"bench: without {', '.join(missing)} (apt-get install squid)", file=sys.stderr)
        return []
    base = setting.base / row
    base.mkdir()
    port, path = _free_port(), base / "web.sock"
    config = base / "squid.conf"
    config.write_text(_CONFIGURATION.format(port=port))
    with ExitStack() as stack:
        host = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        Thread(target=_serve, args=(host,), daemon=True).start()
        target = f"127.0.0.1:{host.getsockname()[1]}"
        squid = ["sh", "-c", 'echo ready >&2; exec squid -N -f "$1"', "sh", str(config)]
        stack.enter_context(serving(squid, base / "squid.log"))
        deadline = time.monotonic() + _SECONDS
        while not _reaches(port):
            if time.monotonic() > deadline:
                raise RuntimeError(f"squid does not listen: {(base / 'squid.log').read_text()}")
            time.sleep(0.05)
        proxyd = ["systemd-socket-activate", "-l", str(path), _PROXYD, f"127.0.0.1:{port}"]
        stack.enter_context(serving(proxyd, base / "proxyd.log", path))

        def by_both() -> None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            _download(connection, target)

        def by_squid() -> None:
            _download(socket.create_connection(("127.0.0.1", port)), target)

        ours = Side(name="socket-proxyd, squid", call=by_both)
        return compare(row, ours, [Side(name="squid", call=by_squid)], rounds)
