"""What a stage's policy answers: how long, how much alike, and how that changes while it learns.

How much its responses to one prompt have in common is a guess. It decides how many tokens are
computed once for several of them, and how many groups teach nothing. The figures are those of
SmolLM2-135M in the quickstart, whose `rl` began at 0.14 nats a token in float32 and at 1.4 in
bfloat16 after the same `sft`, and ended at 0.07 in both (docs/performance.md). Where responses are
long they soon differ in any case.
"""

from __future__ import annotations

import math
import statistics

from posttrain.core.config.base import StageBase
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.supervised_stages import SftStage
from posttrain.core.costs.lengths import Responses
from posttrain.core.costs.work import Work

SURE, UNSURE = 0.1, 1.5
"""Nats a token of a policy that has learned, and of one that was not fine-tuned."""
ROWS_TO_BE_SURE = 70
"""Rows learned from until what is between the two has fallen by a factor of e."""
ROUNDED = 15
"""How many times as many they are where weights are rounded to bfloat16. There most updates are
smaller than half a step of a weight, and change what is computed once enough have added up."""
ALIKE, ALIKE_NATS = 0.67, 0.2
"""Share of the groups of a policy that is quite sure whose responses are worth the same, and the
nats by which that falls by a factor of e. The share grows while a policy learns
(arXiv:2503.14476, section 3.2)."""
PARTS = (0.125, 0.375, 0.625, 0.875)
"""Of an `rl` stage's steps: the middles of its four quarters, whose mean stands for all steps."""


def answers_read(config: RunConfig, stage: StageBase) -> int:
    """Worked answers that the model which a stage reads was fine-tuned on in this run."""
    source = config.stages.get(stage.inputs.get("model", ""))
    if source is None:
        return 0
    own = source.steps * source.batch_size if isinstance(source, SftStage) else 0
    return own + answers_read(config, source)


def rows_learned(config: RunConfig, stage: StageBase) -> int:
    """Those, and its own responses that it learned from since.

    0 where it was never fine-tuned: how much its own then teach is not known.
    """
    source = config.stages.get(stage.inputs.get("model", ""))
    if source is None or not answers_read(config, stage):
        return 0
    own = source.steps * source.batch_size if isinstance(source, SftStage) else 0
    if isinstance(source, RlStage):
        own = source.steps * rows_a_step(source)
    return own + rows_learned(config, source)


def rows_a_step(stage: RlStage) -> int:
    """Responses that are sampled for one."""
    return stage.prompts_per_step * stage.num_generations


def entropy(work: Work, stage: StageBase, done: float = 0.0) -> float:
    """Nats a token of the policy that a stage reads, after `done` of the stage's own steps."""
    rows = rows_learned(work.config, stage)
    if rows and isinstance(stage, RlStage):
        rows += round(done * stage.steps) * rows_a_step(stage)
    enough = ROWS_TO_BE_SURE * (ROUNDED if work.rounded else 1)
    return SURE + (UNSURE - SURE) * math.exp(-rows / enough)


def answers(work: Work, stage: StageBase, limit: int, done: float = 0.0) -> Responses:
    """What that policy answers in at most `limit` tokens."""
    read = answers_read(work.config, stage)
    return work.lengths.responses(limit, read=read, nats=entropy(work, stage, done))


def alike(nats: float) -> float:
    """Share of groups whose responses are worth the same and teach nothing."""
    return ALIKE * math.exp(-nats / ALIKE_NATS)


def idle_groups(work: Work, stage: RlStage) -> float:
    """That share, in a mean step of a stage whose policy was fine-tuned; else 0."""
    if not answers_read(work.config, stage):
        return 0.0
    return statistics.fmean(alike(entropy(work, stage, done)) for done in PARTS)
