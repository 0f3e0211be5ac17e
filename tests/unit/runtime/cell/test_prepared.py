"""What a cell has of the host because a program would not work without."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runtime.cell import networks, prepared
from runtime.kernel import links
from runtime.records.config import Network
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
    assert prepared.environment(world.agents, made, "/ctx", "/git", {})["USER"] == name


def test_a_user_keeps_the_name_and_has_the_home_of_the_cell(world: World) -> None:
    made = world.agents.births.create(operator(1000), "x")
    world.agents.journal.update(made, uid=1, gid=1)
    [passwd] = prepared.users(world.agents, made)
    assert passwd[1].startswith("daemon:x:1:1:daemon:/tmp/home:/bin/sh\n")


def test_git_has_an_identity_and_uses_what_is_mounted(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is said of the agent wins over what the machine says, that over the account."""
    machine, config = tmp_path / "machine", tmp_path / "config"
    made = world.agents.births.create(operator(1000), "x")
    monkeypatch.setattr(prepared, "find_user", lambda _: None)

    def asked(key: str) -> list[str]:
        text = prepared.git(made, ["/src", '/a "b"\\n', "/src", "/"])
        config.write_text(text.replace("/etc/gitconfig", str(machine)))
        done = subprocess.run(
            ["git", "config", "-z", "--file", config, "--includes", "--get-all", key],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.split("\0")[:-1]

    host = os.uname().nodename
    assert (asked("user.name"), asked("user.email")) == (["uid1000"], [f"uid1000@{host}"])
    assert asked("safe.directory") == ["/src", "/src/*", '/a "b"\\n', '/a "b"\\n/*']
    machine.write_text("[user]\nname = Machine\n")
    assert asked("user.name")[-1] == "Machine"
    world.agents.journal.update(made, author='O "Q" <o@q>')
    assert (asked("user.name")[-1], asked("user.email")[-1]) == ('O "Q"', "o@q")


def test_tools_hear_of_no_network_unless_env_tells_of_one(world: World) -> None:
    made = world.agents.births.create(operator(0), "x")

    def told(env: str, having: dict[str, int] | None = None) -> set[tuple[str, str]]:
        world.agents.journal.update(made, env=env)
        found = prepared.environment(world.agents, made, "/ctx", "/git", having or {})
        return {(name, found[name]) for name in names & set(found)}

    names = {"npm_config_offline", "PIP_NO_INDEX", "UV_OFFLINE", "CARGO_NET_OFFLINE", "GOPROXY",
             "YARN_ENABLE_NETWORK", "COMPOSER_DISABLE_NETWORK", "HF_HUB_OFFLINE"}  # fmt: skip
    everything = told("")
    assert {name for name, _ in everything} == names and ("GOPROXY", "off") in everything
    assert told("PIP_INDEX_URL=http://127.0.0.1/\n") == everything - {("PIP_NO_INDEX", "1")}
    changed = told("NPM_CONFIG_OFFLINE=false\nGOPROXY=file:///mirror\n")
    assert changed ^ everything == {
        ("npm_config_offline", "true"), ("GOPROXY", "off"), ("GOPROXY", "file:///mirror"),
    }  # fmt: skip
    assert told("https_proxy=http://127.0.0.1:8080\n") == set()
    assert told("", {"mirror": 8080}) == set()
    world.agents.journal.update(made, policy="allow x_t network:default connect\n")
    assert told("") == set()


PROXIES = {
    "api": Network(socket="/srv/api", port=8080),
    "web": Network(socket="/srv/web", port=8090, kind="http_proxy"),
    "more": Network(socket="/srv/more", port=8091, kind="http_proxy"),
}


@pytest.mark.settings(networks=PROXIES)
def test_tools_are_told_of_a_proxy_unless_env_does(world: World) -> None:
    made = world.agents.births.create(operator(0), "x")

    def told(having: dict[str, int], env: str = "") -> dict[str, str]:
        world.agents.journal.update(made, env=env)
        found = prepared.environment(world.agents, made, "/ctx", "/git", having)
        return {name: value for name, value in found.items() if name.upper().endswith("_PROXY")}

    web, here = "http://127.0.0.1:8090", "127.0.0.1,localhost,::1"
    everything = {
        "HTTPS_PROXY": web, "HTTP_PROXY": web, "NO_PROXY": here,
        "https_proxy": web, "http_proxy": web, "no_proxy": here,
    }  # fmt: skip
    assert told({"web": 8090, "api": 8080}) == everything
    assert told({"web": 8090, "more": 8091}) == everything, "the first of the configuration"
    assert set(told({"more": 8091}).values()) == {"http://127.0.0.1:8091", here}
    own = told({"web": 8090}, "https_proxy=http://own\nNO_PROXY=corp\n")
    assert own == {"https_proxy": "http://own", "NO_PROXY": "corp",
                   "HTTP_PROXY": web, "http_proxy": web}  # fmt: skip
    assert told({"api": 8080}) == {}
    assert told({"web": networks.SOCKET}) == {}, "with the host's network none"
