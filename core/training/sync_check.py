"""Does the engine answer with the weights that it was given? Asked after each sync, or it fails.

An engine that can tell has all of its weights compared. A few fixed token sequences, the probe, are
scored by the trainer's model and by the engine at temperature 1: at the start and after the first
sync, and after each sync of an engine that cannot tell. Their log-probs must agree, and must move
when, and as far as, the trainer's move.
Axes: N probe tokens, all sequences in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.contracts import RolloutEngine
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.errors import RunError
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.models.lora import is_adapted
from posttrain.core.models.sharded import compute_dtype
from posttrain.core.rollout.weight_sync import takes_adapter, weights_sent
from posttrain.core.training.forward import forward_only
from posttrain.core.training.updates import RemotePolicy

When = Literal["every", "first", "never"]

PROBE_LENGTH = 24
# That the engine computes what the trainer does with equal weights is seen at the start and once
# more; after that each update's `mismatch` metrics go on seeing it.
PROBED_SYNCS = 1
# When a stage has no text of its own. Any text will do: every weight has a part in each log-prob.
TEXTS = ("What is 17 + 26? 17 + 26 = 43.", "The train leaves at seven in the morning, so")
# A check that skips because too few log-probs moved would be one that never fails: half is enough
# to know that the engine's cannot all have been rounded away.
MOVED_SHARE = 0.5
FIX = (
    "correct its sync_weights, or take another engine (`engine: transformers`); where an engine "
    "rounds weights on purpose, set check_sync: never"
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Log-probs [N] (float64 nats) of the probe: the trainer's and the engine's."""

    trainer: Tensor
    engine: Tensor

    @property
    def gap(self) -> Tensor:
        return (self.engine - self.trainer).abs()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Gaps between engine and trainer that rounding explains, in nats per token.

    `largest` and `mean` always hold, but for a share `spared` of the tokens, which may be further
    apart and count as `largest` in the mean. Within them the mean gap may be 4 x that of the
    stage's start, or `share` of what the trainer's log-probs have moved since, or `floor`,
    whichever is most.
    """

    largest: float
    mean: float
    floor: float
    share: float
    spared: float = 0.0

    def mean_gap(self, answers: Answers) -> float:
        return float(answers.gap.clamp(max=self.largest).mean())


BOUNDS: dict[torch.dtype, Bounds] = {
    torch.float32: Bounds(largest=1e-3, mean=2e-4, floor=2e-6, share=1e-4),
    # Single tokens are further apart (docs/mismatch.md): one of probability 1e-7 by 5 nats, where
    # trainer and engine were 2 nats from float32 each. No bound on the largest gap would hold.
    torch.bfloat16: Bounds(largest=0.6, mean=0.12, floor=0.02, share=0.25, spared=0.05),
}
START_FACTOR = 4.0
# Moves of this many starting gaps tell on which side of them the engine is.
TELLING_MOVE = 2.0


@dataclass
class SyncCheck:
    """Compares `engine` with `model` on the `probe` after each sync.

    With `source`, the trainer is there, and `model` is a copy whose weights may be old ones.
    `trusted` is the last pair of answers after which the engine was known to have followed.
    """

    engine: RolloutEngine[Any]
    model: PreTrainedModel
    probe: Sequence[Sequence[int]]
    when: When = "every"
    source: RemotePolicy | None = None
    start: Answers | None = None
    trusted: Answers | None = None
    _num_syncs: int = -1  # the stage's start is not a sync

    def is_due(self) -> bool:
        """Whether this sync is one to look at; `first` looks at the start and the first sync."""
        self._num_syncs += 1
        first = self._num_syncs <= PROBED_SYNCS
        return self.when == "every" or (self.when == "first" and first)

    def after(self, event: str) -> dict[str, float]:
        """What was measured after `event` ("the sync of step 3"); `RunError` if the engine is off.

        The first call takes the gaps that the later ones are judged by. Nothing is measured where
        comparing the weights has said all.
        """
        if self._compare_weights(event) and self._num_syncs > PROBED_SYNCS:
            return {}
        now = self.answers()
        self._check_followed(now, event)
        self._check_gap(now, event)
        metrics = {
            "sync/probe_abs_max": float(now.gap.max()),
            "sync/probe_abs_mean": float(now.gap.mean()),
        }
        if self.trusted is not None:
            metrics["sync/probe_change"] = _distance(now.trainer, self.trusted.trainer)
        # An engine that stood still in addition to a trainer that hardly moved is not known to have
        # followed: small moves add up until it is.
        if self.trusted is None or not torch.equal(now.engine, self.trusted.engine):
            self.trusted = now
        self.start = self.start or now
        return metrics

    def answers(self) -> Answers:
        return Answers(self._trainer_logprobs(), self._engine_logprobs())

    def _compare_weights(self, event: str) -> bool:
        """Whether all that the engine computes with is known to be the trainer's, bit for bit."""
        if self.source is not None:
            return False  # its servers have compared digests, of what keeps its form in them
        weights = dict(weights_sent(self.engine, self.model))
        differing = self.engine.differing_weights(weights.items())
        if not differing:
            extra = is_adapted(self.model) and takes_adapter(self.engine, self.model)
            return differing is not None and not extra
        kept = "its old weights" if len(differing) > 0.9 * len(weights) else "some old weights"
        raise RunError(
            f"engine '{self.engine.name}' kept {kept} after {event}: {len(differing)} of "
            f"{len(weights)} differ from the trainer's ({', '.join(differing[:3])}): {FIX}"
        )

    def _check_followed(self, now: Answers, event: str) -> None:
        """The engine's answers move when the trainer's do, and to where they do."""
        before = self.trusted
        if before is None:
            return
        moved = now.trainer != before.trainer
        reported = float(moved.double().mean()) >= MOVED_SHARE
        same = torch.equal(now.engine, before.engine)
        change = _distance(now.trainer, before.trainer)
        # A trainer that does not repeat itself has not necessarily moved.
        if same and reported and torch.equal(self._trainer_logprobs(), now.trainer):
            raise RunError(
                f"engine '{self.engine.name}' kept its old weights after {event}: its log-probs "
                f"of {len(now.engine)} probe tokens are bit for bit those of before, while the "
                f"trainer's moved by {change:.2g} nats on average: {FIX}"
            )
        noise = before.gap.mean() if self.start is None else self.start.gap.mean()
        new, old = now.gap.mean(), _distance(now.engine, before.trainer)
        if change > TELLING_MOVE * max(float(noise), self._bounds.floor) and new > old:
            raise RunError(
                f"engine '{self.engine.name}' kept old weights after {event}: on the probe it is "
                f"{old:.2g} nats per token from the trainer of before and {float(new):.2g} from "
                f"the present one: {FIX}"
            )

    def _check_gap(self, now: Answers, event: str) -> None:
        bounds, mean = self._bounds, mean_bound(self._bounds, self.start, now)
        far, average = float((now.gap > bounds.largest).double().mean()), bounds.mean_gap(now)
        if far <= bounds.spared and average <= mean:
            return
        precision = str(compute_dtype(self.model)).removeprefix("torch.")
        spared = f", but for {bounds.spared:.0%} of the tokens" if bounds.spared else ""
        raise RunError(
            f"engine '{self.engine.name}' does not answer with the trainer's weights after "
            f"{event}: on {len(now.gap)} probe tokens the log-probs differ by {average:.2g} nats "
            f"on average and {float(now.gap.max()):.2g} at most, expected {mean:.2g} and "
            f"{bounds.largest:.2g} in {precision}{spared}; some weights may be old, or the engine "
            f"runs in another precision: {FIX}"
        )

    @property
    def _bounds(self) -> Bounds:
        return BOUNDS.get(compute_dtype(self.model), BOUNDS[torch.bfloat16])

    def _trainer_logprobs(self) -> Tensor:
        batch = response_batch(
            prompts=[ids[:1] for ids in self.probe],
            responses=[ids[1:] for ids in self.probe],
            group_ids=list(range(len(self.probe))),
            pad_token_id=0,
            problems=(),
        )
        if self.source is None:
            values = forward_only(self.model, batch, len(self.probe), 1.0).logprobs
        else:
            values = self.source.logprobs(batch)
        return values[batch.response_mask.bool()].double()

    def _engine_logprobs(self) -> Tensor:
        scores = self.engine.score(self.probe)
        lengths = [len(values) for values in scores]
        if lengths != [len(ids) - 1 for ids in self.probe]:
            raise RunError(
                f"engine '{self.engine.name}' scored sequences of {[len(p) for p in self.probe]} "
                f"tokens with {lengths} log-probs, expected one less than tokens: {FIX}"
            )
        return torch.tensor([value for values in scores for value in values], dtype=torch.float64)


def mean_bound(bounds: Bounds, start: Answers | None, now: Answers) -> float:
    """The largest mean gap that rounding explains; only `bounds.mean` at the stage's start."""
    if start is None:
        return bounds.mean
    moved = bounds.share * _distance(now.trainer, start.trainer)
    return min(bounds.mean, max(START_FACTOR * bounds.mean_gap(start), moved, bounds.floor))


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().mean())


def make_probe(
    tokenizer: ChatTokenizer, limit: int, texts: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Two sequences of at most 24 tokens: the ends of `texts`, or of two sentences of our own."""
    length = max(2, min(PROBE_LENGTH, limit - 1))
    given = [list(ids)[-length:] for ids in texts[:2]]
    if not given:
        given = [list(tokenizer.encode_response(text))[:length] for text in TEXTS]
    return [ids if len(ids) > 1 else [*ids, tokenizer.eos_token_id] for ids in given]


def check_stored(
    engine: RolloutEngine[Any],
    model_dir: Path,
    runtime: ModelRuntime,
    tokenizer: ChatTokenizer,
    limit: int,
) -> None:
    """Raise `RunError` unless the engine answers as the model in `model_dir` does."""
    model = load_policy(model_dir, runtime)
    SyncCheck(engine, model, make_probe(tokenizer, limit)).after(f"the sync of {model_dir}")
