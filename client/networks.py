"""Findings of the command doctor on networks, and on the meter of what agents use of models."""

from __future__ import annotations

import os
from contextlib import suppress

from client.files import read_file
from client.output import decode
from client.types import Iterator

#: its level, what it is, and what to do about it
Finding = tuple[str, str, str]

NETWORKS = "correct networks in /etc/ctxfs/config.yaml; systemctl reload ctxd"
SEE_PROXY = "see the log of what listens there: journalctl -u ctxfs-proxy -n 50"
SEE_METER = "systemctl start ctxfs-meter; see its log: journalctl -u ctxfs-meter -n 50"
SEE_WEB = "see its log: journalctl -u ctxfs-web -n 50"
LISTS = "/etc/ctxfs/web/lists"
METER = "/etc/ctxfs/meter.yaml"
#: what an ordinary user, with an own daemon, does instead
OWN = {
    NETWORKS: "correct networks in ~/.config/ctxfs/config.yaml; systemctl --user reload ctxd",
    SEE_PROXY: "see what your proxy says",
    SEE_METER: "start yours: ctxfs-meter --config FILE; see what it says",
    "systemctl start ctxfs-proxy": "start yours",
    "systemctl reload ctxfs-meter": "send SIGHUP to your ctxfs-meter",
}
#: how long the socket of a network may take to answer, and a name that is not there
ANSWER_SECONDS = 2.0
ASKED = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
#: of a life that no agent has, as relays begin where `header: proxy` is (relay.c)
NOBODY = bytes.fromhex("fd63747866730000" + "00" * 8)
HEADER = b"\r\n\r\n\0\r\nQUIT\n\x21\x21\0\x24" + 2 * NOBODY + b"\0\1\0\1"


def judge(good: bool, what: str, level: str, problem: str, remedy: str) -> Finding:
    """Return the finding `what` if good, else the problem and its remedy."""
    return ("ok", what, "") if good else (level, problem, remedy)


def check_networks(status: dict[str, str], rootless: bool = False) -> Iterator[Finding]:
    """Judge the sockets of the networks that the daemon has, and what its meter has."""
    for level, what, remedy in check_sockets(status, "" if rootless else METER):
        for said, instead in OWN.items() if rootless else ():
            remedy = remedy.replace(said, instead)
        yield level, what, remedy


def check_sockets(status: dict[str, str], config: str) -> Iterator[Finding]:
    """Judge the sockets, and the configuration of a meter, which is `config` if none listens."""
    paths = {}
    metered = []
    kinds = []
    for key, value in status.items():
        if not key.startswith("network."):
            continue
        _, uid, path = value.split(" ", 2)
        name = key.removeprefix("network.")
        header = status.get(f"header.{name}", "none")
        paths[path] = f"network:{name}"
        if header == "counters":
            metered.append(path)
        kinds.append(status.get(f"kind.{name}", "api"))
        yield from check_network(paths[path], int(uid), path, header, kinds[-1])
    if metered and (file := meter_file(metered[0]) or config):
        yield from check_meter(paths, metered, int(uid), file)
    if "http_proxy" in kinds:
        yield from check_lists(LISTS)


def check_network(
    name: str, relay: int, path: str, header: str = "none", kind: str = "api"
) -> Iterator[Finding]:
    """Judge one socket: whether it is there, who may connect to it, and whether it answers.

    `relay` is the uid that connects to it for agents.
    """
    import stat

    try:
        found = os.stat(path)
    except PermissionError:
        yield "ok", f"{name}: {path}: only root and the relays can look", ""
        return
    except OSError as error:
        unit = "ctxfs-proxy"
        if kind == "http_proxy":
            unit = f"ctxfs-web@{os.path.basename(path).removesuffix('.sock')}.socket"
        start = f"start what listens there, such as the proxy: systemctl start {unit}"
        remedy = SEE_METER if header == "counters" else start
        yield "warn", f"{name}: {path}: {error.strerror}", remedy
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield "warn", f"{name}: {path} is not a socket", NETWORKS
        return
    if not all(permits(each, relay, bit) for each, bit in way_to(path)):
        problem = f"{name}: the relays (uid {relay}) may not connect to {path}"
        place = os.path.dirname(path)
        remedy = f"chgrp ctxfs-relay {place} {path}; chmod 750 {place}; chmod 660 {path}"
        yield "warn", problem, remedy
    elif all(each.st_mode & bit for each, bit in way_to(path)):
        problem = f"{name}: every user may connect to {path}, and so agents that see it"
        remedy = f"put it into a directory of its own, and: chmod o-x {os.path.dirname(path)}"
        yield "warn", problem, remedy
    else:
        yield "ok", f"{name}: {path}: the relays (uid {relay}) may connect, not everybody", ""
    if header == "counters":
        yield check_taken(name, path)
    else:
        asked = (HEADER if header == "proxy" else b"") + ASKED
        yield check_answer(name, path, asked, SEE_WEB if kind == "http_proxy" else SEE_PROXY)


def way_to(path: str) -> Iterator[tuple[os.stat_result, int]]:
    """Yield each directory of a path and its end, with the permission that others need there."""
    path = os.path.realpath(path)
    yield os.stat(path), 0o002
    while path != "/":
        path = os.path.dirname(path)
        yield os.stat(path), 0o001


def permits(found: os.stat_result, uid: int, bit: int) -> bool:
    """Return whether a file gives a user the permission that others would have by `bit`."""
    import pwd

    groups = [uid]  # of who is in no passwd(5)
    with suppress(KeyError):
        entry = pwd.getpwuid(uid)
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
    return uid == 0 or bool(found.st_mode & bit << shift)


def check_answer(
    name: str, path: str, asked: bytes = ASKED, remedy: str = SEE_PROXY
) -> Finding:
    """Judge whether an HTTP server answers, and refuses what is no request to a model."""
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(path)
            connection.sendall(asked)
            said = connection.recv(64)
        except PermissionError:
            return "ok", f"{name}: only root and the relays can ask whether it answers", ""
        except OSError as error:
            why = error.strerror or f"no answer within {ANSWER_SECONDS:g} s"
            return "warn", f"{name}: {path}: {why}", remedy
    words = decode(said).split(" ")
    if not words[0].startswith("HTTP/") or len(words) < 2:
        return "warn", f"{name}: {path} does not speak HTTP", remedy
    remedy = "use the proxy, which lets only requests to models pass: systemctl start ctxfs-proxy"
    what = f"{name}: answers GET / with {words[1]}"
    return judge(not words[1].startswith("2"), what, "warn", f"{what}, not a refusal", remedy)


def check_taken(name: str, path: str) -> Finding:
    """Judge whether a meter listens: it closes what is no connection of a relay, without a word."""
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(path)
            said = b""
            with suppress(ConnectionError):
                connection.sendall(ASKED)
                said = connection.recv(64)
        except PermissionError:
            return "ok", f"{name}: only root and the relays can ask whether a meter listens", ""
        except OSError as error:
            why = error.strerror or f"not closed within {ANSWER_SECONDS:g} s"
            return "warn", f"{name}: {path}: {why}", SEE_METER
    problem = f"{name}: no meter listens at {path}: it answers who is no relay"
    return judge(not said, f"{name}: a meter listens", "warn", problem, NETWORKS)


def meter_file(path: str) -> str:
    """Return the configuration of the meter that listens at a socket; empty if none does."""
    import socket
    import struct

    words, place = [], "/"
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(path)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", peer)
        words = decode(read_file(f"/proc/{pid}/cmdline")).split("\0")
        place = os.readlink(f"/proc/{pid}/cwd")
    told = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    if "--config" in words[:-1]:
        told.append(words[words.index("--config") + 1])
    return os.path.join(place, told[0]) if told else METER if words else ""


def check_meter(
    paths: dict[str, str], metered: list[str], relay: int, file: str
) -> Iterator[Finding]:
    """Judge whether the meter's configuration is that of ctxd, and whether relays get past it.

    `paths` has what is at each socket that ctxd knows; `metered` are those of a meter. `relay` is
    the uid that connects to them.
    """
    import re

    try:
        text = decode(read_file(file))
    except OSError as error:
        yield "warn", f"the configuration of the meter: {file}: {error.strerror}", SEE_METER
        return
    found = {
        key: re.findall(rf"^[^#\n]*?\b{key}\s*:\s*[\"']?(/[^\s\"',}}]+)", text, re.M)
        for key in ("socket", "upstream")
    }
    reload = f"correct networks in {file}; systemctl reload ctxfs-meter"
    lacking = [path for path in metered if path not in found["socket"]]
    for path in lacking:
        yield "warn", f"{paths[path]}: the meter has no socket {path} in {file}", reload
    for path in found["socket"]:
        if path not in metered:
            network = paths.get(path)
            lacks = f"{network} lacks header: counters" if network else "no network is there"
            yield "warn", f"the meter listens at {path}, and {lacks}", NETWORKS
    for path in dict.fromkeys(found["upstream"]):
        yield check_past(paths, relay, path)
    if not lacking:
        yield "ok", f"the networks in {file} are those of ctxd", ""


def check_past(paths: dict[str, str], relay: int, path: str) -> Finding:
    """Judge whether relays, and so agents, could reach a socket behind the meter without it."""
    if path in paths:
        return "warn", f"{paths[path]} leads to {path}, past the meter", NETWORKS
    try:
        reached = all(permits(each, relay, bit) for each, bit in way_to(path))
        own = os.stat(path).st_uid == relay
    except PermissionError:
        return "ok", f"{path}, behind the meter: only root and the meter can look", ""
    except OSError as error:
        return "warn", f"behind the meter: {path}: {error.strerror}", SEE_PROXY
    if reached and own:
        only = "only sandboxes keep agents from what is behind the meter"
        return "weak", f"relays and the meter have one user, {relay}: {only}", ""
    problem = f"the relays (uid {relay}) may connect to {path}, past the meter"
    place = os.path.dirname(path)
    remedy = f"chgrp ctxfs-meter {place} {path}; chmod 750 {place}; chmod 660 {path}"
    return judge(not reached, f"{path}: reached by the meter alone", "warn", problem, remedy)


def check_lists(directory: str) -> Iterator[Finding]:
    """Judge whether others than relays could speak to the proxy of contrib/web, as any agent."""
    import re
    import socket

    places: list[str] = []
    with suppress(OSError):
        for name in sorted(os.listdir(directory)):
            if name.endswith(".conf"):
                text = decode(read_file(os.path.join(directory, name)))
                places += re.findall(r"^\s*https?_port\s+(\S+)", text, re.M)
    for place in places:
        host, _, port = place.rpartition(":")
        if host != "127.0.0.1":
            problem = f"{place}, in {directory}: a list listens at 127.0.0.1 alone"
            yield "FAIL", problem, f"write 127.0.0.1:{port}; systemctl restart ctxfs-web"
        reached = False
        with suppress(OSError, ValueError):
            socket.create_connection(("127.0.0.1", int(port)), ANSWER_SECONDS).close()
            reached = True
        problem = f"every process of this machine may connect to {place}, as whichever agent"
        remedy = "systemctl restart ctxfs-web, which loads /etc/ctxfs/web/ctxfs-web.nft; its ports "
        remedy += "are 3128 to 3159"
        what = f"{place}, where a list is: reached by the way of relays alone"
        yield judge(not reached, what, "FAIL", problem, remedy)
