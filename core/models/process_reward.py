"""Scores of single tokens from a process reward model.

N sequences, S padded width, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.data.tokens import pad_right


@torch.no_grad()
def token_scores(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The probability of "right" after the tokens at `places` of each of `rows`, float32."""
    ids, mask = (t.to(model.device) for t in pad_right(rows, 0))
    logits = token_logits(model, ids, mask).float()
    right = logits[..., 0].sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)[..., 1]
    return [right[row, list(at)].tolist() for row, at in enumerate(places)]


def token_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits [N, S, C] of a token classifier, or of a sequence classifier's head at each token."""
    names = model.config.architectures or [type(model).__name__]
    if names[0].endswith("ForTokenClassification"):
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
        return logits
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    scored: Tensor = model.get_submodule("score")(hidden)
    return scored
