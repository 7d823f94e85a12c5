"""The preference objective: scores from token log-probs, options of pairs, metrics, counts.

Over 300 lines, by three: its cases share one batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.core.analysis.learning_curves import preference_panels
from posttrain.core.contracts import PairLoss, PreferenceLoss
from posttrain.core.math.preference import (
    FDivergence,
    desensitised_weights,
    divergence_score,
    log_odds_ratio,
    matched_by_rank,
)
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.preference_objective import (
    LabelTokens,
    MiniCounts,
    PairTokens,
    PreferenceMicro,
    PreferenceObjective,
    PreferenceTerm,
    Scoring,
    with_margin,
)
from tests.helpers.preference import MANAGER, column, made_pairs, mask_of

NAN = float("nan")


def objective(*names: str, **options: Any) -> PreferenceObjective:
    terms = tuple(PreferenceTerm(MANAGER.build(PreferenceLoss, name)) for name in names)
    return PreferenceObjective(terms, **options)


def whole(made: PreferenceObjective, tokens: PairTokens | LabelTokens) -> PreferenceMicro:
    return made.loss(tokens, MiniCounts.of(tokens), made.prepare(tokens))


def metrics_of(micro: PreferenceMicro) -> dict[str, float]:
    sums = MetricSums()
    micro.record(sums)
    return with_margin(sums.result())


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js", "alpha"])
def test_every_divergence_scores_0_at_the_reference_and_rises(divergence: FDivergence) -> None:
    x = torch.linspace(-400, 400, 801, dtype=torch.float64).requires_grad_()
    score = divergence_score(x, divergence, 0.5)
    (grad,) = torch.autograd.grad(score.sum(), x)
    assert score[400].item() == pytest.approx(0)
    assert score.isfinite().all() and grad.isfinite().all()
    assert (score.diff() >= 0).all()
    assert grad[400].item() == pytest.approx({"js": 0.5}.get(divergence, 1.0))


def test_divergences_of_the_table() -> None:
    x = column(0.7)
    assert divergence_score(x, "forward_kl", 0).item() == pytest.approx(1 - math.exp(-0.7))
    assert divergence_score(x, "js", 0).item() == pytest.approx(
        math.log(2) - math.log1p(math.exp(-0.7))
    )
    assert divergence_score(x, "alpha", 0.5).item() == pytest.approx(
        (math.exp(-0.5 * 0.7) - 1) / -0.5
    )
    assert divergence_score(x, "alpha", 1.0).item() == pytest.approx(0.7)


def test_scores_are_summed_log_ratios() -> None:
    tokens = made_pairs()
    scores = Scoring().pairs(tokens, MiniCounts(3.0, 8.0))
    assert tokens.ref_chosen is not None
    wanted = (tokens.chosen - tokens.ref_chosen).sum(dim=1)
    torch.testing.assert_close(scores.chosen, wanted)
    assert scores.chosen_tokens is not None and scores.chosen_tokens.tolist() == [5, 2, 1]
    assert scores.margin.tolist() == [0.5, 0.0, -0.5]
    free = Scoring().pairs(replace(tokens, ref_chosen=None, ref_rejected=None), MiniCounts(3.0))
    torch.testing.assert_close(free.chosen, tokens.chosen.sum(dim=1))


def test_tokens_past_the_shorter_answer_weigh_less() -> None:
    weights = desensitised_weights(mask_of(5, 2), mask_of(3, 4), 0.25)
    assert weights[0].tolist() == [1, 1, 1, 0.25, 0.25]
    assert weights[1][:2].tolist() == [1, 1]
    tokens = made_pairs()
    scores = Scoring(ld_alpha=0.25).pairs(tokens, MiniCounts(3.0))
    plain = tokens.chosen[0]
    assert scores.chosen_logps is not None and scores.chosen_nll is not None
    torch.testing.assert_close(scores.chosen_logps[0], plain[:3].sum() + 0.25 * plain[3:].sum())
    # What is learned as text stays the whole answer.
    torch.testing.assert_close(scores.chosen_nll[0], -plain.sum())


def test_a_pair_the_policy_would_say_weighs_more_and_the_weight_has_no_gradient() -> None:
    tokens = made_pairs()
    weighed, plain = objective("dpo", scoring=Scoring(wpo=True)), objective("dpo")
    assert tokens.chosen_log_sum_sq is not None and tokens.rejected_log_sum_sq is not None
    exponents = [
        ((lp - sq) * mask).sum(dim=1) / mask.sum(dim=1)
        for lp, sq, mask in (
            (tokens.chosen, tokens.chosen_log_sum_sq, tokens.chosen_mask),
            (tokens.rejected, tokens.rejected_log_sum_sq, tokens.rejected_mask),
        )
    ]
    weights = (exponents[0] + exponents[1]).exp().detach()
    got, base = whole(weighed, tokens), whole(plain, tokens)
    torch.testing.assert_close(got.losses, weights * base.losses)
    (grad,) = torch.autograd.grad(got.total, tokens.chosen, retain_graph=True)
    (wanted,) = torch.autograd.grad((weights * base.losses).mean(), tokens.chosen)
    torch.testing.assert_close(grad, wanted)
    assert metrics_of(got)["pref/wpo_weight"] == pytest.approx(weights.mean().item())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scoring": Scoring("forward_kl")},
        {"scoring": Scoring(ld_alpha=0.5)},
        {"scoring": Scoring(wpo=True)},
    ],
)
@pytest.mark.parametrize("name", ["dpo", "ipo", "aot", "simpo", "orpo", "sft"])
def test_what_lies_under_the_masks_does_not_matter(name: str, options: dict[str, Any]) -> None:
    found = []
    for fill in (0.25, NAN):
        tokens = made_pairs(fill)
        total = whole(objective(name, **options), tokens).total
        grads = torch.autograd.grad(total, (tokens.chosen, tokens.rejected), materialize_grads=True)
        found.append((total.detach(), *grads))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[0][1].abs().sum() > 0


def test_log_odds_and_ranks() -> None:
    a, b = column(math.log(0.8)), column(math.log(0.5))
    assert log_odds_ratio(a, b).item() == pytest.approx(math.log(0.8 / 0.2))
    matched = matched_by_rank(column(3, 1, 2), column(10, 30, 20))
    assert matched.tolist() == [30, 10, 20]


# --- the sum of losses ----------------------------------------------------------------------------


def test_terms_are_added_with_their_factors_and_shown_apart() -> None:
    tokens = made_pairs()
    dpo, sft = (PreferenceTerm(MANAGER.build(PreferenceLoss, n)) for n in ("dpo", "sft"))
    both = PreferenceObjective((replace(dpo, coef=0.5), replace(sft, coef=2.0)))
    got = whole(both, tokens)
    apart = [whole(PreferenceObjective((term,)), tokens).total.item() for term in (dpo, sft)]
    assert got.total.item() == pytest.approx(0.5 * apart[0] + 2 * apart[1])
    found = metrics_of(got)
    assert found["loss/term/dpo"] == pytest.approx(0.5 * apart[0])
    assert found["loss/term/sft"] == pytest.approx(2 * apart[1])
    assert apart[1] == pytest.approx(-tokens.chosen.sum().item() / 8)  # a mean over tokens


def test_two_losses_of_one_plugin_have_two_records() -> None:
    tokens, betas = made_pairs(), (0.1, 0.5)
    terms = [PreferenceTerm(MANAGER.build(PreferenceLoss, "dpo", {"beta": b})) for b in betas]
    found = metrics_of(whole(PreferenceObjective(tuple(terms)), tokens))
    apart = [whole(PreferenceObjective((term,)), tokens).total.item() for term in terms]
    assert [found["loss/term/dpo"], found["loss/term/dpo_2"]] == pytest.approx(apart)


@pytest.mark.parametrize(
    "names", [("dpo",), ("sft", "dpo"), ("aot",), ("aot_unpaired",), ("cpo",), ("orpo",)]
)
def test_shares_of_micro_batches_add_up(names: tuple[str, ...]) -> None:
    made, tokens = objective(*names), made_pairs()
    prepared, counts = made.prepare(tokens), MiniCounts.of(tokens)
    one = whole(made, tokens)
    parts, sums = [], MetricSums()
    for index in torch.arange(3).split(2):
        part = PairTokens(
            **{
                name: None if value is None else value[index]
                for name in PairTokens.__dataclass_fields__
                for value in [getattr(tokens, name)]
            }
        )
        share = made.loss(part, counts, prepared.rows(index))
        share.record(sums)
        parts.append(share.total)
    split = torch.stack(parts).sum()
    torch.testing.assert_close(split, one.total)
    assert with_margin(sums.result()) == pytest.approx(metrics_of(one))
    inputs = (tokens.chosen, tokens.rejected)
    for got, wanted in zip(
        torch.autograd.grad(split, inputs, retain_graph=True, materialize_grads=True),
        torch.autograd.grad(one.total, inputs, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


PAIR_LOSSES = [
    entry.name
    for entry in MANAGER.entries("preference_loss")
    if issubclass(entry.cls, PairLoss) and "policy" in entry.cls.trains
]


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_divergence_and_a_reference_matter_to_just_the_losses_that_say_so(name: str) -> None:
    tokens = made_pairs()
    base = whole(objective(name), tokens).total.item()
    other = whole(objective(name, scoring=Scoring("forward_kl")), tokens).total.item()
    bare = whole(objective(name), replace(tokens, ref_chosen=None, ref_rejected=None)).total.item()
    loss = MANAGER.build(PreferenceLoss, name)
    assert (other != base) == loss.reads_scores
    assert (bare != base) == loss.needs_reference


# --- metrics --------------------------------------------------------------------------------------


def one_pair(policy: tuple[float, float], reference: tuple[float, float]) -> PairTokens:
    """A pair of answers of one token with these probabilities."""
    values = [torch.tensor([[math.log(p)]], dtype=torch.float64) for p in (*policy, *reference)]
    one = torch.ones(1, 1)
    return PairTokens(values[0], values[1], one, one, values[2], values[3])


def test_both_falling_is_seen_where_the_loss_falls() -> None:
    found = metrics_of(whole(objective("dpo"), one_pair((0.3, 0.1), (0.4, 0.3))))
    assert found["loss/preference"] == pytest.approx(0.653423, abs=1e-6)
    assert found["pref/both_falling"] == 1.0 and found["rewards/accuracy"] == 1.0
    assert found["rewards/chosen"] == pytest.approx(0.1 * -0.287682, abs=1e-7)
    assert found["rewards/margin"] == pytest.approx(0.1 * 0.810930, abs=1e-7)
    assert found["logps/chosen_delta"] == pytest.approx(-0.287682, abs=1e-6)
    assert (
        metrics_of(whole(objective("dpo"), one_pair((0.5, 0.1), (0.4, 0.3))))["pref/both_falling"]
        == 0.0
    )


def test_without_a_reference_nothing_is_said_to_have_moved() -> None:
    tokens = replace(one_pair((0.3, 0.1), (1.0, 1.0)), ref_chosen=None, ref_rejected=None)
    found = metrics_of(whole(objective("cpo"), tokens))
    assert "pref/both_falling" not in found and "logps/chosen_delta" not in found
    assert found["rewards/chosen"] == pytest.approx(0.1 * math.log(0.3))


def test_the_logged_reward_is_that_of_the_first_loss_with_a_beta() -> None:
    assert objective("sft", "dpo").rewards.scale == 0.1
    assert objective("sft").rewards.scale == 1.0
    assert objective("ipo").rewards.scale == 0.1 and not objective("ipo").rewards.per_token
    assert objective("simpo").rewards.per_token and objective("orpo").rewards.per_token


def test_simpo_ranks_by_log_probs_per_token() -> None:
    short, long = mask_of(1), mask_of(5)
    tokens = PairTokens(-0.5 * long, -1.0 * short, long, short)
    assert metrics_of(whole(objective("cpo"), tokens))["rewards/accuracy"] == 0.0
    assert metrics_of(whole(objective("simpo"), tokens))["rewards/accuracy"] == 1.0


def test_metrics_of_labelled_rows_are_by_label() -> None:
    mask = mask_of(5, 2, 1)
    logprobs, reference = -1.0 * mask, -0.5 * mask
    kl = -torch.ones(3, 2)
    tokens = LabelTokens(logprobs, mask, column(1, 0, 0), reference, kl, 2 * kl, torch.ones(3, 2))
    made = objective("kto")
    found = metrics_of(whole(made, tokens)) | dict(made.prepare(tokens).metrics)
    assert found["kto/z_ref"] == 2.0
    assert found["rewards/chosen"] == pytest.approx(0.1 * -2.5)
    assert found["rewards/rejected"] == pytest.approx(0.1 * -0.75)
    assert found["rewards/margin"] == pytest.approx(-0.175)
    assert found["logps/rejected"] == -1.5 and found["logps/rejected_per_token"] == -1.0
    one_label = replace(tokens, desirable=column(1, 1, 1))
    found = metrics_of(whole(made, one_label))
    assert "rewards/rejected" not in found and "rewards/margin" not in found


def test_the_curves_of_single_answers_show_how_far_each_kind_moved() -> None:
    found = {"logps/chosen_delta": 1.5, "logps/rejected_delta": -2.0}
    away = preference_panels([{"step": 1.0, **found}], [])[4]
    assert away.unit == "nats per answer"
    assert [(line.label, line.values) for line in away.series] == [
        ("chosen", (1.5,)),
        ("rejected", (-2.0,)),
    ]
    pairs = preference_panels([{"step": 1.0, "pref/both_falling": 0.5, **found}], [])[4]
    assert pairs.unit == "fraction of pairs" and pairs.series[0].values == (0.5,)


def test_the_curves_show_what_the_objective_measures() -> None:
    found = metrics_of(whole(objective("dpo"), made_pairs()))
    ranked = {
        "step": 1.0,
        "pref/held_out_pair_accuracy": 0.5,
        "pref/held_out_low": 0.1,
        "pref/held_out_high": 0.9,
    }
    panels = preference_panels([{"step": 1.0, "grad/norm": 1.0, **found}], [ranked])
    assert len(panels) == 6 and all(panel.series for panel in panels)
    assert panels[1].series[1].low == (0.1,)
    check_names(found)
