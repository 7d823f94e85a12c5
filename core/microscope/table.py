"""A step in a few lines: its samples, and the tokens that its loss pulls at most."""

from __future__ import annotations

import torch

from posttrain.core.evidence.step import StepEvidence
from posttrain.core.microscope.weights import CLIP_STATES, TokenWeights
from posttrain.core.tracking.tables import sample_rows

Row = dict[str, object]


def samples(evidence: StepEvidence, weights: TokenWeights, limit: int) -> list[Row]:
    """One row per response, of `limit` at least, as MLflow's table `samples` has it.

    With `weight`, the sum of |weight| over its tokens, and `clipped`, how many are clipped.
    """
    rows = sample_rows(evidence.batch, evidence.component_names, limit)
    sizes = weights.total.double().abs().sum(dim=1).tolist()
    clipped = torch.isin(weights.clip, torch.tensor([1, 2, 3], dtype=torch.uint8)).sum(dim=1)
    return [
        {"row": i, **row, "weight": sizes[i], "clipped": int(clipped[i])}
        for i, row in enumerate(rows)
    ]


def top_tokens(evidence: StepEvidence, weights: TokenWeights, limit: int) -> list[Row]:
    """The `limit` tokens of largest |weight|, in order; none of weight 0."""
    total, known = weights.total, evidence.token_texts or {}
    width = total.shape[1]
    order = total.abs().flatten().argsort(descending=True, stable=True)[:limit].tolist()
    found: list[Row] = []
    for row, column in (divmod(place, width) for place in order):
        token = int(evidence.batch.response_ids[row, column])
        if total[row, column] != 0:
            found.append(
                {
                    "row": row,
                    "token": column,
                    "text": known.get(token, f"<{token}>"),
                    "weight": float(total[row, column]),
                    "advantage": float(evidence.batch.column("advantages")[row, column]),
                    "clip": CLIP_STATES[int(weights.clip[row, column])],
                }
            )
    return found
