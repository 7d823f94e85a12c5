"""What measuring the gradient weights of tokens costs: updates with and without it in turn.

A GRPO update (forward, backward, AdamW) of a random Llama, the rollout left out: a whole step also
samples, so its share is smaller. Prints one JSON line.

python tests/bench/token_weights.py                       # 64 responses of 256 tokens
python tests/bench/token_weights.py --rows 128 --tokens 2 --hidden 64 --layers 1 --vocab 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.batch import RolloutBatch  # noqa: E402
from posttrain.core.config.sections import OptimizerSection  # noqa: E402
from posttrain.core.contracts import Aggregator, PolicyLoss  # noqa: E402
from posttrain.core.data.tokens import response_batch  # noqa: E402
from posttrain.core.models.stream_attention import use_stream_attention  # noqa: E402
from posttrain.core.plugin_manager import PluginManager  # noqa: E402
from posttrain.core.training.learner import Learner  # noqa: E402
from posttrain.core.training.metrics import MetricSums  # noqa: E402
from posttrain.core.training.objective import LossTerm, MicroLoss, Objective  # noqa: E402
from posttrain.core.training.optim import MasterOptimizer  # noqa: E402
from posttrain.core.training.token_weights import HeardWeights  # noqa: E402
from posttrain.core.training.updates import UpdateSettings  # noqa: E402


def made_batch(rows: int, tokens: int, vocab: int) -> RolloutBatch:
    """Groups of eight; responses between half the length and all of it."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=draw).tolist()

    prompts = [ids(16) for _ in range(-(-rows // 8))]
    responses = [ids(tokens - (i * 7) % max(1, tokens // 2)) for i in range(rows)]
    batch = response_batch(
        prompts=[prompts[i // 8] for i in range(rows)],
        responses=responses,
        group_ids=[i // 8 for i in range(rows)],
        pad_token_id=0,
        problems=(),
        response_logprobs=[[-1.0] * len(one) for one in responses],
    )
    signs = torch.randn(rows, 1, generator=draw)
    return batch.with_columns(advantages=signs * batch.mask)


def made_learner(options: argparse.Namespace, *, measured: bool) -> Learner:
    """A learner of its own model, with PPO's clip."""
    torch.manual_seed(0)
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    model = LlamaForCausalLM(config).eval()
    use_stream_attention(model)
    manager = PluginManager()
    mean = manager.build(Aggregator, "token-mean", {})
    objective = Objective((LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), mean),), mean)
    settings = UpdateSettings(1, 1, options.micro, 1.0, 0, token_weights=measured)
    section = OptimizerSection(learning_rate=1e-5)
    return Learner(model, MasterOptimizer(model, section, 10_000), objective, settings)


def own_time(batch: RolloutBatch, repeats: int = 20) -> float:
    """Seconds that noting and summing up the weights of one update takes, by itself."""
    weights = batch.column("advantages") / batch.mask.sum()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        heard = HeardWeights(batch)
        leaf = torch.zeros_like(weights, requires_grad=True)
        everything = torch.arange(len(batch))
        heard.listen(MicroLoss(leaf, {}, {}, logprobs=leaf), everything)
        leaf.backward(weights)  # type: ignore[no-untyped-call]
        heard.record(MetricSums())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Both ways in turn, by the median of the differences of neighbours; and what is new alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("rows", 64),
        ("tokens", 256),
        ("hidden", 256),
        ("layers", 4),
        ("vocab", 8192),
        ("micro", 16),
        ("repeats", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = made_batch(options.rows, options.tokens, options.vocab)
    ways = {measured: made_learner(options, measured=measured) for measured in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(options.repeats + 1):
        for measured in (False, True) if repeat % 2 else (True, False):
            began = time.perf_counter()
            ways[measured].update(batch, repeat, 0.0)
            if repeat:  # the first is a warm-up
                times[measured].append(time.perf_counter() - began)
    extra = [b - a for a, b in zip(times[False], times[True], strict=True)]
    without = statistics.median(times[False])
    print(
        json.dumps(
            {
                "update_s": round(without, 5),
                "measured_s": round(statistics.median(times[True]), 5),
                "difference_percent": round(100 * statistics.median(extra) / without, 2),
                "own_time_percent": round(100 * own_time(batch) / without, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
