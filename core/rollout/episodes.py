"""Responses of one or several turns, and sampled groups as JSON.

What the policy sampled is never tokenised again: each turn continues the token ids so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from posttrain.core.contracts import (
    Environment,
    Observation,
    PromptGroup,
    RolloutEngine,
    SampledGroup,
    Turn,
)
from posttrain.core.contracts.rollout import Episode, Segment
from posttrain.core.data.problems import problem_from_json, problem_to_json
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.rollout.answers import Answers, AnswersHere
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Message, Problem, SamplingParams, ToolSchema


def generate_groups(
    engine: RolloutEngine[Any], prompts: Sequence[PromptGroup], params: SamplingParams
) -> list[SampledGroup]:
    """One group of `params.num_generations` completions for each prompt, in order."""
    completions = engine.generate([prompt.prompt_ids for prompt in prompts], params)
    sizes = [len(group) for group in completions]
    if sizes != [params.num_generations] * len(prompts):
        raise RunError(
            f"engine '{engine.name}' returned groups of {sizes} responses, expected "
            f"{len(prompts)} groups of {params.num_generations}: this is a fault of the "
            "engine, choose another one"
        )
    return [
        SampledGroup(prompt, tuple(group))
        for prompt, group in zip(prompts, completions, strict=True)
    ]


Json = dict[str, Any]  # Any: JSON
T = TypeVar("T")


def prompt_to_json(prompt: PromptGroup) -> Json:
    return {"problem": problem_to_json(prompt.problem), "prompt_ids": list(prompt.prompt_ids)}


def prompt_from_json(value: Mapping[str, Any]) -> PromptGroup:
    try:
        problem = problem_from_json(value["problem"])
    except (TypeError, ValueError) as error:
        raise _other_version(error) from error
    return PromptGroup(problem, tuple(value["prompt_ids"]))


def groups_to_json(groups: Sequence[SampledGroup]) -> list[Json]:
    """Groups in order, each with its prompt and all that is known of its completions."""
    return [
        {
            "prompt": prompt_to_json(group.prompt),
            "completions": [asdict(completion) for completion in group.completions],
        }
        for group in groups
    ]


def groups_from_json(values: Sequence[Mapping[str, Any]]) -> list[SampledGroup]:
    """What `groups_to_json` was given. Raises `RunError` when it was written by another version."""
    return [
        SampledGroup(
            prompt_from_json(value["prompt"]),
            tuple(_made(Completion, completion) for completion in value["completions"]),
        )
        for value in values
    ]


def _made(cls: type[T], value: Mapping[str, Any]) -> T:
    try:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
    except TypeError as error:
        raise _other_version(error) from error


def _other_version(error: Exception) -> RunError:
    return RunError(
        f"a stored rollout does not fit this version ({error}): run with --fresh to start the "
        "stage again"
    )


class EpisodeRunner:
    """Runs an environment's episodes: `max_turns` turns at most, observations cut to a length."""

    def __init__(
        self,
        environment: Environment[Any],
        tokenizer: ChatTokenizer,
        max_turns: int,
        max_observation_tokens: int,
        answers: Answers | None = None,
    ) -> None:
        self.environment, self.tokenizer = environment, tokenizer
        self.answers = answers or AnswersHere(environment)
        self.max_turns, self.max_observation_tokens = max_turns, max_observation_tokens
        self._answers_fit = False

    @property
    def vocabulary_size(self) -> int:
        return len(self.tokenizer.tokenizer)

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt with what the environment tells the model."""
        opening = self.environment.reset(problem)
        messages = list(problem.messages)
        if opening.suffix:
            last = messages[-1]
            if last.role == "user":
                messages[-1] = replace(last, content=last.content + opening.suffix)
            else:
                messages.append(Message("user", opening.suffix.strip()))
        if opening.system is not None:
            if messages[0].role == "system":
                own = messages.pop(0)
                opening = replace(opening, system=f"{own.content}\n\n{opening.system}")
            messages.insert(0, Message("system", opening.system or ""))
        messages += opening.messages
        tools = (*problem.tools, *opening.tools)
        if opening.tools and not self._answers_fit:
            # A model whose template takes no results is refused before anything is sampled.
            self.tokenizer.extend([Message("tool", "1", name="f")], tools, ended=True)
            self._answers_fit = True
        return self.tokenizer.encode_chat(messages, tools)

    def _tools(self, problem: Problem) -> tuple[ToolSchema, ...]:
        return (*problem.tools, *self.environment.reset(problem).tools)

    def open(self, prompt: PromptGroup) -> Episode:
        return Episode(prompt, self.environment.reset(prompt.problem).state)

    def generate(
        self,
        engine: RolloutEngine[Any],
        prompts: Sequence[PromptGroup],
        params: SamplingParams,
        check: Callable[[], None] = lambda: None,
    ) -> list[SampledGroup]:
        """`params.num_generations` whole episodes for each prompt, in order."""
        repeats = range(params.num_generations)
        episodes = [self.open(prompt) for prompt in prompts for _ in repeats]
        for number in range(self.max_turns):
            check()
            going = [i for i, episode in enumerate(episodes) if episode.finish_reason is None]
            advanced = self.advance(engine, [episodes[i] for i in going], params, number)
            for index, episode in zip(going, advanced, strict=True):
                episodes[index] = episode
        found = iter(episodes)
        return [
            SampledGroup(prompt, tuple(completion_of(next(found)) for _ in repeats))
            for prompt in prompts
        ]

    def advance(
        self,
        engine: RolloutEngine[Any],
        episodes: Sequence[Episode],
        params: SamplingParams,
        number: int,
    ) -> list[Episode]:
        """Each of `episodes` one turn on, with the environment's answer to it.

        `params.max_tokens` is the limit of the whole response, observations included. `number`
        tells this call from others with the same seed; that of a first turn is 0, so a response of
        one turn is the one that the engine gives to the prompt.
        """
        if not episodes:
            return []
        seed = params.seed if number == 0 else derive_seed(params.seed, "turn", number)
        prompts = [PromptGroup(e.prompt.problem, _so_far(e)) for e in episodes]
        limits = [params.max_tokens - len(e.token_ids) for e in episodes]
        runs = _runs(prompts)
        same = runs[0][1] if len({count for _, count in runs}) == 1 else 1
        firsts = range(0, len(prompts), same)
        each = tuple(limits[i] for i in firsts)
        request = replace(
            params,
            num_generations=same,
            max_tokens=max(each),
            max_tokens_each=each if len(set(each)) > 1 else (),
            stop_strings=self.environment.stop_strings(),
            seed=seed,
        )
        groups = generate_groups(engine, [prompts[i] for i in firsts], request)
        turns = [completion for group in groups for completion in group.completions]
        after = [self._after(e, turn) for e, turn in zip(episodes, turns, strict=True)]
        going = [index for index, episode in enumerate(after) if episode.finish_reason is None]
        steps = [(after[i].state, self._said(turns[i])) for i in going]
        for index, observation in zip(going, self.answers.to(steps), strict=True):
            room = limits[index] - len(turns[index].token_ids)
            after[index] = self._answered(after[index], turns[index], observation, room)
        return after

    def _after(self, episode: Episode, turn: Completion) -> Episode:
        """The episode after `turn`, which is over where the environment is not to answer it."""
        segments = (*episode.segments, Segment(turn.token_ids, turn))
        counts = {**episode.counts, "turns": episode.counts.get("turns", 0.0) + 1}
        episode = replace(episode, segments=segments, counts=counts)
        cut = turn.finish_reason != "stop" and counts["turns"] >= self.max_turns
        if turn.finish_reason == "length" or cut:
            return replace(episode, finish_reason="length")
        return episode

    def _said(self, turn: Completion) -> Turn:
        return Turn(
            self.tokenizer.decode_response(turn.token_ids),
            turn.finish_reason == "stop",
            self.tokenizer.parse_response(turn.token_ids),
        )

    def _answered(
        self, episode: Episode, turn: Completion, observation: Observation, room: int
    ) -> Episode:
        """The episode after the environment's answer to `turn`, with `room` for so many tokens."""
        counts, ended = dict(episode.counts), turn.finish_reason == "stop"
        for name, value in observation.counts.items():
            counts[name] = counts.get(name, 0.0) + value
        episode = replace(
            episode,
            state=observation.state,
            counts=counts,
            rewards=(*episode.rewards, observation.reward),
            reward=episode.reward if observation.outcome is None else observation.outcome,
        )
        if observation.truncated:
            return replace(episode, finish_reason="length")
        if observation.done:
            return replace(episode, finish_reason=turn.finish_reason)
        if counts["turns"] >= self.max_turns:
            return replace(episode, finish_reason="stop")
        answer = Segment(self._tokens(episode, observation, ended)[: max(room, 0)])
        episode = replace(episode, segments=(*episode.segments, answer))
        cut = len(answer.token_ids) >= room
        return replace(episode, finish_reason="length") if cut else episode

    def _tokens(self, episode: Episode, observation: Observation, ended: bool) -> tuple[int, ...]:
        if observation.messages:
            # The texts are cut, and what the template writes around them is kept whole.
            room, messages = self.max_observation_tokens, []
            for message in observation.messages:
                ids = self.tokenizer.encode_text(message.content, special=False)
                if len(ids) > room:
                    cut = self.tokenizer.tokenizer.decode(list(ids[:room]))
                    message = replace(message, content=str(cut))
                room -= min(len(ids), room)
                messages.append(message)
            last, tools = episode.turns[-1].token_ids[-1:], self._tools(episode.prompt.problem)
            return self.tokenizer.extend(
                messages, tools, ended=ended, last=last[0] if last else None
            )
        ids = self.tokenizer.encode_text(
            observation.text, special=self.environment.reads_special_tokens
        )
        return ids[: self.max_observation_tokens]


def completion_of(episode: Episode, nodes: dict[int, int] | None = None) -> Completion:
    """The finished episode as one response.

    With `nodes`, which is filled on the way and shared by the episodes of a group, each segment is
    a node of their tree: those that several episodes hold in common have one number.
    """
    first = episode.turns[0]
    ids: list[int] = []
    logprobs: list[float] = []
    entropies: list[float] = []
    sampled: list[bool] = []
    node_ids: list[int] = []
    ends: list[int] = []
    keys: list[int] = []
    shown = episode.prompt_ids or episode.prompt.prompt_ids
    for segment in episode.segments:
        size, turn = len(segment.token_ids), segment.turn
        ids += segment.token_ids
        if turn is None:
            shown = segment.token_ids
        else:
            ends.append(len(ids) - 1)
            keys.append(state_key(shown))
            shown = ()
        logprobs += turn.logprobs if turn is not None else [0.0] * size
        entropies += turn.entropies if turn is not None else [0.0] * size
        sampled += [turn is not None] * size
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


def episode_metrics(groups: Sequence[SampledGroup]) -> dict[str, float]:
    """Turns and tool calls of finished episodes; nothing where there were none."""
    counts = [c.counts for group in groups for c in group.completions if c.counts]
    if not counts:
        return {}

    def total(name: str) -> float:
        return sum(found.get(name, 0.0) for found in counts)

    calls = total("calls")
    return {
        "tools/turns": total("turns") / len(counts),
        "tools/calls_per_response": calls / len(counts),
        "tools/failed_frac": total("failed") / calls if calls else 0.0,
    }


def _so_far(episode: Episode) -> tuple[int, ...]:
    return (*episode.prompt.prompt_ids, *episode.token_ids)


def _runs(prompts: Sequence[PromptGroup]) -> list[tuple[PromptGroup, int]]:
    """Neighbours with the same tokens, counted: what an engine computes once."""
    runs: list[tuple[PromptGroup, int]] = []
    for prompt in prompts:
        if runs and runs[-1][0].prompt_ids == prompt.prompt_ids:
            runs[-1] = (prompt, runs[-1][1] + 1)
        else:
            runs.append((prompt, 1))
    return runs
