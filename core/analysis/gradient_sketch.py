"""What each recorded token does to the parameters, in few numbers.

Axes: B rows, T response tokens, D trained parameters, K directions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.analysis.frozen import FrozenStep
from posttrain.core.models.sharded import put_away
from posttrain.core.training.natural_gradient import Fisher


def gradient_sketch(model: PreTrainedModel, step: FrozenStep, directions: int, seed: int) -> Tensor:
    """Slopes [B, T, K] of each token's log-prob along K random directions; 0 where no loss is.

    The directions are normal with variance 1 / K. A gradient of the parameters is the sum over
    tokens of (d loss / d log-prob) times (the token's slopes), and products of such sums are those
    of the gradients themselves, but for a relative error of about sqrt(2 / K)
    (Johnson-Lindenstrauss). So any loss on any of the tokens costs no further pass of the model.
    """
    batch, settings = step.batch, step.settings
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in trained)
    fisher = Fisher(model, [], temperature=settings.temperature)
    found = torch.zeros(*batch.mask.shape, directions)
    draw = torch.Generator().manual_seed(seed)
    parts = [rows for rows in settings.micro_rows(batch) if bool(batch.mask[rows].any())]
    for place in range(directions):
        vector = torch.randn(size, generator=draw).div_(directions**0.5)
        vector = vector.to(trained[0].device, trained[0].dtype)
        for rows in parts:
            micro = batch.select(rows)
            chosen = micro.mask.bool()
            slopes = torch.zeros(chosen.shape)
            slopes[chosen] = fisher.logprob_slopes(micro, chosen, vector).float().cpu()
            found[rows, :, place] = slopes
    put_away(model)
    return found
