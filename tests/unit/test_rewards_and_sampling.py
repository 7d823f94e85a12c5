"""Rewards `"accuracy"` and `"format"`, the sampler `"group"` and the algorithm `"grpo"`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import yaml
from torch import Tensor

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    Algorithm,
    EngineSetup,
    NoConfig,
    PromptGroup,
    Reward,
    RolloutEngine,
    RolloutRequest,
    Sampler,
)
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.episodes import generate_groups
from posttrain.core.types import Completion, Problem, RewardSample, SamplingParams, Verdict

MANAGER = PluginManager()
PROBLEM = Problem("k", "What is 1 + 1?", "2", "1 + 1 = 2")


def sample(text: str, verdict: Verdict) -> RewardSample:
    return RewardSample(PROBLEM, (1,), (2, 3), text, False, verdict)


def format_values(texts: list[str], **fields: object) -> list[float | None]:
    reward = MANAGER.build(Reward, "format", fields)
    return [s.value for s in reward.score([sample(text, Verdict(0.0, None)) for text in texts])]


def test_accuracy_is_the_verdict_in_order_and_tells_what_could_not_be_read() -> None:
    verdicts = [Verdict(1.0, "2"), Verdict(0.0, None), Verdict(0.25, "3")]
    scores = MANAGER.build(Reward, "accuracy").score([sample("", v) for v in verdicts])
    assert [(s.value, s.status, s.detail) for s in scores] == [
        (1.0, "ok", ""),
        (0.0, "ok", "no answer found"),
        (0.25, "ok", ""),
    ]


def test_format_wants_the_whole_text_by_default() -> None:
    right = "<think>a\nb</think>\n<answer>2</answer>\n"
    assert format_values([right, right + "and more", "2", ""]) == [1.0, 0.0, 0.0, 0.0]


def test_format_finds_a_pattern_anywhere_when_told() -> None:
    got = format_values(["it is = 2, yes", "2"], pattern=r"= -?\d+", match="anywhere")
    assert got == [1.0, 0.0]


def test_a_broken_pattern_is_a_config_error_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"reward 'format': pattern: .*not a regular expression"):
        MANAGER.build(Reward, "format", {"pattern": "("})


class ListedEngine(RolloutEngine[NoConfig]):
    """Answers prompt [p] with the tokens p*10, p*10 + 1, ...; drops `lost` of each group."""

    name = "listed"
    Config = NoConfig
    calls = 0
    lost = 0

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    def start(self, setup: EngineSetup) -> None: ...
    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None: ...
    def close(self) -> None: ...
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-0.5] * (len(ids) - 1) for ids in sequences]

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        self.calls += 1
        return [
            [
                Completion((prompt[0] * 10 + i,), (-0.5,), "stop", 0, i, self.name, "1")
                for i in range(params.num_generations - self.lost)
            ]
            for prompt in prompts
        ]


def request(
    engine: ListedEngine, prompts: Sequence[PromptGroup], num_generations: int
) -> RolloutRequest:
    return RolloutRequest(
        engine=engine,
        prompts=prompts,
        params=SamplingParams(num_generations=num_generations),
        policy_version=0,
        generate=partial(generate_groups, engine),
        more_prompts=lambda count: [],
        verify=lambda group: [1.0] * len(group.completions),
        check=lambda: None,
    )


def test_the_group_sampler_asks_once_and_keeps_prompts_with_their_completions() -> None:
    engine = ListedEngine(NoConfig())
    prompts = [PromptGroup(PROBLEM, (p,)) for p in (4, 2)]
    rollout = MANAGER.build(Sampler, "group").sample(request(engine, prompts, 3))
    groups = rollout.groups
    assert engine.calls == 1
    assert [group.prompt for group in groups] == prompts
    tokens = [[completion.token_ids[0] for completion in group.completions] for group in groups]
    assert tokens == [[40, 41, 42], [20, 21, 22]]


def test_the_group_sampler_refuses_groups_that_are_too_small() -> None:
    engine = ListedEngine(NoConfig())
    engine.lost = 1
    with pytest.raises(RunError, match=r"engine 'listed' returned groups of \[1\]"):
        MANAGER.build(Sampler, "group").sample(request(engine, [PromptGroup(PROBLEM, (1,))], 2))


def test_the_grpo_preset_is_an_rl_stage_as_it_would_be_written() -> None:
    fields = MANAGER.build(Algorithm, "grpo").expand()
    assert yaml.safe_load(yaml.safe_dump(fields)) == fields
    stage = RlStage.model_validate({"kind": "rl", **fields})
    assert stage.advantage.name == "grpo"
    assert stage.policy_loss.fields() == {"clip_low": 0.2, "clip_high": 0.2}
    assert stage.aggregator.name == "seq-mean-token-mean"
    assert stage.kl.estimator.name == "k3" and stage.kl.place == "loss"
    assert stage.kl.controller.fields() == {"coef": 0.04}
    for kind in ("advantage", "policy_loss", "aggregator"):
        component = getattr(stage, kind)
        MANAGER.config(kind, component.name, component.fields())
