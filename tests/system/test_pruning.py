"""What ended long ago is removed by one command, and kept work is not."""

from __future__ import annotations

import json
import os
import shutil

from tests.worlds.daemon import AGENT_UID, Daemon, read, wait_dead, wait_status, write


def test_prune_removes_what_ended_and_says_what_it_leaves(daemon: Daemon) -> None:
    done = daemon.finish("done", "true")
    live = daemon.run("live", "sleep 1000")
    (live / "work" / "item").mkdir()
    write(live / "work" / "item" / "objective", "x")
    write(live / "work" / "item" / "status", "done")
    assert daemon.ctx("prune", "--older", "1d").stdout == ""
    dry = daemon.ctx("prune", "--older", "0s", "--dry-run")
    assert done.exists() and dry.returncode == 0
    words = [line.split(" ", 1)[1] for line in dry.stdout.splitlines()]
    [owner] = [each.name for each in (daemon.root / "home").iterdir()]
    assert words == [
        "would remove agent/done.d",
        "would remove agent/live.d/work/item",
        f"would remove home/{owner}/agent/done/session/default",
    ]
    result = daemon.ctx("prune", "--older", "0s", "--json")
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["path"] for each in told] == [word.split()[-1] for word in words]
    assert {each["type"] for each in told} == {"removed"}
    assert not done.exists() and not (live / "work" / "item").exists()
    assert os.listdir(daemon.root / "home" / owner / "agent") == ["live"]


def test_commits_that_nobody_took_over_are_left(daemon: Daemon) -> None:
    work = daemon.base / "work"
    work.mkdir()
    shutil.chown(work, AGENT_UID, AGENT_UID)
    lead = daemon.run("lead", "sleep 1000", workspace=f"explicit_root:{work}",
                      policy="allow lead_t agent:* create")  # fmt: skip
    wait_status(lead, "busy")
    git = "git -c user.name=a -c user.email=a@b"
    task = lead / "task" / "commit"
    task.mkdir()
    write(task / "cmd", f"git init -q && {git} commit -q --allow-empty -m one")
    write(task / "ctl", "start")
    wait_dead(task)
    child = daemon.make("child", "touch new", parent="agent:lead", workspace="worktree")
    write(child / "ctl", "start")
    wait_dead(child)
    assert "state=kept\n" in read(lead, "task/child/worktree")
    result = daemon.ctx("prune", "--older", "0s")
    [line] = [line for line in result.stdout.splitlines() if "agent/child.d" in line]
    assert 'left agent/child.d: the worktree of "child" is kept: ' in line
    assert child.exists()
