"""Measuring works for a tiny model, once for each piece, and sees what the layers keep."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import LoraSection, ModelSection
from posttrain.core.costs.calibration import FAR, FARTHEST, Calibration
from posttrain.core.costs.pieces import (
    few_layers,
    forward_pass,
    kept_bytes,
    made_up_batch,
    ragged_batch,
)
from posttrain.core.costs.rates import Sequences
from posttrain.core.costs.shape import ModelShape, find_model
from posttrain.core.models.runtime import ModelRuntime
from posttrain.core.training.stream import stream_of
from tests.helpers.tiny import make_tiny_model

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
STREAM = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
ROWS = Sequences(4, 12, 6)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    known = find_model(ModelSection(source=str(folder)), folder)
    assert known is not None
    return known.shape


def test_everything_is_measured_once_and_is_a_time(shape: ModelShape) -> None:
    made = Calibration(shape, RUNTIME, checkpointing=False)
    layers = [made.training(ROWS, None), made.training(ROWS, LoraSection(rank=2))]
    layers += [made.forward(ROWS), made.prefill(12)]
    stream = Calibration(shape, STREAM, checkpointing=False)
    layers += [stream.reused(ROWS), stream.forward(ROWS, reused=True)]
    layers += [made.decoding(ROWS, 8), made.decoding(Sequences(1, 12, 6), 8)]
    lines = [made.head(w) for w in ("train", "reused", "frozen", "score", "logits", "engine")]
    times = [cost.of(64, 2) for cost in layers] + [line.of(64) for line in lines]
    times += [made.draw(greedy=True), made.draw(greedy=False)]
    times += [made.adamw_s, made.copy_s, made.digest_s, made.fresh_s, made.sync_s]
    assert all(math.isfinite(t) and t > 0 for t in times)
    spent = made.seconds
    assert made.training(ROWS, None) is layers[0] and made.seconds == spent
    assert set(made.told()) >= {"training_gflops", "copy_gb_per_s"}


def test_checkpointed_layers_keep_their_inputs_only(shape: ModelShape) -> None:
    stream = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
    batch = made_up_batch(ROWS, 8)
    plain, again = (
        [kept_bytes(few_layers(shape.config, n, stream, checkpointing=on), batch) for n in (1, 3)]
        for on in (False, True)
    )
    inputs = 4 * shape.hidden * ROWS.tokens(8)
    assert again[1] - again[0] == pytest.approx(2 * inputs, rel=0.1)
    assert plain[1] - plain[0] > 4 * inputs


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, LoraSection(rank=2)])
def test_bytes_kept_of_a_stream_are_known_without_computing_it(
    shape: ModelShape, lora: LoraSection | None, checkpointing: bool
) -> None:
    """To the byte those of real rows of different lengths; more than of equally many equal ones."""
    groups = [(12, (9, 3)), (5, (2, 6))]
    stream = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
    found = Calibration(shape, stream, checkpointing=checkpointing).kept(groups, lora)
    for layers in (1, 2, 4):
        model = few_layers(shape.config, layers, stream, checkpointing=checkpointing, lora=lora)
        assert found.of(layers) == kept_bytes(model, ragged_batch(groups))
    even = Calibration(shape, stream, checkpointing=checkpointing)
    assert even.kept([(8, (5, 5)), (9, (5, 5))], lora).layer <= found.layer


def test_bytes_kept_of_padded_rows_are_those_of_the_longest(shape: ModelShape) -> None:
    made = Calibration(shape, RUNTIME, checkpointing=False)
    ragged, even = made.kept([(12, (6, 1))], None), made.kept([(12, (6, 6))], None)
    assert ragged == even and even.layer > 0


def test_long_rows_are_cut_to_what_fits_and_their_attention_is_added(shape: ModelShape) -> None:
    made = Calibration(shape, RUNTIME, checkpointing=False)
    made._work = 6 * shape.in_layers / shape.layers * 100  # a hundred tokens
    assert made._tokens == pytest.approx(100)
    assert made._fitting(Sequences(4, 10, 5), 100) == (Sequences(4, 10, 5), 12)
    assert made._fitting(Sequences(8, 20, 21), 100) == (Sequences(8, 20, 21), 4)
    form, count = made._fitting(Sequences(1, 500, 500), 100)
    assert count == 1 and form.prompt + form.response == 100
    assert made._longer(Sequences(1, 500, 500), form) > made._longer(form, form) == 1.0


@pytest.mark.parametrize("group", [1, 4])
def test_what_a_layer_costs_whatever_the_tokens_is_told_apart(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Passes of a made-up machine: 5 s a pass, 2 s a layer, 10 ms a layer and token."""
    made, rows = Calibration(shape, RUNTIME, checkpointing=False), Sequences(group, 10, 5)
    models = [few_layers(shape.config, n, RUNTIME) for n in (1, 3)]
    asked = []

    def cost(model: PreTrainedModel, batch: RolloutBatch) -> float:
        tokens = rows.tokens(len(batch))
        return 5 + model.config.num_hidden_layers * (2 + 0.01 * tokens)

    def timed(work: partial[None], *, cold: bool) -> float:
        assert cold
        asked.append(work.args)
        return cost(*work.args)

    monkeypatch.setattr(made._watch, "typical", timed)
    found = made._layers(models, rows, lambda *given: partial(forward_pass, *given))
    sizes = [(model.config.num_hidden_layers, len(batch)) for model, batch in asked]
    near = sizes[0][1]
    assert sizes == [(1, near), (3, near), (1, pytest.approx(FAR * near, rel=0.5))]
    assert (found.pass_s, found.layer_s, found.token_s) == pytest.approx((5, 2, 0.01))
    assert found.of(1000, 30) == pytest.approx(5 + 30 * (2 + 10))


@pytest.mark.parametrize(("count", "times"), [(0, FAR), (6 * 4, 6), (64, FARTHEST)])
def test_a_layer_is_measured_at_a_micro_batch_of_uneven_rows(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch, count: int, times: int
) -> None:
    """Rows of 10 + 6 tokens, the longest 20 + 12; a second a layer and token."""
    made = Calibration(shape, STREAM, checkpointing=False)
    made._work = 6 * shape.in_layers / shape.layers * 15 * 4  # 4 rows of 15
    rows = Sequences(1, 10, 6, longest=(20, 12), count=count)
    batches: list[RolloutBatch] = []

    def timed(work: partial[None], *, cold: bool) -> float:
        model, batch = work.args
        batches.append(batch)
        tokens = stream_of(batch, include_last=False).token_ids.shape[-1]
        return float(model.config.num_hidden_layers * tokens)

    monkeypatch.setattr(made._watch, "typical", timed)
    models = [few_layers(shape.config, n, STREAM) for n in (1, 3)]
    found = made._layers(models, rows, lambda *given: partial(forward_pass, *given))
    assert (found.pass_s, found.layer_s, found.token_s) == pytest.approx((0, 0, 1.0))
    near, _, far = batches
    assert (len(near), len(far)) == (4, times * 4)
    for batch, longest in ((near, (10, 6)), (far, (20, 12))):
        lengths = batch.prompt_mask.sum(1), batch.response_mask.sum(1)
        assert tuple(int(one.max()) for one in lengths) == longest
        assert [float(one.float().mean()) for one in lengths] == pytest.approx([10, 6], rel=0.1)
