"""Samplers that remember earlier steps: `curriculum` and `replay`, on made-up verdicts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from posttrain.core.contracts import (
    PromptGroup,
    RolloutRequest,
    SampledGroup,
    SampledRollout,
    Sampler,
)
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Completion, Problem, SamplingParams

MANAGER = PluginManager()
SIZE = 4
"""Responses of a group."""


@dataclass
class World:
    """Problems 0 .. count - 1, again and again; `right` says how many responses are right."""

    count: int
    right: Callable[[int], int]
    version: int = 0
    taken: int = 0
    generated: list[list[int]] = field(default_factory=list)

    def take(self, count: int) -> list[PromptGroup]:
        numbers = [n % self.count for n in range(self.taken, self.taken + count)]
        self.taken += count
        return [PromptGroup(Problem(f"p{n}", f"prompt {n}", "", ""), (n, 7)) for n in numbers]

    def generate(
        self, prompts: Sequence[PromptGroup], params: SamplingParams
    ) -> list[SampledGroup]:
        self.generated.append([prompt.prompt_ids[0] for prompt in prompts])
        return [SampledGroup(p, tuple(self._one(p, i) for i in range(SIZE))) for p in prompts]

    def _one(self, prompt: PromptGroup, index: int) -> Completion:
        ids = (prompt.prompt_ids[0], index)
        return Completion(ids, (-0.1 / 3, -0.5), "stop", self.version, index, "script", "1")

    def verify(self, group: SampledGroup) -> list[float]:
        right = self.right(group.prompt.prompt_ids[0])
        return [1.0] * right + [0.0] * (SIZE - right)

    def request(self, size: int, seed: int = 11) -> RolloutRequest:
        return RolloutRequest(
            engine=None,  # type: ignore[arg-type]
            prompts=self.take(size),
            params=SamplingParams(num_generations=SIZE, seed=seed),
            policy_version=self.version,
            generate=self.generate,
            more_prompts=self.take,
            verify=self.verify,
            check=lambda: None,
        )


def sampler(name: str, **fields: Any) -> Sampler[Any]:
    return MANAGER.build(Sampler, name, fields)


def numbers(rollout: SampledRollout) -> list[int]:
    return [group.prompt.prompt_ids[0] for group in rollout.groups]


def run(
    world: World, plugin: Sampler[Any], size: int, steps: Sequence[int]
) -> list[SampledRollout]:
    found = []
    for step in steps:
        world.version = step
        found.append(plugin.sample(world.request(size, seed=step)))
    return found


# --- curriculum -------------------------------------------------------------------------------

# Problem 0 is never right, 1 always, the others half the time.
HALF = {0: 0, 1: 4}


def half(number: int) -> int:
    return HALF.get(number, 2)


def test_prompts_outside_the_band_give_way_once_they_are_known() -> None:
    world, plugin = World(6, half), sampler("curriculum", explore=0.0, candidates=3.0)
    first = plugin.sample(world.request(2))
    assert numbers(first) == [0, 1], "nothing is known, so the first come"
    assert first.metrics["curriculum/unseen_frac"] == 1.0
    assert first.metrics["curriculum/pass_rate/unseen"] == 0.5
    assert first.metrics["curriculum/known_frac/inside"] == 0.0
    later = [plugin.sample(world.request(2)) for _ in range(6)]
    assert all(not {0, 1} & set(numbers(rollout)) for rollout in later)
    assert later[-1].metrics["curriculum/inside_frac"] == 1.0
    assert later[-1].metrics["curriculum/pass_rate/inside"] == 0.5


def test_new_prompts_come_before_known_ones_that_do_not_fit() -> None:
    world, plugin = World(4, lambda n: 0 if n < 2 else 2), sampler("curriculum", explore=0.0)
    assert numbers(plugin.sample(world.request(2))) == [0, 1]
    assert set(numbers(plugin.sample(world.request(2)))) == {2, 3}
    # Of known ones that do not fit the nearest comes: the batch is never short.
    world = World(3, lambda n: [0, 1, 4][n])
    plugin = sampler("curriculum", explore=0.0, low=0.4, high=0.6)
    plugin.sample(world.request(3))
    assert 1 in numbers(plugin.sample(world.request(2)))  # 0.25 is 0.15 away, the others 0.4


def test_exploring_measures_the_oldest_pass_rates_again() -> None:
    rates = {0: 0, 1: 0, 2: 0}
    world = World(8, lambda n: rates.get(n, 2))
    plugin = sampler("curriculum", explore=0.5, candidates=4.0, decay=0.0)
    found = run(world, plugin, 2, range(1, 9))
    seen = {n for rollout in found for n in numbers(rollout)}
    assert seen == set(range(8)), "the share for exploring reaches all of them"
    rates.clear()  # the policy has learned them
    found = run(world, plugin, 2, range(9, 25))
    assert found[-1].metrics["curriculum/known_frac/inside"] == 1.0


def test_the_running_pass_rate_forgets() -> None:
    rates = [4]
    world, plugin = World(1, lambda n: rates[0]), sampler("curriculum", decay=0.75)
    plugin.sample(world.request(1))
    rates[0] = 0
    plugin.sample(world.request(1))
    (known,) = plugin.state()["known"].values()
    assert known == [0.75, 2]


def test_a_batch_larger_than_the_task_repeats_problems() -> None:
    rollout = sampler("curriculum").sample(World(2, half).request(3))
    assert sorted(numbers(rollout)) == [0, 0, 1] and len(rollout.groups) == 3


def test_failed_episodes_do_not_count_as_wrong() -> None:
    world, plugin = World(1, lambda n: 2), sampler("curriculum")
    request = world.request(1)

    def failing(prompts: Sequence[PromptGroup], params: SamplingParams) -> list[SampledGroup]:
        groups = world.generate(prompts, params)
        return [
            replace(g, completions=tuple(replace(c, failed="crash") for c in g.completions))
            for g in groups
        ]

    plugin.sample(replace(request, generate=failing))
    assert plugin.state()["known"] == {}


def test_branches_of_an_episode_have_one_verdict() -> None:
    (group,) = World(1, lambda n: 2).generate(World(1, half).take(1), SamplingParams())
    one, two, three, four = group.completions
    completions = (
        replace(one, episode=0),
        replace(two, episode=0, elsewhere=(True, False)),
        three,
        replace(four, failed="crash"),
    )
    group = replace(group, completions=completions)
    assert group.of_episodes([1.0, 1.0, 0.0, 1.0]) == [1.0, 0.0]
    assert group.sampled_tokens == 4 * 2 - 1


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"low 0\.8 is not below high 0\.2"):
        sampler("curriculum", low=0.8, high=0.2)


# --- replay -----------------------------------------------------------------------------------


def test_only_groups_that_differ_are_replayed_at_most_as_often_as_allowed() -> None:
    # Every third problem is all right and teaches nothing.
    world, plugin = World(1000, lambda n: 4 if n % 3 == 0 else 2), sampler("replay", share=0.25)
    first, *rest = run(world, plugin, 4, range(1, 6))
    assert numbers(first) == [0, 1, 2, 3]
    assert first.metrics["replay/taken_frac"] == 0 and first.metrics["replay/admitted"] == 2
    replayed = [n for rollout in rest for n in numbers(rollout)[3:]]
    assert len(set(replayed)) == 4 and not [n for n in replayed if n % 3 == 0]
    assert [len(found) for found in world.generated] == [4, 3, 3, 3, 3]
    assert all(len(rollout.groups) == 4 for rollout in rest)
    assert rest[0].metrics["replay/taken_frac"] == 0.25 and rest[0].metrics["replay/lag_mean"] == 1
    assert rest[0].metrics["replay/priority_mean"] == 0.5
    assert rest[0].metrics["sampling/tokens_drawn"] == 3 * SIZE * 2


def test_replayed_groups_are_as_they_were_sampled() -> None:
    world, plugin = World(1000, lambda n: 2), sampler("replay", share=0.5)
    first, second = run(world, plugin, 2, [1, 3])
    (old,) = [g for g in second.groups if g.policy_version == 1]
    assert old in first.groups


def test_too_old_groups_leave() -> None:
    world, plugin = World(1000, lambda n: 2), sampler("replay", share=0.5, max_lag=2)
    assert plugin.max_lag() == 2
    run(world, plugin, 4, [1])
    late = run(world, plugin, 4, [4])[0]
    assert late.metrics["replay/expired"] == 4 and late.metrics["replay/taken_frac"] == 0
    assert all(group.policy_version == 4 for group in late.groups)


def test_beyond_the_capacity_the_least_informative_leave() -> None:
    world = World(1000, lambda n: 1 if n % 2 else 2)
    plugin = sampler("replay", share=0.1, capacity=3)
    run(world, plugin, 6, [1])
    assert plugin.state()["priorities"] == [0.5, 0.5, 0.5]


def test_likelier_to_be_taken_is_what_taught_more() -> None:
    counts = [0, 0]
    for seed in range(200):
        world = World(1000, lambda n: 2 if n % 2 else 1)
        plugin = sampler("replay", share=0.5, exponent=4.0)
        run(world, plugin, 2, [1])
        taken = plugin.sample(world.request(2, seed=seed)).groups[-1]
        counts[taken.prompt.prompt_ids[0] % 2] += 1
    # 0.5^4 against 0.433^4: 64 %.
    assert 105 < counts[1] < 150


def test_a_task_of_few_problems_is_replayed_too() -> None:
    world, plugin = World(2, lambda n: 2), sampler("replay", share=0.5)
    first, second = run(world, plugin, 2, [1, 2])
    assert numbers(first) == [0, 1] and second.groups[1] in first.groups
    assert second.metrics["replay/taken_frac"] == 0.5


# --- both -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [("curriculum", {"explore": 0.5}), ("replay", {"share": 0.5, "max_uses": 2, "max_lag": 3})],
)
def test_a_resumed_run_draws_the_same(name: str, fields: dict[str, Any]) -> None:
    draw = random.Random(3)
    rates = [draw.randrange(SIZE + 1) for _ in range(40)]
    world, plugin = World(40, lambda n: rates[n]), sampler(name, **fields)
    run(world, plugin, 6, range(1, 8))
    saved, taken = json.loads(json.dumps(plugin.state())), world.taken
    ahead = run(world, plugin, 6, range(8, 14))
    again, fresh = World(40, lambda n: rates[n], taken=taken), sampler(name, **fields)
    fresh.load_state(saved)
    assert run(again, fresh, 6, range(8, 14)) == ahead
    assert fresh.state() == plugin.state()
    other = World(40, lambda n: rates[n], taken=taken)
    assert run(other, sampler(name, **fields), 6, range(8, 14)) != ahead, "the state matters"
