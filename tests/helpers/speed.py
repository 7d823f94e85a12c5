"""One policy gradient in the plain way and with every option of speed, on tiny models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import LoraSection, OptimizerSection
from posttrain.core.contracts import Aggregator, PolicyLoss
from posttrain.core.models.layers import compile_layers, use_checkpointing
from posttrain.core.models.lora import add_adapter
from posttrain.core.models.sharded import shard, whole
from posttrain.core.models.stream_attention import use_stream_attention
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.learner import Learner, Progress
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ranks import ALONE, Ranks
from posttrain.core.training.updates import UpdateSettings
from tests.unit.training.test_stream import FAMILIES, make_batch

SPEED_FAMILIES = ("llama", "qwen3", "gemma", "gpt2")
LORA = LoraSection(rank=3, alpha=12.0)
EPS = 1e-2
"""Adam's. With 1e-8 a weight moves by the learning rate however small its gradient is, so rounding
of a gradient near 0, as another order of sums or number of threads gives, moves weights apart by as
much. With this a step's difference is at most that of the gradients times learning rate / EPS.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What makes an update faster or smaller; the defaults are the plain one."""

    stream: bool = False
    packed: bool = False
    skip_idle: bool = False
    checkpointing: bool = False
    micro_batch_size: int = 100
    lora: bool = False
    compiled: bool = False


def combinations() -> Iterator[Options]:
    """Every option alone, and all of them on or off together."""
    for stream, packed, skip_idle, checkpointing in itertools.product((False, True), repeat=4):
        for micro in (100, 2):
            yield Options(stream, packed, skip_idle, checkpointing, micro)


def speed_model(family: str, options: Options) -> PreTrainedModel:
    """A tiny float32 model; the factors of its adapter are all random."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        FAMILIES[family](), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if options.stream:
        use_stream_attention(model)
    if options.checkpointing:
        use_checkpointing(model)
    if options.lora:
        add_adapter(model, LORA, seed=1)
        draw = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data = 0.05 * torch.randn(parameter.shape, generator=draw)
    if options.compiled:
        compile_layers(model)
    return model


def speed_batch() -> RolloutBatch:
    """Ragged rows of three groups, two of them without an advantage; the policy has moved."""
    batch = make_batch()
    draw = torch.Generator().manual_seed(5)
    shape = batch.response_ids.shape
    old = -4.6 + 0.1 * torch.randn(shape, generator=draw)  # about log(1 / 100)
    advantages = torch.randn(shape[0], 1, generator=draw).expand(shape) * batch.mask
    advantages = advantages.clone()
    advantages[[2, 5]] = 0.0
    return batch.with_columns(old_logprobs=old, advantages=advantages)


@cache
def plugins() -> PluginManager:
    """All that are installed."""
    return PluginManager()


def speed_learner(
    model: PreTrainedModel, options: Options, ranks: Ranks = ALONE, rate: float = 1e-2
) -> Learner:
    """A learner with PPO's clip, tokens averaged over the batch."""
    manager = plugins()
    aggregator = manager.build(Aggregator, "token-mean", {})
    objective = Objective(
        terms=(LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), aggregator),),
        aggregator=aggregator,
    )
    settings = UpdateSettings(
        epochs=1,
        num_mini_batches=1,
        micro_batch_size=options.micro_batch_size,
        temperature=0.7,
        seed=0,
        max_tokens=24 if options.packed else None,
        skip_idle_rows=options.skip_idle,
    )
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=rate, eps=EPS), 10)
    return Learner(model, optimizer, objective, settings, ranks=ranks)


class GradientTaken(Exception):
    """Ends an update before its optimizer step."""


def gradients(
    family: str, options: Options, ranks: Ranks = ALONE, mesh: DeviceMesh | None = None
) -> dict[str, Tensor]:
    """The gradient of one update by the learner, whole on every rank."""
    model = speed_model(family, options)
    if mesh is not None:
        shard(model, mesh, torch.float32)
    learner = speed_learner(model, options, ranks)

    def stop(rate_factor: float = 1.0, **of_loss: object) -> None:
        raise GradientTaken

    learner.optimizer.step = stop  # type: ignore[assignment,method-assign]
    try:
        learner.update(speed_batch(), 1, 0.0)
    except GradientTaken:
        pass
    named = model.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def plain_gradients(family: str, options: Options) -> dict[str, Tensor]:
    """The same by autograd: each row by itself with all its logits, all rows in one loss."""
    model = speed_model(family, Options(lora=options.lora))
    learner, batch = speed_learner(model, Options()), speed_batch()
    _, prepared = learner._prepare(Progress.of(batch, 1, 0.0), batch, 0)
    rows = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        ids = torch.cat([prompt, batch.response_ids[row]])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        logprobs = torch.log_softmax(logits, dim=-1)
        rows.append(logprobs.gather(1, batch.response_ids[row][:, None])[:, 0])
    logprobs = torch.stack(rows) * batch.response_mask
    loss = learner.objective.loss(logprobs, torch.zeros_like(logprobs), batch, prepared)
    loss.total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Each tensor to 1e-5 of its norm."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        gap = (found[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert float(gap) <= 1e-5, (name, float(gap))
