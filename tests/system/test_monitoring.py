"""The dashboard and the alerts of contrib/monitoring ask for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.worlds.daemon import TIMEOUT, Daemon

MONITORING: Final = Path(__file__).resolve().parents[2] / "contrib" / "monitoring"
#: a metric, and the labels that it is chosen by
_ASKED: Final = re.compile(r"\b(ctxfs_[a-z_]+)(\{[^}]*\})?")


def _dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return found


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def _expressions() -> Iterator[str]:
    for panel in _dashboard()["panels"]:
        assert panel["targets"], panel["title"]
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in _rules())
    for variable in _dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def test_each_expression_names_a_metric_and_labels_that_exist(shared_daemon: Daemon) -> None:
    text = (shared_daemon.root / "metrics").read_text()
    there: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            there.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    asked = 0
    for expression in _expressions():
        found = _ASKED.findall(expression)
        assert found, f"{expression} asks for no metric"
        for name, labels in found:
            assert name in there, f"{expression}: there is no {name}"
            # instance is the label that Prometheus adds
            for label in set(re.findall(r"(\w+)!?=~?\"", labels)) - {"instance"}:
                assert label in there[name], f"{expression}: {name} has no label {label}"
            asked += 1
    assert asked > 30


def test_counters_are_rates_and_gauges_are_not(shared_daemon: Daemon) -> None:
    """A counter by itself says only how long the daemon has run."""
    text = (shared_daemon.root / "metrics").read_text()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    for expression in _expressions():
        for name, _ in _ASKED.findall(expression):
            rated = re.search(rf"rate\({name}\b", expression) is not None
            assert rated is (kinds[name] == "counter"), expression


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_each_alert_says_what_to_do() -> None:
    for rule in _rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_rules_and_metrics(shared_daemon: Daemon) -> None:
    rules = subprocess.run(
        ["promtool", "check", "rules", MONITORING / "rules.yaml"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert rules.returncode == 0, rules.stderr
    metrics = subprocess.run(
        ["promtool", "check", "metrics"], input=(shared_daemon.root / "metrics").read_text(),
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    # 3: readable, with advice on names
    assert metrics.returncode in (0, 3), metrics.stderr
