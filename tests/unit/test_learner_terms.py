"""What the learner adds to a plain update: guard, pre-training term, corrections, references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import LoraSection, OptimizerSection
from posttrain.core.contracts import Aggregator, KlEstimator, PolicyLoss, RolloutCorrection
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.lora import add_adapter, frozen_twin
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.learner import Learner, Progress
from posttrain.core.training.moving_reference import BiasCorrectedReference, MovingReference
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer, schedule_factor
from posttrain.core.training.sft import PtxTerm
from posttrain.core.training.updates import KlGuard, UpdateSettings
from posttrain.pipelines.rl.build import in_optimizer_steps
from tests.helpers.rollouts import assert_same_gradient, load_tiny, ragged_batch
from tests.helpers.updates import update


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_learner(
    model: PreTrainedModel,
    manager: PluginManager,
    *,
    losses: list[tuple[str, dict[str, object], float]] | None = None,
    epochs: int = 1,
    num_mini_batches: int = 1,
    micro: int = 4,
    rate: float = 1e-3,
    reference: PreTrainedModel | None = None,
    guard: KlGuard | None = None,
    ptx: PtxTerm | None = None,
    **objective: Any,
) -> Learner:
    mean = manager.build(Aggregator, "token-mean")
    terms = tuple(
        LossTerm(manager.build(PolicyLoss, name, fields), mean, coef)
        for name, fields, coef in losses or [("ppo_clip", {}, 1.0)]
    )
    settings = UpdateSettings(epochs, num_mini_batches, micro, temperature=1.0, seed=0)
    return Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=rate, max_grad_norm=None), 100),
        Objective(terms, mean, **objective),
        settings,
        reference,
        guard=guard,
        ptx=ptx,
    )


def weights(model: PreTrainedModel) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def changed(before: list[Tensor], model: PreTrainedModel) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def with_engine_logprobs(model: PreTrainedModel, batch: RolloutBatch, shift: float) -> RolloutBatch:
    """As if the engine had seen each token `shift` nats likelier than the trainer does."""
    learner = make_learner(model, PluginManager())
    old = learner.forward_only(model, batch).logprobs
    return batch.with_columns(rollout_logprobs=old + shift, old_logprobs=old)


# --- the guard --------------------------------------------------------------------------------


def test_the_guard_stops_a_batch_once_the_policy_has_moved_too_far(
    model_dir: Path, manager: PluginManager
) -> None:
    batch = ragged_batch([5, 4, 6], group_size=3)
    free = make_learner(load_tiny(model_dir, torch.float32), manager, epochs=6, rate=3e-2)
    moved = update(free, batch, 1, 0.0).metrics
    assert moved["train/updates"] == 6
    bound = KlGuard(max_kl=1e-4, action="stop")
    held = make_learner(
        load_tiny(model_dir, torch.float32), manager, epochs=6, rate=3e-2, guard=bound
    )
    metrics = update(held, batch, 1, 0.0).metrics
    # The first update sees a ratio of 1; the second sees what the first did, and is given up.
    assert metrics["train/updates"] == 1 and metrics["guard/exceeded"] == 1
    wide = KlGuard(max_kl=1e6, action="stop")
    again = make_learner(
        load_tiny(model_dir, torch.float32), manager, epochs=6, rate=3e-2, guard=wide
    )
    metrics = update(again, batch, 1, 0.0).metrics
    assert metrics["train/updates"] == 6 and metrics["guard/exceeded"] == 0


def test_the_guard_can_lower_the_rate_instead(model_dir: Path, manager: PluginManager) -> None:
    batch = ragged_batch([5, 4, 6], group_size=3)
    guard = KlGuard(max_kl=1e-4, action="lower_rate", factor=0.5)
    model = load_tiny(model_dir, torch.float32)
    learner = make_learner(model, manager, epochs=4, rate=3e-2, guard=guard)
    metrics = update(learner, batch, 1, 0.0).metrics
    assert metrics["train/updates"] == 4
    assert metrics["guard/rate_factor"] == 0.125 and metrics["lr"] == pytest.approx(3e-2 / 8)


# --- warm-up ----------------------------------------------------------------------------------


def test_a_warm_up_in_rollouts_lasts_whatever_updates_each_has() -> None:
    """DAPO: 20 rollouts of 16 updates each are 320 optimizer steps."""
    section = OptimizerSection(learning_rate=1.0, warmup_rollouts=20)
    steps = in_optimizer_steps(section, 16)
    assert steps.warmup_steps == 320
    assert schedule_factor(steps, 159, 10_000) == 0.5 and schedule_factor(steps, 320, 10_000) == 1.0
    assert in_optimizer_steps(OptimizerSection(warmup_steps=3), 16).warmup_steps == 3


# --- the pre-training term --------------------------------------------------------------------


def ptx_term(manager: PluginManager, coef: float, examples: RolloutBatch, micro: int) -> PtxTerm:
    mean = manager.build(Aggregator, "token-mean")
    return PtxTerm(
        term=LossTerm(manager.build(PolicyLoss, "ptx"), mean, coef),
        num_examples=len(examples),
        make_batch=lambda rows: examples.select(torch.tensor(rows)),
        batch_size=4,
        micro_batch_size=micro,
        seed=0,
    )


def test_the_pre_training_term_has_counts_of_its_own(
    model_dir: Path, manager: PluginManager
) -> None:
    """Policy and pre-training gradients add up, however either is split."""
    batch, examples = (
        ragged_batch([5, 4], group_size=3),
        ragged_batch([3, 7, 5, 4, 6], group_size=1),
    )

    def gradients(coef: float, policy: float, micro: int) -> list[Tensor]:
        model = load_tiny(model_dir)
        learner = make_learner(
            model,
            manager,
            losses=[("ppo_clip", {}, policy)],
            micro=micro,
            ptx=ptx_term(manager, coef, examples, micro),
        )
        learner.optimizer.close()
        found: list[Tensor] = []

        def keep(rate_factor: float = 1.0, **of_loss: object) -> Any:
            found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            raise StopIteration

        learner.optimizer.step = keep  # type: ignore[method-assign]
        with pytest.raises(StopIteration):
            update(learner, batch, 1, 0.0)
        return found

    both = gradients(0.5, 1.0, 6)
    assert_same_gradient(gradients(0.5, 1.0, 1), both)
    policy, pretraining = gradients(0.0, 1.0, 6), gradients(0.5, 0.0, 6)
    assert_same_gradient([a + b for a, b in zip(policy, pretraining, strict=True)], both)


def test_pre_training_examples_are_drawn_anew_for_every_update(manager: PluginManager) -> None:
    term = ptx_term(manager, 1.0, ragged_batch([3, 7, 5, 4, 6], group_size=1), 4)
    draws = [term.draw(step, number) for step in (1, 2) for number in (0, 1)]
    assert draws[0] == term.draw(1, 0) and len({tuple(draw) for draw in draws}) > 1
    assert all(len(draw) == 4 and max(draw) < 5 for draw in draws)


# --- prepare, correction, entropy mask --------------------------------------------------------


def test_the_prepare_pass_sees_the_policy_at_the_start_of_each_update(
    model_dir: Path, manager: PluginManager
) -> None:
    """BAPO's bounds come from the whole mini-batch, so micro-batches of any size agree."""
    batch = ragged_batch([5, 4, 6, 3], group_size=3)
    results = []
    for micro in (12, 2):
        # In float32 AdamW makes much of the rounding of a gradient near 0, by the processor.
        model = load_tiny(model_dir)
        learner = make_learner(
            model, manager, losses=[("bapo", {}, 1.0)], epochs=3, micro=micro, rate=3e-2
        )
        metrics = update(learner, batch, 1, 0.0).metrics
        results.append((weights(model), metrics))
    for name in ("bapo/c_low", "bapo/c_high", "bapo/rho"):
        assert results[0][1][name] == pytest.approx(results[1][1][name], rel=1e-4)
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_truncated_weights_halve_the_gradient_of_tokens_the_engine_overrates(
    model_dir: Path, manager: PluginManager
) -> None:
    """w = e^(trainer - engine) = 0.5 on every token, so the update is half as large."""
    model = load_tiny(model_dir, torch.float32)
    batch = with_engine_logprobs(
        model, ragged_batch([5, 4], group_size=3), float(torch.tensor(2).log())
    )
    plain = make_learner(model, manager)
    plain_loss = update(plain, batch, 1, 0.0).metrics["loss/policy"]
    model = load_tiny(model_dir, torch.float32)
    corrected = make_learner(
        model, manager, correction=manager.build(RolloutCorrection, "tis_token")
    )
    metrics = update(corrected, batch, 1, 0.0).metrics
    assert metrics["loss/policy"] == pytest.approx(0.5 * plain_loss, rel=1e-4)


def test_a_bypassed_old_policy_makes_the_ratio_against_the_engine(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_tiny(model_dir, torch.float32)
    batch = with_engine_logprobs(model, ragged_batch([5, 4], group_size=3), -0.5)
    bare = RolloutBatch(**{**{n: getattr(batch, n) for n in batch.columns()}, "old_logprobs": None})
    metrics = update(make_learner(model, manager, bypass_old=True), bare, 1, 0.0).metrics
    assert metrics["ratio/mean"] == pytest.approx(float(torch.tensor(0.5).exp()), rel=1e-4)


def test_an_entropy_mask_trains_on_the_share_of_tokens_it_keeps(
    model_dir: Path, manager: PluginManager
) -> None:
    batch = ragged_batch(list(range(3, 15)), group_size=1)  # one row each: no two tokens tie
    learner = make_learner(load_tiny(model_dir), manager, top_entropy=0.25)
    learner.optimizer.close()
    ready, prepared = learner._prepare(Progress.of(batch, 1, 0.0), batch, 0)
    kept = prepared.columns["entropy_keep"].bool()
    tokens = batch.mask.bool()
    assert not (kept & ~tokens).any()
    assert float(kept.sum() / tokens.sum()) == pytest.approx(0.25, abs=0.03)
    entropy = ready.column("entropy")
    assert entropy[kept].min() >= entropy[tokens & ~kept].max()


# --- the reference ----------------------------------------------------------------------------


def test_a_refreshed_reference_is_the_present_policy(
    model_dir: Path, manager: PluginManager
) -> None:
    batch = ragged_batch([5, 4], group_size=3)
    reference = load_tiny(model_dir, torch.float32)
    learner = make_learner(
        load_tiny(model_dir, torch.float32),
        manager,
        reference=reference,
        rate=1e-2,
        kl=manager.build(KlEstimator, "k3"),
    )
    learner.moving = MovingReference(reference, learner.optimizer)
    assert update(learner, batch, 1, 0.1).metrics["kl/ref_k3"] == pytest.approx(0.0, abs=1e-6)
    assert update(learner, batch, 2, 0.1).metrics["kl/ref_k3"] > 1e-5
    learner.refresh_reference()
    metrics = update(learner, batch, 3, 0.1).metrics
    assert metrics["kl/ref_k3"] == pytest.approx(0.0, abs=1e-6) and metrics["kl/ref_version"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moving_average_follows_each_optimizer_step(
    model_dir: Path, manager: PluginManager, dtype: torch.dtype, tmp_path: Path
) -> None:
    """As by hand in float32, of bfloat16 weights too; halfway over a checkpoint."""
    batch = ragged_batch([5, 4], group_size=3)
    model, reference = load_tiny(model_dir, dtype), load_tiny(model_dir, dtype)
    reference.requires_grad_(False)
    learner = make_learner(model, manager, reference=reference, rate=1e-2, num_mini_batches=2)
    wanted = {name: p.detach().float().clone() for name, p in reference.named_parameters()}
    for step in (1, 2, 3):
        moving = MovingReference(reference, learner.optimizer, rate=0.05, every=2)
        if step > 1:
            moving.read(tmp_path, 2 * (step - 1))
        learner.moving = moving
        metrics = update(learner, batch, step, 0.0).metrics
        assert metrics["kl/ref_version"] == step - 1 and moving.version == step
        for name, weight in learner.optimizer.weights().items():
            wanted[name] = 0.95 * wanted[name] + 0.05 * weight.detach()
        moving.write(tmp_path)
    kept = load_file(tmp_path / "anchor" / "whole.safetensors")
    for number, (name, param) in enumerate(reference.named_parameters()):
        torch.testing.assert_close(kept[str(number)], wanted[name], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(param, wanted[name].to(dtype), rtol=0.01, atol=1e-6)
        assert not param.requires_grad
    assert any(
        not torch.equal(a, b) for a, b in zip(weights(model), weights(reference), strict=True)
    )


def test_a_bias_corrected_average_follows_the_policy_without_lag(
    model_dir: Path, manager: PluginManager, tmp_path: Path
) -> None:
    """As by hand; halfway a checkpoint is read by a stage that begins at the same model."""
    batch = ragged_batch([5, 4], group_size=3)
    model, reference = load_tiny(model_dir), load_tiny(model_dir)
    reference.requires_grad_(False)
    learner = make_learner(model, manager, reference=reference, rate=1e-2)
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    average = {name: p.clone() for name, p in start.items()}
    moving = BiasCorrectedReference(reference, learner.optimizer, every=2)
    for step in range(1, 7):
        learner.moving = moving
        update(learner, batch, step, 0.0)
        if step % 2:
            continue
        share, correction = (10 + step) ** -0.5, (10 + step) ** -0.2
        own = dict(reference.named_parameters())
        for name, weight in learner.optimizer.weights().items():
            average[name] = (1 - share) * average[name] + share * weight.detach()
            wanted = average[name] + correction * (weight.detach() - start[name])
            torch.testing.assert_close(own[name], wanted, rtol=1e-5, atol=1e-7)
        assert moving.version == step // 2
        if step == 4:
            moving.write(tmp_path)
            moving.close()
            reference = load_tiny(model_dir)
            reference.requires_grad_(False)
            first = load_tiny(model_dir)  # as a stage is built, before its checkpoint is read
            optimizer = MasterOptimizer(first, OptimizerSection(learning_rate=1e-2), 100)
            moving = BiasCorrectedReference(reference, optimizer, every=2)
            moving.optimizer = learner.optimizer
            moving.read(tmp_path, 4)


def test_the_correction_at_step_400() -> None:
    """Of a policy that stands 1 from where it began: 410^-0.5 and 410^-0.2."""
    policy, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with torch.no_grad():
        policy.weight.fill_(1.0)
        reference.weight.fill_(0.0)
    optimizer = MasterOptimizer(policy, OptimizerSection(learning_rate=1e-3), 100)
    moving = BiasCorrectedReference(reference, optimizer, every=400)
    for _ in range(400):
        moving.after_step()
    assert reference.weight.item() == pytest.approx(0.049386 + 0.300222, abs=1e-6)


def test_the_halving_of_what_is_left_behind() -> None:
    """0.95 of the distance is left after a step: half of it after 13.5."""
    policy, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with torch.no_grad():
        policy.weight.fill_(1.0)
        reference.weight.fill_(0.0)
    optimizer = MasterOptimizer(policy, OptimizerSection(learning_rate=1e-3), 100)
    moving = MovingReference(reference, optimizer, rate=0.05, every=1)
    for _ in range(27):
        moving.after_step()
    assert reference.weight.item() == pytest.approx(1 - 0.95**27) == pytest.approx(0.75, abs=1e-3)


def test_a_reference_with_an_adapter_shares_the_weights_that_stay(model_dir: Path) -> None:
    """It begins as the input model, and follows the policy's adapter alone."""
    policy = load_tiny(model_dir, torch.float32)
    reference = frozen_twin(policy)
    section = LoraSection(rank=2)
    add_adapter(reference, section, 7)
    reference.requires_grad_(False)
    add_adapter(policy, section, 7)
    optimizer = MasterOptimizer(policy, OptimizerSection(learning_rate=1e-2), 100)
    moving = MovingReference(reference, optimizer, rate=0.5, every=1)
    with torch.no_grad():
        for weight in optimizer.weights().values():
            weight.add_(1.0)
    own, theirs = dict(reference.named_parameters()), dict(policy.named_parameters())
    before = {name: p.detach().clone() for name, p in own.items()}
    moving.after_step()
    for name, p in own.items():
        if name in optimizer.weights():
            assert ".lora_" in name
            torch.testing.assert_close(p, (before[name] + theirs[name]) / 2)
        else:
            assert p.data_ptr() == theirs[name].data_ptr()


def test_an_exact_kl_term_uses_both_models_logits(model_dir: Path, manager: PluginManager) -> None:
    """From the policy itself the exact KL is 0, from another model it is not, and it pulls."""
    batch = ragged_batch([5, 4], group_size=3)
    zero = batch.with_columns(advantages=torch.zeros_like(batch.column("advantages")))
    for reference, moves in ((load_tiny(model_dir, torch.float32), False), (None, True)):
        model = load_tiny(model_dir, torch.float32)
        if reference is None:
            reference = load_tiny(model_dir, torch.float32)
            with torch.no_grad():
                for p in reference.parameters():
                    p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        before = weights(model)
        learner = make_learner(
            model, manager, reference=reference, kl=manager.build(KlEstimator, "full")
        )
        metrics = update(learner, zero, 1, 1.0).metrics
        assert (metrics["loss/kl"] > 1e-4) == moves
        assert moves == (metrics["grad/norm"] > 1e-4)
        assert changed(before, model) or not moves
