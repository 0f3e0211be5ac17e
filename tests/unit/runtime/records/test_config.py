"""The configuration file: every mistake is one sentence that names the file and the key."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StartupError
from runtime.records.config import (
    FALLBACK_AGENT_ID,
    FALLBACK_LINK_ID,
    FALLBACK_RELAY_ID,
    Config,
    Network,
    load_config,
    read_config,
)


def load(tmp_path: Path, text: str | bytes) -> Config:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, required=True)


def test_without_a_file_the_built_in_defaults_hold(tmp_path: Path) -> None:
    config = load_config(tmp_path / "none", required=False)
    assert config == Config()
    assert (config.depth, config.children, config.agents) == (8, 1024, 20_000)
    assert (config.control_max, config.frame_max) == (64 << 10, 1 << 20)
    assert (config.document_max, config.log_max) == (16 << 20, 64 << 20)
    assert (config.grace, config.timeout) == (5.0, None)
    assert not config.allow_root_agents


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such configuration file"):
        load_config(tmp_path / "none", required=True)


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == Config()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("depth: 3", "depth", 3),
        ("agents: 0", "agents", 0),
        ("document_max: 1M", "document_max", 1 << 20),
        ("log_max: 4096", "log_max", 4096),
        ("grace: 500ms", "grace", 0.5),
        ("timeout: 2h", "timeout", 7200.0),
        ("agent_user: nobody", "agent_user", "nobody"),
        ("allow_root_agents: true", "allow_root_agents", True),
        ("base_view: [/usr, /etc]", "base_view", ("/usr", "/etc")),
        ("policy: ['tool:* execute']", "policy", ("tool:* execute",)),
        ("policy: []", "policy", ()),
        ("owner_descriptors: 100", "owner_descriptors", 100),
        ("owner_memory_max: 1M", "owner_memory_max", 1 << 20),
        ("owner_time: 0.25", "owner_time", 0.25),
        ("relay_user: nobody", "relay_user", "nobody"),
        (
            "networks: {api: {socket: /run/a.sock, port: 8080}}",
            "networks",
            {"api": Network(socket="/run/a.sock", port=8080)},
        ),
    ],
)
def test_each_setting_is_read(tmp_path: Path, text: str, key: str, value: Any) -> None:
    config = load(tmp_path, text)
    assert getattr(config, key) == value
    assert sum(getattr(config, f) != getattr(Config(), f) for f in Config.__slots__) == 1


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("dept: 3", "dept: unknown setting; did you mean depth\\?"),
        ("1: 2", "1: unknown setting; use depth, children"),
        ("depth: 1\nchildren: 2\n\ndepth: 3", ":4: depth: is there twice, first on line 1"),
        ("grace: 1s\n<<: {depth: 3}", ":2: << cannot be used here"),
        ("depth: three", "depth: 'three' is not a number"),
        ("depth: -1", "depth: -1 is not a number"),
        ("depth: true", "depth: True is not a number"),
        ("depth: 1.5", "depth: 1.5 is not a number"),
        ("grace: 5", "grace: .* is not a duration"),
        ("document_max: big", "document_max: .* is not a size"),
        ("document_max: [1]", "document_max: .* is not a size"),
        ("agent_user: 7", "agent_user: 7 is not a string"),
        ("allow_root_agents: 1", "allow_root_agents: 1 is not a boolean"),
        ("base_view: /usr", "base_view: '/usr' is not a list"),
        ("base_view: [1]", "base_view\\[0\\]: 1 is not a string"),
        ("owner_time: 2", "owner_time: 2 is not a share"),
        ("- depth", "not a map of settings"),
        ("just text", "not a map of settings"),
        ("depth: [", "not YAML"),
        ("a: b: c", "not YAML"),
        ("depth: !!python/object:os.system 1", "depth: the tag .* means nothing here"),
        ("[a, b]: 1", "a key must be a word"),
        (b"\xff\xfe\x00", "config.yaml: "),
    ],
)
def test_a_mistake_is_one_sentence_naming_file_and_key(
    tmp_path: Path, text: str | bytes, wrong: str
) -> None:
    with pytest.raises(StartupError, match=wrong) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "config.yaml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["nonsense", "files:* read", "agent:* fly", "agent:* create #"])
def test_a_policy_that_is_none_is_refused_at_the_start(tmp_path: Path, line: str) -> None:
    """Otherwise every root agent would be made with a policy that cannot be read."""
    with pytest.raises(StartupError, match="policy"):
        load(tmp_path, f"policy: [{line!r}]")


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=str(tmp_path)):
        load_config(tmp_path, required=False)


def test_agents_of_root_run_as_the_configured_user() -> None:
    entry = pwd.getpwuid(os.getuid())
    assert Config(agent_user=entry.pw_name).agent_ids() == (entry.pw_uid, entry.pw_gid)


def test_without_that_user_they_run_as_the_fallback() -> None:
    ids = Config(agent_user="no such user").agent_ids()
    assert ids == (FALLBACK_AGENT_ID, FALLBACK_AGENT_ID) == (61000, 61000)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a map"),
        ("{api: /run/a.sock}", "networks.api: '/run/a.sock' is not a map with socket, port,"),
        ("{api: {socket: /run/a.sock}}", "networks.api: port is missing"),
        ("{api: {socket: /a, port: 8080, ports: x}}", "unknown key; did you mean port?"),
        ("{api: {socket: /a, port: 8080, kind: x}}", "networks.api.kind: unknown value"),
        ("{api: {socket: /a, port: 8080, header: counters, kind: http_proxy}}", "be counted"),
        ("{api: {socket: a.sock, port: 8080}}", 'must begin with "/"'),
        (f"{{api: {{socket: /{'x' * 107}, port: 8080}}}}", "longer than 107 bytes"),
        ("{api: {socket: /a, port: 80}}", "networks.api.port: 80 is not one from 1024 to 65535"),
        ("{api: {socket: /a, port: 65536}}", "port: 65536 is"),
        ("{api: {socket: /a, port: true}}", "not a number"),
        ("{a/b: {socket: /a, port: 8080}}", "is not a name"),
        ("{default: {socket: /a, port: 8080}}", "the network of the host"),
        ("{a: {socket: /a, port: 8080}, b: {socket: /a, port: 8081}}", "socket /a is that of a"),
        ("{a: {socket: /a, port: 8080}, b: {socket: /b, port: 8080}}", "b: port 8080 is that of a"),
        ("{a-b: {socket: /a, port: 8080}, a.B: {socket: /b, port: 8081}}", "CTX_NET_A_B stands"),
    ],
)
def test_a_network_is_a_socket_and_a_port_of_its_own(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(StartupError, match=re.escape(why)):
        load(tmp_path, f"networks: {text}")


def test_there_are_at_most_32_networks(tmp_path: Path) -> None:
    def text(count: int) -> str:
        each = (f"n{i}: {{socket: /a{i}, port: {2000 + i}}}" for i in range(count))
        return f"networks: {{{', '.join(each)}}}"

    assert len(load(tmp_path, text(32)).networks) == 32
    with pytest.raises(StartupError, match="33 networks are too many"):
        load(tmp_path, text(33))


def test_relays_and_links_have_ids_of_their_own() -> None:
    none = Config(relay_user="no such user", link_user="no such user")
    assert none.relay_ids() == (FALLBACK_RELAY_ID, FALLBACK_RELAY_ID, ())
    assert none.link_ids() == (FALLBACK_LINK_ID, FALLBACK_LINK_ID, ())
    assert len({FALLBACK_AGENT_ID, FALLBACK_RELAY_ID, FALLBACK_LINK_ID}) == 3
    entry = pwd.getpwnam("nobody")
    there = Config(relay_user="nobody", link_user="nobody")
    assert there.relay_ids()[:2] == there.link_ids()[:2] == (entry.pw_uid, entry.pw_gid)


def test_every_mistake_is_told_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("""depht: 3
policy:
  - "tool:* execute"
  - "tool:* fly"
networks:
  a: {socket: /a, port: 1}
  b:
    socket: b
    port: x
base_view:
  - /usr
  - 5
""")
    _, mistakes, _ = read_config(path, required=True)
    assert [(each.line, each.key) for each in mistakes] == [
        (1, "depht"), (4, "policy[1]"), (6, "networks.a.port"), (8, "networks.b.socket"),
        (9, "networks.b.port"), (12, "base_view[1]"),
    ]  # fmt: skip
