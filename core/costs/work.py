"""Seconds of the work that stages share: training, scoring, sampling; from measured rates.

What follows is what the code does: micro-batches, prompts shared or not, padding, rows that leave a
rollout when they have ended. Numbers of this machine come from `Rates` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import EvaluationSection, LoraSection
from posttrain.core.costs.lengths import Lengths, Responses, longest_of, spread
from posttrain.core.costs.rates import Groups, Rates, Sequences
from posttrain.core.costs.shape import ModelShape
from posttrain.core.models.wide_products import is_emulated
from posttrain.core.rollout.same_rows import DROP_BELOW
from posttrain.core.training.logprobs import chunk_rows

SHARES_PROMPTS = frozenset({"transformers"})
"""Engines that read the prompt of a group once; the others read it for each response."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a pass: `group` of them share a prompt; `micro` go through at a time."""

    count: int
    group: int
    micro: int
    prompts: tuple[int, ...]
    responses: Responses
    padded: bool
    shared: int

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(self.prompts) / len(self.prompts)

    @property
    def form(self) -> Sequences:
        """One micro-batch's rows as the layers see them: padded to their longest, or not."""
        mean = max(1, round(self.responses.mean))
        width = self.responses.longest_of(self.micro) if self.padded else mean
        longest = None
        if not self.padded:
            groups = math.ceil(self.at_once / self.group)
            longest = longest_of(self.prompts, groups), self.responses.longest_of(self.at_once)
        return Sequences(self.group, round(self.prompt), width, self.shared, longest, self.at_once)

    def tokens(self, rows: float) -> float:
        """Tokens that the layers see of so many rows: those with the same history once."""
        form, own = self.form, 1.0 if self.padded else self.responses.computed(self.group)
        return form.tokens(rows) - (1 - own) * rows * (form.response - 1)

    def projected(self, rows: float) -> float:
        """Response tokens of so many rows whose log-probs are computed."""
        own = 1.0 if self.padded else self.responses.computed(self.group)
        return own * rows * self.responses.mean

    @property
    def heaviest(self) -> Groups:
        """A micro-batch that has the longest prompt and the longest response in it.

        What prompts share is counted for the first of them alone.
        """
        responses = self.responses.spread(self.at_once)
        starts = range(0, self.at_once, self.group)
        own = [length - self.shared for length in spread(self.prompts, len(starts))]
        prompts = [own[0] + self.shared, *own[1:]]
        return [
            (prompt, responses[start : start + self.group])
            for prompt, start in zip(prompts, starts, strict=True)
        ]

    @property
    def micro_batches(self) -> int:
        """Passes that all rows take."""
        return math.ceil(self.count / self.micro)

    @property
    def at_once(self) -> int:
        """Rows of the largest micro-batch."""
        return min(self.micro, self.count)


@dataclass(frozen=True, slots=True)
class Work:
    """The run's model on this machine: how long each kind of pass takes, in seconds.

    `engine` is the rollout engine's name and `engine_rows` the most sequences it decodes at once.
    """

    config: RunConfig
    shape: ModelShape
    lengths: Lengths
    rates: Rates
    engine: str
    engine_rows: int
    padded: bool
    bytes_each: int
    tokenizer_bytes: int = 0
    device: torch.device = torch.device("cpu")

    @property
    def logit_rows(self) -> int:
        """Tokens whose logits the learner makes at a time."""
        return chunk_rows(self.device, self.shape.vocabulary * self.made_bytes)

    @property
    def rounded(self) -> bool:
        """Whether weights are multiplied in bfloat16."""
        return self.bytes_each == 2 or self.config.model.dtype == "autocast"

    @property
    def made_bytes(self) -> int:
        """Of a number that a product gives, before it is rounded."""
        wide = self.bytes_each == 2 and is_emulated(torch.bfloat16, self.device)
        return torch.float32.itemsize if wide else self.bytes_each

    def rows(
        self, count: int, group: int, micro: int, responses: Responses, most_tokens: int | None
    ) -> Rows:
        """Rows with this task's prompts, cut into micro-batches of rows and of tokens."""
        prompt = self.lengths.prompt
        if most_tokens is not None:
            micro = min(micro, max(1, int(most_tokens / (responses.mean + prompt / group))))
        micro, shared = max(1, min(micro, count)), 0 if self.padded else self.lengths.shared
        prompts = self.lengths.prompts
        return Rows(count, group, micro, prompts, responses, self.padded, shared)

    def train(self, rows: Rows, lora: LoraSection | None, trained: int, *, head: bool) -> float:
        """Forward and backward over all rows, gradients added up; `trained` parameters."""
        cost = self.rates.training(rows.form, lora)
        tokens = rows.tokens(rows.at_once)
        each = cost.of(tokens, self.shape.layers)
        if head:
            each += self._head_of(rows, lora)
        # Micro-batches after the first are added to the sum: two reads and a write, in float32.
        added = 1.5 * 4 * trained * self.rates.copy_s * (rows.micro_batches - 1)
        return each * rows.count / rows.at_once + added

    def train_reused(self, rows: Rows, trained: int, *, head: bool) -> float:
        """`train` where linear layers, and the head where `head`, are told what they give."""
        cost = self.rates.reused(rows.form)
        each = cost.of(rows.tokens(rows.at_once), self.shape.layers)
        if head:
            each += self.rates.head("reused").of(rows.projected(rows.at_once))
        else:
            each += self._head_of(rows, None)
        added = 1.5 * 4 * trained * self.rates.copy_s * (rows.micro_batches - 1)
        return each * rows.count / rows.at_once + added

    @property
    def product_bytes(self) -> float:
        """What linear layers give for a token."""
        return float(self.bytes_each * self.shape.linear_outputs)

    def _head_of(self, rows: Rows, lora: LoraSection | None) -> float:
        """The vocabulary for one micro-batch; all chunks but the last are projected twice."""
        tokens = rows.projected(rows.at_once)
        again = max(0, math.ceil(tokens / self.logit_rows) - 1) * self.logit_rows
        seconds = self.rates.head("train" if lora is None else "frozen").of(tokens)
        return seconds + (self.rates.head("logits").each * again if again else 0.0)

    def forward(self, rows: Rows, *, head: bool, reused: bool = False) -> float:
        """One pass without gradient over all rows."""
        tokens = rows.tokens(rows.at_once)
        each = self.rates.forward(rows.form, reused=reused).of(tokens, self.shape.layers)
        if head:
            each += self.rates.head("score").of(rows.projected(rows.at_once))
        return each * rows.count / rows.at_once

    def adamw(self, trained: int) -> float:
        """One optimizer step."""
        return self.rates.adamw_s * trained

    def write(self, size: float) -> float:
        """A file of that many bytes: put together in memory, written, and its digest taken.

        Memory for it and for the system's copy of the file is new: on a virtual machine that takes
        many times as long as copying does.
        """
        return size * (2 * self.rates.fresh_s + self.rates.digest_s)

    def copy_model(self) -> float:
        """The weights copied once."""
        return self.rates.copy_s * self.bytes_each * self.shape.total

    def sync_weights(self) -> float:
        """All weights given to the engine once."""
        if self.engine != "transformers":
            return self.copy_model()
        return self.rates.sync_s * self.bytes_each * self.shape.total

    def generate(
        self, prompts: int, group: int, responses: Responses, limit: int, *, greedy: bool = False
    ) -> float:
        """One call of the engine for that many prompts with `group` responses each."""
        at_once = min(prompts, max(1, self.engine_rows // group))
        rows = min(at_once * group, self.engine_rows)
        return prompts * group / rows * self._chunk(at_once, rows, responses, limit, greedy)

    def _chunk(
        self, prompts: int, rows: int, responses: Responses, limit: int, greedy: bool
    ) -> float:
        """Sequences that are decoded together."""
        shares = self.engine in SHARES_PROMPTS
        group = rows // prompts if shares else 1
        read = prompts if shares else rows
        # Engines that share prompts pad those that are read together.
        prompt = self.lengths.longest_prompt(prompts) if shares else round(self.lengths.prompt)
        shared = self.lengths.shared if shares and prompts > 1 else 0
        layers, logits = self.shape.layers, self.rates.head("engine")
        draw = self.rates.draw(greedy=greedy)
        tokens = shared + read * (prompt - shared)
        seconds = self.rates.prefill(prompt).of(tokens, layers)
        seconds += logits.of(read) + draw * rows
        so_far = Sequences(group, prompt, max(1, round(responses.mean) // 2))
        step = self.rates.decoding(so_far, self.engine_rows)
        batch = float(rows)
        for done in range(1, limit):
            running = rows * responses.running(done)
            if running == 0:
                break
            if not shares or running <= DROP_BELOW * batch:
                batch = running
            own = batch * (responses.distinct(group, done) if group > 1 else 1.0)
            # A pass is made if one of them needs it, and then for those that do.
            made = responses.any_running(done, rows)
            seconds += made * (step.of(own / made, layers) + logits.of(own / made)) + draw * running
        return seconds

    def evaluate(self, section: EvaluationSection, responses: Responses, *, samples: int) -> float:
        """Greedy answers to all problems, and `samples` more for each."""
        at_once, limit = section.at_once, section.max_response_length
        seconds = self.generate(at_once, 1, responses, limit, greedy=True)
        if samples:
            seconds += self.generate(at_once, samples, responses, limit)
        return seconds * section.num_problems / at_once

    def few_tokens(self, counts: Sequence[int]) -> float:
        """Short forward passes of so many tokens each, with logits: weights are read each time."""
        alone = Sequences(1, round(self.lengths.prompt), 1)
        step, head = self.rates.decoding(alone, self.engine_rows), self.rates.head("score")
        return sum(step.of(n, self.shape.layers) + head.of(n) for n in counts)
