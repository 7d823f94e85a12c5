"""Labelled steps of a model's own answers: each is gone on from several times (Math-Shepherd)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from posttrain.core.config.stages import ProcessRewardModelStage
from posttrain.core.contracts import PromptGroup, RolloutEngine
from posttrain.core.data.steps import StepPlaces, StepRow, step_places
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Problem, SamplingParams
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.files import OWN_ANSWERS
from posttrain.pipelines.stage.own_answers import read_digested, sampled_groups, write_digested

SHOWN = 200
"""Steps in the table that people see."""
PREFIXES_PER_CALL = 64


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of the model, and where its steps end; the last one's label is the verdict."""

    prompt: PromptGroup
    token_ids: tuple[int, ...]
    text: str
    found: StepPlaces
    correct: float


def sample_steps(
    context: StageContext, stage: ProcessRewardModelStage, tokenizer: ChatTokenizer
) -> list[StepRow]:
    """Answers of the input model to training problems, with a label for each step.

    The label of a step is the share of right ones among `num_continuations` ways to go on from it,
    sampled by the same model, or whether one is right (`estimate: any`); that of an answer's last
    step is the verdict on the answer. Those of an interrupted run again.
    Source: Math-Shepherd, arXiv:2312.08935, section 3.3 (hard and soft estimation).
    """
    problems = context.training_problems(stage.num_prompts)
    length = stage.generation.max_response_length
    prompts = context.encode_prompts(tokenizer, problems, length, "prompts")
    kept = context.checkpoints / OWN_ANSWERS
    if kept.is_file():
        made = json.loads(read_digested(kept))
        context.reporter.say(f"{context.name}: {len(made['rows'])} answers sampled before ({kept})")
    else:
        with context.engines.lease(context.model_dir) as engine:
            sampler = _Sampler(context, stage, tokenizer, engine)
            answers = list(sampler.answers(prompts))
            rows, table = sampler.labelled(answers)
        made = {"rows": [asdict(row) for row in rows], "table": table}
        write_digested(kept, json.dumps(made))
    context.tracker.log_table("steps", 0, made["table"])
    return [
        StepRow(**{name: _tuples(value) for name, value in row.items()}) for row in made["rows"]
    ]


def _tuples(value: Any) -> Any:  # Any: a field of a row, as JSON has it
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class _Sampler:
    context: StageContext
    stage: ProcessRewardModelStage
    tokenizer: ChatTokenizer
    engine: RolloutEngine[Any]

    def _params(self, num_generations: int) -> SamplingParams:
        generation = self.stage.generation
        return SamplingParams(
            num_generations=num_generations,
            max_tokens=generation.max_response_length,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
        )

    def answers(self, prompts: Sequence[PromptGroup]) -> Iterator[_Answer]:
        """Those that have a step; one that was cut off has no verdict, and is left out."""
        params = self._params(self.stage.num_generations)
        purpose = (self.context.name,)
        for prompt, group in sampled_groups(self.context, self.engine, prompts, params, purpose):
            for completion in group:
                if completion.finish_reason == "length":
                    continue
                text = self.tokenizer.decode_response(completion.token_ids)
                said = self._without_end(completion.token_ids)
                found = step_places(text, said, self.stage.separator, self.tokenizer)
                if found.places:
                    correct = self._right(prompt.problem, text)
                    yield _Answer(prompt, said, text, found, correct)

    def _without_end(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        ended = ids and ids[-1] in self.tokenizer.end_token_ids
        return ids[:-1] if ended else ids

    def _right(self, problem: Problem, text: str) -> float:
        return float(self.context.task.verify(problem, text).correct >= 1.0)

    def labelled(self, answers: Sequence[_Answer]) -> tuple[list[StepRow], list[dict[str, object]]]:
        """Rows with a label for each of their first `max_steps` steps, and a table of them."""
        stage, values = self.stage, self._values(answers)
        rows, table = [], list[dict[str, object]]()
        for number, answer in enumerate(answers):
            problem, places = answer.prompt.problem, answer.found.places
            labels = [values[number, j] for j in range(min(len(places) - 1, stage.max_steps))]
            if len(places) <= stage.max_steps:
                labels.append(answer.correct)
            starts = (0, *answer.found.ends)
            steps = (answer.text[starts[j] : starts[j + 1]] for j in range(len(labels)))
            table += [
                {"prompt": problem.prompt, "step": step, "value": value}
                for step, value in zip(steps, labels, strict=True)
            ]
            kept = places[: len(labels)]
            read = answer.found.ids[: kept[-1] + 1]
            rows.append(StepRow(problem.key, answer.prompt.prompt_ids, read, kept, tuple(labels)))
        return rows, table[:SHOWN]

    def _values(self, answers: Sequence[_Answer]) -> dict[tuple[int, int], float]:
        """The value of each step but an answer's last, by answer and step."""
        asked = [
            (number, j)
            for number, answer in enumerate(answers)
            for j in range(min(len(answer.found.places) - 1, self.stage.max_steps))
        ]
        values: dict[tuple[int, int], float] = {}
        params = self._params(self.stage.num_continuations)
        for start in range(0, len(asked), PREFIXES_PER_CALL):
            self.context.check()
            part = asked[start : start + PREFIXES_PER_CALL]
            seed = derive_seed(self.context.run.seed, self.context.name, "continue", start)
            prefixes = [self._prefix(answers[number], j) for number, j in part]
            prompts = [
                (*answers[number].prompt.prompt_ids, *prefix)
                for (number, _), prefix in zip(part, prefixes, strict=True)
            ]
            left = tuple(params.max_tokens - len(prefix) for prefix in prefixes)
            limits = replace(params, max_tokens=max(left), max_tokens_each=left, seed=seed)
            groups = self.engine.generate(prompts, limits)
            for (number, j), prefix, group in zip(part, prefixes, groups, strict=True):
                problem = answers[number].prompt.problem
                texts = (
                    self.tokenizer.decode_response((*prefix, *completion.token_ids))
                    for completion in group
                )
                verdicts = [self._right(problem, text) for text in texts]
                mean = sum(verdicts) / len(verdicts)
                values[number, j] = float(mean > 0) if self.stage.estimate == "any" else mean
            self.context.reporter.say(f"{self.context.name}: {len(values)} of {len(asked)} steps")
        return values

    def _prefix(self, answer: _Answer, step: int) -> tuple[int, ...]:
        return answer.token_ids[: answer.found.places[step] + 1]
