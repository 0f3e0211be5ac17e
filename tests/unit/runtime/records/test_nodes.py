"""Other machines in the configuration: what is read, what is refused, and the command to each."""

from __future__ import annotations

import logging
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from runtime.errors import StartupError
from runtime.records import nodes
from runtime.records.config import Config, load_config, read_config
from runtime.records.nodes import Node, Placed, argv


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, required=True)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, """
nodes:
  n2: {ssh: n2.example.org}
  gpu-1:
    ssh: 2001:db8::7
    users: {alice: al, "1002": bob}
    max: 0
    lease: 2m
    options: [-oPort=2222, "-oKexAlgorithms=curve25519-sha256"]
  pod:
    command: [/usr/bin/kubectl, exec, -i, "ctxfs-{user}", --, ctx, peer]
    env: {KUBECONFIG: /etc/ctxfs/kube}
    as: owner
placed: {allow: yes, max: 8, lease_max: 5s, networks: [default, api], shared: [cache]}
networks: {api: {socket: /a, port: 8080}}
node_name: lab-1
links: 16
connections: 5
placed_keep: 1d
link_user: nobody
""")
    assert config.nodes == {
        "n2": Node(ssh="n2.example.org"),
        "gpu-1": Node(
            ssh="2001:db8::7", users={"alice": "al", "1002": "bob"}, max=0, lease=120.0,
            options=("-oPort=2222", "-oKexAlgorithms=curve25519-sha256"),
        ),
        "pod": Node(
            command=("/usr/bin/kubectl", "exec", "-i", "ctxfs-{user}", "--", "ctx", "peer"),
            env={"KUBECONFIG": "/etc/ctxfs/kube"}, as_="owner",
        ),
    }  # fmt: skip
    assert config.placed == Placed(
        max=8, lease_max=5.0, networks=("default", "api"), shared=("cache",)
    )
    assert (config.node_name, config.links, config.connections) == ("lab-1", 16, 5)
    assert (config.placed_keep, config.link_user) == (86400.0, "nobody")


def test_without_settings_there_are_no_nodes_and_others_may_place_here() -> None:
    config, node = Config(), Node(ssh="n2")
    assert (config.nodes, config.links, config.connections) == ({}, 256, 60)
    assert (config.placed_keep, config.link_user) == (7 * 86400.0, "ctxfs-link")
    assert config.placed == Placed(allow=True, max=1024, lease_max=3600.0, networks=(), shared=())
    assert (node.users, node.max, node.lease, node.as_) == (None, 1024, 30.0, "link")


@pytest.mark.parametrize(("host", "name"), [
    ("n2", "n2"), ("N2.example.org", "n2"), ("build_box", "build-box"), ("", "ctxfs"),
    ("ünder", "-nder"), ("a-very-long-name-of-a-host", "a-very-long-name"),
])  # fmt: skip
def test_a_daemon_is_called_as_its_machine(
    monkeypatch: pytest.MonkeyPatch, host: str, name: str
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))
    assert Config().node_name == name == nodes.check_alias(name)


SSH = "nodes: {n2: {ssh: n2, "
COMMAND = "nodes: {n2: {command: "


@pytest.mark.parametrize(("text", "key", "why"), [
    ("nodes: [n2]", "nodes", "is not a map of names to {ssh: ADDRESS}"),
    ("nodes: {n2: n2.example.org}", "nodes.n2", "is not a map with ssh, command, users"),
    ("nodes: {n2: {}}", "nodes.n2", "use either ssh: ADDRESS or command: ["),
    ("nodes: {n2: {ssh: a, command: [/b]}}", "nodes.n2", "use either ssh: ADDRESS or command"),
    ("nodes: {-oX=y: {ssh: a}}", "nodes.-oX=y", "is not a name"),
    ("nodes: {'a b': {ssh: a}}", "nodes.a b", "is not a name"),
    ("nodes: {'a*': {ssh: a}}", "nodes.a*", "is not a name"),
    ('nodes: {"a\\n": {ssh: a}}', '"nodes.a\\n"', "is not a name"),
    ("nodes: {n2: {ssh: -oProxyCommand=x}}", "nodes.n2.ssh", 'not "-" first'),
    ("nodes: {n2: {ssh: 'a b'}}", "nodes.n2.ssh", "without blanks"),
    ('nodes: {n2: {ssh: "a\\tb"}}', "nodes.n2.ssh", "without blanks"),
    ("nodes: {n2: {ssh: ''}}", "nodes.n2.ssh", "is not an address"),
    ("nodes: {n2: {ssh: 7}}", "nodes.n2.ssh", "7 is not a string"),
    ("nodes: {n2: {ssh: al@n2}}", "nodes.n2.ssh", "write it as users: {OWNER: LOGIN}"),
    ("nodes: {n2: {ssh: 'ssh://al@n2'}}", "nodes.n2.ssh", "write it as users"),
    (f"{SSH}host: a}}}}", "nodes.n2.host", "unknown key; use ssh, command"),
    (f"{SSH}option: a}}}}", "nodes.n2.option", "did you mean options?"),
    (f"{SSH}max: -1}}}}", "nodes.n2.max", "-1 is not a number"),
    (f"{SSH}lease: 4s}}}}", "nodes.n2.lease", '"4s" is not from 5s to 1d'),
    (f"{SSH}lease: 25h}}}}", "nodes.n2.lease", '"25h" is not from 5s to 1d'),
    (f"{SSH}lease: 30}}}}", "nodes.n2.lease", "is not a duration"),
    (f"{SSH}options: -4}}}}", "nodes.n2.options", "is not a list"),
    (f"{SSH}options: [-v]}}}}", "nodes.n2.options[0]", "is not an option of ssh such as"),
    (f"{SSH}options: [-oPort=1, -o]}}}}", "nodes.n2.options[1]", "is not an option of ssh"),
    (f"{SSH}options: [-o, Port=1]}}}}", "nodes.n2.options[0]", "is not an option of ssh"),
    (f"{SSH}options: [-oUSER=al]}}}}", "nodes.n2.options[0]", "write it as users"),
    (f"{SSH}env: {{A: b}}}}}}", "nodes.n2.env", "means nothing without command"),
    (f"{SSH}as: owner}}}}", "nodes.n2.as", "means nothing without command"),
    (f"{COMMAND}[/b], options: [-oPort=1]}}}}", "nodes.n2.options", "means nothing without ssh"),
    (f"{COMMAND}[/b], as: root}}}}", "nodes.n2.as", 'unknown value "root"; use link, owner'),
    (f"{COMMAND}[/b], env: {{A=B: c}}}}}}", "nodes.n2.env.A=B", "is not the name of a variable"),
    (f"{COMMAND}[/b], env: {{A: 1}}}}}}", "nodes.n2.env.A", "1 is not a string"),
    (f'{COMMAND}[/b], env: {{A: "\\0"}}}}}}', "nodes.n2.env.A", "a NUL byte"),
    (f"{COMMAND}/usr/bin/srun ctx peer}}}}", "nodes.n2.command", "is not a list"),
    (f"{COMMAND}[]}}}}", "nodes.n2.command", "the list is empty"),
    (f"{COMMAND}[srun, -Q]}}}}", "nodes.n2.command", 'the program "srun" must begin with "/"'),
    (f"{COMMAND}['{{user}}', -Q]}}}}", "nodes.n2.command", 'must begin with "/"'),
    (f"{COMMAND}[/b, 2]}}}}", "nodes.n2.command[1]", "2 is not a string; put it into quotes"),
    (f'{COMMAND}[/b, "a\\0"]}}}}', "nodes.n2.command[1]", "a NUL byte"),
    (f"{SSH}users: [al]}}}}", "nodes.n2.users", "is not a map of OWNER: LOGIN"),
    (f"{SSH}users: {{al: -oX=y}}}}}}", "nodes.n2.users.al", "is not the name of a user"),
    (f"{SSH}users: {{al: 'a b'}}}}}}", "nodes.n2.users.al", "is not the name of a user"),
    (f"{SSH}users: {{al: '$(x)'}}}}}}", "nodes.n2.users.al", "is not the name of a user"),
    (f"{SSH}users: {{al: 5}}}}}}", "nodes.n2.users.al", "5 is not a string"),
    (f"{SSH}users: {{-al: al}}}}}}", "nodes.n2.users.-al", "is not the name of a user"),
    ("placed: true", "placed", "is not a map with allow, max"),
    ("placed: {allow: 1}", "placed.allow", "is not a boolean"),
    ("placed: {lease_max: 2d}", "placed.lease_max", '"2d" is not from 5s to 1d'),
    ("placed: {networks: api}", "placed.networks", "is not a list of names"),
    ("placed: {networks: [apo]}\nnetworks: {api: {socket: /a, port: 8080}}",
     "placed.networks[0]", 'no network "apo"; did you mean api?'),
    ("placed: {networks: ['*']}", "placed.networks[0]", "is not a name"),
    ("placed: {shared: [a/b]}", "placed.shared[0]", "is not a name"),
    ("placed: {directories: {a: /b}}", "placed.directories", "no directories can be offered yet"),
    ("placed: {shares: []}", "placed.shares", "did you mean shared?"),
    ("node_name: N2", "node_name", "is not 1 to 16 of a-z 0-9 -"),
    ("node_name: ''", "node_name", "is not 1 to 16"),
    ("node_name: seventeen-letters", "node_name", "is not 1 to 16"),
    ("links: many", "links", "is not a number"),
    ("placed_keep: 7", "placed_keep", "is not a duration"),
])  # fmt: skip
def test_what_is_wrong_is_told_with_why(tmp_path: Path, text: str, key: str, why: str) -> None:
    with pytest.raises(StartupError, match=re.escape(why)) as caught:
        load(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/config.yaml:1: {key}: "), said
    assert "\n" not in said


def test_every_mistake_is_told_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("""nodes:
  n2:
    ssh: n2
    users:
      alice: -x
    options:
      - -oPort=22
      - Port=22
  n3:
    command:
      - /usr/bin/srun
      - 3
placed:
  networks:
    - nothing
""")
    _, mistakes, _ = read_config(path, required=True)
    assert [(each.line, each.key) for each in mistakes] == [
        (5, "nodes.n2.users.alice"), (8, "nodes.n2.options[1]"), (12, "nodes.n3.command[1]"),
    ]  # fmt: skip


def test_two_owners_of_one_login_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "nodes:\n  n2:\n    ssh: n2\n    users:\n      alice: build\n      bob: build\n"
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, text).nodes["n2"].users == {"alice": "build", "bob": "build"}
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}/config.yaml:6: nodes.n2.users.bob: alice is build there")


def test_who_may_use_a_node_and_as_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {0: "root", 1000: "alice", 1001: "bob", 1003: "-oX=y"}

    def find(uid: int) -> pwd.struct_passwd | None:
        entry = (known.get(uid, ""), "x", uid, uid, "", "/", "/bin/sh")
        return pwd.struct_passwd(entry) if uid in known else None

    monkeypatch.setattr(nodes, "find_user", find)

    def logins(users: Mapping[str, str] | None) -> dict[int, str | None]:
        node = Node(ssh="n2", users=users)
        return {uid: node.login(uid) for uid in (0, 1000, 1001, 1002, 1003)}

    everybody = {0: None, 1000: "alice", 1001: "bob", 1002: None, 1003: None}
    nobody = dict.fromkeys(everybody)
    assert logins(None) == everybody
    assert logins({}) == nobody
    assert logins({"alice": "al", "1002": "carol"}) == nobody | {1000: "al", 1002: "carol"}
    assert logins({"root": "root"}) == nobody | {0: "root"}


def test_the_command_of_root_is_an_ssh_with_a_key_of_its_own() -> None:
    node = Node(ssh="n2.example.org", options=("-oPort=2222", "-oBatchMode=no"))
    assert argv(node, "alice", rootless=False) == [
        "ssh", "-T", "-F", "none", "-oBatchMode=yes", "-oIdentitiesOnly=yes",
        "-oStrictHostKeyChecking=yes", "-oUserKnownHostsFile=known_hosts",
        "-oClearAllForwardings=yes", "-oControlPath=none", "-oConnectTimeout=10",
        "-i", "key", "-oPort=2222", "-oBatchMode=no",
        "-l", "alice", "--", "n2.example.org", "ctx", "peer",
    ]  # fmt: skip


#: instead of ssh: what a check of a shared connection says, and else its arguments
_SSH: Final = """\
#!/bin/sh
case $1$2 in
-Ocheck) echo "$SAID" >&2; exit $STATUS ;;
*) echo "$*" ;;
esac
"""


def test_without_root_it_is_the_users_own_ssh(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(_SSH)
    (tmp_path / "ssh").chmod(0o755)

    def does(node: Node, said: str, status: int) -> tuple[int, str]:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SAID": said, "STATUS": str(status)}
        done = subprocess.run(argv(node, "al", rootless=True), env=env, capture_output=True,
                              text=True, check=False)  # fmt: skip
        return done.returncode, (done.stdout + done.stderr).strip()

    own = Node(ssh="n2", options=("-oPort=2222",))
    named = Node(ssh="n2", users={"me": "al"})
    none = 'No ControlPath specified for "-O" command'
    alone = "-T -oBatchMode=yes -oConnectTimeout=10"
    assert does(own, none, 255) == (0, f"{alone} -oPort=2222 -- n2 ctx peer")
    assert does(named, none, 255) == (0, f"{alone} -l al -- n2 ctx peer")
    shared = "-T -oBatchMode=yes -oProxyCommand=false"
    assert does(own, "Master running (pid=1)", 0) == (0, f"{shared} -oPort=2222 -- n2 ctx peer")
    gone = "Control socket connect(/x): No such file or directory"
    assert does(own, gone, 255) == (
        255, f"{gone}: log in, no connection is open that is shared"
    )  # fmt: skip
    assert does(own, "Bad configuration option: x", 255) == (255, "Bad configuration option: x")


@pytest.mark.parametrize("rootless", [False, True])
def test_a_command_is_as_it_is_written_but_for_the_login(rootless: bool) -> None:
    node = Node(command=("/usr/bin/k", "exec", "-i", "{user}", "a-{user}-{user}", "{x}", "ctx"))
    assert argv(node, "al", rootless=rootless) == [
        "/usr/bin/k", "exec", "-i", "al", "a-al-al", "{x}", "ctx",
    ]  # fmt: skip


def _understood(command: list[str], directory: Path) -> dict[str, str]:
    """What ssh makes of a command, which it does not carry out."""
    at = command.index("--")
    told = subprocess.run([command[0], "-G", *command[1 : at + 2]], capture_output=True, text=True,
                          check=True, cwd=directory)  # fmt: skip
    return dict(line.partition(" ")[::2] for line in told.stdout.splitlines())


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_ssh_understands_it_so_and_options_weaken_nothing(tmp_path: Path) -> None:
    options = (
        "-oPort=2222", "-oBatchMode=no", "-oStrictHostKeyChecking=no", "-oIdentitiesOnly=no",
        "-oUserKnownHostsFile=/tmp/x", "-oControlPath=/tmp/x", "-oClearAllForwardings=no",
        "-oRequestTTY=force",
    )  # fmt: skip
    (tmp_path / "key").touch()
    command = argv(Node(ssh="n2", options=options), "al", rootless=False)
    found = _understood(command, tmp_path)
    wanted = {
        "user": "al", "host": "n2", "port": "2222", "batchmode": "yes", "identitiesonly": "yes",
        "stricthostkeychecking": "true", "clearallforwardings": "yes", "requesttty": "false",
        "connecttimeout": "10", "identityfile": "key", "userknownhostsfile": "known_hosts",
    }  # fmt: skip
    assert {key: found.get(key) for key in wanted} == wanted
    assert found.get("controlpath", "none") == "none"


_ROWS: Final = sorted((Path(__file__).parents[4] / "contrib" / "nodes").glob("*.yaml"))


@pytest.mark.parametrize("file", _ROWS, ids=lambda file: str(file.name))
def test_a_row_that_is_shipped_is_right(file: Path) -> None:
    config, mistakes, doubts = read_config(file, required=True)
    (node,) = config.nodes.values()
    assert not mistakes and not doubts
    assert node.ssh or node.command[-2:] == ("ctx", "peer")
