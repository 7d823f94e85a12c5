"""Every kind of language model: learner, engine and `score` give the model's own log-probs.

`architectures.json` has a tiny config for each type: attention of every kind, experts, states,
heads with a bias, a scale or a cap. They agree with `model(input_ids).logits`, or the model is
refused in a sentence.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import EngineSetup
from posttrain.core.data.tokens import response_batch
from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import make_tiny_tokenizer
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.models.paths import HeadShape, OutputHead, paths_of
from posttrain.core.models.stream_attention import STREAM
from posttrain.core.training.exact_kl import kl_to_policy, response_exact_kl
from posttrain.core.training.forward import check_passes, response_logprobs
from posttrain.core.training.logprobs import cut_logprobs
from posttrain.core.types import SamplingParams
from posttrain.pipelines.cli.main import app
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("architectures.json").read_text(encoding="utf-8")
)
# One of each way in which a model may differ; `make test-slow` has them all.
IN_CI = (
    "bamba cohere deepseek_v3 deepseek_v3:value_heads falcon_h1 gemma2 gpt2 gpt_oss gptj "
    "granite:scaled jamba lfm2 llama llama4_text mamba mixtral nemotron phi qwen3_5_text qwen3_moe "
    "recurrent_gemma:cap rwkv xlstm"
).split()
TOLERANCE = 1e-3
RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
PROMPTS = [[5, 9, 33, 7, 50, 21, 8, 60, 71, 12, 13], [4, 44, 18, 17, 90]]
ROWS = [(0, 6), (0, 3), (1, 9), (1, 12)]


def save(name: str, folder: Path) -> PreTrainedModel:
    """Save a model with large random weights and biases to `folder`; as it loads again."""
    config = CONFIG_MAPPING[name.split(":")[0]](**CONFIGS[name])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    numbers = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=numbers) * 0.15
        elif key.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=numbers) * 0.5
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def own_logprobs(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probs of `response` by the model itself, alone, without padding or cache."""
    logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    found: Tensor = rows.gather(-1, torch.tensor(response)[:, None])[:, 0]
    return found


def make_batch() -> tuple[RolloutBatch, list[list[int]]]:
    numbers = torch.Generator().manual_seed(1)
    responses = [torch.randint(3, 100, (n,), generator=numbers).tolist() for _, n in ROWS]
    batch = response_batch(
        prompts=[PROMPTS[prompt] for prompt, _ in ROWS],
        responses=responses,
        group_ids=[prompt for prompt, _ in ROWS],
        pad_token_id=0,
        problems=(),
    )
    return batch, responses


def start(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(TransformersEngineConfig())
    engine.start(
        EngineSetup(
            model_dir=folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
            max_batch_size=8,
            stop_token_ids=(2,),
            pad_token_id=0,
            seed=0,
        )
    )
    return engine


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in IN_CI else pytest.mark.slow, id=n) for n in CONFIGS],
)
def test_learner_engine_and_score_agree_with_the_model(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    policy = load_policy(tmp_path, RUNTIME)
    batch, responses = make_batch()
    out = response_logprobs(policy, batch, temperature=1.0)
    for row, ((prompt, length), response) in enumerate(zip(ROWS, responses, strict=True)):
        wanted = own_logprobs(model, PROMPTS[prompt], response)
        torch.testing.assert_close(out.logprobs[row, :length], wanted, rtol=0, atol=TOLERANCE)
    out.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    engine = start(tmp_path)
    groups = engine.generate(PROMPTS, SamplingParams(num_generations=3, max_tokens=14))
    for prompt_ids, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            wanted = own_logprobs(model, prompt_ids, list(completion.token_ids))
            found = torch.tensor(completion.logprobs)
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    for prompt_ids, scored in zip(PROMPTS, engine.score(PROMPTS), strict=True):
        wanted = own_logprobs(model, prompt_ids[:1], prompt_ids[1:])
        torch.testing.assert_close(torch.tensor(scored), wanted, rtol=0, atol=TOLERANCE)


HEADS = {
    "phi": HeadShape(),
    "granite:scaled": HeadShape(scale=0.125),
    "cohere": HeadShape(scale=0.0625),
    "falcon_h1": HeadShape(scale=0.3),
    "gemma2": HeadShape(cap=30.0),
    "recurrent_gemma:cap": HeadShape(cap=2.0),
    "minicpm3": HeadShape(inputs=8.0),
    "modernbert-decoder": None,  # a layer of its own lies before its output layer
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_known_by_numbers(name: str, tmp_path: Path) -> None:
    """Gradients and the exact KL go through it too."""
    model, policy = save(name, tmp_path), load_policy(tmp_path, RUNTIME)
    check_passes(policy)
    found, wanted = paths_of(policy).head, HEADS[name]
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.scale == pytest.approx(wanted.scale, rel=1e-5)
        assert (found.cap or 0.0) == pytest.approx(wanted.cap or 0.0, rel=1e-5)
        assert found.inputs == pytest.approx(wanted.inputs, rel=1e-4)
    batch, responses = make_batch()
    response_logprobs(policy, batch, temperature=1.0).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    for (prompt, _), response in zip(ROWS, responses, strict=True):
        ids = PROMPTS[prompt] + response
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        rows = logits.log_softmax(-1)[len(PROMPTS[prompt]) - 1 : -1]
        rows.gather(-1, torch.tensor(response)[:, None]).sum().backward()
    own = dict(model.named_parameters())
    for key, parameter in policy.named_parameters():
        assert parameter.grad is not None and own[key].grad is not None, key
        gap = (parameter.grad - own[key].grad).abs().max()
        assert gap <= 1e-4 * (1 + own[key].grad.abs().max()), key
    kl = response_exact_kl(policy, load_policy(tmp_path, RUNTIME), batch, 1.0, kl_to_policy)
    assert kl.abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize(
    "shape", [HeadShape(), HeadShape(scale=0.3), HeadShape(cap=2.0), HeadShape(0.5, 3.0)], ids=str
)
def test_values_and_gradients_of_the_chunked_head(
    shape: HeadShape, entropy: float, chunk: int
) -> None:
    """A bias, a scale and a cap, against all logits at once."""
    numbers = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 8, generator=numbers, dtype=torch.float64).requires_grad_() for n in (10, 30)
    )
    bias = torch.randn(30, generator=numbers, dtype=torch.float64).requires_grad_()
    targets = torch.randint(30, (10,), generator=numbers)
    values, spread, _ = cut_logprobs(
        hidden, OutputHead(weight, bias, shape), targets, Cut(), temperature=0.7, chunk=chunk
    )
    logp = (shape.of(hidden @ weight.t() + bias) / 0.7).log_softmax(-1)
    plain = logp.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(values, plain)
    wanted = plain.sum() - entropy * (logp.exp() * logp).sum()
    given = values.sum() + entropy * spread.sum()
    inputs = (hidden, weight, bias)
    found = torch.autograd.grad(given, inputs)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, inputs))


def test_states_that_are_logits_get_their_gradient() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([0, 3, 8, 3, 1])
    values, _, _ = cut_logprobs(logits, OutputHead(None), targets, Cut(), temperature=0.7)
    plain = (logits / 0.7).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(values, plain)
    (found,) = torch.autograd.grad(values.sum(), logits)
    torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), logits)[0])


def test_layers_that_do_not_pass_arguments_on_are_given_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("nemotron", tmp_path)
    policy = load_policy(tmp_path, RUNTIME)
    assert policy.config._attn_implementation == STREAM
    with caplog.at_level(logging.WARNING):
        check_passes(policy)
    assert policy.config._attn_implementation != STREAM
    (note,) = paths_of(policy).notes
    assert "model type 'nemotron': prompts are not shared in one stream, since log-probs" in note
    assert note in caplog.text


def test_the_usual_models_keep_the_fast_ways(tmp_path: Path) -> None:
    for name in ("llama", "qwen3_moe", "mistral"):
        save(name, tmp_path / name)
        policy = load_policy(tmp_path / name, RUNTIME)
        check_passes(policy)
        assert policy.config._attn_implementation == STREAM
        assert paths_of(policy).head == HeadShape() and not paths_of(policy).refused
        engine = start(tmp_path / name)
        assert engine._way == "grouped" and not paths_of(engine.model).notes


@pytest.mark.parametrize("name", ["nemotron", "llama"])
def test_validate_reports_what_is_computed_in_a_slower_way(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "model")
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "a.yaml"
    path.write_text(
        "task: {name: arithmetic}\nstages: {sft: {kind: sft, inputs: {model: base}}}\n"
        f"model: {{source: {tmp_path / 'model'}, dtype: float32}}\nengine: transformers\n"
    )
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert result.exit_code == 0, result.output
    notes = json.loads(result.stdout)["notes"]
    assert len(notes) == (2 if name == "nemotron" else 0)
    assert all(note.startswith("model type 'nemotron': ") for note in notes)


def test_a_model_that_is_not_causal_is_refused_in_a_sentence(tmp_path: Path) -> None:
    sizes = {"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    config = CONFIG_MAPPING["xlnet"](**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # type: ignore[call-arg]
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape) * 0.15
    model.save_pretrained(tmp_path)
    with pytest.raises(ResourceError, match="model type 'xlnet' cannot be used here"):
        response_logprobs(load_policy(tmp_path, RUNTIME), make_batch()[0], temperature=1.0)
    with pytest.raises(ResourceError, match="'xlnet' cannot be sampled from by the engine"):
        start(tmp_path)
