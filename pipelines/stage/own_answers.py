"""Pairs of a model's own answers: (right, wrong) ones of the input model, kept until the stage is
over, or those of the policy as it is, made again in each round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.core.config.base import Component
from posttrain.core.config.preference_stages import (
    PAIR_PROMPTS_PER_CALL,
    JudgedAnswersStage,
    OnlineSection,
    PreferenceDataStage,
    PreferenceStage,
)
from posttrain.core.contracts import PromptGroup, Reward, RewardContext, RolloutEngine
from posttrain.core.data.preference import Pair, make_pairs, scored_pairs
from posttrain.core.data.tokens import ChatTokenizer, reward_sample
from posttrain.core.errors import RunError
from posttrain.core.rewards.scoring import model_scores
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.runtime.files import write_text
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.training.sync_check import SyncCheck, make_probe
from posttrain.core.types import Completion, SamplingParams
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.files import OWN_ANSWERS

SHOWN = 200
"""Answers in the table that people see."""
SHOWN_IN_ROUND = 4
"""Problems of a round in a table of its own, in at most 50 rounds of a stage."""
SHOWN_ROUNDS = 50
MOST_CUT = 0.1
"""Share of chosen answers without an end from which a stage warns."""
RANKING_MODEL = Component.model_validate({"name": "reward_model", "transform": "none"})
"""The reward that reads the stage's reward model; logits rank as well as they are."""


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """Pairs, and the answers they were made of as a table."""

    pairs: list[Pair]
    table: list[dict[str, object]]

    def write(self, path: Path) -> None:
        """Write a line with a digest and a line with all else, whole or not at all."""
        made = {"pairs": [asdict(pair) for pair in self.pairs], "table": self.table}
        write_digested(path, json.dumps(made))

    @classmethod
    def read(cls, path: Path) -> OwnAnswers:
        """What `write` wrote; raises `RunError` when it is something else."""
        found = json.loads(read_digested(path))
        return cls([pair_from_json(row) for row in found["pairs"]], found["table"])


def write_digested(path: Path, text: str) -> None:
    """Write one line `text` below a line with its digest, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{_digest(text)}\n{text}\n")


def read_digested(path: Path) -> str:
    """What `write_digested` wrote; raises `RunError` when it is something else."""
    digest, _, text = path.read_text(errors="replace").rstrip("\n").partition("\n")
    if digest != _digest(text):
        raise RunError(
            f"'{path}' is damaged (its digest differs), and the stage has begun to train on "
            "it: run with --fresh to start the stage again"
        )
    return text


def pair_from_json(row: Mapping[str, Any]) -> Pair:  # Any: JSON values
    """What `asdict` and JSON made of a pair."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return Pair(**fields)


def sample_pairs(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> list[Pair]:
    """Pairs of the model's own answers to training problems; those of an interrupted run again."""
    problems = context.training_problems(stage.num_prompts)
    prompts = context.encode_prompts(
        tokenizer, problems, stage.generation.max_response_length, "prompts"
    )
    kept = context.checkpoints / OWN_ANSWERS
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
    seen, cut = 0, set[tuple[int, ...]]()
    params = params_of(stage, stage.num_generations)
    for prompt, group in sampled_groups(context, engine, prompts, params, (context.name,)):
        problem, answers = prompt.problem, []
        for completion in group:
            text = tokenizer.decode_response(completion.token_ids)
            correct = context.task.verify(problem, text).correct >= 1.0
            if correct and tokenizer.is_truncated(completion):
                correct = stage.unfinished == "as_judged"
                cut.add(completion.token_ids)
            answers.append((completion.token_ids, correct))
            table.append({"prompt": problem.prompt, "response": text, "correct": correct})
        pairs += make_pairs(problem.key, prompt.prompt_ids, answers, stage.pairs_per_prompt)
        seen += 1
        if seen % PAIR_PROMPTS_PER_CALL == 0 or seen == len(prompts):
            context.reporter.say(f"{context.name}: {len(pairs)} pairs of {seen} problems")
    chosen = sum(pair.chosen_ids in cut for pair in pairs)
    if chosen > MOST_CUT * len(pairs):
        context.warn(
            f"{context.name}: {chosen} of {len(pairs)} chosen answers were cut by the length "
            "limit, so what is trained on them learns to go on instead of ending: set unfinished: "
            "rejected, or raise generation.max_response_length"
        )
    return OwnAnswers(pairs, table[:SHOWN])


def params_of(stage: JudgedAnswersStage, num_generations: int) -> SamplingParams:
    """How the stage samples so many answers to each prompt."""
    generation = stage.generation
    return SamplingParams(
        num_generations=num_generations,
        max_tokens=generation.max_response_length,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
    )


def sampled_groups(
    context: StageContext,
    engine: RolloutEngine[Any],
    prompts: Sequence[PromptGroup],
    params: SamplingParams,
    purpose: Sequence[str | int],
    seed: int | None = None,
) -> Iterator[tuple[PromptGroup, list[Completion]]]:
    """The answers to each prompt, sampled in calls of a fixed size, each with its own seed.

    These are derived from `seed`, by default the run's.
    """
    root = context.run.seed if seed is None else seed
    for start in range(0, len(prompts), PAIR_PROMPTS_PER_CALL):
        context.check()
        part = prompts[start : start + PAIR_PROMPTS_PER_CALL]
        params = replace(params, seed=derive_seed(root, *purpose, start))
        groups = engine.generate([p.prompt_ids for p in part], params)
        yield from zip(part, groups, strict=True)


def ranking_model(context: StageContext, batch_size: int) -> Reward[Any]:
    """The stage's input `reward_model`, ready to score `batch_size` answers together."""
    reward = context.build(Reward, RANKING_MODEL)
    reward.setup(
        RewardContext(
            inputs={role: artifact.path for role, artifact in context.inputs.items()},
            dtype=context.runtime.dtype,
            device=context.runtime.device,
            attention=context.runtime.attention,
            batch_size=batch_size,
        )
    )
    return reward


@dataclass
class OnlinePairs:
    """Pairs of the policy's own answers, made again every `refresh_every` steps.

    All draws are decided by the run's seed and the number of the round. What a checkpoint keeps are
    the pairs of the round that is under way, since the policy that made them is gone. `policy`
    gives the model as it is now, in this process.
    """

    context: StageContext
    stage: PreferenceStage
    tokenizer: ChatTokenizer
    engine: RolloutEngine[Any]
    policy: Callable[[], PreTrainedModel]
    prompts: PromptStream
    reward: Reward[Any] | None
    sync_check: SyncCheck | None = None
    number: int = 0
    pairs: list[Pair] = field(default_factory=list)
    without_pairs: int = 0
    used: int = 0

    @classmethod
    def open(
        cls,
        context: StageContext,
        stage: PreferenceStage,
        tokenizer: ChatTokenizer,
        engine: RolloutEngine[Any],
        policy: Callable[[], PreTrainedModel],
    ) -> OnlinePairs:
        """Read the prompts, and the reward model if that ranks the answers."""
        online = stage.online
        assert online is not None
        problems = context.training_problems(online.rounds * online.prompts_per_round)
        length = stage.generation.max_response_length
        prompts = context.encode_prompts(tokenizer, problems, length, "prompts")
        reward: Reward[Any] | None = None
        if online.ranked_by == "reward_model":
            reward = ranking_model(context, stage.micro_batch_size)
        stream = PromptStream(prompts, derive_seed(context.run.seed, context.name, "prompts"))
        return cls(context, stage, tokenizer, engine, policy, stream, reward)

    @property
    def section(self) -> OnlineSection:
        assert self.stage.online is not None
        return self.stage.online

    def rows(self, step: int) -> tuple[list[Pair], dict[str, float]]:
        """The pairs that `step` trains on, none where its round has none, and what was measured.

        The first step of a round samples it.
        """
        number, place = divmod(step - 1, self.section.refresh_every)
        metrics = self._begin(number + 1, step) if number + 1 != self.number else {}
        if not self.pairs:
            return [], metrics
        size = min(self.stage.batch_size, len(self.pairs))
        draw = generator(self.context.draw_seed, self.context.name, "order", self.number)
        order: list[int] = []
        while len(order) < (place + 1) * size:
            order += torch.randperm(len(self.pairs), generator=draw).tolist()
        self.used += size
        return [self.pairs[i] for i in order[place * size : (place + 1) * size]], metrics

    def _begin(self, number: int, step: int) -> dict[str, float]:
        """Sample and rank the answers of a round with the policy as it is."""
        began = perf_counter()
        if number > 1:
            self._sync(number, step - 1)
        count = self.section.prompts_per_round
        self.prompts.position = (number - 1) * count
        ranked = list(self._ranked(number, self.prompts.take(count)))
        self.pairs = [pair for group in ranked for pair in group.pairs(self.stage.pairs_per_prompt)]
        self.number = number
        self.without_pairs += not self.pairs
        if (number - 1) % -(-self.section.rounds // SHOWN_ROUNDS) == 0:
            rows = [row for group in ranked[:SHOWN_IN_ROUND] for row in group.table()]
            self.context.tracker.log_table("answers", step, rows)
        scores = [score for group in ranked for score in group.scores]
        correct = [value for group in ranked for value in group.correct]
        return {
            "online/accuracy": sum(correct) / len(correct),
            "online/reward_mean": sum(scores) / len(scores),
            "online/num_pairs": float(len(self.pairs)),
            "online/prompts_with_pairs": mean_of(bool(g.pairs(1)) for g in ranked),
            "online/response_length": mean_of(len(c.token_ids) for g in ranked for c in g.answers),
            "online/rounds_without_pairs": float(self.without_pairs),
            "time/rollout_s": perf_counter() - began,
        }

    def _sync(self, number: int, version: int) -> None:
        """Give the engine the policy as it is, and see that it answers with it."""
        model = self.policy()
        send_policy(self.engine, model, policy_version=version)
        if self.sync_check is None or self.sync_check.model is not model:
            limit = self.context.run.model.max_model_len
            self.sync_check = SyncCheck(self.engine, model, make_probe(self.tokenizer, limit))
        if self.sync_check.is_due():
            self.sync_check.after(f"the sync before round {number}")

    def _ranked(self, number: int, prompts: Sequence[PromptGroup]) -> Iterator[_Ranked]:
        context, purpose = self.context, (self.context.name, "online", number)
        params = params_of(self.stage, self.section.num_generations)
        seed, engine = context.draw_seed, self.engine
        for prompt, group in sampled_groups(context, engine, prompts, params, purpose, seed):
            texts = [self.tokenizer.decode_response(c.token_ids) for c in group]
            verdicts = [context.task.verify(prompt.problem, text) for text in texts]
            correct = [verdict.correct for verdict in verdicts]
            scores = correct
            if self.reward is not None:
                samples = [
                    reward_sample(prompt, completion, self.tokenizer, verdict)
                    for completion, verdict in zip(group, verdicts, strict=True)
                ]
                scores = model_scores(self.reward, samples)
            yield _Ranked(prompt, tuple(group), tuple(texts), tuple(scores), tuple(correct))

    def state(self) -> dict[str, Any]:  # Any: JSON
        """The round under way."""
        return {
            "number": self.number,
            "pairs": [asdict(pair) for pair in self.pairs],
            "without_pairs": self.without_pairs,
            "used": self.used,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue from `state`."""
        self.number, self.used = state["number"], state["used"]
        self.without_pairs = state["without_pairs"]
        self.pairs = [pair_from_json(row) for row in state["pairs"]]


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The answers to one prompt, with the scores that rank them and what the verifier says."""

    prompt: PromptGroup
    answers: tuple[Completion, ...]
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    correct: tuple[float, ...]

    def pairs(self, most: int) -> list[Pair]:
        ids = [completion.token_ids for completion in self.answers]
        scored = list(zip(ids, self.scores, strict=True))
        return scored_pairs(self.prompt.problem.key, self.prompt.prompt_ids, scored, most)

    def table(self) -> list[dict[str, object]]:
        """Rows for MLflow's table view."""
        said = zip(self.texts, self.scores, self.correct, strict=True)
        return [
            {"prompt": self.prompt.problem.prompt, "response": t, "score": s, "correct": c}
            for t, s, c in said
        ]


def mean_of(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found)
