"""An environment whose episodes a program plays, with a policy that says given texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posttrain.core.contracts import (
    EngineSetup,
    NoConfig,
    PlayedEnvironment,
    PromptGroup,
    RolloutEngine,
    SampledGroup,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import PosttrainError
from posttrain.core.gateway.runner import PlayedRunner
from posttrain.core.kit.checks import Broken, Finding, Skipped, broken, expect, raised
from posttrain.core.kit.env_play import EnvironmentSubject
from posttrain.core.rollout.plays import EpisodeLimits
from posttrain.core.rollout.turns import first_branches
from posttrain.core.types import Completion, Problem, SamplingParams

ROOM = 1_000_000
EPISODE_S = 120.0
PROMISE_S = 60.0


class Script(RolloutEngine[NoConfig]):
    """Answers with its texts, one after another and the last again and again."""

    name = "script"
    Config = NoConfig

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(NoConfig())
        self.tokenizer = tokenizer
        self.begin([""])

    def begin(self, texts: Sequence[str]) -> None:
        """What is said from now on."""
        self.texts, self._said = tuple(texts), 0

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    def start(self, setup: EngineSetup) -> None:
        """Nothing is loaded."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """The next text for each prompt, to its end, or as much as may be said."""
        made = []
        for _ in prompts:
            text = self.texts[min(self._said, len(self.texts) - 1)]
            self._said += 1
            ids = self.tokenizer.encode_response(text)
            cut = ids[: params.max_tokens]
            ended = "stop" if len(cut) == len(ids) else "length"
            found = Completion(cut, (0.0,) * len(cut), ended, 0, params.seed, self.name, "")  # type: ignore[arg-type]
            made.append([found] * params.num_generations)
        return made

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError("a script has no probabilities")

    def sync_weights(self, weights: Iterable[Any], policy_version: int) -> None:
        """It has no weights."""

    def close(self) -> None:
        """Nothing is held."""


def no_reward(rewards: Sequence[float], what: str) -> str:
    """The rewards of a policy that knows nothing; `Broken` where one is above 0."""
    if not rewards:
        raise Skipped("nothing scores such an episode")
    shown = ", ".join(f"{reward:g}" for reward in rewards)
    expect(max(rewards) <= 0, f"{what} gets the rewards {shown}")
    return f"rewards {shown}"


class PlayedCheck:
    """One environment, whose program finds a gateway as in training."""

    def __init__(self, environment: PlayedEnvironment[Any], subject: EnvironmentSubject) -> None:
        self.subject, self.engine = subject, Script(subject.tokenizer)
        at_once = min(subject.at_once, environment.at_once)
        limits = EpisodeLimits(at_once, EPISODE_S, PROMISE_S, 1.0, ROOM)
        self.runner = PlayedRunner(environment, subject.tokenizer, limits, subject.max_turns)

    def play(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[SampledGroup]:
        """An episode of each problem, at once; with several of them one text is said by all."""
        self.engine.begin(texts)
        prompts = [PromptGroup(problem, ()) for problem in problems]
        return self.runner.generate(self.engine, prompts, SamplingParams(max_tokens=ROOM))

    def attack(self, says: Callable[[Problem], str], what: str) -> str:
        """The rewards of a policy that knows nothing; `Broken` where one is above 0."""
        found = [self.play([p], [says(p)])[0].completions for p in self.subject.problems]
        rewards = [each[0].reward for each in found if each[0].reward is not None]
        return no_reward(rewards, what)

    def to_the_end(self) -> str:
        """Episodes with the turns that were given."""
        texts = self.subject.turns or ("2",)
        found = [self.play([p], texts)[0].completions for p in self.subject.problems]
        failed = [each[0].failed for each in found if each[0].failed]
        if failed:
            broken(f"{len(failed)} of {len(found)} episodes failed, the first: {failed[0]}")
        calls = sum(each[0].counts.get("turns", 0.0) for each in found)
        given = [each[0].reward for each in found]
        shown = ", ".join("none" if reward is None else f"{reward:g}" for reward in given)
        branches = sum(map(len, found))
        return f"{len(found)} episodes, {calls:g} requests, {branches} rows; rewards {shown}"

    def many(self) -> str:
        """As many episodes as are asked for, at once."""
        subject = self.subject
        problems = [subject.problems[n % len(subject.problems)] for n in range(subject.at_once)]
        began = time.perf_counter()
        found = [
            completion
            for group in self.play(problems, (subject.turns or ("2",))[-1:])
            for completion in first_branches(group.completions)
        ]
        took = time.perf_counter() - began
        failed = [each.failed for each in found if each.failed]
        if failed:
            broken(f"{len(failed)} of {len(found)} episodes failed, the first: {failed[0]}")
        return f"{len(found)} episodes in {took:.2f} s: {len(found) / took:.1f} episodes/s"


def check_played(environment: PlayedEnvironment[Any], subject: EnvironmentSubject) -> list[Finding]:
    """How each check ended. Raises `PosttrainError` where the environment refuses to start."""
    check = PlayedCheck(environment, subject)
    checks: dict[str, Callable[[], str]] = {
        "episodes are played to their end": check.to_the_end,
        "attack: empty answers": lambda: check.attack(lambda _: "", "saying nothing"),
        "attack: one word again and again": lambda: check.attack(
            lambda _: "yes " * 200, "a word again and again"
        ),
        "attack: the prompt as the answer": lambda: check.attack(
            lambda problem: problem.prompt, "repeating the prompt"
        ),
        "many episodes at once": check.many,
    }
    findings: list[Finding] = []
    try:
        _ = check.runner.loop  # it starts
        for name, function in checks.items():
            if findings and findings[0].state == "failed":
                first = next(iter(checks))
                findings.append(Finding(name, "skipped", f"first correct: {first}"))
            else:
                findings.append(_found(name, function))
    finally:
        check.runner.close()
    return findings


def _found(name: str, function: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "passed", function())
    except Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except (Broken, PosttrainError) as error:
        return Finding(name, "failed", str(error))
    except Exception as error:  # somebody else's code: what it raised is the finding
        return Finding(name, "failed", raised(error))
