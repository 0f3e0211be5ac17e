"""An API of a model that answers at once, and the proxy before it that nginx is.

    python -m bench.reference.models SOCKET

A request says how many ``events`` its stream has, and how many of them come in a ``second``;
without any, the answer is one of its own. Each event has the time at which it was sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

_NAME: Final = "nginx"
_USAGE: Final = {"input_tokens": 10, "output_tokens": 5}
#: nginx as contrib/proxy has it, with one process, and without TLS, which costs all the same
_CONFIGURATION: Final = """\
daemon off;
master_process off;
user root;
worker_rlimit_nofile 65536;
pid {base}/nginx.pid;
error_log {base}/nginx.error warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {base}/nginx.body;
    proxy_temp_path {base}/nginx.proxy;
    fastcgi_temp_path {base}/nginx.fastcgi;
    uwsgi_temp_path {base}/nginx.uwsgi;
    scgi_temp_path {base}/nginx.scgi;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffering off;
    proxy_request_buffering off;
    client_max_body_size 64m;
    upstream api {{ server unix:{api}; keepalive 64; }}
    server {{
        listen unix:{socket} backlog=1024;
        location = /v1/messages {{ proxy_pass http://api; }}
    }}
}}
"""


def proxy(base: Path, api: Path, socket: Path) -> list[str] | None:
    """The command of nginx, that passes on from a socket to an API; None where it is missing."""
    if shutil.which(_NAME) is None:
        print(f"bench: without {_NAME} (apt-get install nginx-light)", file=sys.stderr)
        return None
    file = base / "nginx.conf"
    file.write_text(_CONFIGURATION.format(base=base, api=api, socket=socket))
    return [_NAME, "-c", str(file)]


def _event(kind: str, **fields: Any) -> bytes:
    data = f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if b"content-length:" in line]
            body = await reader.readexactly(int(lengths[0].partition(b":")[2]))
            asked = json.loads(body)
            if asked.get("events"):
                await _stream(writer, asked["events"], asked["second"])
            else:
                said = {"type": "message", "model": "m", "content": [], "usage": _USAGE}
                whole = json.dumps(said).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                             b"Content-Length: %d\r\n\r\n%s" % (len(whole), whole))  # fmt: skip
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _stream(writer: asyncio.StreamWriter, count: int, rate: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                 b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
    writer.write(_event("message_start", message={"model": "m", "usage": _USAGE}))
    begun = time.monotonic()
    for number in range(1, count + 1):
        await asyncio.sleep(begun + number / rate - time.monotonic())
        delta = {"type": "text_delta", "text": f"<{time.monotonic_ns()}>"}
        writer.write(_event("content_block_delta", index=0, delta=delta))
    writer.write(_event("message_delta", usage={"output_tokens": count}))
    writer.write(_event("message_stop") + b"0\r\n\r\n")


async def _serve(path: str) -> None:
    server = await asyncio.start_unix_server(_answer, path, limit=1 << 26, backlog=1024)
    print("ready", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    os.umask(0)
    asyncio.run(_serve(sys.argv[1]))
