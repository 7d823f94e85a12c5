"""The policy as its own teacher: what it reads, which rows have it, and the exact gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, DistillationLoss, TeacherRows
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner
from posttrain.core.training.moving_reference import MovingReference
from posttrain.core.training.objective import DistillationTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.teacher_contexts import TeacherContext, with_context
from posttrain.core.training.teachers import LocalTeacher, Teachers
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Message, Problem
from posttrain.pipelines.ranks.rl import RankedLearner
from tests.helpers.plugins import MANAGER
from tests.helpers.rollouts import assert_same_gradient, load_tiny, ragged_batch, sequence
from tests.helpers.updates import gradient

TEMPLATE = "{prompt}\n\n{context}"
FULL = {"divergence": "jsd", "beta": 0.3}
CANDIDATES = {"divergence": "forward", "support": "topk", "top_k": 8}
TAU = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", seed=0, init_std=0.3)


def context_of(
    folder: Path,
    source: Literal["worked", "metadata", "sibling"] = "sibling",
    *,
    longest: int = 512,
    field: str = "",
) -> TeacherContext:
    return TeacherContext(ChatTokenizer.load(folder), TEMPLATE, source, longest, field)


def sampled(rewards: Sequence[float], group_size: int = 4) -> RolloutBatch:
    """Groups of different prompts, with texts and rewards."""
    groups = len(rewards) // group_size
    batch = ragged_batch([5, 9, 3][:groups], group_size)
    problems = [
        Problem("k", f"question {i // group_size}", "a", f"{'so ' * (i // group_size)}it is {i}")
        for i in range(len(rewards))
    ]
    texts = tuple(f"answer {i}" for i in range(len(rewards)))
    values = torch.tensor(rewards, dtype=torch.float64)
    scored = values.isfinite()  # one that nobody could score has the reward 0
    batch = batch.with_columns(rewards=torch.where(scored, values, 0.0), scored=scored)
    return replace(batch, problems=tuple(problems), texts=texts)


@pytest.mark.parametrize(
    ("rewards", "demos"),
    [
        ((1, 0, 1, 0), (2, 0, 0, 0)),
        ((0, 1, 0, 0), (1, None, 1, 1)),
        ((0, 0.9, float("nan"), 0), (None, None, None, None)),
    ],
)
def test_the_first_other_success_of_a_group_is_shown(
    folder: Path, rewards: tuple[float, ...], demos: tuple[int | None, ...]
) -> None:
    batch = sampled([*rewards, 1, 1, 1, 1])
    context = context_of(folder)
    for row, demo in enumerate(demos):
        (found,) = context.prompts(batch, [row])
        if demo is None:
            assert found is None
            continue
        asked = Problem("", f"question 0\n\nanswer {demo}", "", "")
        assert found == context.tokenizer.encode_prompt(asked)


def test_an_unscored_response_is_no_success_where_0_is_one(folder: Path) -> None:
    batch = sampled([float("nan"), 0.0, -1.0, -1.0, 1, 1, 1, 1])
    context = replace(context_of(folder), min_reward=0.0)
    shown = [
        context.tokenizer.encode_prompt(Problem("", f"question 0\n\nanswer {demo}", "", ""))
        for demo in (1, 1, 1)
    ]
    assert context.prompts(batch, [0, 1, 2, 3]) == [shown[0], None, *shown[1:]]


def test_the_last_question_takes_the_template_and_nothing_is_expanded_twice() -> None:
    talk = (Message("user", "one"), Message("assistant", "1"), Message("user", "two"))
    problem = Problem("k", "two", "a", "w", messages=talk)
    shown = with_context(problem, "say {prompt}", "Q: {prompt} A: {context}")
    assert [m.content for m in shown.messages] == ["one", "1", "Q: two A: say {prompt}"]
    assert shown.messages[:2] == talk[:2]


def make_learner(folder: Path, fields: dict[str, Any], weights: str, micro: int) -> Learner:
    """A policy whose teacher `me` has its weights, or a copy of them."""
    model, mean = load_tiny(folder), MANAGER.build(Aggregator, "token-mean")
    term = DistillationTerm(MANAGER.build(DistillationLoss, "gkd", fields), mean, coef=2.0)
    return Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=1e-3, max_grad_norm=None), 10),
        Objective((), mean, distillation=term),
        UpdateSettings(1, 1, micro, temperature=TAU, seed=0),
        teachers={"me": model if weights == "live" else load_tiny(folder)},
    )


def teacher_logits(learner: Learner, prompt: Sequence[int], response: Tensor) -> Tensor:
    """Whole logits [n, V] of a response after the teacher's own prompt, by plain means."""
    teacher = learner.teachers["me"]
    assert teacher is not None
    with torch.no_grad():
        ids = torch.cat([torch.tensor(prompt), response])[None]
        found: Tensor = teacher(ids).logits[0, len(prompt) - 1 : -1] / TAU
    return found


@pytest.mark.parametrize("weights", ["live", "base"])
@pytest.mark.parametrize("fields", [FULL, CANDIDATES])
@pytest.mark.parametrize("micro", [1, 5, 16])
def test_the_gradient_is_that_of_whole_logits_whatever_the_split(
    folder: Path, fields: dict[str, Any], micro: int, weights: str
) -> None:
    batch, learner = sampled([0, 1, 0, 0, 1, 0, 1, 0]), make_learner(folder, fields, weights, micro)
    context = context_of(folder)
    top_k = 8 if fields is CANDIDATES else 0
    teachers = Teachers({"me": LocalTeacher("me")}, top_k=top_k, contexts={"me": context})
    ready = ColumnFiller(learner, teachers).fill_for_update(batch, 1, 0.0)
    assert ready.batch.column("teacher_id").tolist() == [0, -1, 0, 0, 0, 0, 0, 0]
    assert ready.metrics["distil/skipped_frac"] == 1 / 8
    prompts = context.prompts(batch, range(8))
    taught = [row for row in range(8) if prompts[row] is not None]
    counted = sum(float(batch.mask[row].sum()) for row in taught)
    term = learner.objective.distillation
    assert term is not None
    learner.optimizer.close()
    for row in taught:
        prompt, response = sequence(batch, row)
        if not batch.mask[row].any():
            continue
        longer = prompts[row]
        assert longer is not None
        other = teacher_logits(learner, longer, response)
        cut = slice(len(prompt) - 1, -1)
        logits = learner.model(torch.cat([prompt, response])[None]).logits[0, cut] / TAU
        best = torch.log_softmax(other, -1).topk(8, dim=-1)
        loss = term.loss.rows(logits, TeacherRows(response, other, best.indices, best.values)).loss
        (term.coef * loss.sum() / counted).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad()
    assert_same_gradient(gradient(learner, ready.batch), wanted)


def test_sampled_tokens_are_scored_after_the_longer_prompt(folder: Path) -> None:
    batch, learner = sampled([0.0] * 8), make_learner(folder, FULL, "live", 3)
    context = context_of(folder, "worked")
    teachers = Teachers({"me": LocalTeacher("me")}, contexts={"me": context})
    filled, metrics = teachers.fill(batch, {"teacher_logprobs"}, learner)
    assert metrics["distil/skipped_frac"] == metrics["distil/context_too_long_frac"] == 0
    scored = filled.column("teacher_logprobs")
    for row, prompt in enumerate(context.prompts(batch, range(8))):
        assert prompt is not None
        _, response = sequence(batch, row)
        said = torch.log_softmax(teacher_logits(learner, prompt, response), -1)
        own = said.gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(
            scored[row, : len(response)].double(), own.double(), rtol=0, atol=1e-5
        )
    # What the policy itself reads is as it was.
    assert torch.equal(filled.prompt_ids, batch.prompt_ids)
    unlike = learner.policy_pass(batch).logprobs - scored
    assert unlike[batch.response_mask.bool()].abs().max() > 0.1


def test_a_token_weighs_at_most_twice() -> None:
    """lp - lp_old = 0.9 at a cap of 2: a factor of 2, not of 2.459603, and no gradient from it."""
    fields = {"divergence": "reverse", "support": "sampled", "ratio_cap": 2.0}
    loss = MANAGER.build(DistillationLoss, "gkd", fields)
    logits = torch.tensor([[1.0, 0.0, -1.0]] * 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 0])
    own = torch.log_softmax(logits, -1)[:, 0]
    old = own.detach() - torch.tensor([0.9, 0.5], dtype=torch.float64)
    said = own.detach() - 0.3
    found = loss.rows(logits, TeacherRows(ids, old_logprobs=old, logprobs=said)).loss
    (of_logits,) = torch.autograd.grad(found.sum(), logits)
    (of_own,) = torch.autograd.grad(own.sum(), logits)
    factors = torch.tensor([2.0, 1.648721], dtype=torch.float64)
    torch.testing.assert_close(of_logits, 0.3 * factors[:, None] * of_own, rtol=1e-6, atol=0)


def test_a_context_that_is_too_long_leaves_the_row_without_a_teacher(folder: Path) -> None:
    batch, learner = sampled([0.0] * 8), make_learner(folder, FULL, "live", 4)
    whole = context_of(folder, "worked")
    lengths = [len(p or ()) for p in whole.prompts(batch, range(8))]
    needed = [n + len(sequence(batch, row)[1]) for row, n in enumerate(lengths)]
    limit = sorted(needed)[3]
    context = context_of(folder, "worked", longest=limit)
    teachers = Teachers({"me": LocalTeacher("me")}, contexts={"me": context})
    filled, metrics = teachers.fill(batch, set(), learner)
    ids = filled.column("teacher_id").tolist()
    assert ids == [0 if n <= limit else -1 for n in needed] and -1 in ids and 0 in ids
    assert metrics["distil/context_too_long_frac"] == ids.count(-1) / 8


def test_without_a_single_teacher_nothing_is_learned(folder: Path) -> None:
    batch, learner = sampled([0.0] * 8), make_learner(folder, FULL, "live", 4)
    teachers = Teachers({"me": LocalTeacher("me")}, contexts={"me": context_of(folder)})
    ready = ColumnFiller(learner, teachers).fill_for_update(batch, 1, 0.0)
    assert ready.metrics["distil/skipped_frac"] == 1
    assert all(not g.any() for g in gradient(learner, ready.batch))


@pytest.mark.parametrize(
    ("source", "says"),
    [("worked", "with a worked answer"), ("metadata", "with a 'hint' in its metadata")],
)
def test_data_without_any_context_stops_the_run(
    folder: Path, source: Literal["worked", "metadata"], says: str
) -> None:
    batch = sampled([0.0] * 8)
    bare = replace(batch, problems=tuple(replace(p, worked="") for p in batch.problems))
    with pytest.raises(RunError, match=says):
        context_of(folder, source, field="hint").prompts(bare, range(8))


def test_a_teacher_that_follows_moves_after_each_step(folder: Path) -> None:
    batch, learner = sampled([0.0] * 8), make_learner(folder, FULL, "ema", 8)
    teacher = learner.teachers["me"]
    assert teacher is not None
    learner.moving = MovingReference(teacher, learner.optimizer, rate=0.25, every=1)
    teachers = Teachers({"me": LocalTeacher("me")}, contexts={"me": context_of(folder, "worked")})
    before = [p.detach().clone() for p in learner.model.parameters()]
    ready = ColumnFiller(learner, teachers).fill_for_update(batch, 1, 0.0)
    metrics = learner.update(ready.batch, 1, 0.0).metrics
    assert metrics["distil/teacher_version"] == 0 and "kl/ref_version" not in metrics
    moved = zip(before, learner.model.parameters(), teacher.parameters(), strict=True)
    for old, new, followed in moved:
        torch.testing.assert_close(followed, 0.75 * old + 0.25 * new.detach())
    assert not torch.equal(before[0], next(learner.model.parameters()))


@pytest.mark.parametrize(("weights", "kept"), [("ema", True), ("base", False), ("live", False)])
def test_checkpoints_of_ranks_keep_a_teacher_that_follows(weights: str, kept: bool) -> None:
    """A run that goes on would have the input model for its teacher again."""
    stage = RlStage.model_validate(
        {
            "kind": "rl",
            "inputs": {"model": "base"},
            "teachers": {"self": {"policy": {"weights": weights}}},
        }
    )
    learner = RankedLearner.__new__(RankedLearner)  # its processes are not needed
    learner._section, learner._has_reference, learner._trainer = stage, False, None  # type: ignore[assignment]
    assert (learner.stored_reference is not None) is kept
