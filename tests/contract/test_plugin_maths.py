"""What every advantage, aggregator, loss and KL plugin promises, whoever wrote it.

Over 300 lines because it is one suite: a plugin's author runs one file.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import isfinite
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import COLUMN_AXES, RolloutBatch
from posttrain.core.contracts import (
    AdvantageEstimator,
    Aggregator,
    Correction,
    KlController,
    KlEstimator,
    LabelledScores,
    LabelLoss,
    PairLoss,
    PairScores,
    PolicyLoss,
    PreferenceLoss,
    RolloutCorrection,
    TokenLoss,
)
from posttrain.core.errors import RunError
from posttrain.core.math.masking import row_sums
from posttrain.core.plugin_manager import PluginEntry
from posttrain.core.tracking.metric_names import check_names
from tests.helpers.batches import build_batch
from tests.helpers.plugins import build, of_kind

NAN = float("nan")

# --- batches for the maths --------------------------------------------------------------------

LENGTHS = (4, 1, 0, 3, 5, 2, 0, 5)
GROUPS = (0, 0, 0, 1, 1, 2, 3, 3)
# Where the scored steps of each row end; -1 = no step.
STEP_ENDS = ((1, 3), (0, -1), (-1, -1), (2, -1), (0, 4), (1, -1), (-1, -1), (2, 4))


def masked_positions(width: int = 5) -> Tensor:
    return torch.arange(width)[None, :] < torch.tensor(LENGTHS)[:, None]


def ragged_batch(under_the_mask: float, seed: int = 0) -> RolloutBatch:
    """Rows of 0 to 5 tokens in groups of 1 to 3, one row unscored, with every column filled.

    `under_the_mask` stands at every masked position of every per-token column.
    """
    noise = torch.Generator().manual_seed(seed)
    mask = masked_positions()
    row = torch.arange(len(LENGTHS))

    def column(scale: float) -> Tensor:
        values = scale * torch.randn(mask.shape, generator=noise, dtype=torch.float64)
        return torch.where(mask, values, torch.full_like(values, under_the_mask))

    def rows(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), 2, generator=noise, dtype=torch.float64)

    scored = row != 4
    token_rewards = column(1.0)
    step_end, step_score = torch.tensor(STEP_ENDS), rows(1.0)
    nothing = torch.full_like(step_score, under_the_mask)
    batch = build_batch(
        (mask & scored[:, None]).double(),
        response_mask=mask.double(),
        group_id=GROUPS,
        scored=scored.tolist(),
        token_rewards=token_rewards,
        old_logprobs=column(0.5) - 1,
        ref_logprobs=column(0.5) - 1,
        entropy=column(0.1),
        values=column(1.0),
        advantages=column(1.0),
        rewards=row_sums(token_rewards, mask),
        acc=(row % 2).double(),
        reward_components=torch.where((row == 0)[:, None] & (torch.arange(2) == 1), NAN, rows(1.0)),
        bootstrap_value=rows(1.0)[:, 0],
        baseline_reward=torch.where(row == 5, NAN, 0.25),
        agent_id=row % 2,
        step_end=step_end,
        step_score=torch.where(step_end >= 0, step_score, nothing),
        node_id=torch.where(mask, row[:, None].clamp(max=1), -1),
        sum_pi_squared=column(0.01).abs() + 0.9,
        is_weight=column(0.1) + 1,
    )
    return replace(batch, truncated=row % 3 == 0)


# --- advantages -------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_advantages_are_finite_shaped_and_exactly_zero_under_the_mask(entry: PluginEntry) -> None:
    estimator: AdvantageEstimator[Any] = build(entry)
    clean, dirty = ragged_batch(0.25), ragged_batch(NAN)
    got = estimator.estimate(dirty).advantages
    assert got.shape == dirty.mask.shape and not got.requires_grad
    assert got.isfinite().all() and got.abs().max() > 0
    assert torch.equal(got[~dirty.mask.bool()], torch.zeros_like(got[~dirty.mask.bool()]))
    torch.testing.assert_close(got, estimator.estimate(clean).advantages, rtol=0, atol=0)


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_permuting_the_rows_permutes_the_advantages(entry: PluginEntry) -> None:
    estimator: AdvantageEstimator[Any] = build(entry)
    batch = ragged_batch(0.0)
    order = torch.tensor([5, 2, 7, 0, 4, 1, 6, 3])
    permuted = estimator.estimate(batch.select(order)).advantages
    torch.testing.assert_close(permuted, estimator.estimate(batch).advantages[order])


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_advantages_are_the_same_each_time(entry: PluginEntry) -> None:
    first, second = (build(entry).estimate(ragged_batch(0.0)).advantages for _ in range(2))
    assert torch.equal(first, second)


# Columns of every batch, whoever made it.
ALWAYS = frozenset(
    "prompt_ids prompt_mask response_ids response_mask mask group_id seq_id truncated "
    "rollout_logprobs policy_version scored token_rewards".split()
)


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_advantages_need_no_column_that_is_not_declared(entry: PluginEntry) -> None:
    batch, estimator = ragged_batch(0.0), build(entry)
    absent = COLUMN_AXES.keys() - estimator.required_columns() - ALWAYS
    bare = replace(batch, **{name: None for name in absent})
    assert torch.equal(estimator.estimate(bare).advantages, build(entry).estimate(batch).advantages)


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_an_unscored_row_teaches_nothing_even_when_it_is_kept_in_the_mask(
    entry: PluginEntry,
) -> None:
    batch = ragged_batch(0.25)
    lost = (~batch.column("scored"))[:, None]
    nan = {
        name: torch.where(lost, NAN, batch.column(name))
        for name in ("token_rewards", "values", "step_score", "reward_components", "old_logprobs")
    }
    kept = replace(batch, mask=batch.response_mask).with_columns(**nan)
    got, without = (build(entry).estimate(b).advantages for b in (kept, batch))
    torch.testing.assert_close(got, without, rtol=0, atol=0)


@pytest.mark.parametrize("entry", of_kind("advantage"))
@pytest.mark.parametrize("lengths", [(0, 0), (1, 1), (0, 3), (3,), (0,), (1,), ()])
def test_odd_batches_give_finite_advantages(entry: PluginEntry, lengths: tuple[int, ...]) -> None:
    """Rows without tokens, of one token, alone in their group, and all truncated."""
    batch = ragged_batch(NAN)
    wanted = [next(i for i, n in enumerate(LENGTHS) if n == length) for length in lengths]
    odd = batch.select(torch.tensor(wanted, dtype=torch.int64))
    ones = torch.ones(len(lengths))
    odd = replace(odd, group_id=ones.long(), truncated=ones.bool())
    estimate = build(entry).estimate(odd)
    assert estimate.advantages.isfinite().all()
    assert estimate.returns is None or estimate.returns.isfinite().all()
    if len(lengths) == 1 and build(entry).smallest_group() > 1:
        assert estimate.advantages.abs().sum() == 0, "a group of one has nothing to compare"


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_token_rewards_that_would_be_lost_are_refused(entry: PluginEntry) -> None:
    estimator: AdvantageEstimator[Any] = build(entry)
    batch = ragged_batch(0.0)
    penalty = 0.5 * torch.arange(batch.mask.shape[1])
    moved = batch.with_columns(token_rewards=batch.column("token_rewards") - penalty)
    if not estimator.reads_token_rewards():
        with pytest.raises(RunError, match="KL in the reward would be lost"):
            estimator.estimate(moved)
    else:
        before = build(entry).estimate(batch).advantages
        assert not torch.allclose(estimator.estimate(moved).advantages, before)


# --- aggregators ------------------------------------------------------------------------------


@st.composite
def split_problems(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Row lengths (0 allowed), the rows of each micro-batch, and a seed for numbers and groups."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    rows = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {len(lengths)})
    parts = [list(rows[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return lengths, parts, draw(st.integers(0, 2**16))


@pytest.mark.parametrize("entry", of_kind("aggregator"))
@given(problem=split_problems())
def test_splitting_into_micro_batches_changes_neither_value_nor_gradient(
    entry: PluginEntry, problem: tuple[list[int], list[list[int]], int]
) -> None:
    lengths, parts, seed = problem
    aggregator: Aggregator[Any] = build(entry)
    noise = torch.Generator().manual_seed(seed)
    mask = (torch.arange(7)[None, :] < torch.tensor(lengths)[:, None]).double()
    inputs = torch.randn(mask.shape, generator=noise, dtype=torch.float64)
    weights = torch.randn(7, generator=noise, dtype=torch.float64)
    group_id = torch.randint(3, (len(lengths),), generator=noise)
    counts = aggregator.count(mask, group_id)

    def run(row_sets: list[list[int]], *, trimmed: bool) -> tuple[Tensor, Tensor]:
        parameters = weights.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in row_sets:
            # Micro-batches are padded to their own longest row.
            width = max(1, max(lengths[row] for row in rows)) if trimmed else 7
            loss = torch.sin(inputs[rows] * parameters)[:, :width]
            part = mask[rows][:, :width]
            mine = counts.rows(torch.tensor(rows))
            share = aggregator.aggregate(TokenLoss(loss, part), part, mine, group_id[rows])
            share.backward()
            total = total + share.detach()
        assert parameters.grad is not None
        return total, parameters.grad

    whole = run([list(range(len(lengths)))], trimmed=False)
    split = run(parts, trimmed=True)
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("entry", of_kind("aggregator"))
def test_the_loss_under_the_mask_does_not_matter(entry: PluginEntry) -> None:
    aggregator: Aggregator[Any] = build(entry)
    batch = ragged_batch(NAN)
    loss = batch.column("advantages").clone().requires_grad_()
    counts = aggregator.count(batch.mask, batch.group_id)
    total = aggregator.aggregate(TokenLoss(loss, batch.mask), batch.mask, counts)
    (grad,) = torch.autograd.grad(total, loss)
    assert total.isfinite()
    assert torch.equal(grad != 0, batch.mask.bool())


@pytest.mark.parametrize("entry", of_kind("aggregator"))
def test_a_boolean_mask_weighs_as_a_float_mask_does(entry: PluginEntry) -> None:
    batch, aggregator = ragged_batch(0.0), build(entry)
    mask, counts = batch.mask, aggregator.count(batch.mask, batch.group_id)
    torch.testing.assert_close(
        aggregator.weights(mask.bool(), counts), aggregator.weights(mask, counts)
    )


# --- policy losses ----------------------------------------------------------------------------


def policy_batch(under_the_mask: float) -> tuple[RolloutBatch, Tensor]:
    """A ragged batch with one advantage per row, and the policy's log-probs [B, T]."""
    batch = ragged_batch(under_the_mask)
    noise = torch.Generator().manual_seed(9)
    new = 0.5 * torch.randn(batch.mask.shape, generator=noise, dtype=torch.float64) - 1
    new = torch.where(masked_positions(), new, under_the_mask)
    signs = torch.linspace(-1.5, 2.0, len(LENGTHS), dtype=torch.float64)[:, None]
    advantages = torch.where(masked_positions(), signs, under_the_mask)
    return batch.with_columns(advantages=advantages, logprobs_now=new), new


def loss_and_grad(
    entry: PluginEntry, batch: RolloutBatch, new: Tensor, rows: Tensor | None = None
) -> tuple[TokenLoss, Tensor]:
    """Token losses and gradients on `rows` of a mini-batch, all when None."""
    loss: PolicyLoss[Any] = build(entry)
    draw = torch.Generator().manual_seed(3)
    prepared = loss.prepare(batch, draw) if loss.needs_prepare() else None
    if rows is not None:
        batch, new = batch.select(rows), new[rows]
        prepared = prepared and prepared.rows(rows)
    new = new.clone().requires_grad_()
    result = loss.token_loss(new, batch, prepared)
    total = torch.where(result.mask.bool(), result.loss, torch.zeros_like(result.loss)).sum()
    (grad,) = torch.autograd.grad(total, new)
    return result, grad


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_masked_tokens_get_exactly_no_gradient_even_when_they_are_nan(entry: PluginEntry) -> None:
    clean, grad = loss_and_grad(entry, *policy_batch(0.25))
    dirty, dirty_grad = loss_and_grad(entry, *policy_batch(NAN))
    taken = dirty.mask.bool()
    assert clean.loss.shape == clean.mask.shape == grad.shape
    assert not (taken & ~ragged_batch(0.0).mask.bool()).any(), "takes tokens the batch leaves out"
    assert torch.equal(dirty_grad, grad)
    assert torch.equal(dirty_grad[~taken], torch.zeros_like(dirty_grad[~taken]))
    assert torch.equal(dirty.loss[taken], clean.loss[taken]) and grad[taken].abs().max() > 0


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_a_token_loss_does_not_depend_on_the_other_rows_of_the_micro_batch(
    entry: PluginEntry,
) -> None:
    batch, new = policy_batch(0.25)
    whole, grad = loss_and_grad(entry, batch, new)
    for row in range(len(LENGTHS)):
        rows = torch.tensor([row])
        alone, alone_grad = loss_and_grad(entry, batch, new, rows)
        kept = alone.mask.bool()
        torch.testing.assert_close(alone.loss[kept], whole.loss[rows][kept])
        torch.testing.assert_close(alone_grad, grad[rows])


IDLE = [given for given in of_kind("policy_loss") if given.values[0].cls.idle_at_zero]


@pytest.mark.parametrize("entry", IDLE)
def test_a_loss_whose_rows_may_be_idle_gives_none_of_them_a_gradient(entry: PluginEntry) -> None:
    """Nor does it change what the other rows get."""
    batch, new = policy_batch(0.25)
    _, whole = loss_and_grad(entry, batch, new)
    assert whole.abs().max() > 0
    for row in range(len(LENGTHS)):
        advantages = batch.column("advantages").clone()
        advantages[row] = 0.0
        _, grad = loss_and_grad(entry, batch.with_columns(advantages=advantages), new)
        others = torch.arange(len(LENGTHS)) != row
        assert not grad[row].any() and torch.equal(grad[others], whole[others])
    assert not build(entry).needs_prepare()


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_a_policy_loss_reads_no_column_that_is_not_declared(entry: PluginEntry) -> None:
    batch, new = policy_batch(0.25)
    loss: PolicyLoss[Any] = build(entry)
    declared = loss.required_columns() | {"mask", "logprobs_now"}
    optional = {"old_logprobs", "ref_logprobs", "entropy", "values", "advantages", "acc", "rewards"}
    bare = replace(batch, **{name: None for name in optional - declared})
    got, wanted = loss_and_grad(entry, bare, new), loss_and_grad(entry, batch, new)
    assert torch.equal(got[0].loss, wanted[0].loss) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_what_a_loss_prepares_fits_the_rows_and_names_its_metrics(entry: PluginEntry) -> None:
    batch, _ = policy_batch(NAN)
    prepared = build(entry).prepare(batch, torch.Generator())
    assert all(len(column) == len(batch) for column in prepared.columns.values())
    assert all(not column.requires_grad for column in prepared.columns.values())
    assert all(isfinite(v) for v in (*prepared.scalars.values(), *prepared.metrics.values()))
    if entry.package == "posttrain":
        check_names(prepared.metrics)


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_metrics_are_per_token_or_per_row_and_without_gradient(entry: PluginEntry) -> None:
    result, _ = loss_and_grad(entry, *policy_batch(NAN))
    for value in result.metrics.values():
        kept = result.mask.bool() if value.dim() == 2 else result.mask.bool().any(dim=1)
        assert value.shape == kept.shape and not value.requires_grad
        assert value[kept].isfinite().all()
    if entry.package == "posttrain":
        check_names(set(result.metrics) - {"ratio"})  # the learner turns it into ratio/*


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_a_policy_loss_continues_from_its_state(entry: PluginEntry) -> None:
    first, second = build(entry), build(entry)
    first.on_phase_end({"kl/phase_k3": 5.0})
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    batch, new = policy_batch(0.25)
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    losses = []
    for loss, draw in zip((first, second), draws, strict=True):
        prepared = loss.prepare(batch, draw) if loss.needs_prepare() else None
        losses.append(loss.token_loss(new, batch, prepared).loss)
    assert torch.equal(*losses)


# --- KL ---------------------------------------------------------------------------------------


def kl_of(estimator: KlEstimator[Any], new: Tensor, ref: Tensor) -> Tensor:
    """KL [B, T], from logits [B, T, 2] of an exact estimator, else from their first as log-prob."""
    if estimator.from_logits:
        rows = estimator.kl_of_logits(new.flatten(0, 1), ref.flatten(0, 1))
        return rows.unflatten(0, new.shape[:2])
    logprobs, ref_logprobs = (x.log_softmax(-1)[..., 0] for x in (new, ref))
    on_policy = (logprobs - logprobs.detach()).exp()
    return estimator.kl(
        logprobs, ref_logprobs, None if estimator.ratio_source() is None else on_policy
    )


@pytest.mark.parametrize("entry", of_kind("kl"))
def test_kl_is_zero_at_the_reference_and_leaves_the_reference_alone(entry: PluginEntry) -> None:
    estimator: KlEstimator[Any] = build(entry)
    ref = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 3, 2).requires_grad_()
    assert torch.equal(kl_of(estimator, ref, ref), torch.zeros(2, 3, dtype=torch.float64))
    new = (ref.detach() * 1.5).requires_grad_()
    kl = kl_of(estimator, new, ref.detach())
    assert kl.shape == (2, 3) and kl.dtype == torch.float64 and kl.isfinite().all()
    (grad,) = torch.autograd.grad(kl.sum(), new)
    assert grad.isfinite().all() and grad.abs().max() > 0


@pytest.mark.parametrize("entry", of_kind("kl_controller"))
def test_a_controller_continues_from_its_state(entry: PluginEntry) -> None:
    first: KlController[Any] = build(entry)
    first.update(kl_per_token=0.5, kl_per_sequence=5.0, num_rows=16)
    second: KlController[Any] = build(entry)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.coefficient() == first.coefficient() >= 0


# --- rollout corrections ----------------------------------------------------------------------


def correction_of(
    entry: PluginEntry, under_the_mask: float, *, engine_error: float
) -> tuple[Correction, RolloutBatch]:
    """The correction of a batch whose engine is off by noise of that scale, and the batch."""
    batch = ragged_batch(under_the_mask)
    noise = torch.Generator().manual_seed(5)
    error = engine_error * torch.randn(batch.mask.shape, generator=noise, dtype=torch.float64)
    trainer = batch.column("old_logprobs").clone().requires_grad_()
    return build(entry).correct(trainer, trainer.detach() + error, batch.mask), batch


@pytest.mark.parametrize("entry", of_kind("rollout_correction"))
def test_an_engine_without_error_is_not_corrected_not_by_a_bit(entry: PluginEntry) -> None:
    found, batch = correction_of(entry, 0.25, engine_error=0.0)
    assert found.weight is None or torch.equal(found.weight, batch.mask)
    assert found.keep is None or torch.equal(found.keep, batch.mask)


@pytest.mark.parametrize("entry", of_kind("rollout_correction"))
def test_a_correction_is_a_detached_number_per_token_and_0_under_the_mask(
    entry: PluginEntry,
) -> None:
    clean, batch = correction_of(entry, 0.25, engine_error=0.7)
    dirty, _ = correction_of(entry, NAN, engine_error=0.7)
    check_names(clean.metrics)
    assert dirty.metrics == clean.metrics
    for got, again in ((clean.weight, dirty.weight), (clean.keep, dirty.keep)):
        assert (got is None) == (again is None)
        if got is not None and again is not None:
            assert got.shape == batch.mask.shape and not got.requires_grad
            assert torch.equal(got, again) and (got >= 0).all()
            assert not got[~batch.mask.bool()].any()


@pytest.mark.parametrize("entry", of_kind("rollout_correction"))
def test_an_engine_that_gives_no_log_probs_is_not_corrected(entry: PluginEntry) -> None:
    batch = ragged_batch(NAN)
    silent = torch.full_like(batch.mask, NAN)
    correction: RolloutCorrection[Any] = build(entry)
    found = correction.correct(batch.column("old_logprobs"), silent, batch.mask)
    assert found.weight is None or torch.equal(found.weight, batch.mask)
    assert found.keep is None or torch.equal(found.keep, batch.mask)
    assert all(isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize("entry", of_kind("rollout_correction"))
def test_what_is_kept_under_the_current_policy_is_some_of_the_mask(entry: PluginEntry) -> None:
    batch = ragged_batch(NAN)
    # An engine whose every log-prob is higher: the policy has moved away from all it sampled.
    batch = batch.with_columns(rollout_logprobs=batch.column("old_logprobs") + 1)
    correction: RolloutCorrection[Any] = build(entry)
    keep = correction.keeps(batch.column("old_logprobs"), batch)
    if keep is not None:
        assert keep.shape == batch.mask.shape and not keep.requires_grad
        assert set(keep.unique().tolist()) <= {0, 1} and (keep <= batch.mask).all()
        assert keep.any() and not torch.equal(keep, batch.mask)


# --- preferences ------------------------------------------------------------------------------


def preference_losses(
    entry: PluginEntry, better: Tensor, worse: Tensor, parts: list[Tensor]
) -> Tensor:
    """Losses of rows whose wanted answer scores `better` and whose other one scores `worse`.

    The rows are a mini-batch that is taken in `parts`; a loss of labelled rows has one of each
    label for a pair.
    """
    loss: PreferenceLoss[Any] = build(entry)
    num_pairs, kept = len(better), []
    column = torch.ones(num_pairs, dtype=torch.float64)
    if isinstance(loss, PairLoss):
        mini = PairScores(
            better,
            worse,
            0 * column,
            better - 3,
            worse - 4,
            -3 * column,
            -4 * column,
            5 * column,
            6 * column,
            3 - better,
            num_pairs=float(num_pairs),
            num_chosen_tokens=5.0 * num_pairs,
        )
        prepared = loss.prepare(rows_of(mini, torch.arange(num_pairs)))
        kept = [loss.pair_loss(rows_of(mini, p), prepared.rows(p)) for p in parts]
        return torch.cat(kept)
    assert isinstance(loss, LabelLoss)
    labels = torch.arange(2 * num_pairs) < num_pairs
    scores = torch.cat([better, worse])
    rows = LabelledScores(scores, labels, 0.1 * scores.detach(), num_rows=2.0 * num_pairs)
    ready = loss.prepare(rows)
    for part in (torch.cat([p, p + num_pairs]) for p in parts):
        kept.append(loss.label_loss(LabelledScores(scores[part], labels[part]), ready.rows(part)))
    return torch.cat(kept)


def rows_of(mini: PairScores, index: Tensor) -> PairScores:
    columns = {f.name: getattr(mini, f.name) for f in fields(mini)}
    return PairScores(**{n: v[index] if isinstance(v, Tensor) else v for n, v in columns.items()})


@pytest.mark.parametrize("entry", of_kind("preference_loss"))
def test_a_preference_loss_is_lower_where_the_better_answers_score_more(
    entry: PluginEntry,
) -> None:
    far = torch.full((2,), 20.0, dtype=torch.float64)
    everything = [torch.arange(2)]
    wrong = preference_losses(entry, -far, far, everything)
    right = preference_losses(entry, far, -far, everything)
    assert wrong.shape == right.shape and wrong.isfinite().all() and right.isfinite().all()
    assert right.sum() < wrong.sum()


@pytest.mark.parametrize("entry", of_kind("preference_loss"))
def test_a_preference_loss_does_not_depend_on_how_its_mini_batch_is_split(
    entry: PluginEntry,
) -> None:
    noise = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 5, generator=noise, dtype=torch.float64).requires_grad_()
    found = []
    for size in (5, 2, 1):
        parts = list(torch.arange(5).split(size))
        total = preference_losses(entry, scores[0], scores[1], parts).sum()
        (grad,) = torch.autograd.grad(total, scores)
        found.append((total.detach(), grad))
    for split in found[1:]:
        torch.testing.assert_close(split, found[0])
    assert found[0][1].abs().sum() > 0


@pytest.mark.parametrize("entry", of_kind("preference_loss"))
def test_a_preference_loss_says_what_it_reads_and_trains(entry: PluginEntry) -> None:
    loss: PreferenceLoss[Any] = build(entry)
    assert loss.data == ("pairs" if isinstance(loss, PairLoss) else "labels")
    assert loss.trains and loss.trains <= {"policy", "reward_model"}
    scale = loss.reward_scale()
    assert scale is None or scale > 0
    if isinstance(loss, PairLoss) and "policy" in loss.trains:
        ones = torch.ones(2, dtype=torch.float64)
        scored = PairScores(ones, ones, ones, -ones, -ones, -ones, -ones, ones, ones, ones)
        check_names(loss.metrics(scored))
