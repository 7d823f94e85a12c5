"""Where policy, old policy and engine agree, every loss is the plain policy gradient."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.losses import build_loss, objective_of, policy_batch, token_loss, total_and_grad

# Losses whose gradient is -A at ratio 1. rloo_seq has the answer's length on top.
SAME = [
    "importance_pg",
    "ppo_clip",
    "dual_clip",
    "gspo",
    "gspo_token",
    "gmpo",
    "sapo",
    "cispo",
    "bapo",
    "kl_cov",
    "dppo",
    "dro",
    "two_sided_clip",
    "fipo",
    "trpo",
    "ppo_penalty",
    "vespo",
]
MODES = [
    "token-sum",
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-sum-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]


@pytest.mark.parametrize("aggregator", MODES)
@pytest.mark.parametrize("name", SAME)
def test_the_first_update_is_the_policy_gradient(name: str, aggregator: str) -> None:
    batch, new = policy_batch(seed=1, on_policy=True)
    _, plain = total_and_grad(objective_of(build_loss("vanilla_pg"), aggregator), batch, new)
    _, grad = total_and_grad(objective_of(build_loss(name), aggregator), batch, new)
    assert plain.abs().max() > 0
    torch.testing.assert_close(grad, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregator", MODES)
def test_the_ratio_of_whole_answers_weighs_them_by_their_length(aggregator: str) -> None:
    batch, new = policy_batch(seed=1, on_policy=True)
    _, plain = total_and_grad(objective_of(build_loss("vanilla_pg"), aggregator), batch, new)
    _, grad = total_and_grad(objective_of(build_loss("rloo_seq"), aggregator), batch, new)
    lengths = batch.mask.sum(dim=1, keepdim=True)
    torch.testing.assert_close(grad, plain * lengths, rtol=1e-9, atol=1e-12)


def test_clip_cov_is_the_policy_gradient_but_for_the_dropped_tokens() -> None:
    batch, new = policy_batch(seed=1, on_policy=True)
    fields = {"cov_ratio": 0.3, "cov_low": -9.0, "cov_high": 9.0}
    _, plain = total_and_grad(objective_of(build_loss("vanilla_pg")), batch, new)
    _, grad = total_and_grad(objective_of(build_loss("clip_cov", fields)), batch, new)
    dropped = (grad == 0) & (plain != 0)
    assert 0 < dropped.sum() <= int(0.3 * batch.mask.sum())
    torch.testing.assert_close(grad[~dropped], plain[~dropped], rtol=1e-9, atol=1e-12)


def test_the_ratio_form_has_the_same_gradient_and_another_value() -> None:
    plain, grad = token_loss("vanilla_pg", [[0.2, 0.5]], [[2.0, -1.0]])
    ratio, same = token_loss("vanilla_pg", [[0.2, 0.5]], [[2.0, -1.0]], ratio_form=True)
    assert torch.equal(grad, same) and grad[0].tolist() == [-2.0, 1.0]
    assert ratio.loss[0].tolist() == [-2.0, 1.0]
    assert plain.loss[0].tolist() != ratio.loss[0].tolist()


def test_a_shared_prefix_is_not_weakened_on_policy() -> None:
    """Three answers AAA.. of 10, 11, 11 tokens with rewards 1, 0, 0: net pull on the first A."""
    batch, new = policy_batch(0, [10, 11, 11], [0, 0, 0], on_policy=True)
    full = (torch.arange(11)[None, :] < torch.tensor([10, 11, 11])[:, None]).double()
    centred = torch.tensor([[2.0], [-1.0], [-1.0]], dtype=torch.float64) / 3
    columns = {name: getattr(batch, name) for name in batch.columns()}
    batch = type(batch)(**columns | {"mask": full, "advantages": centred * full})
    for name in ("vanilla_pg", "ppo_clip"):
        by_token = objective_of(build_loss(name), "token-mean")
        by_answer = objective_of(build_loss(name), "seq-mean-token-mean")
        pull = [-total_and_grad(o, batch, new)[1][:, 0].sum().item() for o in (by_token, by_answer)]
        assert pull == [pytest.approx(0, abs=1e-12), pytest.approx(0.002020202, abs=1e-8)]
