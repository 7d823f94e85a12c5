"""Rollout corrections `"none"`, `"tis_token"`, `"tis_seq"`, `"mis_token"`, `"mis_seq"`,
`"mis_geo"`, `"opsm"`, `"veto"`, `"kpop"`, `"m2po"`.

Over 300 lines because all are presets of one form and are held against the same facts.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Correction, RolloutCorrection
from posttrain.core.errors import ConfigError
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.correction import Rejection, binary_kl, rejection_statistic
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.training.objective import LossTerm, Objective
from tests.helpers.losses import build_aggregator, build_loss, policy_batch, total_and_grad

MANAGER = PluginManager()
NAN = float("nan")
WEIGHTED = ["tis_token", "tis_seq", "mis_token", "mis_seq", "mis_geo"]
# e^d of each token: rows of product 4, 1.2 and 0.5, and of mean ratio 2, 1.2 and 0.5^(1/3).
RATIOS = torch.tensor([[4.0, 1.0, 1.0], [1.2, 7.0, 7.0], [0.25, 4.0, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)


def build(name: str, **fields: object) -> RolloutCorrection[Any]:
    return MANAGER.build(RolloutCorrection, name, fields)


def correct(
    name: str, ratios: Tensor = RATIOS, mask: Tensor = MASK, **fields: object
) -> Correction:
    """The correction of an engine whose log-probs are all 0, so that no bit of d is lost."""
    return build(name, **fields).correct(ratios.log(), torch.zeros_like(ratios), mask)


def weights_of(name: str, **fields: object) -> list[list[float]]:
    weight = correct(name, **fields).weight
    assert weight is not None
    return [[round(value, 12) for value in row] for row in weight.tolist()]


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("tis_token", {}, [[2, 1, 0], [1.2, 0, 0], [0.25, 2, 0.5]]),
        ("tis_token", {"high": 3, "low": 0.4}, [[3, 1, 0], [1.2, 0, 0], [0.4, 3, 0.5]]),
        ("tis_seq", {}, [[2, 2, 0], [1.2, 0, 0], [0.5, 0.5, 0.5]]),
        ("tis_seq", {"high": 5, "low": 0.8}, [[4, 4, 0], [1.2, 0, 0], [0.8, 0.8, 0.8]]),
        ("mis_token", {}, [[4, 1, 0], [1.2, 0, 0], [0, 4, 0.5]]),
        ("mis_token", {"low": None, "high": 1.1}, [[0, 1, 0], [0, 0, 0], [0.25, 0, 0.5]]),
        ("mis_seq", {}, [[0, 0, 0], [1.2, 0, 0], [0.5, 0.5, 0.5]]),
        ("mis_seq", {"low": 0.6, "high": 5}, [[4, 4, 0], [1.2, 0, 0], [0, 0, 0]]),
        ("mis_geo", {}, [[4, 1, 0], [1.2, 0, 0], [0.25, 4, 0.5]]),
        ("mis_geo", {"cap": 1.5}, [[1.5, 1, 0], [1.2, 0, 0], [0.25, 1.5, 0.5]]),
    ],
)
def test_the_weights(name: str, fields: dict[str, object], wanted: list[list[float]]) -> None:
    assert weights_of(name, **fields) == wanted


def test_the_mean_ratio_masks_whole_responses_whatever_their_length() -> None:
    keep = correct("mis_geo", low=0.7, high=1.3).keep
    assert keep is not None
    # Mean ratios 2, 1.2, 0.794: the first is out; the product of the third (0.5) would be too.
    assert keep.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert weights_of("mis_seq", low=0.7, high=1.3) == [[0, 0, 0], [1.2, 0, 0], [0, 0, 0]]
    assert correct("mis_geo").keep is not None
    assert not correct("mis_geo").keep.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_product_and_mean_ratio_differ_by_the_power_of_the_length(length: int) -> None:
    per_token = 1.01
    ratios = torch.full((1, length), per_token, dtype=torch.float64)
    weight = correct("tis_seq", ratios, torch.ones_like(ratios), high=100).weight
    assert weight is not None and weight[0, 0].item() == pytest.approx(per_token**length)
    for high, kept in ((per_token * 1.0001, 1.0), (per_token * 0.9999, 0.0)):
        keep = correct("mis_geo", ratios, torch.ones_like(ratios), high=high).keep
        assert keep is not None and keep.tolist() == [[kept] * length]


def test_veto_drops_a_response_for_one_token_that_is_all_but_impossible() -> None:
    ratios = RATIOS.clone()
    ratios[2, 1], ratios[0, 2] = 0.99e-4, 1e-9  # the second lies under the mask
    found = correct("veto", ratios)
    assert found.weight is None and found.keep is not None
    assert found.keep.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert found.metrics["mis/drop_frac"] == 0.5
    ratios[2, 1] = 1.01e-4
    assert torch.equal(correct("veto", ratios).keep, MASK)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*WEIGHTED, "veto"])
def test_the_ends_of_every_bound_are_kept(name: str) -> None:
    ends = {
        "tis_token": {"low": 0.5, "high": 2.0},
        "tis_seq": {"low": 0.5, "high": 2.0},
        "mis_token": {"low": 0.5, "high": 2.0},
        "mis_seq": {"low": 0.5, "high": 2.0},
        "mis_geo": {"low": 0.5, "high": 2.0},
        "veto": {"threshold": 0.5},
    }
    ratios = torch.tensor([[2.0], [0.5]], dtype=torch.float64)
    engine = torch.zeros_like(ratios)
    found = build(name, **ends[name]).correct(ratios.log(), engine, torch.ones_like(ratios))
    assert found.keep is None or found.keep.all()
    assert found.weight is None or found.weight.flatten().tolist() == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize(
    ("name", "mean"),
    [("tis_token", (2 + 1 + 1.2 + 0.25 + 2 + 0.5) / 6), ("tis_seq", (2 + 1.2 + 0.5) / 3)],
)
def test_normalised_weights_are_divided_by_their_mean_over_tokens_or_rows(
    name: str, mean: float
) -> None:
    # An empty row takes no part.
    ratios, mask = (torch.cat([x, torch.zeros(1, 3).to(x)]) for x in (RATIOS, MASK))
    plain = correct(name, ratios, mask).weight
    normed = correct(name, ratios, mask, batch_norm_w=True)
    assert plain is not None and normed.weight is not None
    torch.testing.assert_close(normed.weight * mean, plain)
    assert normed.metrics["is_weight/norm"] == pytest.approx(mean)


def test_exponents_are_cut_at_20_nats_after_the_sum() -> None:
    ratios = torch.full((1, 3), math.exp(15.0), dtype=torch.float64)
    mask = torch.ones_like(ratios)
    weight = correct("tis_seq", ratios, mask, high=1e9).weight
    assert weight is not None and weight[0, 0].item() == pytest.approx(math.exp(20.0))
    # Cut token by token first, the sum would be 20 - 20.
    mixed = torch.tensor([[1e12, 1e-10, 1.0]], dtype=torch.float64)
    weight = correct("tis_seq", mixed, mask, high=1e9).weight
    assert weight is not None and weight[0, 0].item() == pytest.approx(100.0)


# --- rejections -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stat", "level", "wanted"),
    [
        ("k1", "token", [[-math.log(4), 0, 0], [-math.log(1.2), 0, 0]]),
        ("k2", "token", [[math.log(4) ** 2 / 2, 0, 0], [math.log(1.2) ** 2 / 2, 0, 0]]),
        ("k3", "token", [[3 - math.log(4), 0, 0], [0.2 - math.log(1.2), 0, 0]]),
        ("k1", "seq_sum", [[-math.log(4)], [-math.log(1.2)]]),
        ("k1", "seq_mean", [[-math.log(2)], [-math.log(1.2)]]),
        ("k3", "seq_mean", [[(3 - math.log(4)) / 2], [0.2 - math.log(1.2)]]),
        ("k1", "seq_max", [[0.0], [-math.log(1.2)]]),
        ("k3", "seq_max", [[3 - math.log(4)], [0.2 - math.log(1.2)]]),
    ],
)
def test_the_statistics(stat: Any, level: Any, wanted: list[list[float]]) -> None:
    gaps = torch.where(MASK.bool(), RATIOS.log(), 0.0)[:2]
    got = rejection_statistic(gaps, MASK[:2], Rejection(stat, level, high=1.0), gaps)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64))


def test_a_row_without_tokens_has_statistic_0_at_every_level() -> None:
    gaps = mask = torch.zeros(1, 3)
    for level in ("seq_sum", "seq_mean", "seq_max"):
        got = rejection_statistic(gaps, mask, Rejection("k3", level, high=1.0), gaps)
        assert got.tolist() == [[0.0]]


PAIRS = torch.tensor([(0.9, 0.5), (1e-4, 1e-5), (1e-3, 0.3), (0.02, 0.01)], dtype=torch.float64)


def test_kpop_drops_likely_tokens_that_moved_far() -> None:
    """Probabilities of trainer and engine; ratios of 1.8 and 1/300 go, 10 and 2 stay."""
    trainer, engine = PAIRS.log()[:, 0], PAIRS.log()[:, 1]
    wanted = [0.510826, 0.000140, 1.462162, 0.003914]
    for found in (binary_kl(trainer, engine), binary_kl(engine, trainer)):
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    assert not binary_kl(trainer, trainer).any()
    assert binary_kl(torch.tensor([0.0]), torch.tensor([-1e9])).isfinite().all()
    mask = torch.ones(1, 5, dtype=torch.float64)
    rows = [
        torch.cat((x, torch.tensor([NAN], dtype=torch.float64)))[None] for x in (trainer, engine)
    ]
    kept = [[0.0, 1.0, 0.0, 1.0, 1.0]]
    by_config = {"reject": [{"stat": "binary_kl", "level": "token", "high": 0.5}]}
    for name, fields in (("kpop", {"phi": 0.5}), ("veto", {"threshold": 1e-8, **by_config})):
        made = build(name, **fields).correct(rows[0].nan_to_num(-1.0), rows[1], mask)
        assert made.keep is not None and made.keep.tolist() == kept and made.weight is None
    icepop = build("mis_token", low=0.5, high=5).correct(rows[0].nan_to_num(-1.0), rows[1], mask)
    assert icepop.weight is not None
    assert (icepop.weight > 0).tolist() == [[True, False, False, True, True]]


def mini_of(log_ratio: list[float], advantages: list[float], mask: list[float]) -> RolloutBatch:
    now = torch.tensor([log_ratio], dtype=torch.float64)
    return build_batch(
        torch.tensor([mask]),
        old_logprobs=torch.zeros_like(now),
        rollout_logprobs=torch.zeros_like(now),
        logprobs_now=now,
        advantages=torch.tensor([advantages], dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("tau", "kept"),
    [
        (0.04, [1, 1, 0, 0, 0]),
        (0.13, [1, 1, 1, 0, 0]),
        (0.21, [1, 1, 1, 0, 1]),
        (0.32, [1, 1, 1, 1, 1]),
        (0.009, [0, 1, 0, 0, 0]),
    ],
)
def test_m2po_drops_the_largest_until_the_mean_is_bounded(tau: float, kept: list[int]) -> None:
    """x of the candidates 0, 2, 3, 4 is (.01, .25, .64, .36); token 1 is never one."""
    mini = mini_of([0.1, -0.1, 0.5, 0.8, -0.6, NAN], [1, 1, 1, 1, -1, NAN], [1, 1, 1, 1, 1, 0])
    found = build("m2po", tau=tau + 1e-12).correct_mini(mini)
    assert found.keep is not None and found.keep.tolist() == [[*kept, 0]]
    assert found.metrics["m2po/second_moment"] == pytest.approx(0.315)
    assert found.metrics["m2po/dropped_frac"] == pytest.approx(1 - sum(kept) / 5)


def test_m2po_leaves_the_counts_and_does_not_depend_on_the_cut() -> None:
    loss, mean = build_loss("importance_pg"), build_aggregator("token-mean")
    batch, new = policy_batch(seed=6)
    term = (LossTerm(loss, mean),)
    value, grad = total_and_grad(Objective(term, mean, correction=build("m2po")), batch, new)
    free, whole = total_and_grad(Objective(term, mean), batch, new)
    dropped = (grad == 0) & (whole != 0)
    assert 0 < int(dropped.sum()) < int((whole != 0).sum())
    torch.testing.assert_close(grad[~dropped], whole[~dropped])
    ranks = [[[7, 0], [3, 6, 1]], [[5], [2, 4]]]
    objective = Objective(term, mean, correction=build("m2po"))
    torch.testing.assert_close(total_and_grad(objective, batch, new, ranks), (value, grad))


def test_k1_bounds_are_of_the_inverse_ratio_and_one_number_means_both_sides() -> None:
    # e^d of 4 is an inverse ratio of 1/4: only a low below it keeps the token.
    for entry, kept in (
        ({"low": 0.2, "high": 1.5}, [1, 1, 1, 0, 1, 0]),
        ({"low": 0.9, "high": 5.0}, [0, 1, 0, 1, 0, 1]),
        ({"high": 2.5}, [0, 1, 1, 0, 0, 1]),
    ):
        keep = correct("none", reject=[{"stat": "k1", "level": "token", **entry}]).keep
        assert keep is not None and keep[MASK.bool()].tolist() == kept


def test_several_rejections_must_all_pass_and_leave_the_weights_alone() -> None:
    token = {"stat": "k2", "level": "token", "high": 0.5}
    sequence = {"stat": "k3", "level": "seq_mean", "high": 0.1}
    first = correct("tis_token", reject=[token])
    second = correct("tis_token", reject=[sequence])
    both = correct("tis_token", reject=[token, sequence])
    assert first.keep is not None and second.keep is not None and both.keep is not None
    assert first.keep.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert second.keep.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert torch.equal(both.keep, first.keep * second.keep)
    assert torch.equal(both.weight, correct("tis_token").weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"stat": "k2", "level": "token", "high": 1, "low": 0.5}, "has no low"),
        ({"stat": "k1", "level": "token", "high": 0.5}, "must not exclude 1"),
        ({"stat": "k4", "level": "token", "high": 1}, "k1"),
        ({"stat": "k1", "level": "row", "high": 2}, "token"),
    ],
)
def test_a_rejection_that_makes_no_sense_is_refused(
    entry: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build("tis_token", reject=[entry])


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("fields", [{"low": 1.5}, {"high": 0.5}])
def test_bounds_that_exclude_an_engine_without_error_are_refused(
    name: str, fields: dict[str, float]
) -> None:
    with pytest.raises(ConfigError):
        build(name, **fields)


# --- unknown and masked tokens ----------------------------------------------------------------


@pytest.mark.parametrize("name", [*WEIGHTED, "veto"])
def test_tokens_whose_engine_log_prob_is_unknown_weigh_1_and_are_kept(name: str) -> None:
    trainer = torch.tensor([[-9.0, -2.0], [-9.0, -9.0]], dtype=torch.float64)
    engine = torch.tensor([[NAN, -2.0], [NAN, NAN]], dtype=torch.float64)
    found = build(name).correct(trainer, engine, torch.ones_like(trainer))
    assert found.weight is None or torch.equal(found.weight, torch.ones_like(trainer))
    assert found.keep is None or found.keep.all()
    nothing_known = build(name).correct(trainer, engine * NAN, torch.ones_like(trainer))
    assert nothing_known.weight is None or (nothing_known.weight == 1).all()


def test_a_sequence_with_gaps_is_weighed_by_what_is_known() -> None:
    trainer = torch.tensor([[-1.0, -5.0, -1.0]], dtype=torch.float64)
    engine = torch.tensor([[-1.5, NAN, -1.0]], dtype=torch.float64)
    weight = build("tis_seq").correct(trainer, engine, torch.ones_like(trainer)).weight
    assert weight is not None and weight.tolist() == [[pytest.approx(math.exp(0.5))] * 3]


# --- opsm -------------------------------------------------------------------------------------


def opsm_keeps(advantages: list[float], moved: list[float], **fields: object) -> list[list[float]]:
    """Rows of two tokens whose log-probs are `moved` below the anchor, and one padding token."""
    rows = len(advantages)
    anchor = torch.full((rows, 3), -1.0, dtype=torch.float64)
    current = anchor - torch.tensor([[2 * m, 0.0, NAN] for m in moved], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0]] * rows)
    other = torch.full_like(anchor, -50.0)
    roll = fields.get("anchor", "roll") == "roll"
    batch = build_batch(
        mask,
        advantages=torch.tensor(advantages, dtype=torch.float64)[:, None].expand(rows, 3),
        rollout_logprobs=anchor if roll else other,
        old_logprobs=other if roll else anchor,
    )
    keep = build("opsm", **fields).keeps(current, batch)
    assert keep is not None and not keep.requires_grad
    return keep.tolist()


@pytest.mark.parametrize("anchor", ["roll", "old"])
def test_opsm_drops_only_bad_responses_that_the_policy_has_left(anchor: str) -> None:
    got = opsm_keeps([1.0, 0.0, -1.0, -1.0, -1.0], [9, 9, 9, 0.25, -9], anchor=anchor, delta=0.25)
    assert got == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0]]
    assert opsm_keeps([-1.0, -1.0], [0.0, 2e-4], anchor=anchor) == [[1, 1, 0], [0, 0, 0]]


def test_opsm_keeps_what_it_cannot_judge_and_makes_no_weight() -> None:
    batch = build_batch(
        [[1.0, 1.0]],
        advantages=torch.tensor([[-1.0, -1.0]]),
        rollout_logprobs=torch.tensor([[NAN, NAN]]),
    )
    keep = build("opsm").keeps(torch.tensor([[-30.0, -30.0]]), batch)
    assert keep is not None and keep.tolist() == [[1, 1]]
    found = correct("opsm")
    assert found.weight is None and found.keep is None


# --- metrics ----------------------------------------------------------------------------------


def test_the_metrics_say_how_much_was_cut_and_dropped() -> None:
    truncated = correct("tis_token").metrics
    assert truncated["tis/clip_frac"] == pytest.approx(2 / 6) and "mis/drop_frac" not in truncated
    assert correct("tis_seq").metrics["tis/clip_frac"] == pytest.approx(2 / 6)
    masked = correct("mis_token").metrics
    assert masked["mis/drop_frac"] == pytest.approx(1 / 6) and "tis/clip_frac" not in masked
    assert correct("mis_seq").metrics["mis/drop_frac"] == pytest.approx(2 / 6)
    reject = [{"stat": "k2", "level": "token", "high": 0.5}]
    assert correct("mis_token", reject=reject).metrics["mis/drop_frac"] == pytest.approx(3 / 6)
    weights = torch.tensor([4.0, 1.0, 1.2, 0.25, 4.0, 0.5], dtype=torch.float64)
    for metrics in (truncated, masked):
        wanted = weights.sum() ** 2 / (6 * weights.square().sum())
        assert metrics["ess/token"] == pytest.approx(wanted.item())
        assert metrics["ess/seq"] == pytest.approx(5.7**2 / (3 * (16 + 1.44 + 0.25)))


@pytest.mark.parametrize("name", [*WEIGHTED, "none", "veto"])
def test_full_statistics_are_finite_and_their_names_are_known(name: str) -> None:
    reject = [{"stat": s, "level": "seq_mean", "high": 1.5} for s in ("k1", "k2", "k3")]
    ratios = torch.tensor([[4.0, 0.3], [1.0, 1.2], [9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    metrics = correct(name, ratios, mask, reject=reject, statistics="full").metrics
    check_names(metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert {"reject/token_frac", "reject/seq_mean_k3/seq_std"} <= metrics.keys()
    assert ("is_weight/mean" in metrics) == (name in WEIGHTED)
    brief = correct(name, ratios, mask, reject=reject).metrics
    assert set(brief) < set(metrics)


def test_empty_rows_enter_row_statistics_only_if_asked() -> None:
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.float64)])
    ratios = torch.cat([RATIOS, torch.ones(1, 3, dtype=torch.float64)])
    reject = [{"stat": "k3", "level": "seq_mean", "high": 0.1}]
    without = correct("tis_seq", ratios, mask, reject=reject, statistics="full").metrics
    counted = correct(
        "tis_seq", ratios, mask, reject=reject, statistics="full", count_empty_seqs=True
    ).metrics
    assert without["is_weight/seq_mean"] == pytest.approx((2 + 1.2 + 0.5) / 3)
    assert counted["is_weight/seq_mean"] == pytest.approx((2 + 1.2 + 0.5 + 0) / 4)
    assert without["reject/seq_frac"] == pytest.approx(2 / 3)
    assert counted["reject/seq_frac"] == pytest.approx(2 / 4)


def test_a_batch_without_a_single_token_is_no_error() -> None:
    for name in [*WEIGHTED, "veto"]:
        found = correct(name, RATIOS, torch.zeros_like(MASK), statistics="full")
        assert found.weight is None or not found.weight.any()
        assert all(math.isfinite(value) for value in found.metrics.values())
