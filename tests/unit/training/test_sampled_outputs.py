"""An update that reuses linear outputs has the gradient of one that computes them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import LoraSection
from posttrain.core.math.nucleus import Cut
from posttrain.core.models import loading, sampled_outputs
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.layers import compile_layers
from posttrain.core.models.linear import why_no_packing
from posttrain.core.models.lora import add_adapter
from posttrain.core.models.sampled_outputs import SampledOutputs, record_outputs, why_no_reuse
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.forward import check_passes
from posttrain.core.training.stream import distinct_prompts, stream_of
from posttrain.core.training.updates import UpdateResult
from posttrain.core.types import SamplingParams
from tests.helpers.sampled import ALIKE, PROMPTS, Sampled, sample, save_family, start_engine
from tests.helpers.speed import GradientTaken, Options, assert_equal_gradients, speed_learner
from tests.helpers.updates import update, with_old_logprobs
from tests.unit.training.test_stream import FAMILIES


def load_policy(path: Path, runtime: ModelRuntime) -> PreTrainedModel:
    """The policy with its passes checked, which runs its layers."""
    model = loading.load_policy(path, runtime)
    check_passes(model)
    return model


CPU = torch.device("cpu")
FLOAT = ModelRuntime(CPU, torch.float32, "stream")
PARAMS = SamplingParams(num_generations=4, max_tokens=12, temperature=0.7)
# GPT-2's layers are no linear layers of torch's: nothing of them is kept.
KEPT = [family for family in FAMILIES if family != "gpt2"]
NO_BFLOAT16 = why_no_packing(torch.bfloat16, CPU)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family."""
    return {f: save_family(f, tmp_path_factory.mktemp(f)) for f in FAMILIES}


def sampled_of(folder: Path, params: SamplingParams = PARAMS, **options: int) -> Sampled:
    calls = options.pop("calls", 1)
    engine = start_engine(folder, **options)
    found = sample(engine, params, calls=calls)
    engine.close()
    return found


def gradient(
    model: PreTrainedModel,
    batch: RolloutBatch,
    outputs: SampledOutputs | None,
    options: Options = Options(),  # noqa: B008 - frozen
    cut: Cut = Cut(),  # noqa: B008 - frozen
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of an update of `batch`, and what it counted before its optimizer step."""
    learner = speed_learner(model, options)
    learner.settings = replace(learner.settings, cut=cut)
    counted: dict[str, float] = {}

    def stop(rate_factor: float = 1.0, **of_loss: object) -> None:
        raise GradientTaken

    whole = learner._accumulate

    def accumulate(done, mini, prepared, idle, sums, *rest):  # type: ignore[no-untyped-def]
        found = whole(done, mini, prepared, idle, sums, *rest)
        counted.update(sums.result())
        return found

    learner._accumulate = accumulate  # type: ignore[method-assign]
    learner.optimizer.step = stop  # type: ignore[assignment,method-assign]
    with pytest.raises(GradientTaken):
        update(learner, batch, 1, 0.0, outputs)
    named = zip(model.named_parameters(), learner.optimizer._masters, strict=True)
    return {n: m.grad.clone() for (n, _), m in named if m.grad is not None}, counted


def linear_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call of a linear layer's product."""
    made: list[int] = []
    whole = functional.linear

    def counted(*given: Tensor) -> Tensor:
        made.append(1)
        return whole(*given)

    monkeypatch.setattr(functional, "linear", counted)
    return made


@pytest.mark.parametrize("family", KEPT)
@pytest.mark.parametrize(
    "options",
    [Options(), Options(micro_batch_size=3), Options(packed=True, skip_idle=True)],
    ids=["whole", "micro", "packed-idle"],
)
def test_the_gradient_is_the_same_and_no_linear_layer_computes(
    folders: dict[str, Path], family: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = sampled_of(folders[family])
    assert len({len(c.token_ids) for group in sampled.groups for c in group}) > 3, "ragged"
    batch = sampled.batch(idle=[2, 5])
    model = load_policy(folders[family], FLOAT)
    wanted, counted = gradient(model, batch, None, options)
    assert counted["train/reused_rows"] == 0
    model = load_policy(folders[family], FLOAT)
    made = linear_calls(monkeypatch)
    monkeypatch.setattr(ColumnFiller, "_audit", lambda *_: {"mismatch/abs_max": 0.0})
    found, counted = gradient(model, batch, sampled.outputs, options)
    assert_equal_gradients(found, wanted)
    assert made == []
    assert counted["train/reused_rows"] == len(batch) - 2 * options.skip_idle
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_a_model_without_torch_s_linear_layers_computes_all(folders: dict[str, Path]) -> None:
    sampled = sampled_of(folders["gpt2"])
    wanted, _ = gradient(load_policy(folders["gpt2"], FLOAT), sampled.batch(), None)
    found, counted = gradient(load_policy(folders["gpt2"], FLOAT), sampled.batch(), sampled.outputs)
    assert_equal_gradients(found, wanted)
    assert counted["train/reused_rows"] == 0


@pytest.mark.parametrize(
    ("params", "options", "cut"),
    [
        ({"num_generations": 5}, {"at_once": 4}, Cut()),  # a prompt in several chunks
        ({}, {"at_once": 4}, Cut()),  # a chunk for each prompt
        ({}, {"calls": 2}, Cut()),  # as samplers do that draw again; prompts come twice
        ({"max_tokens": 1}, {}, Cut()),  # a response is one token, which is fed to nothing
        ({"num_generations": 1}, {}, Cut()),  # prompts are not shared
        ({"top_k": 20, "top_p": 0.8}, {}, Cut(20, 0.8)),
    ],
)
def test_however_it_was_sampled(
    folders: dict[str, Path], params: dict[str, int], options: dict[str, int], cut: Cut
) -> None:
    sampled = sampled_of(folders["llama"], replace(PARAMS, **params), **options)
    batch = sampled.batch()
    model = load_policy(folders["llama"], FLOAT)
    wanted, _ = gradient(model, batch, None, Options(micro_batch_size=7), cut)
    model = load_policy(folders["llama"], FLOAT)
    found, counted = gradient(model, batch, sampled.outputs, Options(micro_batch_size=7), cut)
    assert counted["train/reused_rows"] == len(batch)
    assert_equal_gradients(found, wanted)


def test_of_prompts_that_begin_alike(folders: dict[str, Path]) -> None:
    """The engine read their start once, in a block of its own."""
    engine = start_engine(folders["qwen2"])
    params = replace(PARAMS, temperature=0.05)  # so that responses begin alike as well
    sampled = sample(engine, params, prompts=ALIKE)
    engine.close()
    assert sampled.outputs is not None
    batch = sampled.batch()
    stream = stream_of(batch, include_last=False)
    known = next(iter(sampled.outputs.layers.values()))
    assert len(stream.kept) < sum(map(len, known)) < int(batch.prompt_mask.sum())
    model = load_policy(folders["qwen2"], FLOAT)
    wanted, _ = gradient(model, batch, None, Options(micro_batch_size=7))
    model = load_policy(folders["qwen2"], FLOAT)
    found, counted = gradient(model, batch, sampled.outputs, Options(micro_batch_size=7))
    assert counted["train/reused_rows"] == len(batch)
    assert_equal_gradients(found, wanted)


@pytest.mark.slow
def test_with_compiled_layers(folders: dict[str, Path]) -> None:
    for seed in (0, 1):  # the second finds other tensors of other shapes in the same graphs
        sampled = sampled_of(folders["qwen3"], replace(PARAMS, seed=seed))
        wanted, _ = gradient(load_policy(folders["qwen3"], FLOAT), sampled.batch(), None)
        model = load_policy(folders["qwen3"], FLOAT)
        compile_layers(model)
        found, counted = gradient(model, sampled.batch(), sampled.outputs)
        assert counted["train/reused_rows"] == len(sampled.batch())
        assert_equal_gradients(found, wanted)


def test_the_recorded_values_are_the_ones_used(folders: dict[str, Path]) -> None:
    for what in ("layers", "logits"):
        sampled = sampled_of(folders["llama"])
        kept = sampled.outputs
        assert kept is not None
        blocks = kept.logits if what == "logits" else kept.layers["model.layers.1.mlp.up_proj"]
        for block in blocks:
            block += torch.arange(block.shape[1]) / block.shape[1]
        wanted, _ = gradient(load_policy(folders["llama"], FLOAT), sampled.batch(), None)
        found, _ = gradient(load_policy(folders["llama"], FLOAT), sampled.batch(), kept)
        with pytest.raises(AssertionError):
            assert_equal_gradients(found, wanted)


def test_rows_that_were_not_sampled_are_computed(folders: dict[str, Path]) -> None:
    sampled = sampled_of(folders["llama"])
    batch = sampled.batch()
    ids = batch.response_ids.clone()
    ids[5, 0] = 99 - ids[5, 0]
    batch = replace(batch, response_ids=ids)
    wanted, _ = gradient(load_policy(folders["llama"], FLOAT), batch, None)
    options = Options(micro_batch_size=4)
    found, counted = gradient(load_policy(folders["llama"], FLOAT), batch, sampled.outputs, options)
    assert counted["train/reused_rows"] == len(batch) - 4, "its whole micro-batch is computed"
    assert_equal_gradients(found, wanted)


def test_a_row_with_tokens_of_others_is_not_found(folders: dict[str, Path]) -> None:
    sampled = sampled_of(folders["llama"])
    assert sampled.outputs is not None
    batch = sampled.batch()
    prompts = distinct_prompts(batch)[0]
    assert sampled.outputs.find(batch, prompts) is not None
    row = int(batch.response_mask.sum(dim=1).argmax())
    mask = batch.response_mask.clone()
    mask[row, 1] = 0
    other = replace(batch, response_mask=mask)
    assert sampled.outputs.find(other, prompts, last=True) is None
    assert sampled.outputs.layers, "a batch that is not found does not drop them"


def updated(
    folder: Path, sampled: Sampled, outputs: SampledOutputs | None
) -> tuple[PreTrainedModel, UpdateResult]:
    """After two epochs of two mini-batches."""
    model = load_policy(folder, FLOAT)
    learner = speed_learner(model, Options(micro_batch_size=3), rate=1e-3)
    learner.settings = replace(learner.settings, epochs=2, num_mini_batches=3)
    return model, update(learner, sampled.batch(), 1, 0.0, outputs)


def test_only_the_first_optimizer_step_reuses_them(folders: dict[str, Path]) -> None:
    sampled = sampled_of(folders["llama"])
    assert sampled.outputs is not None
    plain, computed = updated(folders["llama"], sampled, None)
    model, result = updated(folders["llama"], sampled, sampled.outputs)
    assert computed.metrics["train/reused_rows"] == 0
    assert result.metrics["train/reused_rows"] == PARAMS.num_generations
    assert not sampled.outputs.layers and not sampled.outputs.responses
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_old_logprobs_are_those_that_were_sampled(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = sampled_of(folders["llama"])
    batch = sampled.batch()
    learner = speed_learner(load_policy(folders["llama"], FLOAT), Options(micro_batch_size=5))
    learner.settings = replace(learner.settings, temperature=1.0)
    wanted = with_old_logprobs(learner, batch)
    made = linear_calls(monkeypatch)
    found = with_old_logprobs(learner, batch, sampled.outputs)
    assert made == []
    for name in ("old_logprobs", "entropy"):
        torch.testing.assert_close(found.column(name), wanted.column(name), rtol=0, atol=1e-5)
    assert sampled.outputs is not None and sampled.outputs.layers, "the update reuses them too"


def test_a_wrong_engine_is_noticed_though_its_outputs_are_reused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its outputs and logits the update agrees with the engine, whatever it computed."""
    right = sampled_of(folders["llama"])
    engine = start_engine(folders["llama"])
    with torch.no_grad():
        engine._model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    wrong = sample(engine, PARAMS)
    found = {}
    for name, sampled in (("right", right), ("wrong", wrong)):
        learner = speed_learner(load_policy(folders["llama"], FLOAT), Options())
        found[name] = update(learner, sampled.batch(), 3, 0.0, sampled.outputs)
        assert found[name].metrics["train/reused_rows"] == len(sampled.batch())
    assert found["right"].metrics["mismatch/abs_max"] < 1e-4
    assert found["wrong"].metrics["mismatch/abs_mean"] > 1e-3
    gap = found["wrong"].old_logprobs - wrong.batch().rollout_logprobs
    assert float(gap[wrong.batch().mask.bool()].abs().max()) < 1e-4, "the update itself saw none"


def test_what_exceeds_the_limit_is_not_recorded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(folders["llama"])
    each = sampled_outputs.OutputRecorder(engine.model)._max_tokens
    token_bytes = sampled_outputs.MAX_BYTES // each
    tokens = len(PROMPTS) * 9 + len(PROMPTS) * 4 * 11
    for most, kept in ((tokens * token_bytes, True), (tokens * token_bytes - 1, False)):
        monkeypatch.setattr(sampled_outputs, "MAX_BYTES", most)
        found = sample(engine, PARAMS).outputs
        assert found is not None
        assert bool(found.layers) == kept
        assert bool(found.responses) == kept
    monkeypatch.setattr(sampled_outputs, "MAX_BYTES", 2 * tokens * token_bytes - 1)
    twice = sample(engine, PARAMS, calls=2).outputs
    assert twice is not None and not twice.layers, "of all calls together"
    monkeypatch.setattr(sampled_outputs, "MAX_BYTES", 10**9)
    monkeypatch.setattr(sampled_outputs, "MAX_LOGITS_BYTES", 1000)
    sampled = sample(engine, PARAMS)
    assert sampled.outputs is not None and not sampled.outputs.logits
    wanted, _ = gradient(load_policy(folders["llama"], FLOAT), sampled.batch(), None)
    found_without, counted = gradient(
        load_policy(folders["llama"], FLOAT), sampled.batch(), sampled.outputs
    )
    assert counted["train/reused_rows"] == len(sampled.batch())
    assert_equal_gradients(found_without, wanted)


def test_nothing_is_recorded_outside_the_context_or_with_an_adapter(
    folders: dict[str, Path],
) -> None:
    engine = start_engine(folders["llama"])
    engine.generate(PROMPTS, PARAMS)
    assert not any(layer._forward_hooks for layer in engine._model.modules())
    with record_outputs(engine) as outputs:
        engine.score([[5, 9, 30]])
    assert outputs is not None and not outputs.layers
    model = load_policy(folders["llama"], FLOAT)
    add_adapter(model, LoraSection(rank=2), seed=0)
    send_policy(engine, model, 1)
    assert sample(engine, PARAMS).outputs is None
    send_policy(engine, load_policy(folders["llama"], FLOAT), 2)
    again = sample(engine, PARAMS).outputs
    assert again is not None and again.layers


@pytest.mark.skipif(NO_BFLOAT16 is not None, reason=f"no bfloat16 here: {NO_BFLOAT16}")
def test_in_bfloat16_with_packed_weights_it_is_as_near_to_float32(
    folders: dict[str, Path],
) -> None:
    engine = start_engine(folders["llama"], dtype=torch.bfloat16)
    sampled = sample(engine, PARAMS)
    low = ModelRuntime(CPU, torch.bfloat16, "stream")
    exact, _ = gradient(load_policy(folders["llama"], FLOAT), sampled.batch(), None)
    plain, _ = gradient(load_policy(folders["llama"], low), sampled.batch(), None)
    found, counted = gradient(load_policy(folders["llama"], low), sampled.batch(), sampled.outputs)
    assert counted["train/reused_rows"] == len(sampled.batch())

    def gap(one: dict[str, Tensor]) -> float:
        parts = [(one[n].float() - exact[n]).square().sum() for n in exact]
        whole = [exact[n].square().sum() for n in exact]
        return float((sum(parts) / sum(whole)) ** 0.5)

    assert gap(found) < 1.5 * gap(plain) < 0.05


def run_and_stage(
    stage: dict[str, Any], model: dict[str, Any], limits: dict[str, Any]
) -> tuple[RunConfig, RlStage]:
    rl = {"kind": "rl", "inputs": {"model": "base"}, "steps": 1} | stage
    run = RunConfig.model_validate(
        {"task": "arithmetic", "stages": {"rl": rl}, "limits": limits}
        | {"model": {"max_model_len": 32} | model}
    )
    found = run.stages["rl"]
    assert isinstance(found, RlStage)
    return run, found


@pytest.mark.parametrize(
    ("reason", "stage", "model", "limits", "facts"),
    [
        (None, {}, {}, {}, {}),
        (None, {}, {}, {}, {"window": 32}),
        ("window", {}, {"max_model_len": 33}, {}, {"window": 32}),
        ("transformers", {}, {}, {}, {"recordable": False}),
        ("stream", {}, {}, {}, {"streams": False}),
        ("correction", {}, {}, {}, {"corrects": True}),
        ("trust region", {}, {}, {}, {"owns_update": True}),
        ("precision", {}, {"dtype": "autocast"}, {}, {}),
        ("checkpointing", {}, {"gradient_checkpointing": True}, {}, {}),
        ("processes", {}, {}, {"learner_ranks": 2}, {}),
        ("LoRA", {"lora": {"rank": 2}}, {}, {}, {}),
        ("older", {"max_staleness": 1}, {}, {}, {}),
        ("reuse_outputs", {"reuse_outputs": False}, {}, {}, {}),
    ],
)
def test_why_an_update_computes_everything_itself(
    reason: str | None,
    stage: dict[str, Any],
    model: dict[str, Any],
    limits: dict[str, Any],
    facts: dict[str, Any],
) -> None:
    usual = {"recordable": True, "streams": True, "window": None}
    usual |= {"corrects": False, "owns_update": False}
    found = why_no_reuse(*run_and_stage(stage, model, limits), **(usual | facts))
    assert (found is None) if reason is None else (reason in str(found))


def test_nothing_is_recorded_while_the_policy_equals_its_reference(
    folders: dict[str, Path],
) -> None:
    engine = start_engine(folders["llama"])
    policy, reference = (load_policy(folders["llama"], FLOAT) for _ in range(2))
    with record_outputs(engine, policy, reference) as outputs:
        engine.generate(PROMPTS, PARAMS)
    assert outputs is None and engine.recorder is None
    with torch.no_grad():
        policy.get_output_embeddings().weight[3, 1] += 1e-3  # type: ignore[no-untyped-call]
    send_policy(engine, policy, 1)
    with record_outputs(engine, policy, reference) as outputs:
        engine.generate(PROMPTS, PARAMS)
    assert outputs is not None and outputs.layers and engine.recorder is None
