"""Networks by host list (contrib/web): what programs reach there, and what nobody does.

squid and systemd-socket-proxyd run with the files as they are, but for paths; hosts and their name
server are of the test.
"""

from __future__ import annotations

import base64
import hashlib
import io
import ipaddress
import json
import shlex
import shutil
import socket
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from client import networks
from tests.worlds.daemon import TIMEOUT, Daemon, daemon_of, read, wait_dead, wait_until, write
from tests.worlds.lists import MISSING, PUBLIC, Web, web_of

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} missing: make test-web installs squid"
)

PORTS: Final = {"web": 8090, "debian": 8091, "narrow": 8092}
#: names on the list that lead where nobody may get
ASTRAY: Final = {
    "loopback.test": "127.0.0.1",
    "zero.test": "0.0.0.0",
    "metadata.test": "169.254.169.254",
    "inner.test": "10.1.2.3",
    "six.test": "::1",
    "mapped.test": "::ffff:127.0.0.1",
    "local.test": "fd00::1",
    "translated.test": "64:ff9b::7f00:1",
    "both.test": f"{PUBLIC} 127.0.0.1",
    "families.test": f"{PUBLIC} ::1",
}
HOSTS: Final = ("pypi.test", "files.test", "npm.test", "git.test", "rebinding.test")
KNOWN: Final = {
    **{name: [address] for name, address in ASTRAY.items()},
    "rebinding.test": [PUBLIC, "127.0.0.1", PUBLIC, "169.254.169.254"],
    # what the name server knows, and no list has
    "unlisted.test": [PUBLIC],
}


@dataclass
class Scene:
    web: Web
    daemon: Daemon

    def run(self, name: str, command: str, *networks: str, **files: str) -> Path:
        policy = "".join(f"allow {name}_t network:{each} connect\n" for each in networks)
        return self.daemon.make(name, command, policy=policy, **files)

    def finish(self, name: str, command: str, *networks: str, **files: str) -> str:
        agent = self.run(name, command, *networks, **files)
        write(agent / "ctl", "start")
        wait_dead(agent)
        return read(agent, "out")


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    lists = {"web": [*HOSTS, *ASTRAY], "debian": ["debian.test"], "narrow": ["git.test"]}
    with web_of(lists, KNOWN) as web:
        lines = "".join(
            f"  {name}: {{socket: {web.socket_of(name)}, port: {port}, header: proxy, "
            "kind: http_proxy}\n"
            for name, port in PORTS.items()
        )
        with daemon_of(config=f"networks:\n{lines}") as daemon:
            yield Scene(web, daemon)
        assert web.reached == []
        assert set(web.names.asked) <= {*HOSTS, *ASTRAY, "debian.test"}


# what clients get


def _wheel(files: Path) -> None:
    """An index with a package, whose files are at another host."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr("demo.py", "")
        wheel.writestr("demo-1.0.dist-info/METADATA",
                       "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        wheel.writestr("demo-1.0.dist-info/WHEEL",
                       "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("demo-1.0.dist-info/RECORD", "")
    name = "demo-1.0-py3-none-any.whl"
    (files / "files.test" / name).write_bytes(made.getvalue())
    page = files / "pypi.test" / "simple" / "demo" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="https://files.test/{name}">{name}</a>')


def _package(files: Path, project: Path) -> None:
    """A package of npm, and a project that needs it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as packed:
        text = b'{"name": "demo", "version": "1.0.0"}'
        info = tarfile.TarInfo("package/package.json")
        info.size = len(text)
        packed.addfile(info, io.BytesIO(text))
    (files / "npm.test" / "demo.tgz").write_bytes(made.getvalue())
    project.mkdir()
    needs = {"name": "x", "version": "1.0.0", "dependencies": {"demo": "1.0.0"}}
    sha = base64.b64encode(hashlib.sha512(made.getvalue()).digest()).decode()
    demo = {"version": "1.0.0", "resolved": "https://npm.test/demo.tgz",
            "integrity": f"sha512-{sha}"}  # fmt: skip
    lock = {**needs, "lockfileVersion": 3, "requires": True,
            "packages": {"": needs, "node_modules/demo": demo}}  # fmt: skip
    (project / "package.json").write_text(json.dumps(needs))
    (project / "package-lock.json").write_text(json.dumps(lock))


def _repository(files: Path) -> None:
    there = files / "git.test" / "demo.git"
    script = ('git init -q --bare "$1"; cd "$1"; tree=$(git mktree </dev/null); '
              'made=$(git -c user.name=x -c user.email=x commit-tree -m x "$tree"); '
              'git update-ref HEAD "$made"; '
              "git update-server-info")  # fmt: skip
    subprocess.run(["sh", "-ec", script, "sh", there], check=True, timeout=TIMEOUT)


def _archive(files: Path) -> None:
    empty = hashlib.sha256(b"").hexdigest()
    there = files / "debian.test"
    (there / "Packages").touch()
    (there / "Release").write_text(
        f"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {empty} 0 Packages\n"
    )


#: what is run in a cell by each client, where only HTTPS_PROXY and the like say how to get out
CLIENTS: Final = {
    "pip": "python3 -m pip --isolated install -q --no-cache-dir --target py "
    "--index-url https://pypi.test/simple demo && test -e py/demo.py",
    "npm": "cp -r /data/project npm && cd npm && npm ci --no-audit --no-fund --fetch-retries 0 "
    "--registry https://npm.test && test -e node_modules/demo/package.json",
    "git": "git clone -q https://git.test/demo.git cloned && git -C cloned log -1",
    "curl": "test 404 = $(curl -sS -o /dev/null -w '%{http_code}' https://git.test/nothing)",
    "apt-get": "mkdir -p apt/lists/partial apt/cache apt/etc && "
    'echo "deb [trusted=yes] http://debian.test/ ./" > apt/sources && '
    'apt-get -o Acquire::http::Proxy="$CTX_NET_DEBIAN" -o Debug::NoLocking=1 '
    "-o Dir::Etc=$PWD/apt/etc -o Dir::Etc::sourcelist=$PWD/apt/sources "
    "-o Dir::State=$PWD/apt -o Dir::Cache=$PWD/apt/cache update && "
    "ls apt/lists/debian.test_._Release",
}


def _has(client: str) -> bool:
    """Whether it is where agents find it."""
    if client == "pip":
        asked = ("/usr/bin/python3", "-I", "-m", "pip", "--version")
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return shutil.which(client, path="/usr/bin:/bin:/usr/local/bin") is not None


@pytest.fixture(scope="module")
def cloned(scene: Scene) -> Path:
    """What the hosts have; and for the clients a directory, where agents have it as /data."""
    data = scene.web.base / "data"
    data.mkdir()
    shutil.copy(scene.web.certificate, data / "trusted.crt")
    for prepare in (_wheel, _repository, _archive):
        prepare(scene.web.files)
    _package(scene.web.files, data / "project")
    return data


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_what_the_lists_allow(scene: Scene, cloned: Path, client: str) -> None:
    if not _has(client):
        pytest.skip(f"{client} is not installed for all users")
    trusted = ("PIP_CERT", "NPM_CONFIG_CAFILE", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE")
    env = "".join(f"{name}=/data/trusted.crt\n" for name in trusted)
    script = f"export HOME=$(mktemp -d) && cd && {CLIENTS[client]} && echo has it"
    said = scene.finish(f"c-{client}", f"sh -c {shlex.quote(script)}", "web", "debian",
                        mount=f"{cloned} /data ro", env=env)  # fmt: skip
    agent = scene.daemon.agent_dir(f"c-{client}")
    assert said.endswith("has it\n"), said + read(agent, "log")
    # each line says whose it is
    (address,) = {line.split()[1] for line in _logged(scene, read(agent, "incarnation").strip())}
    assert scene.daemon.ctx("who", address).stdout.startswith(f"c-{client} of uid ")


# what nobody gets

#: sends requests to a port, each on a connection of its own, and tells the statuses
ASKS: Final = """
import json, socket, sys
for text in json.load(open(sys.argv[2])):
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30)
    said = b""
    try:
        s.sendall(text.encode("latin-1"))
        while b"\\r\\n" not in said and (part := s.recv(4096)):
            said += part
    except ConnectionError:
        pass
    print(json.dumps(said.decode("latin-1").split(" ")[1:2]))
"""


def _asked(scene: Scene, name: str, requests: list[str], network: str = "web") -> list[str]:
    """The status of each answer."""
    data = scene.web.base / name
    data.mkdir()
    (data / "asks.py").write_text(ASKS)
    (data / "requests").write_text(json.dumps(requests))
    command = f"python3 /data/asks.py {PORTS[network]} /data/requests"
    out = scene.finish(name, command, network, mount=f"{data} /data ro")
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == len(requests), out + read(scene.daemon.agent_dir(name), "log")
    return ["".join(each) for each in found]


def _logged(scene: Scene, life: str) -> list[str]:
    """What the proxy logged of an incarnation."""
    parts = [f"{int(life[at : at + 4], 16):x}" for at in range(0, 16, 4)]
    address = str(ipaddress.IPv6Address(f"fd63:7478:6673:0:{':'.join(parts)}"))
    return [line for line in scene.web.asked() if line.split()[1] == address]


def _connect(target: str) -> str:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"


def _request(line: str, host: str = "git.test") -> str:
    return f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n"


LITERAL: Final = ("127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1", "[::1]",
                  "[::ffff:127.0.0.1]", "[::]", "203.0.113.7", "127.0.0.1.", "0", "1.0x1",
                  "[fe80::1%25lo]")  # fmt: skip
#: with status
REFUSED: Final = [
    *((_connect(f"{host}:443"), "403") for host in LITERAL),
    *((_connect(f"{host}:443"), "403") for host in ("localhost", "LOCALHOST.", "ip6-localhost")),
    *((_connect(f"{host}:443"), "403") for host in ASTRAY),
    # other hosts: above, below, beside, and those that would carry data to a name server
    *((_connect(f"{host}:443"), "403") for host in (
        "unlisted.test", "test", "a.git.test", "git.test.unlisted.test", "xgit.test", "git.tes",
        "c2VjcmV0.unlisted.test", "secret.git.test", "debian.test")),
    # other ports
    *((_connect(f"git.test:{port}"), "403") for port in (22, 80, 1, 8443, 3128, 65535)),
    # other ways
    *((_request(f"{method} https://git.test/"), "403") for method in ("GET", "HEAD", "POST")),
    *((_request(f"{method} http://git.test/"), "403") for method in (
        "GET", "HEAD", "POST", "PUT", "TRACE", "DELETE", "OPTIONS", "PURGE", "PROPFIND")),
    (_request("GET http://git.test:443/"), "403"),
    (_request("GET ftp://git.test/"), "403"),
    (_request("GET http://127.0.0.1:3128/squid-internal-mgr/info", "127.0.0.1"), "403"),
    (_request("GET http://ctxfs-web/squid-internal-mgr/menu", "ctxfs-web"), "403"),
    (_request("GET http://ctxfs-web:3128/squid-internal-static/icons/SN.png", "ctxfs-web"), "403"),
    (_request("GET cache_object://localhost/info", "localhost"), "403"),
    (_request("GET cache_object://git.test/info"), "403"),
    (_request("GET http://git.test@127.0.0.1/"), "403"),
    # spellings
    *((_connect(target), "403") for target in (
        "unlisted.test@git.test:443", "git.test%0d%0a:443", "git.test%00.unlisted.test:443",
        "git.test/unlisted.test:443", "git.test#unlisted.test:443",
        "git.test,unlisted.test:443", "git.test%2eunlisted.test:443")),
]  # fmt: skip
#: is refused somehow, or not answered at all
BROKEN: Final = [
    "CONNECT git.test:443\r\nunlisted.test:443 HTTP/1.1\r\n\r\n",
    _connect("::1:443"),
    _connect(".git.test:443"),
    "CONNECT git.test\0.unlisted.test:443 HTTP/1.1\r\n\r\n",
    "GET /squid-internal-mgr/menu HTTP/1.1\r\nHost: git.test\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: git.test\r\n\r\n",
    "\r\n\r\n\0\r\nQUIT\n\x21\x21\0\x24" + "\0" * 36 + _connect("git.test:443"),
    "PROXY TCP6 ::1 ::1 1 1\r\n" + _connect("git.test:443"),
]
#: is a host of the list at 443, by whatever spelling
SAME: Final = ("GIT.test:443", "git.test.:443", "git.test", "git.test:443@unlisted.test:443")


def test_nothing_else_is_reached(scene: Scene) -> None:
    asked = list(scene.web.names.asked)
    found = _asked(scene, "tries", [request for request, _ in REFUSED])
    wrong = [
        (request, status, said)
        for (request, status), said in zip(REFUSED, found, strict=True)
        if said != status
    ]
    assert not wrong, wrong
    assert {*_asked(scene, "breaks", BROKEN)} <= {"400", "403", ""}
    same = [_connect(target) for target in SAME]
    assert _asked(scene, "spells", same) == ["200"] * len(SAME)
    life = read(scene.daemon.agent_dir("spells"), "incarnation").strip()
    assert {line.split(" ", 3)[3] for line in _logged(scene, life)} == {
        f"git.test:443 200 {PUBLIC} 39"
    }
    # no name that is on no list
    assert {*scene.web.names.asked[len(asked) :]} <= {*ASTRAY, "git.test"}


def test_a_name_that_rebinds_is_refused_where_it_leads_inside(scene: Scene) -> None:
    found: list[str] = []
    while not {"200", "403"} <= {*found}:
        requests = [_connect("rebinding.test:443")] * 200
        found += _asked(scene, f"rebinds-{len(found)}", requests)
    assert {*found} == {"200", "403"}


def test_what_is_plain_passes_to_one_list_alone(scene: Scene, cloned: Path) -> None:
    requests = [_request(f"{method} http://debian.test/Release", "debian.test") for method in (
        "GET", "HEAD", "POST", "PUT", "TRACE")]  # fmt: skip
    found = _asked(scene, "reads", requests, "debian")
    assert found == ["200", "200", "403", "403", "403"]
    assert _asked(scene, "reads-not", requests) == ["403"] * 5
    # what follows on the connection is judged as well, and no body hides a request
    more = [
        requests[0] + _connect("unlisted.test:443"),
        requests[0] + _request("GET http://127.0.0.1/", "127.0.0.1"),
        _request("GET http://debian.test/Release", "debian.test\r\nContent-Length: 9\r\n"
                 "Transfer-Encoding: chunked") + "0\r\n\r\n" + _connect("unlisted.test:443"),
    ]  # fmt: skip
    _asked(scene, "goes-on", more, "debian")
    life = read(scene.daemon.agent_dir("goes-on"), "incarnation").strip()
    wait_until(lambda: len(_logged(scene, life)) >= 5, "all are logged")
    statuses = {tuple(line.split()[3:5]) for line in _logged(scene, life)}
    assert {target for target, status in statuses if status == "200"} == {
        "http://debian.test/Release"
    }


def test_a_child_has_what_its_own_line_says(scene: Scene, cloned: Path) -> None:
    reach = "for host in git npm; do curl -sk -o /dev/null -m 30 https://$host.test/; echo $?; done"
    parent = scene.run("parent", "sleep infinity", "web", "narrow")
    write(parent / "ctl", "start")
    told = {}
    for name, policy in (("nothing", ""), ("narrow", "allow narrow_t network:narrow connect"),
                         ("all", "allow all_t network:web connect")):  # fmt: skip
        child = scene.daemon.make(name, f"sh -c {shlex.quote(reach)}", parent="agent:parent",
                                  policy=policy)  # fmt: skip
        write(child / "ctl", "start")
        wait_dead(child)
        told[name] = read(child, "out").split()
    # 6: there is no name server; 56: refused by the proxy
    assert told == {"nothing": ["6", "6"], "narrow": ["0", "56"], "all": ["0", "0"]}


def test_a_download_ends_with_the_line(scene: Scene, cloned: Path) -> None:
    script = "curl -sSk --no-buffer https://git.test/endless | tr '\\0' '.'; echo ends"
    agent = scene.run("loads", f"sh -c {shlex.quote(script)}", "web")
    write(agent / "ctl", "start")
    wait_until(lambda: "." in read(agent, "out"), "it comes")
    begun = time.monotonic()
    write(agent / "policy", "")
    wait_dead(agent)
    assert time.monotonic() - begun < 1
    assert "ends" in read(agent, "out")


def test_no_other_process_of_the_machine_speaks_to_the_proxy(scene: Scene) -> None:
    apart, lists = scene.web.apart, str(scene.web.base / "web" / "lists")
    with pytest.raises(ConnectionRefusedError):
        apart.do(socket.create_connection, ("127.0.0.1", 3128))
    found = [level for level, _, _ in apart.do(lambda: [*networks.check_lists(lists)])]
    assert found == ["ok"] * len(PORTS)
    path = str(scene.web.socket_of("web"))
    *_, answers = networks.check_network("n", 61001, path, "proxy", "http_proxy")
    assert answers[:2] == ("ok", "n: answers GET / with 400")
    # without the rule
    apart.do(subprocess.run, ["nft", "delete", "table", "inet", "ctxfs_web"], check=True)
    found = [level for level, _, _ in apart.do(lambda: [*networks.check_lists(lists)])]
    assert found == ["FAIL"] * len(PORTS)
