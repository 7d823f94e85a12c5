"""A teacher behind a server: vLLM's `prompt_logprobs` of the tokens that the policy sampled."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.teachers import TeacherSection
from posttrain.core.contracts import PromptGroup, SampledGroup
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.rollout.vllm_server import read_completion, sampling_request
from posttrain.core.runtime.http_client import Json, Unreachable, ask, make_client
from posttrain.core.training.teacher_pass import TeacherScores
from posttrain.core.training.updates import Check, PolicyLearner
from posttrain.core.types import Completion, SamplingParams

if TYPE_CHECKING:
    import aiohttp

PROBE = "Two plus 3 is 5.\n\tÄpfel, 你好 🙂 def f(x):"
TRIES = 4
LONGEST_SAID = 200


class Encodes(Protocol):
    """A tokenizer, as far as it is compared with the server's."""

    def encode_text(self, text: str, *, special: bool) -> tuple[int, ...]:
        """A text's tokens."""


class NoAnswer(RunError):
    """A server that could not be reached."""


class ServerAway(ResourceError):
    """The same, before a run."""


class TeacherServer:
    """A teacher by the URL of a vLLM server, asked for whole sequences at temperature 1.

    Log-probs are of the whole vocabulary. The key is in no message.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        name: str,
        *,
        api_key_env: str | None = None,
        timeout_s: float = 120.0,
        at_once: int = 16,
    ) -> None:
        self.base_url, self.model, self.name = base_url.rstrip("/"), model, name
        self._timeout_s, self._at_once, self._key_env = timeout_s, at_once, api_key_env
        self._key = _key(api_key_env)

    def check(self, tokenizer: Encodes, *, top_k: int = 0, longest: int = 0) -> None:
        """Raise `ResourceError` unless the server gives log-probs of the policy's own tokens.

        It must give `top_k` candidates, and take prompt and response of `longest` tokens. The error
        is a `ServerAway` where nobody answers.
        """
        asyncio.run(self._check(tokenizer.encode_text(PROBE, special=False), top_k, longest))

    async def _check(self, ids: Sequence[int], top_k: int, longest: int) -> None:
        async with await self._client() as client:
            root = self.base_url.removesuffix("/v1")
            request = {"model": self.model, "prompt": PROBE, "add_special_tokens": False}
            try:
                found = await ask(client, f"{root}/tokenize", request)
                theirs = json.loads(found.text).get("tokens") if found.status == 200 else None
            except (Unreachable, ValueError, AttributeError):
                theirs = None  # not a route of every server; the next question tells
            if theirs is not None and theirs != list(ids):
                raise ResourceError(
                    f"{self._who} has another tokenizer than the policy: of a test sentence it "
                    f"makes {len(theirs)} tokens, the policy {len(ids)}, with other ids; use a "
                    "teacher of the policy's family"
                )
            limit = await self._longest(client)
            if limit is not None and limit <= longest:
                raise ResourceError(
                    f"{self._who} takes {limit} tokens, and a response with its prompt may have "
                    f"model.max_model_len = {longest}, next to which vLLM wants room for one more: "
                    f"start it with --max-model-len {longest + 1}, or lower model.max_model_len"
                )
            try:
                entries = await self._ask(client, ids, top_k, tries=1)
            except NoAnswer as error:
                raise ServerAway(str(error)) from error
            except RunError as error:
                raise ResourceError(str(error)) from error
            if not all(
                str(token) in entry for token, entry in zip(ids[1:], entries[1:], strict=True)
            ):
                raise ResourceError(
                    f"{self._who} gives log-probs of other tokens than it was sent: use a vLLM "
                    "server, or give the teacher's folder as `model`"
                )

    async def _longest(self, client: aiohttp.ClientSession) -> int | None:
        """The tokens that the server takes at most, if it says so, as vLLM does."""
        try:
            served = json.loads((await ask(client, f"{self.base_url}/models", None)).text)["data"]
            limits = [one["max_model_len"] for one in served if one["id"] == self.model]
        except (Unreachable, ValueError, LookupError, TypeError):
            return None
        return limits[0] if limits and isinstance(limits[0], int) else None

    def check_sampling(self, tokenizer: Encodes) -> None:
        """Raise `ResourceError` unless the server samples, and says which tokens it sampled.

        The error is a `ServerAway` where nobody answers.
        """
        prompt = tokenizer.encode_text(PROBE, special=False)
        request = sampling_request(self.model, prompt, SamplingParams(max_tokens=1), 0, 1, ())
        try:
            self._completion(asyncio.run(self._once(request)), SamplingParams(max_tokens=1), (), 0)
        except NoAnswer as error:
            raise ServerAway(str(error)) from error
        except RunError as error:
            raise ResourceError(str(error)) from error

    async def _once(self, request: Json) -> str:
        async with await self._client() as client:
            return await self._post(client, request, tries=1)

    def sample(
        self,
        prompts: Sequence[PromptGroup],
        params: SamplingParams,
        *,
        ends: Sequence[int],
        check: Check,
    ) -> list[SampledGroup]:
        """`params.num_generations` answers of the teacher to each prompt, in order.

        `ends` are the tokens that end an answer. A second call may give others.
        """
        check()
        found = asyncio.run(self._sample(prompts, params, ends))
        check()
        return found

    async def _sample(
        self, prompts: Sequence[PromptGroup], params: SamplingParams, ends: Sequence[int]
    ) -> list[SampledGroup]:
        slots = asyncio.Semaphore(self._at_once)
        async with await self._client() as client:

            async def answer(prompt: PromptGroup, seed: int) -> Completion:
                request = sampling_request(
                    self.model, prompt.prompt_ids, params, seed, params.max_tokens, ends
                )
                async with slots:
                    return self._completion(await self._post(client, request), params, ends, seed)

            n, first = params.num_generations, params.seed
            asked = [
                asyncio.gather(*(answer(p, (first + i * n + j) % 2**31) for j in range(n)))
                for i, p in enumerate(prompts)
            ]
            answers = await asyncio.gather(*asked)
        return [SampledGroup(p, tuple(a)) for p, a in zip(prompts, answers, strict=True)]

    def _completion(
        self, said: str, params: SamplingParams, ends: Sequence[int], seed: int
    ) -> Completion:
        origin = {
            "policy_version": 0,
            "seed": seed,
            "engine": "teacher's server",
            "engine_version": "",
        }
        try:
            return read_completion(json.loads(said), params, ends, origin)
        except (RunError, ValueError) as error:
            raise RunError(
                f"{self._who} gives no tokens of what it samples: use a vLLM server, which knows "
                "`return_token_ids`, or set seq_kd: false"
            ) from error

    def scores(
        self, batch: RolloutBatch, top_k: int, learner: PolicyLearner | None = None
    ) -> TeacherScores:
        """As in `ScoresTokens`, by no learner: a request a row, up to its last sampled token."""
        return asyncio.run(self._scores(batch, top_k))

    async def _scores(self, batch: RolloutBatch, top_k: int) -> TeacherScores:
        shape = batch.response_ids.shape
        logprobs = torch.full(shape, torch.nan)
        ids = torch.full((*shape, top_k), -1, dtype=torch.int64)
        values = torch.full((*shape, top_k), -torch.inf)
        slots = asyncio.Semaphore(self._at_once)
        async with await self._client() as client:

            async def row(index: int) -> None:
                prompt = batch.prompt_ids[index][batch.prompt_mask[index].bool()].tolist()
                sampled = batch.response_mask[index].bool().nonzero().squeeze(1).tolist()
                if not sampled:
                    return
                response = batch.response_ids[index][: sampled[-1] + 1].tolist()
                async with slots:
                    entries = await self._ask(client, [*prompt, *response], top_k)
                for place in sampled:
                    entry = entries[len(prompt) + place]
                    own = entry.get(str(response[place]))
                    if own is not None:
                        logprobs[index, place] = float(own["logprob"])
                    _put_candidates(entry, ids[index, place], values[index, place])

            await asyncio.gather(*(row(index) for index in range(len(batch))))
        if not top_k:
            return TeacherScores(logprobs)
        return TeacherScores(logprobs, ids, values)

    async def _ask(
        self, client: aiohttp.ClientSession, ids: Sequence[int], top_k: int, tries: int = TRIES
    ) -> list[Json]:
        """What the server says of each token of `ids`: candidates by id, nothing of the first."""
        request = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
        }
        return self._read(await self._post(client, request, tries), len(ids))

    async def _post(self, client: aiohttp.ClientSession, request: Json, tries: int = TRIES) -> str:
        """The text of the server's answer. Raises `RunError` where it gives none."""
        for attempt in range(tries):
            try:
                reply = await ask(client, f"{self.base_url}/completions", request)
                said, status = reply.text, reply.status
            except Unreachable as error:
                said, status = str(error), 0
            if status == 200:
                return said
            if status not in (0, 408, 425, 429) and status < 500:
                break
            if attempt < tries - 1:
                await asyncio.sleep(2.0**attempt / 2)
        said = self._safe(said[:LONGEST_SAID])
        kind = RunError if status else NoAnswer
        where = (
            f"base_url, model ('{self.model}') and the key in "
            f"{self._key_env or 'api_key_env (none is named)'}"
        )
        if status == 400:
            where = "how it was started, such as --max-model-len and --max-logprobs"
        raise kind(
            f"{self._who} does not answer: {f'HTTP {status}, ' if status else ''}{said!r}: check "
            f"{where}"
        )

    def _read(self, text: str, length: int) -> list[Json]:
        try:
            found = json.loads(text)["choices"][0]["prompt_logprobs"]
            entries = [entry or {} for entry in found]
            if len(entries) != length or not all(isinstance(each, dict) for each in entries):
                raise ValueError(f"{len(entries)} entries for {length} tokens")
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{self._who} gives no log-probs of the tokens it was sent ({error}): use a vLLM "
                "server, which knows `prompt_logprobs`, or give the teacher's folder as `model`"
            ) from error
        return entries

    async def _client(self) -> aiohttp.ClientSession:
        return await make_client(self._timeout_s, self._at_once, url=self.base_url, key=self._key)

    @property
    def _who(self) -> str:
        return f"the server of teacher '{self.name}' at {self.base_url}"

    def _safe(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def server_of(name: str, section: TeacherSection) -> TeacherServer:
    """The server that a teacher's section of the config names."""
    assert section.base_url is not None and section.model is not None, "checked with the config"
    return TeacherServer(
        section.base_url,
        section.model,
        name,
        api_key_env=section.api_key_env,
        timeout_s=section.timeout_s,
        at_once=section.at_once,
    )


def _put_candidates(entry: Json, ids: Tensor, values: Tensor) -> None:
    """Write the best candidates of a token into `ids` and `values` [K], best first."""
    best = sorted(entry.items(), key=lambda item: -float(item[1]["logprob"]))[: len(ids)]
    for place, (token, known) in enumerate(best):
        ids[place], values[place] = int(token), float(known["logprob"])


def _key(variable: str | None) -> str:
    """The key in the environment variable of that name; empty if none is named."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise ResourceError(
            f"the environment variable '{variable}', which holds the key of a teacher's server, is "
            "not set to a key: export it, or set api_key_env to null for a server without keys"
        )
    return key
