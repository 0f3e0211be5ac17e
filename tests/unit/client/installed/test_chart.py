"""The timeline of a family, from the events of its sessions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from client.files import stamp
from client.installed.chart import LEGEND, SHADES, planned, span, text_of, ticks
from client.installed.lives import Histories, Life, family_of
from client.output import ASCII
from client.root import Root
from tests.unit.client.fakes import FakeRoot, Run

SVG = "{http://www.w3.org/2000/svg}"


def when(second: float) -> str:
    return stamp(1795564800.0 + second)


class Home:
    """Sessions of names, as the daemon writes them."""

    def __init__(self, root: FakeRoot) -> None:
        self.root = root
        (root.path / "home").mkdir()

    def session(self, name: str, *events: dict[str, Any], session: str = "default") -> Path:
        directory = self.root.path / "home/0/agent" / name / "session" / session
        directory.mkdir(parents=True)
        lines = [{"id": f"e{n}", "agent": name, **event} for n, event in enumerate(events)]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (directory / "events.jsonl").write_text(text)
        return directory

    def life(self, name: str, begin: float, end: float, *, parent: str = "", by: str = "runtime",
             status: str = "done", reason: str = "exit:0", session: str = "default",
             **more: Any) -> Path:  # fmt: skip
        lineage = f"agent:{parent} session:default run:r1" if parent else "operator uid:0"
        return self.session(
            name,
            {"ts": when(begin), "type": "agent.create", "parent": lineage, "by": lineage},
            *([{"ts": when(begin), "type": "agent.control", "file": "parent"}]
              if more.get("moved") else []),
            {"ts": when(begin), "type": "agent.status", "status": "busy", "run": "r1"},
            {"ts": when(end), "type": "agent.status", "status": "stopping", "by": by},
            {"ts": when(end), "type": "run.end", "run": "r1", "outcome": status, "reason": reason},
            {"ts": when(end), "type": "agent.status", "status": "dead", "by": by},
            {"ts": when(end), "type": "agent.stop", "status": status, "reason": reason, "by": by},
            session=session,
        )  # fmt: skip


@pytest.fixture
def home(root: FakeRoot) -> Home:
    return Home(root)


def dying(home: Home) -> None:
    """A family of which the operator stops the top."""
    dead = {"status": "cancelled", "reason": "parent_dead", "by": "operator uid:0"}
    home.life("boss", 0, 10, by="operator uid:0", status="cancelled", reason="operator_stop")
    home.life("kid", 1, 10, parent="boss", **dead)
    home.life("grandkid", 2, 10, parent="kid", **dead)
    home.life("bad", 2, 5, parent="boss", status="error", reason="exit:3")


def names(top: Life) -> list[str]:
    return [life.name for life in top.family()]


def test_who_ended_whom_is_told(home: Home, run: Run) -> None:
    dying(home)
    status, out, err = run("timeline", "boss")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "boss and the 3 agents below it"
    assert lines[1].endswith("10 s: 3 cancelled, 1 error")
    assert re.fullmatch(r"boss +█+■  stopped by operator uid:0", lines[4])
    assert re.fullmatch(r"├─ kid +█+■  ended with parent boss", lines[5])
    assert re.fullmatch(r"│  └─ grandkid +█+■  ended with parent kid", lines[6])
    assert re.fullmatch(r"└─ bad +█+✗ +failed: exit:3", lines[7])
    assert all(len(line) <= 100 for line in lines)


def test_json_tells_the_times_as_the_events_do(home: Home, run: Run) -> None:
    dying(home)
    rows = json.loads(run("timeline", "--json", "boss")[1])
    assert [row["name"] for row in rows] == ["boss", "kid", "grandkid", "bad"]
    bad = rows[3]
    assert (bad["made"], bad["ended"]) == (when(2), when(5))
    assert (bad["outcome"], bad["reason"], bad["parent"]) == ("error", "exit:3", "boss")
    assert [each["status"] for each in bad["statuses"]] == ["new", "busy", "stopping"]
    assert bad["runs"][0]["run"] == "r1"
    assert rows[1]["ended_by"] == "operator uid:0"


def test_the_last_life_of_a_name_has_its_own_children(home: Home, root: FakeRoot) -> None:
    home.life("boss", 0, 10)
    home.life("kid", 1, 5, parent="boss")
    home.life("boss", 20, 30, session="default.2")
    home.life("kid", 21, 25, parent="boss", session="default.2")
    top = family_of(Root(str(root.path)), "boss")
    assert (stamp(top.made), names(top)) == (when(20), ["boss", "kid"])
    assert stamp(top.children[0].made) == when(21)


def test_a_parent_that_was_written_later_is_found_by_its_channel(
    home: Home, root: FakeRoot
) -> None:
    boss = home.life("boss", 0, 10)
    home.life("kid", 1, 5, moved=True)
    home.life("kid", 6, 8, moved=True, session="default.2")
    home.life("stranger", 1, 5, moved=True)
    channel = boss / "context/child/kid"
    channel.mkdir(parents=True)
    (channel / "session").write_text("default.2\n")
    top = family_of(Root(str(root.path)), "boss")
    assert [(life.name, life.sessions) for life in top.children] == [("kid", ["default.2"])]


def test_events_of_another_session_belong_to_the_life(home: Home, root: FakeRoot) -> None:
    home.session("boss", {"ts": when(0), "type": "agent.create", "parent": "operator uid:0"})
    home.session("boss", {"ts": when(4), "type": "agent.status", "status": "idle"}, session="other")
    top = family_of(Root(str(root.path)), "boss")
    assert top.sessions == ["default", "other"]
    assert (top.status, top.fate(), top.end) == ("idle", "still idle", None)


def test_a_long_history_is_read_to_its_end(home: Home, root: FakeRoot) -> None:
    filler = [{"ts": when(1), "type": "agent.control", "file": "x" * 500} for _ in range(20)]
    made = {"ts": when(0), "type": "agent.create", "parent": "operator uid:0"}
    stop = {"ts": when(9), "type": "agent.stop", "status": "done", "reason": "exit:0"}
    home.session("boss", made, *filler, stop)
    assert family_of(Root(str(root.path)), "boss").fate() == "done"


@pytest.mark.parametrize(
    ("status", "reason", "by", "fate"),
    [
        ("done", "exit:0", "runtime", "done"),
        ("done", "self_stop", "agent:x run:r1", "stopped itself"),
        ("error", "oom", "runtime", "failed: out of memory"),
        ("error", "start_failed: no program x, y", "runtime", "could not start: no program x, y"),
        ("cancelled", "supervisor_stop", "agent:lead run:r3", "stopped by lead"),
        ("cancelled", "operator_stop", "agent:lead run:r3", "stopped by lead"),
        ("cancelled", "operator_stop,unkillable", "operator uid:7",
         "stopped by operator uid:7, unkillable"),
        ("cancelled", "timeout", "runtime", "took longer than its timeout"),
        ("interrupted", "reboot", "runtime", "lost in a reboot"),
    ],
)  # fmt: skip
def test_ends_in_words(
    home: Home, root: FakeRoot, status: str, reason: str, by: str, fate: str
) -> None:
    home.life("x", 0, 1, status=status, reason=reason, by=by)
    assert family_of(Root(str(root.path)), "x").fate() == fate


def many(home: Home, root: FakeRoot, teams: int, each: int) -> Life:
    """A large family; every tenth worker fails."""
    home.life("boss", 0, 100)
    for team in range(teams):
        home.life(f"team-{team}", 1, 90, parent="boss")
        for number in range(each):
            bad = number % 10 == 0
            home.life(f"w-{team}-{number}", 2, 10 + number, parent=f"team-{team}",
                      status="error" if bad else "done", reason="exit:3" if bad else "exit:0")
    return family_of(Root(str(root.path)), "boss")


def test_many_agents_of_one_kind_share_a_line(home: Home, root: FakeRoot) -> None:
    top = many(home, root, 10, 30)
    assert len(names(top)) == 311
    rows = planned(top, 60)
    assert len(rows) == 1 + 10 * 3
    assert sorted(life.name for row in rows for life in row.lives) == sorted(names(top))
    assert [row.label for row in rows if row.grouped][:2] == ["w-0-* (×3)", "w-0-* (×27)"]
    assert [row.fate for row in rows if row.grouped][:2] == ["all failed: exit:3", "all done"]
    rows = planned(top, 25)
    assert len(rows) == 1 + 10 * 2
    assert rows[2].fate == "27 done, 3 failed: exit:3"
    rows = planned(top, 10)
    assert [row.label for row in rows] == ["boss", "310 agents"]
    assert len(planned(top, 311)) == 311


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("most", [10, 60, 400])
def test_text_fits_the_width(home: Home, root: FakeRoot, width: int, most: int) -> None:
    top = many(home, root, 3, 12)
    lines = list(text_of(top, planned(top, most), width))
    assert max(map(len, lines)) <= width
    about = "\n".join(lines[len(planned(top, most)) + 5 :])
    assert "█ busy  ─ idle" in about and "▓ stops" in about and "► lives" in about
    assert ("░▒▓█ how many of several" in about) == any(row.grouped for row in planned(top, most))


def test_characters_differ_also_without_unicode() -> None:
    signs = [each[0] for each in LEGEND]
    shown = "".join(signs).translate(ASCII)
    assert shown.isascii() and len({*shown}) == len(signs)
    assert f"{SHADES}×".translate(ASCII).isascii()


def drawn(run: Run, path: Path, name: str) -> ElementTree.Element:
    assert run("timeline", "--svg", str(path), name) == (0, "", f"ctx: wrote {path}\n")
    return ElementTree.parse(path).getroot()


def texts(svg: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in svg.iter(f"{SVG}text")]


def test_the_picture_names_all_and_has_an_arrow_for_each_who_was_ended(
    home: Home, run: Run, tmp_path: Path
) -> None:
    dying(home)
    svg = drawn(run, tmp_path / "x.svg", "boss")
    said = texts(svg)
    for text in ("boss", "kid", "grandkid", "bad", "operator uid:0", "stop", "failed: exit:3",
                 "stopped by operator uid:0", "ended with parent boss", "ended with parent kid"):
        assert said.count(text) == 1, text
    arrows = [line for line in svg.iter(f"{SVG}line") if line.get("marker-end")]
    assert len(arrows) == 3
    assert all(float(line.get("y2", "")) > float(line.get("y1", "")) for line in arrows)
    outside = [line for line in svg.iter() if "href" in "".join(line.keys())]
    assert outside == [], "it needs nothing beside it"


def test_the_picture_of_many_is_not_long(
    home: Home, root: FakeRoot, run: Run, tmp_path: Path
) -> None:
    many(home, root, 10, 30)
    svg = drawn(run, tmp_path / "x.svg", "boss")
    assert int(svg.get("height", "")) < 1200
    assert texts(svg).count("w-3-* (×27)") == 1


def test_the_picture_of_what_is_harmful_is_harmless(home: Home, run: Run, tmp_path: Path) -> None:
    home.life("x", 0, 1, status="error", reason="start_failed: <b>\x1b[2J&\x00\u202e")
    svg = drawn(run, tmp_path / "x.svg", "x")
    assert r"could not start: <b>\x1b[2J&\x00\u202e" in texts(svg)
    assert "\x1b" not in run("timeline", "x")[1]


def test_who_is_not_there(home: Home, run: Run) -> None:
    assert run("timeline", "nobody")[0] == 1
    assert run("timeline", "a/b")[0] == 2
    home.life("x", 0, 1)
    status, _, err = run("timeline", "--svg", "/no/such/place", "x")
    assert (status, err) == (1, "ctx: /no/such/place: No such file or directory\n")


def test_a_restart_is_no_end(home: Home, root: FakeRoot, run: Run, tmp_path: Path) -> None:
    home.session(
        "flaky",
        {"ts": when(0), "type": "agent.create", "parent": "operator uid:0"},
        {"ts": when(1), "type": "agent.status", "status": "starting"},
        {"ts": when(1), "type": "run.start", "run": "r1"},
        {"ts": when(1), "type": "agent.status", "status": "busy"},
        {"ts": when(2), "type": "agent.status", "status": "stopping", "by": "runtime"},
        {"ts": when(2), "type": "agent.status", "status": "starting", "after": "exit:3"},
        {"ts": when(9), "type": "agent.start", "run": "r2"},
        {"ts": when(9), "type": "run.start", "run": "r2"},
        {"ts": when(9), "type": "agent.status", "status": "busy"},
        {"ts": when(12), "type": "agent.status", "status": "stopping", "by": "operator uid:0"},
        {"ts": when(12), "type": "agent.stop", "status": "cancelled", "reason": "operator_stop"},
    )
    life = family_of(Root(str(root.path)), "flaky")
    assert (stamp(life.stopped or 0.0), life.ended_by) == (when(12), "operator uid:0")
    busy = [(each.run, stamp(each.begin)) for each in life.spans if each.status == "busy"]
    assert busy == [("r1", when(1)), ("r2", when(9))]
    said = texts(drawn(run, tmp_path / "x.svg", "flaky"))
    assert {"exit:3, waits to start again", "busy r1", "busy r2"} <= set(said)


def test_durations() -> None:
    told = [span(seconds) for seconds in (0.0123, 1.5, 59, 60, 61, 3600, 3720, 86400, 90000)]
    assert told == ["12 ms", "1.5 s", "59 s", "1 min", "1 min 1 s", "1 h", "1 h 2 min", "1 d",
                    "1 d 1 h"]  # fmt: skip
    assert [*ticks(10.9, 8)] == [0, 2, 4, 6, 8, 10]
    assert [*ticks(7200, 8)][1] == 900
    assert [*ticks(10**10, 8)][1] == 31536000


def test_histories_that_are_not_the_callers_are_left_out(root: FakeRoot) -> None:
    (root.path / "home").mkdir()
    (root.path / "home/0").write_text("")  # cannot be listed
    histories = Histories(Root(str(root.path)))
    assert histories.made_by == {}
