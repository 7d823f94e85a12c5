"""Everything that a page shows of a step: its rows, its tokens' numbers, and each what-if.

Axes: B responses, T response tokens, N tokens of all responses, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.core.errors import PosttrainError
from posttrain.core.evidence.step import StepEvidence
from posttrain.core.microscope.packing import FULL_BITS, pack
from posttrain.core.microscope.quantities import quantities, sequence_ratios
from posttrain.core.microscope.weights import (
    CLIP_STATES,
    TokenWeights,
    token_weights,
    unread_rows,
)
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.training.objective import Objective
from posttrain.core.training.updates import UpdateSettings

OWN_NAME = "own"
LARGE = 100_000
"""Tokens from which a page keeps `LARGE_BITS` binary digits of a number, four decimal ones."""
LARGE_BITS = 13
_CLIPPED = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Variant:
    """The run's own objective, or one that somebody asks about; `name` is what a page calls it."""

    name: str
    objective: Objective


@dataclass(frozen=True, slots=True)
class Report:
    """A page's content: `meta` is JSON, `columns` are packed (see `packing`).

    `weights` are those of each variant that could be computed, by name.
    """

    meta: Mapping[str, Any]  # Any: JSON
    columns: Mapping[str, str]
    weights: Mapping[str, TokenWeights] = field(repr=False)


def make_report(
    evidence: StepEvidence,
    own: Objective,
    settings: UpdateSettings,
    asked: Sequence[Variant] = (),
    usual: Sequence[Variant] = (),
    *,
    title: str,
    notes: Sequence[str] = (),
) -> Report:
    """The report of a step under its `own` objective and under others.

    One of `asked` that cannot be computed raises what `token_weights` does; one of `usual` is left
    out with a note that says why.
    """
    said = [*notes, *_notes(evidence, own, settings)]
    weights = {OWN_NAME: token_weights(evidence, own, settings)}
    for variant in asked:
        weights[variant.name] = token_weights(evidence, variant.objective, settings)
    for variant in usual:
        try:
            found = token_weights(evidence, variant.objective, settings)
        except PosttrainError as error:
            said.append(f"{variant.name} is left out: {error}")
            continue
        weights.setdefault(variant.name, found)
    shown = _shown(evidence)
    bits = LARGE_BITS if int(shown.sum()) >= LARGE else FULL_BITS
    texts, tokens = _vocabulary(evidence, shown)
    measured = _measured(evidence)
    numbers = measured | {f"weight-{i}": found.total for i, found in enumerate(weights.values())}
    flat = {name: _flat(values, shown) for name, values in numbers.items()}
    columns = {"tokens": pack(tokens)} | {name: pack(c, bits) for name, c in flat.items()}
    for index, found in enumerate(weights.values()):
        columns[f"clip-{index}"] = pack(found.clip[shown].numpy())
    meta = {
        "title": title,
        "step": evidence.step,
        "notes": said + (["numbers are rounded to four digits"] if bits < FULL_BITS else []),
        "clip_states": list(CLIP_STATES),
        "offsets": [0, *shown.sum(dim=1).cumsum(0).tolist()],
        "texts": texts,
        "quantities": list(measured),
        "scales": {name: _scale(column, name) for name, column in flat.items()},
        "variants": [{"name": name, **_totals(found)} for name, found in weights.items()],
        "rows": _rows(evidence),
    }
    return Report(meta, columns, weights)


def _measured(evidence: StepEvidence) -> dict[str, Tensor]:
    """Columns [B, T] of what is known, by the names they have on the page."""
    known = quantities(evidence)
    found = {
        "advantage": known.advantage,
        "logprobs": known.logprobs,
        "ratio": known.ratio,
        "entropy": known.entropy,
        "mismatch": known.mismatch,
    }
    for name, values in (("kl_k1", known.kl_k1), ("kl_k3", known.kl_k3)):
        if values is not None:
            found[name] = values
    return found


def _notes(evidence: StepEvidence, own: Objective, settings: UpdateSettings) -> list[str]:
    """What a reader must know before believing a number."""
    found = []
    unread = int(unread_rows(evidence).sum())
    if unread:
        found.append(
            f"{unread} of {len(evidence.batch)} responses were read by no optimizer step, because "
            "their advantages are 0: their log-probs are not known, and their weights are 0 under "
            "every loss"
        )
    if settings.cut and evidence.batch.log_kept is None:
        found.append(
            "the rollout was cut by top-k or top-p, and the engine's log-probs here are under that "
            "cut: mismatch, and weights against the engine, contain its mass"
        )
    if own.kl is not None and own.kl.from_logits and evidence.kl_coef > 0:
        found.append("the KL term is over the whole vocabulary, and is not in the weights")
    if own.entropy_coef > 0:
        found.append(
            "the entropy bonus depends on more than a token's log-prob: not in the weights"
        )
    for term in own.terms:
        if term.loss.owns_update:
            found.append(
                f"{term.loss.name} takes a step of its own along this gradient, not the gradient's"
            )
        if term.loss.state():
            found.append(
                f"{term.loss.name} changes its own settings ({', '.join(term.loss.state())}) while "
                "it trains: the weights here are those of the settings it began with"
            )
    return found


def _shown(evidence: StepEvidence) -> Tensor:
    """Positions [B, T] up to the last sampled token of each response, tool output included."""
    sampled = evidence.batch.response_mask.bool()
    return sampled.flip(1).cumsum(dim=1).flip(1) > 0


def _vocabulary(evidence: StepEvidence, shown: Tensor) -> tuple[list[str], NDArray[np.uint32]]:
    """Texts of the token ids that occur, and the place in them of each token [N]."""
    ids, places = np.unique(evidence.batch.response_ids[shown].numpy(), return_inverse=True)
    known = evidence.token_texts or {}
    return [known.get(int(i), f"<{i}>") for i in ids], places.astype(np.uint32)


def _flat(values: Tensor, shown: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values[shown].detach().float().numpy()
    return found


def _scale(column: NDArray[np.float32], name: str) -> float:
    """Size at which a colour is full: what 99 of 100 finite values other than 0 do not exceed.

    A ratio is coloured by its logarithm.
    """
    values = np.abs(np.log(np.where(column > 0, column, 1.0)) if name == "ratio" else column)
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.quantile(values, 0.99)) if values.size else 1.0


def _totals(found: TokenWeights) -> dict[str, list[float]]:
    """Of each response: sum of |weight|, sum of the weights, and how many tokens are clipped."""
    clipped = torch.isin(found.clip, torch.tensor(_CLIPPED, dtype=torch.uint8))
    total = found.total.double()
    return {
        "size": total.abs().sum(dim=1).tolist(),
        "net": total.sum(dim=1).tolist(),
        "clipped": clipped.sum(dim=1).tolist(),
    }


def _rows(evidence: StepEvidence) -> list[dict[str, Any]]:
    """Of each response what stands above its tokens; JSON, so nothing that is not finite."""
    batch, names = evidence.batch, evidence.component_names
    ratios = sequence_ratios(evidence).tolist()
    rows = []
    for index, row in enumerate(sample_rows(batch, names, limit=len(batch))):
        parts = {name: row[f"reward/{name}"] for name in names}
        about = ("group", "prompt", "reward", "advantage", "correct", "finish_reason")
        rows.append(
            {name: _finite(row[name]) for name in about}
            | {
                "parts": {name: _finite(value) for name, value in parts.items()},
                "status": row.get("reward_status"),
                "seen_by": int(evidence.seen_by[index]),
                "loss_tokens": int(batch.mask[index].sum()),
                "sequence_ratio": _finite(ratios[index]),
            }
        )
    return rows


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
