"""The sampler `"dynamic"` on a scripted engine and verifier: what it keeps, asks for, carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from posttrain.core.errors import RunError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.episodes import groups_from_json, groups_to_json
from posttrain.core.types import Completion, Problem, SamplingParams
from posttrain.plugins.samplers.dynamic import round_size

MANAGER = PluginManager()
RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)
TOKENS = 2 * 3  # of a group: two responses of three tokens


@dataclass
class Script:
    """Verdicts of each prompt of an endless stream, in order; the last one for ever."""

    verdicts: Sequence[tuple[float, ...]]
    version: int = 0
    taken: int = 0
    rounds: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    checks: int = 0

    def take(self, count: int) -> list[PromptGroup]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [PromptGroup(Problem(f"p{n}", f"prompt {n}", "", ""), (n, 7)) for n in numbers]

    def generate(
        self, prompts: Sequence[PromptGroup], params: SamplingParams
    ) -> list[SampledGroup]:
        self.rounds.append([prompt.prompt_ids[0] for prompt in prompts])
        self.seeds.append(params.seed)
        return [SampledGroup(prompt, self._completions(prompt)) for prompt in prompts]

    def _completions(self, prompt: PromptGroup) -> tuple[Completion, ...]:
        number = prompt.prompt_ids[0]
        return tuple(
            Completion(
                (number, i, 5), (-0.1 / 3, -1e-17, -0.5), "stop", self.version, i, "script", "1"
            )
            for i in range(2)
        )

    def verify(self, group: SampledGroup) -> Sequence[float]:
        number = group.prompt.prompt_ids[0]
        return self.verdicts[min(number, len(self.verdicts) - 1)]

    def check(self) -> None:
        self.checks += 1

    def request(self, size: int) -> RolloutRequest:
        return RolloutRequest(
            engine=None,  # type: ignore[arg-type]
            prompts=self.take(size),
            params=SamplingParams(num_generations=2, seed=11),
            policy_version=self.version,
            generate=self.generate,
            more_prompts=self.take,
            verify=self.verify,
            check=self.check,
        )


def sampler(**fields: Any) -> Sampler[Any]:
    return MANAGER.build(Sampler, "dynamic", fields)


def numbers(rollout: SampledRollout) -> list[int]:
    return [group.prompt.prompt_ids[0] for group in rollout.groups]


def counted(rollout: SampledRollout, *names: str) -> list[float]:
    return [rollout.metrics[f"sampling/{name}"] for name in names]


def test_only_mixed_groups_are_kept_and_others_are_drawn_for_the_rest() -> None:
    script = Script([MIXED, RIGHT, WRONG, MIXED, MIXED, MIXED])
    rollout = sampler().sample(script.request(4))
    assert script.rounds == [[0, 1, 2, 3], [4, 5, 6, 7]], "half were kept, so 2 / 0.5 are asked for"
    assert numbers(rollout) == [0, 3, 4, 5]
    assert counted(rollout, "rounds", "prompts_drawn", "acceptance") == [2, 8, 6 / 8]
    assert counted(rollout, "dropped_all_right", "dropped_all_wrong") == [1, 1]
    assert counted(rollout, "carried_in", "carried_out", "exhausted") == [0, 2, 0]
    assert counted(rollout, "tokens_drawn", "tokens_wasted") == [8 * TOKENS, 2 * TOKENS]
    assert rollout.metrics["sampling/verdict_mean"] == (6 * 0.5 + 1) / 8
    assert script.checks == 2, "reported to stop, it stops between rounds"


@pytest.mark.parametrize(
    ("missing", "accepted", "drawn", "size"),
    [
        (8, 0, 0, 8),  # nothing is known yet
        (4, 4, 8, 8),
        (3, 5, 8, 5),  # 3 / (5 / 8) = 4.8
        (1, 7, 8, 2),
        (7, 1, 8, 16),  # 56, but at most 16
        (8, 0, 8, 16),  # as if one had been kept
        (20, 19, 20, 20),  # never fewer than are missing
    ],
)
def test_a_round_asks_for_what_the_acceptance_says_is_missing(
    missing: int, accepted: int, drawn: int, size: int
) -> None:
    assert round_size(missing, accepted, drawn, 16) == size


def test_rounds_are_bounded_and_each_draws_anew() -> None:
    script = Script([WRONG])
    rollout = sampler(max_rounds=3).sample(script.request(2))
    assert not rollout.groups
    assert [len(found) for found in script.rounds] == [2, 4, 4]
    assert len(set(script.seeds)) == 3 and script.seeds[0] == 11
    assert counted(rollout, "exhausted", "acceptance", "dropped_all_wrong") == [1, 0, 10]


def test_a_verdict_below_one_is_wrong_unless_spread_is_asked_for() -> None:
    halves = Script([(0.5, 0.0), (0.5, 0.5), (0.5, 1.0), (0.0, 0.0), (1.0, 1.0)])
    rollout = sampler(max_rounds=1).sample(halves.request(5))
    assert numbers(rollout) == [2]
    assert counted(rollout, "dropped_all_wrong", "dropped_all_right") == [3, 1]
    again = replace(halves, taken=0)
    rollout = sampler(max_rounds=1, keep="spread").sample(again.request(5))
    assert numbers(rollout) == [0, 2]
    kinds = counted(rollout, "dropped_all_wrong", "dropped_all_right", "dropped_equal")
    assert kinds == [1, 1, 1]


def test_an_episode_that_failed_is_not_a_wrong_answer() -> None:
    """A right answer next to a lost server: such a group is not mixed, all its advantages are 0."""
    script = Script([RIGHT, RIGHT, MIXED])
    failed = {0: (False, True), 1: (True, True), 2: (False, False)}

    def generate(prompts: Sequence[PromptGroup], params: SamplingParams) -> list[SampledGroup]:
        return [
            replace(
                group,
                completions=tuple(
                    replace(c, failed="the server is gone" if lost else "")
                    for c, lost in zip(group.completions, failed[number], strict=True)
                ),
            )
            for number, group in enumerate(script.generate(prompts, params))
        ]

    def verify(group: SampledGroup) -> Sequence[float]:
        said = zip(group.completions, script.verify(group), strict=True)
        return [0.0 if completion.failed else verdict for completion, verdict in said]

    request = replace(script.request(3), generate=generate, verify=verify)
    rollout = sampler(max_rounds=1).sample(request)
    assert numbers(rollout) == [2]
    assert counted(rollout, "dropped_all_right", "dropped_all_wrong", "dropped_failed") == [1, 0, 1]
    assert rollout.metrics["sampling/verdict_mean"] == (1 + 1) / 3


def surplus_script() -> Script:
    """The first step of two prompts keeps three groups: 1, 2, 3."""
    return Script([WRONG, MIXED, MIXED, MIXED, WRONG, WRONG, MIXED])


def test_surplus_groups_serve_the_next_step_while_they_are_fresh() -> None:
    script, dynamic = surplus_script(), sampler()
    first = dynamic.sample(script.request(2))
    assert numbers(first) == [1, 2] and counted(first, "carried_out") == [1]
    script.version = 1
    second = dynamic.sample(script.request(2))
    assert script.rounds[2] == [4], "one group is there, so one prompt is sampled first"
    assert numbers(second) == [3, 6]
    assert [g.completions[0].policy_version for g in second.groups] == [0, 1]
    assert counted(second, "carried_in", "dropped_stale") == [1, 0]


def test_carried_groups_that_are_too_old_are_dropped_and_counted() -> None:
    script, dynamic = surplus_script(), sampler(max_lag=1)
    dynamic.sample(script.request(2))
    script.version = 2
    second = dynamic.sample(script.request(2))
    assert counted(second, "carried_in", "dropped_stale") == [0, 1]
    assert all(group.completions[0].policy_version == 2 for group in second.groups)
    assert second.metrics["sampling/tokens_wasted"] >= TOKENS


@pytest.mark.parametrize("fields", [{"surplus": "drop"}, {"max_carry": 0}])
def test_surplus_beyond_the_limit_is_dropped_and_counted(fields: dict[str, Any]) -> None:
    script, dynamic = surplus_script(), sampler(**fields)
    first = dynamic.sample(script.request(2))
    assert counted(first, "carried_out", "dropped_surplus") == [0, 1]
    assert dynamic.state()["carried"] == []


def test_only_a_sampler_that_carries_over_gives_older_samples() -> None:
    assert sampler().max_lag() == 1
    assert sampler(max_lag=3).max_lag() == 3
    assert sampler(surplus="drop").max_lag() == 0


def test_prompts_that_carried_groups_made_needless_are_sampled_later() -> None:
    # With size 1: step 1 keeps one group and carries another two.
    script, dynamic = Script([WRONG, WRONG, MIXED]), sampler(max_carry=3, max_round_size=4.0)
    dynamic.sample(script.request(1))
    dynamic.sample(script.request(1))
    dynamic.sample(script.request(1))
    sampled = [number for found in script.rounds for number in found]
    assert len(set(sampled)) == len(sampled), "no prompt twice"
    left = [p["prompt_ids"][0] for p in dynamic.state()["waiting"]]
    resumed = sampler(max_carry=3)
    resumed.load_state(json.loads(json.dumps(dynamic.state())))
    assert resumed.state() == dynamic.state()
    assert sorted([*sampled, *left]) == list(range(script.taken)), "no prompt lost"
    assert left, "otherwise this test shows nothing"


EXHAUSTED = [MIXED, WRONG, RIGHT, WRONG]


@pytest.mark.parametrize(
    ("mode", "found"),
    [("train_partial", [0]), ("pad_degenerate", [0, 1, 2]), ("replace", [0, 0, 0])],
)
def test_what_becomes_of_a_batch_that_could_not_be_filled(mode: str, found: list[int]) -> None:
    rollout = sampler(max_rounds=1, on_exhaustion=mode).sample(Script(EXHAUSTED).request(3))
    assert numbers(rollout) == found
    assert counted(rollout, "exhausted", "carried_out") == [1, 0]


def test_exhaustion_can_stop_the_run_with_what_was_found() -> None:
    with pytest.raises(RunError, match=r"kept 1 of the 3 groups .* after 1 rounds and 3 prompts"):
        sampler(max_rounds=1, on_exhaustion="error").sample(Script(EXHAUSTED).request(3))


@pytest.mark.parametrize("mode", ["train_partial", "replace"])
def test_with_nothing_kept_there_is_nothing_to_train_on(mode: str) -> None:
    rollout = sampler(max_rounds=1, on_exhaustion=mode).sample(Script([RIGHT]).request(2))
    assert list(rollout.groups) == []


def test_a_resumed_sampler_goes_on_as_if_nothing_had_happened() -> None:
    whole, script = sampler(), surplus_script()
    whole.sample(script.request(2))
    state: Mapping[str, Any] = json.loads(json.dumps(whole.state()))
    assert state["carried"], "otherwise this test shows nothing"
    resumed, resumed_script = sampler(), replace(script, rounds=[], seeds=[])
    resumed.load_state(state)
    assert resumed.state() == whole.state()
    script.version = resumed_script.version = 1
    expected = whole.sample(script.request(2))
    assert resumed.sample(resumed_script.request(2)) == expected


def test_groups_come_back_from_json_exactly() -> None:
    problem = Problem("k", "2+2", "4", "2+2 = 4", {"level": "easy"})
    completion = Completion(
        (3, 4, 5),
        (-0.1, -1 / 3, -1e-300),
        "stop_string",
        7,
        2**62 + 1,
        "e",
        "1.2",
        entropies=(0.1, 0.2, 0.3),
        sampled=(True, False, True),
        node_ids=(0, 1, 1),
    )
    groups = [SampledGroup(PromptGroup(problem, (1, 2)), (completion, completion))]
    assert groups_from_json(json.loads(json.dumps(groups_to_json(groups)))) == groups


def test_groups_of_another_version_are_named_as_such() -> None:
    groups = groups_to_json([SampledGroup(PromptGroup(Problem("k", "p", "a", "w"), (1,)), ())])
    groups[0]["prompt"]["problem"]["colour"] = "red"
    with pytest.raises(RunError, match=r"does not fit this version .*colour.*--fresh"):
        groups_from_json(groups)
