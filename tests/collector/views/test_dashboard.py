"""The dashboard that is shipped, against what a Grafana takes of it and against what a scrape has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from importlib.resources import files
from itertools import combinations

import jsonschema
import pytest
from gpuwatch.collector.views.metrics_endpoint import MetricsExporter, OwnNumbers, text_of
from gpuwatch.core.wire.beat import HotModule
from gpuwatch.core.wire.view import JobView, LimitPassing, NodeView, RankView, ViewStraggler
from prometheus_client.parser import text_string_to_metric_families

from ...ports import ports_of_this_test
from ...waiting import WAIT_S, until

DASHBOARD = json.loads((files("gpuwatch.collector.views") / "dashboard.json").read_text())
DATASOURCE = {
    "type": "object",
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "required": ["type", "uid"],
}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "annotations"],
    "properties": {
        "id": {"type": "null"},
        "uid": {"type": "string", "minLength": 1, "maxLength": 40},
        "schemaVersion": {"type": "integer", "minimum": 36, "maximum": 42},
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smhd]$"},
        "time": {"type": "object", "required": ["from", "to"]},
        "templating": {
            "type": "object",
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "name"],
                        "properties": {
                            "type": {
                                "enum": ["query", "adhoc", "constant", "datasource", "interval", "textbox", "custom"]
                            },
                            "hide": {"enum": [0, 1, 2]},
                        },
                    },
                }
            },
        },
        "panels": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos", "datasource", "targets", "fieldConfig", "options"],
                "properties": {
                    "id": {"type": "integer", "minimum": 1},
                    "type": {"enum": ["stat", "timeseries", "table"]},
                    "title": {"type": "string", "minLength": 1},
                    "datasource": DATASOURCE,
                    "gridPos": {
                        "type": "object",
                        "required": ["x", "y", "w", "h"],
                        "properties": {
                            "x": {"type": "integer", "minimum": 0, "maximum": 23},
                            "y": {"type": "integer", "minimum": 0},
                            "w": {"type": "integer", "minimum": 1, "maximum": 24},
                            "h": {"type": "integer", "minimum": 1},
                        },
                    },
                    "targets": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["datasource", "expr", "refId"],
                            "properties": {
                                "datasource": DATASOURCE,
                                "expr": {"type": "string", "minLength": 1},
                                "refId": {"type": "string", "pattern": "^[A-Z]$"},
                            },
                        },
                    },
                    "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
                },
            },
        },
    },
}
"""What Grafana's own description of a dashboard (kinds/dashboard of its sources) says of the fields that are used."""

VIEW = JobView(
    5,
    "run",
    [],
    1,
    0,
    [NodeView("node-a", False, "ok")],
    [RankView(0, "node-a", "forward", 9, 10, -1, "net", 0.1, True, 0)],
    [HotModule(0, 9, "net", "float16", 3e4, 1.1, 0.0)],
    [],
    kind="overflow",
    slow=ViewStraggler(0, "node-a", 0.3),
    passing=[LimitPassing("net", "float16", 30, 20, 40)],
    events_by_kind={"anomaly": 1},
    lost={"frames": 0},
)
"""A picture that has something of everything."""


def samples() -> dict[str, set[str]]:
    """name -> its labels"""
    text = text_of(VIEW, OwnNumbers(turned_away={"refused": 0})).decode()
    return {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }


def expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*found, *(v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query")]


def test_it_is_as_grafana_describes_a_dashboard():
    jsonschema.validate(DASHBOARD, SCHEMA)


def test_every_metric_that_is_asked_for_is_scraped_and_every_one_that_is_scraped_is_shown():
    asked = {name for expression in expressions() for name in re.findall(r"\bgpuwatch_\w+", expression)}
    known = set(samples())
    assert asked <= known
    assert known - asked == {
        "gpuwatch_view_timestamp_seconds",
        "gpuwatch_nodes",
        "gpuwatch_rank_steps_total",
        "gpuwatch_module_abs_max",
        "gpuwatch_collector_waiting_messages",
    }, "what is for rules and other dashboards"


@pytest.mark.parametrize("expression", expressions())
def test_every_label_that_is_named_is_one_of_its_metric(expression):
    for name, selector in re.findall(r"\b(gpuwatch_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels - {"instance"} <= samples()[name], "`instance` is the scrape's own"


def test_every_legend_is_of_labels_that_are_left():
    labels = set.union(*samples().values())
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_panels_do_not_overlap_and_have_a_number_each():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one['title']} lies on {other['title']}"


def test_the_datasource_is_a_variable():
    names = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource": "datasource", "instance": "query"}
    uids = re.findall(r'"uid": "([^"]*)"', json.dumps(DASHBOARD))
    assert set(uids) == {"gpuwatch", "${datasource}"}


CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: gpuwatch, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


def ask(port: int, expression: str) -> list[dict[str, object]]:
    """What a Prometheus answers; [] while it does not listen yet."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=WAIT_S) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == 503, f"{expression}: {error.read().decode()}"
        return []
    except urllib.error.URLError:
        return []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs a Prometheus")
def test_a_prometheus_that_scrapes_answers_every_query(tmp_path):
    served = MetricsExporter("127.0.0.1:0")
    served.show(lambda: (VIEW, OwnNumbers(turned_away={"refused": 0})), 0.0)
    of_metrics = served.url.rpartition(":")[2].partition("/")[0]
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(port=of_metrics))
    with ports_of_this_test((port,) for port in range(29900, 29990)) as (port,), (tmp_path / "log").open("w") as log:
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        prometheus = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)
        try:
            left = [e.replace("$__rate_interval", "1m").replace("$instance", ".*") for e in expressions()[:-1]]

            def are_answered() -> bool:
                assert prometheus.poll() is None, (tmp_path / "log").read_text()
                left[:] = [expression for expression in left if not ask(port, expression)]
                return not left

            until(are_answered, "an answer to each expression (rate() needs two scrapes)", lambda: left)
        finally:
            prometheus.terminate()
            prometheus.wait(WAIT_S)
            served.close()
