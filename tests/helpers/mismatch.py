"""A learner and an engine on one model, in step after step of sampling, updating and syncing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, EngineSetup, PolicyLoss, RolloutCorrection
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.sync_check import SyncCheck, make_probe
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Message, SamplingParams
from tests.helpers.engines import AnyEngine, make_engine
from tests.helpers.rollouts import batch_of_groups
from tests.helpers.updates import update

MAX_LEN = 256
# Probability, and score, within which a float32 sum may fall on either side of a cut's edge.
EDGE = 3e-6


@dataclass
class Rig:
    """`engine` and `learner` start from one model; prompts are token ids.

    With `leave_out_ties` tokens on a cut's edge take no loss; `left_out` counts them.
    """

    engine: AnyEngine
    learner: Learner
    check: SyncCheck
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    correction: RolloutCorrection[Any] | None = None
    version: int = 0
    leave_out_ties: bool = False
    left_out: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)

    def sample(self) -> RolloutBatch:
        """A rollout with advantages of both signs."""
        batch = batch_of_groups(self.prompts, self.engine.generate(self.prompts, self.params))
        if self.leave_out_ties:
            edges = self.on_edges(batch)
            self.left_out += int(edges.sum())
            mask = batch.response_mask.masked_fill(edges, 0)
            batch = batch.with_columns(response_mask=mask, mask=mask.clone())
        generator = torch.Generator().manual_seed(self.version)
        advantages = torch.randn((len(batch), 1), generator=generator)
        return batch.with_columns(advantages=advantages.expand(batch.mask.shape).contiguous())

    def on_edges(self, batch: RolloutBatch) -> Tensor:
        """Which response tokens [B, T] a cut may judge either way, by the trainer's weights.

        A token whose sum of better ones is top-p to the last digits of float32, or whose score is
        the k-th's, is in one program's support and not in the other's with both of them right.
        """
        edges = torch.zeros_like(batch.response_mask, dtype=torch.bool)
        for row, group in enumerate(batch.group_id.tolist()):
            live, prompt = int(batch.response_mask[row].sum()), self.prompts[group]
            ids = torch.tensor([[*prompt, *batch.response_ids[row, :live].tolist()]])
            with torch.no_grad():
                logits = self.learner.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
            scores = (logits / self.params.temperature).sort(dim=-1, descending=True).values
            edges[row, :live] = _edge(scores, self.params)
        return edges

    def step(self) -> dict[str, float]:
        """Sample, update, sync, check; returns what was measured."""
        found = update(self.learner, self.sample(), self.version, 0.0).metrics
        self.version += 1
        self.sync()
        found |= self.check.after(f"the sync of step {self.version}")
        self.metrics.append(found)
        return found

    def sync(self) -> None:
        """Give the engine the learner's weights."""
        self.engine.sync_weights(self.learner.model.state_dict().items(), self.version)


def _edge(scores: Tensor, params: SamplingParams) -> Tensor:
    """Whether the cut of `scores` [T, V], best first, falls between two that are as good as one."""
    k = params.top_k or scores.shape[-1]
    mass = scores[:, :k].softmax(dim=-1).cumsum(dim=-1)
    close = ((mass - params.top_p).abs() < EDGE).any(dim=-1) & (params.top_p < 1)
    if k < scores.shape[-1]:
        close |= scores[:, k - 1] - scores[:, k] < EDGE
    return close


def make_rig(
    engine_name: str,
    folder: Path,
    params: SamplingParams,
    *,
    dtype: torch.dtype = torch.float32,
    rate: float = 1e-3,
    correction: str | None = None,
    updates: int = 1,
    num_prompts: int = 4,
    engine: AnyEngine | None = None,
) -> Rig:
    """A rig on the model in `folder`; `updates` are optimizer steps per rollout."""
    device = torch.device("cpu")
    runtime = ModelRuntime(device, dtype, "eager")
    tokenizer = ChatTokenizer.load(folder)
    engine = engine or make_engine(engine_name)
    engine.start(
        EngineSetup(
            folder, dtype, device, MAX_LEN, 64, (tokenizer.eos_token_id,), tokenizer.pad_token_id, 3
        )
    )
    manager, model = PluginManager(), load_policy(folder, runtime)
    mean = manager.build(Aggregator, "token-mean")
    fields = {"statistics": "full"}
    corrects = manager.build(RolloutCorrection, correction, fields) if correction else None
    objective = Objective(
        (LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), mean, 1.0),), mean, correction=corrects
    )
    cut = Cut(params.top_k, params.top_p)
    learner = Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=rate), 100),
        objective,
        UpdateSettings(updates, 1, 32, params.temperature, seed=0, cut=cut),
    )
    check = SyncCheck(engine, model, make_probe(tokenizer, MAX_LEN))
    numbers = random.Random(0)
    prompts = [
        tokenizer.encode_chat([Message("user", f"{numbers.randrange(90)} + {n} = ?")])
        for n in range(num_prompts)
    ]
    return Rig(engine, learner, check, prompts, params, corrects)
