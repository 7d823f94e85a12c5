"""The token microscope: a step token by token under its own loss and others, as one HTML file.

The page holds its script, style and numbers; it loads nothing. Axes: B responses, T response
tokens, N tokens of all responses one after another.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.core.analysis.answer_weights import (
    AnswerWeights,
    answer_columns,
    answer_rows,
    answer_samples,
)
from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.report import plain
from posttrain.core.analysis.token_weights import (
    CLIP_STATES,
    TokenWeights,
    clipped_tokens,
    read_rows,
    reads_logits,
    unread_rows,
)
from posttrain.core.errors import PosttrainError
from posttrain.core.math.kl import k3
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import taught
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.training.objective import Objective
from posttrain.core.training.updates import UpdateSettings

OWN_NAME = "own"
VERDICTS = ("wrong", "right")
LARGE = 100_000
"""Tokens from which a page keeps `LARGE_BITS` binary digits of a number, four decimal ones."""
LARGE_BITS, FULL_BITS = 13, 23
CLAMP = 20.0  # bound of log ratios before exp, nats: as in the losses
Column = NDArray[np.float32] | NDArray[np.uint8] | NDArray[np.uint32]
Weigh = Callable[[StepEvidence], TokenWeights]
"""The weights of a step under a loss; raises `PosttrainError` where that cannot be."""


@dataclass(frozen=True, slots=True)
class Microscope:
    """A page's content: `meta` is JSON, `columns` are packed (see `pack`).

    `weights` are those of each variant that could be computed, by name; `answers` what is known of
    given answers, where the step learned from these.
    """

    meta: Mapping[str, Any]  # Any: JSON
    columns: Mapping[str, str]
    weights: Mapping[str, TokenWeights] = field(repr=False)
    answers: AnswerWeights | None = field(default=None, repr=False)

    def page(self) -> str:
        """The page. What people or models wrote stands in it as JSON alone, with no `<` in it."""
        parts = files("posttrain.core.analysis")
        script, style = (
            parts.joinpath(name).read_text("utf-8") for name in ("microscope.js", "microscope.css")
        )
        title = html.escape(str(self.meta["title"]))
        columns = "\n".join(
            f'<script type="text/plain" id="column-{name}">{text}</script>'
            for name, text in self.columns.items()
        )
        selects = " ".join(
            f'<label>{label} <select id="{name}"></select></label>'
            for name, label in (
                ("colour", "Colour"),
                ("what", "What if"),
                ("sort", "Order"),
                ("show", "Show"),
            )
        )
        return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{style}</style></head><body>
<header><h1>{title}</h1>{selects}
<div class="legend" id="legend"></div><div id="totals"></div><div id="message"></div></header>
<noscript><p>This page draws its tokens with a script of its own; nothing is loaded.</p></noscript>
<ul id="notes"></ul><main id="rows"></main><div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="meta">{_as_json(self.meta)}</script>
{columns}
<script>
{script}</script></body></html>
"""


def look(
    evidence: StepEvidence,
    own: TokenWeights,
    asked: Mapping[str, Weigh] = MappingProxyType({}),
    usual: Mapping[str, Weigh] = MappingProxyType({}),
    *,
    title: str,
    notes: Sequence[str] = (),
    answers: AnswerWeights | None = None,
) -> Microscope:
    """A step under its `own` loss and under others, by their names on the page.

    `answers` are those of a step that learned from given ones. One of `asked` that cannot be
    computed raises what it does; one of `usual` is left out with a note that says why.
    """
    said = list(notes)
    weights = {OWN_NAME: own}
    for name, weigh in asked.items():
        weights[name] = weigh(evidence)
    left_out: dict[str, list[str]] = {}
    for name, weigh in usual.items():
        try:
            weights.setdefault(name, weigh(evidence))
        except PosttrainError as error:
            left_out.setdefault(str(error), []).append(name)
    said += [f"{', '.join(names)} left out: {reason}" for reason, names in left_out.items()]
    shown = _shown(evidence)
    bits = LARGE_BITS if int(shown.sum()) >= LARGE else FULL_BITS
    texts, tokens = _vocabulary(evidence, shown)
    if answers is None:
        measured = _measured(evidence) | _taught(evidence)
    else:
        measured = answer_columns(evidence) | _from_reference(evidence, evidence.batch.mask.bool())
    norms = weights[OWN_NAME].divergence
    if norms is not None and not weights[OWN_NAME].of_logits:
        measured["divergence_pull"] = norms
    numbers = measured | {f"weight-{i}": found.total for i, found in enumerate(weights.values())}
    flat = {name: v[shown].detach().float().numpy() for name, v in numbers.items()}
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
        "of_logits": weights[OWN_NAME].of_logits,
        "scales": {name: _scale(column, name) for name, column in flat.items()},
        "variants": [{"name": name, **_totals(found)} for name, found in weights.items()],
        "rows": _rows(evidence, answers),
        "verdicts": list(VERDICTS if answers is None else answers.verdicts),
        "of_scores": answers is not None and answers.of_scores,
    }
    return Microscope(meta, columns, weights, answers)


def _measured(evidence: StepEvidence) -> dict[str, Tensor]:
    """Columns [B, T] of what is known of each token, by their names on the page; NaN where not.

    `logprobs` and `entropy` (nats) are the policy's as the last optimizer step read them; `ratio`
    is exp(logprobs - old log-probs); `mismatch` (nats) is the trainer's old log-prob minus the
    engine's; `kl_k1` and `kl_k3` (nats) are estimates of the KL to the reference, if there is one.
    """
    batch = evidence.batch
    takes_loss = batch.mask.bool()
    known = takes_loss & read_rows(evidence)[:, None]
    seen, old = evidence.seen_logprobs, batch.column("old_logprobs").to(evidence.seen_logprobs)
    # A row that no update read has zeros for the old policy's log-probs where only its update would
    # have computed them.
    computed = known | (takes_loss & (old != 0).any(dim=1, keepdim=True))
    found = {
        "advantage": torch.where(takes_loss, batch.column("advantages"), torch.nan),
        "logprobs": torch.where(known, seen, torch.nan),
        "ratio": torch.where(
            known, masked(seen - old, known).clamp(-CLAMP, CLAMP).exp(), torch.nan
        ),
        "entropy": torch.where(known, evidence.seen_entropy, torch.nan),
        "mismatch": torch.where(computed, old - batch.rollout_logprobs.to(old), torch.nan),
    }
    return found | _from_reference(evidence, known)


def _from_reference(evidence: StepEvidence, known: Tensor) -> dict[str, Tensor]:
    """`kl_k1` and `kl_k3` where they are `known` [B, T]; none without a reference."""
    if evidence.batch.ref_logprobs is None:
        return {}
    k1 = evidence.seen_logprobs - evidence.batch.ref_logprobs.to(evidence.seen_logprobs)
    return {
        "kl_k1": torch.where(known, k1, torch.nan),
        "kl_k3": torch.where(known, k3(masked(k1, known), CLAMP, None), torch.nan),
    }


def _taught(evidence: StepEvidence) -> dict[str, Tensor]:
    """Columns [B, T] of what a teacher says; none without one.

    `teacher_logprobs` (nats) and `teacher_gap`, these minus the policy's as the last optimizer step
    read them; `divergence` is the value of the distillation loss.
    """
    batch, found = evidence.batch, {}
    takes_loss = taught(batch).bool()
    if batch.teacher_logprobs is not None:
        known = takes_loss & read_rows(evidence)[:, None]
        said = batch.teacher_logprobs.to(evidence.seen_logprobs)
        found["teacher_logprobs"] = torch.where(takes_loss, said, torch.nan)
        found["teacher_gap"] = torch.where(known, said - evidence.seen_logprobs, torch.nan)
    elif evidence.seen_gap is not None and bool(evidence.seen_gap.isfinite().any()):
        found["teacher_gap"] = torch.where(takes_loss, evidence.seen_gap, torch.nan)
    if evidence.seen_divergence is not None:
        found["divergence"] = torch.where(takes_loss, evidence.seen_divergence, torch.nan)
    return found


def notes_of(evidence: StepEvidence, own: Objective, settings: UpdateSettings) -> list[str]:
    """What a reader of an RL step must know before believing a number."""
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
    if own.distillation is not None and reads_logits(own):
        name = own.distillation.loss.name
        has_colour = "" if evidence.seen_slope is None else ", and has a colour of its own"
        found.append(
            f"{name} reads more of the policy than the sampled token's log-prob: "
            + (
                f"it is not in the weights{has_colour}"
                if own.terms
                else "a token's number is the norm of d loss / d logits, which has no sign"
            )
        )
    if own.observed is not None:
        found.append(
            f"{own.observed.loss.name} reads tokens that were not sampled: not in the weights"
        )
    if own.has_bonus:
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
    return [evidence.token_text(int(i)) for i in ids], places.astype(np.uint32)


def _scale(column: NDArray[np.float32], name: str) -> float:
    """Size at which a colour is full: what 99 of 100 finite values other than 0 do not exceed.

    A ratio is coloured by its logarithm.
    """
    values = np.abs(np.log(np.where(column > 0, column, 1.0)) if name == "ratio" else column)
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.quantile(values, 0.99)) if values.size else 1.0


def _totals(found: TokenWeights) -> dict[str, list[float]]:
    """Of each response: sum of |weight|, sum of the weights, and how many tokens are clipped."""
    total = found.total.double()
    return {
        "size": total.abs().sum(dim=1).tolist(),
        "net": total.sum(dim=1).tolist(),
        "clipped": clipped_tokens(found).tolist(),
    }


def _rows(evidence: StepEvidence, answers: AnswerWeights | None) -> list[dict[str, Any]]:
    """Of each response what stands above its tokens; JSON, so nothing that is not finite."""
    batch, names = evidence.batch, evidence.component_names
    if answers is not None:
        shown = answer_rows(evidence, answers, len(batch))
        return [{name: plain(value) for name, value in row.items()} for row in shown]
    ratios = _sequence_ratios(evidence)
    rows = []
    for index, row in enumerate(sample_rows(batch, names, limit=len(batch))):
        parts = {name: row[f"reward/{name}"] for name in names}
        about = ("group", "prompt", "reward", "advantage", "correct", "finish_reason")
        made = {name: row[name] for name in about} | {
            "parts": parts,
            "status": row.get("reward_status"),
            "seen_by": int(evidence.seen_by[index]),
            "loss_tokens": int(batch.mask[index].sum()),
            "sequence_ratio": ratios[index],
        }
        rows.append({name: plain(value) for name, value in made.items()})
    return rows


def _sequence_ratios(evidence: StepEvidence) -> list[float]:
    """exp of the mean log ratio of each response's tokens [B]; NaN where it is not known."""
    known = evidence.batch.mask.bool() & read_rows(evidence)[:, None]
    old = evidence.batch.column("old_logprobs").to(evidence.seen_logprobs)
    gaps = masked(evidence.seen_logprobs - old, known).double()
    mean = gaps.sum(dim=1) / known.sum(dim=1)  # 0 / 0 is the NaN that is promised
    return mean.clamp(-CLAMP, CLAMP).exp().tolist()


# --- tables --------------------------------------------------------------------------------------


def samples(
    evidence: StepEvidence, weights: TokenWeights, limit: int, answers: AnswerWeights | None = None
) -> list[dict[str, object]]:
    """One row per response, at least `limit`, as MLflow's table `samples` has it.

    With `weight`, the sum of |weight| over its tokens, and `clipped`, how many are clipped.
    """
    if answers is None:
        rows = sample_rows(evidence.batch, evidence.component_names, limit)
    else:
        rows = answer_samples(evidence, answers, limit)
    sizes = weights.total.double().abs().sum(dim=1).tolist()
    clipped = clipped_tokens(weights).tolist()
    return [
        {"row": i, **row, "weight": sizes[i], "clipped": clipped[i]} for i, row in enumerate(rows)
    ]


def top_tokens(
    evidence: StepEvidence, weights: TokenWeights, limit: int
) -> list[dict[str, object]]:
    """The `limit` tokens of largest |weight|, in order; none of weight 0."""
    total = weights.total
    width = total.shape[1]
    order = total.abs().flatten().argsort(descending=True, stable=True)[:limit].tolist()
    said = {n: v for n, v in _taught(evidence).items() if n in ("teacher_gap", "divergence")}
    advantages = evidence.batch.advantages
    beside = answer_columns(evidence) if advantages is None else {"advantage": advantages}
    found: list[dict[str, object]] = []
    for row, column in (divmod(place, width) for place in order):
        token = int(evidence.batch.response_ids[row, column])
        if total[row, column] != 0:
            found.append(
                {
                    "row": row,
                    "token": column,
                    "text": evidence.token_text(token),
                    "weight": float(total[row, column]),
                    **{n: float(v[row, column]) for n, v in beside.items()},
                    **{name: float(values[row, column]) for name, values in said.items()},
                    "clip": CLIP_STATES[int(weights.clip[row, column])],
                }
            )
    return found


# --- numbers as text ----------------------------------------------------------------------------


def _as_json(value: object) -> str:
    """JSON for a place between script tags: no text in it can end them or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def pack(values: Column, bits: int = FULL_BITS) -> str:
    """`values` [N] as text. Of float32, `bits` binary digits after the point are kept, rounded.

    The bytes are laid out by their place in the number, the lowest first, since those of one place
    are alike. What is not finite stays what it is.
    """
    kept = _rounded(values.astype(np.float32), bits) if values.dtype == np.float32 else values
    plain = np.frombuffer(kept.astype(kept.dtype.newbyteorder("<")).tobytes(), np.uint8)
    planes = plain.reshape(len(values), values.dtype.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def _rounded(values: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    if bits == FULL_BITS:
        return values
    cut = FULL_BITS - bits
    raw = values.view(np.uint32).astype(np.uint64)
    kept = ((raw + (1 << (cut - 1))) >> cut << cut).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), kept, values)
