"""The dashboard and the alert rules speak of what /metrics really serves, and promtool takes all three."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from cluster.metrics import Metrics
from tests.whole_stack import whole_stack

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "slipstream.json"
ALERTS = ROOT / "deploy" / "alerts.yml"
NAME = re.compile(r"\bslipstream_[a-z0-9_]+")
# Those of Prometheus, and those that a name has had no reason to be given in a short run.
LABELS = {"job", "le", "reason", "code", "position"}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """Every query of the dashboard."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def promtool(*arguments: str, given: bytes = b"") -> str:
    """What it says, nothing being wrong. Skips where it is not installed."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("no promtool is installed (Debian: the package prometheus)")
    done = subprocess.run([path, *arguments], input=given, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return (done.stdout + done.stderr).decode()


async def metrics_page() -> bytes:
    """As a deployment serves it after a request."""
    async with whole_stack() as up:
        answers = await up.client.generate([7, 8, 9], max_tokens=8).aresult()
        assert answers.token_ids
        page, _ = await Metrics(up.front_end, up.server.guard).page()
    return page


async def test_queries_name_what_is_served() -> None:
    page = (await metrics_page()).decode()
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    served = set(re.findall(r"^(slipstream_\w+)", page, re.MULTILINE)) | set(typed)
    labels = {
        name: set(re.findall(r"(\w+)=", text)) for name, text in re.findall(r"^(\w+)\{(.*)\}", page, re.MULTILINE)
    }
    queries = [*expressions(json.loads(DASHBOARD.read_text())), *(rule["expr"] for rule in rules())]
    for query in queries:
        names = NAME.findall(query)
        assert names or "up{" in query, query
        for name in names:
            assert name in served, f"{name} in {query}"
            if typed.get(name) == "counter" or name.endswith("_bucket"):
                assert re.search(rf"(rate|increase)\({name}\b", query), f"{name} only grows: {query}"
        for label in re.findall(r"by \(([^)]*)\)", query):
            told = LABELS.union(*(labels.get(name, ()) for name in names))
            assert set(label.replace(" ", "").split(",")) <= told, query
    shown = {name for query in queries for name in NAME.findall(query)}
    for family in typed:
        assert any(name.startswith(family) for name in shown), f"{family} is shown nowhere"


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        for target in panel.get("targets", ()):
            assert target["legendFormat"] or panel["type"] == "stat"


def test_alerts_say_how_bad_it_is_and_what_it_means() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))
    queries = expressions(json.loads(DASHBOARD.read_text()))
    recorded = [
        {"record": f"dashboard:{index}", "expr": query.replace("$__rate_interval", "1m").replace("$job", ".*")}
        for index, query in enumerate(queries)
        if not query.startswith("label_values")
    ]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert "SUCCESS" in promtool("check", "rules", str(tmp_path / "queries.yml"))


def test_promtool_fires_the_rules_on_a_bad_day(tmp_path: Path) -> None:
    """As series would be: the scheduler away, a worker lost, a queue that grows."""
    test = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": 'slipstream_scheduler_up{job="s"}', "values": "1x8 0x40"},
                    {"series": 'slipstream_workers_up{job="s"}', "values": "2x8 1x40"},
                    {"series": 'slipstream_num_requests_running{job="s"}', "values": "3x48"},
                    {"series": 'slipstream_steps_total{job="s"}', "values": "7x48"},
                ],
                "alert_rule_test": [
                    _fires("SlipstreamSchedulerDown", "critical", "1m", fires=False),
                    _fires("SlipstreamSchedulerDown", "critical", "5m", fires=True),
                    _fires("SlipstreamWorkersMissing", "warning", "6m", fires=True),
                    _fires("SlipstreamStuck", "critical", "6m", fires=True),
                    _fires("SlipstreamNoWorkers", "critical", "6m", fires=False),
                ],
            }
        ],
    }
    for case in test["tests"][0]["alert_rule_test"]:  # type: ignore[index]
        for expected in case["exp_alerts"]:
            rule = next(rule for rule in rules() if rule["alert"] == case["alertname"])
            value = {"SlipstreamWorkersMissing": "1", "SlipstreamStuck": "3"}.get(case["alertname"], "")
            expected["exp_annotations"] = {
                name: text.replace("{{ $labels.job }}", "s").replace("{{ $value }}", value)
                for name, text in rule["annotations"].items()
            }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "test.yml"))


def _fires(name: str, severity: str, at: str, *, fires: bool) -> dict[str, Any]:
    expected = [{"exp_labels": {"job": "s", "severity": severity}}] if fires else []
    return {"alertname": name, "eval_time": at, "exp_alerts": expected}


async def test_promtool_takes_the_metrics() -> None:
    page = await metrics_page()
    promtool("check", "metrics", given=page)
