"""Bytes that the parts of a stage hold in memory, and that its checkpoints take on the disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from posttrain.core.config.sections import LoraSection
from posttrain.core.contracts import Optimizer
from posttrain.core.estimate.shape import ModelShape
from posttrain.core.estimate.tokens import Rows

FLOAT = 4
CPU_LIBRARIES, GPU_CONTEXT = 0.9e9, 0.5e9
"""Assumed: Python with torch, transformers, Prefect and MLflow; and the CUDA context."""
FRAGMENTATION = 0.2
"""Share that the heap of a CPU is assumed to hold on top of what training uses."""
LOGITS_BYTES, LOGITS_ROWS = 256 * 2**20, 4096
"""Logits that the learner makes at a time: bytes on a CPU, rows on a GPU."""

PASSING = ("sampling", "training")
"""Parts of which only one is there at a time."""


class TrainedModel(NamedTuple):
    """Bytes of a model in training, by what they are, and of its checkpoint."""

    held: dict[str, float]
    checkpoint: float


def trained_model(
    shape: ModelShape, lora: LoraSection | None, optimizer: Optimizer[Any], each: int, *, head: bool
) -> TrainedModel:
    """A policy, or without `head` a reward model or critic, with `each` bytes a weight.

    Gradients are float32, as is the master copy of weights that are not.
    """
    trained = shape.trained(lora, head=head)
    masters = FLOAT if each < FLOAT and optimizer.keeps_masters() else 0
    moments = optimizer.state_bytes()
    whole = shape.trained(None, head=head) + (trained if lora else 0)
    sizes = {"masters": masters, "gradients": FLOAT, "moments": moments}
    held = {"weights": float(each * whole)} | {n: float(s * trained) for n, s in sizes.items()}
    return TrainedModel(held, float(trained * ((masters or each) + moments)))


def kept_for_backward(
    shape: ModelShape, rows: Rows, each: int, *, head: bool, checkpointing: bool, on_gpu: bool
) -> float:
    """What a micro-batch keeps for its backward pass, `each` bytes a number.

    Of each token what linear layers read and return, and on a CPU the attention's matrix; with
    checkpointing the inputs of layers, and the rest of one. With `head` the logits that are made
    at a time, and the gradient of the output layer.
    """
    micro = min(rows.micro, rows.number)
    numbers = float(shape.linear_width)
    if not on_gpu:
        numbers += shape.layers * shape.heads * (rows.prompt + rows.longest) * (1 + FLOAT / each)
    if checkpointing:
        numbers = shape.layers * shape.hidden + numbers / shape.layers
    kept = rows._replace(number=micro).tokens * numbers
    if head:
        most = LOGITS_ROWS if on_gpu else LOGITS_BYTES / (shape.vocabulary * each)
        kept += (min(most, micro * rows.response) + shape.hidden) * shape.vocabulary
    return kept * each


def cache_bytes(shape: ModelShape, rows: Rows, each: int) -> float:
    """Keys and values of rows decoded together, at their longest, and the logits of one step."""
    tokens = math.ceil(rows.number / rows.group) * rows.prompt + rows.number * rows.longest
    return (tokens * shape.kv_width * shape.layers + rows.number * shape.vocabulary) * each


def checkpoints(every: int, steps: int, kept: int) -> int:
    """How many are written before the last step; `kept` is the period of those that stay."""
    periods = [period for period in (every, kept) if period]
    return sum(any(step % period == 0 for period in periods) for step in range(1, steps))


def peak(parts: Mapping[str, float]) -> float:
    """Bytes at the peak, of the parts of a stage."""
    held = sum(size for name, size in parts.items() if name not in PASSING)
    return held + max(parts.get(name, 0.0) for name in PASSING)
