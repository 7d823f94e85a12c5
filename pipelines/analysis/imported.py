"""`import`: a rollout dump of another trainer as a run of the home, for the tools that read runs.

The run has one finished stage, `rl`, with evidence of each step and no model. What the dump does
not say is left out or computed here, and the notes say which.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.core.analysis.evidence import FOLDER, StepEvidence, write_step
from posttrain.core.batch import RolloutBatch
from posttrain.core.config.loading import LoadedConfig, validated
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.data.dumps import Dump, DumpRow
from posttrain.core.data.messages import message_to_json
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.models.loading import load_policy
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.scoring import reward_samples, rollout_metrics, with_rewards
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.artifacts import ArtifactStore, StageResult
from posttrain.core.store.identity import identity_of
from posttrain.core.store.manifests import combine_digests, file_digest, tree_digests
from posttrain.core.store.run_record import IMPORTS, RunRecorder
from posttrain.core.tracking.journal import Journal, JournalRow, journal_path
from posttrain.core.training.forward import forward_only
from posttrain.core.types import Message, Problem, Score
from posttrain.pipelines.analysis.past_run import inputs_of
from posttrain.pipelines.run.model_reference import find_model
from posttrain.pipelines.stage.inputs import StageInputs, load_tokenizer

STAGE = "rl"
MICRO_ROWS = 8
PROBLEMS = "problems.jsonl"
_CHATML = re.compile(r"(?:system\n(?P<system>.*?)\n)?user\n(?P<user>.*)\nassistant\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """`model` names the tokenizer, and with `logprobs` what the responses are evaluated by.

    `algorithm` gives the advantages where the dump has none, and the loss that tools show; `match`
    is how an answer is compared with the dump's ground truth.
    """

    model: str
    algorithm: str = "grpo"
    match: str = "last_number"
    name: str = ""
    logprobs: bool = True
    temperature: float = 1.0


@dataclass
class Imported:
    """The run that was made, and what to know of it."""

    run_id: str
    steps: list[int]
    responses: int
    notes: list[str] = field(default_factory=list)


def import_dump(
    dump: Dump, options: ImportOptions, home: Path, store: Path, reporter: Reporter
) -> Imported:
    """Make the run; the same dump with the same options is the same run.

    Raises `ConfigError` or `DataError` before anything of it is in the home.
    """
    if min(dump.steps) < 1:
        dump.steps = {step + 1: rows for step, rows in dump.steps.items()}
        dump.counts["step 0: steps are counted from 1 here, so each number is one more"] += 1
    model = find_model(options.model, home, store)
    digests = {file.name: file_digest(file) for file in dump.files}
    parts = _parts(dump, options, combine_digests(digests), model.digest)
    identity = identity_of(parts)
    run_id = identity[:32]
    folder = home / IMPORTS / run_id
    problems = _write_problems(folder, dump)
    manager = PluginManager()
    resolved = _config(dump, options, model.path, problems, manager)
    there = inputs_of(STAGE, resolved, manager, {})
    tokenizer = load_tokenizer(model.path, there.run, manager)
    policy = load_policy(model.path, there.runtime) if options.logprobs else None
    made = _Making(dump, options, there, tokenizer, policy)
    artifacts = ArtifactStore(store)
    partial = artifacts.begin(STAGE)
    try:
        rows = made.write(partial / FOLDER, reporter)
        result = StageResult(STAGE, "rl", "ran", (), rows[-1].metrics, 0.0)
        artifacts.commit(partial, result, identity, parts, tree_digests(partial))
    except BaseException:
        artifacts.discard(partial)
        raise
    journal = Journal(journal_path(home / "runs", STAGE, identity))
    for row in rows:
        journal.append(row)
    journal.close()
    began = datetime.now(UTC).isoformat(timespec="seconds")
    record = RunRecorder(home, run_id, resolved.config.name, began, resolved.to_yaml())
    record.stage(STAGE, identity)
    return Imported(run_id, list(dump.steps), dump.rows, [*dump.notes(), *made.notes()])


def _parts(dump: Dump, options: ImportOptions, data: str, model: str) -> dict[str, str]:
    """What decides the result, as of a stage's identity."""
    given = {f"import {name}": json.dumps(getattr(options, name)) for name in options.__slots__}
    weights = json.dumps([row.total for rows in dump.steps.values() for row in rows])
    return (
        {"imported": dump.format, "dump": data, "input model": model}
        | given
        | {"rewards": combine_digests({"totals": weights})}
    )


def _write_problems(folder: Path, dump: Dump) -> Path:
    """The distinct prompts with their answers, which the run's task reads."""
    lines: dict[str, dict[str, object]] = {}
    for row in (row for rows in dump.steps.values() for row in rows):
        prompt: object = [message_to_json(m) for m in row.messages] or row.prompt
        known = lines.setdefault(row.prompt, {"prompt": prompt, "answer": row.answer})
        if known["answer"] != row.answer:
            dump.counts["responses whose ground truth is not that of their prompt's first"] += 1
    if any(not line for line in lines):
        raise DataError("a prompt of the dump is empty, so its responses belong to no problem")
    answered = all(line["answer"] is not None for line in lines.values())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / PROBLEMS).open("w", encoding="utf-8") as stream:
        for line in lines.values():
            kept = line if answered else {"prompt": line["prompt"]}
            stream.write(json.dumps(kept, ensure_ascii=False) + "\n")
    return folder / PROBLEMS


def _config(
    dump: Dump, options: ImportOptions, model: Path, problems: Path, manager: PluginManager
) -> ResolvedRun:
    """A config whose stage is as the dump's steps were, as far as the dump says."""
    answered = all(row.answer is not None for rows in dump.steps.values() for row in rows)
    prompts, group = _sizes(dump)
    task: dict[str, object] = {"name": "jsonl", "path": str(problems), "format": "plain"}
    task |= {"match": options.match} if answered else {"answer_field": None, "match": "none"}
    raw: dict[str, Any] = {  # Any: YAML values
        "name": options.name or f"imported-{dump.format}",
        "description": f"{dump.rows} responses imported from a rollout dump of {dump.format}",
        "engine": "transformers",
        "model": {"source": str(model), "max_model_len": 1 << 17},
        "task": task,
        "stages": {
            STAGE: {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": options.algorithm,
                "steps": max(dump.steps),
                "prompts_per_step": prompts,
                "num_generations": group,
                "generation": {"max_response_length": 1 << 16, "temperature": options.temperature},
                # It stands for the dump's, of which only the scores are known.
                "rewards": ["accuracy"],
                "kl": {"controller": {"name": "fixed", "coef": 0.0}},
            }
        },
    }
    try:
        config = validated(raw, lambda path: "the dump's config", manager)
        return resolve(LoadedConfig(config, raw, (), {}), manager)
    except ConfigError as error:
        raise ConfigError(
            f"--algorithm {options.algorithm} cannot be used here: {error}"
        ) from error


def _sizes(dump: Dump) -> tuple[int, int]:
    """Prompts of the largest step, and the most usual size of a group, 2 at least: estimators that
    compare responses refuse a config with groups of 1."""
    groups = [Counter(row.prompt for row in rows) for rows in dump.steps.values()]
    usual = Counter(count for found in groups for count in found.values()).most_common(1)[0][0]
    return max(len(found) for found in groups), max(2, usual)


# --- one step ------------------------------------------------------------------------------------


@dataclass
class _Making:
    """Makes evidence of the dump's rows, and counts what it had to leave out."""

    dump: Dump
    options: ImportOptions
    there: StageInputs
    tokenizer: ChatTokenizer
    model: PreTrainedModel | None
    counts: Counter[str] = field(default_factory=Counter)
    _prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def stage(self) -> RlStage:
        """The stage that the dump stands for."""
        assert isinstance(self.there.stage, RlStage)
        return self.there.stage

    def write(self, folder: Path, reporter: Reporter) -> list[JournalRow]:
        """Evidence of each step; the journal's rows."""
        journal = []
        for step, rows in self.dump.steps.items():
            evidence = self._evidence(step, rows)
            size = write_step(folder, evidence)
            metrics = rollout_metrics(evidence.batch, self.dump.reward_names)
            journal.append(JournalRow(step, 0, metrics))
            reporter.say(f"step {step}: {len(rows)} responses, {size / 1e6:.1f} MB")
        return journal

    def notes(self) -> list[str]:
        """What a reader must know of the model, and what was left out."""
        name = self.options.model
        notes = [f"tokens are those of {name}; the dump has texts, not tokens"]
        if self.model is None:
            notes.append("without log-probs: inspect --step and compare --step need them")
        else:
            notes.append(
                f"log-probs are those of {name}, not of the policy at each step: every ratio is "
                "1, as at the first update of a step"
            )
        return [*notes, *(f"{count} {what}" for what, count in self.counts.items())]

    def _evidence(self, step: int, given: Sequence[DumpRow]) -> StepEvidence:
        # Rows of one prompt next to each other, which a balanced batch need not have.
        order = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt for row in given))}
        rows = sorted(given, key=lambda row: order[row.prompt])
        batch = self._batch(rows, [order[row.prompt] for row in rows])
        batch = self._with_advantages(self._scored(batch, rows), rows)
        seen = entropy = torch.full(batch.response_ids.shape, math.nan)
        seen_by = torch.full((len(batch),), -1)
        if self.model is not None:
            found = forward_only(self.model, batch, MICRO_ROWS, self.options.temperature)
            seen, entropy = found.logprobs, found.entropy
            seen_by = torch.zeros(len(batch), dtype=torch.int64)
            batch = batch.with_columns(old_logprobs=seen)
        ids = torch.unique(batch.response_ids).tolist()
        return StepEvidence(
            step,
            batch,
            seen,
            entropy,
            seen_by,
            component_names=self.dump.reward_names,
            token_texts={token: self.tokenizer.token_text(token) for token in ids},
        )

    def _batch(self, rows: Sequence[DumpRow], groups: list[int]) -> RolloutBatch:
        usual = self.stage.num_generations
        sizes = Counter(row.prompt for row in rows).values()
        if odd := sum(size != usual for size in sizes):
            self.counts[f"prompts with another number of responses than {usual} in a step"] += odd
        responses = [self._ids(row.response) for row in rows]
        if empty := sum(not ids for ids in responses):
            self.counts["empty responses"] += empty
        return response_batch(
            prompts=[self._prompt(row) for row in rows],
            responses=[ids or (self.tokenizer.eos_token_id,) for ids in responses],
            group_ids=groups,
            pad_token_id=self.tokenizer.pad_token_id,
            problems=[_problem(row) for row in rows],
            texts=[row.response for row in rows],
            turns=[(row.response,) for row in rows],
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt(self, row: DumpRow) -> tuple[int, ...]:
        """The prompt's tokens: as the template writes them, if its text is then the dump's."""
        if row.prompt not in self._prompts:
            self._prompts[row.prompt] = self._encoded(row)
        return self._prompts[row.prompt]

    def _encoded(self, row: DumpRow) -> tuple[int, ...]:
        if row.messages:
            return tuple(self.tokenizer.encode_prompt(_problem(row)))
        for messages in _readings(row.prompt):
            problem = replace(_problem(row), messages=messages)
            ids = tuple(self.tokenizer.encode_prompt(problem))
            plain = self.tokenizer.tokenizer.decode(list(ids), skip_special_tokens=True)
            if str(plain).strip() == row.prompt.strip():
                return ids
        self.counts[
            "prompts whose special tokens the dump left out and the model's chat template does "
            "not give again: they are read as plain text"
        ] += 1
        return self._ids(row.prompt) or (self.tokenizer.eos_token_id,)

    def _scored(self, batch: RolloutBatch, rows: Sequence[DumpRow]) -> RolloutBatch:
        """Rewards, components and verdicts, as the dump has them."""
        nan, names = math.nan, self.dump.reward_names
        totals = torch.tensor([0.0 if row.total is None else row.total for row in rows])
        scored = torch.tensor([row.total is not None for row in rows])
        scores = [[_score(row.rewards.get(name)) for name in names] for row in rows]
        values = [[nan if s.value is None else s.value for s in own] for own in scores]
        components = torch.tensor(values, dtype=torch.float64).reshape(len(rows), len(names))
        filled = with_rewards(batch, totals, scored)
        samples = reward_samples(filled, self.there.task)
        verdicts = [
            sample.verdict.correct if row.verdict is None else row.verdict
            for row, sample in zip(rows, samples, strict=True)
        ]
        answered = [row.verdict is not None or row.answer is not None for row in rows]
        acc = [v if known else nan for v, known in zip(verdicts, answered, strict=True)]
        filled = filled.with_columns(
            reward_components=components, acc=torch.tensor(acc, dtype=torch.float64)
        )
        return replace(filled, samples=samples, scores=tuple(map(tuple, scores)))

    def _with_advantages(self, batch: RolloutBatch, rows: Sequence[DumpRow]) -> RolloutBatch:
        """Those of the dump on every token of their response, else those of the algorithm."""
        given = [row.advantage for row in rows]
        if any(value is not None for value in given):
            missing = sum(value is None for value in given)
            if missing:
                self.counts["responses without an advantage, which is then 0"] += missing
            values = torch.tensor([value or 0.0 for value in given])
            return batch.with_columns(advantages=values[:, None] * batch.mask)
        estimator = self.there.build(AdvantageEstimator, self.stage.advantage)
        missing_columns = sorted(estimator.required_columns() - batch.columns())
        if missing_columns:
            raise ConfigError(
                f"--algorithm {self.options.algorithm} needs {', '.join(missing_columns)}, which "
                "a dump does not have: choose one whose advantages come from rewards alone, such "
                "as grpo, rloo, dr_grpo"
            )
        return batch.with_columns(advantages=estimator.estimate(batch).advantages)


def _problem(row: DumpRow) -> Problem:
    answer = row.answer or ""
    return Problem(
        row.prompt, row.prompt, answer, answer, {"source": row.where}, messages=row.messages
    )


def _readings(text: str) -> list[tuple[Message, ...]]:
    """Messages that the text of a rendered prompt could be, once special tokens are gone."""
    readings: list[tuple[Message, ...]] = []
    chatml = _CHATML.fullmatch(text.strip() + "\n")
    if chatml is not None:
        user = (Message("user", chatml["user"]),)
        if chatml["system"] is not None:
            readings.append((Message("system", chatml["system"]), *user))
        readings.append(user)
    readings.append((Message("user", text),))
    return readings


def _score(value: float | None) -> Score:
    return Score(None, "unscored", "NaN or null in the dump") if value is None else Score(value)
