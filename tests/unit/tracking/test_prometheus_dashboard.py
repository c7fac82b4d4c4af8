"""The dashboard: Grafana can read it, and it asks only for what a run exports."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from catalogue_names import spelled_out
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from promql import PromQL
from tracked import tracked_run

from gradus.cli.results import view
from gradus.errors import ConfigError
from gradus.monitor.catalogue import METRICS
from gradus.monitor.live import write_live
from gradus.run.paths import RunDirectory
from gradus.run.records import Record
from gradus.tracking.prometheus.board import NumberBoard

Targets = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    packaged = files("gradus.tracking.prometheus").joinpath("dashboard.json")
    found: dict[str, Any] = json.loads(packaged.read_bytes())
    return found


def targets(loaded: dict[str, Any]) -> Targets:
    return [(it["title"], target) for it in loaded["panels"] for target in it.get("targets", [])]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, set[str]]]:
    """Name → type and labels, on the page of a run that records everything there is."""
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    names = [name for metric in METRICS for name in spelled_out(metric.pattern)]
    board = NumberBoard(tracked_run(directory.root), directory)
    board.add(Record(0, 1.0, {n: 1.0 for n in names if not n.startswith("live/")}))
    write_live(directory.live, {n: 1.0 for n in names if n.startswith("live/")}, term=1)
    directory.alive.mkdir()
    (directory.alive / "trainer.json").write_text("{}")
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(generate_latest(board).decode()):
        for sample in family.samples:
            _, labels = found.setdefault(sample.name, (family.type, set()))
            labels.update(sample.labels)
    return found


def test_every_query_is_promql_and_asks_for_series_and_labels_that_a_run_exports(
    loaded: dict[str, Any], exported: dict[str, tuple[str, set[str]]]
) -> None:
    asked = targets(loaded)
    assert len(asked) > 50
    for title, target in asked:
        found = PromQL(target["expr"]).asked
        assert found.metrics, title
        for name, labels in found.metrics.items():
            assert name in exported, f"{title}: {name}"
            assert labels <= exported[name][1], f"{title}: {name}"
            assert "run" in labels, f"{title}: {name} of every run"


def test_a_rate_is_asked_only_of_counters(
    loaded: dict[str, Any], exported: dict[str, tuple[str, set[str]]]
) -> None:
    rated = {name for _, target in targets(loaded) for name in PromQL(target["expr"]).asked.ranges}
    assert rated
    assert {exported[name][0] for name in rated} == {"counter"}


def test_a_legend_names_labels_that_its_series_have(
    loaded: dict[str, Any], exported: dict[str, tuple[str, set[str]]]
) -> None:
    for title, target in targets(loaded):
        found = PromQL(target["expr"]).asked
        words = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert all(words <= exported[name][1] for name in found.metrics), title


def test_panels_have_numbers_of_their_own_and_do_not_overlap(loaded: dict[str, Any]) -> None:
    panels = loaded["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_rows_show_rewards_outcomes_queues_trainer_engine_and_alarms(
    loaded: dict[str, Any],
) -> None:
    rows = [panel["title"] for panel in loaded["panels"] if panel["type"] == "row"]
    assert rows == [
        "Run",
        "Reward",
        "Episodes by outcome",
        "Staleness and queues",
        "Trainer",
        "Engine",
        "Alarms",
    ]


def test_the_data_source_and_the_run_are_chosen_in_grafana(loaded: dict[str, Any]) -> None:
    chosen = {it["name"]: it for it in loaded["templating"]["list"]}
    assert chosen["run"]["query"]["query"] == "label_values(gradus_run_info, run)"
    sources = {panel["datasource"]["uid"] for panel in loaded["panels"] if "targets" in panel}
    assert sources == {"${datasource}"}


def test_the_command_writes_the_dashboard(
    tmp_path: Path, loaded: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "board.json"
    assert view(["--grafana", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert json.loads(path.read_text()) == loaded
    with pytest.raises(ConfigError, match="and nothing else"):
        view(["--grafana", str(path), "runs/x"])


def test_each_rule_asks_for_series_of_a_run_and_names_labels_that_they_have(
    exported: dict[str, tuple[str, set[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rules.yml"
    assert view(["--rules", str(path)]) == 0
    assert "rule_files" in capsys.readouterr().out
    (group,) = yaml.safe_load(path.read_text())["groups"]
    rules = {it["alert"]: it for it in group["rules"]}
    assert list(rules) == ["GradusAlarm", "GradusQuiet", "GradusEnded"]
    for name, rule in rules.items():
        found = PromQL(rule["expr"]).asked
        assert found.metrics, name
        known = set().union(*(exported[metric][1] for metric in found.metrics))
        words = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert "run" in words, name
        assert words <= known, name
        assert all(labels <= exported[it][1] for it, labels in found.metrics.items()), name
    with pytest.raises(ConfigError, match=r"--rules .*and nothing else"):
        view(["--rules", str(tmp_path)])


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(x_total)",
        "sum by (a (x)",
        'x{a="1"',
        "x{a=1}",
        "x[5m]",
        "rate(x_total[soon])",
        "x +",
        "x y",
        "(x))",
        'x{a="1"}y{b="2"}',
        "",
    ],
)
def test_what_is_no_promql_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        PromQL(wrong)
