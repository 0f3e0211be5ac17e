"""What a cell has of the host because a program would not work without."""

from __future__ import annotations

import pytest

from runtime.cell import prepared
from runtime.kernel import links
from tests.worlds.records import World, operator

VIEW = ("/usr", "/etc", "/var/lib/dpkg")
OWN = ("/var/lib/ctxfs", "/run/ctxfs", "/ctx")


def led_to(
    monkeypatch: pytest.MonkeyPatch, *paths: str, network: bool = True
) -> list[tuple[str, ...]]:
    monkeypatch.setattr(links, "targets", lambda top: paths if top == "/etc" else ())
    return list(prepared.led_to(VIEW, OWN, network=network))


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/run/systemd/resolve/stub", ("/run/systemd/resolve", "/run/systemd/resolve/stub")),
        ("/var/run/net/resolv.conf", ("/run/net", "/run/net/resolv.conf")),
        ("/var/lib/ca/pem", ("/var/lib/ca", "/var/lib/ca/pem")),
        ("/mnt/wsl/resolv.conf", ("/mnt/wsl", "/mnt/wsl/resolv.conf")),
        # a directory of many things, or with those of the daemon, is not shown for one of them
        ("/var/lib/bundle", ("-", "/var/lib/bundle")),
        ("/run/motd", ("-", "/run/motd")),
        ("/srv/x", ("-", "/srv/x")),
    ],
)
def test_the_directory_is_shown(
    monkeypatch: pytest.MonkeyPatch, path: str, shown: tuple[str, str]
) -> None:
    assert led_to(monkeypatch, path) == [("reach", *shown)]


@pytest.mark.parametrize(
    "path",
    [
        *("/usr/share/zoneinfo/UTC", "/var/lib/dpkg/status", "/proc/self/mounts", "/dev/null"),
        *("/home/ann/x/y", "/root/x", "/tmp/x/y", "/var/tmp/x/y", "/run/ctx/net/x"),
        *("/var/lib/ctxfs/a/b", "/run/ctxfs/root/x", "/ctx/agent/x", "/run", "/", "/var"),
    ],
)
def test_nothing_is_shown_twice_nor_what_is_others(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert led_to(monkeypatch, path) == []


def test_sockets_of_services_are_for_cells_with_the_hosts_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = "/run/systemd/resolve/stub", "/var/run/x/y", "/var/lib/ca/pem"
    found = led_to(monkeypatch, *paths, network=False)
    assert found == [("reach", "/var/lib/ca", "/var/lib/ca/pem")]


@pytest.mark.parametrize(("uid", "name"), [(4711, "uid4711"), (61000, "ctxfs")])
def test_a_uid_that_nobody_has_gets_a_name_and_the_home_of_the_cell(
    world: World, monkeypatch: pytest.MonkeyPatch, uid: int, name: str
) -> None:
    monkeypatch.setattr(prepared, "find_user", lambda _: None)
    monkeypatch.setattr("runtime.records.config.find_user", lambda _: None)
    made = world.agents.births.create(operator(1000), "x")
    world.agents.journal.update(made, uid=uid, gid=uid)
    passwd, group = prepared.users(world.agents, made)
    assert passwd[::2] == ("file", "/etc/passwd") and group[::2] == ("file", "/etc/group")
    assert passwd[1].startswith(f"{name}:x:{uid}:{uid}::/tmp/home:/bin/sh\nroot:")
    assert group[1].startswith(f"{name}:x:{uid}:\nroot:")
    assert prepared.environment(world.agents, made, "/ctx", {})["USER"] == name


def test_a_user_keeps_the_name_and_has_the_home_of_the_cell(world: World) -> None:
    made = world.agents.births.create(operator(1000), "x")
    world.agents.journal.update(made, uid=1, gid=1)
    [passwd] = prepared.users(world.agents, made)
    assert passwd[1].startswith("daemon:x:1:1:daemon:/tmp/home:/bin/sh\n")
