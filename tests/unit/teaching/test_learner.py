"""Teachers in the learner: exact gradients whatever the split, routed rows, columns, their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import (
    AdvantageTransform,
    Aggregator,
    DistillationLoss,
    PolicyLoss,
    TeacherRows,
)
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import DistillationTerm, LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.teachers import LocalTeacher, Routing, Teachers
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem
from tests.helpers.plugins import MANAGER
from tests.helpers.rollouts import assert_same_gradient, load_tiny, ragged_batch, sequence
from tests.helpers.updates import gradient

FULL = {"divergence": "jsd", "beta": 0.3}
CANDIDATES = {"divergence": "forward", "support": "topk", "top_k": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policy and two teachers of its vocabulary, the second one wider."""
    root = tmp_path_factory.mktemp("models")
    made = [make_tiny_model(root / f"m{seed}", seed=seed, init_std=0.3) for seed in (0, 1)]
    return [*made, make_tiny_model(root / "m2", seed=2, hidden=96, init_std=0.3)]


def make_learner(
    folders: list[Path],
    fields: Mapping[str, Any] | None,
    *,
    names: tuple[str, ...] = ("a",),
    micro: int = 4,
    terms: tuple[LossTerm, ...] = (),
    temperature: float = 0.7,
) -> Learner:
    model, mean = load_tiny(folders[0]), MANAGER.build(Aggregator, "token-mean")
    distillation = None
    if fields is not None:
        loss = MANAGER.build(DistillationLoss, "gkd", fields)
        distillation = DistillationTerm(loss, mean, coef=2.0)
    return Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=1e-3, max_grad_norm=None), 10),
        Objective(terms, mean, distillation=distillation),
        UpdateSettings(1, 1, micro, temperature=temperature, seed=0),
        teachers={name: load_tiny(folders[1 + i]) for i, name in enumerate(names)},
    )


def by_hand(
    learner: Learner, batch: RolloutBatch, teacher_of: Mapping[int, PreTrainedModel]
) -> list[Tensor]:
    """One sequence at a time with whole logits, nothing shared and nothing checkpointed."""
    term, tau = learner.objective.distillation, learner.settings.temperature
    assert term is not None
    counted = sum(float(batch.mask[row].sum()) for row in teacher_of)
    learner.optimizer.close()  # gradients stay on the model
    for row, teacher in teacher_of.items():
        prompt, response = sequence(batch, row)
        if not batch.mask[row].any():
            continue
        ids, cut = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        logits = learner.model(ids).logits[0, cut] / tau
        with torch.no_grad():
            other = teacher(ids).logits[0, cut] / tau
        best = torch.log_softmax(other, -1).topk(8, dim=-1)
        said = TeacherRows(response, other, best.indices, best.values)
        loss = term.loss.rows(logits, said).loss
        (term.coef * loss.sum() / counted).backward()  # type: ignore[no-untyped-call]
    held = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad()
    return held


@pytest.mark.parametrize("fields", [FULL, CANDIDATES, {**CANDIDATES, "of": "union"}])
@pytest.mark.parametrize("micro", [1, 5, 16])
def test_the_gradient_is_that_of_whole_logits_whatever_the_split(
    folders: list[Path], fields: dict[str, Any], micro: int
) -> None:
    batch = ragged_batch([5, 9, 3], group_size=3)
    learner = make_learner(folders, fields, micro=micro)
    teachers = Teachers({"a": LocalTeacher("a")}, top_k=8 if fields is CANDIDATES else 0)
    ready = ColumnFiller(learner, teachers).fill_for_update(batch, 1, 0.0).batch
    assert (ready.teacher_topk_ids is not None) is (fields is CANDIDATES)
    teacher = learner.teachers["a"]
    assert teacher is not None
    wanted = by_hand(learner, batch, dict.fromkeys(range(len(batch)), teacher))
    assert_same_gradient(gradient(learner, ready), wanted)


@pytest.mark.parametrize("fields", [FULL, CANDIDATES])
def test_slopes_of_an_update_are_those_of_whole_logits_and_change_nothing(
    folders: list[Path], fields: dict[str, Any]
) -> None:
    batch = ragged_batch([5, 9, 3], group_size=3)
    teachers = Teachers({"a": LocalTeacher("a")}, top_k=8 if fields is CANDIDATES else 0)
    weights, results = [], []
    for step in (1, 2):
        learner = make_learner(folders, fields, micro=5)
        ready = ColumnFiller(learner, teachers).fill_for_update(batch, step, 0.0).batch
        results.append(learner.update(ready, step, 0.0))
        weights.append([p.detach().clone() for p in learner.model.parameters()])
    assert all(map(torch.equal, *weights)), "to measure changes nothing"
    assert results[1].seen.slope is None
    slopes = results[0].seen.slope
    assert slopes is not None and not slopes[~batch.mask.bool()].isfinite().any()
    learner = make_learner(folders, fields)
    teacher, term = learner.teachers["a"], learner.objective.distillation
    assert teacher is not None and term is not None
    for row in range(len(batch)):
        prompt, response = sequence(batch, row)
        ids, cut = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        with torch.no_grad():
            own, other = (m(ids).logits[0, cut] / 0.7 for m in (learner.model, teacher))
        leaf, best = own.requires_grad_(), torch.log_softmax(other, -1).topk(8, dim=-1)
        said = TeacherRows(response, other, best.indices, best.values)
        (wanted,) = torch.autograd.grad(term.loss.rows(leaf, said).loss.sum(), leaf)
        taken = batch.mask[row, : len(response)].bool()
        found = slopes[row, : len(response)][taken].to(wanted)
        torch.testing.assert_close(found, wanted[taken].norm(dim=1), rtol=1e-5, atol=1e-8)


def routed(batch: RolloutBatch, fields: list[str]) -> RolloutBatch:
    problems = [Problem("k", "p", "a", "w", {"field": field}) for field in fields]
    return replace(batch, problems=tuple(problems))


def test_rows_learn_from_the_teacher_of_their_problem_and_others_do_not_count(
    folders: list[Path],
) -> None:
    batch = routed(ragged_batch([5, 9, 3], group_size=2), ["a", "a", "b", "b", "c", "c"])
    learner = make_learner(folders, FULL, names=("a", "b"), micro=3)
    routing = Routing("field", {"a": 0, "b": 1}, "skip")
    teachers = Teachers({name: LocalTeacher(name) for name in ("a", "b")}, routing)
    filled, _ = ColumnFiller(learner, teachers).fill(batch, {"teacher_logprobs"})
    assert filled.column("teacher_id").tolist() == [0, 0, 1, 1, -1, -1]
    scored = filled.column("teacher_logprobs")
    for row, name in ((0, "a"), (2, "b")):
        teacher = learner.teachers[name]
        assert teacher is not None
        prompt, response = sequence(batch, row)
        logits = teacher(torch.cat([prompt, response])[None]).logits[0] / 0.7
        said = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, response[:, None])
        own = scored[row, : len(response)]
        torch.testing.assert_close(own.double(), said[:, 0], rtol=0, atol=1e-5)
    assert scored[4:].isnan().all()
    of = {row: learner.teachers[name] for row, name in enumerate(["a", "a", "b", "b"])}
    wanted = by_hand(learner, batch, of)  # type: ignore[arg-type]
    assert_same_gradient(gradient(learner, filled), wanted)


@pytest.mark.parametrize("aggregator", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["ref_kl", "ppo_clip"])
def test_responses_without_a_teacher_are_not_counted_where_teachers_alone_are_learned_from(
    folders: list[Path], name: str, aggregator: str
) -> None:
    batch = routed(ragged_batch([5, 9, 3], group_size=2), ["a", "a", "c", "c", "a", "a"])
    mean = MANAGER.build(Aggregator, aggregator)
    term = LossTerm(MANAGER.build(PolicyLoss, name), mean)
    learner = make_learner(folders, None, terms=(term,), micro=3)
    learner.objective = replace(learner.objective, taught_advantages=True)
    teachers = Teachers({"a": LocalTeacher("a")}, Routing("field", {"a": 0}, "skip"))
    names = {"teacher_logprobs", "old_logprobs"}
    filled, _ = ColumnFiller(learner, teachers).fill(batch, names)
    opd = MANAGER.build(AdvantageTransform, "opd")
    advantages = opd.transform(torch.zeros_like(filled.mask), filled).advantages
    filled = filled.with_columns(advantages=advantages)
    alone = filled.select(torch.tensor([0, 1, 4, 5]))
    assert_same_gradient(gradient(learner, filled), gradient(learner, alone))
    if name == "ppo_clip":  # next to rewards they count
        learner.objective = replace(learner.objective, taught_advantages=False)
        sizes = [float(each.mask.sum()) for each in (filled, alone)]
        if aggregator == "seq-mean-token-mean":
            sizes = [float(each.mask.any(dim=1).sum()) for each in (filled, alone)]
        assert sizes[0] > sizes[1]
        whole = [grad * sizes[0] / sizes[1] for grad in gradient(learner, filled)]
        assert_same_gradient(whole, gradient(learner, alone))


@pytest.mark.parametrize("micro", [1, 4, 6])
@pytest.mark.parametrize("aggregator", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["gkd", "ref_kl", "ppo_clip"])
def test_teachers_that_count_alike_are_averaged_each_by_itself(
    folders: list[Path], name: str, aggregator: str, micro: int
) -> None:
    """The mean over three teachers, one of whom judges nothing here, of each one's own average."""
    batch = routed(ragged_batch([5, 9, 3], group_size=2), ["a", "a", "b", "b", "b", "c"])
    mean, names = MANAGER.build(Aggregator, aggregator), ("a", "b")
    learner = make_learner(folders, FULL, names=names, micro=micro)
    divergence = learner.objective.distillation
    assert divergence is not None
    if name == "gkd":
        alone = replace(divergence, aggregator=mean)
        terms, balanced = (), replace(alone, num_teachers=3)
        learner.objective = replace(learner.objective, distillation=balanced)
    else:
        term = LossTerm(MANAGER.build(PolicyLoss, name), mean, num_teachers=3)
        terms, alone = (term,), None
        learner.objective = Objective(terms, mean, taught_advantages=True)
    routes = {"a": 0, "b": 1}
    teachers = Teachers({n: LocalTeacher(n) for n in names}, Routing("field", routes, "skip"))
    wanted = {"teacher_logprobs", "old_logprobs"}
    filled, metrics = ColumnFiller(learner, teachers).fill(batch, wanted)
    assert metrics["distil/tokens/a"] > 0 and metrics["distil/tokens/b"] > 0
    opd = MANAGER.build(AdvantageTransform, "opd")
    found = opd.transform(torch.zeros_like(filled.mask), filled).advantages
    filled = filled.with_columns(advantages=found)
    got = gradient(learner, filled)
    plain = replace(
        learner.objective,
        terms=tuple(replace(term, num_teachers=0) for term in terms),
        distillation=alone,
    )
    learner.objective = plain
    shares = [gradient(learner, filled.select(torch.tensor(rows))) for rows in ([0, 1], [2, 3, 4])]
    assert_same_gradient(got, [(a + b) / 3 for a, b in zip(*shares, strict=True)])
    assert max(float(grad.abs().max()) for grad in got) > 0


def test_a_problem_that_nobody_teaches_stops_unless_it_is_skipped(folders: list[Path]) -> None:
    batch = routed(ragged_batch([5], group_size=2), ["a", "poems"])
    learner = make_learner(folders, FULL)
    strict = Teachers({"a": LocalTeacher("a")}, Routing("field", {"a": 0}, "error"))
    with pytest.raises(RunError, match="has field 'poems' in its metadata, which no teacher"):
        strict.fill(batch, {"teacher_logprobs"}, learner)
    unknown = Teachers({"a": LocalTeacher("a")}, Routing("topic", {"a": 0}, "error"))
    with pytest.raises(RunError, match="has no 'topic' in its metadata"):
        unknown.fill(batch, {"teacher_logprobs"}, learner)


def test_the_candidates_of_one_pass_are_those_of_the_whole_vocabulary(folders: list[Path]) -> None:
    batch = ragged_batch([5, 9, 3], group_size=3)
    learner = make_learner(folders, CANDIDATES, micro=4)
    found, plain = (learner.teacher_pass("a", batch, top_k) for top_k in (8, 0))
    torch.testing.assert_close(found.logprobs, plain.logprobs, rtol=0, atol=1e-6)
    assert found.topk_ids is not None and found.topk_logprobs is not None
    teacher = learner.teachers["a"]
    assert teacher is not None
    for row in range(len(batch)):
        prompt, response = sequence(batch, row)
        logits = teacher(torch.cat([prompt, response])[None]).logits[0] / 0.7
        best = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].topk(8, dim=-1)
        own = found.topk_logprobs[row, : len(response)]
        torch.testing.assert_close(own.double(), best.values, rtol=0, atol=1e-5)
        assert torch.equal(found.topk_ids[row, : len(response)], best.indices)


def test_more_candidates_than_tokens_are_the_whole_vocabulary(folders: list[Path]) -> None:
    batch, fields = ragged_batch([5, 9], group_size=2), {**CANDIDATES, "top_k": 128}
    found = []
    for own in (fields, {"divergence": "forward"}):
        learner = make_learner(folders, own)
        teachers = Teachers({"a": LocalTeacher("a")}, top_k=128 if own is fields else 0)
        ready = ColumnFiller(learner, teachers).fill_for_update(batch, 1, 0.0).batch
        found.append(gradient(learner, ready))
    assert_same_gradient(*found)


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_teachers_columns_cost_one_forward_pass(folders: list[Path], top_k: int) -> None:
    batch = ragged_batch([5, 9, 3], group_size=3)
    learner = make_learner(folders, None, micro=4)
    calls: dict[str, int] = {}
    for name, model in (("policy", learner.model), ("teacher", learner.teachers["a"])):
        assert model is not None

        def count(*_: Any, name: str = name) -> None:
            calls[name] = calls.get(name, 0) + 1

        model.get_decoder().layers[0].register_forward_hook(count)
    learner.reference = learner.teachers["a"]
    learner.reference_logprobs(batch)
    one_pass = calls.pop("teacher")
    teachers = Teachers({"a": LocalTeacher("a")}, top_k=top_k)
    names = {"teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"}
    filled, metrics = ColumnFiller(learner, teachers).fill(batch, names)
    assert calls == {"teacher": one_pass}
    assert "distil/rollout_kl" in metrics and metrics["distil/missing_frac"] == 0
    # What is there is not asked for again.
    ColumnFiller(learner, teachers).fill(
        filled, names - (set() if top_k else {*names} - {"teacher_logprobs"})
    )
    assert calls == {"teacher": one_pass}


def test_tokens_without_a_log_prob_stop_the_run_or_are_left_out(folders: list[Path]) -> None:
    batch = ragged_batch([5, 9], group_size=2)
    loss = LossTerm(MANAGER.build(PolicyLoss, "ref_kl"), MANAGER.build(Aggregator, "token-mean"))
    learner = make_learner(folders, None, terms=(loss,))

    class Deaf(LocalTeacher):
        """It leaves out the first token of every response."""

        def scores(self, *args: Any) -> Any:
            found = super().scores(*args)
            found.logprobs[:, 0] = torch.nan
            return found

    with pytest.raises(RunError, match=r"\d+ of \d+ sampled tokens have no log-prob"):
        Teachers({"a": Deaf("a")}).fill(batch, {"teacher_logprobs"}, learner)
    lenient = Teachers({"a": Deaf("a")}, on_missing="mask")
    ready = ColumnFiller(learner, lenient).fill_for_update(batch, 1, 0.0)
    assert 0 < ready.metrics["distil/missing_frac"] < 1
    assert all(g.isfinite().all() for g in gradient(learner, ready.batch))
