"""Requests to vLLM's `/v1/completions` and what its answers say: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.errors import RunError
from posttrain.core.rollout_sampling import ENTROPY_TOKENS, top_entropy
from posttrain.core.serving.replicas import Json
from posttrain.core.types import Completion, FinishReason, SamplingParams

PATH = "/v1/completions"


def sampling_request(
    model: str,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    max_tokens: int,
    stop_token_ids: Sequence[int],
) -> Json:
    request: Json = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": seed,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": ENTROPY_TOKENS if params.entropy else 0,  # 0: of the sampled token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params.stop_strings:
        request |= {"stop": list(params.stop_strings), "include_stop_str_in_output": True}
    return request


def read_completion(
    answer: Json,
    params: SamplingParams,
    stop_token_ids: Sequence[int],
    origin: Mapping[str, Any],  # Any: the fields of `Completion` that the engine knows
) -> Completion:
    try:
        choice = answer["choices"][0]
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        reason = _finish_reason(choice["finish_reason"], ids, stop_token_ids)
        entropies: tuple[float, ...] = ()
        if params.entropy:
            rows = choice["logprobs"]["top_logprobs"]
            entropies = tuple(top_entropy([*row.values()], params.temperature) for row in rows)
        if not ids or len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(
            f"a vLLM server's answer is no completion with token ids and log-probs ({error}): use "
            "a server of the version that docs/engines.md names"
        ) from error
    return Completion(
        token_ids=ids, logprobs=logprobs, finish_reason=reason, entropies=entropies, **origin
    )


def _finish_reason(said: str, ids: Sequence[int], stop_token_ids: Sequence[int]) -> FinishReason:
    if said == "length":
        return "length"
    if said != "stop":
        raise ValueError(f"finish reason '{said}'")
    return "stop" if ids[-1] in stop_token_ids else "stop_string"


def scoring_request(model: str, ids: Sequence[int]) -> Json:
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def read_scores(answer: Json, ids: Sequence[int]) -> list[float]:
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(ids[1:], entries[1:], strict=True)
        return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(
            f"a vLLM server did not give the log-probs of the tokens it was sent ({error}): use a "
            "server of the version that docs/engines.md names"
        ) from error
