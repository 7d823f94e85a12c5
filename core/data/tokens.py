"""Chat template to token ids and back, and token lists to the tensors of a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PromptGroup, Rendered, Renderer, SampledGroup
from posttrain.core.data.chat import TurnEnd, stored_ends, turn_end
from posttrain.core.data.control import ControlTokens
from posttrain.core.data.template import TemplateConfig, TemplateRenderer
from posttrain.core.errors import DataError, ResourceError, reading_model
from posttrain.core.types import (
    Completion,
    Message,
    Problem,
    RewardSample,
    ToolSchema,
    Verdict,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: Path, *, light: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises `ResourceError` without a usable one.

    `light` reads `tokenizer.json` by itself where there is one: enough to count tokens, and it
    spares the seconds that transformers takes to import what finds the model's own class.
    """
    import transformers  # late, since commands that only read a config import this module

    alone = light and (path / "tokenizer.json").is_file()
    # Any: two classes with one method in common. Either is imported when it is asked for.
    loader: Any = transformers.PreTrainedTokenizerFast if alone else transformers.AutoTokenizer
    expected = "expected the files that save_pretrained of a tokenizer writes"
    with reading_model(f"model directory '{path}' has no usable tokenizer", expected):
        found: PreTrainedTokenizerBase = loader.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        found("a")  # some settings are looked at by the first text alone
    # Rows that are too long for the model are counted by one rule, and reported in our own words.
    found.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return found


class ChatTokenizer:
    """A tokenizer with what training needs: prompts, responses with their end, padding.

    `end_token_ids` are all tokens that end a response, for engines, training and measures alike:
    the tokenizer's end-of-sequence token, those of the model's generation config, and the one with
    which the chat template ends an assistant's turn. `turn_end` is what a response that is learned
    from ends with: what the template writes, without a template the end-of-sequence token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None,
        stored_ends: Sequence[int] = (),
        renderer: Renderer[Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        found = turn_end(tokenizer)
        if tokenizer.eos_token_id is not None:
            self.eos_token_id = int(tokenizer.eos_token_id)
        elif found is not None or stored_ends:
            self.eos_token_id = found.token if found is not None else stored_ends[0]
        else:
            raise ResourceError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token: set "
                "eos_token in its tokenizer_config.json"
            )
        self.turn_end = found or TurnEnd("", self.eos_token_id)
        ends = {self.eos_token_id, *stored_ends, self.turn_end.token}
        self.end_token_ids: tuple[int, ...] = tuple(sorted(ends))
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if pad is None else int(pad)
        self._token_texts: dict[int, str] = {}
        self.renderer: Renderer[Any] = renderer or TemplateRenderer(TemplateConfig())
        self.renderer.setup(tokenizer, self.end_token_ids)
        self.end_token_ids = self.renderer.end_token_ids  # a family's format may have further ends
        self.control = ControlTokens(tokenizer, self.end_token_ids)

    @classmethod
    def load(
        cls,
        path: Path,
        system_prompt: str | None = None,
        renderer: Renderer[Any] | None = None,
        *,
        light: bool = False,
    ) -> ChatTokenizer:
        """The tokenizer of a model directory; `light` as in `load_tokenizer`."""
        tokenizer = load_tokenizer(path, light=light)
        return cls(tokenizer, system_prompt, stored_ends(Path(path), tokenizer), renderer)

    def token_text(self, token: int) -> str:
        """The text of one token id by itself; of a special token its name."""
        if token not in self._token_texts:
            self._token_texts[token] = str(self.tokenizer.decode([token]))
        return self._token_texts[token]

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt, up to where the assistant's answer begins."""
        return self.encode_chat(problem.messages, problem.tools)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's next words begin.

        A last message of the assistant's is continued. The system prompt of the run is put first
        unless the messages bring their own. Raises `DataError` for messages that the renderer
        refuses.
        """
        return self.renderer.prompt(self._chat(messages), tools)

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> Rendered:
        """A whole conversation, with what the assistant wrote.

        Where the template writes no end after the assistant's last turn, the token that ends a
        response follows it, so that it can be learned.
        """
        chat = self._chat(messages)
        made = self.renderer.render(chat, tools)
        ids, sampled, owners = list(made.token_ids), list(made.sampled), list(made.message)
        last = len(chat) - 1
        if chat[-1].role == "assistant":
            rows = enumerate(zip(owners, sampled, strict=True))
            own = [place for place, (owner, s) in rows if s and owner == last]
            if not own or ids[own[-1]] not in self.end_token_ids:
                until = own[-1] + 1 if own else len(ids)  # some templates begin a next turn there
                ids = [*ids[:until], self.turn_end.token]
                sampled = [*sampled[:until], True]
                owners = [*owners[:until], last]
        if len(chat) > len(messages):  # the run's system prompt is not among the messages
            owners = [max(owner - 1, -1) for owner in owners]
        return Rendered(tuple(ids), tuple(sampled), tuple(owners))

    def _chat(self, messages: Sequence[Message]) -> list[Message]:
        chat = list(messages)
        if self.system_prompt is not None and (not chat or chat[0].role != "system"):
            chat.insert(0, Message("system", self.system_prompt))
        return chat

    def encode_answer(
        self, prompt: Sequence[Message], answer: Message, tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """Token ids of the assistant's `answer` to `prompt` with its end.

        They are what the template writes after the prompt, as a whole conversation has it. An
        answer that continues the prompt's last message is its text alone.
        """
        chat = self._chat(prompt)
        if chat[-1].role == "assistant":
            if answer.reasoning or answer.tool_calls:
                raise DataError(
                    "an answer that continues the prompt's last message has reasoning or tool "
                    "calls, which have no place there: end the prompt with another message"
                )
            return self.encode_response(answer.content)
        ids = self.renderer.answer([*chat, answer], tools)
        return ids if ids and ids[-1] in self.end_token_ids else (*ids, self.turn_end.token)

    def encode_worked(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of a problem's worked answer with its end, as they follow its prompt; of one
        that has none, the end."""
        if not problem.worked:
            return self.encode_response("")
        answer = Message("assistant", problem.worked)
        return self.encode_answer(problem.messages, answer, problem.tools)

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Token ids of a response that says `text` and ends, whatever the prompt."""
        said = self.control.encode_content(Message("assistant", text), self.turn_end.text)
        return (*said, self.turn_end.token)

    def parse_response(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Message:
        """The assistant's message that sampled tokens write: text, reasoning and tool calls.

        `tools` are those that the model was shown, whose schemas say of which types arguments are.
        """
        return self.renderer.parse_turn(ids, tools)

    def extend(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        ended: bool,
        last: int | None = None,
    ) -> tuple[int, ...]:
        """Tokens that follow an assistant's turn: `messages`, and the beginning of the next turn.

        The turn is closed unless it `ended`; `last` is the token that ended it, where that is
        known. No earlier token changes.
        """
        if not ended or last is None:
            return self.renderer.extend(messages, tools, ended=ended)
        # In some formats the end begins the next turn. It is not written twice, and where the model
        # chose another end than these messages begin with, theirs follows.
        ids = self.renderer.extend(messages, tools, ended=not self.renderer.shared_end)
        return ids[1:] if ids[:1] == (last,) else ids

    def encode_text(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of `text` alone, in which special tokens are plain text unless `special`.

        The piece is never joined to what stands before it, so that nobody's tokens change.
        """
        if not special:
            return self.control.encode_content(Message("user", text))
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode_response(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens and ends."""
        own = [token for token in ids if token not in self.end_token_ids]
        return str(self.tokenizer.decode(own, skip_special_tokens=True))

    def is_truncated(self, completion: Completion) -> bool:
        """Whether a limit cut the response: of tokens, or of an episode's turns.

        A single turn that ends with an end token is whole. An episode may have been cut after one.
        """
        if completion.finish_reason != "length" or not completion.token_ids:
            return completion.finish_reason == "length"
        own = not completion.sampled or completion.sampled[-1]
        ended = own and completion.token_ids[-1] in self.end_token_ids
        return bool(completion.turn_ends) or not ended


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids [B, L] and mask [B, L] (int64), real tokens at the right."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and mask [B, T] (int64), real tokens at the left."""
    width = max(1, *map(len, rows))
    return _filled(rows, width, pad), _filled([[1] * len(row) for row in rows], width, 0)


def _filled(
    rows: Sequence[Sequence[float]], width: int, value: float, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Rows as [B, width], with `value` after what they have."""
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype)


def response_batch(
    *,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    group_ids: Sequence[int],
    pad_token_id: int,
    problems: Sequence[Problem],
    texts: Sequence[str] = (),
    response_logprobs: Sequence[Sequence[float]] | None = None,
    policy_versions: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    sampled: Sequence[Sequence[bool]] = (),
    node_ids: Sequence[Sequence[int]] = (),
    transcripts: Sequence[str] = (),
    turns: Sequence[tuple[str, ...]] = (),
    elsewhere: Sequence[Sequence[bool]] = (),
) -> RolloutBatch:
    """A batch of one row per response. Rows of one group answer one problem.

    Log-probs that nobody gave are NaN, so that nothing can take them for real. `sampled` says of
    each token whether the policy sampled it (an empty row = all of them): the others, observations,
    are in `obs_mask` alone. `elsewhere` marks tokens that are in no mask, as another row has them.
    Tokens without a tree node, padding too, have node -1.
    """
    num_rows = len(responses)
    prompt_ids, prompt_mask = pad_left(prompts, pad_token_id)
    response_ids, response_mask = pad_right(responses, pad_token_id)
    width = response_ids.shape[1]
    if response_logprobs is None:
        logprobs = torch.full(response_ids.shape, torch.nan)
    else:
        logprobs = _filled(response_logprobs, width, 0.0, torch.float32)
    observed = torch.zeros_like(response_mask)
    for row, own in enumerate(sampled):
        kept = torch.tensor(own, dtype=torch.int64)
        observed[row, : len(own)] = 1 - kept
        response_mask[row, : len(own)] *= kept
    for row, others in enumerate(elsewhere):
        kept = ~torch.tensor(others, dtype=torch.bool)
        observed[row, : len(others)] *= kept
        response_mask[row, : len(others)] *= kept
    versions = torch.tensor(policy_versions or [0] * num_rows)
    batch = RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        mask=response_mask.clone(),
        rollout_logprobs=logprobs,
        policy_version=versions[:, None].expand(response_ids.shape).contiguous(),
        group_id=torch.tensor(group_ids, dtype=torch.int64),
        seq_id=torch.arange(num_rows),
        truncated=torch.tensor(truncated or [False] * num_rows),
        problems=tuple(problems),
        texts=tuple(texts),
        transcripts=tuple(transcripts),
        turns=tuple(turns),
    )
    if any(node_ids):
        batch = batch.with_columns(node_id=_filled(node_ids, width, -1))
    if any(sampled):
        batch = batch.with_columns(obs_mask=observed)
    batch.validate()
    return batch


@dataclass(frozen=True, slots=True)
class ResponseTexts:
    """What verifiers read of a response: its last turn, all turns of the policy, and all of it."""

    last: str
    turns: tuple[str, ...]
    transcript: str


def response_texts(completion: Completion, tokenizer: ChatTokenizer) -> ResponseTexts:
    """The texts of a response; the last turn is empty when an observation is the end."""
    ids = completion.token_ids
    transcript = tokenizer.decode_response(ids)
    if not completion.sampled:
        return ResponseTexts(transcript, (transcript,), transcript)
    runs = groupby(zip(ids, completion.sampled, strict=True), key=itemgetter(1))
    turns = [tokenizer.decode_response([i for i, _ in run]) for own, run in runs if own]
    last = turns[-1] if completion.sampled[-1] else ""
    return ResponseTexts(last, tuple(turns), transcript)


def reward_sample(
    prompt: PromptGroup, completion: Completion, tokenizer: ChatTokenizer, verdict: Verdict
) -> RewardSample:
    """What rewards see of one response whose `verdict` is known; it has no steps."""
    texts, ids = response_texts(completion, tokenizer), completion.token_ids
    sampled = completion.sampled or (True,) * len(ids)
    last = max((place for place, own in enumerate(sampled) if own), default=-1)
    return RewardSample(
        problem=prompt.problem,
        prompt_ids=completion.prompt_ids or prompt.prompt_ids,
        response_ids=tuple(token for token, own in zip(ids, sampled, strict=True) if own),
        text=texts.last,
        truncated=tokenizer.is_truncated(completion),
        verdict=verdict,
        transcript=texts.transcript,
        turns=texts.turns,
        outcome=completion.reward,
        token_ids=() if all(sampled[: last + 1]) else ids[: last + 1],
    )


def rollout_batch(groups: Sequence[SampledGroup], tokenizer: ChatTokenizer) -> RolloutBatch:
    """A row for each completion, with what its environment gave."""
    rows = [(g, group, c) for g, group in enumerate(groups) for c in group.completions]
    texts = [response_texts(c, tokenizer) for _, _, c in rows]
    batch = response_batch(
        prompts=[c.prompt_ids or group.prompt.prompt_ids for _, group, c in rows],
        responses=[c.token_ids for _, _, c in rows],
        group_ids=[g for g, _, _ in rows],
        pad_token_id=tokenizer.pad_token_id,
        problems=[group.prompt.problem for _, group, _ in rows],
        texts=[text.last for text in texts],
        transcripts=[text.transcript for text in texts],
        turns=[text.turns for text in texts],
        response_logprobs=[c.logprobs for _, _, c in rows],
        policy_versions=[c.policy_version for _, _, c in rows],
        truncated=[tokenizer.is_truncated(c) for _, _, c in rows],
        sampled=[c.sampled for _, _, c in rows],
        node_ids=[c.node_ids for _, _, c in rows],
        elsewhere=[c.elsewhere for _, _, c in rows],
    )
    return _with_turns(batch, [(g, c) for g, _, c in rows])


def _with_turns(batch: RolloutBatch, rows: Sequence[tuple[int, Completion]]) -> RolloutBatch:
    """`batch` with the columns of episodes, for `rows` of (group, completion)."""
    completions = [completion for _, completion in rows]
    width = max((len(c.turn_ends) for c in completions), default=0)
    if width:
        rewards = [[torch.nan if r is None else r for r in c.turn_rewards] for c in completions]
        batch = batch.with_columns(
            turn_end=_filled([c.turn_ends for c in completions], width, -1),
            turn_reward=_filled(rewards, width, torch.nan, torch.float32),
            state_key=_filled([c.state_keys for c in completions], width, 0),
        )
    if any(c.episode >= 0 for c in completions):
        numbers: dict[tuple[int, int, int], int] = {}
        ids = [
            numbers.setdefault((g, c.episode, row if c.episode < 0 else -1), len(numbers))
            for row, (g, c) in enumerate(rows)
        ]
        batch = batch.with_columns(episode_id=torch.tensor(ids, dtype=torch.int64))
    if any(c.versions for c in completions):
        versions = batch.policy_version.clone()
        for row, c in enumerate(completions):
            versions[row, : len(c.versions)] = torch.tensor(c.versions, dtype=versions.dtype)
        batch = batch.with_columns(policy_version=versions)
    return replace(
        batch,
        outcomes=tuple(c.reward for c in completions)
        if any(c.reward is not None for c in completions)
        else (),
        failures=tuple(c.failed for c in completions) if any(c.failed for c in completions) else (),
    )
