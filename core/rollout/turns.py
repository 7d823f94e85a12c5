"""One turn of an episode: what the policy said, and the tokens of the environment's answer to it.

What the policy sampled is never tokenised again: each turn continues the token ids so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from posttrain.core.contracts import Observation, Opening, Turn
from posttrain.core.contracts.rollout import Episode, Segment
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Message, Problem


@dataclass
class Turns:
    """Writes episodes as tokens: `max_turns` turns at most, observations cut to a length."""

    tokenizer: ChatTokenizer
    max_turns: int
    max_observation_tokens: int
    reads_special_tokens: bool = False
    answers_last: bool = False
    """Whether a last turn is answered that ended with a stop string."""
    _answers_fit: bool = field(default=False, repr=False)

    def chat(self, problem: Problem, opening: Opening) -> list[Message]:
        """The prompt's messages with what the environment tells the model."""
        messages = list(problem.messages)
        if opening.suffix:
            last = messages[-1]
            if last.role == "user":
                messages[-1] = replace(last, content=last.content + opening.suffix)
            else:
                messages.append(Message("user", opening.suffix.strip()))
        if opening.system is not None:
            system = opening.system
            if messages[0].role == "system":
                system = f"{messages.pop(0).content}\n\n{system}"
            messages.insert(0, Message("system", system))
        return [*messages, *opening.messages]

    def prompt(self, problem: Problem, opening: Opening) -> tuple[int, ...]:
        """Token ids of the prompt."""
        messages = self.chat(problem, opening)
        tools = (*problem.tools, *opening.tools)
        if opening.tools and not self._answers_fit:
            # A model whose template takes no results is refused before anything is sampled.
            self.tokenizer.extend([Message("tool", "1", name="f")], tools, ended=True)
            self._answers_fit = True
        return self.tokenizer.encode_chat(messages, tools)

    def said(self, episode: Episode) -> Turn:
        """What the environment gets of the episode's last turn."""
        turn = episode.turns[-1]
        return Turn(
            self.tokenizer.decode_response(turn.token_ids),
            turn.finish_reason == "stop",
            self.tokenizer.parse_response(turn.token_ids, episode.tools),
        )

    def after(self, episode: Episode, turn: Completion) -> Episode:
        """The episode after `turn`, which is over where the environment is not to answer it."""
        segments = (*episode.segments, Segment(turn.token_ids, turn))
        counts = {**episode.counts, "turns": episode.counts.get("turns", 0.0) + 1}
        episode = replace(episode, segments=segments, counts=counts)
        last = counts["turns"] >= self.max_turns and not self.answers_last
        cut = last and turn.finish_reason != "stop"
        if turn.finish_reason == "length" or cut:
            return replace(episode, finish_reason="length")
        return episode

    def answered(self, episode: Episode, observation: Observation, max_tokens: int) -> Episode:
        """The episode after the environment's answer to its last turn.

        `max_tokens` is the limit of the whole response, observations included.
        """
        reason = episode.turns[-1].finish_reason
        counts, room = dict(episode.counts), max_tokens - len(episode.token_ids)
        for name, value in observation.counts.items():
            counts[name] = counts.get(name, 0.0) + value
        episode = replace(
            episode,
            state=observation.state,
            counts=counts,
            rewards=(*episode.rewards, observation.reward),
            reward=episode.reward if observation.outcome is None else observation.outcome,
        )
        if observation.done and not observation.truncated:
            return replace(episode, finish_reason=reason)
        if observation.truncated or counts["turns"] >= self.max_turns:
            return replace(episode, finish_reason="length")
        answer = Segment(self._tokens(episode, observation)[: max(room, 0)])
        episode = replace(episode, segments=(*episode.segments, answer))
        cut = len(answer.token_ids) >= room
        return replace(episode, finish_reason="length") if cut else episode

    def _tokens(self, episode: Episode, observation: Observation) -> tuple[int, ...]:
        if not observation.messages:
            ids = self.tokenizer.encode_text(observation.text, special=self.reads_special_tokens)
            return ids[: self.max_observation_tokens]
        # The texts are cut, and what the template writes around them is kept whole.
        room, messages = self.max_observation_tokens, []
        for message in observation.messages:
            ids = self.tokenizer.encode_text(message.content, special=False)
            if len(ids) > room:
                cut = self.tokenizer.tokenizer.decode(list(ids[:room]))
                message = replace(message, content=str(cut))
            room -= min(len(ids), room)
            messages.append(message)
        turn = episode.turns[-1]
        ended, last = turn.finish_reason == "stop", turn.token_ids[-1] if turn.token_ids else None
        return self.tokenizer.extend(messages, episode.tools, ended=ended, last=last)


def so_far(episode: Episode) -> tuple[int, ...]:
    """Token ids from the first of the prompt to the last of the response."""
    return (*(episode.prompt_ids or episode.prompt.prompt_ids), *episode.token_ids)


def completion_of(episode: Episode, nodes: dict[int, int] | None = None) -> Completion:
    """The finished episode as one response.

    With `nodes`, which is filled on the way and shared by the episodes of a group, each segment is
    a node of their tree: those that several episodes hold in common have one number.
    """
    first = episode.turns[0]
    ids: list[int] = []
    logprobs: list[float] = []
    entropies: list[float] = []
    versions: list[int] = []
    sampled: list[bool] = []
    node_ids: list[int] = []
    ends: list[int] = []
    keys: list[int] = []
    shown = episode.prompt_ids or episode.prompt.prompt_ids
    for segment in episode.segments:
        size, turn = len(segment.token_ids), segment.turn
        ids += segment.token_ids
        sampled += [turn is not None] * size
        if turn is None:
            shown = segment.token_ids
            versions += versions[-1:] * size
            logprobs += [0.0] * size
            entropies += [0.0] * size
        else:
            ends.append(len(ids) - 1)
            keys.append(state_key(shown))
            shown = ()
            versions += turn.versions or [turn.policy_version] * size
            logprobs += turn.logprobs
            entropies += turn.entropies
        if nodes is not None:
            node_ids += [nodes.setdefault(id(segment), len(nodes))] * size
    return replace(
        first,
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish_reason=episode.finish_reason or "length",
        entropies=tuple(entropies) if first.entropies else (),
        sampled=() if all(sampled) else tuple(sampled),
        node_ids=tuple(node_ids),
        versions=tuple(versions) if len(set(versions)) > 1 else (),
        counts=dict(episode.counts),
        turn_ends=tuple(ends),
        turn_rewards=(*episode.rewards, *[None] * (len(ends) - len(episode.rewards))),
        state_keys=tuple(keys),
        reward=score_of(episode),
        failed=episode.failed,
        prompt_ids=episode.prompt_ids,
    )


def state_key(shown: Sequence[int]) -> int:
    """A digest in [0, 2^63) of the tokens that the policy was shown before a turn."""
    return derive_seed(0, "state", *shown)


def score_of(episode: Episode) -> float | None:
    """The environment's own score: what it gave for the whole, else the sum of its turns'."""
    given = [reward for reward in episode.rewards if reward is not None]
    if episode.reward is not None or not given:
        return episode.reward
    return sum(given)


def first_branches(completions: Sequence[Completion]) -> list[Completion]:
    """The first branch of each episode of a group."""
    found: dict[int, Completion] = {}
    for index, completion in enumerate(completions):
        found.setdefault(completion.episode if completion.episode >= 0 else -1 - index, completion)
    return list(found.values())
