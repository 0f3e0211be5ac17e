"""An agent tries what a cell offers it to use models for less, or for another one's account."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, daemon_of, read, wait_dead, wait_status, wait_until, write
from tests.worlds.models import Metered, metered
from tests.worlds.spenders import TOKENS, asked_by, over, spend, tokens, usage

#: prints a line for each attempt: what came of it. argv: the incarnation of another one
_EVIL = r"""
import errno, os, signal, socket, stat, struct, sys, time
BODY = b'{"model": "m-5-20", "max_tokens": 9, "metadata": "evil"}'
def head(*lines, first="POST /v1/messages HTTP/1.1", size=len(BODY)):
    return "\r\n".join([first, "Host: x", "Content-Length: %d" % size, *lines, "", ""]).encode()
REQUEST = head() + BODY
CHUNKS = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
OTHER = bytes.fromhex("fd6374786673" + "0000" + sys.argv[1])
def tcp():
    made = socket.create_connection(("127.0.0.1", 8080))
    made.settimeout(5)
    return made
def local():
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(5)
    made.connect("/run/ctx/net/models")
    return made
def answers(made):
    '''The statuses of all that comes until it is closed, or nothing more.'''
    came = b""
    try:
        while data := made.recv(65536):
            came += data
            if b'output_tokens": 20}}' in came or b'"error"' in came:
                break
    except OSError:
        pass
    return " ".join(line[9:12].decode() for line in came.split(b"\r\n") if line[:5] == b"HTTP/")
def say(data, connect=tcp):
    made = connect()
    try:
        made.sendall(data)
    except OSError:
        pass
    return answers(made) or "closed"
def attempt(name):
    def made(function):
        try:
            said = function()
        except OSError as error:
            said = errno.errorcode[error.errno]
        print(name, "=", said, flush=True)
    return made

attempt("a header as text")(lambda: say(b"PROXY TCP6 ::1 ::1 1 1\r\n" + REQUEST))
attempt("a header of nobody")(lambda: say(SIGNATURE + b"\x20\0\0\0" + REQUEST))
attempt("a header of another")(
    lambda: say(SIGNATURE + b"\x21\x21\0\x24" + OTHER * 2 + b"\0\1\0\1" + REQUEST, local))
attempt("no header")(lambda: say(b"\0" * 52 + REQUEST, local))
@attempt("counters of its own")
def _():
    memory = os.memfd_create("counters")
    os.ftruncate(memory, 12288)
    os.pwrite(memory, (2).to_bytes(8, "little"), 0)
    os.pwrite(memory, b"\xff" * 16, 8192 + 128)
    os.fchmod(memory, 0o600)
    made = local()
    socket.send_fds(made, [REQUEST], [memory] * 32)
    said, used = answers(made), any(os.pread(memory, 80, 8192 + 144))
    os.close(memory)
    return said, used
@attempt("credentials of another")
def _():
    made = local()
    credentials = struct.pack("3i", os.getpid(), 0, 0)
    try:
        made.sendmsg([REQUEST], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    except OSError:
        return "refused"
    return answers(made)
@attempt("out of band")
def _():
    made = tcp()
    made.send(b"!", socket.MSG_OOB)
    made.sendall(REQUEST)
    return answers(made) in ("200", "400")
@attempt("byte by byte")
def _():
    made = tcp()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(REQUEST)):
        made.send(REQUEST[at:at + 1])
    return answers(made)
attempt("a trailer")(lambda: say(
    CHUNKS + b"\r\n%x\r\n%s\r\n0\r\nContent-Length: 3\r\nX-Agent: o\r\n\r\n" % (len(BODY), BODY)))
attempt("a request within")(lambda: say(head(size=len(BODY) + len(REQUEST)) + BODY + REQUEST))
attempt("a request in chunks")(lambda: say(
    CHUNKS + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY + REQUEST), BODY + REQUEST)))
attempt("length and chunks")(lambda: say(CHUNKS + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + REQUEST))
attempt("no version")(lambda: say(b"POST /v1/messages\r\n\r\n"))
attempt("h2c")(lambda: say(head("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c",
                               "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA") + BODY))
attempt("paths")(lambda: {say(head(first="POST %s HTTP/1.1" % path) + BODY) for path in (
    "/v1/messages/", "/v1//messages", "//v1/messages", "/V1/messages", "/v1/messages;x", "*",
    "/v1/messages%3f", "/v1/%6dessages", "/v1/messages/count_tokens/../../messages",
    "/v1/messages/count_tokens%2f..", "/v1/messages#", "/v1/messages/batches", "/v1/files",
    "http://x/v1/messages", "/v1/messages/count_tokens/", "/v1/messages\\count_tokens")})
attempt("methods")(lambda: {say(head(first="%s /v1/messages HTTP/1.1" % method) + BODY)
                            for method in ("PUT", "PATCH", "post", "HEADPOST", "TRACE")})
attempt("two models")(lambda: say(
    head(size=len(BODY) + 14) + b'{"model": "x",' + BODY[1:] + b" "))
attempt("a packed body")(lambda: say(head("Content-Encoding: gzip", size=22) + b"\x1f\x8b" * 11))
attempt("named headers")(lambda: say(
    head("Connection: content-length, content-type", "X-HTTP-Method-Override: GET",
         "X-Original-URL: /v1/files", "X-Accel-Redirect: /x", "Max-Forwards: 0") + BODY))
@attempt("reset")
def _():
    made = tcp()
    made.sendall(REQUEST)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()
    return "gone"
@attempt("half closed")
def _():
    made = tcp()
    made.sendall(REQUEST)
    made.shutdown(socket.SHUT_WR)
    return answers(made) in ("", "200")
@attempt("a process that dies")
def _():
    if not (child := os.fork()):
        made = tcp()
        made.sendall(REQUEST)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    return "gone"
@attempt("other ports")
def _():
    found = []
    for port in range(1, 65536):
        with socket.socket() as made:
            # nobody listens where a socket has connected to itself
            if not made.connect_ex(("127.0.0.1", port)) and made.getsockname()[1] != port:
                found.append(port)
    return found
@attempt("other sockets")
def _():
    found = {line.split()[-1] for line in open("/proc/net/unix") if "sock" in line.split()[-1]}
    return sorted(each for each in found if "meter" in each or "upstream" in each)
@attempt("files of counters")
def _():
    '''Whatever it can open to write, is open in a process that it sees, or is mapped there.'''
    found = []
    for top, folders, files in os.walk("/"):
        folders[:] = [each for each in folders if os.path.join(top, each) not in ("/sys", "/usr")]
        for file in files:
            path = os.path.join(top, file)
            try:
                if os.stat(path).st_size == 12288 and stat.S_ISREG(os.stat(path).st_mode):
                    if open(path, "rb").read(8) in ((1).to_bytes(8, "little"),
                                                    (2).to_bytes(8, "little")):
                        found.append(path)
            except OSError:
                pass
    return found
@attempt("who it sees")
def _():
    '''All but itself and the first are killed; what leads to models is not among them.'''
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) not in (1, os.getpid()):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass
    return say(REQUEST)
@attempt("the first process")
def _():
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        try:
            os.kill(1, number)
        except OSError:
            pass
    return say(REQUEST, local)
@attempt("to listen there")
def _():
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", 8080))
@attempt("its limits")
def _():
    said = set()
    for file, line in (("limits", "tokens.max=max\n"), ("limits", "cost.max=max\n"),
                       ("usage", "tokens.in=0\n"), ("../boss.d/limits", "tokens.max=max\n"),
                       ("../other.d/limits", "tokens.max=0\n"), ("ctl", "reset\n"),
                       ("parent", "agent:other\n")):
        try:
            with open(os.path.join(os.environ["CTX_SELF"], file), "w") as to:
                to.write(line)
            said.add(file)
        except OSError as error:
            said.add("no")
    return said
print("over", flush=True)
time.sleep(1000)
"""

#: each attempt, and what comes of it; those that are answered are counted
_WHAT_COMES = {
    "a header as text": "400", "a header of nobody": "400", "a header of another": "400",
    "no header": "400", "counters of its own": "('200', False)",
    "credentials of another": "refused", "out of band": "True", "byte by byte": "200",
    "a trailer": "200", "a request within": "400", "a request in chunks": "400",
    "length and chunks": "400", "no version": "400", "h2c": "426", "paths": "{'403'}",
    "methods": "{'403'}", "two models": "200", "a packed body": "400", "named headers": "200",
    "reset": "gone", "half closed": "True", "a process that dies": "gone",
    "other ports": "[8080]", "other sockets": "[]", "files of counters": "[]",
    "who it sees": "200", "the first process": "200", "to listen there": "EADDRINUSE",
    "its limits": "{'no'}",
}  # fmt: skip


@pytest.fixture
def models() -> Iterator[Metered]:
    with (
        tempfile.TemporaryDirectory(prefix="ctxtest-models-") as directory,
        metered(Path(directory), drain="5s") as made,
    ):
        yield made


@pytest.fixture
def daemon(models: Metered) -> Iterator[Daemon]:
    network = f"{{socket: {models.socket}, port: 8080, header: counters}}"
    with daemon_of(config=f"networks: {{models: {network}}}\n") as made:
        yield made


def _boss(daemon: Daemon, **files: str) -> Path:
    lines = [f"{verb} boss_t network:models connect" for verb in ("allow", "delegate")]
    boss = daemon.run("boss", "sleep 1000", policy="\n".join(lines), **files)
    wait_status(boss, "busy")
    return boss


@pytest.mark.long
def test_whatever_an_agent_tries_it_is_counted_as_itself(daemon: Daemon, models: Metered) -> None:
    gate = daemon.base / "gate"
    gate.mkdir()
    (gate / "evil.py").write_text(_EVIL)
    boss = _boss(daemon, mount=f"{gate} /gate ro")
    other = daemon.run("other", "sleep 1000", policy="allow other_t network:models connect")
    wait_status(other, "busy")
    evil = daemon.run("evil", f"python3 /gate/evil.py {read(other, 'incarnation').strip()}",
                      parent="agent:boss",
                      policy="allow evil_t network:models connect", limits="tokens.max=5000")
    wait_until(lambda: "over\n" in read(evil, "out") or read(evil, "status") == "dead\n",
               "it has tried all", 60)
    lines = read(evil, "out").splitlines()
    assert dict(line.split(" = ") for line in lines if " = " in line) == _WHAT_COMES, (
        read(evil, "log")
    )

    def asked() -> int:
        return len(models.upstream.asked)

    wait_until(lambda: int(usage(boss)["requests"]) == asked(), "the last one is counted")
    wait_until(lambda: tokens(boss) >= asked() * TOKENS, "what was said is counted")
    assert tokens(evil) == tokens(boss) == asked() * TOKENS
    assert usage(boss)["tokens.estimated"] == "0"
    assert (tokens(other), usage(other)["requests"]) == (0, "0")
    assert asked_by(models.upstream.asked) == {"evil": asked()}


def test_who_is_removed_while_it_asks_is_paid_for(daemon: Daemon, models: Metered) -> None:
    boss = _boss(daemon)
    models.upstream.may_answer.clear()
    kid = spend(daemon, "kid", "plain", parent="agent:boss")
    wait_until(lambda: models.upstream.asked, "it asks")
    write(kid / "ctl", "kill")
    wait_dead(kid)
    kid.rmdir()
    models.upstream.may_answer.set()
    wait_until(lambda: tokens(boss) == TOKENS, "what was said is counted")
    again = spend(daemon, "kid", "plain", parent="agent:boss", limits="tokens.max=20")
    wait_dead(again)
    assert (tokens(again), tokens(boss)) == (TOKENS, 2 * TOKENS)
    assert usage(boss)["tokens.estimated"] == "0"


def test_who_made_a_detached_one_and_is_removed_limits_it(daemon: Daemon, models: Metered) -> None:
    boss = _boss(daemon, limits="tokens.max=30")
    models.upstream.may_answer.clear()
    kid = spend(daemon, "kid", "plain", stay=True, parent="agent:boss", life="detached")
    wait_until(lambda: models.upstream.asked, "it asks")
    write(boss / "ctl", "kill")
    wait_dead(boss)
    boss.rmdir()
    boss = _boss(daemon)
    models.upstream.may_answer.set()
    wait_until(lambda: over(kid), "it is refused")
    assert (len(models.upstream.asked), tokens(kid)) == (2, 2 * TOKENS)
    assert (tokens(boss), "tokens.max=30" in read(kid, "error")) == (0, True)
