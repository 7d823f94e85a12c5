"""Rollouts with plain transformers: the engine that is always there, and the reference for others.

The decode loop is our own instead of `generate`: a prompt's keys and values are computed once for
its whole group, a prefix that all prompts share (a system prompt) once for all of them, finished
rows leave the batch, log-probs come with the draw, and every response has its own random numbers,
so neither batching nor order changes a result.
Axes: N sequences (prompts x generations), T response tokens, L keys, S queries, H heads,
K key heads, D head size, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import DrawnToken, EngineSetup, PluginConfig, RolloutEngine
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.models.decoding import (
    DecodingMemory,
    OwnDecoding,
    can_group,
    can_share,
    has_capped_attention,
    use_grouped_attention,
)
from posttrain.core.models.layers import backbone_of
from posttrain.core.models.paths import EAGER, attend, paths_of, use_plain_attention
from posttrain.core.rollout.sampling import (
    Chunk,
    StopStrings,
    check_request,
    common_start,
    draw_tokens,
    of_rows,
    plan_chunks,
    response_seeds,
    row_entropies,
    token_limits,
)
from posttrain.core.rollout.weight_sync import EngineWeights, check_model_dir
from posttrain.core.types import Completion, FinishReason, SamplingParams

# transformers takes seconds to import, and this module is imported whenever plugins are listed.
if TYPE_CHECKING:
    from posttrain.core.data.tokens import ChatTokenizer
    from posttrain.core.models.sampled_outputs import OutputRecorder
    from posttrain.core.training.agreement import EngineCheck

# Prompt tokens that must be spared before a pass for the common ones by themselves is worth it.
LEAST_SPARED = 64
# Sequences of one length whose logits are held at once when they are scored.
SCORED_TOGETHER = 8
# Tokens of a response to the check at the start, with its prompt, at most.
CHECKED_LEN = 64
# How responses are decoded, the fastest first: by our loop with grouped attention, or with the
# model's own, or that without a kernel; by the model's own forward pass with its own cache,
# or without one.
Way = Literal["grouped", "plain", "eager", "own_cache", "no_cache"]
WAYS: tuple[Way, ...] = ("grouped", "plain", "eager", "own_cache", "no_cache")
OURS = ("grouped", "plain", "eager")
SLOWER: dict[Way, str] = {
    "grouped": "",  # nothing is faster
    "plain": "responses are decoded with the model's own attention",
    "eager": "responses are decoded without an attention kernel",
    "own_cache": "responses are decoded by the model's own forward pass and cache, one prompt "
    "length at a time",
    "no_cache": "responses are decoded without a cache, which is slow",
}
NOT_RUNNING = "the transformers engine is not running: call start() before using it"


class TransformersEngineConfig(PluginConfig):
    """Settings of the transformers engine."""

    attention: Literal["auto", "eager", "sdpa"] = Field(
        default="auto",
        description="auto: on a CPU our own grouped product where the model allows it, else the "
        "model's default",
    )
    packed_weights: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="on a CPU: a second copy of the weights in the order that products read "
        "fastest; auto: where it takes 1 GB at most",
    )


class TransformersEngine(RolloutEngine[TransformersEngineConfig]):
    """Samples with an own copy of the model. Source: this project; the model is transformers'.

    Prompts are padded on the left; at most `EngineSetup.max_batch_size` sequences decode together.
    """

    name = "transformers"
    Config = TransformersEngineConfig
    recorder: OutputRecorder | None = None
    _setup: EngineSetup | None = None
    _model: Any = None  # Any: transformers' model classes are not typed
    _weights: EngineWeights | None = None
    _version: str = ""
    _tokenizer: ChatTokenizer | None = None
    _way: Way = "plain"
    _least_spared: int = LEAST_SPARED

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Always None: transformers is a dependency."""
        return None

    def start(self, setup: EngineSetup) -> None:
        """Load the model of `setup.model_dir`. Raises `ResourceError` when there is none."""
        check_model_dir(setup.model_dir)
        from transformers import AutoModelForCausalLM, __version__

        from posttrain.core.models.device import ModelRuntime
        from posttrain.core.models.loading import LOADING, from_folder

        chosen = self.config.attention
        # As the trainer attends, where nothing else is chosen.
        own = ModelRuntime(setup.device, setup.dtype, "stream").plain_attention
        with LOADING:
            model: Any = from_folder(
                AutoModelForCausalLM,
                setup.model_dir,
                setup.dtype,
                own if chosen == "auto" else chosen,
            )
        self._model = model.to(setup.device).eval().requires_grad_(False)
        self._weights = EngineWeights(self._model, self.config.packed_weights)
        self._setup, self._version, self.policy_version = setup, __version__, 0
        self._choose_decoding()

    def _choose_decoding(self) -> None:
        """Decode by the fastest way whose log-probs are the model's own, in a few short responses.

        Raises `ResourceError` where no way is right.
        """
        from posttrain.core.training.agreement import EngineCheck, log_slower

        setup, model = self._started(), self._model
        check = EngineCheck(model, setup.dtype)
        head = check.settle_head()
        grouped = self.config.attention == "auto" and setup.device.type == "cpu"
        # The check has lengths of its own.
        self._setup = replace(setup, max_model_len=CHECKED_LEN, stop_token_ids=())
        problem: str | None = None
        for way in WAYS:
            if way == "grouped" and not (grouped and can_group(model)):
                continue
            by_sdpa = way == "plain" and model.config._attn_implementation == "sdpa"
            if by_sdpa and has_capped_attention(model):  # which SDPA leaves out
                continue
            if way in OURS and head is not None:
                problem = head
                continue
            before, problem = problem, self._problem(check, way)
            if problem is None:
                if before is not None:
                    log_slower(model, SLOWER[way], before)
                self._setup = setup
                return
        self.close()
        raise ResourceError(
            f"model type '{model.config.model_type}' cannot be sampled from by the engine "
            f"'transformers': {problem}; choose another model or engine"
        )

    def _problem(self, check: EngineCheck, way: Way) -> str | None:
        """Decode in this way, and say what the check finds; the prompts' common start is computed
        by itself as well."""
        self._way = way
        if way == "grouped":
            use_grouped_attention(self._model)
        elif way == "plain":
            use_plain_attention(self._model)
        else:
            attend(self._model, EAGER)
        return check.problem(self._sample_some, self.score)

    def _sample_some(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[tuple[int, tuple[int, ...], tuple[float, ...]]]:
        """A few short responses for the check."""
        params = SamplingParams(num_generations=2, max_tokens=3)
        found = self.generate(prompts, params)
        if self._way in OURS and can_share(self._model, CHECKED_LEN):
            self._least_spared = 0
            found = [a + b for a, b in zip(found, self.generate(prompts, params), strict=True)]
            self._least_spared = LEAST_SPARED
        return [(p, c.token_ids, c.logprobs) for p, group in enumerate(found) for c in group]

    @property
    def model(self) -> Any:  # Any: as above
        """The engine's own copy of the model; None before `start`."""
        return self._model

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """`params.num_generations` completions for each prompt, in the order of `prompts`.

        At temperature 0 log-probs are those of temperature 1. Raises `DataError` for a prompt that
        is empty or too long.
        """
        setup = self._started()
        check_request(prompts, params, setup.max_model_len)
        seeds, limits = response_seeds(prompts, params), token_limits(prompts, params)
        found: dict[tuple[int, int], Completion] = {}
        for chunk in self._chunks(prompts, params.num_generations):
            where = [(p, g) for p in chunk.prompts for g in chunk.generations]
            own = [seeds[p][g] for p, g in where]
            rows = self._decode(chunk, prompts, own, [limits[p] for p, _ in where], params)
            found.update(zip(where, rows, strict=True))
        return [[found[p, g] for g in range(params.num_generations)] for p in range(len(prompts))]

    def _chunks(self, prompts: Sequence[Sequence[int]], generations: int) -> list[Chunk]:
        """The parts of a request; a model that decodes its own way gets prompts of one length."""
        most = self._started().max_batch_size
        lengths = [len(prompt) for prompt in prompts]
        if self._way in OURS:
            return plan_chunks(lengths, generations, most)
        found = []
        for length in sorted(set(lengths), reverse=True):
            same = [number for number, own in enumerate(lengths) if own == length]
            for chunk in plan_chunks([length] * len(same), generations, most):
                found.append(replace(chunk, prompts=tuple(same[p] for p in chunk.prompts)))
        return found

    @torch.inference_mode()
    def _decode(
        self,
        chunk: Chunk,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        limits: Sequence[int],
        params: SamplingParams,
    ) -> list[Completion]:
        """Completions of one chunk: prompts in its order, generations of a prompt adjacent."""
        setup = self._started()
        device, width = setup.device, max(limits)
        stop = torch.tensor(setup.stop_token_ids, dtype=torch.int64, device=device)
        limit = torch.tensor(limits, device=device)
        texts = self._stop_strings(params)
        names = [(prompt, own) for prompt in chunk.prompts for own in chunk.generations]
        # [N, T], made from the seeds alone: a response is the same however it is batched.
        draws = np.stack([np.random.default_rng(seed).random(width) for seed in seeds])
        uniforms = torch.from_numpy(draws).to(device)
        own = [prompts[p] for p in chunk.prompts]
        common = self._common(own, width)
        recorder = self.recorder if self._way in OURS else None
        if recorder is not None:
            recorder.begin(own, common, len(seeds), width)
        owners = torch.arange(len(own), device=device).repeat_interleave(len(chunk.generations))
        going = torch.arange(len(seeds), device=device)  # responses that have not ended
        logits, memory = self._prefill(own, common, chunk, width)
        # The row of the batch that each of them is in.
        rows = owners if len(logits) < len(seeds) else going
        tokens = torch.zeros(len(seeds), width, dtype=torch.int64, device=device)
        logprobs = torch.zeros(len(seeds), width, device=device)
        entropies = torch.zeros(len(seeds), width, device=device)
        length = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        reasons: list[FinishReason] = ["length"] * len(seeds)
        for step in range(width):
            ids, drawn = draw_tokens(of_rows(logits, rows), uniforms[going, step], params)
            tokens[going, step], logprobs[going, step] = ids, drawn
            if self.on_tokens is not None:
                drawn_now = zip(going.tolist(), ids.tolist(), strict=True)
                self.on_tokens(
                    [DrawnToken(names[n][0], names[n][1], token) for n, token in drawn_now]
                )
            if params.entropy:
                entropies[going, step] = row_entropies(logits)[rows]
            stopped = torch.isin(ids, stop)
            for response in going[stopped].tolist():
                reasons[response] = "stop"
            ended = stopped | (limit[going] == step + 1)
            if texts is not None:
                for place in (~stopped).nonzero().squeeze(-1).tolist():
                    response = int(going[place])
                    if texts.completed_by_last(tokens[response, : step + 1].tolist()):
                        ended[place], reasons[response] = True, "stop_string"
            length[going[ended]] = step + 1
            going, rows, ids = going[~ended], rows[~ended], ids[~ended]
            if len(going) == 0:
                break
            fed = memory.next_rows(rows, ids, len(logits))
            rows = fed.rows
            if fed.of is not None:
                memory.keep(fed.of)
            if recorder is not None:
                recorder.feed(going, rows, len(fed.ids))
            logits = self._next_logits(fed.ids, memory)
        found = self._completions(tokens, logprobs, entropies, length, reasons, seeds, params)
        if recorder is not None:
            recorder.end(owners.tolist(), [c.token_ids for c in found])
        return found

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        """What ends responses by their text; the tokenizer is loaded when it is first needed."""
        if not params.stop_strings:
            return None
        if self._tokenizer is None:
            from posttrain.core.data.tokens import ChatTokenizer

            self._tokenizer = ChatTokenizer.load(self._started().model_dir)
        return StopStrings(self._tokenizer.decode_response, params.stop_strings)

    def _common(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
        """Tokens that all `prompts` begin with and that are read once for all; 0 for none."""
        common = common_start(prompts)
        longest = max(map(len, prompts)) + max_tokens
        if self._way not in OURS:
            return 0
        worth = common * (len(prompts) - 1) >= self._least_spared
        return common if worth and can_share(self._model, longest) else 0

    def _prefill(
        self, prompts: Sequence[Sequence[int]], common: int, chunk: Chunk, max_tokens: int
    ) -> tuple[Tensor, DecodingMemory | OwnDecoding]:
        """Last logits [P, V] and memory of the prompts, once for all of their generations.

        The `common` first tokens of all are computed once for all; padding comes after them. With
        a cache of the model's own each generation has a row: [P x generations, V].
        """
        from transformers import DynamicCache

        setup = self._started()
        if self._way not in OURS:
            alike = torch.tensor([list(prompt) for prompt in prompts], device=setup.device)
            cached = self._way == "own_cache"
            if cached:
                alike = alike.repeat_interleave(len(chunk.generations), dim=0)
            memory = OwnDecoding(self._model, alike, alike.shape[1] + max_tokens, cache=cached)
            return memory.first(), memory
        cache = DynamicCache(config=self._model.config)
        if common:
            start = torch.tensor([prompts[0][:common]], device=setup.device)
            backbone_of(self._model)(input_ids=start, past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(prompts))
        own = [list(prompt[common:]) for prompt in prompts]
        width = max(map(len, own))
        padded = [[setup.pad_token_id] * (width - len(ids)) + ids for ids in own]
        present = [[1] * common + [0] * (width - len(ids)) + [1] * len(ids) for ids in own]
        mask = torch.tensor(present, device=setup.device)
        logits = self._forward(
            torch.tensor(padded, device=setup.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0)[:, common:],
            past_key_values=cache,
        )
        longest = common + width + max_tokens
        several = len(chunk.generations) > 1
        return logits, DecodingMemory.of_prompts(self._model, cache, mask, longest, several=several)

    def _next_logits(self, ids: Tensor, memory: DecodingMemory | OwnDecoding) -> Tensor:
        """Logits [N, V] after one more token `ids` [N] of each row."""
        if isinstance(memory, OwnDecoding):
            return memory.feed(ids)
        return self._forward(ids[:, None], **memory.next_token())

    def _forward(self, ids: Tensor, **given: Any) -> Tensor:  # Any: arguments of transformers'
        """Logits [N, V] after the last of `ids` [N, S]; the given cache grows by S."""
        output = backbone_of(self._model)(input_ids=ids, use_cache=True, **given)
        # A strided last column sends bfloat16 products on some CPUs down a path 500 x slower.
        last = output.last_hidden_state[:, -1].contiguous()
        shape = paths_of(self._model).head
        assert shape is not None, "else the model makes its logits itself"
        if shape.inputs != 1.0:
            last = last * shape.inputs
        return shape.of(self._model.get_output_embeddings()(last))

    def _completions(
        self,
        tokens: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        length: Tensor,
        reasons: Sequence[FinishReason],
        seeds: Sequence[int],
        params: SamplingParams,
    ) -> list[Completion]:
        columns = (tokens.tolist(), logprobs.tolist(), entropies.tolist(), length.tolist())
        return [
            Completion(
                token_ids=tuple(ids[:end]),
                logprobs=tuple(values[:end]),
                finish_reason=reason,
                policy_version=self.policy_version,
                seed=seed,
                engine=self.name,
                engine_version=self._version,
                entropies=tuple(spread[:end]) if params.entropy else (),
            )
            for ids, values, spread, end, reason, seed in zip(*columns, reasons, seeds, strict=True)
        ]

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token but the first, given those before it."""
        setup = self._started()
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(sequences):
            by_length.setdefault(len(ids), []).append(index)
        values: list[list[float]] = [[] for _ in sequences]
        for same in by_length.values():
            for start in range(0, len(same), SCORED_TOGETHER):
                some = same[start : start + SCORED_TOGETHER]
                rows = torch.tensor([list(sequences[i]) for i in some], device=setup.device)
                logits = self._model(input_ids=rows, use_cache=False).logits[:, :-1]
                logprobs = logits.float().log_softmax(dim=-1)
                found = logprobs.gather(-1, rows[:, 1:, None]).squeeze(-1).tolist()
                for index, row in zip(some, found, strict=True):
                    values[index] = row
        return values

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy all weights in place and drop the adapter. Only a tied output layer may be left out.

        Raises `RunError` on a missing, unknown or misshaped weight and keeps the old weights.
        """
        self._held().take(weights)
        self.policy_version = policy_version

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
        """Names of the weights that differ from the model's own; it holds them as they come."""
        return self._held().differing(weights)

    def sync_adapter(self, folder: Path, policy_version: int) -> None:
        """Put the adapter's layers around the base layers, in place of those before."""
        self._held().take_adapter(folder)
        self.policy_version = policy_version

    def close(self) -> None:
        """Free the model; may be called twice."""
        self._model = self._setup = self._tokenizer = self._weights = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _started(self) -> EngineSetup:
        if self._setup is None:
            raise RunError(NOT_RUNNING)
        return self._setup

    def _held(self) -> EngineWeights:
        if self._weights is None:
            raise RunError(NOT_RUNNING)
        return self._weights
