"""Work items and waits as directories: names, errors, caches, and tokens that nobody is told."""

from __future__ import annotations

import json
import logging
import os
import stat
from types import SimpleNamespace

import pyfuse3
import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.tree import members
from runtime.ids import TriggerToken
from runtime.records.items import Message, Wait, Work
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.records import inside
from tests.worlds.tree import (
    CONTEXT,
    STRANGER,
    USER,
    Mounted,
    Waiter,
    complete,
    refused,
)

D = "agent/x.d"
APPEND = os.O_APPEND
PLANES = ["work", "waiting"]


pytestmark = pytest.mark.settings(work_items=3, waits=3)


@pytest.fixture
def mounted(mounted: Mounted) -> Mounted:
    agent = mounted.world.live(mounted.make("x", USER))
    mounted.agents.journal.update(agent, mode="turn")
    return mounted


def the_agent(mounted: Mounted) -> Agent:
    return mounted.agent("x")


def mkdir(mounted: Mounted, path: str) -> None:
    directory, name = os.path.split(path)
    complete(mounted.ops.mkdir, mounted.inode(directory), os.fsencode(name), 0o755, CONTEXT)


def rmdir(mounted: Mounted, path: str) -> None:
    directory, name = os.path.split(path)
    complete(mounted.ops.rmdir, mounted.inode(directory), os.fsencode(name), CONTEXT)


# directories


@pytest.mark.parametrize("plane", PLANES)
def test_records_are_directories_that_are_made_listed_and_removed(
    mounted: Mounted, plane: str
) -> None:
    beside = ["current"] if plane == "work" else []
    assert mounted.list(f"{D}/{plane}") == beside
    mkdir(mounted, f"{D}/{plane}/b")
    mkdir(mounted, f"{D}/{plane}/a")
    assert mounted.list(f"{D}/{plane}") == ["b", "a", *beside]
    found = mounted.stat(f"{D}/{plane}/a")
    assert stat.S_ISDIR(found.st_mode)
    assert found.st_mtime_ns > 0
    assert found.st_ino != mounted.stat(f"{D}/{plane}/b").st_ino
    assert "status" in mounted.list(f"{D}/{plane}/a")
    rmdir(mounted, f"{D}/{plane}/b")
    assert mounted.list(f"{D}/{plane}") == ["a", *beside]
    with refused("ENOENT"):
        mounted.inode(f"{D}/{plane}/b")
    with refused("ENOENT"):
        complete(mounted.ops.rmdir, mounted.inode(f"{D}/{plane}"), b"b", CONTEXT)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", ["current", "a b", ".x", "x.d", "x.sock", "é", "x" * 65])
def test_what_is_no_name_is_einval(mounted: Mounted, plane: str, name: str) -> None:
    with refused("EINVAL"):
        mkdir(mounted, f"{D}/{plane}/{name}")
    assert f"{D}/{plane}/" in mounted.reason


@pytest.mark.parametrize("plane", PLANES)
def test_making_is_refused_in_the_order_of_the_contract(mounted: Mounted, plane: str) -> None:
    for name in ("a", "b", "c"):
        mkdir(mounted, f"{D}/{plane}/{name}")
    with mounted.as_(STRANGER):
        directory = agent_files.LAYOUT.inode(
            the_agent(mounted).index, agent_files.LAYOUT.number_of(plane)
        )
        with refused("EACCES"):
            complete(mounted.ops.mkdir, directory, b"not a name", 0o755, CONTEXT)
    with refused("EEXIST"):
        mkdir(mounted, f"{D}/{plane}/a")
    with refused("EDQUOT"):
        mkdir(mounted, f"{D}/{plane}/d")
    mounted.agents.journal.update(the_agent(mounted), status=Status.DEAD)
    with refused("EEXIST"):
        mkdir(mounted, f"{D}/{plane}/a")
    with refused("EBUSY"):
        mkdir(mounted, f"{D}/{plane}/d")
    with refused("EINVAL"):
        mkdir(mounted, f"{D}/{plane}/not a name")


@pytest.mark.parametrize("plane", PLANES)
def test_nothing_else_is_made_there(mounted: Mounted, plane: str) -> None:
    mkdir(mounted, f"{D}/{plane}/a")
    for directory in (mounted.inode(f"{D}/{plane}"), mounted.inode(f"{D}/{plane}/a")):
        with refused("EPERM"):
            complete(mounted.ops.create, directory, b"f", 0o644, os.O_RDWR, CONTEXT)
        with refused("EPERM"):
            complete(mounted.ops.symlink, directory, b"l", b"target", CONTEXT)
    with refused("EPERM"):
        mkdir(mounted, f"{D}/{plane}/a/b")
    with refused("EPERM"):
        rmdir(mounted, f"{D}/{plane}/a/status")
    with refused("EPERM"):
        complete(
            mounted.ops.rename, mounted.inode(f"{D}/{plane}"), b"a",
            mounted.inode(f"{D}/{plane}"), b"b", 0, CONTEXT,
        )  # fmt: skip


@pytest.mark.parametrize("plane", PLANES)
def test_where_the_owner_is_not_the_agents_uid_both_may_make_and_write(
    mounted: Mounted, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.agents.journal.update(the_agent(mounted), uid=61000)
    mkdir(mounted, f"{D}/{plane}/a")
    written = "objective" if plane == "work" else "on"
    assert stat.S_IMODE(mounted.stat(f"{D}/{plane}").st_mode) == 0o777
    agent = the_agent(mounted)
    for group, mode in ((agent.gid, 0o664), (agent.gid + 1, 0o666), (None, 0o666)):
        monkeypatch.setattr(members, "group_of", lambda uid, group=group: group)
        found = mounted.stat(f"{D}/{plane}/a/{written}")
        assert stat.S_IMODE(found.st_mode) == mode
        assert (found.st_uid, found.st_gid) == (mounted.agents.privilege.uid, agent.gid)


@pytest.mark.parametrize("plane", PLANES)
def test_the_inodes_of_what_is_gone_are_not_there(mounted: Mounted, plane: str) -> None:
    mkdir(mounted, f"{D}/{plane}/a")
    inode = mounted.inode(f"{D}/{plane}/a/status")
    number, other = inode & 0xFF, waiting_files.LAYOUT if plane == "work" else work_files.LAYOUT
    with refused("ESTALE"):  # the same record, looked for in the other plane
        complete(mounted.ops.getattr, other.inode(inode >> 16, number), CONTEXT)
    rmdir(mounted, f"{D}/{plane}/a")
    with refused("ESTALE"):
        complete(mounted.ops.getattr, inode, CONTEXT)
    mkdir(mounted, f"{D}/{plane}/a")
    with refused("ESTALE"):
        complete(mounted.ops.getattr, inode, CONTEXT)


@pytest.mark.parametrize("plane", PLANES)
def test_the_records_of_an_agent_that_is_gone_are_not_written(
    mounted: Mounted, plane: str
) -> None:
    mkdir(mounted, f"{D}/{plane}/a")
    written = "objective" if plane == "work" else "on"
    fh = mounted.open(f"{D}/{plane}/a/{written}", os.O_WRONLY | os.O_TRUNC)
    agent = the_agent(mounted)
    mounted.agents.journal.update(agent, status=Status.DEAD)
    mounted.agents.removals.remove(agent)
    with refused("EBUSY"):
        mounted.write(fh, b"too late\n")
    assert mounted.base.reasons.of_caller(mounted.identity.caller)


@pytest.mark.parametrize("plane", PLANES)
def test_a_dead_agents_records_are_read_and_removed_only(mounted: Mounted, plane: str) -> None:
    mkdir(mounted, f"{D}/{plane}/a")
    written = "objective" if plane == "work" else "on"
    mounted.agents.journal.update(the_agent(mounted), status=Status.DEAD)
    with refused("EBUSY"):
        mounted.open(f"{D}/{plane}/a/{written}", os.O_WRONLY)
    assert mounted.get(f"{D}/{plane}/a/{written}") == ""
    rmdir(mounted, f"{D}/{plane}/a")


# work items


def test_a_work_item_is_written_with_echo(mounted: Mounted) -> None:
    mkdir(mounted, f"{D}/work/w")
    mkdir(mounted, f"{D}/work/first")
    texts = {
        "objective": "to reach it\n",
        "plan.md": "- [x] one\n- [ ] two\n",
        "acceptance.md": "it works\n",
        "parent": "chain-7\n",
        "blocked_by": "first\n",
    }
    for name, text in texts.items():
        mounted.put(f"{D}/work/w/{name}", text)
        assert mounted.get(f"{D}/work/w/{name}") == text
        assert mounted.stat(f"{D}/work/w/{name}").st_size == len(text)
    mounted.put(f"{D}/work/w/plan.md", "- [ ] three\n", APPEND)
    assert mounted.get(f"{D}/work/w/plan.md").endswith("two\n- [ ] three\n")
    mounted.put(f"{D}/work/w/plan.md", "\n")
    assert mounted.get(f"{D}/work/w/plan.md") == ""
    assert mounted.get(f"{D}/work/w/status") == "blocked\n"
    created, updated = (mounted.get(f"{D}/work/w/{name}_at") for name in ("created", "updated"))
    assert created[-2:] == updated[-2:] == "Z\n"
    assert created <= updated


def test_the_focus_is_a_file(mounted: Mounted) -> None:
    for name in ("a", "b"):
        mkdir(mounted, f"{D}/work/{name}")
    assert mounted.get(f"{D}/work/current") == ""
    mounted.put(f"{D}/work/current", "a\n")
    assert mounted.get(f"{D}/work/current") == "a\n"
    mounted.put(f"{D}/work/b/status", "active\n")
    assert mounted.get(f"{D}/work/current") == "b\n"
    assert mounted.get(f"{D}/work/a/status") == "open\n"
    mounted.put(f"{D}/work/current", "\n")
    assert mounted.get(f"{D}/work/current") == ""
    assert mounted.get(f"{D}/work/b/status") == "open\n"
    with refused("ENOENT"):
        mounted.put(f"{D}/work/current", "none\n")
    with refused("EINVAL"):
        mounted.put(f"{D}/work/current", "a\nb\n")
    mounted.put(f"{D}/work/a/status", "cancelled\n")
    with refused("EBUSY"):
        mounted.put(f"{D}/work/current", "a\n")


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("status", "finished\n", "EINVAL"),
        ("status", "open\nactive\n", "EINVAL"),
        ("status", "done\n", "EBUSY"),
        ("status", b"\xff\n", "EINVAL"),
        ("blocked_by", "w\n", "EINVAL"),
        ("blocked_by", "none\n", "ENOENT"),
        ("parent", "a\nb\n", "EINVAL"),
        ("plan.md", "x" * 70_000, "EMSGSIZE"),
    ],
)
def test_a_bad_line_is_refused_where_it_is_written(
    mounted: Mounted, file: str, text: str | bytes, name: str
) -> None:
    mkdir(mounted, f"{D}/work/w")
    before = mounted.get(f"{D}/work/w/{file}")
    fh = mounted.open(f"{D}/work/w/{file}", os.O_WRONLY | os.O_TRUNC)
    with refused(name):
        mounted.write(fh, text if isinstance(text, bytes) else text.encode())
    mounted.close(fh)
    assert mounted.get(f"{D}/work/w/{file}") == before
    assert f" {name} {D}/work/w/{file}: " in mounted.reason


def test_waits_in_blocked_by_survive_what_is_appended(mounted: Mounted) -> None:
    for name in ("w", "first", "second"):
        mkdir(mounted, f"{D}/work/{name}")
    mounted.put(f"{D}/work/w/blocked_by", "first\n")
    mkdir(mounted, f"{D}/waiting/x")
    mounted.put(f"{D}/waiting/x/work", "w\n")
    mounted.put(f"{D}/waiting/x/on", "timer 1h\n")
    assert mounted.get(f"{D}/work/w/blocked_by") == "first\nwait x\n"
    mounted.put(f"{D}/work/w/blocked_by", "second\n", APPEND)
    assert mounted.get(f"{D}/work/w/blocked_by") == "first\nsecond\nwait x\n"


# waits


def test_a_wait_is_armed_with_echo(mounted: Mounted) -> None:
    mkdir(mounted, f"{D}/waiting/x")
    assert mounted.get(f"{D}/waiting/x/status") == "new\n"
    mounted.put(f"{D}/waiting/x/deadline", "2h\n")
    mounted.put(f"{D}/waiting/x/on", "timer 1h\n")
    shown = {name: mounted.get(f"{D}/waiting/x/{name}") for name in ("on", "deadline", "status")}
    assert shown == {"on": "timer 1h\n", "deadline": "2h\n", "status": "armed\n"}
    for name in ("work", "payload", "token"):
        assert mounted.get(f"{D}/waiting/x/{name}") == ""
    with refused("EBUSY"):
        mounted.open(f"{D}/waiting/x/on", os.O_WRONLY)
    assert mounted.reason.endswith("cannot arm: the wait is armed\n")


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("on", "later\n", "EINVAL"),
        ("on", "timer soon\n", "EINVAL"),
        ("on", "\n", "EINVAL"),
        ("on", "message\ntrigger\n", "EINVAL"),
        ("on", "child none\n", "ENOENT"),
        ("on", "reply none\n", "EINVAL"),
        ("on", "task none\n", "ENOENT"),
        ("work", "none\n", "ENOENT"),
        ("deadline", "soon\n", "EINVAL"),
    ],
)
def test_a_bad_wait_is_refused_where_it_is_written(
    mounted: Mounted, file: str, text: str, name: str
) -> None:
    mkdir(mounted, f"{D}/waiting/x")
    fh = mounted.open(f"{D}/waiting/x/{file}", os.O_WRONLY | os.O_TRUNC)
    with refused(name):
        mounted.write(fh, text.encode())
    mounted.close(fh)
    assert mounted.get(f"{D}/waiting/x/{file}") == ""
    assert mounted.get(f"{D}/waiting/x/status") == "new\n"


# what the kernel may keep


class Kernel:
    """Remembers what the kernel is told to forget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mounted: Mounted) -> None:
        self.inodes: set[int] = set()
        monkeypatch.setattr(pyfuse3, "invalidate_inode", self.inode)
        mounted.base.cache.mounted = True
        self._cache = mounted.base.cache
        self._inode_of = mounted.inode

    def inode(self, inode: int, attr_only: bool = False) -> None:
        self.inodes.add(inode)

    def forgets(self, path: str) -> bool:
        return self._inode_of(path) in self.inodes

    def names(self) -> set[tuple[int, str]]:
        return set(self._cache._names._waiting)


def test_a_change_is_told_to_the_kernel_file_by_file(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir(mounted, f"{D}/work/w")
    for name in ("plan.md", "objective", "status", "updated_at"):
        mounted.stat(f"{D}/work/w/{name}")
    mounted.stat(f"{D}/work/current")
    kernel = Kernel(monkeypatch, mounted)
    work, agent = mounted.agents.work, the_agent(mounted)
    item = work.find(agent, "w")
    work.set(agent, item, "plan", "x\n")
    assert kernel.forgets(f"{D}/work/w/plan.md")
    assert kernel.forgets(f"{D}/work/w/updated_at")
    assert not kernel.forgets(f"{D}/work/w/objective")
    assert not kernel.forgets(f"{D}/work/w/status")
    work.focus(agent, "w")
    assert kernel.forgets(f"{D}/work/w/status")
    assert kernel.forgets(f"{D}/work/current")


def test_names_are_cached_until_they_go(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, mounted)
    for plane in PLANES:
        mkdir(mounted, f"{D}/{plane}/a")
        found = complete(mounted.ops.lookup, mounted.inode(f"{D}/{plane}"), b"a", CONTEXT)
        assert found.entry_timeout > 0
        directory = mounted.inode(f"{D}/{plane}")
        mounted.base.cache._names._waiting.clear()
        rmdir(mounted, f"{D}/{plane}/a")
        assert kernel.names() == {(directory, "a")}


@pytest.mark.parametrize("path", [f"{D}/work/w/status", f"{D}/waiting/x/status"])
def test_a_status_can_be_polled(mounted: Mounted, path: str) -> None:
    mkdir(mounted, f"{D}/work/w")
    mkdir(mounted, f"{D}/waiting/x")
    fh = mounted.open(path)
    mounted.read(fh)
    waiter = Waiter()
    complete(mounted.ops.poll, mounted.inode(path), fh, waiter, CONTEXT)
    mounted.put(f"{D}/waiting/x/work", "w\n")
    assert waiter.notified == 0
    mounted.put(f"{D}/waiting/x/on", "timer 1h\n")
    assert waiter.notified == 1


# tokens


def token_of(mounted: Mounted, name: str = "x") -> str:
    mkdir(mounted, f"{D}/waiting/{name}")
    mounted.put(f"{D}/waiting/{name}/on", "trigger\n")
    token = mounted.get(f"{D}/waiting/{name}/token")
    assert len(token) == 33
    return token.strip()


def test_whoever_knows_a_token_fires_the_wait_once(mounted: Mounted) -> None:
    token = token_of(mounted)
    with mounted.as_(STRANGER):
        found = mounted.stat(f"trigger/{token}")
        assert stat.S_IMODE(found.st_mode) == 0o222
        assert (found.entry_timeout, found.attr_timeout) == (0, 0)
        mounted.put(f"trigger/{token}", "it is there\n")
        with refused("ENOENT"):
            mounted.inode(f"trigger/{token}")
        with refused("ENOENT"):  # what a shell does then
            complete(mounted.ops.create, mounted.inode("trigger"), token.encode(), 0o644,
                     os.O_WRONLY, CONTEXT)
    assert mounted.get(f"{D}/waiting/x/status") == "fired\n"
    assert mounted.get(f"{D}/waiting/x/payload") == "it is there\n"
    (message,) = mounted.agents.items.of(the_agent(mounted).index, Message)
    assert json.loads(message.text)["payload"] == "it is there\n"


def test_the_directory_of_tokens_lists_nothing(mounted: Mounted) -> None:
    token_of(mounted)
    assert mounted.list("trigger") == []


def test_a_token_is_not_read(mounted: Mounted) -> None:
    token = token_of(mounted)
    for flags in (os.O_RDONLY, os.O_RDWR):
        with refused("EACCES"):
            mounted.open(f"trigger/{token}", flags)
    assert mounted.get(f"{D}/waiting/x/status") == "armed\n"


def test_what_is_written_is_one_payload(mounted: Mounted) -> None:
    fh = mounted.open(f"trigger/{token_of(mounted)}", os.O_WRONLY)
    mounted.flush(fh)  # of a shell that duplicates it
    assert mounted.get(f"{D}/waiting/x/status") == "armed\n"
    mounted.write(fh, b"one ")
    mounted.write(fh, "tw\u00f6".encode()[:3], 4)
    mounted.write(fh, "tw\u00f6".encode()[3:], 7)
    assert mounted.get(f"{D}/waiting/x/status") == "armed\n"
    mounted.flush(fh)
    assert mounted.get(f"{D}/waiting/x/payload") == "one tw\u00f6"
    with refused("ENOENT"):
        mounted.write(fh, b"again")
    mounted.close(fh)
    assert mounted.get(f"{D}/waiting/x/payload") == "one tw\u00f6"


def test_of_two_who_have_it_open_the_first_fires(mounted: Mounted) -> None:
    token = token_of(mounted)
    first, second = (mounted.open(f"trigger/{token}", os.O_WRONLY) for _ in range(2))
    mounted.write(second, b"second")
    mounted.write(first, b"first")
    mounted.close(first)
    with refused("ENOENT"):
        mounted.close(second)
    assert mounted.get(f"{D}/waiting/x/payload") == "first"


@pytest.mark.parametrize(
    ("data", "name"), [(b"a\0b\n", "EINVAL"), (b"\xff", "EINVAL"), (b"x" * 65537, "EMSGSIZE")]
)
def test_a_bad_payload_does_not_use_the_token(mounted: Mounted, data: bytes, name: str) -> None:
    token = token_of(mounted)
    with mounted.as_(STRANGER), refused(name):
        mounted.put(f"trigger/{token}", data)
    assert mounted.get(f"{D}/waiting/x/status") == "armed\n"
    mounted.put(f"trigger/{token}", b"x" * 65536)
    assert mounted.get(f"{D}/waiting/x/status") == "fired\n"


def test_truncation_alone_fires_nothing(mounted: Mounted) -> None:
    token = token_of(mounted)
    entry = pyfuse3.EntryAttributes()
    entry.st_size = 0
    names = ("mode", "uid", "gid", "atime", "mtime", "ctime")
    asked = SimpleNamespace(update_size=True, **{f"update_{name}": False for name in names})
    with mounted.as_(STRANGER):
        inode = mounted.inode(f"trigger/{token}")
        complete(mounted.ops.setattr, inode, entry, asked, None, CONTEXT)
    assert mounted.get(f"{D}/waiting/x/status") == "armed\n"


def test_cancelled_waits_have_no_token(mounted: Mounted) -> None:
    token = token_of(mounted)
    fh = mounted.open(f"trigger/{token}", os.O_WRONLY)
    mounted.write(fh, b"late")
    rmdir(mounted, f"{D}/waiting/x")
    with refused("ENOENT"):
        mounted.inode(f"trigger/{token}")
    with refused("ENOENT"):
        mounted.close(fh)


def test_no_reason_and_no_log_names_a_token(
    mounted: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = token_of(mounted)
    trigger, name = mounted.inode("trigger"), token.encode()
    inode = mounted.inode(f"trigger/{token}")
    for operation, args in (
        (mounted.ops.unlink, (trigger, name)),
        (mounted.ops.rmdir, (trigger, name)),
        (mounted.ops.mkdir, (trigger, name, 0o755)),
        (mounted.ops.mknod, (trigger, name, stat.S_IFIFO, 0)),
        (mounted.ops.create, (trigger, name, 0o644, os.O_RDWR)),
        (mounted.ops.symlink, (trigger, name, b"target")),
        (mounted.ops.link, (inode, trigger, name)),
        (mounted.ops.rename, (trigger, name, mounted.inode(D), b"x", 0)),
        (mounted.ops.open, (inode, os.O_RDONLY)),
        (mounted.ops.opendir, (inode,)),
        (mounted.ops.readlink, (inode,)),
        (mounted.ops.lookup, (inode, b"x")),
        (mounted.ops.lookup, (trigger, name.upper() + b"x")),
    ):
        with mounted.as_(STRANGER), pytest.raises(pyfuse3.FUSEError):
            complete(operation, *args, CONTEXT)
        with mounted.as_(STRANGER):
            assert token[:8] not in mounted.reason, operation.__name__
    for data in (b"\0", b"x" * 70_000):
        with pytest.raises(pyfuse3.FUSEError):
            mounted.put(f"trigger/{token}", data)
        assert token not in mounted.reason
    mounted.put(f"trigger/{token}", "go")
    assert token not in caplog.text
    assert token not in mounted.get(f"{D}/error")
    assert not any(token in line for line in mounted.world.lines(the_agent(mounted)))


def test_an_agent_fires_anothers_wait(mounted: Mounted) -> None:
    token = token_of(mounted)
    other = mounted.world.live(mounted.make("other", STRANGER))
    with mounted.as_(inside(other)):
        mounted.put(f"trigger/{token}", "from another\n")
    assert mounted.get(f"{D}/waiting/x/payload") == "from another\n"


def test_everything_is_there_after_a_crash(mounted: Mounted) -> None:
    token = token_of(mounted)
    mkdir(mounted, f"{D}/work/w")
    mounted.put(f"{D}/waiting/x/work", "w\n")
    agents = mounted.world.reopen()
    again = agents.registry.named("x")
    assert again is not None
    (item,) = agents.items.of(again.index, Work)
    (wait,) = agents.items.of(again.index, Wait)
    assert (item.status, wait.status, wait.work) == ("blocked", "armed", "w")
    assert agents.waiting.with_token(TriggerToken(token)) is wait
