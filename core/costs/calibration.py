"""Two seconds of this machine doing the run's own work: a few layers, the vocabulary, AdamW.

Nothing is taken from a peak rate. Models of one and of three layers are made in the run's shape and
precision, and go through the learner's and the engine's own code (`core/costs/pieces.py`): the
difference is two layers, whatever is in them, and the rest is what a pass costs beside them. Each
piece is measured when it is first asked for, on as many tokens as fit into its share of the time.
Over 300 lines: a short method for each piece of work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from mmap import PAGESIZE, mmap
from typing import TypeVar

import torch
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import LoraSection, OptimizerSection
from posttrain.core.costs.pieces import (
    VALUE,
    Decoder,
    few_engine_layers,
    few_layers,
    forward_pass,
    head_pass,
    kept_bytes,
    made_up_batch,
    products_of,
    ragged_batch,
    read_prompts,
    reusing,
    training_pass,
)
from posttrain.core.costs.rates import Groups, HeadWork, Kept, LayerCost, Line, Sequences
from posttrain.core.costs.shape import ModelShape
from posttrain.core.costs.stopwatch import Stopwatch
from posttrain.core.models.runtime import ModelRuntime
from posttrain.core.rollout.engine_weights import EngineWeights
from posttrain.core.rollout_sampling import draw_tokens
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.types import SamplingParams

CPU_WORK, GPU_WORK = 4e9, 3e12
"""Operations of one layer's forward and backward pass in a measurement: some 20 ms on two cores and
some 10 ms on a GPU."""
LARGEST_MATRIX = 1.5e7
"""Elements of the vocabulary's matrix in a measurement; of larger ones a part is measured."""
ADAMW_FLOATS = 2**22
COPIED_BYTES = 2**26
DIGESTED_BYTES = 2**22
FRESH_BYTES = 2**25
"""Floats, and bytes copied, digested or new: several times what a core holds in its caches."""
LITTLE_ATTENTION = 0.05
"""Share of a token's multiplications in attention: with less, who shares a prompt does not tell."""
STREAMED_BYTES = 2**25
"""Weights of the layers that decode in a measurement, or they would be found in the caches: a token
of a few sequences takes as long as reading the weights does."""
FEW, MANY = 1, 3
"""Layers of the two models that are compared."""
FAR, FARTHEST = 4, 8
"""How many times as much the smaller of them goes through once more: a micro-batch, if it is no
less and no more than that."""

T = TypeVar("T")
Work = Callable[[PreTrainedModel, RolloutBatch], Callable[[], object]]
"""A pass of a model over a batch, ready to be run."""


class Calibration:
    """Measured `Rates` of this machine for one model; `seconds` is what measuring has taken.

    `packed` when the engine packs its weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        runtime: ModelRuntime,
        *,
        checkpointing: bool,
        packed: bool = False,
    ) -> None:
        self.shape, self.runtime, self.checkpointing = shape, runtime, checkpointing
        self.packed = packed
        self.seconds = 0.0
        self._known: dict[Hashable, object] = {}
        self._models: dict[Hashable, PreTrainedModel] = {}
        on_cpu = runtime.device.type == "cpu"
        self._watch = Stopwatch(runtime.device, runtime.dtype.itemsize * shape.in_layers)
        self._work = CPU_WORK if on_cpu else GPU_WORK

    def training(self, rows: Sequences, lora: LoraSection | None) -> LayerCost:
        """Forward and backward, for a token that attends to as many as in `rows`."""
        key = ("training", self._like(rows), None if lora is None else lora.model_dump_json())
        return self._once(key, lambda: self._training(rows, lora))

    def reused(self, rows: Sequences) -> LayerCost:
        """Forward and backward where linear layers are told what they give."""
        return self._once(("reused", self._like(rows)), lambda: self._reused(rows))

    def kept(self, groups: Groups, lora: LoraSection | None) -> Kept:
        """What the layers hold of a micro-batch from its forward to its backward pass."""
        key = ("kept", str(groups), None if lora is None else lora.model_dump_json())
        return self._once(key, lambda: self._kept(groups, lora))

    def forward(self, rows: Sequences, *, reused: bool = False) -> LayerCost:
        """Forward alone."""
        name = "forward reused" if reused else "forward"
        return self._once((name, self._like(rows)), lambda: self._forward(rows, reused))

    def prefill(self, prompt: int) -> LayerCost:
        """The engine reads prompts of that many tokens."""
        return self._once(("prefill", _size(prompt)), lambda: self._prefill(prompt))

    def decoding(self, rows: Sequences, most: int) -> LayerCost:
        """The engine's next token, by sequences, which `most` is the most of."""
        key = ("decoding", rows.group > 1, _size(rows.prompt + rows.response))
        return self._once(key, lambda: self._decoding(rows, most))

    def head(self, work: HeadWork) -> Line:
        """The vocabulary's part, by tokens."""
        return self._once(("head", work), lambda: self._head(work))

    def draw(self, *, greedy: bool) -> float:
        """Choosing a token from its logits, seconds each."""
        return self._once(("draw", greedy), lambda: self._draw(greedy))

    @cached_property
    def adamw_s(self) -> float:
        """An optimizer step with clipping, seconds for each trained parameter."""
        return self._once("adamw", self._adamw)

    @cached_property
    def digest_s(self) -> float:
        """sha256, seconds a byte."""
        data = bytes(DIGESTED_BYTES)
        return self._once(
            "digest", lambda: self._watch.typical(lambda: sha256(data)) / DIGESTED_BYTES
        )

    @cached_property
    def copy_s(self) -> float:
        """Copying memory on the device, seconds a byte."""
        return self._once("copy", self._copy)

    @cached_property
    def fresh_s(self) -> float:
        """Writing to memory that the system gives for the first time, seconds a byte."""
        return self._once("fresh", lambda: self._watch.typical(_fill_fresh) / FRESH_BYTES)

    @cached_property
    def sync_s(self) -> float:
        """The engine takes weights, and packs them if it does; seconds a byte."""
        return self._once("sync", self._sync)

    def told(self) -> dict[str, float]:
        """What was measured so far, in units that people compare machines by."""
        weights = self.shape.in_layers / self.shape.layers
        found: dict[str, float] = {}
        for key, value in self._known.items():
            name = key[0] if isinstance(key, tuple) else key
            if name in ("training", "forward") and isinstance(value, LayerCost):
                operations = (6 if name == "training" else 2) * weights
                layer = value.of(self._tokens, 1) - value.pass_s
                found.setdefault(f"{name}_gflops", operations * self._tokens / layer / 1e9)
            elif name == "decoding" and isinstance(value, LayerCost):
                found.setdefault("decoding_layer_ms", 1e3 * value.layer_s)
        if "adamw" in self._known:
            found["adamw_m_per_s"] = 1e-6 / self.adamw_s
        if "copy" in self._known:
            found["copy_gb_per_s"] = 1e-9 / self.copy_s
        return {name: round(value, 3) for name, value in found.items()}

    def _training(self, rows: Sequences, lora: LoraSection | None) -> LayerCost:
        models = self._learners()
        if lora is not None or self.checkpointing:
            models = [
                few_layers(
                    self.shape.config, n, self.runtime, checkpointing=self.checkpointing, lora=lora
                )
                for n in (FEW, MANY)
            ]
        return self._layers(models, rows, _plainly(training_pass))

    def _reused(self, rows: Sequences) -> LayerCost:
        return self._layers(self._learners(), rows, _reusing(training_pass))

    def _kept(self, groups: Groups, lora: LoraSection | None) -> Kept:
        """Of a stream on a CPU exactly, without memory; else by tokens, of fewer of them."""
        runtime, share, batch = self.runtime, 1.0, ragged_batch(groups)
        if runtime.attention == "stream" and runtime.device.type == "cpu" and not runtime.autocast:
            runtime = replace(runtime, device=torch.device("meta"))
        else:
            longest = max(max(responses) for _, responses in groups)
            rows = Sequences(len(groups[0][1]), max(prompt for prompt, _ in groups), longest)
            form, count = self._fitting(rows, self._tokens)
            share = rows.tokens(len(batch)) / form.tokens(count)
            batch = made_up_batch(form, count)
        few, many = (
            kept_bytes(
                few_layers(
                    self.shape.config, n, runtime, checkpointing=self.checkpointing, lora=lora
                ),
                batch,
            )
            for n in (FEW, MANY)
        )
        layer = (many - few) / (MANY - FEW)
        return Kept(share * layer, share * (few - FEW * layer))

    def _forward(self, rows: Sequences, reused: bool) -> LayerCost:
        prepared = _reusing if reused else _plainly
        return self._layers(self._learners(), rows, prepared(forward_pass))

    def _prefill(self, prompt: int) -> LayerCost:
        return self._layers(self._engines(MANY), Sequences(1, prompt, 1), _plainly(read_prompts))

    def _learners(self) -> list[PreTrainedModel]:
        return [
            self._made(("learner", n), partial(few_layers, self.shape.config, n, self.runtime))
            for n in (FEW, MANY)
        ]

    def _engines(self, many: int) -> list[PreTrainedModel]:
        make = partial(few_engine_layers, self.shape.config, runtime=self.runtime)
        return [
            self._made(("engine", n), partial(make, layers=n, packed=self.packed))
            for n in (FEW, many)
        ]

    def _made(self, key: Hashable, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """Made once: that takes as long as a measurement."""
        if key not in self._models:
            self._models[key] = make()
        return self._models[key]

    def _decoding(self, rows: Sequences, most: int) -> LayerCost:
        """Layers by their difference, at many sequences and at few."""
        most = max(2, min(most, int(self._tokens)))
        weights = self.runtime.dtype.itemsize * self.shape.in_layers / self.shape.layers
        layers = min(max(MANY, FEW + math.ceil(STREAMED_BYTES / weights)), self.shape.layers)
        layers = max(layers, FEW + 1)
        models = self._engines(layers)
        points, beside = [], 0.0
        for count in (max(1, most // 8), most):
            decoders = [Decoder(model, rows, count) for model in models]
            few, many = (self._watch.typical(decoder.step, cold=True) for decoder in decoders)
            layer = max((many - few) / (layers - FEW), 0.5 * many / layers)
            points.append((float(decoders[0].rows), layer))
            beside = max(0.0, few - FEW * layer)
        line = Line.through(*points)
        return LayerCost(line.each, line.fixed, beside)

    def _head(self, work: HeadWork) -> Line:
        columns = min(self.shape.vocabulary, int(LARGEST_MATRIX / self.shape.hidden))
        share = self.shape.vocabulary / columns
        options = {"dtype": self.runtime.dtype, "device": self.runtime.device}
        weight = torch.full((columns, self.shape.hidden), VALUE, **options)  # type: ignore[call-overload]
        weight.requires_grad_(work in ("train", "reused"))
        points = []
        for count in (16, 64):
            hidden = torch.full((count, self.shape.hidden), VALUE, **options)  # type: ignore[call-overload]
            hidden.requires_grad_(work in ("train", "reused", "frozen"))
            targets = torch.arange(count, device=hidden.device) % columns
            packed = work == "engine" and self.packed
            run = head_pass(hidden, weight, targets, work, packed=packed)
            seconds = self._watch.typical(run, cold=True)
            points.append((float(count), share * seconds))
        return Line.through(points[0], points[1])

    def _draw(self, greedy: bool) -> float:
        rows = 16
        logits = torch.linspace(-5, 5, self.shape.vocabulary, device=self.runtime.device)
        logits = logits.to(self.runtime.dtype).repeat(rows, 1)
        chances = torch.full((rows,), 0.5, dtype=torch.float64, device=logits.device)
        params = SamplingParams(max_tokens=1, temperature=0.0 if greedy else 1.0)
        return self._watch.typical(lambda: draw_tokens(logits, chances, params)) / rows

    def _adamw(self) -> float:
        module = Module()
        options = {"dtype": self.runtime.dtype, "device": self.runtime.device}
        weight = Parameter(torch.full((ADAMW_FLOATS,), VALUE, **options))  # type: ignore[call-overload]
        module.register_parameter("weight", weight)
        optimizer = MasterOptimizer(module, OptimizerSection(), 1)

        def step() -> None:
            optimizer.fill_gradients()
            optimizer.step()

        return self._watch.typical(step) / ADAMW_FLOATS

    def _copy(self) -> float:
        source = torch.ones(COPIED_BYTES // 4, device=self.runtime.device)
        target = torch.empty_like(source)
        return self._watch.typical(lambda: target.copy_(source)) / COPIED_BYTES

    def _sync(self) -> float:
        model = self._engines(MANY)[1]
        own = EngineWeights(model, "always" if self.packed else "never")
        sent = {name: weight.clone() for name, weight in model.state_dict().items()}
        seconds = self._watch.typical(lambda: own.take(sent.items()), cold=True)
        return seconds / sum(int(weight.nbytes) for weight in sent.values())

    @property
    def _tokens(self) -> float:
        """Tokens whose forward and backward pass through a layer is one measurement's work."""
        return self._work / (6 * self.shape.in_layers / self.shape.layers)

    def _fitting(self, rows: Sequences, tokens: float) -> tuple[Sequences, int]:
        """As much of such rows as has so many tokens: whole groups, else fewer rows, else shorter
        ones. At least 16 tokens."""
        most = max(16.0, tokens)
        groups = int(most / rows.tokens(rows.group))
        if groups:
            return rows, min(groups, 64) * rows.group
        count = int((most - rows.prompt) / max(1, rows.response - 1))
        if count >= 1:
            return rows, count
        scale = most / (rows.prompt + rows.response)
        prompt, response = int(rows.prompt * scale), int(rows.response * scale)
        return Sequences(1, max(2, prompt), max(1, response)), 1

    def _layers(
        self,
        models: Sequence[PreTrainedModel],
        rows: Sequences,
        prepared: Work,
    ) -> LayerCost:
        """From both models' times at some rows, and the smaller one's at several times as many.

        What a layer costs whatever the tokens (gradients of its weights, small operations) shows at
        few: taken for a cost of tokens, it would say twice the time of a large micro-batch. And a
        line through points that are close together is mostly their noise where a micro-batch is.
        """
        fewer, _ = models
        times = self._times(rows)
        form, far = self._fitting(rows, times * self._tokens)
        if far == 1:  # there is no less of it, so at no more than the others
            form, far = self._fitting(rows, self._tokens)
        near = max(1, int(far / times))
        batch = made_up_batch(form, near)
        few, many = (self._watch.typical(prepared(model, batch), cold=True) for model in models)
        layer = max((many - few) / (MANY - FEW), 0.5 * many / MANY)
        point = (form.tokens(near), layer)
        line = Line.through((0.0, 0.0), point)
        if far > near:
            groups = form.uneven(far)
            uneven = ragged_batch(groups, form.shared)
            seconds = self._watch.typical(prepared(fewer, uneven), cold=True)
            tokens = form.shared + sum(
                prompt - form.shared + sum(responses) - len(responses)
                for prompt, responses in groups
            )
            line = Line.through(point, (float(tokens), layer + (seconds - few) / FEW))
        longer = self._longer(rows, form)
        return LayerCost(longer * line.each, line.fixed, max(0.0, few - FEW * layer))

    def _times(self, rows: Sequences) -> float:
        """How many times as much as the least is measured too."""
        return min(max(FAR, rows.tokens(rows.count) / self._tokens), FARTHEST)

    def _like(self, rows: Sequences) -> tuple[int, ...]:
        """The same for rows that are alike: measured once for all of them, for each token."""
        longest = rows.longest or (rows.prompt, rows.response)
        lengths = (rows.prompt, rows.response, *longest)
        return self._sharing(rows), *map(_size, lengths), _size(round(self._times(rows)))

    def _sharing(self, rows: Sequences) -> int:
        """Rows that share a prompt; 0 where it does not tell."""
        weights = self.shape.in_layers / self.shape.layers
        little = 2 * self.shape.hidden * rows.attended < LITTLE_ATTENTION * weights
        return 0 if little else rows.group

    def _longer(self, rows: Sequences, form: Sequences) -> float:
        """How much more a token costs in `rows` than in `form`, whose attention was cut short.

        A layer multiplies each token by its weights, and by 2 x hidden numbers for each token that
        it attends to.
        """
        weights, each = self.shape.in_layers / self.shape.layers, 2 * self.shape.hidden
        return (weights + each * rows.attended) / (weights + each * form.attended)

    def _once(self, key: Hashable, measure: Callable[[], T]) -> T:
        if key not in self._known:
            began = time.perf_counter()
            self._known[key] = measure()
            self.seconds += time.perf_counter() - began
        found: T = self._known[key]  # type: ignore[assignment]
        return found


def _fill_fresh() -> None:
    with mmap(-1, FRESH_BYTES) as pages:
        pages[::PAGESIZE] = bytes(FRESH_BYTES // PAGESIZE)


def _plainly(work: Callable[[PreTrainedModel, RolloutBatch], None]) -> Work:
    """A pass that needs nothing but model and batch."""
    return lambda model, batch: partial(work, model, batch)


def _reusing(work: Callable[[PreTrainedModel, RolloutBatch], None]) -> Work:
    """A pass whose linear layers are told what they give, as rollouts tell them."""
    return lambda model, batch: partial(reusing, work, model, batch, products_of(model, batch))


def _size(tokens: int) -> int:
    """Two classes for each doubling."""
    return round(2 * math.log2(max(1, tokens)))
