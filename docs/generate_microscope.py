"""Writes docs/microscope/*.html, four small steps under losses often confused: `make docs`.

    python docs/generate_microscope.py [FOLDER]

The steps are made by hand, small enough to follow each token; the pages are those that `posttrain
inspect` makes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.microscope import Microscope, Weigh, look, notes_of
from posttrain.core.analysis.token_weights import token_weights
from posttrain.core.analysis.what_if import objective_under, parse
from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Aggregator, PolicyLoss
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem

ONE_UPDATE = UpdateSettings(
    epochs=1, num_mini_batches=1, micro_batch_size=64, temperature=1.0, seed=0
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: its words, its advantage, and each token's ratio and old probability."""

    words: Sequence[str]
    advantage: float
    reward: float
    ratios: Sequence[float] = ()
    old: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """A page: a step under `own`, and under each of `others`, in the form of `--what-if`.

    `own` is LOSS@AGGREGATOR in that form too; `says` stands above the tokens.
    """

    slug: str
    title: str
    own: str
    others: Sequence[str]
    says: Sequence[str]
    prompt: str
    answers: Sequence[Answer]

    def evidence(self) -> StepEvidence:
        """As one update on the whole step would have left it, in float64."""
        rows, width = len(self.answers), max(len(answer.words) for answer in self.answers)
        words = sorted({word for answer in self.answers for word in answer.words})
        ids, mask = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width).double()
        old, seen = torch.zeros(rows, width).double(), torch.zeros(rows, width).double()
        entropy, advantages = torch.zeros_like(old), torch.zeros_like(old)
        for row, answer in enumerate(self.answers):
            for column, word in enumerate(answer.words):
                before = answer.old[column] if answer.old else 0.4
                now = before * (answer.ratios[column] if answer.ratios else 1.0)
                ids[row, column], mask[row, column] = words.index(word), 1.0
                old[row, column], seen[row, column] = math.log(before), math.log(now)
                entropy[row, column] = -now * math.log(now) - (1 - now) * math.log(1 - now)
                advantages[row, column] = answer.advantage
        rewards = torch.tensor([answer.reward for answer in self.answers])
        batch = RolloutBatch(
            prompt_ids=torch.ones(rows, 1, dtype=torch.int64),
            prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
            response_ids=ids,
            response_mask=mask,
            mask=mask,
            rollout_logprobs=old,
            policy_version=torch.zeros(rows, width, dtype=torch.int64),
            group_id=torch.zeros(rows, dtype=torch.int64),
            seq_id=torch.arange(rows),
            truncated=torch.zeros(rows, dtype=torch.bool),
            problems=(Problem("example", self.prompt, "", ""),) * rows,
        ).with_columns(
            old_logprobs=old, advantages=advantages, rewards=rewards, acc=(rewards > 0).float()
        )
        seen_by = torch.zeros(rows, dtype=torch.int64)
        return StepEvidence(1, batch, seen, entropy, seen_by, token_texts=dict(enumerate(words)))


def _long(count: int) -> list[str]:
    """So many words of a solution that goes on."""
    cycle = [" so", " we", " add", " the", " next", " term", ","]
    return [cycle[i % len(cycle)] for i in range(count - 1)] + [" 42"]


LENGTH = Example(
    slug="length-dilution",
    title="Length dilution: the same verdict weighs less per token in a longer answer",
    own="ppo_clip@seq-mean-token-mean",
    others=["own@token-mean", "own@seq-mean-token-sum-norm,norm_length=6"],
    says=[
        "Two right answers, of 2 and of 6 tokens, and a wrong one of 6, with rewards 1, 1 and -1 "
        "less their mean: advantages 2/3, 2/3 and -4/3 (Dr.GRPO). All ratios are 1.",
        "A mean over each answer's own length gives each token of the short answer 1/9, of the "
        "long one 1/27: long wrong answers are punished less per token than short ones.",
        "Choose own@token-mean (each token 1/21) or own@seq-mean-token-sum-norm (each token 1/27): "
        "right tokens weigh the same wherever they stand.",
    ],
    prompt="What is 6 × 7?",
    answers=[
        Answer(["It is", " 42"], 2 / 3, 1.0),
        Answer(["6", " ×", " 7", " =", " that is", " 42"], 2 / 3, 1.0),
        Answer(["6", " ×", " 7", " =", " that is", " 48"], -4 / 3, -1.0),
    ],
)
CLIP = Example(
    slug="clip-higher",
    title="Clip-higher: an upper bound of 0.28 lets rare tokens grow",
    own="ppo_clip@token-mean",
    others=["ppo_clip,clip_high=0.28", "vanilla_pg"],
    says=[
        "A right answer with two rare tokens. ' Notice' had probability 0.01 and has 0.0125 now: "
        "a ratio of 1.25, beyond 1 + 0.2, so that it gets no gradient any more at 0.0125. ' By "
        "symmetry' is at 0.0129, beyond both bounds.",
        "The common tokens cannot reach the bound: from 0.9 a ratio of 1.2 would be a probability "
        "of 1.08. A symmetric clip holds back exploration alone.",
        "Choose ppo_clip,clip_high=0.28 (DAPO): the cap of a token at 0.01 moves from 0.012 to "
        "0.0128, and ' Notice' is pulled again.",
    ],
    prompt="What is 1 + 2 + ... + 8?",
    answers=[
        Answer(
            [" Notice", " the", " pairs", ":", " By symmetry", " 4", " ×", " 9"],
            1.0,
            1.0,
            ratios=(1.25, 1.05, 1.0, 1.02, 1.29, 1.08, 1.05, 1.1),
            old=(0.01, 0.9, 0.5, 0.95, 0.01, 0.6, 0.9, 0.9),
        ),
        Answer(
            [" Add", " the", " terms", ":", " 1", " +", " 2", " ="],
            -1.0,
            0.0,
            ratios=(0.75, 0.98, 1.0, 1.0, 0.95, 1.0, 0.9, 1.0),
            old=(0.6, 0.9, 0.5, 0.9, 0.6, 0.9, 0.8, 0.7),
        ),
    ],
)
GSPO = Example(
    slug="grpo-gspo",
    title="GRPO clips tokens, GSPO whole answers",
    own="ppo_clip@seq-mean-token-mean",
    others=["gspo,clip_low=0.2,clip_high=0.2@seq-mean-token-mean", "cispo"],
    says=[
        "Two tokens with ratios 2.0 and 0.4, in a right answer. GRPO clips the first and keeps "
        "the second: gradient weights 0 and 0.4 / 2 = 0.2.",
        "GSPO (clip range 0.2 here, to compare like with like) looks at the geometric mean of the "
        "ratios: sqrt(0.8) = 0.894, inside the range. Both tokens get 0.894 / 2 = 0.447.",
        "CISPO keeps the gradient of every token, with its ratio as a bounded factor: 2.0 / 2 and "
        "0.4 / 2.",
    ],
    prompt="Is 7 prime?",
    answers=[Answer(["Yes", "."], 1.0, 1.0, ratios=(2.0, 0.4), old=(0.3, 0.9))],
)
DAPO = Example(
    slug="dapo-grpo",
    title="DAPO and GRPO: what one token of a long answer weighs",
    own="ppo_clip@seq-mean-token-mean",
    others=["own@token-mean"],
    says=[
        "An answer of 2 tokens with advantage 1, and one of 88 tokens with advantage 0.7. All "
        "ratios are 1.",
        "GRPO gives each answer half of the step: a token of the long one weighs 0.7 / 2 / 88 = "
        "0.003977.",
        "Choose own@token-mean (DAPO): all 90 tokens are alike, and it weighs 0.7 / 90 = 0.007778; "
        "the long answer has 96.9 % of the step's weight.",
    ],
    prompt="Sum the first terms.",
    answers=[Answer(["It is", " 42"], 1.0, 1.0), Answer(_long(88), 0.7, 1.0)],
)
EXAMPLES = (LENGTH, CLIP, GSPO, DAPO)


def seen(example: Example, manager: PluginManager) -> Microscope:
    """The example's step under its own loss and the others."""
    asked = parse(example.own)
    assert asked.aggregator is not None, "an example names its aggregator"
    aggregator = manager.build(Aggregator, asked.aggregator.name, asked.aggregator.fields)
    loss = manager.build(PolicyLoss, asked.loss.name, asked.loss.fields)
    own = Objective((LossTerm(loss, aggregator),), aggregator)
    longest = max(len(answer.words) for answer in example.answers)
    others: dict[str, Weigh] = {}
    for text in example.others:
        objective = objective_under(parse(text), own, manager, longest)
        others[text] = partial(token_weights, objective=objective, settings=ONE_UPDATE)
    step = example.evidence()
    notes = [*example.says, *notes_of(step, own, ONE_UPDATE)]
    weights = token_weights(step, own, ONE_UPDATE)
    return look(step, weights, others, title=example.title, notes=notes)


def write(folder: Path) -> None:
    """Write a page for each example."""
    manager = PluginManager()
    folder.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        (folder / f"{example.slug}.html").write_text(seen(example, manager).page(), "utf-8")


if __name__ == "__main__":
    docs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    write(docs / "microscope")
