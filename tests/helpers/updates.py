"""An update of the policy as an RL step takes it: columns filled, optimizer steps, mismatch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner, Progress
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.updates import PolicyLearner, UpdateResult


def update(
    learner: PolicyLearner,
    batch: RolloutBatch,
    step: int,
    kl_coef: float,
    products: SampledOutputs | None = None,
) -> UpdateResult:
    """The learner's result with all metrics of the update."""
    columns = ColumnFiller(learner)
    ready = columns.fill_for_update(batch, step, kl_coef, products=products)
    result = learner.update(ready.batch, step, kl_coef, products=products)
    return replace(result, metrics=ready.metrics | result.metrics | ready.pending_mismatch(result))


def with_old_logprobs(
    learner: PolicyLearner, batch: RolloutBatch, products: SampledOutputs | None = None
) -> RolloutBatch:
    """`batch` with `old_logprobs` of the learner's policy."""
    return ColumnFiller(learner).fill(batch, {"old_logprobs"}, products=products)[0]


def gradient(learner: Learner, batch: RolloutBatch) -> list[Tensor]:
    """What one update would step along, in the model's own precision."""
    learner.optimizer.close()
    done = Progress.of(batch, 1, 0.0)
    mini, prepared = learner._prepare(done, batch, 0)
    idle = learner.settings.idle_rows(learner.objective, mini, 0.0)
    learner._accumulate(done, mini, prepared, idle, MetricSums())
    held = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad()
    return held
