"""Packs that a hostile lead, host or agent makes: what they fill, how long they work, what is left.

Here a machine is a daemon with an account of its own for each owner, which is small. Others work
beside all attacks that take a while.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.system.hostile.guarded import guarded
from tests.worlds.daemon import (
    Daemon,
    daemon_of,
    discarded,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.family import Family, git
from tests.worlds.nodes import Lead, lead_of, node, peer
from tests.worlds.packs import MIB, Pack
from tests.worlds.strangers import FalseHost, Wire, false_host, false_lead, give
from tests.worlds.three import Three, three_of

pytestmark = pytest.mark.long

ACCOUNT = 64 * MIB
CONFIG = "owner_disk_max: 64M\nartifact_max: 32M\ngrace: 1s\n"
#: what is written between two looks at the disk
SOFT = ACCOUNT + 2048 * MIB
#: bytes that a file of git's may have where that is bounded; and what git may have in memory
FILES, MEMORY = 2 * 32 * MIB, (2048 + 256) * MIB
_POLICY = "allow x_t tool:* execute\n"


def on_disk(path: Path) -> int:
    """Bytes of files, which come and go."""
    found = 0
    for at, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                found += os.lstat(f"{at}/{name}").st_blocks * 512
    return found


# a lead, and what it has run, against a host


@pytest.fixture
def host() -> Iterator[Daemon]:
    with daemon_of(config=f"node_name: two\n{CONFIG}") as made:
        yield made


@pytest.fixture(scope="module")
def shared_host() -> Iterator[Daemon]:
    with daemon_of(config=f"node_name: two\n{CONFIG}") as made:
        yield made


def start(wire: Wire, pack: bytes, base: bytes, program: str = "true", **more: Any) -> str:
    """An agent of a lead, with a worktree of this pack."""
    agent = hashlib.sha256(pack + base).hexdigest()[:16]
    config = {"exec": program, "life": "owned", "mode": "once", "label": "x_t", "limits": {},
              "policy": _POLICY, "workspace": "worktree"}  # fmt: skip
    bound = {"policy": _POLICY, "families": [], "depth": 2, "limits": {}}
    identity = {"user.name": "x", "user.email": "x@y"}
    worktree = {"base": base.hex(), "config": identity, "differs": {}}
    files = {"worktree.pack": [len(pack), hashlib.sha256(pack).hexdigest()]}
    said = {"name": "x", "session": "default", "run": 1, "supervisor": "operator", "takes": False}
    said |= {"config": config, "bound": bound, "files": files, "worktree": worktree, **more}
    wire.tell("put", agent, **{key: value for key, value in said.items() if value is not None})
    wire.tell("start", agent)
    wire.op("ask")
    wire.say("grant", ask=1, after=0)
    if not more:
        give(wire, agent, "worktree.pack", pack)
    return agent


def memory(daemon: Daemon, name: str) -> int:
    """Bytes that the processes of an agent have."""
    found = 0
    for pid in daemon.processes_of(name):
        with suppress(OSError):  # it is gone
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return found


def _is_much(daemon: Daemon, most: int) -> bool:
    return on_disk(daemon.state / "tree/agent") > most or memory(daemon, "x@one") > MEMORY


def watched(daemon: Daemon, wire: Wire, *, most: int) -> dict[str, Any]:
    """What a host says at the end of an agent; meanwhile its trees are never larger."""
    while True:
        wait_until(lambda: wire.is_told() or _is_much(daemon, most), "more")
        assert not _is_much(daemon, most)
        said = wire.op("ended", "ask")
        if said["op"] == "ended":
            return said
        wire.say("grant", ask=said["ask"], after=0)


def small() -> tuple[bytes, bytes]:
    pack = Pack()
    base = pack.commit(pack.tree([("100644", "file", pack.add("blob", b"one\n"))]))
    return pack.done(), base


def ones() -> tuple[bytes, bytes]:
    """A hundred KiB that would be 8 GiB of files."""
    pack = Pack()
    blob = pack.add("blob", b"", 100)
    tree = pack.tree(("100644", f"f{n:03}", blob) for n in range(80))
    base = pack.commit(tree)
    return pack.done(), base


def bomb() -> tuple[bytes, bytes]:
    """Ten thousand million files."""
    pack = Pack()
    base = pack.commit(pack.tree_bomb())
    return pack.done(), base


@pytest.mark.parametrize(
    ("make", "why"), [(ones, "owner_disk_max"), (bomb, "its repository cannot be made")]
)
def test_what_a_lead_sends_fills_nothing(
    host: Daemon, make: Callable[[], tuple[bytes, bytes]], why: str
) -> None:
    pack, base = make()
    with false_lead(host) as wire:
        agent = start(wire, pack, base)
        ended = watched(host, wire, most=SOFT)
        assert ended["outcome"] == "error" and why in ended["reason"], ended
        wire.op("dead")
        wire.tell("forget", agent)
        trees = host.state / "tree/agent"
        wait_until(lambda: not [*trees.glob(f"*/*~{agent}")], "nothing is left of it")


#: commits what ``Pack.tree_bomb`` makes
BOMB = (
    "tree=$(echo x | git hash-object -w --stdin) mode=\"100644 blob\"; for level in $(seq 10); do"
    " tree=$(for n in $(seq 0 9); do printf \"%s %s\\td%s\\n\" \"$mode\" $tree $n; done |"
    " git mktree) mode=\"040000 tree\"; done;"
    " git reset -q --soft $(git commit-tree $tree -p HEAD -m x); echo done"
)


def test_what_an_agent_commits_there_fills_no_disk(host: Daemon) -> None:
    """Its host lists ten thousand million files that are none."""
    pack, base = small()
    with false_lead(host) as wire:
        start(wire, pack, base, f"sh -c '{BOMB}'")
        ended = watched(host, wire, most=SOFT)
        assert read(host.agent_dir("x@one"), "out") == "done\n"
        assert ended["worktree"]["why"], ended
        wire.op("dead")
        assert not host.processes_of("x@one")


Entry = tuple[str, str, bytes]


def _evil(*entries: Callable[[Pack], Entry]) -> tuple[bytes, bytes]:
    pack = Pack()
    base = pack.commit(pack.tree(each(pack) for each in entries))
    return pack.done(), base


def _file(name: str, text: str = "touch /workspace/RAN", mode: str = "100755") -> Any:
    return lambda pack: (mode, name, pack.add("blob", text.encode()))


def _directory(name: str, *entries: Callable[[Pack], Entry]) -> Any:
    return lambda pack: ("40000", name, pack.tree(each(pack) for each in entries))


_HOOK: Any = _directory("hooks", _file("post-checkout"))
_LINK: Any = _file("d", "/tmp/home", "120000")
_MODULE = '[submodule "x"]\n\tpath = x\n\turl = -u./d\n'


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(_evil(_directory(".git", _HOOK)), id="git"),
        pytest.param(_evil(_directory(".GIT", _HOOK)), id="GIT"),
        pytest.param(_evil(_directory("git~1", _HOOK)), id="short"),
        pytest.param(_evil(_directory("..", _file("x"))), id="above"),
        pytest.param(_evil(_file("../x")), id="slash"),
        pytest.param(_evil(_LINK, _directory("d", _file("x"))), id="through"),
        pytest.param(_evil(_file(".gitmodules", _MODULE)), id="module"),
        pytest.param((small()[0], b"a" * 20), id="missing"),
        pytest.param((small()[0], b"a" * 32), id="format"),
    ],
)
def test_what_would_be_elsewhere_is_not_made(
    shared_host: Daemon, pack: tuple[bytes, bytes]
) -> None:
    with false_lead(shared_host) as wire:
        agent = start(wire, *pack)
        ended = wire.op("ended")
        assert ended["outcome"] == "error", ended
        assert "its repository cannot be made" in ended["reason"]
        wire.op("dead")
        wire.tell("forget", agent)
        trees = shared_host.state / "tree/agent"
        wait_until(lambda: not [*trees.glob(f"*/*~{agent}")], "nothing is left of it")


def test_what_a_lead_sends_has_nothing_run(shared_host: Daemon) -> None:
    """Links out of the tree, filters and submodules are what they are."""
    pack, base = _evil(
        _file(".gitattributes", "* filter=x diff=x merge=x working-tree-encoding=x\n"),
        _file("away", "../../../etc/shadow", "120000"),
        _file("file"),
        lambda _: ("160000", "module", b"\1" * 20),
    )
    with false_lead(shared_host) as wire:
        start(wire, pack, base, "sh -c 'ls -A; git status --porcelain; ls /repository/hooks'")
        wire.op("dead")
        said = read(shared_host.agent_dir(f"x@{wire.hello['alias']}"), "out").split()
        assert said == [".git", ".gitattributes", "away", "file", "module"], said


@pytest.mark.parametrize(
    "said",
    [
        {"files": {}},
        {"files": {"worktree.pack": [0, "0" * 64]}},
        {"files": {"worktree.pack": [True, "0" * 64]}},
        {"worktree": {"base": "a" * 40, "config": {"core.fsmonitor": "x"}, "differs": {}}},
        {"worktree": {"base": "a" * 40, "config": {"user.name": "a\nb"}, "differs": {}}},
        {"worktree": {"base": "--all", "config": {}, "differs": {}}},
        {"worktree": None},
    ],
)
def test_what_a_lead_says_of_a_pack_is_judged(shared_host: Daemon, said: dict[str, Any]) -> None:
    with false_lead(shared_host) as wire:
        start(wire, b"x" * 12, b"a" * 20, **said)
        told = wire.op("refused", "ended")
        assert told["op"] == "refused" or told["outcome"] == "error"
    assert "Traceback" not in shared_host.log.read_text()


# a host, against a lead


@pytest.fixture
def far() -> Iterator[FalseHost]:
    with false_host() as made:
        yield made


@pytest.fixture
def lead(far: FalseHost) -> Iterator[Lead]:
    """Its owners have room for what comes."""
    config = CONFIG.replace("64M", "1G")
    with lead_of({"n2": node(far.command, lease="30s")}, config) as made:
        yield made




@pytest.fixture
def family(lead: Lead) -> Iterator[Family]:
    made = Family(lead.daemon, count(1))
    yield made
    made.end()


#: a pack, and a commit that it is said to have
Maker = Callable[[Family], tuple[bytes, bytes]]


def committed(pack: Pack, family: Family, tree: bytes) -> tuple[bytes, bytes]:
    base = git(family.repository, "rev-parse", "HEAD")
    commit = pack.commit(tree, bytes.fromhex(base))
    return pack.done(), commit


def deltas(family: Family) -> tuple[bytes, bytes]:
    """Files of 300 MiB that are made of one which both have, so that all of each would be packed
    anew."""
    of, pack = os.urandom(MIB), Pack()
    (family.repository / "large").write_bytes(of)
    git(family.repository, "add", ".")
    git(family.repository, "commit", "-q", "-m", "large")
    base = pack.add("blob", of)
    files = (("100644", f"f{n}", pack.repeat(base, of, 300, b"%d" % n)) for n in range(3))
    return committed(pack, family, pack.tree(files))


def trees(family: Family) -> tuple[bytes, bytes]:
    """Ten thousand million files, which nobody has to list here."""
    pack = Pack()
    return committed(pack, family, pack.tree_bomb())


def many(family: Family) -> tuple[bytes, bytes]:
    """As many objects as a pack may say that it has."""
    data = b"PACK\0\0\0\2" + b"\xff" * 4
    return data + hashlib.sha1(data).digest(), b"c" * 20


@contextmanager
def meeting(far: FalseHost) -> Iterator[Wire]:
    wire = far.meet()
    with wire.socket:
        yield wire


def give_back(wire: Wire, pack: bytes, commit: bytes) -> None:
    """An agent ends, which has committed this."""
    put = wire.op("put")
    agent, run = put["agent"], f"r{put['run']}"
    left = {"commit": commit.hex(), "size": len(pack), "path": "/x", "why": ""}
    files = {"worktree.pack": [len(pack), 0]}
    wire.tell("state", agent, status="busy", run=run)
    wire.tell("ended", agent, outcome="done", reason="exit:0", files=files, worktree=left)
    wire.tell("dead", agent)
    give(wire, agent, "worktree.pack", pack)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (deltas, "its objects are missing, or do not match their names"),
        (trees, ""),
        (many, "what it committed cannot be unpacked"),
    ],
)
def test_what_a_host_gives_back_fills_nothing(
    lead: Lead, far: FalseHost, family: Family, make: Maker, why: str
) -> None:
    pack, commit = make(family)
    before = on_disk(family.repository)
    directory = family.child("true")
    with meeting(far) as wire, guarded(lead.daemon):
        give_back(wire, pack, commit)

        def over() -> bool:
            assert on_disk(family.repository) - before < 2 * FILES
            used = memory(lead.daemon, family.name)
            assert used < MEMORY, f"{used >> 20} MiB"
            return read(directory, "status") == "dead\n"

        wait_until(over, "it is dead", timeout=90)
    facts = family.facts(directory)
    assert facts["state"] == ("kept" if why else "fetched") and why in facts["reason"], facts
    place = family.repository / f".git/ctx/{facts['branch'][4:]}"
    assert sorted(os.listdir(place)) == ["config", "dotgit", "git", "work"]
    assert not [*family.repository.rglob("tmp_*")], "nothing half made is left"


def test_a_host_writes_nowhere_by_what_a_child_left_here(
    lead: Lead, far: FalseHost, family: Family
) -> None:
    """A child has run here first, and has a link where what comes of it is noted."""
    pack, commit = trees(family)
    base, main = git(family.repository, "rev-parse", "main"), ".git/refs/heads/main"
    own = f"{family.repository}/.git/ctx"
    program = f"ln -sf {family.repository}/{main} {own}/refs/heads/ctx/NAME && echo done"
    directory = family.child(program, "")
    wait_dead(directory)
    assert read(directory, "out") == "done\n"
    write(directory / "ctl", "reset")
    write(directory / "placement", "node=n2")
    write(directory / "ctl", "start")
    with meeting(far) as wire:
        wire.op("grant")
        wait_until(lambda: wire.is_told() or read(directory, "status") == "dead\n", "it is tried")
        if wire.is_told():
            give_back(wire, pack, commit)
            wait_dead(directory)
    assert git(family.repository, "rev-parse", "main") == base
    assert "its worktree was made here" in read(directory, "reason")


# both, with a real one at the other side


#: says one thing more, which is not so
_LIAR = "#!/bin/sh\n/usr/lib/git-core/git \"$@\"; code=$?; echo \"={}\" >&2; exit $code\n"


@pytest.mark.parametrize("said", ["count x", "count hooks_not_run:x"])
def test_a_parent_whose_git_lies_harms_itself(lead: Lead, said: str) -> None:
    liar = lead.daemon.base / "git"
    liar.write_text(_LIAR.format(said))
    liar.chmod(0o755)
    family = Family(lead.daemon, count(1), mount=f"{liar} /usr/bin/git ro\n")
    directory = family.child("true", "")
    wait_dead(directory)
    print(read(directory, "outcome"), read(directory, "reason"))
    assert read(directory, "outcome") == "error\n"
    assert "did not report a number" in read(directory, "reason")
    assert "Traceback" not in lead.daemon.log.read_text()


@pytest.fixture
def three() -> Iterator[Three]:
    with three_of(n2="60s") as made:
        yield made


def test_a_hundred_packs_at_once_are_made_and_come_back(three: Three) -> None:
    """Others are served meanwhile."""
    family = Family(three.daemon, three.numbers)
    (family.repository / "large").write_bytes(os.urandom(MIB))
    git(family.repository, "add", ".")
    git(family.repository, "commit", "-q", "-m", "large")
    with guarded(three.daemon):
        made = [family.child("echo two > file; git commit -qam two") for _ in range(100)]
        for directory in made:
            wait_dead(directory, timeout=300)
        assert {read(each, "outcome") for each in made} == {"done\n"}
        for directory in made:
            if family.facts(directory)["state"] == "kept":  # its turn did not come in a minute
                family.fetch(directory)
            wait_until(lambda at=directory: family.facts(at)["state"] == "fetched", "it has come")  # type: ignore[misc]
    branches = git(family.repository, "for-each-ref", "refs/heads/ctx", "--format=%(subject)")
    assert branches.split() == ["two"] * 100
    family.end()


LARGE = f"head -c {24 * MIB} /dev/urandom > large; git add large; git commit -qm large"


@contextmanager
def two(*, here: str = "1G", there: str = "1G") -> Iterator[tuple[Lead, Daemon]]:
    """A lead and a host, whose owners have so much of the disk."""
    grace = "grace: 1s\nowner_disk_max: "
    with (
        daemon_of(config=f"node_name: two\n{grace}{there}\n") as host,
        lead_of({"n2": node(peer(host), lease="30s")}, f"node_name: one\n{grace}{here}\n") as lead,
    ):
        yield lead, host


def _fetched(directory: Path) -> int:
    """Bytes that are still to come."""
    lines = dict(line.split("=", 1) for line in read(directory, "node").splitlines())
    return int(lines["fetch"])


def test_a_pack_waits_at_its_host_until_there_is_room_here() -> None:
    with two(here="64M") as (lead, host):
        family = Family(lead.daemon, count(1))
        directory = family.child(f"sleep 1000; {LARGE}")
        wait_until(lambda: host.processes_of("*@one", "sleep"), "it runs there")
        fill = f"sh -c 'head -c {80 * MIB} /dev/urandom > ~/much; sleep 1000'"
        filler = lead.daemon.run("filler", fill, homedir="durable")
        wait_status(filler, "paused", timeout=60)
        for pid in host.processes_of("*@one", "sleep"):
            end_process(pid)
        wait_until(lambda: _fetched(directory) > 20 * MIB, "it waits for room", timeout=60)
        write(filler / "ctl", "kill")
        wait_dead(filler)
        [much] = lead.daemon.state.glob("tree/agent/*/filler/**/much")
        much.unlink()
        wait_dead(directory, timeout=120)

        def has_come() -> bool:
            state = family.facts(directory)["state"]
            if state == "kept":  # what git says of it had no room either, before that is measured
                family.fetch(directory)
            return state == "fetched"

        wait_until(has_come, "it has come", timeout=60)
        family.end()


def test_what_there_is_no_room_to_pack_is_kept_there() -> None:
    """Its agent has filled the account of the link's uid."""
    with two(there="32M") as (lead, host):
        family = Family(lead.daemon, count(1))
        directory = family.child(f"{LARGE}; sleep 1000")
        wait_status(directory, "paused", timeout=60)
        write(directory / "ctl", "stop")
        wait_dead(directory, timeout=120)
        facts = family.facts(directory)
        [work] = host.state.glob("tree/agent/*/*@one~*/work")
        assert (work / "large").stat().st_size == 24 * MIB
        assert facts["state"] == "kept" and f'in "{work}"' in facts["reason"], facts
        family.end()


#: whatever a directory can have that is hard to list, to read or to remove
_HARD = """
import os, socket, struct
def attempt(call, *words):
    try:
        call(*words)
        print(words)
    except OSError:
        pass
for top in (os.environ["HOME"], "/workspace"):
    os.chdir(top)
    os.symlink("/etc/shadow", "link")
    os.symlink("..", "up")
    os.mkfifo("fifo")
    os.mkfifo(".gitattributes")
    socket.socket(socket.AF_UNIX).bind("sock")
    attempt(os.mknod, "null", 0o20666, os.makedev(1, 3))
    attempt(os.link, "/etc/hostname", "hard")
    attempt(os.chown, "link", 0, 0)
    with open("suid", "wb") as file:
        os.fchmod(file.fileno(), 0o6755)
    capability = struct.pack("<IIIII", 0x2000001, 0xffffffff, 0, 0, 0)
    attempt(os.setxattr, "suid", "security.capability", capability)
    os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 1 << 40)
    for name in (b"new\\nline", b"\\xff\\xfe", b"-rf", b"\\x1b[2J"):
        open(name, "w").close()
    os.mkdir("many")
    for n in range(50_000):
        os.mknod(f"many/{n}")
    for _ in range(3000):
        os.mkdir("d" * 20)
        os.chdir("d" * 20)
    os.chmod(".", 0)
    os.chmod(top, 0)
print("done")
"""


def test_what_is_hard_to_look_at_holds_up_nobody_and_goes(three: Three) -> None:
    """A durable home and a worktree at a host, which an agent there has filled."""
    family, host = Family(three.daemon, three.numbers), three.hosts["n2"]
    with guarded(host):
        directory = family.child("python3 -", homedir="durable", **{"handoff.md": _HARD})
        wait_dead(directory, timeout=180)
        assert read(directory, "out") == "done\n", read(directory, "log")
        assert family.facts(directory)["state"] == "kept"
        trees = host.state / "tree/agent"
        assert len([*trees.glob("*/*@*")]) == 2
        assert three.daemon.ctx("nodes", "forget", "n2").returncode == 0
        wait_until(lambda: not [*trees.glob("*/*@*")], "both are gone there", timeout=60)
        wait_until(lambda: not discarded(host.state), "from the disk, too", timeout=180)
    family.end()
