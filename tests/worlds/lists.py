"""Hosts, their name server, and the proxy of contrib/web that reaches those of lists, in a network
of their own: with addresses that are public there, and traps at those that nobody may reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import re
import shutil
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.worlds.daemon import MARK, TIMEOUT, wait_until

WEB: Final = Path(__file__).resolve().parents[2] / "contrib" / "web"
#: one that nobody has (RFC 5737), and that is none of those that squid.conf calls inner
PUBLIC: Final = "203.0.113.7"
#: where nobody may get
TRAPS: Final = ("127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "fd00::1", "64:ff9b::7f00:1")
PROGRAM: Final = "/lib/systemd/systemd-socket-proxyd"
#: who may connect to the ports of lists
PROXYD: Final = 61009
_CLONE_NEWNET: Final = 0x40000000
_A, _AAAA = 1, 28
T = TypeVar("T")


class Apart:
    """A network of its own: what `do` makes is there, sockets, threads and processes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=self._enter)

    def do(self, make: Callable[..., T], *arguments: Any, **more: Any) -> T:
        return self._thread.submit(make, *arguments, **more).result(TIMEOUT)

    def close(self) -> None:
        self._thread.shutdown()

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for each in (PUBLIC, *TRAPS):
            if each not in ("127.0.0.1", "::1"):
                add = ("ip", "address", "add", each, "dev", "lo", *("nodad",) * (":" in each))
                subprocess.run(add, check=True)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@dataclass
class Names:
    """A name server: it answers from `known`, where each name has answers that are given in turn,
    of one address or several; and has what it was asked."""

    known: dict[str, Sequence[str]]
    asked: list[str] = field(default_factory=list)
    _turns: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def serve(self, server: socket.socket) -> None:
        while True:
            question, asker = server.recvfrom(4096)
            if not question:
                return
            server.sendto(self._answer(question), asker)

    def _answer(self, question: bytes) -> bytes:
        labels, at = [], 12
        while length := question[at]:
            labels.append(question[at + 1 : at + 1 + length].decode("latin-1"))
            at += 1 + length
        name, (kind,) = ".".join(labels), struct.unpack_from("!H", question, at + 1)
        self.asked.append(name)
        turns = self.known.get(name, ("",))
        turn = turns[self._turns[name] % len(turns)]
        self._turns[name] += kind == _A
        answers = [
            # known for no time
            b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 0, len(data)) + data
            for address in turn.split()
            if kind == (_AAAA if ":" in address else _A)
            for data in [socket.inet_pton(_family(address), address)]
        ]
        count = struct.pack("!HHHH", 1, len(answers), 0, 0)
        state = b"\x81\x80" if name in self.known else b"\x81\x83"
        return question[:2] + state + count + question[12 : at + 5] + b"".join(answers)


class _Hosts(http.server.SimpleHTTPRequestHandler):
    """Each host has the files of a directory; `endless` never ends."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/endless":
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 12))
                time.sleep(0.01)

    def translate_path(self, path: str) -> str:
        host = self.headers.get("Host", "").partition(":")[0]
        return super().translate_path(f"/{host}{path}")

    def log_message(self, *words: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, files: Path, address: tuple[str, int], context: ssl.SSLContext | None):
        super().__init__(address, partial(_Hosts, directory=str(files)))
        if context:
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def handle_error(self, *_: Any) -> None:
        """Clients may go when they like."""


@dataclass
class Web:
    """The proxy, with its sockets, and what is behind it."""

    base: Path
    apart: Apart
    names: Names
    #: of each host
    files: Path
    certificate: Path
    #: where somebody came who may not
    reached: list[str]
    squid: subprocess.Popen[bytes]

    def socket_of(self, name: str) -> Path:
        return self.base / "sockets" / f"{name}.sock"

    def asked(self) -> list[str]:
        """What the proxy logged."""
        return (self.base / "asked").read_text().splitlines()


def certify(directory: Path, *hosts: str) -> tuple[Path, Path]:
    """A certificate for these hosts that signs itself, and its key."""
    name = hosts[0]
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={','.join(f'DNS:{host}' for host in hosts)}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=TIMEOUT,
    )
    return certificate, key


def _settings(base: Path, lists: Mapping[str, Sequence[str]]) -> Path:
    """The files as they are, but for paths, the log, and the name server, whose answers are
    remembered for a second rather than a minute."""
    etc = base / "web"
    (etc / "lists").mkdir(parents=True)
    text = (WEB / "squid.conf").read_text().replace("/etc/ctxfs/web", str(etc))
    text = text.replace("access_log syslog:daemon.info", f"access_log stdio:{base}/asked")
    text += "dns_nameservers 127.0.0.1\nhosts_file none\nnegative_dns_ttl 1 second\n"
    (etc / "squid.conf").write_text(text)
    for port, (name, hosts) in enumerate(lists.items(), 3128):
        # as README.md makes one from another
        text = (WEB / "lists" / "web.conf").read_text().replace("/etc/ctxfs/web", str(etc))
        text = re.sub(r"\bweb(?=[ _.\n])", name, text).replace("3128", str(port))
        (etc / "lists" / f"{name}.conf").write_text(text)
        (etc / "lists" / f"{name}.hosts").write_text("".join(f"{host}\n" for host in hosts))
    return etc / "squid.conf"


def _trap(address: str, port: int, reached: list[str]) -> socket.socket:
    server = socket.create_server((address, port), family=_family(address))

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()
                reached.append(f"{address} {port}")

    threading.Thread(target=take, daemon=True).start()
    return server


@contextlib.contextmanager
def _process(apart: Apart, *command: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    words = [str(word) for word in command]
    process: subprocess.Popen[bytes] = apart.do(subprocess.Popen, words, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT)


@contextlib.contextmanager
def web_of(
    lists: Mapping[str, Sequence[str]], known: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Web]:
    """The proxy with these lists; all that are on one are at the public address, unless they are
    `known` elsewhere."""
    with contextlib.ExitStack() as kept:
        directory = kept.enter_context(tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp"))
        base = Path(directory)
        base.chmod(0o777)
        (base / "sockets").mkdir()
        (base / "sockets").chmod(0o777)
        hosts = [host for each in lists.values() for host in each]
        names = Names({host: [PUBLIC] for host in hosts} | dict(known or {}))
        files = base / "files"
        for host in hosts:
            (files / host).mkdir(parents=True, exist_ok=True)
        certificate, key = certify(base, *hosts)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        apart = kept.enter_context(contextlib.closing(Apart()))
        reached: list[str] = []
        for port, how in ((443, context), (80, None)):
            server = apart.do(_Server, files, (PUBLIC, port), how)
            kept.callback(server.server_close)
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            kept.callback(server.shutdown)
            for each in TRAPS:
                kept.enter_context(apart.do(_trap, each, port, reached))
        asking = kept.enter_context(apart.do(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
        asking.bind(("127.0.0.1", 53))
        threading.Thread(target=names.serve, args=(asking,), daemon=True).start()
        said = kept.enter_context(open(base / "said", "wb"))
        command = ("squid", "-N", "-d", "1", "-f", _settings(base, lists))
        squid = kept.enter_context(
            _process(apart, *command, user="proxy", group="proxy", extra_groups=(), stderr=said)
        )
        rule = (WEB / "ctxfs-web.nft").read_text().replace("!= ctxfs-web", f"!= {PROXYD}")
        apart.do(subprocess.run, ["nft", "-f", "-"], input=rule.encode(), check=True)
        for port, name in enumerate(lists, 3128):
            path = base / "sockets" / f"{name}.sock"
            proxyd = ("systemd-socket-activate", "-l", path, PROGRAM, f"127.0.0.1:{port}")
            ids: dict[str, Any] = {"user": PROXYD, "group": PROXYD, "extra_groups": ()}
            kept.enter_context(_process(apart, *proxyd, **ids, stderr=said))
            wait_until(path.exists, "systemd listens")
            path.chmod(0o666)

        def listens() -> bool:
            assert squid.poll() is None, (base / "said").read_text()
            return b"Accepting" in (base / "said").read_bytes()

        wait_until(listens, "squid listens")
        yield Web(base, apart, names, files, certificate, reached, squid)


MISSING: Final = [
    name
    for name in ("squid", "ip", "nft", "openssl", "systemd-socket-activate", PROGRAM)
    if not shutil.which(name)
]
