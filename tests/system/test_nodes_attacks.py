"""What a hostile host says to its lead, and a hostile lead to its host."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import Daemon, daemon_of, read, wait_dead, wait_until
from tests.worlds.family import Family, git
from tests.worlds.nodes import CTX, Lead, lead_of, node
from tests.worlds.strangers import FalseHost, Wire, false_host, false_lead, give

_POLICY = "allow x_t tool:* execute\n"


# a lead


@pytest.fixture(scope="module")
def host() -> Iterator[Daemon]:
    with daemon_of(config="node_name: two\n") as made:
        yield made


def _put(name: str = "x", *, bound: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    config = {"exec": "true", "life": "owned", "mode": "once", "label": "x_t", "limits": {},
              "policy": _POLICY, **more.pop("config", {})}  # fmt: skip
    most = {"policy": config["policy"], "families": [], "depth": 2, "limits": {}, **(bound or {})}
    said = {"session": "default", "run": 1, "supervisor": "operator", "takes": False, "files": {}}
    return {"name": name, **said, "config": config, "bound": most, **more}


def _refused(wire: Wire, op: str, agent: str, **said: Any) -> str:
    """Why an operation is refused."""
    number = wire.tell(op, agent, **said)
    told = wire.until(lambda each: each["op"] == "refused" and each["number"] == number)
    return f"{told['code']}: {told['sentence']}"


def _kept(path: Path) -> bytes:
    """What is in a file of a daemon that lives, which may remove it."""
    with suppress(FileNotFoundError):
        return path.read_bytes() if path.is_file() else b""
    return b""


def _names(host: Daemon) -> set[str]:
    return {path.name for path in (host.root / "agent").iterdir()}


def test_what_no_lead_says_leaves_no_agent(host: Daemon) -> None:
    stranger = read(host.make("local"), "incarnation").strip()
    before = _names(host)
    with false_lead(host) as wire:
        for said, why in (
            (_put("../x"), "EINVAL"),
            (_put("x@two"), "EINVAL"),
            (_put("a\nb"), "EINVAL"),
            (_put(run=1 << 70), "EINVAL: put is without a right run"),
            (_put(run=1 << 40), "EINVAL: put has the number of a run above"),
            (_put(uid=0), "EINVAL"),
            (_put(config={"uid": "0"}), "EINVAL"),
            (_put(config={"label": "local_t"}), "EINVAL"),
            (_put(config={"iso": "shared"}), "EOPNOTSUPP"),
            (_put(config={"life": "detached"}), "EOPNOTSUPP"),
            (_put(config={"mount": "/root /mnt ro\n"}), "EINVAL"),
            (_put(config={"mount": "home: /mnt rw\n"}), "EINVAL"),
            (_put(config={"mount": "node:recipes/../../etc /mnt ro\n"}), "EINVAL"),
            (_put(config={"mount": "node:recipes /mnt rw\n"}), "EINVAL"),
            (_put(files={"../x": [1, "0" * 64]}), "EINVAL"),
            (_put(files={"handoff.md": [1 << 70, "0" * 64]}), "EFBIG"),
            (_put(supervisor="agent:../x"), "EINVAL"),
            (_put(bound={"surprise": 1}), "EINVAL"),
        ):
            assert _refused(wire, "put", "a" * 16, **said).startswith(why), said
        assert "there is something of an agent" in _refused(wire, "put", stranger, **_put())
        for op, more in (("start", {}), ("verb", {"verb": "kill", "reason": "", "outcome": ""})):
            assert _refused(wire, op, stranger, **more).startswith("ENOENT")
        for file in ("out", "handoff.md", "artifact/%00", "artifact/../../../x"):
            wire.say("want", agent=stranger, file=file, offset=0, credit=9)
            assert wire.op("bytes")["length"] == 0
    assert _names(host) == before
    assert read(host.agent_dir("local"), "status").strip() == "new"


def test_a_name_that_was_forgotten_is_free_at_once(host: Daemon) -> None:
    with false_lead(host, name="again") as wire:
        wire.tell("put", "b" * 16, **_put())
        wire.tell("start", "b" * 16)
        wire.op("ask")
        wire.say("grant", ask=1, after=0)
        wire.op("dead")
        wire.tell("forget", "b" * 16)
        wire.tell("put", "c" * 16, **_put())
        wire.tell("start", "c" * 16)
        told = wire.until(lambda said: said.get("agent") == "c" * 16)
        assert told["op"] != "refused", told


_NO_PACK = b"PACK\0\0\0\2\0\0\0\1"


@pytest.mark.parametrize("said", [_NO_PACK, b"x" * 12])
def test_what_is_no_repository_starts_nothing(host: Daemon, said: bytes) -> None:
    agent = hashlib.sha256(said).hexdigest()[:16]
    files = {"worktree.pack": [len(_NO_PACK), hashlib.sha256(_NO_PACK).hexdigest()]}
    worktree = {"base": "a" * 40, "config": {}, "differs": {}}
    with false_lead(host, name="git") as wire:
        config = {"workspace": "worktree"}
        wire.tell("put", agent, **_put(config=config, files=files, worktree=worktree))
        wire.tell("start", agent)
        wire.op("ask")
        wire.say("grant", ask=1, after=0)
        give(wire, agent, "worktree.pack", said)
        ended = wire.op("ended")
        why = "its repository cannot be made"
        assert ended["outcome"] == "error" and why in ended["reason"], ended
        assert "worktree" not in ended, "nothing of it ran"
        wire.op("dead")
        wire.tell("forget", agent)
        trees = host.state / "tree/agent"
        wait_until(lambda: not [*trees.glob(f"*/*~{agent}")], "nothing is left of it")


def test_a_lead_that_hears_nothing_is_not_served_for_ever(host: Daemon) -> None:
    with false_lead(host, name="deaf") as wire:
        wire.acknowledges = False
        line = '{"op":"start","n":%d,"agent":"x"}\n'
        for first in range(1, 5000, 500):
            wire.raw("".join(line % n for n in range(first, first + 500)).encode())
        while wire.next() is not None:
            pass
    wait_until(lambda: "facts are not heard" in host.log.read_text(), "it is told why")


@pytest.mark.parametrize("said", [{"ttl": True}, {"name": "../x"}, {"name": []}])
def test_a_hello_that_is_wrong_ends_its_connection_alone(
    host: Daemon, said: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match="the connection is over"), false_lead(host, **said):
        pass
    with false_lead(host, ttl=10**400):
        assert "Traceback" not in host.log.read_text()


def test_leads_of_one_user_are_bounded_and_do_not_hear_each_other(host: Daemon) -> None:
    with false_lead(host, name="first") as wire:
        known = wire.hello["as"]
        wire.tell("put", "e" * 16, **_put("mine"))
        wire.op("ack")
    with false_lead(host, name="first") as other:
        assert other.hello["alias"] == "first-2"
        assert _refused(other, "start", "e" * 16).startswith("ENOENT")
        assert _refused(other, "put", "e" * 16, **_put("mine")).startswith("EEXIST")
        assert other.hello["as"] != known


def test_what_two_sides_know_each_other_by_is_told_to_nobody(host: Daemon) -> None:
    """It is in one file, and the daemon's log has it neither (S6)."""
    with false_lead(host, name="bits") as wire:
        known = wire.hello["as"].encode()
        wire.tell("put", "7" * 16, **_put("known"))
        wire.op("ack")
        with false_lead(host, name="bits", **{"as": wire.hello["as"], "got": 99}) as other:
            assert other.hello["as"].encode() != known, "it does not fit, and is another one"
        files = [Path(top, name) for top, _, names in os.walk(host.state) for name in names]
        assert not [path for path in (*files, host.log) if known in _kept(path)]
        kept = host.state / "peers.json"
        assert other.hello["as"] in kept.read_text() and kept.stat().st_mode & 0o777 == 0o600


#: each line is refused
_TRIES = """\
ctx peer < /dev/null
ctx spawn kid1 --life detached -- sleep 300
ctx spawn kid2 --node n2 -- true
echo detach > $CTX_SELF/ctl
echo node=n2 > $CTX_SELF/placement
echo grace=1h > $CTX_SELF/limits
echo agent:local > $CTX_SELF/parent
rmdir $CTX_SELF
"""


def test_an_agent_there_speaks_for_no_lead_and_leaves_nobody(host: Daemon) -> None:
    policy = "allow x_t agent:* create,start,detach\n" + _POLICY
    tries = "; ".join(f"({line}) 2>&1 && echo BAD" for line in _TRIES.splitlines())
    with false_lead(host, name="inner") as wire:
        wire.tell("put", "9" * 16, **_put(config={"exec": f"sh -c '{tries}'", "policy": policy},
                                          bound={"families": ["agent_creation"]}))  # fmt: skip
        wire.tell("start", "9" * 16)
        wire.op("ask")
        wire.say("grant", ask=1, after=0)
        wire.op("dead")
        said = read(host.agent_dir("x@inner"), "out")
        assert "BAD" not in said and "operators may" in said and "nothing that it makes" in said
        assert not [name for name in _names(host) if name.startswith("kid")]


# a host


@pytest.fixture(scope="module")
def far() -> Iterator[FalseHost]:
    with false_host() as made:
        yield made


@pytest.fixture(scope="module")
def others() -> Iterator[dict[str, FalseHost]]:
    with false_host() as one, false_host() as two:
        yield {"p0": one, "p1": two}


@pytest.fixture(scope="module")
def lead(far: FalseHost, others: dict[str, FalseHost]) -> Iterator[Lead]:
    hosts = {"n2": far, "n3": far, **others}
    nodes = {name: node(each.command, lease="30s") for name, each in hosts.items()}
    with lead_of(nodes) as made:
        yield made


@pytest.fixture
def placed(lead: Lead, others: dict[str, FalseHost]) -> Iterator[tuple[Path, Wire, str]]:
    """An agent that runs at a host of its own, with its incarnation."""
    name, host = others.popitem()
    directory = lead.daemon.run(f"at-{name}", "true", placement=f"node={name}\n")
    wire = host.meet()
    agent = wire.op("put")["agent"]
    wire.op("start")
    wire.tell("state", agent, status="busy", run="r1")
    wait_until(lambda: read(directory, "status").strip() == "busy", "it is busy")
    yield directory, wire, agent
    wire.socket.close()


def test_a_host_writes_nowhere_and_says_nothing_of_others(
    lead: Lead, placed: tuple[Path, Wire, str]
) -> None:
    directory, wire, agent = placed
    other = lead.daemon.make("other")
    name = "artifact/../../../evil"
    wire.tell("state", "f" * 16, status="busy", run="r1")
    wire.say("want", agent=read(other, "incarnation").strip(), file="out", offset=0, credit=9)
    wire.say("want", agent=agent, file="../../ctxfs.db", offset=0, credit=9)
    assert [wire.op("bytes")["length"] for _ in range(2)] == [0, 0]
    wire.tell("report", agent, id="r9", text="\x1b]0;evil\x07")
    files = {"result.md": [4, 0], name: [4, 420]}
    wire.tell("ended", agent, outcome="done", reason="\x1b[31m\nexit:0", files=files)
    wire.tell("dead", agent)
    wait_dead(directory)
    assert read(directory, "reason").strip().endswith(",incomplete")
    assert "\x1b" not in read(directory, "reason")
    names = [name for _, *both in os.walk(lead.daemon.state) for each in both for name in each]
    assert not [name for name in names if "evil" in name]
    assert read(other, "status").strip() == "new"


def test_no_word_of_a_host_does_anything_to_a_terminal(
    lead: Lead, placed: tuple[Path, Wire, str]
) -> None:
    directory, wire, agent = placed
    evil = "\x1b]0;evil\x07\x9b31m\u202e\u2028\r\n"
    wire.tell("state", agent, status="paused", reason=evil, by=f"agent:{evil}", at=evil[:60])
    wire.tell("event", agent, type="run.start", run=evil, pid=1, by=f"operator{evil}")
    wire.tell("event", agent, type="agent.control", file=evil, verb=evil)
    wire.tell("refused", agent, of="verb", verb=evil, number=1, code=evil, sentence=evil)
    wire.tell("report", agent, id="r1", text="said")
    wire.tell("usage", agent, usage={"cpu_usec": 7, "other": 1.5})
    wait_until(lambda: "not" in read(directory, "node") or read(directory, "error"), "it is told")
    wire.tell("ended", agent, outcome="error", reason=f"start_failed: {evil}")
    wire.tell("dead", agent)
    wait_dead(directory)
    shown = [read(directory, name) for name in ("status", "reason", "error", "node", "usage")]
    name = directory.name.removesuffix(".d")
    for words in (["nodes"], ["status", name], ["timeline", name], ["ps"], ["tree"], ["log", name]):
        told = subprocess.run([CTX, "--root", lead.daemon.root, *words], capture_output=True,
                              text=True, check=True)  # fmt: skip
        shown += [told.stdout, told.stderr]
    lines = "\n".join(shown).split("\n")
    assert any("evil" in line for line in lines)
    assert all(line.replace("\t", " ").isprintable() for line in lines), lines


def test_what_a_host_says_of_itself_is_checked(lead: Lead, far: FalseHost) -> None:
    directory = lead.daemon.run("y", "true", placement="node=n3\n")
    far.meet(networks=5).socket.close()
    wait_dead(directory)
    assert "hello is without a right networks" in read(directory, "reason")
    assert lead.daemon.ctx("nodes").returncode == 0


def test_what_one_node_gave_another_cannotgive(lead: Lead, far: FalseHost) -> None:
    one = lead.daemon.run("one", "true", placement="node=n2\n")
    first = far.meet()
    agent = first.op("put")["agent"]
    two = lead.daemon.run("two", "true", placement="node=n3\n")
    far.meet(**{"as": first.known}).socket.close()
    wait_dead(two)
    assert "what another one has" in read(two, "reason")
    assert read(one, "status").strip() == "starting"
    first.tell("ended", agent, outcome="done", reason="exit:0")
    first.tell("dead", agent)
    wait_dead(one)
    assert "Traceback" not in lead.daemon.log.read_text()
    first.socket.close()


@pytest.fixture
def family(lead: Lead) -> Iterator[Family]:
    made = Family(lead.daemon, count(1))
    yield made
    made.end()


def test_a_host_moves_no_branch_to_what_it_does_notgive(
    lead: Lead, far: FalseHost, family: Family
) -> None:
    """Neither by bytes that are no pack, nor by one of other things."""
    wire: Wire | None = None
    base = git(family.repository, "rev-parse", "HEAD")
    for commit, data in (("f" * 40, b"x" * 1000), ("f" * 40, _pack(family)), (base, b"")):
        directory = family.child("true")
        wire = wire or far.meet()
        put = wire.op("put")
        agent, (size, digest) = put["agent"], put["files"]["worktree.pack"]
        wire.say("want", agent=agent, file="worktree.pack", offset=0, credit=size)
        given = wire.until(lambda said: said["op"] == "bytes")["data"]
        assert hashlib.sha256(given).hexdigest() == digest and put["worktree"]["base"] == base
        left = {"commit": commit, "size": len(data), "path": "/x\n", "why": "\x1b[2Jno"}
        files = {"worktree.pack": [len(data), 0]} if data else {}
        wire.tell("state", agent, status="busy", run="r1")
        wire.tell("ended", agent, outcome="done", reason="exit:0", files=files, worktree=left)
        wire.tell("dead", agent)
        if data:
            give(wire, agent, "worktree.pack", data)
        wait_dead(directory)
        facts = family.facts(directory)
        assert facts["state"] == "kept" and "\x1b" not in facts["reason"], facts
        assert git(family.repository, "rev-parse", facts["branch"]) == base
        told = wire.until(lambda said: said["op"] == "forget")
        assert (told["agent"], told["keep"]) == (agent, True)
    git(family.repository, "fsck", "--strict")
    assert git(family.repository, "for-each-ref", "refs/heads/ctx", "--format=%(objectname)")
    assert "Traceback" not in lead.daemon.log.read_text()
    assert wire is not None
    wire.socket.close()


def _pack(family: Family) -> bytes:
    """All that is in a repository."""
    command = ["git", "-c", "safe.directory=*", "-C", str(family.repository), "pack-objects"]
    words = ["--all", "--revs", "--stdout", "-q"]
    done = subprocess.run([*command, *words], input=b"", capture_output=True, check=True)
    return done.stdout
