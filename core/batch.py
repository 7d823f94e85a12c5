"""`RolloutBatch`: the table that grows a column at each task of an RL step.

Axes: B sequences (rows of one group are adjacent and answer one problem), T padded response width,
L padded prompt width, P and U those of the teachers' prompts and responses, K reward components or
candidates, S scored steps or turns. Prompts are padded on the left, responses on the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.errors import RunError
from posttrain.core.types import Problem, RewardSample, Score

# Columns and their shape, as tensor axes. "[B]" and "[B, T]" are checked by `validate`.
COLUMN_AXES: dict[str, str] = {
    "prompt_ids": "BL",
    "prompt_mask": "BL",
    "response_ids": "BT",
    "response_mask": "BT",
    "mask": "BT",
    "rollout_logprobs": "BT",
    "policy_version": "BT",
    "group_id": "B",
    "seq_id": "B",
    "truncated": "B",
    "scored": "B",
    "rewards": "B",
    "acc": "B",
    "reward_components": "BK",
    "token_rewards": "BT",
    "old_logprobs": "BT",
    "ref_logprobs": "BT",
    "entropy": "BT",
    "values": "BT",
    "advantages": "BT",
    "returns": "BT",
    "bootstrap_value": "B",
    "baseline_reward": "B",
    "agent_id": "B",
    "step_end": "BS",
    "step_score": "BS",
    "node_id": "BT",
    "episode_id": "B",
    "turn_end": "BS",
    "turn_reward": "BS",
    "state_key": "BS",
    "obs_mask": "BT",
    "sum_pi_squared": "BT",
    "process_rewards": "BT",
    "is_weight": "BT",
    "correction_mask": "BT",
    "logprobs_now": "BT",
    "entropy_keep": "BT",
    "log_kept": "BT",
    "teacher_logprobs": "BT",
    "teacher_topk_ids": "BTK",
    "teacher_topk_logprobs": "BTK",
    "teacher_id": "B",
    "teacher_prompt_ids": "BP",
    "teacher_prompt_mask": "BP",
    "teacher_response_ids": "BU",
    "teacher_response_mask": "BU",
    "text_group": "BT",
    "teacher_text_group": "BU",
}


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rows of one rollout (or a slice of them), with the columns filled so far.

    `response_mask` [B, T] marks tokens the policy sampled; `mask` [B, T] is `response_mask` less
    the rows that take no loss (unscored ones). Log-probs are float32 nats, everything is
    detached. `rewards` [B] is the weighted sum of `reward_components` [B, K] (NaN = not scored).
    `acc` [B] is the verifier's verdict before any shaping, NaN of an episode that failed.

    For estimators and losses that ask for them: `bootstrap_value` [B] is the critic's value after
    the last token; `baseline_reward` [B] the reward of the greedy answer (NaN = unscored);
    `step_end` [B, S] the token index that ends each scored step (-1 = none), `step_score` [B, S]
    its score; `node_id` [B, T] the tree node that generated a token; `sum_pi_squared` [B, T] the
    sum of the old policy's squared probabilities over the vocabulary; `process_rewards` [B, T] what
    an implicit process reward model gives each sampled token; `is_weight` and
    `correction_mask` [B, T] the rollout correction; `logprobs_now` and `entropy` [B, T] the policy
    at the start of an optimizer step; `entropy_keep` [B, T] the tokens an entropy mask keeps.

    `log_kept` [B, T] is the log of the old policy's probability on what top-k and top-p kept at
    each token; None when they cut nothing, or it is not known yet. Once it is filled,
    `rollout_logprobs` are the engine's plus it: of the untruncated distribution, as `old_logprobs`.
    `samples` are what the rewards saw of each row, `scores` what each of the K rewards said of it.

    Of teachers: `teacher_logprobs` [B, T] of the sampled tokens (NaN = not scored), the best
    candidates `teacher_topk_ids` [B, T, K] (-1 = missing) with `teacher_topk_logprobs` [B, T, K]
    over the whole vocabulary (-inf = missing), and `teacher_id` [B], the teacher's place among
    those of the stage (-1 = none). `teacher_prompt_ids` [B, P] with `teacher_prompt_mask` are what
    teachers read before the response, where that is not the policy's own prompt. Where teachers
    have tokens of their own, `teacher_response_ids` [B, U] with `teacher_response_mask` are the
    response in these, and `text_group` [B, T] and `teacher_text_group` [B, U] number the stretches
    of it that both tokenisations cut out (-1 = in none).

    Of episodes with an environment: `turn_end` [B, S] the token index that ends each turn of the
    policy (-1 = none), `turn_reward` [B, S] the environment's reward for it (NaN = none),
    `state_key` [B, S] a digest of what the policy was shown before it; `obs_mask` [B, T] marks
    tokens that others wrote. Rows with one `episode_id` [B] are branches of one episode: they share
    its reward, and each sampled token is in the `response_mask` of one of them. `outcomes` are the
    environment's own scores, `failures` why an episode is not learned from (empty = it is).
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    policy_version: Tensor
    group_id: Tensor
    seq_id: Tensor
    truncated: Tensor
    scored: Tensor | None = None
    rewards: Tensor | None = None
    acc: Tensor | None = None
    reward_components: Tensor | None = None
    token_rewards: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    bootstrap_value: Tensor | None = None
    baseline_reward: Tensor | None = None
    agent_id: Tensor | None = None
    step_end: Tensor | None = None
    step_score: Tensor | None = None
    node_id: Tensor | None = None
    episode_id: Tensor | None = None
    turn_end: Tensor | None = None
    turn_reward: Tensor | None = None
    state_key: Tensor | None = None
    obs_mask: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    process_rewards: Tensor | None = None
    is_weight: Tensor | None = None
    correction_mask: Tensor | None = None
    logprobs_now: Tensor | None = None
    entropy_keep: Tensor | None = None
    log_kept: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_topk_ids: Tensor | None = None
    teacher_topk_logprobs: Tensor | None = None
    teacher_id: Tensor | None = None
    teacher_prompt_ids: Tensor | None = None
    teacher_prompt_mask: Tensor | None = None
    teacher_response_ids: Tensor | None = None
    teacher_response_mask: Tensor | None = None
    text_group: Tensor | None = None
    teacher_text_group: Tensor | None = None
    problems: tuple[Problem, ...] = ()
    texts: tuple[str, ...] = ()
    transcripts: tuple[str, ...] = ()
    turns: tuple[tuple[str, ...], ...] = ()
    outcomes: tuple[float | None, ...] = ()
    failures: tuple[str, ...] = ()
    samples: tuple[RewardSample, ...] = field(default=(), repr=False)
    scores: tuple[tuple[Score, ...], ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return int(self.response_ids.shape[0])

    def columns(self) -> set[str]:
        """Names of the tensor columns that are filled."""
        return {name for name in COLUMN_AXES if getattr(self, name) is not None}

    def require(self, names: Iterable[str], who: str) -> None:
        """Raise `RunError` when `who` needs a column that is not filled yet."""
        missing = sorted(set(names) - self.columns())
        if missing:
            raise RunError(
                f"{who} needs the column(s) {missing}, but it has {sorted(self.columns())}: "
                "run the task that fills them first, or choose another plugin"
            )

    def column(self, name: str) -> Tensor:
        """Return a filled column, or raise `RunError` naming it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            self.require([name], "this step")
            raise AssertionError("unreachable")
        return value

    def with_columns(self, **columns: Tensor) -> RolloutBatch:
        """A copy with `columns` filled; shapes are checked."""
        unknown = sorted(set(columns) - set(COLUMN_AXES))
        if unknown:
            raise RunError(f"unknown column(s) {unknown}; known: {sorted(COLUMN_AXES)}")
        detached: dict[str, Any] = {name: value.detach() for name, value in columns.items()}
        filled = replace(self, **detached)
        filled.validate()
        return filled

    def validate(self) -> None:
        """Raise `RunError` unless every filled column has the shape its axes say."""
        num_rows, width = self.response_ids.shape
        sizes = {"B": num_rows, "T": width, "L": self.prompt_ids.shape[1]}
        for name in sorted(self.columns()):
            value = getattr(self, name)
            axes = COLUMN_AXES[name]
            expected = [sizes.get(axis) for axis in axes]
            fits = value.dim() == len(axes) and all(
                want is None or want == got for want, got in zip(expected, value.shape, strict=True)
            )
            if not fits:
                raise RunError(
                    f"column '{name}' has shape {list(value.shape)}, expected {axes} = {expected}"
                )

    def bare(self) -> RolloutBatch:
        """The columns alone, without texts and what rewards said: what models are trained on."""
        empty: dict[str, Any] = dict.fromkeys(NOT_COLUMNS, ())
        return replace(self, **empty)

    def for_teachers(self) -> RolloutBatch:
        """What teachers read: the same responses, each after the prompt that its teacher is shown.

        Where teachers have tokens of their own, these; other columns [B, T] do not fit them.
        """
        if self.teacher_prompt_ids is None:
            return self
        ids, mask = self.teacher_prompt_ids, self.column("teacher_prompt_mask")
        shown_to = replace(self, prompt_ids=ids, prompt_mask=mask)
        if self.teacher_response_ids is None:
            return shown_to
        return replace(
            shown_to,
            response_ids=self.teacher_response_ids,
            response_mask=self.column("teacher_response_mask"),
        )

    def select(self, rows: Tensor) -> RolloutBatch:
        """The given rows [N] (int64 indices), in that order, with all filled columns."""
        index = rows.tolist()
        # Any: `replace` checks each field's type, and these are all tensors.
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in self.columns()}
        for name in NOT_COLUMNS:
            given = getattr(self, name)
            columns[name] = tuple(given[i] for i in index) if given else ()
        return replace(self, **columns)

    def first_branches(self) -> Tensor | None:
        """For each row the first row of its episode [B]; None where every row is an episode."""
        if self.episode_id is None:
            return None
        firsts: dict[int, int] = {}
        ids = self.episode_id.tolist()
        for row, episode in enumerate(ids):
            firsts.setdefault(episode, row)
        return torch.tensor([firsts[episode] for episode in ids], dtype=torch.int64)

    def leads(self) -> Tensor:
        """Whether a row is the first of its episode [B]: what is of an episode is counted there."""
        firsts, rows = self.first_branches(), torch.arange(len(self))
        return torch.ones_like(rows, dtype=torch.bool) if firsts is None else firsts == rows

    def groups(self) -> Iterator[Tensor]:
        """Row indices [G] of each group, in order of first appearance."""
        ids = self.group_id.tolist()
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(ids):
            rows.setdefault(group, []).append(row)
        for members in rows.values():
            yield torch.tensor(members, dtype=torch.int64)


# A dataclass field without an entry in COLUMN_AXES would silently escape validation.
NOT_COLUMNS = {
    "problems",
    "texts",
    "transcripts",
    "turns",
    "outcomes",
    "failures",
    "samples",
    "scores",
}
assert {f.name for f in fields(RolloutBatch)} - NOT_COLUMNS == set(COLUMN_AXES)
