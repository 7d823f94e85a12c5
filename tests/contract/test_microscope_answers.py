"""The microscope over steps on given answers: what it says of a token is what the update did.

A step leaves a gradient in the model. The page's numbers are d loss / d logprob (or d loss / d
score) of each token; sent back through a forward pass of the same model, they must give the same
gradient. For every loss on preferences that is installed, sft and both kinds of reward models.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.core.analysis.answer_weights import (
    AnswerWeights,
    answer_columns,
    likelihood_weights,
    preference_weights,
    process_weights,
    reward_weights,
)
from posttrain.core.analysis.evidence import StepEvidence, read_step, write_step
from posttrain.core.contracts import PairLoss, PreferenceLoss
from posttrain.core.data.preference import LabelledAnswer, Pair
from posttrain.core.data.steps import StepRow
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.errors import ConfigError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.likelihood import TokenWeight
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_reward_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.preference import PreferenceLearner, Rows
from posttrain.core.training.preference_objective import (
    PreferenceObjective,
    PreferenceTerm,
    Scoring,
)
from posttrain.core.training.process_reward import process_step, step_logits
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.reward_model import reward_step, score_pairs
from posttrain.core.training.sft import sft_step
from posttrain.pipelines.stages.answer_evidence import evidence_of

MANAGER = PluginManager()
LOSSES = [entry.name for entry in MANAGER.entries(PreferenceLoss.kind)]
PROMPTS = [(10, 11, 12), (20, 21), (30, 31, 32, 33), (40,), (10, 11, 12)]
EXACT = ModelRuntime(torch.device("cpu"), torch.float64, "sdpa")


class _Watched:
    """In the place of an optimizer, whose step would end the gradients: keeps them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.of_model, self.grads = model, dict[str, Tensor]()

    def step(self, **_: object) -> _Watched:
        self.grads = gradients(self.of_model)
        return self

    def metrics(self) -> dict[str, float]:
        return {}


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal to 1e-6 of the whole gradient's norm (what the model says is kept as float32)."""
    assert found.keys() == wanted.keys()
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    apart = math.sqrt(sum(float((found[n] - wanted[n]).square().sum()) for n in wanted))
    assert norm > 0
    assert apart <= 1e-6 * norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return make_tiny_model(root / "policy"), make_tiny_model(root / "reference", seed=1)


@pytest.fixture(scope="module")
def tokenizer(folders: tuple[Path, Path]) -> ChatTokenizer:
    return ChatTokenizer.load(folders[0])


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", trust_remote_code=False
    )
    return model.eval()


def scorer(folder: Path) -> PreTrainedModel:
    model = load_reward_model(folder, EXACT, new_head=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.nn.init.normal_(model.get_submodule("score").weight, std=0.3)  # type: ignore[arg-type]
    return model


def pairs() -> list[Pair]:
    """Ragged pairs, two of one prompt, one of whose chosen answers has a turn of somebody else."""
    made = []
    for i, prompt in enumerate(PROMPTS):
        chosen = tuple(range(60, 62 + (3 * i) % 5))
        rejected = tuple(range(80, 81 + (2 * i + 1) % 4))
        learned = tuple(t != 1 for t in range(len(chosen))) if i == 2 else ()
        made.append(Pair(str(prompt), prompt, chosen, rejected, 0.1 * i, chosen_learned=learned))
    return made


def labelled() -> list[LabelledAnswer]:
    return [
        LabelledAnswer(str(prompt), prompt, tuple(range(60 + i, 62 + 2 * i)), i % 2 == 0)
        for i, prompt in enumerate(PROMPTS)
    ]


def kept(readings: StepReadings, rows: Rows, tokenizer: ChatTokenizer, home: Path) -> StepEvidence:
    """The evidence of a step, as it comes back from its files."""
    made = evidence_of(1, readings, [row.key for row in rows], tokenizer)
    write_step(home, made)
    return read_step(home, 1)


def through_policy(model: PreTrainedModel, evidence: StepEvidence, weights: Tensor) -> None:
    out = response_logprobs(model, evidence.batch, temperature=1.0)
    (out.logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]


def learner(folders: tuple[Path, Path], objective: PreferenceObjective) -> PreferenceLearner:
    reference = load(folders[1]) if objective.needs_reference else None
    return PreferenceLearner(load(folders[0]), objective, 0, 2, reference)


def objective_of(name: str, fields: dict[str, object], **options: Any) -> PreferenceObjective:
    term = PreferenceTerm(MANAGER.build(PreferenceLoss, name, fields), 0.5)
    return PreferenceObjective((term,), **options)


def objectives() -> list[Any]:
    found = [
        pytest.param(objective_of(name, {}), id=name)
        for name in LOSSES
        if "policy" in MANAGER.find(PreferenceLoss.kind, name).cls.trains  # type: ignore[attr-defined]
    ]
    some = {
        "alphapo": objective_of("simpo", {"alpha_po": 0.25}),
        "wpo": objective_of("dpo", {}, scoring=Scoring(wpo=True)),
        "ld": objective_of("dpo", {}, scoring=Scoring(ld_alpha=0.5)),
        "jsd": objective_of("dpo", {}, scoring=Scoring(f_divergence="js_divergence")),
        "free": objective_of("dpo", {}, reference_free=True),
        "two": replace(
            objective_of("dpo", {}),
            terms=(*objective_of("ipo", {}).terms, *objective_of("sft", {}).terms),
        ),
    }
    return found + [pytest.param(objective, id=name) for name, objective in some.items()]


@pytest.mark.parametrize("objective", objectives())
def test_a_preference_loss_pulls_as_the_page_says(
    objective: PreferenceObjective,
    folders: tuple[Path, Path],
    tokenizer: ChatTokenizer,
    tmp_path: Path,
) -> None:
    rows: Rows = pairs() if objective.data == "pairs" else labelled()
    made, readings = learner(folders, objective), StepReadings()
    metrics, _ = made.accumulate(rows, readings)
    wanted = gradients(made.model)
    evidence = kept(readings, rows, tokenizer, tmp_path)
    found = preference_weights(evidence, objective)
    through_policy(made.model, evidence, found.tokens.total)
    assert_same(gradients(made.model), wanted)
    each = found.losses[0::2] if objective.data == "pairs" else found.losses
    assert float(each.mean()) == pytest.approx(metrics["loss/preference"], rel=1e-5)
    assert found.rewards is not None and found.kinds is not None
    chosen = found.rewards[found.kinds.bool()]
    assert float(chosen.mean()) == pytest.approx(metrics["rewards/chosen"], rel=1e-4, abs=1e-6)
    outside = ~evidence.batch.mask.bool()
    assert bool((found.tokens.total[outside] == 0).all())
    assert bool(answer_columns(evidence)["logprobs"][outside].isnan().all())


def test_another_loss_is_what_a_stage_with_it_would_have_had(
    folders: tuple[Path, Path], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """SimPO on a step of DPO: without the reference that DPO read."""
    dpo, simpo = objective_of("dpo", {}), objective_of("simpo", {})
    found = []
    for objective in (dpo, simpo):
        readings = StepReadings()
        learner(folders, objective).accumulate(pairs(), readings)
        evidence = kept(readings, pairs(), tokenizer, tmp_path)
        found.append(preference_weights(evidence, simpo).tokens.total)
    torch.testing.assert_close(*found)
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (objective_of("dpo", {}), "no log-probs"),
        (objective_of("simpo", {}, scoring=Scoring(wpo=True)), "squared probabilities"),
    ],
)
def test_what_the_stage_did_not_compute_is_refused(
    objective: PreferenceObjective,
    why: str,
    folders: tuple[Path, Path],
    tokenizer: ChatTokenizer,
    tmp_path: Path,
) -> None:
    readings = StepReadings()
    learner(folders, objective_of("simpo", {})).accumulate(pairs(), readings)
    with pytest.raises(ConfigError, match=why):
        preference_weights(kept(readings, pairs(), tokenizer, tmp_path), objective)


@pytest.mark.parametrize("weighting", ["none", "dft", "phi"])
def test_sft_pulls_as_the_page_says(
    weighting: TokenWeight, folders: tuple[Path, Path], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    model, rows, readings = load(folders[0]), pairs(), StepReadings()
    batch = response_batch(
        prompts=[row.prompt_ids for row in rows],
        responses=[row.chosen_ids for row in rows],
        sampled=[row.chosen_learned for row in rows],
        group_ids=list(range(len(rows))),
        pad_token_id=0,
        problems=(),
    )
    optimizer: Any = _Watched(model)  # any object with its `step`
    metrics = sft_step(
        model, optimizer, batch, micro_batch_size=2, weighting=weighting, readings=readings
    )
    evidence = kept(readings, rows, tokenizer, tmp_path)
    found = likelihood_weights(evidence, weighting)
    through_policy(model, evidence, found.tokens.total)
    assert_same(gradients(model), optimizer.grads)
    share = batch.mask.sum(dim=1) / batch.mask.sum()
    assert float((found.losses * share).sum()) == pytest.approx(metrics["sft/loss"], rel=1e-5)


REWARD_LOSSES = [
    name
    for name in LOSSES
    if "reward_model" in MANAGER.find(PreferenceLoss.kind, name).cls.trains  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_reward_model_is_pulled_as_the_page_says(
    name: str, folders: tuple[Path, Path], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    model, loss, rows, readings = (
        scorer(folders[0]),
        MANAGER.build(PairLoss, name),
        pairs(),
        StepReadings(),
    )
    optimizer: Any = _Watched(model)  # any object with its `step`
    metrics = reward_step(model, optimizer, rows, loss, micro_batch_size=2, readings=readings)
    evidence = kept(readings, rows, tokenizer, tmp_path)
    found = reward_weights(evidence, loss)
    _is_of_scores(found, evidence)
    pulls = found.tokens.total.sum(dim=1)
    scores = score_pairs(model, rows)
    ((scores.chosen * pulls[0::2]).sum() + (scores.rejected * pulls[1::2]).sum()).backward()  # type: ignore[no-untyped-call]
    assert_same(gradients(model), optimizer.grads)
    assert float(found.losses[0::2].mean()) == pytest.approx(metrics["loss/preference"], rel=1e-5)
    assert evidence.given["scored"].sum(dim=1).tolist() == [1] * len(evidence.batch)


def test_a_process_reward_model_is_pulled_as_the_page_says(
    folders: tuple[Path, Path], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    rows = [
        StepRow("a", (5, 6, 7), (8, 9, 10, 11, 12), (1, 2, 4), (1.0, 0.25, 0.0)),
        StepRow("a", (5, 6, 7), (9, 9), (1,), (0.5,)),
        StepRow("b", (5, 6), (12, 13, 14), (0, 2), (0.0, 1.0)),
    ]
    model, readings = scorer(folders[0]), StepReadings()
    optimizer: Any = _Watched(model)  # any object with its `step`
    metrics = process_step(model, optimizer, rows, micro_batch_size=2, readings=readings)
    evidence = kept(readings, rows, tokenizer, tmp_path)  # type: ignore[arg-type]
    found = process_weights(evidence)
    _is_of_scores(found, evidence)
    at = [(row, place) for row, made in enumerate(rows) for place in made.places]
    pulls = torch.stack([found.tokens.total[row, place] for row, place in at])
    (step_logits(model, rows) * pulls).sum().backward()  # type: ignore[no-untyped-call]
    assert_same(gradients(model), optimizer.grads)
    share = torch.tensor([len(row.places) for row in rows]) / 6
    loss = float((found.losses * share).sum())
    assert loss == pytest.approx(metrics["loss/process_reward"], rel=1e-5)


def _is_of_scores(found: AnswerWeights, evidence: StepEvidence) -> None:
    scored = evidence.given["scored"].bool()
    assert found.of_scores
    assert bool((found.tokens.total[~scored] == 0).all())
    assert bool(answer_columns(evidence)["score"][~scored].isnan().all())
