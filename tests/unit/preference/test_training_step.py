"""One preference step on a tiny Llama: exact whatever the split, against a plain computation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import PreferenceLoss
from posttrain.core.data.preference import LabelledAnswer, Pair, mismatched_answers
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.preference import BothFallingAlarm, PreferenceLearner, Ranking, Rows
from posttrain.core.training.preference_objective import (
    PreferenceObjective,
    PreferenceTerm,
    Scoring,
)

MANAGER = PluginManager()
PROMPTS = [(10, 11, 12), (20, 21), (30, 31, 32, 33), (40,), (50, 51)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return make_tiny_model(root / "policy"), make_tiny_model(root / "reference", seed=1)


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    return model.eval()


def pairs() -> list[Pair]:
    """Five ragged pairs, two of one prompt."""
    made = []
    for i, prompt in enumerate([*PROMPTS[:4], PROMPTS[0]]):
        chosen = tuple(range(60, 61 + (3 * i) % 5))
        rejected = tuple(range(80, 81 + (2 * i + 1) % 4))
        made.append(Pair(str(prompt), prompt, chosen, rejected, margin=0.1 * i))
    return made


def labelled() -> list[LabelledAnswer]:
    return [
        LabelledAnswer(str(prompt), prompt, tuple(range(60 + i, 62 + 2 * i)), i % 2 == 0)
        for i, prompt in enumerate([*PROMPTS, PROMPTS[0]])
    ]


def learner(
    folders: tuple[Path, Path], names: tuple[str, ...], micro: int, **options: Any
) -> PreferenceLearner:
    terms = tuple(PreferenceTerm(MANAGER.build(PreferenceLoss, name)) for name in names)
    objective = PreferenceObjective(terms, **options)
    reference = load(folders[1]) if objective.needs_reference else None
    return PreferenceLearner(load(folders[0]), objective, 0, micro, reference)


def gradient(made: PreferenceLearner, rows: Rows) -> tuple[dict[str, float], list[Tensor]]:
    metrics, _ = made.accumulate(rows)
    grads = [p.grad.clone() for p in made.model.parameters() if p.grad is not None]
    made.model.zero_grad()
    return metrics, grads


def assert_same_gradient(ours: list[Tensor], plain: list[Tensor]) -> None:
    """Equal to 1e-6 of the whole gradient's norm."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(ours, plain, strict=True))
    norm = sum(float(b.square().sum()) for b in plain)
    assert norm > 0
    assert math.sqrt(difference) <= 1e-6 * math.sqrt(norm)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("dpo",), {}),
        (("ipo", "sft"), {}),
        (("aot",), {}),
        (("aot_unpaired",), {}),
        (("orpo",), {}),
        (("dpo",), {"scoring": Scoring(ld_alpha=0.5, wpo=True)}),
        (("kto",), {}),
        (("kto", "apo_zero_unpaired"), {}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_micro_batches_of_any_size_give_the_gradient_of_one_big_batch(
    folders: tuple[Path, Path], names: tuple[str, ...], options: dict[str, Any]
) -> None:
    is_pairs = MANAGER.build(PreferenceLoss, names[0]).data == "pairs"
    rows: Rows = pairs() if is_pairs else labelled()
    metrics, whole = gradient(learner(folders, names, len(rows), **options), rows)
    for micro in (2, 1):
        found, split = gradient(learner(folders, names, micro, **options), rows)
        assert_same_gradient(split, whole)
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-8)


def plain_logp(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """One sequence at a time, nothing shared, nothing padded."""
    logits = model(torch.tensor([prompt + answer])).logits[0]
    logp = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(answer)[:, None]).sum()


def test_dpo_has_the_gradient_of_a_plain_computation(folders: tuple[Path, Path]) -> None:
    made = learner(folders, ("dpo",), 2)
    _, ours = gradient(made, pairs())
    assert made.reference is not None
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs():
        ratios = []
        for answer in (pair.chosen_ids, pair.rejected_ids):
            with torch.no_grad():
                reference = plain_logp(made.reference, pair.prompt_ids, answer)
            ratios.append(plain_logp(made.model, pair.prompt_ids, answer) - reference)
        total = total - torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])) / 5
    total.backward()  # type: ignore[no-untyped-call]
    assert_same_gradient(ours, [p.grad for p in made.model.parameters() if p.grad is not None])


def test_sft_is_the_mean_over_the_chosen_tokens(folders: tuple[Path, Path]) -> None:
    made = learner(folders, ("sft",), 2)
    metrics, _ = gradient(made, pairs())
    with torch.no_grad():
        logps = [plain_logp(made.model, p.prompt_ids, p.chosen_ids) for p in pairs()]
    num_tokens = sum(len(p.chosen_ids) for p in pairs())
    assert metrics["loss/preference"] == pytest.approx(
        -float(torch.stack(logps).sum()) / num_tokens, rel=1e-6
    )


def test_ktos_reference_point_is_the_mean_over_mismatched_answers(
    folders: tuple[Path, Path],
) -> None:
    made, rows = learner(folders, ("kto",), 2), labelled()
    metrics, _ = gradient(made, rows)
    assert made.reference is not None
    with torch.no_grad():
        gaps = [
            plain_logp(made.model, row.prompt_ids, other.answer_ids)
            - plain_logp(made.reference, row.prompt_ids, other.answer_ids)
            for row, other in zip(rows, mismatched_answers(rows), strict=True)
        ]
    mean = float(torch.stack(gaps).mean())
    assert metrics["kto/z_ref"] == pytest.approx(max(0.0, mean), abs=1e-6)


def test_without_need_of_a_reference_none_is_asked(folders: tuple[Path, Path]) -> None:
    for names, options in ((("simpo",), {}), (("dpo",), {"reference_free": True})):
        made = learner(folders, names, 2, **options)
        assert made.reference is None
        metrics, grads = gradient(made, pairs())
        assert grads and "pref/both_falling" not in metrics


def test_a_step_follows_the_gradient_and_reports_it(folders: tuple[Path, Path]) -> None:
    made = learner(folders, ("dpo",), 2)
    optimizer = MasterOptimizer(made.model, OptimizerSection(learning_rate=1e-3), 20)
    losses = [made.step(pairs(), optimizer) for _ in range(20)]
    assert losses[-1]["loss/preference"] < losses[0]["loss/preference"]
    assert losses[0]["grad/norm"] > 0 and losses[0]["tokens/response"] > 0


def test_ranking_counts_pairs_of_one_prompt_and_ties_as_wrong(folders: tuple[Path, Path]) -> None:
    terms = (PreferenceTerm(MANAGER.build(PreferenceLoss, "dpo")),)
    model = load(folders[0])
    at_reference = PreferenceLearner(model, PreferenceObjective(terms), 0, 2, model)
    ranking = at_reference.rank(pairs())
    assert sum(right for right, _ in ranking.prompts) == 0 and ranking.gap == 0.0
    assert sum(count for _, count in ranking.prompts) == 5
    kto = learner(folders, ("kto",), 2)
    [(_, pairs_of_prompt_0)] = kto.rank(labelled()).prompts  # of it alone there are both labels
    assert pairs_of_prompt_0 == 1
    single = kto.rank(labelled()[:5])
    assert not single.by_pairs and sum(count for _, count in single.prompts) == 5


def test_a_ranking_of_gaps() -> None:
    found = Ranking.of([("a", 1.0), ("b", 0.0), ("a", -2.0)])
    assert found == Ranking([(1, 2), (0, 1)], -1 / 3)


def test_the_alarm_rings_once_after_a_whole_window_of_falling_pairs() -> None:
    alarm = BothFallingAlarm(limit=0.5, window=3)
    shares = [0.9, 0.9, 0.5, 0.6, 0.7, 0.8, 0.9]
    ringing, texts = [], []
    for share in shares:
        texts.append(alarm.after({"pref/both_falling": share}))
        ringing.append(alarm.ringing)
    assert ringing == [False] * 5 + [True, True]
    assert [text is None for text in texts] == [True] * 5 + [False, True]
    assert texts[5] is not None and "dpop_lambda" in texts[5] and "learning_rate" in texts[5]
    silent = BothFallingAlarm(limit=0.5, window=1)
    assert silent.after({}) is None
