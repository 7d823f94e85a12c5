"""Ratios of segments, and what garble in a part of an answer does to the rest of it."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from posttrain.core.contracts import SEQUENCE_AGGREGATORS
from posttrain.core.errors import RunError
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.segments import by_end, by_run, by_width, segment_means
from tests.helpers.losses import (
    MANAGER,
    build_loss,
    objective_of,
    policy_batch,
    token_loss,
    total_and_grad,
)

GARBLED = [[1.0] * 50 + [1e-6] * 50]
SEGMENT = {"ratio_level": "segment"}


@pytest.mark.parametrize(
    ("name", "fields", "good", "bad"),
    [
        ("ppo_clip", {}, 1.0, 1.0),
        ("gspo", {}, 0.001, 0.0),
        ("gspo", {**SEGMENT, "segment_width": 50}, 1.0, 1.0),
        ("gspo", {**SEGMENT, "segment_width": 25}, 1.0, 1.0),
    ],
)
def test_what_a_garbled_half_leaves_to_the_good_half(
    name: str, fields: dict[str, object], good: float, bad: float
) -> None:
    """100 tokens, the last 50 at a ratio of 1e-6; -gradient / A of a token of the first half."""
    for sign, wanted in ((1.0, good), (-1.0, bad)):
        result, grad = token_loss(name, GARBLED, [[sign] * 100], **fields)
        assert (-sign * grad[0, :50]).tolist() == pytest.approx([wanted] * 50, rel=1e-9)
        if sign < 0:
            assert not grad[0, 50:].any() and result.metrics["clip/frac"][0, 50:].all()
        else:
            assert (grad[0, 50:] != 0).all()


def test_segments_by_hand() -> None:
    """Log ratios (.001, -.001, 0, 0, 2, -1): one answer is dead, of pairs only the tail is."""
    log_ratios = [0.001, -0.001, 0.0, 0.0, 2.0, -1.0]
    ratios = [[math.exp(value) for value in log_ratios]]
    whole, grad = token_loss("gspo", ratios, [[1.0] * 6])
    assert whole.ratio is not None and not grad.any()
    assert whole.ratio[0].tolist() == pytest.approx([1.181360] * 6, abs=1e-6)
    pairs, grad = token_loss("gspo", ratios, [[1.0] * 6], **SEGMENT, segment_width=2)
    assert pairs.ratio is not None
    assert pairs.ratio[0].tolist() == pytest.approx([1.0] * 4 + [1.648721] * 2, abs=1e-6)
    assert grad[0].tolist() == pytest.approx([-1.0] * 4 + [0.0] * 2)
    assert pairs.metrics["clip/seq_frac"].tolist() == [1.0]


@pytest.mark.parametrize(("width", "level"), [(100, "sequence"), (1, "token")])
def test_one_segment_is_gspo_and_one_token_each_is_ppo_clip(width: int, level: str) -> None:
    batch, new = policy_batch(seed=3)
    bounds = {"clip_low": 0.1, "clip_high": 0.1}
    segments = build_loss("gspo", {**bounds, **SEGMENT, "segment_width": width})
    same = build_loss("gspo", {**bounds, "ratio_level": level})
    torch.testing.assert_close(
        total_and_grad(objective_of(segments, "seq-mean-token-mean"), batch, new),
        total_and_grad(objective_of(same, "seq-mean-token-mean"), batch, new),
        rtol=1e-9,
        atol=1e-12,
    )


def test_the_cut_does_not_matter_to_segments() -> None:
    batch, new = policy_batch(seed=4)
    for by in ({"segment_by": "turn"}, {"segment_width": 2}):
        loss = build_loss("gspo", {"clip_low": 0.1, "clip_high": 0.1, **SEGMENT, **by})
        objective = objective_of(loss, "seq-mean-token-mean")
        whole = total_and_grad(objective, batch, new)
        assert whole[1].any()
        ranks = [[[0, 5], [1]], [[2, 3, 4, 6, 7]]]
        torch.testing.assert_close(total_and_grad(objective, batch, new, ranks), whole)


def test_where_segments_end() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]])
    taken = mask.bool()
    ids = torch.tensor([[5, 9, 9, 5, 9, 5, 5], [9, 9, 9, 9, 9, 9, 9]])
    assert by_width(mask, 2)[taken].tolist() == [0, 0, 1, 1, 2]
    assert by_run(mask)[taken].tolist() == [0, 0, 1, 1, 1]
    assert by_end(ids, mask, (9,))[taken].tolist() == [0, 0, 1, 1, 2]
    values = torch.tensor([[1.0, 3.0, math.nan, 5.0, 6.0, 7.0, 0.0], [math.nan] * 7])
    means = segment_means(values, mask, by_run(mask))
    assert means.tolist() == [[2, 2, 0, 6, 6, 6, 0], [0] * 7]


def test_advantages_may_differ_between_segments_alone() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    zeros = torch.zeros_like(mask)
    batch = build_batch(
        mask,
        old_logprobs=zeros,
        advantages=torch.tensor([[1.0, 1.0, 0.0, -2.0, -2.0]], dtype=torch.float64),
    )
    by_turn = build_loss("gspo", {**SEGMENT, "segment_by": "turn"})
    assert by_turn.token_loss(zeros, batch).loss.tolist() == [[-1, -1, 0, 2, 2]]
    with pytest.raises(RunError, match="one importance ratio per segment, but the advantages"):
        build_loss("gspo", {**SEGMENT}).token_loss(zeros, batch)
    mean = build_loss("gspo", {**SEGMENT, "adv_reduce": "mean"}).token_loss(zeros, batch)
    assert mean.loss.tolist() == [[0.5, 0.5, 0, 0.5, 0.5]]


def test_segments_want_the_mean_over_answers_and_ends_their_tokens() -> None:
    assert build_loss("gspo", SEGMENT).allowed_aggregators() == SEQUENCE_AGGREGATORS
    with pytest.raises(ValidationError, match="needs the ids of the tokens that end a segment"):
        MANAGER.config("policy_loss", "gspo", {**SEGMENT, "segment_by": "ends"})


def test_live_tokens_behind_a_clipped_one_are_counted_and_can_be_masked() -> None:
    """The garble stands first: with A < 0 it is clipped, and the rest stands behind it."""
    garbled, bad = [[1e-6, 1.0, 2.0, 0.5]], [[-1.0] * 4]
    counted, grad = token_loss("ppo_clip", garbled, bad)
    assert counted.metrics["clip/live_behind_frac"][0].tolist() == [0, 1, 1, 0]
    assert grad[0].tolist() == [0, 1, 2, 0]
    cut, grad = token_loss("ppo_clip", garbled, bad, mask_behind=True)
    assert not grad.any() and not cut.loss[0, 1:].any() and cut.mask.all()
    good, grad = token_loss("ppo_clip", garbled, [[1.0] * 4], mask_behind=True)
    assert grad[0].tolist() == pytest.approx([-1e-6, -1.0, 0.0, 0.0])
    assert good.metrics["clip/live_behind_frac"][0].tolist() == [0, 0, 0, 1]
