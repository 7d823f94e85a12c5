"""Rollout engines in tokens per second, on the same prompts in the same run; prints one JSON line.

`vllm_raw` is the best plain use of vLLM: `LLM.generate` with n samples of each prompt, log-probs of
the sampled tokens, no seeds. Rounds alternate between it and our engine on one and the same running
vLLM (our engine's own), so that neither a busy machine nor a lucky start favours one; `ratio` is
the median over rounds of ours / raw. The other engines are timed after it, for information.

    python tests/bench/rollout.py [--json] [--rounds 7] [--server] [--model DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from posttrain.core.config.sections import ModelSection
from posttrain.core.contracts import EngineSetup, RolloutEngine
from posttrain.core.models.source import obtain
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import SamplingParams

MAX_LEN = 512


def prompts_of(folder: Path, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"Question {i}: what is {37 * i % 91} plus {53 * i % 87}?" for i in range(count)]
    return [tokenizer.encode(text) for text in texts]


def tokens_per_second(sample: Callable[[int], int], seed: int) -> float:
    began = time.perf_counter()
    tokens = sample(seed)
    return tokens / (time.perf_counter() - began)


def sampler_of(
    engine: RolloutEngine[Any], prompts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> Callable[[int], int]:
    """A call that samples with a seed and returns how many tokens came."""

    def sample(seed: int) -> int:
        params = SamplingParams(arguments.generations, max_tokens=arguments.tokens, seed=seed)
        return sum(len(c.token_ids) for group in engine.generate(prompts, params) for c in group)

    return sample


def raw_sampler(
    llm: Any, prompts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> Callable[[int], int]:
    """The same with vLLM alone, on a running `LLM`."""
    from vllm import SamplingParams as Request

    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]

    def sample(_: int) -> int:
        request = Request(
            n=arguments.generations,
            max_tokens=arguments.tokens,
            temperature=1.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        outputs = llm.generate(inputs, request, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return sample


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    folder = arguments.model or obtain(ModelSection(), arguments.home / "models").path
    prompts = prompts_of(folder, arguments.prompts)
    setup = EngineSetup(
        model_dir=folder,
        dtype=torch.bfloat16,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        max_model_len=MAX_LEN,
        max_batch_size=arguments.prompts * arguments.generations,
        stop_token_ids=(),  # every response has its full length, so that all do the same work
        pad_token_id=0,
        seed=0,
    )
    manager, found = PluginManager(), {}
    engine: Any = manager.build(RolloutEngine, "vllm", {})
    engine.start(setup)
    rows: dict[str, list[float]] = {"vllm": [], "vllm_raw": []}
    samplers = {
        "vllm": sampler_of(engine, prompts, arguments),
        "vllm_raw": raw_sampler(engine._llm, prompts, arguments),
    }
    for number in range(arguments.rounds + 1):
        order = list(samplers) if number % 2 else list(samplers)[::-1]
        for name in order:
            rate = tokens_per_second(samplers[name], number)
            if number:  # the first round warms up
                rows[name].append(rate)
    engine.close()
    ratios = [ours / raw for ours, raw in zip(rows["vllm"], rows["vllm_raw"], strict=True)]
    for name in ("transformers", *(("vllm_server",) if arguments.server else ())):
        other: Any = manager.build(RolloutEngine, name, {})
        other.start(setup)
        sample = sampler_of(other, prompts, arguments)
        sample(0)
        rows[name] = [tokens_per_second(sample, 1 + number) for number in range(3)]
        other.close()
    found = {name: round(statistics.median(rates), 1) for name, rates in rows.items()}
    return {
        "benchmark": "rollout",
        "tokens_per_s": found,
        "best_tokens_per_s": {name: round(max(rates), 1) for name, rates in rows.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_of_best": round(max(rows["vllm"]) / max(rows["vllm_raw"]), 3),
        "responses": arguments.prompts * arguments.generations,
        "tokens_each": arguments.tokens,
        "model": folder.name,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--server", action="store_true", help="time vllm_server too (a minute)")
    parser.add_argument("--model", type=Path, default=None, help="default: the bundled SmolLM2")
    parser.add_argument("--home", type=Path, default=Path(".posttrain"))
    chosen = parser.parse_args()
    result = measure(chosen)
    if not chosen.json:
        print(f"{'engine':14s} tokens/s")
        for engine_name, rate in result["tokens_per_s"].items():  # type: ignore[attr-defined]
            print(f"{engine_name:14s} {rate}")
        print(f"vllm / vllm_raw: {result['ratio']}")
    print(json.dumps(result))
