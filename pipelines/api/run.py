"""`Run`: what a run left, for reading from Python."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError, ResourceError, nearest, reading_model
from posttrain.core.store.artifacts import Artifact, RunResult, StageResult
from posttrain.pipelines.analysis.past_run import PastRun, read_steps
from posttrain.pipelines.analysis.run_results import step_rows
from posttrain.pipelines.run.model_reference import tracking_uri
from posttrain.pipelines.run.summary import links

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from posttrain.core.config.schema import RunConfig

SAMPLED = ("rl", "distill", "evaluate")
"""Kinds of stages whose responses are kept."""
MODELS = ("model", "reward_model")
MLFLOW_STATUS = {
    "RUNNING": "running",
    "SCHEDULED": "running",
    "FINISHED": "completed",
    "FAILED": "failed",
    "KILLED": "stopped",
}


class Run:
    """A run of this home: its config, stages, metrics, samples and models. It writes nothing.

    `posttrain.run` and `posttrain.load` return one. Everything is read from the home when it is
    asked for, also of a run that is still going on.
    """

    def __init__(self, past: PastRun, result: RunResult | None = None) -> None:
        self._past, self._result = past, result

    @property
    def id(self) -> str:
        """The run's id, also that of its MLflow run; empty where there was nothing to do."""
        return self._past.record.run_id

    @property
    def name(self) -> str:
        """The config's name, which is MLflow's experiment."""
        return self._past.record.name

    @property
    def home(self) -> Path:
        """The home folder that holds the run."""
        return self._past.home

    @property
    def config(self) -> RunConfig:
        """The complete config, with presets expanded and every default filled in."""
        return self._past.resolved.config

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the run warned of."""
        found = self._past.record if self._result is None else self._result
        return found.warnings

    @property
    def status(self) -> str:
        """`completed`, `no_new_data`, `running`, `failed`, `stopped` or `unknown`.

        `stopped` is a run that was interrupted, or that waits at a gate. `unknown` is one that is
        not complete and that MLflow does not know.
        """
        if self._result is not None:
            return self._result.status
        if set(self.stages) == set(self._past.resolved.order):
            return "completed"
        found = self._in_mlflow
        return "unknown" if found is None else MLFLOW_STATUS.get(found.info.status, "unknown")

    @property
    def stages(self) -> dict[str, StageResult]:
        """The finished stages in their order: kind, status, final metrics, artifacts, seconds.

        The status of a stage of a loaded run is `cached`.
        """
        if self._result is not None:
            return dict(self._result.stages)
        past, found = self._past, {}
        for name in past.resolved.order:
            identity = past.record.stages.get(name, "")
            result = past.store.lookup(name, identity, compare=False)[0] if identity else None
            if result is not None:
                found[name] = result
        return found

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """What the stages made, by `STAGE/KIND` (`rl/model`): each with `path` and `digest`."""
        made = (a for stage in self.stages.values() for a in stage.artifacts)
        return {f"{artifact.stage}/{artifact.kind}": artifact for artifact in made}

    def metrics(self, stage: str | None = None) -> pd.DataFrame:
        """The metrics of a stage: one row a step (the index), one column a metric.

        A stage without steps, such as an evaluation, has one row. Without `stage`, the final
        metrics of every finished stage, one row each. Raises `ConfigError` for a stage that the
        run does not have, and `ResourceError` for one with nothing on record.
        """
        import pandas as pd

        if stage is None:
            rows = {name: dict(result.metrics) for name, result in self.stages.items()}
            return pd.DataFrame.from_dict(rows, orient="index").rename_axis("stage")
        self._check(stage)
        try:
            steps, _ = step_rows(self._past, stage)
        except ResourceError:
            if stage not in self.stages:
                raise
            steps = {0: self.stages[stage].metrics}
        found = pd.DataFrame.from_dict({k: dict(v) for k, v in steps.items()}, orient="index")
        return found.sort_index().rename_axis("step")

    def samples(self, stage: str | None = None, step: int | None = None) -> pd.DataFrame:
        """The responses of an `rl` or `evaluate` stage, one row each.

        Of an rl stage: step, group, prompt, response, reward, `reward/NAME` of each component,
        advantage (the mean over the response's tokens) and more, of all steps that were kept or of
        `step`. Of an evaluation: prompt, answer, response (the greedy one), read (what was taken
        for its answer), correct, truncated, sampled_accuracy. Without `stage` those of the last
        stage that has some. Raises `ConfigError` for another stage or step, and `ResourceError`
        where nothing was kept.
        """
        import pandas as pd

        able = self._of_kinds(SAMPLED)
        name = stage or next(iter(reversed([n for n in able if n in self.stages] or able)), "")
        if name not in able:
            self._check(name)
            raise ConfigError(
                f"stage '{name}' keeps no samples; stages of this run that do: {able}"
            )
        if self.config.stages[name].kind == "evaluate":
            return pd.DataFrame(_evaluated(self._made(name, ("evaluation",)).path))
        from posttrain.core.tracking.tables import sample_rows

        rows: list[dict[str, object]] = []
        for found in read_steps(self._past.evidence(name), step):
            each = sample_rows(found.batch, found.component_names, limit=len(found.batch))
            rows += [{"step": found.step, **row} for row in each]
        return pd.DataFrame(rows)

    def model(self, stage: str | None = None) -> PreTrainedModel:
        """The model that a stage made, or the last model of the run, as transformers loads it.

        In evaluation mode, on the CPU, in the precision of its files. It is loaded at each call.
        Raises `ResourceError` for files that cannot be read.
        """
        import transformers

        from posttrain.core.models.loading import LOADING

        artifact = self._model(stage)
        loader: Any = transformers.AutoModelForCausalLM  # Any: transformers' own are not typed
        if artifact.kind == "reward_model":
            loader = transformers.AutoModelForSequenceClassification
        expected = "run the stage again (`--fresh`), or take another copy of the store"
        with LOADING, reading_model(f"model '{artifact.path}' cannot be loaded", expected):
            found = loader.from_pretrained(
                artifact.path,
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        model: PreTrainedModel = found.eval()
        return model

    def tokenizer(self, stage: str | None = None) -> PreTrainedTokenizerBase:
        """The tokenizer of that model; raises `ResourceError` for files that cannot be read."""
        from posttrain.core.data.tokens import load_tokenizer

        return load_tokenizer(self._model(stage).path)

    @property
    def links(self) -> dict[str, str]:
        """The run's pages in MLflow and Prefect; `posttrain ui` serves those of the home."""
        if self._result is not None:
            return links(self._result)
        found = self._in_mlflow
        if found is None:
            return {}
        known = RunResult(
            run_id=self.id,
            status=self.status,
            stages={},
            mlflow_uri=tracking_uri(self.home) or "",
            mlflow_run_id=self.id,
            mlflow_experiment_id=found.info.experiment_id,
            prefect_flow_run_id=found.data.tags.get("prefect.flow_run_id", ""),
            home=self.home,
            seconds=0.0,
        )
        return links(known)

    @property
    def _in_mlflow(self) -> Any:  # Any: MLflow's Run, which takes 2 s to import
        """MLflow's record of the run, or None."""
        uri = tracking_uri(self.home)
        if uri is None or not self.id:
            return None
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            return MlflowClient(tracking_uri=uri).get_run(self.id)
        except MlflowException:
            return None

    def _check(self, stage: str) -> None:
        known = self.config.stages
        if stage not in known:
            raise ConfigError(
                f"this run has no stage '{stage}'{nearest(stage, known)} (stages: {list(known)})"
            )

    def _of_kinds(self, kinds: tuple[str, ...]) -> list[str]:
        stages = self.config.stages
        return [n for n in self._past.resolved.order if stages[n].kind in kinds]

    def _made(self, stage: str, kinds: tuple[str, ...]) -> Artifact:
        """What the stage made of these kinds."""
        self._check(stage)
        found = next((a for k in kinds if (a := self.artifacts.get(f"{stage}/{k}"))), None)
        if found is None:
            raise ResourceError(
                f"stage '{stage}' of run {self._past.short_id} has made no {' or '.join(kinds)}; "
                f"there is: {list(self.artifacts) or 'nothing yet'}"
            )
        return found

    def _model(self, stage: str | None) -> Artifact:
        if stage is None:
            stages, order = self.config.stages, self._past.resolved.order
            able = [name for name in order if stages[name].makes == "model"]
            stage = next((n for n in reversed(able) if f"{n}/model" in self.artifacts), None)
        if stage is None:
            raise ResourceError(f"run {self._past.short_id} has made no model yet")
        return self._made(stage, MODELS)

    def __repr__(self) -> str:
        return f"<posttrain.Run {self.id[:12]} '{self.name}': {', '.join(self.config.stages)}>"

    def __str__(self) -> str:
        rows = [f"run {self.id[:12]} '{self.name}': {self.status}"]
        return "\n".join([*rows, *(f"  {' '.join(row)}" for row in self._rows())])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._rows()
        )
        pages = " · ".join(
            f'<a href="{html.escape(page)}">{name}</a>' for name, page in self.links.items()
        )
        title = html.escape(f"run {self.id[:12]} '{self.name}': {self.status}")
        return f"<b>{title}</b> {pages}<table>{rows}</table>"

    def _rows(self) -> list[tuple[str, ...]]:
        """Stage, kind, status and main metrics of the finished stages."""
        from posttrain.pipelines.run.progress import describe

        return [(s.name, s.kind, s.status, describe(s.metrics)) for s in self.stages.values()]


def _evaluated(folder: Path) -> list[Mapping[str, object]]:
    """The rows of an evaluation, with the texts that people read."""
    rows: list[Mapping[str, object]] = []
    for line in (folder / "rows.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        rows.append(
            {
                "prompt": row["problem"]["prompt"],
                "answer": row["problem"]["answer"],
                "response": row["greedy_text"],
                "read": row["parsed"],
                "correct": row["greedy_correct"],
                "truncated": row["truncated"],
                "sampled_accuracy": row["sampled_accuracy"],
            }
        )
    return rows
