"""Preference and reward-model stages from a file, on a tiny model, through a real pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.reporter import SilentReporter
from posttrain.core.store.artifacts import StageResult
from posttrain.pipelines.run.assembly import assemble
from posttrain.pipelines.run.pipeline import Pipeline
from posttrain.pipelines.run.planning import plan_stages

MANAGER = PluginManager()
QUESTIONS = [f"Word {i}?" for i in range(24)]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair_rows() -> list[dict[str, Any]]:
    """The short answer of one letter is preferred to that of another."""
    return [
        {"prompt": q, "chosen": "a" * (1 + i % 3), "rejected": "b" * (1 + i % 2), "margin": 0.5}
        for i, q in enumerate(QUESTIONS)
    ]


def label_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pair_rows()
        for side in ("chosen", "rejected")
    ]


def chat_rows() -> list[dict[str, Any]]:
    """The same preference in whole conversations, whose answers have two turns."""
    return [
        {
            side: [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row[side]},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": row[side]},
            ]
            for side in ("chosen", "rejected")
        }
        for row in pair_rows()
    ]


def config(folder: Path, stages: dict[str, Any]) -> ResolvedRun:
    written = {
        "name": "tiny",
        "engine": "transformers",
        "model": {"source": str(folder / "model"), "dtype": "float32", "max_model_len": 256},
        "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
        "evaluation": {"num_problems": 4, "max_response_length": 8, "num_samples": 0},
        "limits": {"num_threads": 1, "min_free_gb": 0.0},
        "stages": stages,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(written))
    return resolve(load_config([path]), MANAGER)


def stage(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "inputs": {"model": "base"},
        "batch_size": 5,
        "micro_batch_size": 3,
        "epochs": 4,
        "optimizer": {"learning_rate": 3.0e-3},
        **fields,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preference")
    make_tiny_model(made / "model")
    write_lines(made / "pairs.jsonl", pair_rows())
    write_lines(made / "labels.jsonl", label_rows())
    pq.write_table(pa.Table.from_pylist(chat_rows()), made / "chats.parquet")
    alike = [{"prompt": q, "chosen": "xxxa", "rejected": "xxxb"} for q in QUESTIONS]
    write_lines(made / "alike.jsonl", alike)
    return made


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[Pipeline]:
    pairs, labels = str(folder / "pairs.jsonl"), str(folder / "labels.jsonl")
    sampled = {"num_prompts": 32, "num_generations": 32, "batch_size": 4, "epochs": 1}
    stages = {
        "dpo": stage("preference", data=pairs, evaluate_every=8),
        "ipo": stage("preference", data=pairs, algorithm="ipo"),
        "kto": stage("preference", data=labels, algorithm="kto"),
        "simpo": stage("preference", data=pairs, preference_loss=["simpo", "sft"]),
        "falling": stage(
            "preference",
            data=str(folder / "alike.jsonl"),
            preference_loss=[{"name": "sft", "coef": -1}, "dpo"],
            both_falling_window=3,
        ),
        "rm": stage("reward_model", data=pairs),
        "chats": stage("preference", data=str(folder / "chats.parquet")),
        "chats_rm": stage("reward_model", data=str(folder / "chats.parquet")),
        "own": stage("preference", generation={"max_response_length": 4}, **sampled),
        "own_labels": stage(
            "preference",
            algorithm="kto",
            generation={"max_response_length": 4},
            **sampled,
        ),
    }
    resolved = config(folder, stages)
    made = assemble(
        resolved, folder / "home", MANAGER, SilentReporter(), no_cache=False, fresh=False
    )
    yield made
    made.engines.close()
    made.tracker.finish("FINISHED")


def run(pipeline: Pipeline, name: str) -> Mapping[str, float]:
    result: StageResult = pipeline.run_stage(name, {})
    assert result.status == "ran"
    return result.metrics


@pytest.mark.parametrize(
    "name",
    ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ipo", "kto", "simpo"))],
)
def test_a_toy_preference_is_learned_and_holds_for_other_prompts(
    pipeline: Pipeline, name: str
) -> None:
    metrics = run(pipeline, name)
    # At the start policy and reference agree, so that no pair is ranked right.
    assert metrics["pref/held_out_pair_accuracy"] == 1.0
    assert metrics["pref/held_out_low"] > 0.5 and metrics["pref/held_out_high"] == 1.0
    assert metrics["pref/held_out_margin"] > 0
    assert metrics["rewards/margin"] > 0
    per_prompt = 2 if name == "kto" else 1
    assert metrics["pref/num_held_out_rows"] == 5 * per_prompt
    assert metrics["pref/num_rows"] == 19 * per_prompt
    made = {item.kind: item.path for item in pipeline.results[name].artifacts}
    assert (made["model"] / "model.safetensors").is_file()
    assert (made["report"] / "learning_curves.png").is_file()


def test_a_stage_warns_when_both_answers_become_less_likely(pipeline: Pipeline) -> None:
    # The chosen answers are unlearned, and the rejected ones begin alike.
    metrics = run(pipeline, "falling")
    warned = [
        text for text in pipeline.warnings if text.startswith("falling: alarm both_falling: step ")
    ]
    assert len(warned) == 1 and "dpop_lambda" in warned[0]
    assert metrics["pref/both_falling"] > 0.5


def test_a_reward_model_learns_from_a_file(pipeline: Pipeline) -> None:
    metrics = run(pipeline, "rm")
    assert metrics["rm/held_out_pair_accuracy"] == 1.0 and metrics["rm/num_pairs"] == 19
    assert metrics["rm/reward/max"] > metrics["rm/reward_mean"] > metrics["rm/reward/min"]


def test_policies_and_reward_models_learn_from_conversations(pipeline: Pipeline) -> None:
    metrics = run(pipeline, "chats")
    assert metrics["pref/held_out_pair_accuracy"] == 1.0 and metrics["pref/num_rows"] == 19
    metrics = run(pipeline, "chats_rm")
    assert metrics["rm/held_out_pair_accuracy"] == 1.0 and metrics["rm/num_pairs"] == 19


@pytest.mark.parametrize("name", ["own", "own_labels"])
def test_preferences_may_come_from_the_models_own_answers(pipeline: Pipeline, name: str) -> None:
    """A random model hits a one-digit sum now and then; those answers are preferred."""
    metrics = run(pipeline, name)
    assert metrics["pref/num_rows"] >= 2 and "loss/preference" in metrics


def test_another_file_is_another_stage(pipeline: Pipeline, folder: Path) -> None:
    def plan() -> dict[str, tuple[bool, str]]:
        stages = {"dpo": stage("preference", data=str(folder / "pairs.jsonl"), evaluate_every=8)}
        planned = plan_stages(config(folder, stages), folder / "home", MANAGER)
        return {one.name: (one.cached, str(one.reason)) for one in planned}

    pipeline.run_stage("dpo", {})
    assert plan()["dpo"][0] is True
    original = pair_rows()
    try:
        write_lines(folder / "pairs.jsonl", original[:-1])
        cached, reason = plan()["dpo"]
        assert not cached and "the content of stages.dpo.data changed" in reason
    finally:
        write_lines(folder / "pairs.jsonl", original)


def test_ktos_mini_batches_are_checked_before_the_first_step(folder: Path) -> None:
    rows = [{"prompt": "One?", "completion": "a" * (1 + i), "label": i % 2 == 0} for i in range(30)]
    rows.append({"prompt": "Other?", "completion": "b", "label": True})
    path = write_lines(folder / "one_prompt.jsonl", rows)
    stages = {"kto": stage("preference", data=str(path), algorithm="kto")}
    made = assemble(
        config(folder, stages),
        folder / "other_home",
        MANAGER,
        SilentReporter(),
        no_cache=False,
        fresh=False,
    )
    try:
        with pytest.raises(DataError, match="one prompt only.*raise batch_size"):
            made.run_stage("kto", {})
    finally:
        made.tracker.finish("FAILED")
