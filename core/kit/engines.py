"""What rollout engines promise, in a basic round on a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from posttrain.core.contracts import (
    EngineSetup,
    RolloutEngine,
)
from posttrain.core.kit.batches import expect_same
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.types import SamplingParams

STOP = (30, 41, 52, 63, 74, 85, 96)
"""Characters that end a response: enough that a random model soon says one."""
TEXTS = ("What is 2+3?", "Hi", "Count: 1, 2, 3")
TOLERANCE = 2e-3
"""Nats between an engine's log-probs and those of transformers, in float32."""


@contextmanager
def _running(subject: Subject) -> Iterator[tuple[RolloutEngine[Any], Path]]:
    """The engine on a tiny model, and the model's folder. Any: engines of any config."""
    reason = subject.cls.unavailable_reason()
    if reason is not None:
        raise Skipped(f"it cannot run here: {reason}")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", init_std=0.25)
        engine: RolloutEngine[Any] = subject.build()
        setup = EngineSetup(
            model_dir=model,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=128,
            max_batch_size=16,
            stop_token_ids=STOP,
            pad_token_id=0,
            seed=3,
        )
        try:
            engine.start(setup)
            yield engine, model
        finally:
            engine.close()
            engine.close()


def _logprobs(folder: Path, ids: Sequence[int]) -> Tensor:
    """Log-probs [T, V] of a plain forward pass."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    with torch.no_grad():
        found: Tensor = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return found


@check("responses have the model's log-probs, end where they should, and repeat", "rollout_engine")
def _responses(subject: Subject) -> None:
    tokenizer = make_tiny_tokenizer()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    params = SamplingParams(num_generations=2, max_tokens=9, seed=2**63 - 1)  # the largest there is
    with _running(subject) as (engine, folder):
        expect_equal(engine.generate([], params), [], "responses to no prompt")
        groups = engine.generate(prompts, params)
        expect_equal([len(group) for group in groups], [2] * len(prompts), "responses by prompt")
        expect(engine.generate(prompts, params) == groups, "the same seed gives other responses")
        for prompt, group in zip(prompts, groups, strict=True):
            for found in group:
                ids, count = list(found.token_ids), len(found.token_ids)
                expect(1 <= count <= 9, f"a response has {count} tokens, expected 1 to 9")
                expect_equal(len(found.logprobs), count, "log-probs of a response")
                ended = ids[-1] in STOP
                expect_equal(found.finish_reason, "stop" if ended else "length", "finish_reason")
                expect(not set(ids[:-1]) & set(STOP), "a response goes on after its end")
                expect_equal(found.policy_version, 0, "policy_version")
                rows = _logprobs(folder, [*prompt, *ids])[len(prompt) - 1 : -1]
                wanted = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0]
                expect_same(torch.tensor(found.logprobs), wanted, "log-probs", atol=TOLERANCE)


@check("greedy is the model's argmax, and scores are its log-probs", "rollout_engine")
def _greedy(subject: Subject) -> None:
    prompt = make_tiny_tokenizer().encode(TEXTS[0])
    with _running(subject) as (engine, folder):
        ((found,),) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0))
        ids = [*prompt, *found.token_ids]
        rows = _logprobs(folder, ids)[:-1]
        best = rows.argmax(-1)[len(prompt) - 1 :]
        expect_equal(list(found.token_ids), best.tolist(), "the greedy response")
        (scores,) = engine.score([ids])
        wanted = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        expect_same(torch.tensor(scores), wanted, "scores", atol=TOLERANCE)


@check("it answers with the weights that it was given last", "rollout_engine")
def _weights(subject: Subject) -> None:
    prompt = make_tiny_tokenizer().encode(TEXTS[0])
    with _running(subject) as (engine, _), tempfile.TemporaryDirectory() as folder:
        other = make_tiny_model(Path(folder) / "other", seed=1, init_std=0.25)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            other, dtype=torch.float32, trust_remote_code=False
        )
        engine.sync_weights(iter(model.state_dict().items()), 7)
        ((found,),) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0))
        best = _logprobs(other, [*prompt, *found.token_ids])[:-1].argmax(-1)[len(prompt) - 1 :]
        expect_equal(list(found.token_ids), best.tolist(), "the greedy response of new weights")
        expect_equal(found.policy_version, 7, "policy_version after weights of version 7")
