"""The program ctxfs-web-list: which hosts this machine's own clients are set to use, for a list of
contrib/web.

No host is known here. Each client says where it would go, so that mirrors are found, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

#: no leading dot, by which a list has all that is below, and nothing that stands for two names
NAME = re.compile(r"[a-z0-9_][a-z0-9_-]*(\.[a-z0-9_-]+)*\.?")
URL = re.compile(r"https?://[^\s'\"`<>,|\\]+")
#: how long a client may take, and a host to answer, in seconds
SECONDS = 60.0
#: most of an answer that is read
SIZE = 16 << 20
#: where nothing listens, so that a client says where it wanted to go, and gets nowhere
NOWHERE = "http://127.0.0.1:9"
MANIFEST = """\
[package]
name = "asks"
version = "0.1.0"
edition = "2021"
[dependencies]
a = "*"
"""


class ListError(Exception):
    """Says in one sentence what is wrong."""


def note(sentence: str) -> None:
    """Tell what a list cannot have, or what is not known; an index may have made up the name."""
    shown = "".join(each if each.isprintable() else "?" for each in sentence)
    print(f"ctxfs-web-list: {shown}", file=sys.stderr)


def said(*command: str, errors: int | None = None, **environment: str) -> str:
    """Return what a client says, in English; it may fail.

    Its errors and warnings are shown, unless `errors` has them go elsewhere.
    """
    if shutil.which(command[0]) is None:
        raise ListError(f"{command[0]} is not installed")
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "LC_ALL": "C.UTF-8", **environment},
        timeout=SECONDS,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def pip() -> Iterator[str]:
    """Yield the index, as pip itself shows its default, and what the configuration adds."""
    # in one line each
    text = said("pip", "install", "--help", COLUMNS="1000")
    yield from re.findall(r"--index-url\s.*\(default (\S+?)\)", text)
    for line in said("pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        if key.endswith(("extra-index-url", "find-links")):
            yield from URL.findall(value)


def npm() -> Iterator[str]:
    """Yield the registry, and those of scopes."""
    for key, value in json.loads(said("npm", "config", "list", "--json")).items():
        if key == "registry" or key.endswith(":registry"):
            yield value


def cargo() -> Iterator[str]:
    """Yield where cargo would look for a crate, and the registries that its configuration names.

    Only its error says where it looks if nothing is configured.
    """
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    configured = [path for path in (home / "config.toml", home / "config") if path.exists()][:1]
    more = [f"--config={path}" for path in configured]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "Cargo.toml").write_text(MANIFEST)
        (Path(place) / "src").mkdir()
        (Path(place) / "src" / "lib.rs").touch()
        # a home without what was fetched before, which would not be asked for again
        text = said("cargo", *more, "fetch", f"--manifest-path={place}/Cargo.toml",
                    errors=subprocess.STDOUT, CARGO_HOME=f"{place}/home", CARGO_HTTP_PROXY=NOWHERE,
                    CARGO_NET_RETRY="0", CARGO_NET_OFFLINE="false",
                    CARGO_TERM_COLOR="never")  # fmt: skip
    asked = r"failed to (?:download from|fetch) `(https?://[^`]+?)(?:config\.json)?`"
    yield from re.findall(asked, text)
    for path in configured:
        yield from re.findall(r'^\s*index\s*=\s*"(?:sparse\+)?(https?://[^"]+)"',
                              path.read_text(), re.MULTILINE)  # fmt: skip


def go() -> Iterator[str]:
    """Yield the module proxies, and the database of checksums."""
    proxies, database, *_ = [*said("go", "env", "GOPROXY", "GOSUMDB").splitlines(), "", ""]
    yield from URL.findall(proxies)
    if "direct" in re.split("[,|]", proxies):
        note("go fetches what its proxies lack from the modules' own hosts, which no list knows")
    *_, last = ["off", *database.split()]
    if last != "off":
        yield last if "://" in last else f"https://{last.partition('+')[0]}"


def apt() -> Iterator[str]:
    """Yield the sites of the sources."""
    for line in said("apt-get", "indextargets", "--format", "$(REPO_URI)").splitlines():
        yield from URL.findall(line)


def git() -> Iterator[str]:
    """Yield the remotes of the repository in the current directory, and what replaces others."""
    for name in said("git", "remote").splitlines():
        yield from said("git", "remote", "get-url", "--all", name).splitlines()
    replacing = said("git", "config", "--get-regexp", r"^url\..*\.insteadof$")
    yield from re.findall(r"^url\.(https?://\S+?)\.insteadof ", replacing, re.MULTILINE)


def submodules(_: str) -> Iterator[str]:
    """Yield the remotes of submodules."""
    top = said("git", "rev-parse", "--show-toplevel").strip()
    lines = said("git", "config", "--file", f"{top}/.gitmodules", "--get-regexp", r"\.url$")
    yield from URL.findall(lines)


def bare(url: str) -> str:
    """Return a URL without a user and a password."""
    return re.sub("//[^/]*@", "//", url, count=1)


def answer(url: str) -> tuple[str, str]:
    """Return the URL that answers, and what it says."""
    asked = urllib.request.Request(bare(url), headers={"User-Agent": "ctxfs-web-list"})
    user, _, _ = urlsplit(url).netloc.rpartition("@")
    if user:
        word = b64encode(unquote(user).encode()).decode()
        asked.add_unredirected_header("Authorization", f"Basic {word}")
    with urllib.request.urlopen(asked, timeout=SECONDS) as said:
        return said.geturl(), said.read(SIZE).decode(errors="replace")


def follower(page: str, refers: str) -> Callable[[str], Iterator[str]]:
    """Return what reads a page below an index, and yields the URLs that match there."""

    def follow(index: str) -> Iterator[str]:
        url = urljoin(f"{index.rstrip('/')}/", page)
        try:
            there, text = answer(url)
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            note(f"{bare(url)}: {why}: nothing of {bare(index)} is followed")
            return
        yield there
        for each in re.findall(refers, text):
            try:
                yield urljoin(there, each)
            except ValueError:
                yield each  # which is told

    return follow


@dataclass(frozen=True)
class Client:
    """Tells what it uses, and what each of that refers to, if it refers to anything."""

    uses: Callable[[], Iterator[str]]
    follow: Callable[[str], Iterator[str]] | None = None


CLIENTS = {
    "pip": Client(pip, follower("pip/", r'href="([^"#]+)')),
    "npm": Client(npm, follower("npm/latest", r'"tarball"\s*:\s*"([^"]+)"')),
    "cargo": Client(cargo, follower("config.json", r'"dl"\s*:\s*"([^"{]+)')),
    "go": Client(go),
    "apt": Client(apt),
    "git": Client(git, submodules),
}


def hosts(urls: Iterable[str], *, plain: bool) -> Iterator[str]:
    """Yield the hosts of these that a list can have."""
    for url in urls:
        if url.startswith(("file:", "/")):
            continue
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        place = f"{parts.scheme}://{host}{f':{port}' if port else ''}" if host else url
        if not host or parts.scheme not in ("https", "http"):
            note(f"{place} is left out: only https passes")
        elif re.search(r"(^|\.)(0x[0-9a-f]*|[0-9]+)\.?$", host) or ":" in host:
            note(f"{place} is left out: addresses do not pass, only names")
        elif not NAME.fullmatch(host):
            note(f"{place} is left out: that is no name of a host")
        elif port not in (None, 80 if parts.scheme == "http" else 443):
            note(f"{place} is left out: no other port passes than 443")
        else:
            if parts.scheme == "http" and not plain:
                note(f"{place}: what is not https passes in the list debian alone")
            yield host.rstrip(".")


def found(name: str, *, follow: bool) -> set[str]:
    """Return the hosts of one client."""
    client = CLIENTS[name]
    urls = [url for url in dict.fromkeys(client.uses()) if url]
    more: list[str] = []
    if follow and client.follow is None:
        note(f"{name} refers to no other hosts: nothing is followed")
    elif follow and client.follow is not None:
        for url in urls if client.follow is not submodules else [""]:
            more += client.follow(url)
    have = {*hosts([*urls, *dict.fromkeys(more)], plain=name == "apt")}
    if not have:
        raise ListError(f"{name} is set to use no host that a list can have")
    return have


def main() -> int:
    """Print the hosts of some clients."""
    parser = argparse.ArgumentParser(
        prog="ctxfs-web-list",
        allow_abbrev=False,
        description="Print the hosts that clients on this machine are set to use, one a line, for "
        "a list of ctxfs-web. Look at them before agents reach them.",
    )
    parser.add_argument("client", nargs="+", choices=CLIENTS, metavar="pip|npm|cargo|go|apt|git")
    parser.add_argument("--follow", action="store_true", help="also the hosts to which an index "
                        "refers, by one request to each; of git, those of submodules")  # fmt: skip
    options = parser.parse_args()
    try:
        each = [found(name, follow=options.follow) for name in options.client]
    except (ListError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        note(str(error))
        return 1
    print("\n".join(sorted(set().union(*each))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
