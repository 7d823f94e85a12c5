"""(right, wrong) pairs of a model's own answers, kept until the stage that reads them is over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.core.config.stages import PreferenceDataStage
from posttrain.core.contracts import PromptGroup, RolloutEngine
from posttrain.core.data.preference import PAIR_PROMPTS_PER_CALL, Pair, make_pairs
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.runtime.files import write_text
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import SamplingParams
from posttrain.pipelines.stage.context import StageContext

KEPT = "own_answers.json"
SHOWN = 200
"""Answers in the table that people see."""


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """Pairs, and the answers they were made of as a table."""

    pairs: list[Pair]
    table: list[dict[str, object]]

    def write(self, path: Path) -> None:
        """Write a line with a digest and a line with all else, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"pairs": [asdict(pair) for pair in self.pairs], "table": self.table})
        write_text(path, f"{_digest(text)}\n{text}\n")

    @classmethod
    def read(cls, path: Path) -> OwnAnswers:
        """What `write` wrote; raises `RunError` when it is something else."""
        digest, _, text = path.read_text(errors="replace").rstrip("\n").partition("\n")
        if digest != _digest(text):
            raise RunError(
                f"'{path}' is damaged (its digest differs), and the stage has begun to train on "
                "it: run with --fresh to start the stage again"
            )
        found = json.loads(text)
        pairs = [
            Pair(**row | {name: tuple(row[name]) for name in row if name.endswith("_ids")})
            for row in found["pairs"]
        ]
        return cls(pairs, found["table"])


def sample_pairs(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> list[Pair]:
    """Pairs of the model's own answers to training problems; those of an interrupted run again."""
    problems = context.training_problems(stage.num_prompts)
    prompts = context.encode_prompts(
        tokenizer, problems, stage.generation.max_response_length, "prompts"
    )
    kept = context.checkpoints / KEPT
    if kept.is_file():
        answers = OwnAnswers.read(kept)
        context.reporter.say(f"{context.name}: {len(answers.pairs)} pairs sampled before ({kept})")
    else:
        with context.engines.lease(context.model_dir) as engine:
            answers = _sample(context, stage, engine, tokenizer, prompts)
        answers.write(kept)
    context.tracker.log_table("answers", 0, answers.table)
    return answers.pairs


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sample(
    context: StageContext,
    stage: PreferenceDataStage,
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    prompts: Sequence[PromptGroup],
) -> OwnAnswers:
    pairs: list[Pair] = []
    table: list[dict[str, object]] = []
    for start in range(0, len(prompts), PAIR_PROMPTS_PER_CALL):
        context.check()
        part = prompts[start : start + PAIR_PROMPTS_PER_CALL]
        ids = [prompt.prompt_ids for prompt in part]
        params = SamplingParams(
            num_generations=stage.num_generations,
            max_tokens=stage.generation.max_response_length,
            temperature=stage.generation.temperature,
            top_p=stage.generation.top_p,
            top_k=stage.generation.top_k,
            seed=derive_seed(context.run.seed, context.name, start),
        )
        for prompt, group in zip(part, engine.generate(ids, params), strict=True):
            problem, answers = prompt.problem, []
            for completion in group:
                text = tokenizer.decode_response(completion.token_ids)
                correct = context.task.verify(problem, text).correct >= 1.0
                answers.append((completion.token_ids, correct))
                table.append({"prompt": problem.prompt, "response": text, "correct": correct})
            pairs += make_pairs(problem.key, prompt.prompt_ids, answers, stage.pairs_per_prompt)
        context.reporter.say(f"{context.name}: {len(pairs)} pairs of {start + len(part)} problems")
    return OwnAnswers(pairs, table[:SHOWN])
