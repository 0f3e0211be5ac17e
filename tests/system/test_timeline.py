"""``ctx timeline`` of families that lived and died below a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

CTX = Path(sys.executable).with_name("ctx")
SVG = "{http://www.w3.org/2000/svg}"


def timeline(daemon: Daemon, *arguments: str) -> str:
    """What the installed client says."""
    environment = {**os.environ, "CTX_ROOT": str(daemon.root)}
    return subprocess.check_output([CTX, "timeline", *arguments], env=environment, text=True)


def fates(daemon: Daemon, name: str) -> dict[str, str]:
    """What the lines of a timeline say at their ends, by the name of the agent."""
    shown = timeline(daemon, name)
    words = (line.lstrip(" ├└─│").split("  ") for line in shown.splitlines()[4:-2])
    return {parts[0].partition(" ")[0]: parts[-1].strip() for parts in words}


def test_a_family_that_dies_is_told_of_after_it_was_removed(daemon: Daemon) -> None:
    script = (
        "ctx spawn kid -- sleep 1000 && "
        "ctx spawn bad -- sh -c '\\''exit 3'\\'' && ctx wait bad; "
        "ctx spawn good -- true && ctx wait good; "
        "ctx spawn shot -- sleep 1000 && ctx stop --wait shot; "
        "echo ready; exec sleep 1000"
    )
    boss = daemon.run("boss", f"sh -c '{script}'")
    wait_until(lambda: "ready" in read(boss, "out"), "it has made its children")
    wait_status(daemon.agent_dir("kid"), "busy")
    for name, parent in (("grandkid", "kid"), ("moved", "boss")):
        directory = daemon.run(name, "sleep 1000", parent=f"agent:{parent}")
        wait_status(directory, "busy")
    assert fates(daemon, "boss") == {
        "boss": "still busy", "kid": "still busy", "grandkid": "still busy",
        "bad": "failed: exit:3", "good": "done", "shot": "stopped by boss", "moved": "still busy",
    }  # fmt: skip
    write(boss / "ctl", "stop")
    wait_dead(boss)
    boss.rmdir()
    assert not directory.exists()
    ended = {
        "boss": "stopped by operator uid:0", "kid": "ended with parent boss",
        "grandkid": "ended with parent kid", "bad": "failed: exit:3", "good": "done",
        "shot": "stopped by boss", "moved": "ended with parent boss",
    }  # fmt: skip
    assert fates(daemon, "boss") == ended
    assert fates(daemon, "kid") == {name: ended[name] for name in ("kid", "grandkid")}
    rows = json.loads(timeline(daemon, "--json", "boss"))
    assert {row["name"]: row["parent"] for row in rows} == {
        "boss": "", "kid": "boss", "grandkid": "kid", "bad": "boss", "good": "boss",
        "shot": "boss", "moved": "boss",
    }  # fmt: skip
    path = daemon.base / "boss.svg"
    timeline(daemon, "--svg", str(path), "boss")
    svg = ElementTree.parse(path).getroot()
    assert len([line for line in svg.iter(f"{SVG}line") if line.get("marker-end")]) == 5
    said = {text.text for text in svg.iter(f"{SVG}text")}
    assert said >= {"operator uid:0", *ended, *ended.values()}
    other = daemon.ctx("timeline", "boss")
    assert other.returncode == 1
    assert "timeline needs the installed client, and this is the one of sandboxes" in other.stderr
