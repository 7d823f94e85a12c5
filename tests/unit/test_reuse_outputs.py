"""Which rl stages reuse the linear outputs of sampling, and that their update then does so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.rl.rollouts import Rollout
from posttrain.pipelines.rl.step import RlLoop
from posttrain.pipelines.run.pipeline import Pipeline
from posttrain.pipelines.run.storing import StageWork
from posttrain.pipelines.stage.files import StageFiles
from posttrain.pipelines.stages.rl import build_loop
from tests.unit.test_stage_transform import start, write

RL: dict[str, Any] = {
    "kind": "rl",
    "inputs": {"model": "base"},
    "steps": 2,
    "prompts_per_step": 3,
    "num_generations": 4,
    "generation": {"max_response_length": 6},
    "skip_idle_rows": False,
    "evaluate_every": 0,
    "kl": {"controller": {"name": "fixed", "coef": 0.0}},
}
KL = {"controller": {"name": "fixed", "coef": 0.1}}
WITH_REFERENCE = {
    "kl_loss": {"kl": KL | {"place": "loss"}},
    "kl_reward": {"kl": KL | {"place": "reward", "estimator": "k1"}},
}
REFUSED = {
    "off": ({"reuse_outputs": False}, "reuse_outputs"),
    "stale": ({"max_staleness": 1}, "older policy"),
    "corrected": ({"rollout_correction": {"plugin": "tis_token"}}, "correction"),
    "lora": ({"lora": {"rank": 2}}, "adapter"),
    "trust_region": ({"algorithm": "trpo", "critic": {}}, "trust region"),
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("reuse")
    make_tiny_model(folder / "model")
    stages = {"plain": RL} | {name: RL | fields for name, fields in WITH_REFERENCE.items()}
    stages |= {name: RL | fields for name, (fields, _) in REFUSED.items()}
    made = start(folder, write(folder, {"name": "arithmetic"}, stages))
    yield made
    made.engines.close()
    made.tracker.finish("FINISHED")


def loop_of(pipeline: Pipeline, name: str, folder: Path) -> RlLoop:
    """The loop as the stage builds it."""
    stage = pipeline.config.stages[name]
    assert isinstance(stage, RlStage)
    tracker = pipeline.tracker.stage(name, "rl", {}, resumed_step=None)
    inputs = {"model": pipeline.base}
    files = StageFiles(folder / "kept", pipeline.config.keep, pipeline.warn)
    work = StageWork(name, stage, inputs, "", {}, files)
    context = pipeline._context(work, folder / "out", tracker)
    with pipeline.engines.lease(context.model_dir) as engine:
        loop = build_loop(context, stage, engine, context.tokenizer(), None)
    tracker.finish("FINISHED")
    return loop


@pytest.mark.parametrize("name", REFUSED)
def test_a_stage_that_cannot_says_why(
    pipeline: Pipeline, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = REFUSED[name][1]
    with caplog.at_level(logging.INFO, "posttrain"):
        loop = loop_of(pipeline, name, tmp_path)
    said = [r.message for r in caplog.records if "computes all linear outputs itself" in r.message]
    assert [reason in text for text in said] == [True]
    assert loop.rollouts.sample(1).products is None


def take_step(loop: RlLoop, step: int) -> tuple[Rollout, Mapping[str, float]]:
    """One step phase by phase: the rollout it was trained on, and the update's metrics."""
    rollout = loop.rollouts.sample(step)
    taken, _ = loop.take(rollout)
    assert taken
    scored, _ = loop.score_rewards(rollout)
    ready, _ = loop.compute_advantages(scored)
    _, metrics = loop.update_policy(ready)
    loop.sync_weights(step)
    return rollout, metrics


def test_a_step_reuses_what_its_rollout_computed(pipeline: Pipeline, tmp_path: Path) -> None:
    rollout, metrics = take_step(loop_of(pipeline, "plain", tmp_path), 1)
    assert metrics["train/reused_rows"] == 12
    assert metrics["mismatch/abs_max"] < 1e-4
    assert rollout.products is not None, "recorded"
    assert not rollout.products.layers and not rollout.products.logits, "and dropped"


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_with_a_reference_reuse_begins_when_the_policy_has_left_it(
    pipeline: Pipeline, name: str, tmp_path: Path
) -> None:
    loop = loop_of(pipeline, name, tmp_path)
    rollout, metrics = take_step(loop, 1)
    assert rollout.products is None and metrics["train/reused_rows"] == 0
    if name == "kl_loss":
        assert metrics["kl/ref_k1"] == 0.0, "exactly: the policy is its reference"
    with torch.no_grad():  # whatever the first step did
        loop.learner.model.get_output_embeddings().weight[3] += 0.01  # type: ignore[no-untyped-call]
    loop.sync_weights(1)
    rollout, metrics = take_step(loop, 2)
    assert rollout.products is not None and metrics["train/reused_rows"] == 12
    assert metrics["mismatch/abs_max"] < 1e-4
