"""Rollouts of a tiny model by the transformers engine, with the recorded linear outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import EngineSetup
from posttrain.core.models.sampled_outputs import SampledOutputs, record_outputs
from posttrain.core.types import Completion, SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from tests.helpers.rollouts import batch_of_groups
from tests.unit.training.test_stream import FAMILIES

PROMPTS = ([5, 9, 30, 41, 7], [8, 61, 12], [4, 20, 33, 9, 9, 71, 50, 3, 2])
# Enough in common for an engine to read it once; the second goes on a little like the first.
START = tuple(5 + 7 * i % 89 for i in range(34))
ALIKE = ((*START, 9, 30), (*START, 9, 31, 12), (*START, 70, 9, 9, 71, 50))
STOP = tuple(range(40, 60))  # of 100 tokens: responses of a random model end early


def save_family(family: str, folder: Path) -> Path:
    """A random model of `family` in `folder`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).save_pretrained(
        folder
    )
    return folder


def start_engine(
    folder: Path, *, at_once: int = 64, dtype: torch.dtype = torch.float32
) -> TransformersEngine:
    """The engine on the model in `folder`; at most `at_once` sequences decode together."""
    engine = TransformersEngine(TransformersEngineConfig())
    engine.start(EngineSetup(folder, dtype, torch.device("cpu"), 64, at_once, STOP, 0, 0))
    return engine


@dataclass
class Sampled:
    """What an engine sampled, in groups, and what was recorded."""

    prompts: list[Sequence[int]] = field(default_factory=list)
    groups: list[list[Completion]] = field(default_factory=list)
    outputs: SampledOutputs | None = None

    def batch(self, *, idle: Sequence[int] = ()) -> RolloutBatch:
        """All rows, with an advantage for each token but for those of rows that are `idle`."""
        batch = batch_of_groups(self.prompts, self.groups)
        draw = torch.Generator().manual_seed(5)
        shape = batch.response_ids.shape
        advantages = torch.randn(shape[0], 1, generator=draw).expand(shape) * batch.mask
        advantages[list(idle)] = 0.0
        return batch.with_columns(advantages=advantages)


def sample(
    engine: TransformersEngine,
    params: SamplingParams,
    *,
    calls: int = 1,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> Sampled:
    """A group for each of `prompts` in each of `calls` of the engine, all recorded together."""
    found = Sampled()
    with record_outputs(engine) as outputs:
        for _ in range(calls):
            found.groups += engine.generate(prompts, params)
            found.prompts += prompts
            params = replace(params, seed=params.seed + 1)
    found.outputs = outputs
    return found
