"""SFT and reward model on a tiny Llama: what takes loss, what is a pair, what is read where."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.config.sections import ModelSection, OptimizerSection
from posttrain.core.contracts import PairLoss, Reward, RewardContext, Task
from posttrain.core.data.preference import Pair
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models import device
from posttrain.core.models import linear as wide_products
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy, load_reward_model, save_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.reward_model import (
    pairs_in_order,
    reward_step,
    score_batch_rows,
    score_pairs,
)
from posttrain.core.training.sft import sft_step, worked_batch
from posttrain.core.types import Problem, RewardSample, Verdict

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
# Float64 throughout (eager attention would take its softmax in float32), so that ways to batch are
# apart only by how a score is rounded to float32 in the end: one place, for scores below 16.
EXACT = ModelRuntime(torch.device("cpu"), torch.float64, "sdpa")
LAST_PLACE = 1e-6
PROBLEM = Problem("k", "p", "a", "w")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_sft_takes_loss_on_the_response_and_its_end_only(
    model_dir: Path, manager: PluginManager
) -> None:
    tokenizer = ChatTokenizer.load(model_dir)
    problems = manager.build(Task, "arithmetic").problems("train", 3, 0)
    batch = worked_batch(tokenizer, problems)
    for row, problem in enumerate(problems):
        ids = batch.response_ids[row][batch.mask[row].bool()].tolist()
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode_response(ids) == problem.worked


def test_sft_learns_a_worked_answer_and_does_not_depend_on_the_split(
    model_dir: Path, manager: PluginManager
) -> None:
    tokenizer = ChatTokenizer.load(model_dir)
    problems = manager.build(Task, "arithmetic").problems("train", 5, 0)
    curves = []
    for micro in (5, 2):
        model = load_policy(model_dir, RUNTIME)
        optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 20)
        batch = worked_batch(tokenizer, problems)
        steps = [sft_step(model, optimizer, batch, micro_batch_size=micro) for _ in range(20)]
        curves.append([step["sft/loss"] for step in steps])
    assert curves[0][-1] < 0.5 * curves[0][0]
    assert curves[0][:3] == pytest.approx(curves[1][:3], rel=1e-3)


def reward_pairs() -> list[Pair]:
    return [Pair("k", (4, 5), (10 + i,), (40 + i, 7), margin=0.1 * i) for i in range(6)]


def test_a_new_reward_model_scores_0_and_its_first_loss_is_ln_2(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_reward_model(model_dir, RUNTIME, new_head=True)
    pairs = [replace(pair, margin=0.0) for pair in reward_pairs()]
    loss = manager.build(PairLoss, "bradley_terry")
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 10)
    first = reward_step(model, optimizer, pairs, loss, micro_batch_size=4)
    assert first["loss/preference"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rm/pair_accuracy"] == 0.0  # a tie is not a hit
    for _ in range(9):
        last = reward_step(model, optimizer, pairs, loss, micro_batch_size=4)
    assert last["loss/preference"] < 0.3
    assert pairs_in_order(model, pairs, batch_size=4) == [True] * 6


def test_a_pairs_own_margin_enters_its_loss_and_the_split_does_not_matter(
    model_dir: Path, manager: PluginManager
) -> None:
    loss, found = manager.build(PairLoss, "bradley_terry", {"centre_coef": 0.1}), []
    for micro in (6, 4, 1):
        model = load_reward_model(model_dir, RUNTIME, new_head=True)
        optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 3)
        steps = [
            reward_step(model, optimizer, reward_pairs(), loss, micro_batch_size=micro)
            for _ in range(3)
        ]
        found.append([step["loss/preference"] for step in steps])
    margins = [math.log1p(math.exp(0.1 * i)) for i in range(6)]
    assert found[0][0] == pytest.approx(sum(margins) / 6, rel=1e-6)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_the_reward_is_read_at_the_last_token_with_or_without_shared_prompts(
    model_dir: Path, tmp_path: Path, manager: PluginManager
) -> None:
    model = load_reward_model(model_dir, EXACT, new_head=True)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(model.get_submodule("score").weight, generator=generator)
    prompts = [(10, 11, 12), (10, 11, 12), (20, 21)]
    responses = [(30,), (31, 32, 33), (34, 35)]
    batch = response_batch(
        prompts=prompts,
        responses=responses,
        group_ids=[0, 0, 1],
        pad_token_id=0,
        problems=[PROBLEM] * 3,
    )
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        shared = score_batch_rows(model, batch)
        apart = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
        pair = score_pairs(model, [Pair("k", prompts[0], responses[0], responses[1])])
    torch.testing.assert_close(shared.double(), apart, rtol=0, atol=LAST_PLACE)
    both = torch.cat([pair.chosen, pair.rejected])
    torch.testing.assert_close(both.double(), apart[:2], rtol=0, atol=LAST_PLACE)

    save_model(model, ChatTokenizer.load(model_dir).tokenizer, tmp_path / "rm")
    reward = manager.build(Reward, "reward_model", {"transform": "none"})
    assert reward.needs_inputs == {"reward_model"}
    inputs = {"reward_model": tmp_path / "rm"}
    reward.setup(RewardContext(inputs, EXACT.dtype, EXACT.device, EXACT.attention, 2))
    samples = [
        RewardSample(PROBLEM, p, r, "", False, Verdict(0.0, None))
        for p, r in zip(prompts, responses, strict=True)
    ]
    values = [score.value for score in reward.score(samples)]
    assert values == pytest.approx(apart.tolist(), abs=LAST_PLACE)


def test_auto_is_what_the_machine_is_fast_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "CPU_EMULATES", False)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device, "has_bfloat16_instructions", lambda fast=fast: fast)
        found = ModelRuntime.from_config(ModelSection(device="cpu"))
        assert (found.dtype, found.attention, found.plain_attention) == (dtype, "stream", "eager")
    given = ModelRuntime.from_config(ModelSection(device="cpu", dtype="bfloat16", attention="sdpa"))
    assert (given.dtype, given.plain_attention) == (torch.bfloat16, "sdpa")
