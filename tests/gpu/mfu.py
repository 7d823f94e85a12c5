"""Model FLOPs utilisation of one policy update on one GPU; prints one JSON line.

A Qwen2-like model of 1.5 billion random weights in bfloat16, one GRPO update of groups of random
tokens by the learner's stream. `mfu` is 6 x parameters x response tokens / seconds / the peak:
tokens without a loss (prompts) count as no work, nor do attention and anything computed again.
`mfu_stream` counts what tests/bench/learner.py calls useful FLOPs: the layers for prompt tokens
too, each prompt once. With `--trl DIR` the same batch goes through TRL's GRPOTrainer loss and an
AdamW without master weights, as that trainer makes it, after ours.

    python tests/gpu/mfu.py [--prompts 16 --generations 8 --prompt-tokens 512 --tokens 512]
    pip install --no-deps --target .posttrain/trl trl==1.16.0
    python tests/gpu/mfu.py --compile --micro 32 --trl .posttrain/trl

`--tiny` is a model of 2 layers, to see that the script runs; it needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config  # noqa: E402

from posttrain.core.batch import RolloutBatch  # noqa: E402
from posttrain.core.config.sections import OptimizerSection  # noqa: E402
from posttrain.core.contracts import Aggregator, PolicyLoss  # noqa: E402
from posttrain.core.kit.tiny import make_tiny_tokenizer  # noqa: E402
from posttrain.core.models.layers import compile_layers, use_checkpointing  # noqa: E402
from posttrain.core.models.sharded import use_autocast  # noqa: E402
from posttrain.core.models.stream_attention import use_stream_attention  # noqa: E402
from posttrain.core.plugin_manager import PluginManager  # noqa: E402
from posttrain.core.training.learner import Learner  # noqa: E402
from posttrain.core.training.objective import LossTerm, Objective  # noqa: E402
from posttrain.core.training.optim import MasterOptimizer  # noqa: E402
from posttrain.core.training.updates import UpdateSettings  # noqa: E402
from tests.bench.learner import (  # noqa: E402
    PeakMemory,
    gemm_rate,
    make_batch,
    seconds_of,
    useful_flops,
)

RATE = 1e-6


def make_model(options: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The shape of Qwen2.5-1.5B, or a tiny one; weights are random."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936}
    if options.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    config = Qwen2Config(**sizes, **heads, max_position_embeddings=32768, tie_word_embeddings=True)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if options.dtype == "bfloat16" else torch.float32,
            attn_implementation="sdpa",
        )
    if options.dtype == "autocast":
        use_autocast(model, torch.bfloat16)
    return model.eval()


def our_update(
    model: PreTrainedModel, options: argparse.Namespace
) -> tuple[Callable[[RolloutBatch], object], Callable[[], None]]:
    """One update by the learner, and what frees its memory."""
    manager = PluginManager()
    mean = manager.build(Aggregator, "token-mean")
    term = LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), mean, 1.0)
    use_stream_attention(model)
    if options.checkpointing:
        use_checkpointing(model)
    if options.compile:
        compile_layers(model)
    section = OptimizerSection(
        learning_rate=RATE, moments=options.moments, rounding=options.rounding
    )
    optimizer = MasterOptimizer(model, section, 1000)
    settings = UpdateSettings(1, 1, options.micro, 1.0, 0)
    learner = Learner(model, optimizer, Objective((term,), mean), settings)
    return lambda batch: learner.update(batch, 0, 0.0), optimizer.close


def trl_update(
    model: PreTrainedModel, options: argparse.Namespace
) -> tuple[Callable[[RolloutBatch], object], Callable[[], None]]:
    """The same by TRL's loss and the optimizer that its trainer makes."""
    sys.path.insert(0, str(options.trl))
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model.set_attn_implementation("sdpa")
    folder = tempfile.mkdtemp()
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.trl_micro,
        num_generations=options.generations,
        max_completion_length=options.tokens,
        learning_rate=RATE,
        beta=0.0,
        bf16=False,
        use_cpu=model.device.type == "cpu",
        report_to=[],
        gradient_checkpointing=options.checkpointing,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * options.prompts),
        processing_class=make_tiny_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    device = model.device

    def update(batch: RolloutBatch) -> None:
        model.train()
        total = batch.mask.sum().to(device)
        for rows in torch.split(torch.arange(len(batch)), options.trl_micro):
            micro = batch.select(rows)
            given = {
                "prompt_ids": micro.prompt_ids,
                "prompt_mask": micro.prompt_mask,
                "completion_ids": micro.response_ids,
                "completion_mask": micro.response_mask,
                "advantages": micro.column("advantages")[:, 0],
            }
            inputs = {name: value.to(device) for name, value in given.items()}
            inputs["completion_mask"] = inputs["completion_mask"].long()
            inputs["prompt_mask"] = inputs["prompt_mask"].long()
            inputs["num_items_in_batch"] = total
            trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    return update, trainer.optimizer.state.clear


def measure_side(
    make: Any, options: argparse.Namespace, device: torch.device
) -> dict[str, float | None]:
    """One side by itself, with a model of its own: both do not fit next to each other."""
    model = make_model(options, device)
    batch = make_batch(options, model.config.vocab_size)
    update, close = make(model, options)
    first = seconds_of(lambda: update(batch), device)  # compiles, fills the allocator
    memory = PeakMemory(device)
    times = [seconds_of(lambda: update(batch), device) for _ in range(options.rounds)]
    found = {
        "seconds": statistics.median(times),
        "first_seconds": first,
        "peak_gb_above_the_start": memory.result(),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "useful_flops": useful_flops(batch, model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": int(batch.mask.sum()),
    }
    close()
    model.zero_grad()
    return found


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Ours, TRL after it if asked for, and the rate of a large product before both."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not options.tiny:
        raise SystemExit("mfu.py: torch finds no CUDA device; --tiny runs without one")
    rate = gemm_rate(torch.bfloat16, device, 8192 if device.type == "cuda" else 256)
    sides: dict[str, Any] = {"ours": our_update} | ({"trl": trl_update} if options.trl else {})
    found: dict[str, dict[str, Any]] = {}
    for name, make in sides.items():
        try:
            found[name] = measure_side(make, options, device)
        except torch.OutOfMemoryError:
            if name == "ours":
                raise
        gc.collect()  # a model and what was compiled for it hold each other
    ours, peak = found["ours"], options.peak_tflops * 1e12
    seconds, tokens = ours["seconds"], ours["tokens"]

    def of_sides(what: str, digits: int) -> dict[str, float]:
        return {n: round(f[what], digits) for n, f in found.items() if f[what] is not None}

    return {
        "benchmark": "mfu",
        "mfu": 6.0 * ours["parameters"] * tokens / seconds / peak,
        "mfu_stream": ours["useful_flops"] / seconds / peak,
        "gemm_tflops": round(rate / 1e12, 1),
        "response_tokens_per_s": round(tokens / seconds),
        "seconds": of_sides("seconds", 4),
        "first_seconds": of_sides("first_seconds", 1),
        "times_trl": round(found["trl"]["seconds"] / seconds, 2) if "trl" in found else None,
        "out_of_memory": [name for name in sides if name not in found],
        "peak_gb": of_sides("peak_gb", 2),
        "peak_gb_above_the_start": of_sides("peak_gb_above_the_start", 2),
        "parameters": ours["parameters"],
        "response_tokens": tokens,
        "shape": f"{options.prompts} x {options.prompt_tokens} + {options.generations} x "
        f"{options.tokens}",
        "micro_batch": {"ours": options.micro, "trl": options.trl_micro},
        "precision": f"{options.dtype}, {options.rounding}, moments {options.moments}",
        "compiled": options.compile,
        "checkpointing": options.checkpointing,
        "peak_tflops": options.peak_tflops,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--tiny` makes everything small."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="2 layers; runs without a GPU")
    parser.add_argument("--trl", type=Path, default=None, help="the folder that TRL is in")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro", type=int, default=16, help="responses in a micro-batch")
    parser.add_argument("--trl-micro", type=int, default=0, help="of TRL; default: that of ours")
    parser.add_argument("--compile", action="store_true", help="our layers under torch.compile")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "autocast"], default="bfloat16")
    parser.add_argument("--rounding", choices=["masters", "stochastic"], default="masters")
    parser.add_argument("--moments", choices=["float32", "8bit"], default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="of the GPU, dense")
    options = parser.parse_args(arguments)
    options.ragged, options.same_tokens = False, 0
    if options.tiny:
        options.prompts, options.generations, options.micro = 2, 2, 2
        options.prompt_tokens, options.tokens, options.rounds = 5, 6, 1
    options.trl_micro = options.trl_micro or options.micro
    return options


if __name__ == "__main__":
    print(json.dumps(measure(parse())))
