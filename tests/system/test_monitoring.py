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

#: each node has samples of its own
pytestmark = pytest.mark.settings(nodes="{n2: {command: [/bin/false]}}")
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


#: what of two machines happens after the minute 10, and which alerts that gives
HAPPENINGS: Final = {
    "nothing": ({}, {}),
    # a machine of which one hears nothing any more, as without a ctxd
    "gone": ({'ctxfs_info{instance="b"}': "1x10 _x110",
              'ctxfs_state{instance="b",state="ready"}': "1x10 _x110"},
             {"CtxfsDown": "b"}),
    "starting": ({'ctxfs_state{instance="b",state="ready"}': "1x10 0x110"}, {"CtxfsDown": "b"}),
    "started again": ({'ctxfs_process_start_time_seconds{instance="b"}': "1x10 2x5 3x5 4x5 5x90"},
                      {"CtxfsRestarts": "b"}),
    "late": ({'ctxfs_loop_lag_seconds{instance="b"}': "0x10 0.7x110"}, {"CtxfsLate": "b"}),
    "disk": ({'ctxfs_state_free_bytes{instance="b"}': "50x10 9x110"}, {"CtxfsDiskFull": "b"}),
    "disk not known": ({'ctxfs_state_free_bytes{instance="b"}': "50x10 -1+0x110",
                        'ctxfs_state_size_bytes{instance="b"}': "100x10 -1+0x110"}, {}),
    "waiting": ({'ctxfs_changes_waiting{instance="b"}': "0x10 3x110"}, {"CtxfsChangesWait": "b"}),
    "descriptors": ({'ctxfs_descriptors{instance="b"}': "10x10 95x110"},
                    {"CtxfsDescriptors": "b"}),
    "account": ({'ctxfs_account_used{instance="b",account="disk"}': "10x10 95x110"},
                {"CtxfsAccountFull": "b"}),
    "failing": ({'ctxfs_agent_restarts_total{instance="b"}': "0x10 0+60x110"},
                {"CtxfsAgentsFail": "b"}),
    "refused": ({'ctxfs_model_requests_total{instance="b",answer="refused",owner="0"}':
                 "0x10 0+60x110"}, {"CtxfsAboveLimit": "b"}),
    "link": ({'ctxfs_link_up{instance="b",node="n2"}': "1x10 0x110"}, {"CtxfsLinkDown": "b"}),
}  # fmt: skip
#: of a machine on which all is well
WELL: Final = {
    "ctxfs_info": "1x120", "ctxfs_process_start_time_seconds": "1x120",
    'ctxfs_state{state="ready"}': "1x120", "ctxfs_loop_lag_seconds": "0x120",
    "ctxfs_state_free_bytes": "50x120", "ctxfs_state_size_bytes": "100x120",
    "ctxfs_changes_waiting": "0x120", "ctxfs_descriptors": "10x120",
    "ctxfs_descriptors_max": "100x120", "ctxfs_agent_restarts_total": "0x120",
    'ctxfs_model_requests_total{answer="refused",owner="0"}': "0x120",
    'ctxfs_link_up{node="n2"}': "1x120", 'ctxfs_link_wanted{node="n2"}': "1x120",
    'ctxfs_account_used{account="disk"}': "10x120",
    'ctxfs_account_total{account="disk"}': "100x120",
    'ctxfs_account_total{account="tasks"}': "Inf " * 121,
}  # fmt: skip


def _series(instance: str) -> dict[str, str]:
    found = {}
    for name, values in WELL.items():
        name, _, labels = name.partition("{")
        more = f",{labels.rstrip('}')}" if labels else ""
        found[f'{name}{{instance="{instance}"{more}}}'] = values
    return found


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("happening", HAPPENINGS)
def test_alerts_tell_of_the_machine_on_which_something_happens(
    happening: str, tmp_path: Path
) -> None:
    def normal(name: str) -> str:
        base, _, labels = name.partition("{")
        return f"{base}{{{','.join(sorted(labels.rstrip('}').split(',')))}}}"

    changed, alerts = HAPPENINGS[happening]
    series = {normal(name): values for name, values in {**_series("a"), **_series("b")}.items()}
    for name, values in changed.items():
        assert normal(name) in series, name
        series[normal(name)] = values
    told = []
    for rule in _rules():
        shown = {"severity": rule["labels"]["severity"], "instance": alerts.get(rule["alert"], "")}
        if rule["alert"] == "CtxfsAccountFull":
            shown["account"] = "disk"
        if rule["alert"] == "CtxfsAboveLimit":
            shown["owner"] = "0"
        if rule["alert"] == "CtxfsLinkDown":
            shown["node"] = "n2"
        expected = {"exp_labels": shown}
        told.append({"eval_time": "45m", "alertname": rule["alert"],
                     "exp_alerts": [expected] if rule["alert"] in alerts else []})  # fmt: skip
    # the texts of alerts have values, which are compared as well; so they are left out
    plain = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    for rule in plain["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(plain))
    test = {
        "rule_files": ["rules.yaml"], "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m", "alert_rule_test": told,
            "input_series": [{"series": name, "values": each} for name, each in series.items()],
        }],
    }  # fmt: skip
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yaml"],
                          capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
