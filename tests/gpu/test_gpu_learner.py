"""The learner on CUDA: FlexAttention's stream gives what plain sequences give on a CPU in float32.

Needs a GPU, as every test in this folder that is not of `--tiny` scripts does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.data.tokens import response_batch
from posttrain.core.math.nucleus import Cut
from posttrain.core.models import stream_attention
from posttrain.core.models import stream_attention as flex_stream
from posttrain.core.models.layers import compile_layers
from posttrain.core.models.stream_attention import use_stream_attention
from posttrain.core.training.forward import response_states
from posttrain.core.training.logprobs import cut_logprobs, why_plain
from posttrain.core.training.optim import MasterOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=16),
}
# Prompt lengths, then the group and length of each response: within a block, and over several.
SHAPES = {
    "short": ([5, 12, 1], [(0, 4), (0, 7), (0, 1), (1, 9), (1, 2), (2, 6), (0, 3)]),
    "long": ([150, 20], [(0, 140), (1, 3), (0, 30), (1, 200)]),
}


def make_model(family: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            FAMILIES[family](), dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


def make_batch(shape: str) -> RolloutBatch:
    prompts, rows = SHAPES[shape]
    numbers = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 99, (count,), generator=numbers).tolist())

    made = [tokens(length) for length in prompts]
    return response_batch(
        prompts=[made[group] for group, _ in rows],
        responses=[tokens(length) for _, length in rows],
        group_ids=[group for group, _ in rows],
        pad_token_id=0,
        problems=(),
    )


def logprobs_of(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> Tensor:
    return cut_logprobs(hidden, model.get_output_embeddings().weight, targets, Cut())[0]


def whole(model: PreTrainedModel, batch: RolloutBatch, shape: str) -> Tensor:
    """Log-probs of the sampled tokens, each sequence by itself, row after row."""
    found = []
    for row, (_, length) in enumerate(SHAPES[shape][1]):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        ids = torch.cat([prompt, batch.response_ids[row, :length]])
        states = model.base_model(input_ids=ids[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        found.append(logprobs_of(model, states, ids[len(prompt) :]))
    return torch.cat(found)


def streamed(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """The same by the learner's way."""
    hidden, ids, mask, _ = response_states(model, batch, include_last=False)
    return logprobs_of(model, hidden[mask], ids[mask])


def gradients(model: PreTrainedModel, values: Tensor) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    weights = torch.randn(values.shape, generator=numbers).to(values.device)
    (values * weights).sum().backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_on_cuda_gives_the_values_and_gradients_of_whole_sequences_on_a_cpu(
    family: str, shape: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def noted(*given: object) -> Tensor:
        used.append(1)
        return flex_stream.flex_stream(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(stream_attention, "flex_stream", noted)
    batch = make_batch(shape)
    plain = make_model(family)
    expected = whole(plain, batch, shape)
    wanted = gradients(plain, expected)
    model = make_model(family).to("cuda")  # type: ignore[arg-type]
    use_stream_attention(model)
    if compiled:
        compile_layers(model)
    values = streamed(model, batch)
    found = gradients(model, values)
    assert len(used) == SIZES["num_hidden_layers"]
    torch.testing.assert_close(values.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_on_cuda_is_near_float32(family: str) -> None:
    batch = make_batch("long")
    expected = whole(make_model(family), batch, "long")
    model = make_model(family).to("cuda", torch.bfloat16)
    use_stream_attention(model)
    gap = (streamed(model, batch).detach().cpu() - expected.detach()).abs()
    assert float(gap.mean()) < 0.005 and float(gap.max()) < 0.05


def test_micro_batches_of_other_shapes_use_the_same_kernel() -> None:
    model = make_model("llama").to("cuda")  # type: ignore[arg-type]
    use_stream_attention(model)
    for shape in ("short", "long", "short"):
        batch = make_batch(shape)
        expected = whole(make_model("llama"), batch, shape).detach()
        torch.testing.assert_close(
            streamed(model, batch).detach().cpu(), expected, rtol=1e-4, atol=1e-4
        )


def test_compact_optimizer_states_are_those_of_a_cpu() -> None:
    """Weights without masters on CUDA: moments as on a CPU, weights within one bfloat16 step."""
    ends = []
    for device in ("cpu", "cuda"):
        module = torch.nn.Linear(128, 64, bias=False).to(device, torch.bfloat16)
        torch.nn.init.constant_(module.weight, 0.5)
        section = OptimizerSection(learning_rate=1e-3, rounding="stochastic")
        optimizer = MasterOptimizer(module, section, 10, seed=1)
        for step in range(5):
            numbers = torch.Generator().manual_seed(step)
            gradient = torch.randn(module.weight.shape, generator=numbers)
            module.weight.backward(gradient.to(device, torch.bfloat16))  # type: ignore[no-untyped-call]
            optimizer.step()
        moments = optimizer.optimizer.state[optimizer._masters[0]]["exp_avg"]
        ends.append((moments.cpu(), module.weight.detach().float().cpu()))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-4, atol=1e-6)
    assert float((ends[0][1] - ends[1][1]).mean().abs()) < 1e-4  # the noise is another one


def test_8_bit_moments_on_cuda_are_those_of_a_cpu() -> None:
    pytest.importorskip("bitsandbytes", reason="pip install 'posttrain[low-memory]'")
    ends = []
    for device in ("cpu", "cuda"):
        module = torch.nn.Linear(128, 64, bias=False).to(device)
        torch.nn.init.constant_(module.weight, 0.5)
        optimizer = MasterOptimizer(module, OptimizerSection(moments="8bit"), 10)
        for step in range(5):
            numbers = torch.Generator().manual_seed(step)
            gradient = torch.randn(module.weight.shape, generator=numbers)
            module.weight.backward(gradient.to(device))  # type: ignore[no-untyped-call]
            optimizer.step()
        ends.append(module.weight.detach().cpu())
    # Codes may differ by one where a value lies between two: 3 % of a step of 1e-5 each.
    assert float((ends[0] - ends[1]).abs().max()) < 2e-5
    assert float((ends[0] - ends[1]).abs().mean()) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_s_kernels_give_what_plain_operations_do_on_a_cpu(temperature: float) -> None:
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 64, generator=numbers)
    weight = torch.randn(5000, 64, generator=numbers)
    targets = torch.randint(5000, (700,), generator=numbers)
    assert why_plain(torch.device("cuda"), compiled=False) is None

    def found(device: str, dtype: torch.dtype) -> list[Tensor]:
        given = [x.to(device, dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        given_targets = targets.to(device)
        values = cut_logprobs(*given, given_targets, Cut(), temperature=temperature)[:2]
        (values[0].sum() + 0.1 * values[1].sum()).backward()  # type: ignore[no-untyped-call]
        results = [*values, *(x.grad for x in given if x.grad is not None)]
        return [x.detach().cpu().double() for x in results]

    for left, right in zip(found("cuda", torch.float32), found("cpu", torch.float64), strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4 * scale)
