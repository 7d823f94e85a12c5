"""Stages that make and read data sets, on a tiny model, through a real pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.estimate.tokens import RunData
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.reporter import SilentReporter
from posttrain.pipelines.api.planned import stage_rows
from posttrain.pipelines.run.assembly import assemble
from posttrain.pipelines.run.pipeline import Pipeline
from posttrain.pipelines.run.planning import plan_stages
from posttrain.pipelines.run.storing import StageWork
from posttrain.pipelines.stage.files import StageFiles
from posttrain.pipelines.stages.rl import build_loop

MANAGER = PluginManager()
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "gsm8k"
TRANSFORM = {
    "kind": "transform",
    "inputs": {"model": "base"},
    "prompt": "Rewrite {question} Its answer is {answer}",
    "num_solutions": 2,
    "batch_size": 20,
    "generation": {"max_response_length": 4},
}
RL = {
    "kind": "rl",
    "inputs": {"model": "base", "dataset": "integers"},
    "steps": 2,
    "prompts_per_step": 3,
    "num_generations": 2,
    "generation": {"max_response_length": 4},
    "evaluate_every": 0,
}


def write(folder: Path, task: dict[str, Any], stages: dict[str, Any]) -> ResolvedRun:
    config = {
        "name": "tiny",
        "engine": "transformers",
        "model": {"source": str(folder / "model"), "dtype": "float32", "max_model_len": 512},
        "task": task,
        "evaluation": {"num_problems": 4, "max_response_length": 4, "num_samples": 0},
        "limits": {"num_threads": 1, "min_free_gb": 0.0},
        "stages": stages,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return resolve(load_config([path]), MANAGER)


def start(folder: Path, resolved: ResolvedRun) -> Pipeline:
    return assemble(
        resolved, folder / "home", MANAGER, SilentReporter(), no_cache=False, fresh=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("transform")
    make_tiny_model(made / "model")
    rows = [{"prompt": f"Find {i}.", "answer": f"{i}/7"} for i in range(1, 31)]
    rows += [{"prompt": f"Say {i}.", "answer": "blue"} for i in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (made / "forms.jsonl").write_text(text)
    return made


@pytest.fixture(scope="module")
def forms(folder: Path) -> Iterator[Pipeline]:
    task = {"name": "jsonl", "path": str(folder / "forms.jsonl"), "match": "exact"}
    stages = {"integers": TRANSFORM, "rl": RL}
    pipeline = start(folder, write(folder, {**task, "held_out_permille": 200}, stages))
    yield pipeline
    pipeline.engines.close()
    pipeline.tracker.finish("FINISHED")


def datasets_of(pipeline: Pipeline, run_id: str) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Context -> (digest, profile, source) of what MLflow shows as the run's inputs."""
    inputs = MlflowClient(pipeline.tracker.uri).get_run(run_id).inputs.dataset_inputs
    return {
        item.tags[0].value: (
            item.dataset.digest,
            json.loads(item.dataset.profile),
            json.loads(item.dataset.source)["uri"],
        )
        for item in inputs
    }


def test_rl_trains_on_the_rewritten_problems_of_a_transform_stage(
    forms: Pipeline, folder: Path
) -> None:
    made = forms.run_stage("integers", {})
    artifact = made.artifact("dataset")
    rows = [json.loads(x) for x in (artifact.path / "problems.jsonl").read_text().splitlines()]
    dropped = [json.loads(x) for x in (artifact.path / "dropped.jsonl").read_text().splitlines()]
    assert made.metrics["transform/kept"] == len(rows) > 15
    assert made.metrics["transform/num_problems"] == len(rows) + len(dropped)
    for row in rows:
        top, bottom = row["original"]["answer"].split("/")
        if row["how"] == "rule" and int(top) % 7:
            assert int(row["answer"]) == int(top) + int(bottom)
            assert row["prompt"].startswith(row["original"]["prompt"])
    # A random model writes no rewriting, so what no rule fits is dropped and says why.
    assert dropped and {row["reason"] for row in dropped} == {"unparsed"}
    assert made.metrics["transform/dropped/unparsed"] == len(dropped)

    # The loop as the stage builds it; a whole run of it would start a Prefect server.
    stage = forms.config.stages["rl"]
    assert isinstance(stage, RlStage)
    tracker = forms.tracker.stage("rl", "rl", {}, resumed_step=None)
    inputs = {"model": forms.base, "dataset": artifact}
    files = StageFiles(folder / "kept", forms.config.keep, forms.warn)
    work = StageWork("rl", stage, inputs, "", {}, files)
    context = forms._context(work, folder / "out", tracker)
    with forms.engines.lease(context.model_dir) as engine:
        loop = build_loop(context, stage, engine, context.tokenizer(), None)
    problems = [prompt.problem for prompt in loop.rollouts.prompts.prompts]
    assert len(problems) == 6
    assert {p.prompt for p in problems} <= {row["prompt"] for row in rows}
    batch = loop.rollouts.sample(1).rows
    assert {p.prompt for p in batch.problems} <= {row["prompt"] for row in rows}
    tracker.finish("FINISHED")
    digest, profile, source = datasets_of(forms, tracker.run_id)["train"]
    assert source == f"stage integers: {artifact.uri}" and profile["num_rows"] == 6
    assert profile["source_sha256"] == artifact.digest and profile["sha256"].startswith(digest)


def test_a_data_set_is_reused_and_a_changed_prompt_makes_it_anew(
    forms: Pipeline, folder: Path
) -> None:
    made = forms.run_stage("integers", {})
    assert made.status == "cached"
    plans = {plan.name: plan for plan in plan_stages(forms.resolved, folder / "home", MANAGER)}
    assert plans["integers"].cached
    task = forms.config.task.model_dump(mode="json")
    changed = write(folder, task, {"integers": {**TRANSFORM, "agreement": 0.25}, "rl": RL})
    plan = plan_stages(changed, folder / "home", MANAGER)[0]
    assert not plan.cached and "stages.integers.agreement 0.5 -> 0.25" in str(plan.reason)
    data = RunData(changed.config, MANAGER)
    rows, problems = stage_rows(changed.config, changed.order, {}, data), data.count("train", 256)
    assert 0 < problems < 256, "the file has fewer than num_problems"
    assert f"at most {problems} problems x (1 rewriting + 2 solutions)" in str(
        rows[0]["arithmetic"]
    )


def test_a_data_set_of_nothing_is_an_error_with_the_reasons(folder: Path) -> None:
    (folder / "words.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {i}.", "answer": "blue"}) + "\n" for i in range(30))
    )
    task = {"name": "jsonl", "path": str(folder / "words.jsonl"), "match": "exact"}
    stage = {**TRANSFORM, "rewrite": "rules"}
    pipeline = start(folder, write(folder, task, {"integers": stage}))
    with pytest.raises(DataError, match=r"kept none of \d+ problems \(no_rule: its answer is no"):
        pipeline.run_stage("integers", {})
    pipeline.engines.close()
    pipeline.tracker.finish("FAILED")


@pytest.mark.parametrize(
    ("stage", "reported"),
    [
        ({**RL, "inputs": {"model": "base", "dataset": "base"}}, "makes a model, not a dataset"),
        ({**RL, "inputs": {"model": "integers"}}, "makes a dataset, not a model"),
        ({**TRANSFORM, "inputs": {"model": "base", "dataset": "integers"}}, "unknown input"),
        ({**TRANSFORM, "prompt": "Rewrite {question}."}, r"expected a text with \{question\} and"),
        ({**TRANSFORM, "generation": {"temperature": 0}}, "at 0 all responses"),
    ],
)
def test_wrong_settings_are_told_before_a_run(
    folder: Path, stage: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        write(folder, {"name": "arithmetic"}, {"integers": TRANSFORM, "other": stage})


# --- preferences that the task brings -----------------------------------------------------------


def preference(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "inputs": {"model": "base"}, "data": "task", "batch_size": 4, **fields}


@pytest.mark.parametrize("kind", ["preference", "reward_model"])
def test_the_marked_solutions_of_gsm8k_train_a_preference_stage(folder: Path, kind: str) -> None:
    make_tiny_model(folder / "model")  # 512 positions, and a solution has up to 300 characters
    task = {
        "name": "gsm8k",
        "path": str(SAMPLE),
        "solutions": str(SAMPLE / "example_model_solutions.jsonl"),
        "prompt": "{question}",
        "pairs_per_question": 1,
    }
    pipeline = start(folder, write(folder, task, {"learn": preference(kind)}))
    result = pipeline.run_stage("learn", {})
    group, rows = ("rm", "pairs") if kind == "reward_model" else ("pref", "rows")
    assert result.metrics[f"{group}/num_{rows}"] >= 4
    assert result.metrics[f"{group}/num_held_out_{rows}"] >= 1
    digest, profile, source = datasets_of(pipeline, result.mlflow_run_id)["preferences"]
    assert profile["sha256"].startswith(digest) and source.endswith("solutions.jsonl")
    (plan,) = plan_stages(pipeline.resolved, folder / "home", MANAGER)
    assert plan.cached
    data = RunData(pipeline.config, MANAGER)
    text = stage_rows(pipeline.config, pipeline.resolved.order, {}, data)[0]["arithmetic"]
    assert "10 rows of task 'gsm8k', at most 8 to train on" in str(text), "one is too long"
    pipeline.engines.close()
    pipeline.tracker.finish("FINISHED")


@pytest.mark.parametrize(
    ("task", "fields", "reported"),
    [
        ("arithmetic", {}, r"task 'arithmetic' brings no preferences; .* tasks \['gsm8k'\]"),
        ("gsm8k", {"algorithm": "kto"}, "a task brings pairs, and 'kto' reads labelled answers"),
        ("gsm8k", {"num_generations": 4}, "says how answers are sampled, but `data` gives them"),
    ],
)
def test_a_task_or_a_loss_that_does_not_fit_is_told_before_a_run(
    folder: Path, task: str, fields: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        write(folder, {"name": task}, {"learn": preference("preference", **fields)})
