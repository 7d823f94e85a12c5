"""The view of a stage's curves in MLflow: what its page reads, and where the summary links to."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

from posttrain.core.analysis.mlflow_view import COLUMNS, rl_view
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.store.artifacts import RunResult, StageResult
from posttrain.core.tracking.metric_names import find_metric
from posttrain.core.tracking.shared_view import packed
from posttrain.pipelines.run.summary import links

STAGE = RlStage(kind="rl", inputs={"model": "base"}, sampled_evaluation={"k": 4})  # type: ignore[arg-type]


def test_each_group_is_a_section_whose_charts_show_metrics_that_exist() -> None:
    state = json.loads(rl_view(STAGE, ["accuracy", "format"]))
    sections = {section["uuid"]: section["name"] for section in state["compareRunSections"]}
    assert list(sections.values())[:2] == ["Reward and held-out accuracy", "Entropy and KL"]
    charts = state["compareRunCharts"]
    assert {chart["metricSectionId"] for chart in charts} == set(sections)
    assert len({chart["uuid"] for chart in charts}) == len(charts)
    metrics = [name for chart in charts for name in chart["selectedMetricKeys"]]
    assert not [name for name in metrics if find_metric(name) is None]
    assert {"eval/avg_at/4", "eval/pass_at/2", "reward/component/format"} <= set(metrics)
    assert state["searchFilter"] == "tags.`posttrain.kind` = 'rl'"
    assert state["selectedColumns"] == COLUMNS
    assert [c for c in COLUMNS if c.startswith("metrics.") and not find_metric(c[9:-1])] == []
    assert state["orderByKey"] != "attributes.start_time", "stages would be hidden in their runs"


def test_the_tag_is_compressed_as_mlflows_page_does_and_far_below_its_limit() -> None:
    view = rl_view(STAGE, ["accuracy"])
    tag = packed(view)
    assert len(tag) < 4000 and tag.startswith("deflate;")
    assert zlib.decompress(base64.b64decode(tag.removeprefix("deflate;"))).decode() == view


def test_the_summary_links_to_the_view_of_stages_that_were_computed() -> None:
    def pages(status: str, kind: str = "rl") -> dict[str, str]:
        stage = StageResult("s", kind, status, (), {}, 1.0, "r2")  # type: ignore[arg-type]
        uri, home = "sqlite:////home/mlflow/mlflow.db", Path("/home")
        return links(RunResult("r1", "completed", {"s": stage}, uri, "r1", "7", "f1", home, 1.0))

    place = "http://127.0.0.1:5000/#/experiments/7/runs?viewStateShareKey=posttrain-rl"
    assert pages("ran")["curves"].startswith(f"{place}&compareRunsMode=CHART&")
    assert "curves" not in pages("cached") and "curves" not in pages("ran", "sft")
