"""Agents at other machines: a lead, two hosts, and wires between them that are held and cut."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.making import command_of
from tests.worlds.daemon import end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.nodes import CTX, LEASE, PARENT
from tests.worlds.three import Three, three_of


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    with three_of(n2="30s", n3=LEASE) as made:
        yield made


def _end(directory: Path) -> tuple[str, str]:
    return read(directory, "outcome").strip(), read(directory, "reason").strip()


def test_an_agent_runs_there_and_gives_back_what_it_made(three: Three) -> None:
    directory = three.place(
        "cat; echo said; echo whole > $CTX_SELF/result.md; echo at $CTX_AGENT; id -u >&2",
        **{"handoff.md": "a task"},
    )
    wait_dead(directory)
    assert (read(directory, "status"), read(directory, "outcome")) == ("dead\n", "done\n")
    assert read(directory, "result.md") == "whole\n"
    name = directory.name.removesuffix(".d")
    out = read(directory, "out")
    assert out.splitlines()[0] == "a task" and f"at {name}@one" in out, out
    listed = (three.daemon.root / "agents").read_text()
    assert '"node": "n2"' in listed or '"node":"n2"' in listed, listed


GIVER = "; ".join((
    "cd $CTX_SELF", "echo one", "echo two >&2", "ls artifact", "sleep 1000",
    "mkdir -p artifact/a/b", "echo x > artifact/a/b/c", "echo y > artifact/run",
    "chmod 755 artifact/run", "head -c 300000 /dev/zero > artifact/zeros",
    r"echo {\"path\":\"artifact/run\"} > refs.jsonl",
    r"echo {\"role\":\"assistant\",\"content\":\"by the way\"} >> session/messages.jsonl",
    "seq 20000",
))  # fmt: skip


def test_all_that_it_gives_back_is_as_if_it_had_run_here(three: Three) -> None:
    directory = three.place(GIVER, **{"handoff.md": "a task"})
    # what is seen before it comes is not remembered
    assert list((directory / "artifact").iterdir()) == []
    wait_until(lambda: read(directory, "out") == "one\n", "what it says comes while it runs")
    wait_until(lambda: read(directory, "log") == "two\n", "what it complains of, too")
    three.go(directory)
    wait_dead(directory)
    assert _end(directory) == ("done", "exit:0"), read(directory, "error")
    found = {path.name for path in (directory / "artifact").rglob("*")}
    assert found == {"a", "b", "c", "run", "zeros"}
    assert read(directory, "artifact/a/b/c") == "x\n"
    assert (directory / "artifact/run").stat().st_mode & 0o777 == 0o755
    assert (directory / "artifact/zeros").stat().st_size == 300_000
    assert read(directory, "refs.jsonl") == '{"path":"artifact/run"}\n'
    out = "one\n" + "".join(f"{number}\n" for number in range(1, 20_001))
    assert read(directory, "out") == out and "fetch=0\n" in read(directory, "node")
    said = (directory / "session/messages.jsonl").read_text().splitlines()
    assert [line["content"].strip() for line in map(json.loads, said)][:2] == [
        "by the way", "a task",
    ]  # fmt: skip


def test_a_placed_child_ends_with_its_parent(three: Three) -> None:
    name = f"x{next(three.numbers)}"
    boss = three.daemon.make("boss")
    write(boss / "policy", "allow boss_t agent:* create\nallow boss_t tool:* execute\n"
                           "allow boss_t node:n2 place\n")  # fmt: skip
    write(boss / "exec", f"sh -c '{PARENT.format(name)}'")
    write(boss / "ctl", "start")
    child = three.daemon.agent_dir(name)
    wait_until(child.exists, "it is made")
    wait_status(child, "busy")
    assert three.runs(child)
    pid = int(read(boss, "pid"))
    end_process(pid)
    three.gone(child)
    wait_dead(child)
    wait_dead(boss)
    assert _end(child) == ("cancelled", "parent_dead")


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_an_agent_is_ended(three: Three, verb: str) -> None:
    directory = three.place("sleep 1000")
    wait_status(directory, "busy")
    write(directory / "ctl", verb)
    three.gone(directory)
    wait_dead(directory)
    assert read(directory, "outcome") == "cancelled\n"


def test_an_agent_is_paused(three: Three) -> None:
    directory = three.place("sleep 1000")
    wait_status(directory, "busy")
    write(directory / "ctl", "pause")
    wait_status(directory, "paused")
    assert read(three.there(directory), "status") == "paused\n"
    write(directory / "ctl", "resume")
    wait_status(directory, "busy")
    write(directory / "ctl", "stop")
    wait_dead(directory)


@pytest.mark.parametrize(("how", "of"), [
    ("kill", "lead"),
    ("reexec", "host"),
    pytest.param("kill", "host", marks=pytest.mark.long),
    pytest.param("reexec", "lead", marks=pytest.mark.long),
])
def test_an_agent_outlives_daemons(three: Three, of: str, how: str) -> None:
    daemon = three.daemon if of == "lead" else three.hosts["n2"]
    directory = three.place("sleep 1000; echo went")
    wait_status(directory, "busy")
    pid = read(three.there(directory), "pid")
    if how == "kill":
        daemon.restart()
    else:
        assert daemon.ctx("reexec").returncode == 0
    assert read(three.there(directory), "pid") == pid
    three.go(directory)
    wait_dead(directory)
    assert (read(directory, "outcome"), read(directory, "out")) == ("done\n", "went\n")


@pytest.mark.parametrize("where", [["--node", "n2"], []])
def test_what_a_client_waits_for_goes_on_with_the_next_daemon(
    three: Three, where: list[str]
) -> None:
    script = "echo one; sleep 1000; echo two; exit 3"
    name = f"x{next(three.numbers)}"
    words = ["spawn", name, "--wait", "--rm", *where, "--", "sh", "-c", script]
    with subprocess.Popen(
        [CTX, "--root", three.daemon.root, *words], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "one\n"
        directory = three.daemon.agent_dir(name)
        for _ in range(2):
            three.daemon.restart()
            assert read(directory, "status") == "busy\n"
        if where:
            three.go(directory)
        else:
            for pid in three.daemon.processes_of(name, "sleep"):
                end_process(pid)
        assert (client.stdout.read(), client.wait()) == ("two\n", 3)
    wait_until(lambda: not directory.exists(), "it is removed")


def test_of_a_prefix_a_node_is_chosen(three: Three) -> None:
    directories = [three.place("sleep 1000", "n*") for _ in range(2)]
    for each in directories:
        wait_status(each, "busy")
    told = "".join(read(each, "node") for each in directories)
    assert "name=n2" in told and "name=n3" in told, told
    for each in directories:
        write(each / "ctl", "stop")
    for each in directories:
        wait_dead(each)


def test_a_person_runs_programs_at_nodes(three: Three) -> None:
    ctx = three.daemon.ctx
    done = ctx("run", "once", "--node", "n2", "--message", "hi", "--", "sh", "-c", "cat; exit 3")
    assert (done.returncode, done.stdout) == (3, "hi\n"), done.stderr
    assert not three.daemon.agent_dir("once").exists()
    done = ctx("spawn", "once", "--node", "n4", "--", "true")
    assert done.returncode == 1 and "no such node; you may use n2, n3 (EINVAL)" in done.stderr
    done = ctx("spawn", "far", "--node", "n2", "--", "sleep", "1000")
    assert done.returncode == 0, done.stderr
    directory = three.daemon.agent_dir("far")
    wait_status(directory, "busy")
    head, *rows = [line.split() for line in ctx("ps").stdout.splitlines()]
    assert head[-1] == "NODE" and ["far", "n2"] in [[row[0], row[-1]] for row in rows]
    assert "far  busy (at n2)\n" in ctx("tree").stdout
    assert "Node: n2, link up, heard " in ctx("status", "far").stdout
    with pytest.raises(OSError, match="Operation not supported"):
        (directory / "task" / "t").mkdir()
    assert '"far" runs at the node n2' in read(three.daemon.root, "error")
    nodes = [json.loads(line) for line in read(three.daemon.root, "nodes").splitlines()]
    assert {row["name"]: row["state"] for row in nodes}["n2"] == "up"
    assert {row["name"]: row["agents"] for row in nodes}["n2"] == 1
    write(directory / "ctl", "kill")
    wait_dead(directory)


def test_a_program_places_its_children_where_its_policy_says(three: Three) -> None:
    lines = ("agent:* create", "tool:* execute", "node:n2 place")
    calls = [
        "ctx tool call SpawnAgent '{}'".format(
            json.dumps({"name": name, "initial_message": "hi", "exec": "cat", "placement": where})
        )
        for name, where in (("there", "node=n2"), ("not", "node=n3"))
    ]
    boss = three.daemon.make("lead")
    write(boss / "policy", "".join(f"allow lead_t {line}\n" for line in lines))
    script = "; ".join((*calls, "ctx nodes list", "sleep 1000"))
    write(boss / "exec", command_of(["sh", "-c", script]))
    write(boss / "ctl", "start")
    child = three.daemon.agent_dir("there")
    wait_until(child.exists, "it is made")
    wait_dead(child)
    assert read(child, "result.md") == "hi\n"
    assert read(child, "node").startswith("name=n2\n")
    wait_until(lambda: "NAME" in read(boss, "out"), "it lists nodes")
    assert "node:n3 place is not in the effective policy" in read(boss, "log")
    assert [line.split()[0] for line in read(boss, "out").splitlines()[-2:]] == ["NAME", "n2"]
    assert not three.daemon.agent_dir("not").exists()
    write(boss / "ctl", "kill")
    wait_dead(boss)


def test_an_agent_ends_where_its_node_is_cut_off(three: Three) -> None:
    directory = three.place("sleep 1000", "n3")
    wait_status(directory, "busy")
    three.wires["n3"].stop()
    three.gone(directory, "n3")
    assert read(directory, "status") == "busy\n", "what it was when something was heard last"
    three.wires["n3"].go_on()
    wait_dead(directory)
    assert _end(directory) == ("interrupted", "lease_over")
    again = three.place("echo again", "n3")
    wait_dead(again)
    assert read(again, "out") == "again\n"
