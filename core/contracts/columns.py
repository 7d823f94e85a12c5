"""Columns of a rollout batch that go by their origin; names alone, without torch."""

from __future__ import annotations

REWARD_COLUMNS = frozenset({"token_rewards", "rewards", "reward_components", "step_score", "acc"})
"""Columns in which rewards arrive: their sum by token and by response, each by itself, the steps of
the first reward that scores steps, and the task's verdict."""
TEXT_COLUMNS = frozenset(
    {"teacher_response_ids", "teacher_response_mask", "text_group", "teacher_text_group"}
)
"""Columns with a response as a teacher of another tokenizer reads it."""
TEACHER_COLUMNS = TEXT_COLUMNS | {
    "teacher_logprobs",
    "teacher_topk_ids",
    "teacher_topk_logprobs",
    "teacher_id",
}
"""Columns that the teachers of a stage fill."""
