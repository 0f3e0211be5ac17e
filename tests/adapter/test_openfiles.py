"""Reading and writing an agent's files: staged, checked, committed once, or refused."""

from __future__ import annotations

import json
import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest

from ctxfs.tree.openfiles import OpenRow
from runtime.authority.accounts import Resource
from runtime.caller import Caller
from runtime.life.metering import Meter
from runtime.records.change import Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.adapter.test_who_may import PLACED, SAYS
from tests.worlds.records import inside
from tests.worlds.tree import (
    CONTEXT,
    STRANGER,
    USER,
    Mounted,
    Waiter,
    complete,
    mounted_in,
    refused,
)

WRITE = os.O_WRONLY | os.O_TRUNC
APPEND = os.O_WRONLY | os.O_APPEND
D = "agent/x.d"
MESSAGES = "home/0/agent/x/session/default/messages.jsonl"
EVENTS = "home/0/agent/x/session/default/events.jsonl"


@pytest.fixture
def mounted(mounted: Mounted) -> Mounted:
    mounted.make("x")
    return mounted


def the_agent(mounted: Mounted, name: str = "x") -> Agent:
    return mounted.agent(name)


class Commits(Subscriber):
    """Counts what is changed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def agent_changed(self, index: int, names: Any) -> None:
        self.names += names


@pytest.fixture
def commits(mounted: Mounted) -> Commits:
    found = Commits()
    mounted.agents.journal.subscribe(found)
    return found


# controls


def test_a_value_is_replaced(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "echo hi\n")
    mounted.put(f"{D}/exec", "true\n")
    assert mounted.get(f"{D}/exec") == "true\n"


def test_every_kind_of_control_tells_that_it_was_written(mounted: Mounted) -> None:
    for name, text in (("model", "m\n"), ("mount", "/usr /mnt ro\n"), ("root", "/usr\n")):
        mounted.put(f"{D}/{name}", text)
        told = [json.loads(line) for line in mounted.world.lines(the_agent(mounted))]
        assert told[-1]["type"] == "agent.control"
        assert told[-1]["file"] == name


def test_a_value_without_a_newline_is_committed_at_close(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true")
    assert mounted.get(f"{D}/exec") == "true\n"


def test_nothing_is_committed_before_the_flush(mounted: Mounted, commits: Commits) -> None:
    fh = mounted.open(f"{D}/exec", WRITE)
    mounted.write(fh, b"true\n")
    assert commits.names == []
    assert mounted.get(f"{D}/exec") == ""
    mounted.flush(fh)
    assert commits.names == ["exec"]
    mounted.close(fh)


def test_each_new_data_is_committed_once(mounted: Mounted, commits: Commits) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    mounted.flush(fh)  # the shell's dup2
    mounted.write(fh, b"A=1\n")
    mounted.flush(fh)
    mounted.flush(fh)
    mounted.close(fh)
    assert commits.names == ["env"]


def test_a_flush_without_data_is_no_commit(mounted: Mounted, commits: Commits) -> None:
    mounted.close(mounted.open(f"{D}/env", WRITE))
    mounted.close(mounted.open(f"{D}/env", APPEND))
    assert commits.names == []


def _truncate(mounted: Mounted, path: str, size: int, fh: int | None) -> None:
    """truncate(2) without an open file, ftruncate(2) with one."""
    entry = pyfuse3.EntryAttributes()
    entry.st_size = size
    fields = SimpleNamespace(
        update_size=True,
        **{f"update_{n}": False for n in ("mode", "uid", "gid", "atime", "mtime")},
    )
    complete(mounted.ops.setattr, mounted.inode(path), entry, fields, fh, CONTEXT)


def test_truncation_alone_changes_nothing(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    mounted.close(mounted.open(f"{D}/exec", WRITE))
    _truncate(mounted, f"{D}/exec", 0, None)
    fh = mounted.open(f"{D}/exec", os.O_WRONLY)
    _truncate(mounted, f"{D}/exec", 0, fh)
    mounted.close(fh)
    assert mounted.get(f"{D}/exec") == "true\n"


def test_what_is_written_after_a_truncation_replaces_the_value(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\nB=2\n")
    fh = mounted.open(f"{D}/env", os.O_WRONLY)
    _truncate(mounted, f"{D}/env", 0, fh)
    mounted.write(fh, b"C=3\n")
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "C=3\n"


def test_a_truncation_takes_back_what_was_written_and_not_committed(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\n")
    fh = mounted.open(f"{D}/env", os.O_WRONLY)
    mounted.write(fh, b"B=2\nC=3\n")
    _truncate(mounted, f"{D}/env", 4, fh)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "B=2\n"


def test_what_is_not_committed_is_on_the_openers_account(mounted: Mounted) -> None:
    accounts = mounted.agents.accounts
    before = accounts.use(0, Resource.MEMORY)
    fh = mounted.open(f"{D}/env", WRITE)
    mounted.write(fh, b"A=" + b"x" * 40_000 + b"\n")
    assert accounts.use(0, Resource.MEMORY) - before >= 40_000
    _truncate(mounted, f"{D}/env", 0, fh)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "", "nothing of it was committed"
    assert accounts.use(0, Resource.MEMORY) == before


def test_who_has_ended_writes_to_no_file_that_it_opened(mounted: Mounted) -> None:
    agent = the_agent(mounted)
    mounted.world.live(agent)
    with mounted.as_(inside(agent)):
        fh = mounted.open(f"{D}/refs.jsonl", WRITE)
        mounted.world.live(agent, Status.DEAD)
        with refused("EACCES"):
            mounted.write(fh, b'{"path":"artifact/a"}\n')
        assert "has ended" in mounted.reason
        mounted.close(fh)


def test_several_writes_are_one_value(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    for offset, part in ((0, b"A"), (1, b"=1\nB="), (6, b"2\n")):
        mounted.write(fh, part, offset)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "A=1\nB=2\n"


def test_a_character_may_be_split_over_two_writes(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    mounted.write(fh, b"A=\xc3", 0)
    mounted.write(fh, b"\xa4\n", 3)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "A=ä\n"


def test_appending_adds_lines(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\n")
    mounted.put(f"{D}/env", "B=2\n", os.O_APPEND)
    assert mounted.get(f"{D}/env") == "A=1\nB=2\n"


def test_writing_in_place_keeps_the_rest(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\nB=2\n")
    fh = mounted.open(f"{D}/env", os.O_RDWR)
    mounted.write(fh, b"C", 4)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "A=1\nC=2\n"


def test_an_open_value_reads_what_was_committed_meanwhile(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/exec", os.O_RDWR)
    assert mounted.read(fh) == b""
    mounted.write(fh, b"true\n")
    mounted.flush(fh)
    assert mounted.read(fh) == b"true\n"
    mounted.close(fh)


def test_a_bad_line_is_refused_by_write(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    mounted.write(fh, b"A=1\n")
    with refused("EINVAL"):
        mounted.write(fh, b"nonsense\n", 4)
    assert "nonsense" in mounted.reason
    mounted.close(fh)


def test_a_bad_last_line_without_a_newline_is_refused_by_flush(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    mounted.write(fh, b"A=1\nnonsense")
    with refused("EINVAL"):
        mounted.close(fh)
    assert mounted.get(f"{D}/env") == ""


@pytest.mark.parametrize("text", [b"B=2\nbad\n", b"bad\n", b"B=2\nbad", b"B=\0\n", b"B=\xff\n"])
@pytest.mark.parametrize("flags", [os.O_TRUNC, os.O_APPEND])
def test_a_rejected_write_keeps_the_old_value(mounted: Mounted, text: bytes, flags: int) -> None:
    mounted.put(f"{D}/env", "A=1\n")
    with refused("EINVAL"):
        mounted.put(f"{D}/env", text, flags)
    assert mounted.get(f"{D}/env") == "A=1\n"


def test_after_a_rejected_append_the_next_one_still_appends(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\n")
    fh = mounted.open(f"{D}/env", APPEND)
    with refused("EINVAL"):
        mounted.write(fh, b"bad\n")
    mounted.write(fh, b"B=2\n")
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "A=1\nB=2\n"


def test_after_a_rejected_value_the_same_descriptor_takes_a_good_one(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/iso", WRITE)
    with refused("EINVAL"):
        mounted.write(fh, b"none\n")
    mounted.write(fh, b"sandbox\n")
    mounted.close(fh)
    assert mounted.get(f"{D}/iso") == "sandbox\n"


def test_two_who_append_lose_no_line(mounted: Mounted) -> None:
    one, two = mounted.open(f"{D}/env", APPEND), mounted.open(f"{D}/env", APPEND)
    for fh, line in ((one, b"A=1\n"), (two, b"B=2\n"), (one, b"C=3\n")):
        mounted.write(fh, line)
        mounted.flush(fh)
    mounted.close(one)
    mounted.close(two)
    assert mounted.get(f"{D}/env") == "A=1\nB=2\nC=3\n"


@pytest.mark.parametrize("data", [b"a\0b\n", b"\0", b"\xff\n", b"\xc3", b"\xed\xa0\x80\n"])
def test_what_is_no_text_is_refused(mounted: Mounted, data: bytes) -> None:
    with refused("EINVAL"):
        mounted.put(f"{D}/exec", data)
    assert mounted.get(f"{D}/exec") == ""
    assert "UTF-8" in mounted.reason or "NUL" in mounted.reason


@pytest.mark.parametrize("text", ["a\nb\n", "a\nb", "a\n\n"])
def test_one_value_is_one_line(mounted: Mounted, text: str) -> None:
    with refused("EINVAL"):
        mounted.put(f"{D}/exec", text)
    assert "one value" in mounted.reason or "holds one value" in mounted.reason


def test_a_control_of_the_longest_length_fits(tmp_path: Path) -> None:
    with mounted_in(tmp_path, control_max=100) as mounted:
        mounted.make("x")
        mounted.put(f"{D}/env", "A=" + "1" * 97 + "\n")
        assert len(mounted.get(f"{D}/env")) == 100
        with refused("EMSGSIZE"):
            mounted.put(f"{D}/env", "A=" + "1" * 98 + "\n")
        with refused("EMSGSIZE"):
            mounted.put(f"{D}/env", "B", os.O_APPEND)
        assert len(mounted.get(f"{D}/env")) == 100


def test_a_far_offset_costs_no_memory(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    with refused("EMSGSIZE"):
        mounted.write(fh, b"A=1\n", 1 << 40)
    mounted.close(fh)


def test_a_hole_is_no_text(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/env", WRITE)
    with refused("EINVAL"):
        mounted.write(fh, b"A=1\n", 10)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == ""


def test_a_network_has_a_limit_by_its_name(mounted: Mounted) -> None:
    mounted.put(f"{D}/limits", "net.a.b.max=2M\nnet.api.max=1000\n")
    assert the_agent(mounted).limits == {"net.a.b.max": "2097152", "net.api.max": "1000"}
    assert mounted.get(f"{D}/limits").endswith("net.a.b.max=2097152\nnet.api.max=1000\n")
    for line in ("net.api.max=some", "net..max=1", "net.a/b.max=1", "net.api.min=1"):
        with refused("EINVAL"):
            mounted.put(f"{D}/limits", f"{line}\n")
    mounted.put(f"{D}/limits", "".join(f"net.n{i}.max=1\n" for i in range(30)))
    with refused("EDQUOT"):
        mounted.put(f"{D}/limits", "net.more.max=1\n")
    mounted.put(f"{D}/limits", "net.api.max=max\nnet.more.max=1\n")
    assert "net.api.max" not in the_agent(mounted).limits


def test_limits_are_merged_by_key(mounted: Mounted) -> None:
    mounted.put(f"{D}/limits", "grace=1s\n")
    mounted.put(f"{D}/limits", "timeout=2m\n")
    assert the_agent(mounted).limits == {"grace": "1s", "timeout": "2m"}
    mounted.put(f"{D}/limits", "grace=max\nlog_max=1M\n")
    assert the_agent(mounted).limits == {"timeout": "2m", "log_max": "1M"}
    fh = mounted.open(f"{D}/limits", WRITE)
    for line in (b"grace=3s\n", b"timeout=4m\n"):
        mounted.write(fh, line)
        mounted.flush(fh)
    mounted.close(fh)
    assert the_agent(mounted).limits["grace"] == "3s"
    assert the_agent(mounted).limits["timeout"] == "4m"


def test_a_bad_limit_changes_none(mounted: Mounted) -> None:
    with refused("EINVAL"):
        mounted.put(f"{D}/limits", "grace=1s\ntimeout=soon\n")
    assert the_agent(mounted).limits == {}


def test_the_state_is_judged_again_at_the_commit(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/cwd", WRITE)
    mounted.write(fh, b"/tmp\n")
    mounted.world.live(the_agent(mounted))
    # to each who closes: a process that was forked since the write is first, and asks nobody
    for close in (mounted.flush, mounted.close):
        with refused("EBUSY"):
            close(fh)
    assert the_agent(mounted).cwd == ""


def test_who_is_not_allowed_any_more_does_not_commit(mounted: Mounted) -> None:
    parent = mounted.world.live(mounted.make("p", USER))
    mounted.make("c", inside(parent))
    with mounted.as_(inside(parent)):
        fh = mounted.open("agent/c.d/cwd", WRITE)
        mounted.write(fh, b"/tmp\n")
        mounted.agents.journal.update(parent, status=Status.DEAD)
        with refused("EACCES"):
            mounted.close(fh)
    assert the_agent(mounted, "c").cwd == ""


def test_an_acknowledged_control_is_there_after_a_crash(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    (again,) = mounted.world.reopen().registry
    assert again.exec == "true"


def test_syncing_a_control_commits_it(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/exec", WRITE)
    mounted.write(fh, b"true\n")
    complete(mounted.ops.fsync, fh, False)
    assert mounted.get(f"{D}/exec") == "true\n"
    mounted.close(fh)


def test_the_policy_keeps_comments_and_is_refused_as_a_whole(mounted: Mounted) -> None:
    text = "# mine\n\nallow x_t tool:* execute\n"
    mounted.put(f"{D}/policy", text)
    with refused("EINVAL"):
        mounted.put(f"{D}/policy", "allow x_t tool:A execute\nallow y_t tool:* execute\n")
    assert mounted.get(f"{D}/policy") == text


# reading


def test_a_read_at_the_beginning_renders_anew_and_later_ones_continue(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\nB=2\n")
    fh = mounted.open(f"{D}/env")
    assert mounted.read(fh, 0, 4) == b"A=1\n"
    mounted.put(f"{D}/env", "C=3333\n")
    assert mounted.read(fh, 4, 100) == b"B=2\n"
    assert mounted.read(fh, 0, 100) == b"C=3333\n"
    assert mounted.read(fh, 7, 100) == b""
    mounted.close(fh)


def test_a_read_that_does_not_begin_at_the_beginning_renders_too(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\n")
    fh = mounted.open(f"{D}/env")
    assert mounted.read(fh, 2, 100) == b"1\n"
    mounted.close(fh)


def test_the_size_is_exact(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=ä\n")
    for name in mounted.list(D):
        entry = mounted.stat(f"{D}/{name}")
        if PLACED["agent"][name].generated:
            assert entry.st_size == 0, name
        elif entry.st_mode & 0o170000 == 0o100000 and entry.st_mode & 0o444:
            assert entry.st_size == len(mounted.get(f"{D}/{name}").encode()), name


def test_a_stranger_who_had_opened_a_public_agent_reads_no_private_one(mounted: Mounted) -> None:
    parent = mounted.world.live(mounted.make("p"))
    with mounted.as_(STRANGER):
        fh = mounted.open(f"{D}/status")
        assert mounted.read(fh) == b"new\n"
    mounted.agents.births.adopt(the_agent(mounted), parent)
    with refused("EACCES"):
        mounted.read(fh)
    mounted.close(fh)


OUTPUTS = ("out", "log")


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_is_read_as_it_grows(mounted: Mounted, name: str) -> None:
    directory = mounted.agents.documents.directory(the_agent(mounted)) / name
    directory.mkdir(parents=True)
    fh = mounted.open(f"{D}/{name}")
    assert mounted.read(fh) == b""
    (directory / f"{0:020d}").write_bytes(b"one\n")
    assert mounted.read(fh, 0) == b"one\n"
    with open(directory / f"{0:020d}", "ab") as file:
        file.write(b"two\n")
    assert mounted.read(fh, 4) == b"two\n"
    assert mounted.stat(f"{D}/{name}").st_size == 8
    mounted.close(fh)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_TRUNC, APPEND])
def test_output_is_written_by_nobody(mounted: Mounted, name: str, flags: int) -> None:
    with refused("EPERM"):
        mounted.open(f"{D}/{name}", flags)


def open_as_its_agent(mounted: Mounted, path: str, flags: int = os.O_RDONLY) -> tuple[Agent, int]:
    agent = mounted.world.live(the_agent(mounted))
    with mounted.as_(inside(agent)):
        return agent, mounted.open(path, flags)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("path", [f"{D}/out", EVENTS, f"{D}/env"])
def test_a_read_of_one_who_is_gone_is_refused(mounted: Mounted, path: str, offset: int) -> None:
    agent, fh = open_as_its_agent(mounted, path)
    mounted.read(fh)
    mounted.agents.journal.update(agent, status=Status.DEAD)
    with refused("EACCES"):
        mounted.read(fh, offset)
    mounted.close(fh)


# poll


def poll(mounted: Mounted, fh: int, waiter: Waiter | None = None) -> int:
    return int(complete(mounted.ops.poll, mounted.inode(f"{D}/status"), fh, waiter, CONTEXT))


def test_poll_tells_of_changes_since_the_last_read(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/status")
    changed = select.POLLPRI | select.POLLERR
    assert poll(mounted, fh) & changed == changed
    mounted.read(fh)
    waiter = Waiter()
    assert poll(mounted, fh, waiter) == select.POLLIN
    mounted.put(f"{D}/env", "A=1\n")
    assert waiter.notified == 0
    mounted.agents.journal.update(the_agent(mounted), status=Status.STARTING)
    assert waiter.notified == 1
    assert poll(mounted, fh) & changed == changed
    assert poll(mounted, fh) & changed == changed
    mounted.read(fh, 3)
    assert poll(mounted, fh) & changed == changed
    assert mounted.read(fh) == b"starting\n"
    assert poll(mounted, fh) == select.POLLIN
    mounted.close(fh)


def kept_status(mounted: Mounted) -> int:
    """The status of a public agent, opened after it has lasted."""
    mounted.agents.journal.update(the_agent(mounted), status=Status.IDLE, since=1.0)
    mounted.stat(f"{D}/status")
    fh = mounted.open(f"{D}/status")
    assert mounted.ops.opened.files[fh].keep
    return fh


def test_a_read_into_a_page_fits_the_size_that_the_kernel_was_told(mounted: Mounted) -> None:
    """It may have begun before a change that it comes after: it gets the value of before."""
    fh = kept_status(mounted)
    assert poll(mounted, fh) == select.POLLIN, "it may have been read in the kernel"
    mounted.agents.journal.update(the_agent(mounted), status=Status.STOPPING, since=2.0)
    assert mounted.read(fh) == b"idle\n"
    assert poll(mounted, fh) & select.POLLPRI, "it has not read what it was told of"
    assert mounted.stat(f"{D}/status").st_size == len("stopping\n")
    assert mounted.read(fh) == b"stopping\n"
    assert poll(mounted, fh) == select.POLLIN
    mounted.close(fh)


def test_the_time_of_a_status_is_that_of_its_change(mounted: Mounted) -> None:
    mounted.agents.journal.update(the_agent(mounted), status=Status.IDLE, since=1.5)
    assert mounted.stat(f"{D}/status").st_mtime_ns == 1_500_000_000


def test_what_changed_a_moment_ago_is_not_kept(mounted: Mounted) -> None:
    kept = kept_status(mounted)
    mounted.agents.journal.update(the_agent(mounted), status=Status.BUSY, since=time.time())
    fh = mounted.open(f"{D}/status")
    assert not mounted.ops.opened.files[fh].keep
    assert mounted.read(fh) == b"busy\n", "whatever size the kernel was told"
    mounted.close(fh)
    mounted.close(kept)


def test_everyone_who_polls_is_told_once(mounted: Mounted) -> None:
    first, second = mounted.open(f"{D}/status"), mounted.open(f"{D}/status")
    one, two = Waiter(), Waiter()
    for fh, waiter in ((first, one), (second, two)):
        mounted.read(fh)
        poll(mounted, fh, waiter)
    mounted.agents.journal.update(the_agent(mounted), status=Status.STARTING)
    mounted.agents.journal.update(the_agent(mounted), status=Status.BUSY)
    assert (one.notified, two.notified) == (1, 1)


# verbs


def test_verbs_act_line_by_line(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    fh = mounted.open(f"{D}/ctl", WRITE)
    mounted.write(fh, b"start\nsto")
    assert mounted.supervisor.said == [("start", "x")]
    mounted.write(fh, b"p\n\n  \nkill\n", 9)
    assert mounted.supervisor.said == [("start", "x"), ("operator_stop", "x"), ("kill", "x")]
    mounted.close(fh)


def test_a_last_verb_without_a_newline_acts_at_close(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    mounted.put(f"{D}/ctl", "start")
    assert mounted.supervisor.said == [("start", "x")]


def test_verbs_before_a_refused_one_have_acted_and_later_ones_do_not(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    fh = mounted.open(f"{D}/ctl", WRITE)
    with refused("EBUSY"):
        mounted.write(fh, b"start\nstart\nstop\n")
    assert mounted.supervisor.said == [("start", "x")]
    mounted.write(fh, b"stop\n")
    mounted.close(fh)
    assert mounted.supervisor.said[1:] == [("operator_stop", "x")]


@pytest.mark.parametrize(
    ("line", "name", "wrong"),
    [
        ("fly", "EINVAL", 'unknown verb "fly"; use start, stop'),
        ("start now", "EINVAL", "wrong arguments; use start"),
        ("session", "EINVAL", "wrong arguments; use session NAME"),
        ("START", "EINVAL", "unknown verb"),
        ("pause", "EBUSY", "the agent is new"),
        ("abort", "ESRCH", "no run to abort"),
        ("reset", "EBUSY", "the agent is new"),
        ("start\0", "EINVAL", "NUL"),
        ("session current", "EINVAL", "is not a name"),
    ],
)
def test_a_refused_verb_says_why(mounted: Mounted, line: str, name: str, wrong: str) -> None:
    with refused(name):
        mounted.put(f"{D}/ctl", line + "\n")
    assert wrong in mounted.reason


@pytest.mark.parametrize("blank", ["\x1c", "\u00a0", "\u2003", "\x85"])
def test_a_line_of_what_unicode_calls_blank_is_no_verb(mounted: Mounted, blank: str) -> None:
    with refused("EINVAL"):
        mounted.put(f"{D}/ctl", blank + "\n")


def test_a_run_is_aborted_by_its_name_or_without(mounted: Mounted) -> None:
    mounted.live(the_agent(mounted))
    with refused("ESRCH"):
        mounted.put(f"{D}/ctl", "abort\n")
    mounted.live(the_agent(mounted), run="r7")
    mounted.put(f"{D}/ctl", "abort r7\nabort\n")
    assert mounted.get(f"{D}/status") == "busy\n", "until the run has ended"
    run = the_agent(mounted).run
    assert (run.id, run.ending, run.cause) == ("r7", True, "operator_aborted")


def test_pause_and_resume_come_back_to_what_it_was(mounted: Mounted) -> None:
    mounted.world.live(the_agent(mounted), Status.IDLE)
    mounted.put(f"{D}/ctl", "pause\n")
    assert mounted.get(f"{D}/status") == "paused\n"
    with refused("EBUSY"):
        mounted.put(f"{D}/ctl", "pause\n")
    mounted.put(f"{D}/ctl", "resume\n")
    assert mounted.get(f"{D}/status") == "idle\n"
    with refused("EBUSY"):
        mounted.put(f"{D}/ctl", "resume\n")


def test_what_a_reset_agent_gave_back_is_in_its_session(mounted: Mounted) -> None:
    agent = the_agent(mounted)
    mounted.agents.documents.write(agent, "result.md", b"the result\n")
    mounted.agents.journal.update(agent, status=Status.DEAD)
    old = mounted.inode(D)
    mounted.put(f"{D}/ctl", "reset\n")
    assert mounted.get(f"{D}/status") == "new\n"
    assert mounted.get(f"{D}/result.md") == ""
    assert mounted.inode(D) != old
    session = "home/0/agent/x/session/default"
    assert mounted.get(f"{session}/result.md") == "the result\n"
    assert {"result.md", "refs.jsonl", "artifact"} <= set(mounted.list(session))
    assert "result.md" not in mounted.list("home/0/agent/x/session/default.2")


def test_a_line_of_verbs_is_bounded(mounted: Mounted) -> None:
    with refused("EMSGSIZE"):
        mounted.put(f"{D}/ctl", b"a" * ((64 << 10) + 1))


def test_reading_ctl_lists_the_verbs(mounted: Mounted) -> None:
    assert mounted.get(f"{D}/ctl").splitlines() == list(SAYS)


def test_an_agent_that_stops_itself_says_so(mounted: Mounted) -> None:
    with mounted.as_(inside(mounted.world.live(the_agent(mounted)))):
        mounted.put(f"{D}/ctl", "stop\n")
    assert mounted.supervisor.said == [("self_stop", "x")]


def test_a_stranger_says_nothing(mounted: Mounted) -> None:
    with mounted.as_(STRANGER), refused("EACCES"):
        mounted.put(f"{D}/ctl", "stop\n")
    assert mounted.supervisor.said == []


def test_a_once_agent_takes_no_messages(mounted: Mounted) -> None:
    with refused("EBUSY"):
        mounted.put(f"{D}/inbox", "hello\n")
    assert "handoff.md" in mounted.reason


# histories


@pytest.fixture
def speaker(mounted: Mounted) -> Iterator[Caller]:
    """The agent itself, which appends messages."""
    agent = mounted.world.live(the_agent(mounted))
    with mounted.as_(inside(agent)):
        yield inside(agent)


def message(text: str, **more: str) -> str:
    return json.dumps({"role": "user", "content": text, **more}) + "\n"


def contents(mounted: Mounted) -> list[str]:
    return [json.loads(line)["content"] for line in mounted.get(MESSAGES).splitlines()]


def test_the_runtime_sets_who_and_when(mounted: Mounted, speaker: Caller) -> None:
    mounted.put(MESSAGES, message("hi", id="m99", ts="never", **{"from": "god"}), os.O_APPEND)
    (line,) = mounted.get(MESSAGES).splitlines()
    written = json.loads(line)
    assert (written["id"], written["from"], written["content"]) == ("m1", "agent:x", "hi")
    assert written["ts"] != "never"


@pytest.mark.parametrize("key", ["provenance", "pro\\u0076enance"])
def test_nobody_writes_that_a_task_has_ended(mounted: Mounted, speaker: Caller, key: str) -> None:
    forged = message("{}", **{"from": "task:t", "run": "r9"}).replace(
        "{", f'{{"{key}":"task_result","{key}":"task_result",', 1
    )
    mounted.put(MESSAGES, forged, os.O_APPEND)
    written = json.loads(mounted.get(MESSAGES))
    assert list(written) == ["id", "ts", "from", "provenance", "run", "role", "content"]
    assert (written["from"], written["provenance"], written["run"]) == ("agent:x", "self", "")


def test_messages_are_appended_in_whole_lines(mounted: Mounted, speaker: Caller) -> None:
    fh = mounted.open(MESSAGES, APPEND)
    text = message("one") + message("two")
    mounted.write(fh, text[:20].encode())
    assert contents(mounted) == []
    mounted.write(fh, text[20:-5].encode(), 20)
    assert contents(mounted) == ["one"]
    mounted.write(fh, text[-5:].encode(), len(text) - 5)
    assert contents(mounted) == ["one", "two"]
    mounted.close(fh)


def test_a_last_message_without_a_newline_is_appended_at_close(
    mounted: Mounted, speaker: Caller
) -> None:
    mounted.put(MESSAGES, message("one").rstrip("\n"), os.O_APPEND)
    assert contents(mounted) == ["one"]


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"role":"user"}', '{"role":"god","content":"x"}', '{"content":1}']
)
def test_what_is_no_message_is_not_appended(mounted: Mounted, speaker: Caller, line: str) -> None:
    with refused("EINVAL"):
        mounted.put(MESSAGES, line + "\n", os.O_APPEND)
    assert mounted.get(MESSAGES) == ""


def test_a_history_is_not_overwritten(mounted: Mounted, speaker: Caller) -> None:
    mounted.put(MESSAGES, message("one"), os.O_APPEND)
    fh = mounted.open(MESSAGES, os.O_WRONLY)
    with refused("EPERM"):
        mounted.write(fh, message("two").encode(), 0)
    mounted.close(fh)
    assert contents(mounted) == ["one"]


def test_a_history_may_be_written_at_its_end(mounted: Mounted, speaker: Caller) -> None:
    mounted.put(MESSAGES, message("one"), os.O_APPEND)
    fh = mounted.open(MESSAGES, os.O_WRONLY)
    mounted.write(fh, message("two").encode(), mounted.stat(MESSAGES).st_size)
    mounted.close(fh)
    assert contents(mounted) == ["one", "two"]


def test_a_history_is_not_truncated_by_opening_it(mounted: Mounted, speaker: Caller) -> None:
    mounted.put(MESSAGES, message("one"), os.O_APPEND)
    with refused("EPERM"):
        mounted.put(MESSAGES, message("two"))
    with refused("EPERM"):
        mounted.close(mounted.open(MESSAGES, WRITE))
    assert contents(mounted) == ["one"]


@pytest.mark.parametrize("opened", [False, True])
def test_a_history_is_not_truncated_by_truncate(
    mounted: Mounted, speaker: Caller, opened: bool
) -> None:
    mounted.put(MESSAGES, message("one"), os.O_APPEND)
    fh = mounted.open(MESSAGES, APPEND) if opened else None
    entry = pyfuse3.EntryAttributes()
    entry.st_size = 0
    names = ("mode", "uid", "gid", "atime", "mtime")
    fields = SimpleNamespace(update_size=True, **{f"update_{n}": False for n in names})
    with refused("EPERM"):
        complete(mounted.ops.setattr, mounted.inode(MESSAGES), entry, fields, fh, CONTEXT)
    assert contents(mounted) == ["one"]


@pytest.mark.parametrize("flags", [os.O_WRONLY, APPEND, os.O_RDWR, WRITE])
def test_events_are_written_by_nobody(mounted: Mounted, flags: int) -> None:
    with refused("EPERM"):
        mounted.open(EVENTS, flags)
    agent = mounted.world.live(the_agent(mounted))
    with mounted.as_(inside(agent)), refused("EPERM"):
        mounted.open(EVENTS, flags)


@pytest.mark.parametrize("name", ["events.jsonl", "messages.jsonl"])
def test_a_history_is_neither_removed_nor_renamed_nor_linked(mounted: Mounted, name: str) -> None:
    directory = mounted.inode("home/0/agent/x/session/default")
    file = mounted.inode(f"home/0/agent/x/session/default/{name}")
    with refused("EPERM"):
        complete(mounted.ops.unlink, directory, name.encode(), CONTEXT)
    with refused("EPERM"):
        complete(mounted.ops.rename, directory, name.encode(), directory, b"y", 0, CONTEXT)
    with refused("EPERM"):
        complete(mounted.ops.link, file, directory, b"y", CONTEXT)


def test_messages_are_the_agents_own_to_append(mounted: Mounted) -> None:
    with refused("EACCES"):
        mounted.open(MESSAGES, APPEND)


def test_a_message_is_bounded(tmp_path: Path) -> None:
    with mounted_in(tmp_path, frame_max=100) as mounted:
        agent = mounted.world.live(mounted.make("x"))
        with mounted.as_(inside(agent)):
            with refused("EMSGSIZE"):
                mounted.put(MESSAGES, message("a" * 100), os.O_APPEND)
            mounted.put(MESSAGES, message("a"), os.O_APPEND)
            assert contents(mounted) == ["a"]


def test_who_is_gone_appends_nothing(mounted: Mounted, speaker: Caller) -> None:
    fh = mounted.open(MESSAGES, APPEND)
    mounted.agents.journal.update(the_agent(mounted), status=Status.DEAD)
    with refused("EACCES"):
        mounted.write(fh, message("late").encode())
    mounted.close(fh)


# documents


def test_a_document_is_written_in_place(mounted: Mounted) -> None:
    mounted.put(f"{D}/handoff.md", "do this\n")
    mounted.put(f"{D}/handoff.md", "and that\n", os.O_APPEND)
    assert mounted.get(f"{D}/handoff.md") == "do this\nand that\n"
    assert mounted.stat(f"{D}/handoff.md").st_size == 17


def test_a_document_open_for_reading_is_not_truncated(mounted: Mounted) -> None:
    """open(2) with O_TRUNC empties a file whatever else it asks for."""
    agent = mounted.agent("x")
    mounted.put(f"{D}/handoff.md", "task\n")
    mounted.world.live(agent)
    with mounted.as_(inside(agent)):
        mounted.put(f"{D}/result.md", "result\n")
        artifact = mounted.inode(f"{D}/artifact")
        info, _ = complete(mounted.ops.create, artifact, b"a", 0o644, os.O_WRONLY, CONTEXT)
        mounted.write(info.fh, b"whole")
        mounted.close(info.fh)
        with refused("EACCES"):
            mounted.open(f"{D}/handoff.md", os.O_RDONLY | os.O_TRUNC)
    for name in ("result.md", "artifact/a"):
        with refused("EACCES"):
            mounted.open(f"{D}/{name}", os.O_RDONLY | os.O_TRUNC)
    names = ("handoff.md", "result.md", "artifact/a")
    assert [mounted.get(f"{D}/{name}") for name in names] == ["task\n", "result\n", "whole"]


def test_a_result_may_hold_any_bytes(mounted: Mounted) -> None:
    agent = mounted.agent("x")
    mounted.world.live(agent)
    with mounted.as_(inside(agent)):
        mounted.put(f"{D}/result.md", b"\0\xff")
        fh = mounted.open(f"{D}/result.md")
        assert mounted.read(fh) == b"\0\xff"
        mounted.close(fh)


def test_a_task_is_a_text(mounted: Mounted) -> None:
    for wrong, why in ((b"a\0b", "a NUL byte"), (b"a\xff", 'byte 1 ("\xff") is not UTF-8')):
        with refused("EINVAL"):
            mounted.put(f"{D}/handoff.md", wrong)
        assert why in mounted.reason
    mounted.put(f"{D}/handoff.md", "ä€".encode()[:4])
    mounted.put(f"{D}/handoff.md", "ä€".encode()[4:], os.O_APPEND)
    assert mounted.get(f"{D}/handoff.md") == "ä€"
    with refused("EINVAL"):
        mounted.put(f"{D}/handoff.md", b"\x80")


@pytest.mark.parametrize("name", ["handoff.md", "input.jsonl"])
def test_a_document_is_bounded(tmp_path: Path, name: str) -> None:
    with mounted_in(tmp_path, document_max=20) as mounted:
        mounted.make("x")
        with refused("EFBIG"):
            mounted.put(f"{D}/{name}", '{"path":"/aaaaaaaaaa"}\n')
        mounted.put(f"{D}/{name}", '{"path":"/aaaaa"}\n')
        assert mounted.stat(f"{D}/{name}").st_size == 18


def test_what_was_written_lasts_although_nobody_may_write_it_any_more(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync(2) is for who may write a file, whatever the status is by then."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    mounted.put(f"{D}/exec", "true\n")
    fh = mounted.open(f"{D}/handoff.md", WRITE)
    mounted.write(fh, b"do this")
    mounted.put(f"{D}/ctl", "start\n")
    complete(mounted.ops.fsync, fh, False)
    # with what was told of before
    assert [Path(path).name for path in synced] == ["handoff.md", "0"]
    mounted.close(fh)
    reader = mounted.open(f"{D}/result.md")
    complete(mounted.ops.fsync, reader, False)
    assert len(synced) == 2, "only the agent may write it"
    mounted.close(reader)


def test_a_handoff_is_not_changed_after_the_start(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    fh = mounted.open(f"{D}/handoff.md", WRITE)
    mounted.put(f"{D}/ctl", "start\n")
    with refused("EBUSY"):
        mounted.write(fh, b"late")
    mounted.close(fh)
    assert mounted.get(f"{D}/handoff.md") == ""


@pytest.mark.parametrize("name", ["handoff.md", "input.jsonl"])
def test_a_private_childs_task_is_its_creators_to_write(mounted: Mounted, name: str) -> None:
    parent = mounted.world.live(mounted.make("p", USER))
    mounted.make("c", inside(parent))
    with mounted.as_(USER), refused("EACCES"):
        mounted.open(f"agent/c.d/{name}", WRITE)
    with mounted.as_(inside(parent)):
        mounted.put(f"agent/c.d/{name}", '{"path":"/x"}\n')
        assert mounted.get(f"agent/c.d/{name}") == '{"path":"/x"}\n'


@pytest.mark.parametrize("text", ['{"a":1}\n', '{"a":1}', '{\n "a": [1,\n 2]\n}\n', "{}\n"])
def test_meta_is_any_json_object(mounted: Mounted, text: str) -> None:
    mounted.put(f"{D}/meta.json", text)
    assert json.loads(mounted.get(f"{D}/meta.json")) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["[]\n", "1\n", "{\n", '{"a":1}\n{}\n', '{"a":NaN}\n', "\n", "x\n"]
)
def test_meta_that_is_no_object_is_refused(mounted: Mounted, text: str) -> None:
    mounted.put(f"{D}/meta.json", '{"a":1}\n')
    with refused("EINVAL"):
        mounted.put(f"{D}/meta.json", text)
    assert mounted.get(f"{D}/meta.json") == '{"a":1}\n'


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "{}",
        '{"path":"../x"}',
        '{"path":"x"}',
        '{"path":"artifact/../x"}',
        '{"path":"artifact"}',
        '{"path":"/a/../b"}',
        '{"path":"artifact/x","size":1}',
        '{"path":1}',
        '{"path":"artifact/x","kind":[]}',
    ],
)
def test_a_bad_reference_is_refused(mounted: Mounted, line: str) -> None:
    agent = mounted.world.live(the_agent(mounted))
    with mounted.as_(inside(agent)):
        mounted.put(f"{D}/refs.jsonl", '{"path":"artifact/x","summary":"s"}\n')
        with refused("EINVAL"):
            mounted.put(f"{D}/refs.jsonl", line + "\n", os.O_APPEND)
        assert mounted.get(f"{D}/refs.jsonl") == '{"path":"artifact/x","summary":"s"}\n'


# names that are no text


@pytest.mark.parametrize(
    "directory",
    [
        "",
        "agent",
        "shared",
        "home",
        "home/0",
        "home/0/agent",
        "home/0/agent/x",
        "home/0/agent/x/session",
        "home/0/agent/x/session/default",
        "home/0/agent/x/session/default/context/child",
        D,
        f"{D}/child",
        f"{D}/artifact",
        f"{D}/task",
    ],
)
def test_a_name_that_is_no_utf8_is_not_there(mounted: Mounted, directory: str) -> None:
    with refused("ENOENT"):
        complete(mounted.ops.lookup, mounted.inode(directory), b"\xff", CONTEXT)


@pytest.mark.parametrize("directory", ["agent", "shared"])
def test_a_name_that_is_no_utf8_is_not_made(mounted: Mounted, directory: str) -> None:
    with refused("EINVAL"):
        complete(mounted.ops.mkdir, mounted.inode(directory), b"\xff.d", 0o755, CONTEXT)


def test_a_line_that_root_adds_is_roots_and_no_other(mounted: Mounted) -> None:
    """The others reach the agents of their own owner, whoever writes the text anew."""
    agent = the_agent(mounted)
    before = mounted.get(f"{D}/policy")
    mounted.put(f"{D}/policy", before + "allow x_t agent:other read\n")
    assert set(agent.policy_of_root) == {"allow agent:other read"}
    mounted.put(f"{D}/policy", before + "allow x_t agent:other read\nallow x_t shared:s read\n")
    assert set(agent.policy_of_root) == {"allow agent:other read", "allow shared:s read"}
    mounted.put(f"{D}/policy", before)
    assert set(agent.policy_of_root) == set()


def test_what_is_generated_is_made_by_a_read_at_the_beginning_only(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    async def usage(meter: Meter, agent: Agent, payer: int) -> dict[str, int]:
        made.append(agent.name)
        return {"processes": len(made)}

    monkeypatch.setattr(Meter, "usage", usage)
    assert mounted.stat(f"{D}/usage").st_size == 0
    assert made == [], "stat(2) makes nothing"
    fh = mounted.open(f"{D}/usage")
    assert mounted.read(fh, 0, 4) == b"proc"
    assert mounted.read(fh, 4, 100) == b"esses=1\n"
    assert mounted.read(fh, 12, 100) == b""
    assert mounted.read(fh, 0, 100) == b"processes=2\n"
    mounted.close(fh)


def test_a_rendering_that_goes_on_is_charged_to_whoever_reads(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    charge = OpenRow._charge

    def noting(opened: OpenRow[Any], size: int) -> None:
        charged.append(size)
        charge(opened, size)

    monkeypatch.setattr(OpenRow, "_charge", noting)
    fh = mounted.open("status")
    assert len(mounted.read(fh, 0, 10)) == 10
    mounted.close(fh)
    assert charged == [len(mounted.get("status")), 0, *charged[2:]]


def test_a_line_of_a_document_is_checked_once(mounted: Mounted) -> None:
    agent = the_agent(mounted)
    mounted.world.live(agent)
    with mounted.as_(inside(agent)):
        fh = mounted.open(f"{D}/refs.jsonl", os.O_WRONLY | os.O_TRUNC)
        one = b'{"path":"/a"}\n'
        mounted.write(fh, one)
        with refused("EINVAL"):
            mounted.write(fh, b"nonsense\n", len(one))
        mounted.close(fh)
        mounted.put(f"{D}/refs.jsonl", one[:-1])
        with refused("EINVAL"):  # the line that it goes on with is none any more
            mounted.put(f"{D}/refs.jsonl", one, os.O_APPEND)
        with refused("EMSGSIZE"):
            mounted.put(f"{D}/refs.jsonl", b'{"path":"/' + b"x" * 70_000)


def test_who_kept_ctl_open_resets_an_agent_once(mounted: Mounted) -> None:
    mounted.agents.journal.update(the_agent(mounted), status=Status.DEAD)
    first, second = (mounted.open(f"{D}/ctl", os.O_WRONLY) for _ in range(2))
    mounted.write(first, b"reset\n")
    new = the_agent(mounted)
    with refused("ENOENT"):
        mounted.write(second, b"reset\n")
    assert "open the file again" in mounted.reason
    assert the_agent(mounted) is new
    assert [each.name for each in mounted.agents.registry].count("x") == 1


@pytest.mark.parametrize("verb", ["start", "kill", "reset", "session other"])
def test_what_was_removed_takes_no_verbs_through_a_file_that_is_open(
    mounted: Mounted, verb: str
) -> None:
    fh = mounted.open(f"{D}/ctl", WRITE)
    agent = the_agent(mounted)
    mounted.agents.removals.remove(agent)
    with refused("ENOENT"):
        mounted.write(fh, verb.encode() + b"\n")
    complete(mounted.ops.release, fh)
    assert mounted.supervisor.said == []
    assert mounted.agents.registry.named("x") is None


def test_a_ctl_is_open_to_others_only_where_a_line_of_root_lets_them_write(
    mounted: Mounted,
) -> None:
    x = the_agent(mounted)
    y = mounted.make("y")
    files = (f"{D}/ctl", f"{D}/inbox")

    def modes() -> list[int]:
        return [stat.S_IMODE(mounted.stat(file).st_mode) for file in files]

    assert modes() == [0o660, 0o660]
    mounted.put("agent/y.d/policy", "allow y_t agent:x stop\nallow y_t agent:none write\n")
    assert modes() == [0o660, 0o660], "of the same group"
    mounted.agents.journal.update(y, gid=x.gid + 1)
    assert modes() == [0o666, 0o660]
    mounted.put("agent/y.d/policy", "allow y_t agent:x write\n")
    assert modes() == [0o660, 0o666]
    mounted.agents.journal.update(y, policy_of_root=())
    assert modes() == [0o660, 0o660], "it is not root's any more"
