"""Responses of one or several turns, and sampled groups as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, Protocol

from posttrain.core.contracts import Environment, PromptGroup, RolloutEngine, SampledGroup
from posttrain.core.contracts.rollout import Episode
from posttrain.core.data.problems import problem_from_json, problem_to_json
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.rollout.answers import Answers, AnswersHere
from posttrain.core.rollout.turns import Turns, completion_of, first_branches, so_far
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Problem, SamplingParams


class Generates(Protocol):
    """Whoever runs whole episodes of an environment."""

    def generate(
        self,
        engine: RolloutEngine[Any],
        prompts: Sequence[PromptGroup],
        params: SamplingParams,
        check: Callable[[], None] = lambda: None,
    ) -> list[SampledGroup]:
        """`params.num_generations` episodes for each prompt, in order."""


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
            tuple(map(_completion, value["completions"])),
        )
        for value in values
    ]


def _completion(value: Mapping[str, Any]) -> Completion:
    fields: Json = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    try:
        return Completion(**fields)
    except TypeError as error:
        raise _other_version(error) from error


def _other_version(error: Exception) -> RunError:
    return RunError(
        f"a stored rollout does not fit this version ({error}): run with --fresh to start the "
        "stage again"
    )


class EpisodeRunner:
    """Runs the episodes of an environment whose states are values, all of them turn by turn."""

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
        self.turns = Turns(
            tokenizer,
            max_turns,
            max_observation_tokens,
            environment.reads_special_tokens,
            environment.gives_rewards,
        )

    @property
    def vocabulary_size(self) -> int:
        return len(self.tokenizer.tokenizer)

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt with what the environment tells the model."""
        return self.turns.prompt(problem, self.environment.reset(problem))

    def open(self, prompt: PromptGroup) -> Episode:
        opening = self.environment.reset(prompt.problem)
        return Episode(prompt, opening.state, (*prompt.problem.tools, *opening.tools))

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
        for number in range(self.turns.max_turns):
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
        # Neighbours with the same tokens, counted: what an engine computes once.
        runs = {len([*alike]) for _, alike in groupby(map(so_far, episodes))}
        same = runs.pop() if len(runs) == 1 else 1
        firsts = episodes[::same]
        each = tuple(params.max_tokens - len(e.token_ids) for e in firsts)
        request = replace(
            params,
            num_generations=same,
            max_tokens=max(each),
            max_tokens_each=each if len(set(each)) > 1 else (),
            stop_strings=self.environment.stop_strings(),
            seed=seed,
        )
        prompts = [PromptGroup(e.prompt.problem, so_far(e)) for e in firsts]
        groups = generate_groups(engine, prompts, request)
        turns = [completion for group in groups for completion in group.completions]
        after = [self.turns.after(e, turn) for e, turn in zip(episodes, turns, strict=True)]
        going = [index for index, episode in enumerate(after) if episode.finish_reason is None]
        steps = [(after[i].state, self.turns.said(after[i])) for i in going]
        for index, observation in zip(going, self.answers.to(steps), strict=True):
            after[index] = self.turns.answered(after[index], observation, params.max_tokens)
        return after


def episode_metrics(groups: Sequence[SampledGroup]) -> dict[str, float]:
    """Turns, calls and outcomes of finished episodes; nothing where there were none."""
    completions = [c for group in groups for c in group.completions]
    episodes = [c for group in groups for c in first_branches(group.completions)]
    counts = [c.counts for c in episodes if c.counts]
    metrics: dict[str, float] = {}

    def total(name: str) -> float:
        return sum(found.get(name, 0.0) for found in counts)

    if counts:
        calls = total("calls")
        metrics |= {
            "tools/turns": total("turns") / len(counts),
            "tools/calls_per_response": calls / len(counts),
            "tools/failed_frac": total("failed") / calls if calls else 0.0,
        }
    if asked := sum(found["turns"] for found in counts if "altered" in found):
        metrics |= {f"gateway/{n}_frac": total(n) / asked for n in ("altered", "undelivered")}
    if outcomes := [c.reward for c in episodes if c.reward is not None]:
        metrics["env/outcome"] = sum(outcomes) / len(outcomes)
    parts = {n for found in counts for n in found if n.startswith(("reward/", "metric/"))}
    for name in sorted(parts):
        given = [found[name] for found in counts if name in found]
        metrics[f"env/{name}"] = sum(given) / len(given)
    if any(c.failed for c in episodes):
        metrics["env/failed_frac"] = sum(bool(c.failed) for c in episodes) / len(episodes)
    if len(completions) > len(episodes):
        metrics["env/branches"] = len(completions) / len(episodes)
    return metrics
