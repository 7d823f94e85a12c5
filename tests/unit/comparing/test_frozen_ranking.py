"""Ranking on frozen rollouts: the sketch against autograd, draws against the steps they are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.analysis.frozen import FrozenStep, evaluate, freeze
from posttrain.core.analysis.gradient_quality import (
    drawn,
    gradient_sketch,
    measure,
    policy_gradient_weights,
    pooled,
)
from posttrain.core.errors import ConfigError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.rollouts import load_tiny
from tests.unit.comparing.test_variant import STEP, frozen_evidence, variant

MANAGER = PluginManager()
WHOLE = UpdateSettings(epochs=1, num_mini_batches=1, micro_batch_size=4, temperature=0.8, seed=5)


def frozen(seed: int = 0) -> FrozenStep:
    """Two groups of three."""
    return freeze(frozen_evidence(WHOLE, seed), WHOLE)


def test_a_sketch_is_the_gradient_along_its_directions(tmp_path: Path) -> None:
    model = load_tiny(make_tiny_model(tmp_path / "model", layers=1, hidden=8), torch.float32)
    step, directions = frozen(), 5
    found = gradient_sketch(model, step, directions, seed=3)
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(step.logprobs.shape, generator=draw) * step.batch.mask
    logprobs = response_logprobs(model, step.batch, temperature=WHOLE.temperature).logprobs
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    again = torch.Generator().manual_seed(3)
    vectors = [torch.randn(len(gradient), generator=again) / directions**0.5 for _ in range(5)]
    wanted = torch.stack([vector @ gradient for vector in vectors])
    torch.testing.assert_close(
        torch.einsum("bt,btk->k", weights, found), wanted, rtol=1e-4, atol=1e-5
    )
    assert not found[~step.tokens].any() and wanted.abs().min() > 0


def test_a_batch_drawn_whole_is_the_step_it_was_drawn_of() -> None:
    step = frozen()
    wide = replace(step, batch=step.batch.with_columns(group_id=step.batch.group_id + 7))
    pool = pooled([step, wide])
    groups = list(pool.batch.groups())
    assert [group.tolist() for group in groups] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]
    ]  # fmt: skip
    again, rows = drawn(pool, [groups[2], groups[3]])
    assert rows.tolist() == [6, 7, 8, 9, 10, 11]
    own = variant(MANAGER, aggregator="token-mean")
    torch.testing.assert_close(evaluate(again, own).weights, evaluate(step, own).weights)
    twice, _ = drawn(pool, [groups[0], groups[0]])
    assert twice.batch.group_id.tolist() == [0, 0, 0, 1, 1, 1]


def test_steps_of_other_widths_are_padded_where_nothing_is() -> None:
    step = frozen()
    width = step.logprobs.shape[1]
    columns = {
        name: torch.nn.functional.pad(step.batch.column(name), (0, 3))
        for name in step.batch.columns()
        if step.batch.column(name).shape[1:] == (width,) and not name.startswith("prompt")
    }
    batch = replace(step.batch, **columns)
    wider = replace(step, batch=batch, logprobs=torch.nn.functional.pad(step.logprobs, (0, 3)))
    wider = replace(wider, entropy=None)
    pool = pooled([step, wider])
    pool.batch.validate()
    assert pool.logprobs.shape == (12, width + 3) and pool.entropy is None
    assert torch.equal(pool.tokens[:6, :width], pool.tokens[6:, :width])
    assert not pool.tokens[:, width:].any()


def test_the_reference_is_reinforce_with_the_others_as_baseline() -> None:
    step = frozen()  # rewards 1 0 0 and 2 1 0
    found = policy_gradient_weights(step)
    per_row = torch.tensor([-1.0, 0.5, 0.5, -1.5, 0.0, 1.5], dtype=torch.float64) / 6
    wanted = per_row[:, None] * step.batch.mask
    torch.testing.assert_close(found, wanted.double())


def pool_of(count: int) -> FrozenStep:
    """Steps of two groups, whose rewards are luck around 5, and right answers to one side."""
    draw, steps = torch.Generator().manual_seed(2), []
    for _ in range(count):
        step = frozen()
        rewards = 5 + torch.randint(0, 2, (6,), generator=draw).float()
        steps.append(replace(step, batch=step.batch.with_columns(rewards=rewards, token_rewards=(
            torch.nn.functional.one_hot(
                step.batch.response_mask.sum(dim=1).long() - 1, step.logprobs.shape[1]
            ) * rewards[:, None]
        ))))  # fmt: skip
    return pooled(steps)


def test_a_variant_without_a_baseline_is_noisier_and_predicted_to_be_slower() -> None:
    """Tokens of rewarded responses push to one side, of the others elsewhere."""
    pool = pool_of(40)
    draw = torch.Generator().manual_seed(4)
    right = (pool.batch.column("rewards") > 5).float()[:, None, None]
    sketch = torch.randn(*pool.logprobs.shape, 16, generator=draw)
    sketch[..., :1] += 2 * (2 * right - 1)
    own = replace(variant(MANAGER, "vanilla_pg", "token-sum", "rloo"), label="as run")
    raw = replace(variant(MANAGER, "vanilla_pg", "token-sum", "raw"), label="raw")
    made = measure(pool, sketch, [own, raw], batch_groups=4, batches=64, seed=0)
    best, worst = made.qualities
    assert (best.label, worst.label) == ("as run", "raw")
    assert best.direction is not None and best.direction > 0.95
    assert best.bias is not None and best.bias < 0.35
    assert best.snr is not None and worst.snr is not None and best.snr > 2 * worst.snr
    (prediction,) = made.predictions
    assert prediction.verdict == "slower" and prediction.high < 0
    assert made.groups == 80 and made.limit is not None and made.limit > 0.8
    again = measure(pool, sketch, [own, raw], batch_groups=4, batches=64, seed=0)
    assert again == made


def test_equal_variants_are_not_told_apart_and_few_groups_are_refused() -> None:
    own = variant(MANAGER, "vanilla_pg", "token-mean", "rloo")
    same = replace(variant(MANAGER, "ppo_clip", "token-mean", "rloo"), label="clipped")
    pool = pool_of(6)
    sketch = torch.randn(*pool.logprobs.shape, 8, generator=torch.Generator().manual_seed(0))
    made = measure(pool, sketch, [own, same], batch_groups=3, batches=16, seed=1)
    assert made.predictions[0].verdict == "no difference seen"
    with pytest.raises(ConfigError, match="have 2 groups, and 4 are needed"):
        measure(pool_of(1), sketch[:6], [own], batch_groups=2, batches=8, seed=0)
    assert STEP == pool.step
