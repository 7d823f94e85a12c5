"""How far engine and trainer are apart, and what the checks cost; prints one JSON line.

A real learner takes updates on what the engine samples, and the engine is synced after each. Under
each sampling distribution the tokens' log-probs are compared before the first update and after the
last.

python tests/bench/mismatch.py --json
python tests/bench/mismatch.py --engine vllm --model smollm2 --dtype bfloat16 --rate 1e-5 --json
python tests/bench/mismatch.py --engine vllm --model smollm2 --dtype bfloat16 --texts 200 --json

`--texts N` takes no update: N pieces of Python's manual are scored by both, which shows how
far the tail of the gaps reaches that a check of few tokens meets by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

import torch  # noqa: E402

from posttrain.core.config.sections import ModelSection  # noqa: E402
from posttrain.core.data.tokens import ChatTokenizer  # noqa: E402
from posttrain.core.errors import RunError  # noqa: E402
from posttrain.core.kit.tiny import make_tiny_model  # noqa: E402
from posttrain.core.math.nucleus import Cut  # noqa: E402
from posttrain.core.models.source import obtain  # noqa: E402
from posttrain.core.training.forward import UNCUT  # noqa: E402
from posttrain.core.training.sync_check import BOUNDS, PROBE_LENGTH, SyncCheck  # noqa: E402
from posttrain.core.types import SamplingParams  # noqa: E402
from tests.helpers.mismatch import Rig, make_rig  # noqa: E402
from tests.helpers.updates import update  # noqa: E402

LAWS = {"plain": (1.0, 1.0, 0), "cut": (0.7, 0.8, 20)}
SHOWN = ("mismatch/abs_max", "mismatch/abs_mean", "mismatch/k3", "ess/token", "ess/seq")


def measure(rig: Rig, updates: int) -> dict[str, object]:
    """Before the first update, after the last, the probe, and the seconds of each part."""
    began = time.perf_counter()
    start = rig.check.after("the start")
    check_s = [time.perf_counter() - began]
    steps = []
    for _ in range(updates + 1):
        began = time.perf_counter()
        rig.step()
        steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        rig.check.after("the same weights")
        check_s.append(time.perf_counter() - began)
    probe = [start, *rig.metrics]
    return {
        "before": {name: rig.metrics[0][name] for name in SHOWN},
        "after": {name: rig.metrics[-1][name] for name in SHOWN},
        "probe_abs_max": max(m["sync/probe_abs_max"] for m in probe),
        "probe_abs_mean": max(m["sync/probe_abs_mean"] for m in probe),
        "probe_change": [m["sync/probe_change"] for m in rig.metrics],
        "tokens": int(rig.sample().mask.sum()),
        "step_s": min(steps),
        "check_s": min(check_s),
        "skipped_sync": skipped_sync(rig),
    }


def skipped_sync(rig: Rig) -> str:
    """What the check says when one more update is never given to the engine."""
    rig.engine.differing_weights = lambda weights: None  # type: ignore[method-assign]
    update(rig.learner, rig.sample(), 99, 0.0)
    try:
        rig.check.after("a sync that was skipped")
    except RunError as error:
        return str(error)
    return "not noticed"


def cut_seconds(rig: Rig) -> dict[str, float]:
    """A forward pass over a rollout without and with the mass that a cut keeps."""
    batch, learner = rig.sample(), rig.learner
    found: dict[str, float] = {"tokens": float(batch.mask.sum())}
    for name, cut in (("plain", UNCUT), ("top_p", Cut(0, 0.8)), ("both", Cut(20, 0.8))):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            learner.forward_only(learner.model, batch, cut=cut)
            seconds.append(time.perf_counter() - began)
        found[name] = min(seconds)
    return found


def gaps_of_texts(rig: Rig, tokenizer: ChatTokenizer, count: int) -> dict[str, object]:
    """Largest, mean and quantiles of the gaps on `count` pieces, and of the means of two each."""
    tokens = tokenizer.encode_response("\n".join(topics.values())[:100_000])
    starts = range(0, len(tokens) - PROBE_LENGTH, len(tokens) // count)
    pieces = [tokens[start : start + PROBE_LENGTH] for start in starts][:count]
    gap = SyncCheck(rig.engine, rig.learner.model, pieces).answers().gap
    checks = gap.view(-1, 2 * (PROBE_LENGTH - 1))  # a check looks at two pieces
    largest = checks.amax(1)
    bounds = BOUNDS[rig.learner.model.dtype]
    clipped = checks.clamp(max=bounds.largest).mean(1)
    far = (checks > bounds.largest).double().mean(1)
    return {
        "num_tokens": len(gap),
        "largest": float(gap.max()),
        "mean": float(gap.mean()),
        "quantiles": {str(q): float(gap.quantile(q)) for q in (0.5, 0.9, 0.99, 0.999)},
        "largest_of_a_check": {str(q): float(largest.quantile(q)) for q in (0.5, 0.99)},
        "checks": len(checks),
        "checks_stopped": int(((far > bounds.spared) | (clipped > bounds.mean)).sum()),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--distributions", nargs="*", choices=list(LAWS), default=list(LAWS))
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--texts", type=int, default=0, help="score this many texts, no more")
    parser.add_argument("--json", action="store_true", help="one line, for machines")
    options = parser.parse_args()
    result: dict[str, object] = {
        name: getattr(options, name) for name in ("engine", "model", "dtype", "rate", "updates")
    }
    result |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        smollm2 = options.model == "smollm2"
        model = obtain(ModelSection(), cache).path if smollm2 else make_tiny_model(cache / "tiny")
        for distribution in options.distributions:
            temperature, top_p, top_k = LAWS[distribution]
            params = SamplingParams(8, 16, temperature, top_p, top_k, seed=1)
            dtype = getattr(torch, options.dtype)
            rig = make_rig(
                options.engine,
                model,
                params,
                dtype=dtype,
                rate=options.rate,
                num_prompts=options.prompts,
            )
            try:
                if options.texts:
                    texts = gaps_of_texts(rig, ChatTokenizer.load(model), options.texts)
                    result["texts"] = texts
                    break
                if distribution == options.distributions[0]:
                    result["forward_s"] = cut_seconds(rig)
                result[distribution] = measure(rig, options.updates)
            finally:
                rig.engine.close()
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
