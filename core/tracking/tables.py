"""Tables that MLflow's UI shows: what was sampled in a step, one row per response."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

from posttrain.core.batch import RolloutBatch

MAX_TAG = 8000  # MLflow's limit for a tag's value


def sample_rows(
    batch: RolloutBatch, component_names: Sequence[str] = (), limit: int = 64
) -> list[dict[str, object]]:
    """One row per response, for the first `limit` rows rounded up to whole groups.

    Columns: group, prompt, response, reward, reward/NAME per component, reward_status (`ok`, or
    which reward failed or had nothing to say), reward_detail, advantage, correct, finish_reason,
    policy_version. `advantage` is the mean over the response's tokens that take
    loss. What the batch does not hold (yet) is None, as is the reward of an unscored response.
    """
    total = len(batch)
    groups = [int(group) for group in batch.group_id.tolist()]
    last = min(limit, total)
    while 0 < last < total and groups[last] == groups[last - 1]:
        last += 1
    texts = batch.transcripts or batch.texts
    rewards, advantages = _scored_rewards(batch), _row_means(batch)
    rows: list[dict[str, object]] = []
    for index in range(last):
        row: dict[str, object] = {
            "group": groups[index],
            "prompt": batch.problems[index].prompt if batch.problems else None,
            "response": texts[index] if texts else None,
            "reward": _value(rewards, index),
        }
        for position, name in enumerate(component_names):
            parts = batch.reward_components
            row[f"reward/{name}"] = None if parts is None else _value(parts[:, position], index)
        if batch.scores:
            row["reward_status"], row["reward_detail"] = _told(batch, index, component_names)
        row |= {
            "advantage": _value(advantages, index),
            "correct": _value(batch.acc, index),
            "finish_reason": "length" if bool(batch.truncated[index]) else "stop",
            "policy_version": _version(batch, index),
        }
        rows.append(row)
    return rows


def _told(batch: RolloutBatch, index: int, names: Sequence[str]) -> tuple[str, str]:
    """Statuses and details of a row's scores: those other than `ok`, and what rewards said."""
    named = list(zip(names, batch.scores[index], strict=False))
    statuses = [f"{name}: {score.status}" for name, score in named if score.status != "ok"]
    details = [f"{name}: {score.detail}" for name, score in named if score.detail]
    return "; ".join(statuses) or "ok", "; ".join(details)


def _scored_rewards(batch: RolloutBatch) -> torch.Tensor | None:
    """Rewards [B] with NaN where a response could not be scored: that is never a zero."""
    if batch.rewards is None or batch.scored is None:
        return batch.rewards
    return batch.rewards.masked_fill(~batch.scored.bool(), math.nan)


def _row_means(batch: RolloutBatch) -> torch.Tensor | None:
    """Mean advantage [B] over tokens that take loss; NaN for a row without any."""
    if batch.advantages is None:
        return None
    counts = batch.mask.sum(dim=1)
    return (batch.advantages * batch.mask).sum(dim=1) / counts


def _value(column: torch.Tensor | None, index: int) -> float | None:
    value = math.nan if column is None else float(column[index])
    return None if math.isnan(value) else value


def _version(batch: RolloutBatch, index: int) -> int | None:
    sampled = batch.policy_version[index][batch.response_mask[index].bool()]
    return int(sampled[0]) if len(sampled) else None


def table_json(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows in the format of `mlflow.log_table`; columns in order of first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[_plain(row.get(name)) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, default=str)


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity: both become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def logged_tables_tag(paths: Sequence[str]) -> str:
    """Value of the tag by which MLflow's UI knows which artifacts are tables.

    A tag is limited in length, so beyond about 120 tables the oldest show as plain JSON.
    """
    entries = [{"path": path, "type": "table"} for path in paths]
    while len(text := json.dumps(entries)) > MAX_TAG:
        entries.pop(0)
    return text
