"""A parent learns all that a child gave back from the notice of its end, by real processes."""

from __future__ import annotations

import json
from typing import Any

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

#: keeps what it is told, one file for each message, and calls nothing else
KEEP = "sh -c 'cat > \"$CTX_SELF/session/context/episode/$CTX_RUN.md\"; echo kept'"


def notices(daemon: Daemon, count: int) -> list[dict[str, Any]]:
    """What the program of ``boss`` has read so far on its standard input."""
    boss = daemon.agent_dir("boss")
    episodes = boss / "session/context/episode"
    wait_until(
        lambda: len(list(episodes.iterdir())) == count and not read(boss, "queue"),
        f"{count} notices were read",
    )
    wait_status(boss, "idle")
    return [json.loads(path.read_text()) for path in sorted(episodes.iterdir())]


def child(daemon: Daemon, name: str, command: str, handoff: str = "") -> None:
    """A child of the boss, run to its end."""
    kid = daemon.make(name, "", handoff)
    write(kid / "parent", "agent:boss")
    write(kid / "exec", command)
    write(kid / "ctl", "start")
    wait_dead(kid)


def test_a_parent_needs_no_further_call(daemon: Daemon) -> None:
    boss = daemon.run("boss", KEEP, mode="turn")
    wait_status(boss, "idle")

    child(daemon, "rev", "sh -c 'echo ref.c > $CTX_SELF/artifact/list; echo looks good'", "look")
    (told,) = notices(daemon, 1)
    assert (told["agent"], told["title"], told["status"]) == ("rev", "look", "completed")
    assert (told["exit"], told["result"], told["truncated"]) == ("exit:0", "looks good\n", False)
    assert told["artifacts"] == ["artifact/list"]
    assert read(boss / "task/rev", "exit") == "exit:0\n"
    assert read(boss / "task/rev", "started_at") != ""

    child(daemon, "bad", "sh -c 'echo so far; exit 7'")
    told = notices(daemon, 2)[1]
    assert (told["status"], told["exit"], told["reason"]) == ("failed", "exit:7", "exit:7")
    assert (told["preview"], told["result"]) == ("so far\n", "")
    with open(told["output_path"]) as file:
        assert file.read() == "so far\n"

    child(daemon, "long", "sh -c 'echo begin; head -c 20480 /dev/zero | tr \"\\0\" x; echo end'")
    told = notices(daemon, 3)[2]
    assert told["truncated"] is True
    for key in ("result", "preview"):
        assert told[key].startswith("begin\nxxx")
        assert told[key].endswith("xxxend\n")
        assert len(told[key].encode()) <= 8 << 10
    daemon.agent_dir("long").rmdir()
    assert not (boss / "task/long").exists()
    with open(told["output_path"]) as file:
        assert file.read() == "begin\n" + "x" * 20480 + "end\n"

    shown = daemon.ctx("now", "boss").stdout
    assert shown == read(boss, "session/context/now.md")
    assert "name: bad\nkind: child_agent_task\n" in shown
    assert "status: failed\nexit: exit:7\n" in shown
    assert (boss / "session/context/now.md").stat().st_size == 0

    kinds = [(e["type"], e["task"]) for e in daemon.events("boss") if e["type"].startswith("task.")]
    assert kinds == [(f"task.{what}", name) for name in ("rev", "bad", "long")
                     for what in ("start", "end")]  # fmt: skip


def test_the_output_of_a_child_is_seen_while_it_runs(daemon: Daemon) -> None:
    boss = daemon.run("boss", KEEP, mode="turn")
    wait_status(boss, "idle")
    kid = daemon.make("kid", parent="agent:boss")
    write(kid / "exec", "sh -c 'echo working; exec sleep 1000'")
    write(kid / "ctl", "start")
    wait_until(lambda: read(boss / "task/kid", "preview") == "working\n", "its output is seen")
    assert read(boss / "task/kid", "output") == "working\n"
    assert (read(boss / "task/kid", "agent"), read(boss / "task/kid", "exit")) == ("kid\n", "")
    write(kid / "ctl", "kill")
    wait_dead(kid)
    assert read(boss / "task/kid", "reason") == "operator_stop\n"
