"""Scores of a response's steps from a process reward model (arXiv:2305.20050, arXiv:2312.08935)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward, RewardContext
from posttrain.core.data.steps import StepPlaces, last_turn, step_ends, step_places
from posttrain.core.types import RewardSample, Score, StepVerdict

ROLE = "process_reward_model"


class ProcessRewardConfig(PluginConfig):
    """Settings of `process_reward`."""

    path: str | None = Field(
        default=None, description=f"directory of the model; null = the stage's input `{ROLE}`"
    )
    separator: str = Field(default="\n\n", min_length=1, description="the text that ends a step")
    aggregate: Literal["min", "mean", "last", "product"] = Field(
        default="min", description="the response's reward, of its steps' scores"
    )
    tokens: Literal["policy", "own"] = Field(
        default="policy",
        description="policy: the tokens as sampled, for a model with the policy's vocabulary; own: "
        "the texts, tokenised again for this model (the policy's tokens stay as they are)",
    )


class ProcessRewardReward(Reward[ProcessRewardConfig]):
    """p_j = P(right) at the token that ends step j's separator; R_i = min, mean, last or prod of p.

    The model is a token classifier (two labels: the second one is "right"; one: sigmoid) or has a
    scalar head, read at each step's end (sigmoid). Steps are found in the text, and tokens by
    character offsets. The last step's separator is put in for the model if the response has none,
    since a model trained on separators has learnt nothing elsewhere. The steps' scores are what
    `grpo_process` reads. Of an episode they are those of its last turn, which the model reads after
    all that was before (`own`: after the problem). A response without a step is 0; one that is
    longer than the model, or whose tokens are not the model's, is unscored with status `error`.
    Sources: arXiv:2305.20050, section 2.6 (product, min); Math-Shepherd, arXiv:2312.08935; TRL's
    PRMTrainer (the label at the separator's last token).
    """

    name = "process_reward"
    Config = ProcessRewardConfig
    runs_in = "host"
    needs_inputs = frozenset({ROLE})
    gives_steps = True

    def required_inputs(self) -> frozenset[str]:
        """Nothing when the config names a directory."""
        return self.needs_inputs if self.config.path is None else frozenset()

    def setup(self, context: RewardContext) -> None:
        """Load the model and its tokenizer."""
        # Late, here and in `score`: transformers takes seconds that only runs should pay.
        from posttrain.core.data.tokens import ChatTokenizer
        from posttrain.core.models.device import ModelRuntime
        from posttrain.core.models.loading import load_process_reward_model

        named = self.config.path
        path = context.inputs[ROLE] if named is None else Path(named).expanduser()
        runtime = ModelRuntime(context.device, context.dtype, context.attention)
        self.model = load_process_reward_model(path, runtime)
        self.tokenizer = ChatTokenizer.load(path)
        self.batch_size = context.batch_size
        self.max_tokens = getattr(self.model.config, "max_position_embeddings", math.inf)

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order, with its steps."""
        from posttrain.core.models.process_reward import token_scores

        rows = [self._row(sample) for sample in samples]
        ready = [index for index, row in enumerate(rows) if isinstance(row, StepPlaces)]
        scores: dict[int, Score] = {}
        for start in range(0, len(ready), self.batch_size):
            part = ready[start : start + self.batch_size]
            batch = [row for row in (rows[index] for index in part) if isinstance(row, StepPlaces)]
            found = token_scores(self.model, [r.ids for r in batch], [r.places for r in batch])
            for index, row, values in zip(part, batch, found, strict=True):
                scores[index] = self._of_steps(row, values)
        return [scores[i] if isinstance(row, StepPlaces) else row for i, row in enumerate(rows)]

    def _row(self, sample: RewardSample) -> StepPlaces | Score:
        """What the model reads, the prompt included, or why it reads nothing."""
        if not step_ends(sample.text, self.config.separator):
            return Score(0.0, detail="no step found")
        if self.config.tokens == "own":
            prompt = self.tokenizer.encode_prompt(sample.problem)
            ids = self.tokenizer.encode_text(sample.text, special=True)
        else:
            prompt, ids = sample.prompt_ids, sample.token_ids or sample.response_ids
        start = last_turn(ids, sample.text, self.tokenizer)
        if start is None:
            fix = (
                "set tokens: own" if self.config.tokens == "policy" else "its tokenizer loses text"
            )
            return Score(None, "error", f"the model's tokenizer reads other text: {fix}")
        prompt, ids = (*prompt, *ids[:start]), ids[start:]
        found = step_places(sample.text, ids, self.config.separator, self.tokenizer)
        count = len(prompt) + len(found.ids)
        if count > self.max_tokens:
            limit = f"{count} tokens; the process reward model reads {self.max_tokens}"
            return Score(None, "error", limit)
        places = tuple(len(prompt) + place for place in found.places)
        return StepPlaces((*prompt, *found.ids), places, found.ends)

    def _of_steps(self, row: StepPlaces, values: Sequence[float]) -> Score:
        if not all(map(math.isfinite, values)):
            return Score(
                None, "error", "the process reward model gave a score that is not a number"
            )
        steps = tuple(StepVerdict(end, p) for end, p in zip(row.ends, values, strict=True))
        found = {
            "min": min(values),
            "mean": sum(values) / len(values),
            "last": values[-1],
            "product": math.prod(values),
        }
        parts = {"min": found["min"], "mean": found["mean"], "steps": float(len(values))}
        return Score(found[self.config.aggregate], steps=steps, components=parts)
