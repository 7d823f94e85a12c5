"""The dashboard's groups as a view in MLflow: all rl stages of an experiment in the same charts.

As a table the view has the algorithm, reward and accuracy of each.

MLflow keeps a shared view as a tag of the experiment, JSON that its page reads, and opens it by
`viewStateShareKey=NAME` in the address. Layouts of a single run's page are kept by the browser
alone. Seen with MLflow 3.17.2: a view that a later version cannot read is an error on that page,
where nothing else is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from posttrain.core.analysis.dashboard import groups_of
from posttrain.core.analysis.learning_curves import COMPONENT, Plot
from posttrain.core.config.rl_stage import RlStage

COLUMNS = [
    "tags.`run`",
    "params.`algorithm.name`",
    "metrics.`0_main/reward`",
    "metrics.`0_main/accuracy`",
    "metrics.`0_main/held_out_accuracy`",
]
"""What tells runs apart in the view's table."""


def rl_view(stage: RlStage, rewards: Iterable[str]) -> str:
    """The view's state as JSON, for a stage with these rewards."""
    names = [f"{COMPONENT}{name}" for name in rewards]
    section = stage.sampled_evaluation
    if section is not None:
        names += [f"eval/pass_at/{k}" for k in section.sizes]
    sections, charts = list[dict[str, Any]](), list[dict[str, Any]]()  # Any: JSON
    for place, group in enumerate(groups_of(names)):
        if group.plots:
            uuid = f"posttrain-{place}"
            sections.append(
                {"uuid": uuid, "name": group.title, "display": True, "isReordered": False}
            )
            charts += [_chart(plot, uuid, i) for i, plot in enumerate(group.plots)]
    state = {
        "compareRunCharts": charts,
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "hideEmptyCharts": True,  # of what no stage measured
        "searchFilter": f"tags.`posttrain.kind` = '{stage.kind}'",
        "selectedColumns": COLUMNS,
        # By any other key than the start MLflow shows stages without the runs that they belong to.
        "orderByKey": "metrics.`reward/mean`",
        "orderByAsc": False,
    }
    return json.dumps(state, separators=(",", ":"))


def _chart(plot: Plot, section: str, place: int) -> dict[str, Any]:
    metrics = [curve.metric for curve in plot.curves]
    return {
        "type": "LINE",
        "uuid": f"{section}-{place}",
        "deleted": False,
        "isGenerated": False,
        "metricSectionId": section,
        "metricKey": metrics[0],
        "selectedMetricKeys": metrics,
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "lineSmoothness": 0,
        "range": {},
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
