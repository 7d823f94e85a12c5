"""The sum of a policy's squared probabilities at each response token: how peaked it is there.

Read by the optimal token baseline and by WPO's weights. Axes: B rows, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.models.wide_products import product
from posttrain.core.training.forward import head_weight, response_states, to_rows

CHUNK = 1024  # tokens whose float32 logits are held at a time


@torch.no_grad()
def response_sum_pi_squared(
    model: PreTrainedModel, batch: RolloutBatch, *, temperature: float
) -> Tensor:
    """sum_v pi(v)^2 [B, T] in (0, 1] at the sampling temperature; 0 where `response_mask` is 0."""
    hidden, ids, mask, _ = response_states(model, batch, include_last=False)
    weight, chosen = head_weight(model), hidden[:, : ids.shape[1]][mask]
    parts = []
    for chunk in torch.split(chosen, CHUNK):
        logits = product(chunk, weight.t())
        logits = logits if logits.dtype == torch.float64 else logits.float()
        parts.append(torch.softmax(logits / temperature, dim=-1).square().sum(dim=-1))
    values = torch.cat(parts) if parts else chosen.new_zeros(0)
    return to_rows(values, mask, batch.response_ids.shape).cpu()
