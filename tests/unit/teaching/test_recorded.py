"""A record stands in for its teacher: the same loss and gradient; who samples for which problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.distill_stage import RECORDED
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, DistillationLoss, PromptGroup, SampledGroup
from posttrain.core.data.teacher_record import (
    RecordedRows,
    TeacherRecord,
    file_name,
    write_index,
    write_rows,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner, Progress
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import DistillationTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.teachers import LocalTeacher, Routing, Teachers
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Completion, Problem, SamplingParams
from posttrain.pipelines.rl.given_answers import TeacherAnswers, worked_completion
from posttrain.pipelines.run.checks import check_examples, needs_worked
from tests.helpers.plugins import MANAGER
from tests.helpers.rollouts import assert_same_gradient, load_tiny, ragged_batch

TOP_K, TEMPERATURE = 6, 0.7


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policy and its teacher."""
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / f"m{seed}", seed=seed, init_std=0.3) for seed in (0, 1)]


def learner_of(folders: list[Path], divergence: str, of: str, *, live: bool) -> Learner:
    fields = {"divergence": divergence, "support": "topk", "of": of, "top_k": TOP_K}
    loss = MANAGER.build(DistillationLoss, "gkd", fields)
    mean, model = MANAGER.build(Aggregator, "token-mean"), load_tiny(folders[0])
    return Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=1e-3, max_grad_norm=None), 10),
        Objective((), mean, distillation=DistillationTerm(loss, mean)),
        UpdateSettings(1, 1, 2, temperature=TEMPERATURE, seed=0),
        teachers={"a": load_tiny(folders[1])} if live else {RECORDED: None},
    )


def recorded(batch: RolloutBatch, teacher: Path, folder: Path) -> RolloutBatch:
    """`batch`, whose columns a teacher filled, written and read again."""
    lengths = batch.response_mask.sum(dim=1).tolist()
    cut = {
        name: [batch.column(name)[row, :n] for row, n in enumerate(lengths)]
        for name in (
            *("response_ids", "teacher_logprobs"),
            *("teacher_topk_ids", "teacher_topk_logprobs"),
        )
    }
    rows = RecordedRows(
        problems=[Problem(f"p{row}", "1+1", "2", "2") for row in range(len(batch))],
        prompts=[
            ids[own.bool()].tolist()
            for ids, own in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
        ],
        answers=[ids.tolist() for ids in cut["response_ids"]],
        truncated=[False] * len(batch),
        logprobs=cut["teacher_logprobs"],
        topk_ids=cut["teacher_topk_ids"],
        topk_logprobs=cut["teacher_topk_logprobs"],
    )
    write_rows(folder / file_name(0), rows)
    write_index(
        folder,
        teacher="a",
        teacher_digest="",
        model=teacher,
        answers="worked",
        temperature=TEMPERATURE,
        top_k=TOP_K,
    )
    found = TeacherRecord.open(folder).batch(range(len(batch)), ChatTokenizer.load(teacher))
    return found.with_columns(advantages=torch.zeros(found.response_ids.shape))


def taken(learner: Learner, batch: RolloutBatch) -> tuple[float, list[torch.Tensor]]:
    """The loss of one update and what it would step along."""
    learner.optimizer.close()
    ready = ColumnFiller(learner).fill_for_update(batch, 1, 0.0).batch
    done = Progress.of(ready, 1, 0.0)
    mini, prepared = learner._prepare(done, ready, 0)
    sums = MetricSums()
    idle = torch.zeros(len(mini), dtype=torch.bool)
    learner._accumulate(done, mini, prepared, idle, sums)
    gradient = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    return sums.result()["loss/distillation"], gradient


@pytest.mark.parametrize("of", ["teacher", "teacher_and_sampled"])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_loss_and_gradient_are_those_of_the_teacher_at_hand(
    folders: list[Path], tmp_path: Path, divergence: str, of: str
) -> None:
    batch = ragged_batch([5, 9, 3], group_size=1)
    batch = batch.with_columns(mask=batch.response_mask)  # all of a record is learned from
    live = learner_of(folders, divergence, of, live=True)
    teachers = Teachers({"a": LocalTeacher("a")}, top_k=TOP_K)
    names = {"teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"}
    filled, _ = teachers.fill(batch, names, live)
    loss, gradient = taken(live, filled)
    offline = learner_of(folders, divergence, of, live=False)
    again, found = taken(offline, recorded(filled, folders[1], tmp_path))
    assert loss > 0 and math.isclose(loss, again, rel_tol=1e-6)
    assert_same_gradient(found, gradient)


def prompt(number: int, field: str) -> PromptGroup:
    return PromptGroup(Problem(f"p{number}", "p", "a", "12", {"field": field}), (number,))


def test_each_teacher_samples_for_its_own_problems_in_their_order() -> None:
    asked: list[tuple[int, int]] = []

    def samples(teacher: int) -> object:
        def of(prompts: Sequence[PromptGroup], params: SamplingParams) -> list[SampledGroup]:
            asked.extend((teacher, each.prompt_ids[0]) for each in prompts)
            one = Completion((teacher,), (-0.1,), "stop", 0, params.seed, "e", "1")
            return [SampledGroup(each, (one,)) for each in prompts]

        return of

    routing = Routing("field", {"a": 0, "b": 1}, "error")
    made = [samples(0), samples(1)]
    source = TeacherAnswers(made, routing, 4, lambda step: SamplingParams(seed=step))  # type: ignore[arg-type]
    stream = PromptStream([prompt(i, "abba"[i]) for i in range(4)], seed=0)
    groups = source.answers(7, stream)
    assert asked == [(0, 0), (0, 3), (1, 1), (1, 2)] and stream.position == 4
    assert [group.prompt.prompt_ids[0] for group in groups] == [0, 1, 2, 3]
    assert [group.completions[0].token_ids[0] for group in groups] == [0, 1, 1, 0]
    # A teacher's log-probs of its own answer are not those of a policy.
    assert all(math.isnan(group.completions[0].logprobs[0]) for group in groups)
    assert {group.completions[0].seed for group in groups} == {7}


def test_a_worked_answer_is_cut_and_nobody_sampled_it(folders: list[Path]) -> None:
    tokenizer = ChatTokenizer.load(folders[0])
    whole = worked_completion(tokenizer, prompt(0, "a"), 100)
    assert whole.token_ids == tokenizer.encode_response("12") and whole.finish_reason == "stop"
    cut = worked_completion(tokenizer, prompt(0, "a"), 1)
    assert cut.token_ids == whole.token_ids[:1] and cut.finish_reason == "length"
    assert all(map(math.isnan, cut.logprobs)) and len(cut.logprobs) == 1


@pytest.mark.parametrize("stage", ["student", "record"])
def test_validate_refuses_data_without_the_answers_that_are_wanted(
    tmp_path: Path, manager: PluginManager, stage: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    inputs = {"model": "base", "teacher": "big"}
    stages = {
        "student": {"kind": "distill", "inputs": inputs, "on_policy_share": 0.5},
        "record": {"kind": "record_teacher", "inputs": {"model": "big"}},
    }
    first = {"kind": "distill", "inputs": inputs}
    for fields, refused in ((stages[stage], True), (first, False)):
        config = {
            "task": {"name": "rows", "path": str(tmp_path / "rows.jsonl")},
            "stages": {"big": {"kind": "rl", "inputs": {"model": "base"}}, "one": fields},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        run = resolve(load_config([tmp_path / "run.yaml"]), manager)
        assert needs_worked(run.config.stages["one"]) is refused
        task = manager.task(run.config.task)
        problem = Problem("1+1", "1+1", "2", "")
        if refused:
            with pytest.raises(DataError, match="no worked answer to imitate"):
                check_examples(run, task, problem)
        else:
            check_examples(run, task, problem)
