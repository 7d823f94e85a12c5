"""Columns of a rollout batch that go by their origin; names alone, without torch."""

from __future__ import annotations

REWARD_COLUMNS = frozenset({"token_rewards", "rewards", "reward_components", "step_score", "acc"})
"""Columns in which rewards arrive: their sum by token and by response, each by itself, the steps of
the first reward that scores steps, and the task's verdict."""
TEACHER_COLUMNS = frozenset(
    {"teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs", "teacher_id"}
)
"""Columns that the teachers of a stage fill."""
