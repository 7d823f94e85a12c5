"""Benchmark suites: how they are measured, what one measures, and the files that hold results.

Whatever measures a suite, its results are `SuiteMetric`s, each with a 95 % interval where one can
be computed, and one row for each sample.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from posttrain.core.config.suites import PACKAGES, Harness, Suite
from posttrain.core.errors import ResourceError, nearest
from posttrain.core.math.intervals import mean_interval, share_interval
from posttrain.core.runtime.files import WrongContent, read_json, write_text

EVALUATIONS = "evaluations"
"""The folder of a home with results that no stage made."""
SUITES = "suites"
"""The folder with results in a stage's artifact."""
RESULTS, ROWS = "suites.json", "rows.jsonl"
SHOWN = 2000
"""Characters that are kept of a text in a row."""
VERSION = 1
NORMAL_975 = 1.959964
"""The 97.5 % quantile of the normal distribution."""

Progress = Callable[[str, int, int | None], None]
"""Called with what is measured, how many requests are done, and of how many if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """How suites are measured, None = as the harness or the task says.

    `limit` is the number of samples of each task, from its first; `fewshot` that of examples in
    each prompt. `tasks_dir` holds tasks of lm-eval, as YAML. `chat` says whether prompts go through
    the chat template; None = where the tokenizer has one. `download` lets a harness fetch data.
    """

    limit: int | None = None
    fewshot: int | None = None
    tasks_dir: Path | None = None
    chat: bool | None = None
    batch_size: int = 16
    max_tokens: int = 256
    seed: int = 0
    download: bool = False
    system_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteMetric:
    """One number of a task: its value, the 95 % interval (None: not known), samples behind it."""

    suite: Harness
    task: str
    metric: str
    value: float
    low: float | None
    high: float | None
    num_samples: int

    @property
    def key(self) -> str:
        """`HARNESS/TASK/METRIC` in the characters that MLflow takes."""
        return re.sub(r"[^\w\-. /]", "_", f"{self.suite}/{self.task}/{self.metric}")

    @property
    def shown(self) -> str:
        """`0.25 [0.1, 0.5] n=20`."""
        bounds = "" if self.low is None else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.4g}{bounds} n={self.num_samples}"


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one suite measured, its samples as JSON objects, and the harness with its version."""

    suite: Suite
    metrics: tuple[SuiteMetric, ...]
    rows: tuple[Mapping[str, Any], ...]  # Any: JSON
    version: str


def require_suites(suites: Sequence[Suite]) -> None:
    """Raise `ResourceError` unless the packages and files that the suites need are there."""
    for suite in suites:
        module, package = PACKAGES.get(suite.harness, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise ResourceError(
                f"suite '{suite.text}' needs the package {package}, which is not installed: "
                "pip install 'posttrain[eval]'"
            )
        file = Path(suite.file).expanduser()
        if suite.file and not file.is_file():
            siblings = [path.name for path in file.parent.glob("*.py")]
            raise ResourceError(
                f"suite '{suite.text}': there is no file {file}{nearest(file.name, siblings)}"
            )


def measured_mean(
    values: Sequence[float], value: float, error: float | None
) -> tuple[float | None, float | None]:
    """The 95 % interval of a metric: (low, high), None where nothing is known of the spread.

    Of a mean it is that of `values`, one per sample: as for accuracies where all are in [0, 1],
    else the t-interval. A metric that is not a mean of them (perplexity, F1 of a corpus) has its
    value +- 1.96 times the harness's own standard `error`.
    """
    if values and math.isclose(sum(values) / len(values), value, rel_tol=1e-6, abs_tol=1e-9):
        if all(0 <= one <= 1 for one in values):
            return share_interval(values)[1:]
        return mean_interval(values, bounds=None)[1:] if len(values) > 1 else (None, None)
    if error is None or not math.isfinite(error):
        return None, None
    return value - NORMAL_975 * error, value + NORMAL_975 * error


def metric_values(metrics: Sequence[SuiteMetric]) -> dict[str, float]:
    """The metrics by the names under which MLflow has them, bounds included."""
    found: dict[str, float] = {}
    for metric in metrics:
        found[f"suite/{metric.key}"] = metric.value
        if metric.low is not None and metric.high is not None:
            found[f"suite_low/{metric.key}"] = metric.low
            found[f"suite_high/{metric.key}"] = metric.high
    return found


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredSuites:
    """Results that were kept: of which model (its digest), when, by what, and where they are."""

    digest: str
    when: str
    options: Mapping[str, Any]  # Any: JSON
    metrics: tuple[SuiteMetric, ...]
    folder: Path


def write_suites(
    folder: Path,
    results: Sequence[SuiteResult],
    options: SuiteOptions,
    digest: str,
    when: str = "",
) -> Path:
    """Write results of the model with this digest into `folder`, rows included; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ROWS).open("w", encoding="utf-8") as stream:
        for result in results:
            for row in result.rows:
                stream.write(json.dumps(row, default=str) + "\n")
    kept = {
        "version": VERSION,
        "digest": digest,
        "when": when,
        "suites": {result.suite.text: result.version for result in results},
        "options": options_values(options),
        "metrics": [asdict(metric) for result in results for metric in result.metrics],
    }
    write_text(folder / RESULTS, json.dumps(kept, indent=2))
    return folder


def options_values(options: SuiteOptions) -> dict[str, Any]:  # Any: JSON
    """The options as JSON."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}


def read_suites(folder: Path) -> StoredSuites | None:
    """What `write_suites` wrote; None where there is nothing that can be read."""
    try:
        row = read_json(folder / RESULTS, _Row)
    except (WrongContent, OSError):
        return None
    metrics = tuple(SuiteMetric(**metric) for metric in row["metrics"])
    return StoredSuites(row["digest"], row["when"], row["options"], metrics, folder)


class _Metric(BaseModel):
    suite: Harness
    task: str
    metric: str
    value: float
    low: float | None
    high: float | None
    num_samples: int


class _Row(BaseModel):
    version: Literal[1]
    digest: str
    when: str
    suites: dict[str, str]
    options: dict[str, Any]
    metrics: list[_Metric]
