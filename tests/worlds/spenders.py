"""Agents that ask models as fast as they can, each in a way of its own, until they are refused.

Each names itself in its requests, for the test alone: so that the upstream knows what was whose.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tests.worlds.daemon import Daemon, read

#: the ways to ask
WAYS: Final = ("plain", "lies", "aborts", "pipelines", "streams", "many")
GIVEN, MADE = 5, 20
TOKENS: Final = GIVEN + MADE
#: argv: a name, a way, what it does when it is refused, connections; prints what it has got whole
_PROGRAM: Final = f"""
import json, select, socket, sys, time
name, way, after, many = *sys.argv[1:4], int(sys.argv[4])
whole = failed = 0
def request(*more, stream=way in ("streams", "aborts")):
    body = json.dumps({{"model": "m-{GIVEN}-{MADE}", "max_tokens": 100, "stream": stream,
                       "metadata": name}}).encode()
    head = ["POST /v1/messages HTTP/1.1", "Host: x", "Content-Length: %d" % len(body), *more]
    return "\\r\\n".join([*head, "", ""]).encode() + body
def connect(data):
    made = socket.create_connection(("127.0.0.1", 8080))
    made.sendall(data)
    return made
def answer(made, file, less=0):
    '''The status, once all of an answer is read, or all but so much.'''
    line, size = file.readline(), 0
    if not line:
        raise OSError("no answer")
    while head := file.readline().strip():
        if head.lower().startswith(b"content-length:"):
            size = int(head.split(b":")[1])
    if len(file.read(size - less)) != size - less:
        raise OSError("half an answer")
    return int(line.split()[1])
def lie():
    liar = connect(b"\\r\\n\\r\\n\\0\\r\\nQUIT\\n\\x21\\x21\\0\\x24" + bytes(36) + request())
    answer(liar, liar.makefile("rb"))
    two = connect(request("Content-Length: 5"))
    answer(two, two.makefile("rb"))
    return request("X-Ctx-Agent: other", "PROXY: TCP6", "Forwarded: for=other", "Via: 1.1 other")
def ask():
    '''The statuses of some requests.'''
    if way == "pipelines":
        made = connect(request() * 3)
        file = made.makefile("rb")
        return [answer(made, file) for _ in range(3)]
    if way == "many":
        made = [connect(request()) for _ in range(many)]
        return [answer(each, each.makefile("rb")) for each in made]
    made = connect(lie() if way == "lies" else request())
    return [answer(made, made.makefile("rb"), way == "aborts")]
while True:
    try:
        got = ask()
    except OSError as error:
        failed += 1
        time.sleep(0.02)
        continue
    whole += got.count(200) if way != "aborts" else 0
    if 429 in got:
        break
print("over", whole, failed, flush=True)
if after == "stay":
    time.sleep(1000)
"""


def spend(daemon: Daemon, name: str, way: str, *, stay: bool = False, many: int = 16,
          **files: str) -> Path:  # fmt: skip
    """A started agent that asks so; it ends when it is refused, or stays."""
    words = [name, way, "stay" if stay else "end", str(many)]
    lines = [f"{verb} {name}_t network:models connect" for verb in ("allow", "delegate")]
    program = f"exec({_PROGRAM!r})"  # on one line
    return daemon.run(name, f"python3 -c {shlex.quote(program)} {shlex.join(words)}",
                      **files, policy="\n".join(lines))  # fmt: skip


def over(agent: Path) -> tuple[int, int] | None:
    """How many answers it has got whole, and how many tries failed, once it is refused."""
    for line in read(agent, "out").splitlines():
        if line.startswith("over "):
            _, whole, failed = line.split()
            return int(whole), int(failed)
    return None


def usage(agent: Path) -> dict[str, str]:
    """What it used of models."""
    lines = read(agent, "usage").splitlines()
    return dict(line.split("=") for line in lines if line.startswith(("tok", "cost", "req")))


def tokens(agent: Path) -> int:
    found = usage(agent)
    return int(found["tokens.in"]) + int(found["tokens.out"])


def asked_by(asked: Iterable[dict[str, Any]]) -> Counter[str]:
    """How many requests of each agent came to the upstream."""
    return Counter(each["metadata"] for each in asked)
