"""Values and gradients of the losses whose ratio is of one token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss
from posttrain.core.errors import ConfigError
from posttrain.core.kit.batches import build_batch
from posttrain.core.training.objective import LossTerm, Objective, positive_share
from tests.helpers.losses import (
    ACTIVE,
    MANAGER,
    build_aggregator,
    build_loss,
    objective_of,
    policy_batch,
    token_loss,
    total_and_grad,
)

RATIOS = [[0.5, 0.8, 1.0, 1.2, 1.5]]
ONE = [1.0] * 5


def test_importance_pg_is_never_cut() -> None:
    result, grad = token_loss("importance_pg", [[0.1, 4.0]], [[2.0, -1.0]])
    assert result.loss[0].tolist() == pytest.approx([-0.2, 4.0])
    assert grad[0].tolist() == pytest.approx([-0.2, 4.0])


def test_dual_clip_is_ppo_clip_with_c_3() -> None:
    ratios, bad = [[0.5, 1.0, 2.0, 3.0, 10.0]], [[-1.0] * 5]
    dual, grad = token_loss("dual_clip", ratios, bad)
    same, same_grad = token_loss("ppo_clip", ratios, bad, dual_clip_c=3.0)
    assert (-dual.loss[0]).tolist() == pytest.approx([-0.8, -1.0, -2.0, -3.0, -3.0])
    assert torch.equal(dual.loss, same.loss) and torch.equal(grad, same_grad)
    assert grad[0, 4] == 0.0 and grad[0, 2] == pytest.approx(2.0)


def test_sapo_fades_on_both_sides_and_never_dies() -> None:
    good, grad = token_loss("sapo", [[0.5, 1.0, 1.5, 2.0]], [[1.0] * 4])
    assert (-good.loss[0]).tolist() == pytest.approx([1.510163, 2.0, 2.489837, 2.924234], abs=1e-6)
    fading = [0.940015, 1.0, 0.940015, 0.786448]
    weights = [r * f for r, f in zip([0.5, 1.0, 1.5, 2.0], fading, strict=True)]
    assert (-grad[0]).tolist() == pytest.approx(weights, abs=1e-6)
    bad, grad = token_loss("sapo", [[0.5, 1.0, 1.5, 2.0]], [[-1.0] * 4])
    assert bad.loss[0, 1].item() == pytest.approx(1.904762, abs=1e-6)
    fading = [0.934140, 1.0, 0.934140, 0.768110]
    weights = [r * f for r, f in zip([0.5, 1.0, 1.5, 2.0], fading, strict=True)]
    assert grad[0].tolist() == pytest.approx(weights, abs=1e-6)
    far, grad = token_loss("sapo", [[1e-4, 30.0]], [[1.0, 1.0]])
    assert (grad != 0).all() and far.loss.isfinite().all()


def test_cispo_keeps_the_gradient_of_a_token_that_it_clips() -> None:
    _, grad = token_loss("cispo", [[2.0, 0.4]], [[1.0, 1.0]])
    assert (-grad[0]).tolist() == pytest.approx([2.0, 0.4])
    fields = {"clip_low": 0.2, "clip_high": 0.2}
    result, grad = token_loss("cispo", [[2.0, 0.4]], [[1.0, 1.0]], **fields)
    assert (-grad[0]).tolist() == pytest.approx([1.2, 0.8])
    assert result.loss[0].tolist() == pytest.approx([-1.2 * math.log(2), -0.8 * math.log(0.4)])
    assert result.metrics["clip/frac"][0].tolist() == [1, 1]
    assert result.metrics["clip/high_frac"][0].tolist() == [1, 0]


def test_cispo_takes_a_cap_as_it_is() -> None:
    _, grad = token_loss("cispo", [[8.0, 3.0]], [[1.0, 1.0]], weight_max=5.0)
    assert (-grad[0]).tolist() == pytest.approx([5.0, 3.0])


def test_dppo_leaves_out_tokens_that_would_leave_the_region_further() -> None:
    # p_old = 0.2 for both: 0.5 is 0.3 above it, 0.3 is 0.1 above it, 0.05 is 0.15 below it.
    loss = build_loss("dppo", {"delta_high": 0.2, "delta_low": 0.1, "ratio_max": 2.0})
    probs = torch.tensor([[0.5, 0.3, 0.05, 0.5, 0.05]], dtype=torch.float64)
    signs = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    new, old = probs.log().requires_grad_(), torch.full_like(probs, 0.2).log()
    batch = build_batch(torch.ones(1, 5), advantages=signs, rollout_logprobs=old)
    result = loss.token_loss(new, batch)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    assert grad[0].tolist() == pytest.approx([0.0, -1.5, -0.25, 2.0, 0.0])
    assert result.loss[0, 0] == 0 and result.metrics["clip/high_frac"][0].tolist() == [
        1,
        0,
        0,
        0,
        0,
    ]
    assert result.metrics["clip/low_frac"][0].tolist() == [0, 0, 0, 0, 1]


def test_dppo_kl_is_of_the_token_against_the_rest() -> None:
    p_old, p = 0.2, 0.4
    kl = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))
    new = torch.tensor([[math.log(p)]], dtype=torch.float64)
    batch = build_batch(
        [[1]],
        advantages=torch.ones(1, 1, dtype=torch.float64),
        rollout_logprobs=torch.tensor([[math.log(p_old)]], dtype=torch.float64),
    )
    for bound, dropped in ((kl * 0.999, True), (kl * 1.001, False)):
        loss = build_loss("dppo", {"divergence": "kl", "delta_high": bound})
        assert (loss.token_loss(new, batch).loss[0, 0].item() == 0) is dropped


def test_dppo_counts_the_kept_tokens_whose_weight_is_capped() -> None:
    """Ratios 10, 10, 10 and 2 at a cap of 3; the first is out of the region, and not kept."""
    probs = torch.tensor([[0.5, 0.5, 0.05, 0.1]], dtype=torch.float64)
    old = torch.tensor([[0.05, 0.05, 0.005, 0.05]], dtype=torch.float64)
    signs = torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
    batch = build_batch(torch.ones(1, 4), advantages=signs, rollout_logprobs=old.log())
    found = build_loss("dppo").token_loss(probs.log(), batch).metrics
    assert found["clip/frac"].tolist() == [[1, 0, 0, 0]]
    assert found["clip/dual_frac"].tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("engine", "now", "sign", "one", "both"),
    [
        (1 / 3, 0.6, 1.0, 0.0, 0.0),
        (1 / 3, 0.6, -1.0, 1.8, 0.0),
        (0.5, 0.25, -1.0, 0.0, 0.0),
        (0.5, 0.25, 1.0, -0.5, 0.0),
        (0.5, 0.55, 1.0, -1.1, -1.1),
    ],
)
def test_drift_pulls_back_what_dppo_leaves_out(
    engine: float, now: float, sign: float, one: float, both: float
) -> None:
    """The default loss of prime-rl, and its form for both signs; drift has the factor 0.001."""
    new = torch.tensor([[now]], dtype=torch.float64).log().requires_grad_()
    batch = build_batch(
        [[1]],
        advantages=torch.full((1, 1), sign, dtype=torch.float64),
        rollout_logprobs=torch.tensor([[engine]], dtype=torch.float64).log(),
    )
    drift = build_loss("drift").token_loss(new, batch).loss.sum()
    assert drift.item() == pytest.approx(math.log(now / engine) ** 2)
    pull = 2e-3 * math.log(now / engine)
    bounds = {"delta_low": 0.1, "delta_high": 0.1, "sided": "both"}
    for fields, slope in (({}, one), (bounds, both)):
        loss = build_loss("dppo", {"ratio_max": None, **fields})
        total = loss.token_loss(new, batch).loss.sum() + 1e-3 * drift
        (grad,) = torch.autograd.grad(total, new, retain_graph=True)
        assert grad.item() == pytest.approx(slope + pull)


def test_a_two_sided_clip_has_no_gradient_out_of_bounds() -> None:
    for sign in (1.0, -1.0):
        result, grad = token_loss("two_sided_clip", RATIOS, [[sign] * 5], low=0.7, high=1.3)
        assert result.loss[0].tolist() == pytest.approx(
            [-sign * r for r in (0.7, 0.8, 1, 1.2, 1.3)]
        )
        assert grad[0].tolist() == pytest.approx([0, -sign * 0.8, -sign, -sign * 1.2, 0])
        assert result.metrics["clip/frac"][0].tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("name", ["importance_pg", "cispo", "dppo", "two_sided_clip"])
def test_the_anchor_is_the_policy_that_the_ratio_is_against(name: str) -> None:
    new = torch.tensor([[-1.0]], dtype=torch.float64)
    batch = build_batch(
        [[1]],
        advantages=torch.ones(1, 1, dtype=torch.float64),
        old_logprobs=new - 0.3,
        rollout_logprobs=new - 0.1,
    )
    for anchor, shift in (("old", 0.3), ("rollout", 0.1)):
        loss = build_loss(name, {"anchor": anchor})
        assert loss.required_columns() == {"advantages", f"{anchor}_logprobs"}
        ratio = loss.token_loss(new, batch).ratio
        assert ratio is not None and ratio.item() == pytest.approx(math.exp(shift))


def test_dro_pulls_back_in_proportion_to_the_distance() -> None:
    result, grad = token_loss("dro", [[2.0, 0.5]], [[1.0, 0.0]], beta=0.5)
    gap = math.log(2)
    assert grad[0].tolist() == pytest.approx([-(1 - 0.5 * gap), -0.5 * gap])
    assert result.loss[0].tolist() == pytest.approx([-gap + 0.25 * gap**2, 0.25 * gap**2])


def test_trpo_is_the_surrogate_that_takes_its_own_step() -> None:
    result, grad = token_loss("trpo", [[2.0, 0.4]], [[1.0, -1.0]])
    assert result.loss[0].tolist() == pytest.approx([-2.0, 0.4])
    assert grad[0].tolist() == pytest.approx([-2.0, 0.4])
    assert build_loss("trpo").owns_update and not build_loss("ppo_clip").owns_update


def test_ppo_penalty_adds_the_kl_of_the_old_policy() -> None:
    result, grad = token_loss("ppo_penalty", [[2.0, 0.5]], [[1.0, 0.0]], beta=3.0)
    k3 = [2 - 1 - math.log(2), 0.5 - 1 - math.log(0.5)]
    assert result.loss[0].tolist() == pytest.approx([-2 + 3 * k3[0], 3 * k3[1]])
    assert grad[0].tolist() == pytest.approx([-2 + 3 * 1.0, 3 * -0.5])


def test_ppo_penalty_halves_and_doubles_beta() -> None:
    loss = build_loss("ppo_penalty", {"beta": 1.0, "kl_target": 0.01})
    assert loss.wants_phase_kl()
    seen = []
    for kl in (0.006, 0.007, 0.014, 0.016, 0.016, float("nan")):
        loss.on_phase_end({"kl/phase_k3": kl})
        seen.append(loss.state()["beta"])
    assert seen == [0.5, 0.5, 0.5, 1.0, 2.0, 2.0]
    loss.on_phase_end({})
    again = build_loss("ppo_penalty")
    again.load_state(loss.state())
    assert again.state() == {"beta": 2.0}
    batch, new = policy_batch(1)
    metrics = again.token_loss(new, batch).metrics
    assert metrics["kl/penalty_beta"].eq(2.0).all()


def test_positive_lm_is_the_mean_over_the_tokens_of_correct_answers() -> None:
    batch, new = policy_batch(1)
    batch = batch.with_columns(acc=torch.tensor([1.0, 0.5, 1, float("nan"), 1, 0, 0, 0]))
    value, grad = total_and_grad(objective_of(build_loss("positive_lm")), batch, new)
    correct = batch.mask.bool() & torch.tensor([1, 0, 1, 0, 1, 0, 0, 0]).bool()[:, None]
    assert value.item() == pytest.approx(-new[correct].mean().item())
    assert torch.equal(grad != 0, correct)
    none = batch.with_columns(acc=torch.zeros(8))
    value, grad = total_and_grad(objective_of(build_loss("positive_lm")), none, new)
    assert value == 0 and not grad.any()


def test_ptx_is_the_negative_log_likelihood_of_its_own_batch() -> None:
    batch, new = policy_batch(1)
    loss = build_loss("ptx")
    value, _ = total_and_grad(objective_of(loss), batch, new)
    assert value.item() == pytest.approx(-new[batch.mask.bool()].mean().item())
    assert loss.source == "ptx" and loss.required_columns() == frozenset()
    assert build_loss("positive_lm").source == "rollout"


@pytest.mark.parametrize("name", [e.name for e in MANAGER.entries("policy_loss")])
def test_nothing_flows_into_the_other_policies(name: str) -> None:
    """And every loss with a ratio says which: with gradient, and before any clip."""
    loss: PolicyLoss = build_loss(name, ACTIVE.get(name))  # type: ignore[type-arg]
    batch, new = policy_batch(6)
    prepared = loss.prepare(batch, torch.Generator()) if loss.needs_prepare() else None
    for column in ("old_logprobs", "rollout_logprobs"):
        # Assigned past `with_columns`, which would detach them.
        object.__setattr__(batch, column, getattr(batch, column).clone().requires_grad_())
    result = loss.token_loss(new.requires_grad_(), batch, prepared)
    others = [batch.column("old_logprobs"), batch.rollout_logprobs]
    grads = torch.autograd.grad(
        result.loss.sum(), [new, *others], allow_unused=True, retain_graph=True
    )
    assert grads[0].any() and all(grad is None for grad in grads[1:])
    assert all(not value.requires_grad for value in result.metrics.values())
    assert (result.ratio is not None) == loss.uses_ratio
    if result.ratio is not None:
        (slope,) = torch.autograd.grad(result.ratio.sum(), new)
        assert slope[batch.mask.bool()].all()
        assert result.metrics["ratio"].equal(torch.where(batch.mask.bool(), result.ratio, 0.0))


def pulls_of(objective: Objective, batch: RolloutBatch, new: Tensor) -> dict[str, float]:
    """The sums that `contrib/pos_share` is made of, over all rows at once."""
    batch, _ = objective.correct(batch)
    prepared = objective.prepare(batch, torch.Generator().manual_seed(5))
    new = new.clone().requires_grad_()
    loss = objective.loss(new, -new, batch, prepared)
    return {name: float(value) for name, value in loss.pulls.items()}


def test_the_positive_share_of_the_gradient_counts_live_tokens() -> None:
    ratios = torch.tensor([[1.1, 1.5, 0.9, 0.5, 2.0]], dtype=torch.float64)
    batch = build_batch(
        torch.ones(1, 5),
        old_logprobs=torch.zeros(1, 5, dtype=torch.float64),
        advantages=torch.tensor([[2.0, 2.0, -1.0, -1.0, -1.0]], dtype=torch.float64),
    )
    pulls = pulls_of(objective_of(build_loss("ppo_clip")), batch, ratios.log())
    assert pulls == {
        "contrib/pos": pytest.approx(2.2 / 5),
        "contrib/neg": pytest.approx((0.9 + 2.0) / 5),
    }


@pytest.mark.parametrize(
    ("aggregator", "share"), [("token-mean", 1 / 6), ("token-sum", 1 / 6), ("prompt-mean", 1 / 6),
     ("seq-mean-token-sum-norm", 1 / 6), ("seq-mean-token-mean", 1 / 2)]
)  # fmt: skip
def test_the_positive_share_has_the_weights_of_the_aggregator(
    aggregator: str, share: float
) -> None:
    """A right response of one token next to a wrong one of five."""
    mask = torch.tensor([[1.0, 0, 0, 0, 0], [1.0] * 5])
    batch = build_batch(
        mask,
        group_id=(0, 0),
        old_logprobs=torch.zeros(2, 5, dtype=torch.float64),
        advantages=mask.double() * torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
    )
    objective = objective_of(build_loss("ppo_clip"), aggregator)
    pulls = pulls_of(objective, batch, torch.zeros(2, 5, dtype=torch.float64))
    metrics = positive_share({**pulls, "loss/total": 0.0})
    assert metrics == {"loss/total": 0.0, "contrib/pos_share": pytest.approx(share)}


def test_the_positive_share_adds_the_terms_with_their_factors() -> None:
    mask = torch.ones(2, 1)
    batch = build_batch(
        mask,
        old_logprobs=torch.zeros(2, 1, dtype=torch.float64),
        advantages=torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        acc=torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    mean = build_aggregator("token-mean")
    terms = (LossTerm(build_loss("ppo_clip"), mean), LossTerm(build_loss("positive_lm"), mean, 3.0))
    pulls = pulls_of(Objective(terms, mean), batch, torch.zeros(2, 1, dtype=torch.float64))
    assert positive_share(pulls)["contrib/pos_share"] == pytest.approx((0.5 + 3) / (0.5 + 3 + 0.5))


@pytest.mark.parametrize("name", sorted(e.name for e in MANAGER.entries("policy_loss")))
def test_the_pulls_are_the_gradient_of_the_policy_terms(name: str) -> None:
    batch, new = policy_batch(3)
    loss = build_loss(name, ACTIVE.get(name))
    objective = objective_of(loss, "seq-mean-token-mean")
    batch, _ = objective.correct(batch)
    _, grad = total_and_grad(objective, batch, new)
    pulls = pulls_of(objective, batch, new)
    advantages = batch.column("advantages")
    assert pulls["contrib/pos"] == pytest.approx(float(grad[advantages > 0].abs().sum()))
    assert pulls["contrib/neg"] == pytest.approx(float(grad[advantages < 0].abs().sum()))


@pytest.mark.parametrize("name", ["importance_pg", "ppo_clip", "sapo", "trpo", "kl_cov", "bapo"])
def test_a_log_ratio_beyond_the_clamp_is_finite_and_has_no_gradient(name: str) -> None:
    result, grad = token_loss(name, [[math.exp(25.0), 1.0]], [[-1.0, 1.0]])
    assert result.loss.isfinite().all()
    # kl_cov's penalty, which is linear, is not cut.
    assert grad[0, 0].item() == (1.0 if name == "kl_cov" else 0.0)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ppo_clip", {"dual_clip_c": 1.0}),
        ("ppo_clip", {"clip_low": 1.5}),
        ("gspo", {"ratio_level": "prompt"}),
        ("sapo", {"tau_pos": 0.0}),
        ("bapo", {"low_stop": 0.5}),
        ("bapo", {"rho0": 0.0}),
        ("trpo", {"backtrack_ratio": 1.0}),
        ("ppo_penalty", {"beta": 0.0}),
        ("clip_cov", {"cov_ratio": 1.5}),
    ],
)
def test_settings_out_of_bounds_are_refused(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        build_loss(name, fields)
