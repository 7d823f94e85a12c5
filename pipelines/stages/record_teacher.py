"""Stage `record_teacher`: what a model says of answers, in files that a `distill` stage reads.

Each file is written once its answers are scored, among the stage's checkpoints, so an interrupted
stage goes on after the last of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.distill_stage import RecordTeacherStage
from posttrain.core.config.teachers import TEACHER
from posttrain.core.contracts import PromptGroup, SampledGroup, StageOutput
from posttrain.core.data.problem_sets import check_worked
from posttrain.core.data.teacher_record import (
    RecordedRows,
    RecordIndex,
    file_name,
    write_index,
    write_rows,
)
from posttrain.core.data.tokens import ChatTokenizer, rollout_batch
from posttrain.core.errors import RunError
from posttrain.core.models.loading import load_policy
from posttrain.core.rollout.episodes import generate_groups
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.forward import check_passes
from posttrain.core.training.splitting import micro_rows
from posttrain.core.training.teacher_pass import TeacherScores, candidate_pass
from posttrain.core.training.teacher_server import server_of
from posttrain.core.types import SamplingParams
from posttrain.pipelines.rl.given_answers import worked_completion
from posttrain.pipelines.stage.context import StageContext

RECORD = "teacher_record"


def run_record_teacher(context: StageContext) -> StageOutput:
    """Record the input model on the training problems; makes the folder of the record."""
    stage = context.stage
    assert isinstance(stage, RecordTeacherStage)
    tokenizer, folder = context.tokenizer(), context.checkpoints / RECORD
    folder.mkdir(parents=True, exist_ok=True)
    prompts = _prompts(context, stage, tokenizer)
    size = stage.problems_per_file
    parts = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    paths = [folder / file_name(number) for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    context.started(len(parts))
    resumed = len(missing) < len(parts)
    if resumed:
        context.say(f"{len(parts) - len(missing)} of {len(parts)} files were recorded before")
    with ExitStack() as opened:
        recorder = _Recorder.open(context, stage, tokenizer, opened) if missing else None
        for number in missing:
            assert recorder is not None
            write_rows(paths[number], recorder.rows(number, parts[number]))
            context.progress(number + 1)
    index = _finish(context, stage, folder)
    rows = sum(file.rows for file in index.files)
    metrics = {
        "record/rows": float(rows),
        "record/tokens": float(sum(file.tokens for file in index.files)),
        "record/files": float(len(index.files)),
    }
    context.log_summary(metrics)
    return StageOutput({RECORD: context.out / RECORD}, metrics, resumed=resumed)


def _prompts(
    context: StageContext, stage: RecordTeacherStage, tokenizer: ChatTokenizer
) -> list[PromptGroup]:
    """Each problem once, though a stage may ask for more than there are."""
    problems = context.training_problems(stage.num_problems)
    if stage.answers == "worked":
        check_worked(context.task, problems)
    limit = stage.generation.max_response_length
    found = context.encode_prompts(tokenizer, problems, limit, "data")
    return list({prompt.problem.key: prompt for prompt in found}.values())


def _finish(context: StageContext, stage: RecordTeacherStage, folder: Path) -> RecordIndex:
    """Write the index, and put all of it where the stage's result is."""
    made, server = context.inputs["model"], stage.teacher
    index = write_index(
        folder,
        teacher=made.stage if server is None else f"{server.model} at {server.base_url}",
        teacher_digest=made.digest if server is None else "",
        model=made.path,
        answers=stage.answers,
        temperature=stage.generation.temperature,
        top_k=stage.top_k,
    )
    shutil.copytree(folder, context.out / RECORD)
    return index


Sample = Callable[[Sequence[PromptGroup], SamplingParams], list[SampledGroup]]


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Asks the teacher: `says` gives log-probs of answers, `sample` makes them (None: worked)."""

    context: StageContext
    stage: RecordTeacherStage
    tokenizer: ChatTokenizer
    says: Callable[[RolloutBatch], TeacherScores]
    sample: Sample | None

    @classmethod
    def open(
        cls,
        context: StageContext,
        stage: RecordTeacherStage,
        tokenizer: ChatTokenizer,
        opened: ExitStack,
    ) -> _Recorder:
        if stage.teacher is None:
            return cls._of_model(context, stage, tokenizer, opened)
        server, longest = server_of(TEACHER, stage.teacher), context.run.model.max_model_len
        server.check(tokenizer, top_k=stage.top_k, longest=longest)
        sample: Sample | None = None
        if stage.answers == "sampled":
            server.check_sampling(tokenizer)
            sample = partial(server.sample, ends=tokenizer.end_token_ids, check=context.check)

        def says(batch: RolloutBatch) -> TeacherScores:
            context.check()
            found = server.scores(batch, stage.top_k)
            context.check()
            missing = int(found.logprobs[batch.response_mask.bool()].isnan().sum())
            if missing:
                raise RunError(
                    f"{server.base_url} gives no log-prob of {missing} of the tokens that it was "
                    "sent: use a vLLM server, or record a teacher that is here (inputs.model)"
                )
            return found

        return cls(context, stage, tokenizer, says, sample)

    @classmethod
    def _of_model(
        cls,
        context: StageContext,
        stage: RecordTeacherStage,
        tokenizer: ChatTokenizer,
        opened: ExitStack,
    ) -> _Recorder:
        sample: Sample | None = None
        if stage.samples_here:
            engine = opened.enter_context(context.engines.lease(context.model_dir))
            sample = partial(generate_groups, engine)
        model = load_policy(context.model_dir, context.runtime)
        model.requires_grad_(False)
        check_passes(model)

        def says(batch: RolloutBatch) -> TeacherScores:
            return candidate_pass(
                model,
                batch,
                micro_rows(batch, stage.micro_batch_size),
                top_k=stage.top_k,
                temperature=stage.generation.temperature,
                check=context.check,
            )

        return cls(context, stage, tokenizer, says, sample)

    def rows(self, number: int, prompts: Sequence[PromptGroup]) -> RecordedRows:
        """The rows of the file `number`: the same whether other files were made before or not."""
        batch = rollout_batch(self._answers(number, prompts), self.tokenizer)
        said = self.says(batch)
        assert said.topk_ids is not None and said.topk_logprobs is not None
        lengths = batch.response_mask.sum(dim=1).tolist()

        def per_row(column: Tensor) -> list[Tensor]:
            return [column[row, :length] for row, length in enumerate(lengths)]

        prompt_rows = zip(batch.prompt_ids, batch.prompt_mask, strict=True)
        return RecordedRows(
            problems=batch.problems,
            prompts=[ids[own.bool()].tolist() for ids, own in prompt_rows],
            answers=[ids.tolist() for ids in per_row(batch.response_ids)],
            truncated=batch.truncated.tolist(),
            logprobs=per_row(said.logprobs),
            topk_ids=per_row(said.topk_ids),
            topk_logprobs=per_row(said.topk_logprobs),
        )

    def _answers(self, number: int, prompts: Sequence[PromptGroup]) -> list[SampledGroup]:
        stage, generation = self.stage, self.stage.generation
        limit = generation.max_response_length
        if self.sample is None:
            return [
                SampledGroup(prompt, (worked_completion(self.tokenizer, prompt, limit),))
                for prompt in prompts
            ]
        params = SamplingParams(
            num_generations=stage.num_generations,
            max_tokens=limit,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            seed=derive_seed(self.context.run.seed, self.context.name, "answers", number),
        )
        return self.sample(prompts, params)
