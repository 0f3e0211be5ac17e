"""Agents that use up what there is: the disk, files, depth, former children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.test_windows import programs
from tests.worlds.daemon import Daemon, read, refusal, wait_dead, wait_status, wait_until, write
from tests.worlds.small import empty, fill, on_small_disk
from tests.worlds.viewers import Typing, echoing


@pytest.fixture
def small_disk() -> Iterator[Daemon]:
    with on_small_disk(Daemon()) as daemon:
        yield daemon


def test_on_a_full_disk_agents_end_and_room_is_made(small_disk: Daemon) -> None:
    other = small_disk.run("other", "sleep 1000")
    wait_status(other, "busy")
    filler = small_disk.run(
        "filler", "sh -c 'while :; do cat /dev/zero >> $CTX_SELF/artifact/big; sleep 0.1; done'",
        limits="timeout=2s",
    )
    wait_until(lambda: os.statvfs(small_disk.state).f_bavail == 0, "the disk is full")
    wait_dead(filler)
    assert read(filler, "reason") == "timeout\n"
    assert read(other, "status") == "busy\n"
    with pytest.raises(OSError, match="Errno 28"):
        small_disk.agent_dir("more").mkdir()
    write(other / "ctl", "kill")
    wait_dead(other)
    assert read(other, "reason") == "operator_stop\n"
    filler.rmdir()
    wait_until(lambda: os.statvfs(small_disk.state).f_bavail > 100, "there is room again")
    more = small_disk.make("more", "echo hello")
    wait_until(lambda: refusal(more / "ctl", "start") == "accepted", "what is used is measured")
    wait_dead(more)
    assert read(more, "out") == "hello\n"
    wait_until(lambda: small_disk.events("other")[-1]["type"] == "agent.stop", "it is recorded")
    types = [event["type"] for event in small_disk.events("other")]
    assert types.count("run.end") == types.count("agent.stop") == 1


def test_sigterm_ends_everything_on_a_full_disk(small_disk: Daemon) -> None:
    agent = small_disk.run("sleeper", "sleep 1000")
    wait_status(agent, "busy")
    fill(small_disk)
    pid = int(read(agent, "pid"))
    assert small_disk.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
    empty(small_disk)
    small_disk.start()
    wait_dead(agent)
    assert read(agent, "status") == "dead\n"


def test_a_session_goes_on_on_a_full_disk_and_ends_with_its_window(small_disk: Daemon) -> None:
    def is_lost() -> bool:
        """What is typed now: the disk is full, whatever was given back to it."""
        fill(small_disk)
        kept_before = kept_out.read_bytes()
        typing.go_on(50)
        return kept_out.read_bytes() == kept_before

    with ExitStack() as stack:
        kept, gone = echoing(stack, small_disk, "kept", "gone")
        kept_out = small_disk.agent_dir("kept") / "out"
        with Typing([kept, gone]) as typing:
            wait_until(is_lost, "the disk is full")
        gone.end.close()
        wait_until(lambda: not programs(small_disk, "gone"), "its processes are gone")
        empty(small_disk)
        wait_dead(small_disk.agent_dir("gone"))
        assert read(small_disk.agent_dir("gone"), "reason") == "hangup\n"
        with Typing([kept]):  # once there is room, which ctxd looks for
            wait_until(lambda: "bytes of output lost" in kept_out.read_text(), "it says so")


@pytest.mark.settings(files=1500)
def test_files_cost_no_descriptors_and_are_counted(daemon: Daemon) -> None:
    program = (
        "sh -c 'cd $CTX_SELF/artifact; i=0; "
        "while [ $i -lt 1600 ]; do echo x > f$i || break; i=$((i+1)); done; echo $i; "
        "cat $CTX_ROOT/error'"
    )
    agent = daemon.finish("maker", program)
    assert read(agent, "out").startswith("1500\n")
    assert "EDQUOT agent/maker.d/artifact/f1500" in read(agent, "out")
    assert len(os.listdir(agent / "artifact")) == 1500
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 700


@pytest.mark.settings(artifact_max="1M")
def test_artifacts_have_a_limit_together(daemon: Daemon) -> None:
    other = daemon.run("other", "sleep 1000")
    wait_status(other, "busy")
    script = (
        "cd $CTX_SELF/artifact; cat /dev/zero > a; stat -c %s a; cat $CTX_ROOT/error; "
        "truncate -s 1 b || echo no; exec 3<a; rm a; echo x > b || echo no; "
        "exec 3<&-; head -c 1M /dev/zero > b; stat -c %s b; "
        "echo x > $CTX_SELF/session/context/episode/e && echo apart"
    )
    agent = daemon.finish("filler", f"sh -c '{script}'")
    out = read(agent, "out").splitlines()
    assert (out[0], *out[2:]) == ("1048576", "no", "no", "1048576", "apart"), out
    assert "EDQUOT agent/filler.d/artifact" in out[1]
    assert "1048576 of at most 1048576 bytes (artifact_max)" in out[1]
    assert "cat: write error: Disk quota exceeded" in read(agent, "log")
    assert read(other, "status") == "busy\n"
    assert daemon.finish("next", "sh -c 'echo x > $CTX_SELF/artifact/a'").is_dir()
    assert read(daemon.agent_dir("next"), "artifact/a") == "x\n"


@pytest.mark.settings(artifact_max="1M")
def test_a_daemon_that_starts_again_counts_what_is_there(daemon: Daemon) -> None:
    data = daemon.base / "data"
    data.mkdir()
    data.chmod(0o777)
    script = (
        "head -c 600K /dev/zero > $CTX_SELF/artifact/a; touch /data/there; "
        "while ! test -e /data/go; do sleep 0.02; done; "
        "head -c 600K /dev/zero > $CTX_SELF/artifact/b"
    )
    agent = daemon.run("filler", f"sh -c '{script}'", mount=f"{data} /data rw")
    wait_until((data / "there").exists, "the first file is written")
    daemon.restart()
    (data / "go").touch()
    wait_dead(agent)
    assert "Disk quota exceeded" in read(agent, "log")
    sizes = [(agent / "artifact" / name).stat().st_size for name in ("a", "b")]
    assert sizes[0] == 600 << 10
    assert (800 << 10) < sum(sizes) <= 1 << 20
