"""Learning to score steps: rows of a file, the loss and its gradient, and what is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.steps import StepRow, fitting_rows, read_labelled_steps, step_places
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_reward_model
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.process_reward import process_step, rank_steps, step_logits

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
# Prompts of two lengths, one of them twice; one answer has a step, one three.
ROWS = [
    StepRow("a", (5, 6, 7), (8, 9, 10, 11, 12), (1, 2, 4), (1.0, 0.25, 0.0)),
    StepRow("a", (5, 6, 7), (9, 9), (1,), (0.5,)),
    StepRow("b", (5, 6), (12, 13, 14), (0, 2), (0.0, 1.0)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    made = load_reward_model(folder, RUNTIME, new_head=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.nn.init.normal_(made.get_submodule("score").weight, std=0.3)  # type: ignore[arg-type]
    return made


def by_hand(model: PreTrainedModel, rows: Sequence[StepRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits one sequence at a time, and the mean over steps of -y log p - (1 - y) log(1 - p)."""
    logits, labels = [], []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        hidden = model.base_model(input_ids=ids).last_hidden_state
        scores = model.get_submodule("score")(hidden)[0, :, 0]
        logits += [scores[len(row.prompt_ids) + place] for place in row.places]
        labels += row.labels
    found, wanted = torch.stack(logits), torch.tensor(labels)
    chance = found.sigmoid()
    loss = -(wanted * chance.log() + (1 - wanted) * (1 - chance).log()).mean()
    return found, loss


def test_scores_and_gradients_are_those_of_single_sequences(model: PreTrainedModel) -> None:
    logits, loss = by_hand(model, ROWS)
    torch.testing.assert_close(step_logits(model, ROWS), logits, rtol=1e-5, atol=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    # A plain step of the optimizer would hide the gradient: it is read before.
    for size in (1, 2, 3):
        model.zero_grad()
        optimizer = Recording(model)
        metrics = process_step(model, optimizer, ROWS, micro_batch_size=size)
        assert metrics["loss/process_reward"] == pytest.approx(loss.item(), rel=1e-5)
        assert optimizer.grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(optimizer.grads[name], grad, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class Recording(MasterOptimizer):
    """Keeps the gradients and takes no step."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, OptimizerSection(weight_decay=0.0), 1)
        self.own = model
        self.grads: dict[str, torch.Tensor] = {}

    def step(self, **given: object) -> object:  # type: ignore[override]
        self.grads = {
            n: p.grad.clone() for n, p in self.own.named_parameters() if p.grad is not None
        }
        return super().step(0.0, **given)  # type: ignore[arg-type]


def test_a_new_head_scores_every_step_one_half(folder: Path) -> None:
    model = load_reward_model(folder, RUNTIME, new_head=True)
    assert step_logits(model, ROWS).tolist() == [0.0] * 6
    metrics = process_step(
        model, MasterOptimizer(model, OptimizerSection(), 1), ROWS, micro_batch_size=2
    )
    assert metrics["loss/process_reward"] == pytest.approx(math.log(2))
    assert metrics["prm/label_mean"] == pytest.approx(2.75 / 6)
    assert metrics["prm/score_mean"] == 0.5
    # 0 is not above 1/2: right for the labels 0.25, 0, 0.5 and 0.
    assert metrics["prm/step_accuracy"] == pytest.approx(4 / 6)


def test_what_is_measured_of_unseen_steps(model: PreTrainedModel) -> None:
    logits, _ = by_hand(model, ROWS)
    for size in (1, 2, 5):
        found = rank_steps(model, ROWS, size)
        assert [count for _, count in found.problems] == [4, 2]
        assert found.pairs == 6 + 1, "a: four labels that differ; b: one pair"
        labels = [1.0, 0.25, 0.0, 0.5, 0.0, 1.0]
        pairs = [
            (i, j)
            for group in ((0, 1, 2, 3), (4, 5))
            for i in group
            for j in group
            if labels[i] > labels[j]
        ]
        assert found.ordered == sum(bool(logits[i] > logits[j]) for i, j in pairs)
        assert sum(right for right, _ in found.problems) == sum(
            bool(logit > 0) == (label > 0.5) for logit, label in zip(logits, labels, strict=True)
        )


# --- files ------------------------------------------------------------------------------------


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


GOOD = {"prompt": "1 + 1?", "completions": ["add", "so 2"], "labels": [True, 0.25]}


def test_rows_become_tokens_with_places(folder: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(folder)
    chat = {**GOOD, "prompt": [{"role": "user", "content": "1 + 1?"}]}
    rows = read_labelled_steps(write(tmp_path / "a.jsonl", GOOD, chat), "stages.prm.data", "\n")
    first, second = (row.tokenised("\n", tokenizer) for row in rows)
    assert first == second and first.labels == (1.0, 0.25)
    text = tokenizer.decode_response(first.response_ids)
    assert text == "add\nso 2\n" and first.places == (3, 8)
    assert first.prompt_ids == tokenizer.encode_prompt(rows[0].problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completions": "add"}, "`completions` is not a list of texts"),
        ({"completions": []}, "`completions` is not a list of texts"),
        ({"labels": [True]}, "there are 2 steps and 1 labels"),
        ({"labels": None}, "there are 2 steps and no labels"),
        ({"labels": [True, 2]}, "label 2 is not true, false or from 0 to 1"),
        ({"labels": [True, "x"]}, "label 'x' is not true, false or from 0 to 1"),
        ({"labels": [True, math.nan]}, "not"),
        ({"completions": ["a", " "]}, "step 2 is blank"),
        ({"completions": ["a\nb", "c"]}, "step 1 holds the separator"),
        ({"prompt": 7}, "`prompt` is neither a text nor messages"),
        ({"prompt": " "}, "`prompt` is blank"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(DataError, match=words) as caught:
        read_labelled_steps(path, "stages.prm.data", "\n")
    assert "a.jsonl:2" in str(caught.value)


def test_no_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows|empty|holds no"):
        read_labelled_steps(write(tmp_path / "a.jsonl"), "stages.prm.data", "\n")


def test_of_a_row_that_is_too_long_the_whole_steps_are_kept() -> None:
    rule = LengthRule("truncate", 7, "answers with steps")
    (cut,) = fitting_rows(ROWS[:1], rule)
    assert (cut.response_ids, cut.places, cut.labels) == ((8, 9, 10, 11), (1, 2), (1.0, 0.25))
    assert rule.truncated == 1
    rule = LengthRule("truncate", 4, "answers with steps")
    assert fitting_rows(ROWS[:1], rule) == [] and rule.dropped == 1


def test_an_answer_without_a_last_separator_is_given_one(folder: Path) -> None:
    tokenizer = ChatTokenizer.load(folder)
    ids = tokenizer.encode_text("a\nbc", special=True)
    found = step_places("a\nbc", ids, "\n", tokenizer)
    assert tokenizer.decode_response(found.ids) == "a\nbc\n" and found.places == (1, 4)
    assert found.ends == (2, 4)
    assert (
        step_places(" \n", tokenizer.encode_text(" \n", special=True), "\n", tokenizer).places == ()
    )
