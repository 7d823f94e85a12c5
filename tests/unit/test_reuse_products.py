"""Which rl stages let the engine keep what it computes, and that their update then takes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.rl_stage import RlStage
from posttrain.pipelines.pipeline import Pipeline
from posttrain.pipelines.rl.step import RlLoop
from posttrain.pipelines.stages.rl import build_loop
from tests.helpers.tiny import make_tiny_model
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
REFUSED = {
    "off": ({"reuse_products": False}, None),
    "stale": ({"max_staleness": 1}, "older policy"),
    "corrected": ({"rollout_correction": {"plugin": "tis_token"}}, "correction"),
    "reference": ({"kl": {"controller": {"name": "fixed", "coef": 0.1}}}, "reference"),
    "lora": ({"lora": {"rank": 2}}, "adapter"),
    "trust_region": ({"algorithm": "trpo", "critic": {}}, "trust region"),
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("reuse")
    make_tiny_model(folder / "model")
    stages = {"kept": RL} | {name: RL | fields for name, (fields, _) in REFUSED.items()}
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
    context = pipeline._context(name, stage, inputs, folder / "out", folder / "kept", tracker)
    with pipeline.engines.lease(context.model_dir) as engine:
        loop = build_loop(context, stage, engine)
    tracker.finish("FINISHED")
    return loop


@pytest.mark.parametrize("name", REFUSED)
def test_a_stage_that_cannot_says_why(
    pipeline: Pipeline, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = REFUSED[name][1]
    with caplog.at_level(logging.INFO, "posttrain"):
        loop = loop_of(pipeline, name, tmp_path)
    assert not loop.rollouts.keep_products
    said = [r.message for r in caplog.records if "all products of its forward pass" in r.message]
    assert [reason in text for text in said if reason] == ([True] if reason else [])
    assert loop.rollouts.sample(1).products is None


def test_a_step_takes_what_its_rollout_computed(pipeline: Pipeline, tmp_path: Path) -> None:
    loop = loop_of(pipeline, "kept", tmp_path)
    assert loop.rollouts.keep_products
    sampled = loop.rollouts.sample(1)
    assert sampled.products is not None and sampled.products.layers
    taken, _ = loop.take(sampled)
    assert taken
    scored, _ = loop.score_rewards(sampled)
    ready, _ = loop.compute_advantages(scored)
    _, metrics = loop.update_policy(ready)
    assert metrics["train/reused_rows"] == 12
    assert metrics["mismatch/abs_max"] < 1e-4
    assert not sampled.products.layers and not sampled.products.logits
