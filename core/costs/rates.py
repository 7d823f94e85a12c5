"""What the estimates ask of this machine: seconds and bytes of a few pieces of work.

`core/costs/calibration.py` measures them; a test may make them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.core.config.sections import LoraSection

Groups = Sequence[tuple[int, Sequence[int]]]
"""Rows of a micro-batch: of each group the tokens of its prompt and of each of its responses."""
HeadWork = Literal["train", "reused", "frozen", "score", "logits", "engine"]
"""The vocabulary's part: log-probs with gradients for states and weight, the same of logits that
are known, with gradients for states alone, without any; or bare logits, the learner's, or the
engine's of which a token is drawn."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a piece of work on n rows or tokens: `fixed` + n x `each`."""

    fixed: float
    each: float

    def of(self, count: float) -> float:
        """Seconds for `count`; nothing takes none."""
        return self.fixed + self.each * count if count > 0 else 0.0

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """The line through two measured points (count, seconds), with neither part below 0."""
        (n0, t0), (n1, t1) = few, many
        each = min(max((t1 - t0) / (n1 - n0), 0.0), t1 / n1)
        return cls(max(t1 - each * n1, 0.0), each)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows that go through the layers together: `group` rows share a prompt.

    `prompt` and `response` are mean tokens; the response's last token goes through no layer. The
    first `shared` tokens of all prompts are the same, and go through the layers once. `longest` are
    tokens of the longest prompt and response, if they differ: attention is as wide as these.
    `count` rows are a micro-batch, where that is known.
    """

    group: int
    prompt: int
    response: int
    shared: int = 0
    longest: tuple[int, int] | None = None
    count: int = 0

    def tokens(self, rows: float) -> float:
        """Tokens that the layers see, of `rows` rows: each prompt once a group."""
        if not rows:
            return 0.0
        prompts = self.shared + max(1.0, rows / self.group) * (self.prompt - self.shared)
        return prompts + rows * (self.response - 1)

    def uneven(self, count: int) -> Groups:
        """`count` rows of which the first are as long as the longest, and the others make up."""
        prompt, response = self.longest or (self.prompt, self.response)
        starts = range(0, count, self.group)
        prompts = _led_by(prompt, self.prompt, len(starts), self.shared + 1)
        responses = _led_by(response, self.response, count, 1)
        return [
            (length, responses[start : start + self.group])
            for length, start in zip(prompts, starts, strict=True)
        ]

    @property
    def attended(self) -> float:
        """Tokens that a token attends to, on average over a row."""
        return (self.prompt + self.response) / 2


def _led_by(longest: int, mean: int, count: int, least: int) -> list[int]:
    """`count` lengths of about that mean: one is the longest, the others equal, `least` or more."""
    if count == 1:
        return [mean]
    return [longest, *[max(least, round((count * mean - longest) / (count - 1)))] * (count - 1)]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer, for each token and for any number, and of a pass beside its layers."""

    token_s: float
    layer_s: float = 0.0
    pass_s: float = 0.0

    def of(self, tokens: float, layers: int) -> float:
        """Seconds of a pass of `tokens` through `layers`."""
        if tokens <= 0:
            return 0.0
        return self.pass_s + (self.layer_s + self.token_s * tokens) * layers


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of one layer, and of a pass beside its layers."""

    layer: float
    beside: float = 0.0

    def of(self, layers: int) -> float:
        """Bytes of so many layers."""
        return self.beside + self.layer * layers


class Rates(Protocol):
    """Seconds and bytes of the work that stages are made of, in the configured precision."""

    def training(self, rows: Sequences, lora: LoraSection | None) -> LayerCost:
        """Forward and backward."""

    def reused(self, rows: Sequences) -> LayerCost:
        """Forward and backward where linear layers are told what they give."""

    def kept(self, groups: Groups, lora: LoraSection | None) -> Kept:
        """What the layers hold of a micro-batch from its forward to its backward pass."""

    def forward(self, rows: Sequences, *, reused: bool = False) -> LayerCost:
        """Forward alone; `reused` where linear layers are told what they give."""

    def prefill(self, prompt: int) -> LayerCost:
        """The engine reads prompts of that many tokens."""

    def decoding(self, rows: Sequences, most: int) -> LayerCost:
        """The engine's next token, by sequences, which `most` is the most of.

        Their responses have `rows.response` tokens so far.
        """

    def head(self, work: HeadWork) -> Line:
        """The vocabulary's part, by tokens."""

    def draw(self, *, greedy: bool) -> float:
        """Choosing a token from its logits, seconds each."""

    @property
    def adamw_s(self) -> float:
        """An optimizer step, seconds for each trained parameter."""

    @property
    def digest_s(self) -> float:
        """sha256 of a file's bytes, seconds a byte."""

    @property
    def copy_s(self) -> float:
        """Copying memory, seconds a byte."""

    @property
    def fresh_s(self) -> float:
        """Writing to memory that the system gives for the first time, seconds a byte."""

    @property
    def sync_s(self) -> float:
        """The engine `transformers` takes the policy's weights, seconds a byte of them."""
