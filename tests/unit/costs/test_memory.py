"""Bytes held and bytes left, against tensors and files that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.costs import reuse
from posttrain.core.costs.estimate import StageCost
from posttrain.core.training import logprobs
from posttrain.core.training.optim import MasterOptimizer
from tests.helpers.costs import estimator, run_config
from tests.helpers.tiny import make_tiny_model

SFT: dict[str, Any] = {"kind": "sft", "inputs": {"model": "base"}}
RL: dict[str, Any] = {
    "reuse_outputs": False,
    "kind": "rl",
    "inputs": {"model": "base"},
    "kl": {"controller": {"name": "fixed", "coef": 0.1}},
    "generation": {"max_response_length": 8},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def cost(folder: Path, stage: dict[str, Any], **sections: Any) -> StageCost:
    return estimator(run_config(folder, {"it": stage}, **sections)).costs(["it"])["it"]


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (torch.float32, "masters"),
        (torch.bfloat16, "masters"),
        (torch.bfloat16, "stochastic"),
    ],
)
def test_a_model_in_training_holds_what_the_optimizer_holds(
    model: Path, dtype: torch.dtype, rounding: Literal["masters", "stochastic"]
) -> None:
    name, section = str(dtype).removeprefix("torch."), OptimizerSection(rounding=rounding)
    stage = {**SFT, "optimizer": {"rounding": rounding}}
    held = cost(model, stage, model={"dtype": name}).memory.held
    real = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    optimizer = MasterOptimizer(real, section, 1)
    optimizer.fill_gradients()
    weights = {id(parameter) for parameter in real.parameters()}
    masters = [m for m in optimizer._masters if id(m) not in weights]
    gradients = [m.grad for m in optimizer._masters]
    optimizer.step()
    moments = [s[k] for s in optimizer.state_dict()["adamw"]["state"].values() for k in MOMENTS]
    real_bytes = {
        "weights": size(real.parameters()),
        "masters": size(masters),
        "gradients": size(gradients),
        "moments": size(moments),
    }
    assert {name: held[name] for name in real_bytes} == real_bytes


MOMENTS = ("exp_avg", "exp_avg_sq")


def size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_lora_shrinks_gradients_and_moments_and_its_reference_is_free(model: Path) -> None:
    plain, lora = cost(model, RL).memory, cost(model, {**RL, "lora": {"rank": 2}}).memory
    for name in ("gradients", "moments"):
        assert lora.held[name] < plain.held[name] / 4
    assert plain.held["reference"] == plain.held["weights"] and "reference" not in lora.held
    assert lora.peak < plain.peak


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"critic": {}, "advantage": "gae"}, "critic's moments"),
        (
            {"rewards": ["reward_model"], "inputs": {"model": "base", "reward_model": "r"}},
            "reward models",
        ),
    ],
)
def test_more_models_take_more(model: Path, fields: dict[str, Any], name: str) -> None:
    stages = {"r": {"kind": "reward_model", "inputs": {"model": "base"}}, "rl": RL | fields}
    more = estimator(run_config(model, stages)).costs(["rl"])["rl"].memory
    assert more.held[name] > 0 and more.peak > cost(model, RL).memory.peak


def test_larger_micro_batches_keep_more_for_the_backward_pass(model: Path) -> None:
    few, many = (
        cost(model, {**RL, "micro_batch_size": n}).memory.passing["training"] for n in (8, 32)
    )
    assert many > 2 * few


def test_products_of_sampling_are_kept_until_the_last_micro_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all logits until the last, whose gradients take the place of its own.

    Where logits are made they are made of 64 tokens at a time.
    """
    vocabulary = estimator(run_config(model, {"rl": RL})).work.shape.vocabulary
    monkeypatch.setattr(logprobs, "CPU_CHUNK_BYTES", 4 * 64 * vocabulary)
    logits = made = 0.0
    for most, micro, left in ((0, 32, 0.0), (0, 8, 0.75), (10**9, 32, 0.0), (10**9, 8, 0.75)):
        monkeypatch.setattr(reuse, "MAX_LOGITS_BYTES", most)
        stage = {**RL, "micro_batch_size": micro, "prompts_per_step": 4, "num_generations": 8}
        stage["kl"] = {"controller": {"name": "fixed", "coef": 0.0}}
        if most:
            states = 4 + 32 * (stage["generation"]["max_response_length"] - 1)
            logits, made = 4.0 * states * vocabulary, 4.0 * 64 * vocabulary
        without, with_them = (
            cost(model, {**stage, "reuse_outputs": keeps}).memory.passing for keeps in (False, True)
        )
        kept = with_them["sampling"] - without["sampling"] - logits
        assert kept > 0
        more = with_them["training"] - without["training"]
        assert more == pytest.approx(left * kept + (logits if left else logits - made))


def test_the_engine_stays_once_it_was_needed(model: Path) -> None:
    stages = {
        "first": SFT,
        "judge": {"kind": "evaluate", "inputs": {"model": "first"}},
        "second": {**SFT, "inputs": {"model": "first"}},
    }
    found = estimator(run_config(model, stages)).costs(list(stages))
    assert [("engine" in found[name].memory.held) for name in stages] == [False, True, True]
    elsewhere = estimator(run_config(model, stages), engine="vllm_server").costs(["judge"])
    assert "engine" not in elsewhere["judge"].memory.held


def test_a_saved_model_is_as_large_as_its_folder(model: Path) -> None:
    left = cost(model, SFT, keep={"records": 0}).disk.left
    real = sum(path.stat().st_size for path in model.iterdir())
    assert left == pytest.approx(real, rel=0.05)


def test_checkpoints_are_there_only_while_the_stage_runs(model: Path) -> None:
    none, some = (cost(model, {**RL, "steps": 8, "checkpoint_every": n}).disk for n in (0, 3))
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert none.left == some.left and none.passing == 0
    assert some.passing == 2 * 12 * parameters


def test_checkpoints_that_stay_are_counted_as_left_and_newer_ones_as_passing(model: Path) -> None:
    each = 12 * AutoModelForCausalLM.from_pretrained(model).num_parameters()
    stage = {**RL, "steps": 9, "checkpoint_every": 3}
    plain, some = (cost(model, stage, keep=keep).disk for keep in ({}, {"every": 2}))
    assert some.left == plain.left + 4 * each, "after steps 2, 4, 6 and 8"
    assert (plain.passing, some.passing) == (2 * each, each), "of 3 and 6, 6 stays"
    three = cost(model, {**stage, "checkpoint_every": 1}, keep={"checkpoints": 3}).disk
    assert three.passing == 4 * each, "the newest three, and one more for a moment"


def test_records_of_steps_are_counted(model: Path) -> None:
    stage = {**RL, "steps": 8}
    left = [cost(model, stage, keep={"records": n}).disk.left for n in (0, 2, 1)]
    assert left[1] - left[0] == pytest.approx((left[2] - left[0]) / 2) and left[1] > left[0]
    digests = cost(model, stage, keep={"values": False}).disk.left
    assert left[0] < digests < left[2]


def test_no_more_sequences_are_held_than_there_are_problems(model: Path) -> None:
    """However many could be decoded together."""

    def held(problems: int, batch: int = 64) -> float:
        section = {"num_problems": problems, "num_samples": 0, "batch_size": batch}
        stage = {"kind": "evaluate", "inputs": {"model": "base"}, "evaluation": section}
        return cost(model, stage).memory.passing["sampling"]

    assert held(4) == pytest.approx(held(64) / 16, rel=0.2)
    assert held(4) == held(4, batch=4) and held(64, batch=4) == held(4, batch=4)
