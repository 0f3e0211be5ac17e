"""The hosts that clients are set to use (ctxfs-web-list)."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.installed.weblist import CLIENTS

CHECKOUT = Path(__file__).parents[3]

PAGES = {
    "/simple/pip/": '<a href="http://files.example/pip.whl#sha256=0">x</a> '
    '<a href="../own.whl">y</a> <a href="https://files.example:8443/odd.whl">z</a>',
    "/npm/latest": '{"dist": {"tarball": "https://tarballs.example/npm.tgz"}}',
    "/config.json": '{"dl": "https://crates.example/{crate}", "api": "https://api.example"}',
}


class _Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/private/"):
            # as who asks for npm/latest is to be
            if self.headers.get("Authorization") != "Basic dTpw":
                self.send_error(401)
                return
            self.path = self.path.removeprefix("/private")
        page = PAGES.get(self.path)
        self.send_response(200 if page else 404)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Index)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


class Machine:
    """One that has the clients that a test gives it, and no others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bin = path / "bin"
        self.bin.mkdir()
        (self.bin / "cat").symlink_to("/bin/cat")
        self.env = {"PATH": str(self.bin), "HOME": str(path)}

    def has(self, client: str, script: str) -> None:
        there = self.bin / client
        there.write_text(f"#!/bin/sh\n{script}\n")
        there.chmod(0o755)

    def lists(self, *words: str) -> tuple[list[str], str]:
        done = subprocess.run(
            [sys.executable, "-m", "client.installed.weblist", *words],
            env={**self.env, "PYTHONPATH": str(CHECKOUT)},
            capture_output=True,
            text=True,
            cwd=self.path,
            timeout=60,
            check=False,
        )
        assert done.returncode == (0 if done.stdout else 1), done.stderr
        return done.stdout.splitlines(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


PIP = """case $1 in
install) echo '  -i, --index-url <url>  Base URL (default DEFAULT). This should point to';;
config) cat <<'END'
:env:.extra-index-url='https://user:secret@more.example/simple file:///opt/x'
global.find-links='https://links.example/all.html\\nhttps://10.0.0.1/'
global.proxy='http://proxy.example'
END
esac"""


def test_pip_has_an_index_and_more(machine: Machine) -> None:
    machine.has("pip", PIP.replace("DEFAULT", "https://Index.example/simple"))
    found, told = machine.lists("pip")
    assert found == ["index.example", "links.example", "more.example"]
    assert "https://10.0.0.1 is left out: addresses do not pass" in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("client", "script", "below", "hosts"),
    [
        ("pip", PIP, "/simple", {"files.example", "more.example", "links.example"}),
        ("npm", 'echo \'{"registry": "DEFAULT", "x": "https://no.example", "@a:registry": '
                '"https://scope.example/x"}\'', "/", {"tarballs.example", "scope.example"}),
        ("cargo", "echo '  failed to download from `DEFAULTconfig.json`' >&2; exit 101", "/",
         {"crates.example"}),
    ],
)  # fmt: skip
def test_what_an_index_refers_to(
    machine: Machine, index: str, client: str, script: str, below: str, hosts: set[str]
) -> None:
    machine.has(client, script.replace("DEFAULT", f"{index}{below}"))
    found, told = machine.lists(client, "--follow")
    assert set(found) == hosts, told
    assert "secret" not in told
    # a port of its own
    assert f"{index} is left out: no other port passes than 443" in told


def test_an_index_knows_who_asks(machine: Machine, index: str) -> None:
    private = index.replace("//", "//u:p@") + "/private"
    machine.has("npm", f'echo \'{{"registry": "{private}"}}\'')
    assert machine.lists("npm", "--follow")[0] == ["tarballs.example"]


def test_an_index_that_does_not_answer_is_told(machine: Machine) -> None:
    # reserved (RFC 6761)
    machine.has("npm", 'echo \'{"registry": "https://nobody.invalid/"}\'')
    found, told = machine.lists("npm", "--follow")
    assert found == ["nobody.invalid"]
    assert "nothing of https://nobody.invalid/ is followed" in told


@pytest.mark.parametrize("host", [
    ".com", ".sub.example", "a .com", "a\x0b.com", "\x1bJ.com", "-n", "*.example", "\u00e4.example",
])  # fmt: skip
def test_an_index_does_not_refer_to_more_than_a_name(
    machine: Machine, index: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list has all that is below a leading dot, and several names of one line."""
    page = f'<a href="https://good.example/x">x</a> <a href="https://{host}/x">y</a>'
    monkeypatch.setitem(PAGES, "/simple/pip/", page)
    machine.has("pip", PIP.replace("DEFAULT", f"{index}/simple"))
    found, told = machine.lists("pip", "--follow")
    assert found == ["good.example", "links.example", "more.example"]
    assert "is left out: that is no name of a host" in told
    assert "\x1b" not in told and "\x0b" not in told


def test_what_is_no_url_is_told(
    machine: Machine, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = '<a href="https://good.example/x">x</a> <a href="https://[\x1b/x">y</a>'
    monkeypatch.setitem(PAGES, "/simple/pip/", page)
    machine.has("pip", PIP.replace("DEFAULT", f"{index}/simple"))
    found, told = machine.lists("pip", "--follow")
    assert found == ["good.example", "links.example", "more.example"]
    assert "https://[?/x is left out" in told


def test_cargo_has_registries(machine: Machine) -> None:
    machine.has("cargo", "echo 'failed to fetch `https://git.example/index`' >&2; exit 101")
    (machine.path / ".cargo").mkdir()
    (machine.path / ".cargo" / "config.toml").write_text(
        '[registries.a]\nindex = "sparse+https://a.example/"\n'
    )
    assert machine.lists("cargo")[0] == ["a.example", "git.example"]


def test_go_has_proxies_and_a_database(machine: Machine) -> None:
    machine.has("go", "echo 'https://a.example,https://b.example|direct'; echo sums.example+ae3+k")
    found, told = machine.lists("go", "--follow")
    assert found == ["a.example", "b.example", "sums.example"]
    assert "no list knows" in told and "nothing is followed" in told
    machine.has("go", "echo https://a.example; echo 'x.example+k https://sums.example/db'")
    assert machine.lists("go")[0] == ["a.example", "sums.example"]
    machine.has("go", "echo off; echo off")
    assert "go is set to use no host" in machine.lists("go")[1]


def test_apt_has_sites_without_tls(machine: Machine) -> None:
    machine.has("apt-get", "echo http://a.example/debian/; echo mirror+https://b.example/list")
    assert machine.lists("apt") == (["a.example", "b.example"], "")


def test_git_has_the_remotes_of_a_repository(machine: Machine) -> None:
    machine.env["PATH"] = os.environ["PATH"]
    for words in ("init -q", "remote add origin https://token@git.example/x.git",
                  "remote add ssh git@ssh.example:x", "remote add local /srv/x",
                  "config url.https://mirror.example/.insteadOf https://other.example/",
                  "remote add other https://other.example/y"):  # fmt: skip
        subprocess.run(["git", *words.split()], cwd=machine.path, env=machine.env, check=True)
    (machine.path / ".gitmodules").write_text(
        '[submodule "a"]\n\tpath = a\n\turl = https://module.example/a\n'
    )
    found, told = machine.lists("git")
    assert found == ["git.example", "mirror.example"]
    assert "git@ssh.example:x is left out: only https passes" in told
    assert machine.lists("git", "--follow")[0] == [*found, "module.example"]


@pytest.mark.parametrize(
    ("client", "script", "warning"),
    [
        ("npm", 'echo npm warn config old >&2; echo \'{"registry": "https://a.example/"}\'',
         "npm warn config old"),
        ("go", "echo go: odd https://b.example >&2; echo https://a.example; echo off", "go: odd"),
        ("git", "echo fatal: https://b.example >&2; "
         "case $2 in get-url) echo https://a.example/x;; '') echo one;; esac", "fatal: "),
    ],
)  # fmt: skip
def test_what_a_client_warns_of_is_shown_and_is_no_host(
    machine: Machine, client: str, script: str, warning: str
) -> None:
    machine.has(client, script)
    found, told = machine.lists(client)
    assert found == ["a.example"], told
    assert warning in told


def test_a_client_that_is_missing_is_told(machine: Machine) -> None:
    assert machine.lists("go") == ([], "ctxfs-web-list: go is not installed\n")


@pytest.mark.parametrize(
    ("client", "name"),
    [("pip", "PIP_INDEX_URL"), ("npm", "npm_config_registry"), ("go", "GOPROXY")],
)
def test_the_clients_themselves_tell(machine: Machine, client: str, name: str) -> None:
    if shutil.which(client) is None:
        pytest.skip(f"{client} is not installed")
    machine.env |= {"PATH": os.environ["PATH"], name: "https://mirror.example/x"}
    assert "mirror.example" in machine.lists(client)[0]


def test_no_host_stands_in_the_program() -> None:
    text = (CHECKOUT / "client" / "installed" / "weblist.py").read_text().lower()
    assert not [word for word in ("pypi", "npmjs", "crates.io", "golang", "debian.org")
                if word in text]  # fmt: skip
    assert set(CLIENTS) == {"pip", "npm", "cargo", "go", "apt", "git"}
