"""An adapted model is the model with its factors in the weights, in values and in gradients."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from posttrain.core.config.sections import LoraSection, ModelSection, OptimizerSection
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy, load_reward_model
from posttrain.core.models.lora import (
    CONFIG,
    adapted_weights,
    add_adapter,
    base_weights,
    check_adapter,
    fits_engines,
    frozen_twin,
    is_adapted,
    merge_adapter,
    merge_into,
    merged_weights,
    save_adapter,
)
from posttrain.core.models.stream_attention import use_stream_attention
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.optim import MasterOptimizer
from posttrain.pipelines.run.checks import check_adapters, resolve_configs
from posttrain.pipelines.stage.trained import base_of_adapter
from tests.helpers.pipeline import write_config
from tests.unit.training.test_stream import make_batch, make_model

SECTION = LoraSection(rank=3, alpha=12.0)
RUNTIME = ModelRuntime.from_config(ModelSection(device="cpu", dtype="float32"))


def unadapted(family: str) -> PreTrainedModel:
    """A tiny float64 model; transformers' eager attention takes its softmax in float32."""
    model = make_model(family)
    model.set_attn_implementation("sdpa")
    return model


def adapted(family: str, section: LoraSection = SECTION) -> PreTrainedModel:
    """A tiny model with an adapter whose factors are all random."""
    model = unadapted(family)
    add_adapter(model, section, seed=1)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            drawn = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.data = 0.05 * drawn
    return model


def plain(family: str, weights: dict[str, Tensor]) -> PreTrainedModel:
    """The same model without an adapter, with these weights."""
    model = unadapted(family)
    model.load_state_dict(weights)
    return model


def loss_of(model: PreTrainedModel) -> Tensor:
    """A sum of log-probs and entropies with random weights, by the learner's forward pass."""
    out = response_logprobs(model, make_batch(), temperature=0.7)
    draw = torch.Generator().manual_seed(3)
    first, second = (torch.randn(out.logprobs.shape, generator=draw) for _ in range(2))
    return (out.logprobs * first + out.entropy * second).sum()


@pytest.mark.parametrize("stream", [False, True], ids=["padded", "stream"])
@pytest.mark.parametrize("stabilised", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "gpt2"])
def test_values_and_gradients_are_those_of_the_merged_weights(
    family: str, stabilised: bool, stream: bool
) -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A' and dL/dA = s B' dL/dW'."""
    section = SECTION.model_copy(update={"rank_stabilised": stabilised})
    model = adapted(family, section)
    whole = plain(family, dict(merged_weights(model)))
    if stream:
        use_stream_attention(model)
    scale = 12.0 / (3**0.5 if stabilised else 3)
    mine, wanted = loss_of(model), loss_of(whole)
    mine.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    assert float(mine.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    gradients: dict[str, Any] = dict(whole.named_parameters())
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert len(layers) == (8 if family == "gpt2" else 14)
    for name, layer in layers.items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        whole_gradient = gradients[f"{name}.weight"].grad
        if family == "gpt2":  # keeps its weights the other way round
            whole_gradient = whole_gradient.t()
        for got, right in (
            (b.grad, scale * whole_gradient @ a.t()),
            (a.grad, scale * b.t() @ whole_gradient),
        ):
            assert (got - right).norm().item() <= 1e-5 * right.norm().item(), name


def test_only_the_factors_are_trained_and_the_first_pass_is_the_models_own() -> None:
    model = unadapted("llama")
    before = loss_of(model)
    add_adapter(model, SECTION, seed=1)
    assert float(loss_of(model).detach()) == float(before.detach())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    optimizer = MasterOptimizer(model, OptimizerSection(), 10)
    assert len(optimizer.state_dict()["masters"]) == len(trained)
    again = make_model("llama")
    add_adapter(again, SECTION, seed=1)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other), "drawn from the seed alone"


def test_a_twin_shares_memory_and_stays_where_the_model_was() -> None:
    model = unadapted("llama")
    twin = frozen_twin(model)
    before = loss_of(twin)
    add_adapter(model, SECTION, seed=1)
    assert not is_adapted(twin)
    shared = {t.data_ptr() for _, t in base_weights(model)}
    assert {p.data_ptr() for p in twin.parameters()} <= shared
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=0.1), 10)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert not torch.equal(loss_of(model), before)
    assert torch.equal(loss_of(twin), before)
    merge_adapter(model)
    assert not is_adapted(model)
    assert torch.equal(loss_of(twin), before)


def test_a_merged_model_has_the_names_and_answers_of_a_plain_one() -> None:
    model = adapted("llama")
    value, names = loss_of(model), {name for name, _ in base_weights(model)}
    assert names == set(make_model("llama").state_dict())
    merge_adapter(model)
    assert set(model.state_dict()) == names
    assert float(loss_of(model).detach()) == pytest.approx(float(value.detach()), rel=1e-6)


def test_peft_reads_the_adapter(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = load_policy(folder, RUNTIME)
    add_adapter(model, LoraSection(rank=4, targets=("q_proj", "down_proj")), seed=1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, tmp_path / "adapter", str(folder))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 12)[None]
    plain_logits = base(input_ids=ids).logits.detach()
    read = PeftModel.from_pretrained(base, tmp_path / "adapter")
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(read(input_ids=ids).logits, logits, rtol=0, atol=1e-5)
    assert (logits - plain_logits).abs().max() > 0.01


def test_the_head_of_a_reward_model_is_trained_as_a_whole(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = load_reward_model(folder, RUNTIME, new_head=True)
    add_adapter(model, SECTION, seed=1)
    whole = {n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert whole == {"score.weight"}


def test_peft_reads_the_adapter_of_a_reward_model_with_its_head(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = load_reward_model(folder, RUNTIME, new_head=True)
    add_adapter(model, SECTION, seed=1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or name == "score.weight":
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, tmp_path / "adapter", str(folder))
    base = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, num_labels=1
    )
    ids = torch.arange(3, 12)[None]
    scores = model(input_ids=ids).logits
    read = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(read(input_ids=ids).logits, scores, rtol=0, atol=1e-5)
    assert scores.abs().max() > 0.01


def test_the_file_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Names in a set come in another order wherever strings hash differently."""
    model = adapted("llama")
    save_adapter(model, tmp_path, "base", "commit")
    found = json.loads((tmp_path / CONFIG).read_text())
    assert found["target_modules"] == sorted(found["target_modules"]) and list(found) == sorted(
        found
    )
    assert len(found["target_modules"]) == 7
    assert (found["base_model_name_or_path"], found["revision"]) == ("base", "commit")
    assert LoraConfig.from_pretrained(str(tmp_path)).r == 3


@pytest.mark.parametrize(
    ("folder", "source", "made_by", "named"),
    [
        ("hub/models--a--b/snapshots/c0ffee", "a/b", "base", ("a/b", "c0ffee")),
        ("models/bundled", "a/b", "base", ("{root}/models/bundled", None)),
        ("given", "given", "base", ("{root}/given", None)),
        ("artifacts/sft-1/model", "a/b", "sft", ("{root}/artifacts/sft-1/model", None)),
        ("artifacts/snapshots/model", "a/b", "sft", ("{root}/artifacts/snapshots/model", None)),
    ],
)
def test_the_base_of_an_adapter_is_what_the_stage_read(
    tmp_path: Path, folder: str, source: str, made_by: str, named: tuple[str, str | None]
) -> None:
    stage: Any = SimpleNamespace(
        model_dir=tmp_path / folder,
        inputs={"model": SimpleNamespace(stage=made_by)},
        run=SimpleNamespace(model=SimpleNamespace(source=source)),
    )
    assert base_of_adapter(stage) == (named[0].format(root=tmp_path.resolve()), named[1])


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "granitemoe": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "jetmoe": {"num_local_experts": 2, "num_experts_per_tok": 1, "kv_channels": 8},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 16},
}


def mixture(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny float64 model with fused experts."""
    config = AutoConfig.for_model(family, **SMALL, **HEADS, **MIXTURES[family])
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped one has no float64
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def adapted_mixture(family: str, section: LoraSection = SECTION) -> PreTrainedModel:
    model = mixture(family)
    add_adapter(model, section, seed=1)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            drawn = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.data = 0.1 * drawn
    return model


def read_mixture(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", MIXTURES)
def test_factors_of_fused_experts_are_those_of_the_merged_weights(family: str) -> None:
    """Of each expert with W' = W + s B A: dL/dB = s dL/dW' A' and dL/dA = s B' dL/dW'."""
    model = adapted_mixture(family)
    whole = mixture(family, seed=5)
    whole.load_state_dict(dict(merged_weights(model)))
    mine, wanted = (each(input_ids=IDS, labels=IDS).loss for each in (model, whole))
    mine.backward()
    wanted.backward()
    assert float(mine.detach()) == pytest.approx(float(wanted.detach()), rel=1e-9)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    fused = [each for each in adapted_weights(model) if each.is_fused]
    assert len(fused) == (4 if family == "jetmoe" else 2)
    for each in fused:
        gradient = gradients[each.name]
        assert gradient is not None
        if getattr(each.owner, "is_transposed", False):
            gradient = gradient.transpose(1, 2)
        a, b = each.layer.lora_A["default"].weight, each.layer.lora_B["default"].weight
        for expert, of_weight in enumerate(gradient):
            rows = slice(3 * expert, 3 * expert + 3)  # A has the experts one after another,
            columns = slice(expert, None, len(gradient))  # and B has them in turn
            for got, right in (
                (b.grad[:, columns], 4 * of_weight @ a[rows].t()),
                (a.grad[rows], 4 * b[:, columns].t() @ of_weight),
            ):
                assert (got - right).norm().item() <= 1e-9 * (1 + right.norm().item()), each.name


@pytest.mark.parametrize("family", MIXTURES)
def test_a_merged_mixture_is_a_plain_one_and_its_twin_stays(family: str) -> None:
    model = mixture(family)
    twin, plain_names = frozen_twin(model), set(model.state_dict())
    before = twin(input_ids=IDS).logits
    add_adapter(model, SECTION, seed=1)
    assert torch.equal(model(input_ids=IDS).logits, before), "B is zero"
    assert {name for name, _ in base_weights(model)} == plain_names
    assert not fits_engines(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name), name
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    changed = model(input_ids=IDS).logits
    assert (changed - before).abs().max() > 1e-3
    merge_adapter(model)
    assert not is_adapted(model) and set(model.state_dict()) == plain_names
    torch.testing.assert_close(model(input_ids=IDS).logits, changed, rtol=1e-9, atol=1e-9)
    assert torch.equal(twin(input_ids=IDS).logits, before)


@pytest.mark.parametrize("family", MIXTURES)
def test_peft_reads_the_adapter_of_a_mixture_and_it_merges(family: str, tmp_path: Path) -> None:
    mixture(family).save_pretrained(tmp_path / "base")
    model = adapted_mixture(family)
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    logits = model(input_ids=IDS).logits
    base = read_mixture(tmp_path / "base")
    read = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(read(input_ids=IDS).logits, logits, rtol=1e-6, atol=1e-6)
    shapes = {name: tensor.shape for name, tensor in mixture(family).state_dict().items()}
    with pytest.raises(RunError, match="does not fit"):
        check_adapter(tmp_path / "adapter", shapes)
    check_adapter(tmp_path / "adapter", shapes, experts=True)
    halves = {name: (*shape[:-1], shape[-1] // 2) for name, shape in shapes.items()}
    with pytest.raises(RunError, match="does not fit"):
        check_adapter(tmp_path / "adapter", halves, experts=True)
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "tiny"))
    tokenizer.save_pretrained(tmp_path / "base")
    merge_into(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = read_mixture(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=1e-6, atol=1e-6)


def test_layers_of_experts_can_be_named() -> None:
    model = mixture("qwen3_moe")
    add_adapter(model, LoraSection(targets=("gate_up_proj", "q_proj")), seed=0)
    names = {each.name for each in adapted_weights(model)}
    assert names == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
    }


@pytest.mark.parametrize(
    ("family", "targets", "wrong"),
    [("mixtral", "all", ""), ("llama", ("c_attn",), "c_attn"), ("llama", "all", "")],
)
def test_layers_are_checked_before_a_run_begins(
    family: str, targets: Any, wrong: str, tmp_path: Path
) -> None:
    made = AutoConfig.for_model(family, **SMALL, **HEADS)
    made.save_pretrained(tmp_path)
    config = {
        "model": {"source": str(tmp_path)},
        "task": "arithmetic",
        "stages": {"sft": {"kind": "sft", "inputs": {"model": "base"}, "lora": {}}},
    }
    config["stages"]["sft"]["lora"] = {"targets": targets}  # type: ignore[index]
    path = write_config(tmp_path / "run.yaml", config)
    resolved, _ = resolve_configs([path], None)
    if not wrong:
        check_adapters(resolved)
        return
    with pytest.raises(ConfigError, match=f"^stages.sft.lora: .*{wrong}"):
        check_adapters(resolved)


def test_all_layers_are_adapted_where_the_prefix_of_the_backbone_is_another_one() -> None:
    model = unadapted("llama")
    model.base_model_prefix = "language_model"  # as llama4_text has it
    add_adapter(model, SECTION, seed=1)
    assert sum(".lora_A." in name for name, _ in model.named_parameters()) == 14


def test_a_layer_that_is_not_there_is_named() -> None:
    wanted = "names c_attn.*no linear layers of: choose of down_proj, .*v_proj, or 'all'"
    with pytest.raises(ConfigError, match=wanted):
        add_adapter(make_model("llama"), LoraSection(targets=("q_proj", "c_attn")), seed=0)
