"""What samplers promise, on made-up responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

from posttrain.core.contracts import (
    PromptGroup,
    RolloutRequest,
    SampledGroup,
    SampledRollout,
)
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.types import Completion, Problem, SamplingParams

PROMPTS = 6
PARAMS = SamplingParams(num_generations=4, max_tokens=8, seed=3)


def _prompts(first: int, count: int) -> list[PromptGroup]:
    numbers = range(first, first + count)
    return [PromptGroup(Problem(f"{n}", f"{n}?", f"{n}", f"{n}"), (n + 1,)) for n in numbers]


class Script:
    """A request whose responses are made up: each row is right or wrong by its number."""

    def __init__(self) -> None:
        self.asked = PROMPTS

    def generate(
        self, prompts: Sequence[PromptGroup], params: SamplingParams
    ) -> list[SampledGroup]:
        return [
            SampledGroup(p, tuple(self._completion(p, i) for i in range(params.num_generations)))
            for p in prompts
        ]

    def _completion(self, prompt: PromptGroup, index: int) -> Completion:
        ids = (*prompt.prompt_ids, index + 1)
        return Completion(ids, (-0.5,) * len(ids), "stop", 0, index, "script", "1")

    def more_prompts(self, count: int) -> list[PromptGroup]:
        self.asked += count
        return _prompts(self.asked - count, count)

    def verify(self, group: SampledGroup) -> list[float]:
        first = group.prompt.prompt_ids[0]
        # Every third prompt has only right answers, which dynamic sampling leaves out.
        return [1.0 if first % 3 == 0 else float(i % 2) for i in range(len(group.completions))]

    def request(self) -> RolloutRequest:
        engine: Any = None  # Any: a sampler that samples itself needs an environment
        return RolloutRequest(
            engine=engine,
            prompts=_prompts(0, PROMPTS),
            params=PARAMS,
            policy_version=0,
            generate=self.generate,
            more_prompts=self.more_prompts,
            verify=self.verify,
            check=lambda: None,
        )


def _sampled(subject: Subject) -> SampledRollout:
    if subject.cls.needs_environment:
        raise Skipped("it works on episodes of several turns only")
    refused = subject.build().refuses(PARAMS.num_generations)
    if refused:
        raise Skipped(f"it takes no groups of {PARAMS.num_generations}: {refused}")
    found: SampledRollout = subject.build().sample(Script().request())
    return found


@check("groups hold as many responses as asked for, of different prompts", "sampler")
def _groups(subject: Subject) -> None:
    found = _sampled(subject)
    expect(isinstance(found, SampledRollout), f"it gives {type(found).__name__}")
    expect(found.groups, "it gives no group, although most prompts have right and wrong answers")
    for group in found.groups:
        size = len(group.completions)
        expect_equal(size, PARAMS.num_generations, "responses in a group")
    keys = [group.prompt.problem.key for group in found.groups]
    expect_equal(len(set(keys)), len(keys), "different prompts among the groups")


@check("the same request gives the same groups", "sampler")
def _same_groups(subject: Subject) -> None:
    expect(_sampled(subject) == _sampled(subject), "a second sampler gives others")


@check("its metrics are finite and named as metrics are", "sampler")
def _metrics(subject: Subject) -> None:
    metrics = _sampled(subject).metrics
    check_names(metrics)
    odd = sorted(name for name, value in metrics.items() if not isfinite(value))
    expect(not odd, f"{odd} are not finite")


@check("it continues from its state, which is JSON", "sampler")
def _state(subject: Subject) -> None:
    _sampled(subject)
    first, second = subject.build(), subject.build()
    first.sample(Script().request())
    second.load_state(json.loads(json.dumps(first.state())))
    expect_equal(second.state(), first.state(), "the state that was loaded")
    expect(first.max_lag() >= 0 and first.smallest_group() >= 1, "max_lag or smallest_group is odd")
