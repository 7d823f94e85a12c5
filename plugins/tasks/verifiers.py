"""The tasks of a verifiers taskset, which its environment plays and scores."""

from __future__ import annotations

import random

from pydantic import Field, model_validator

from posttrain.core.contracts import Task
from posttrain.core.data.messages import chat_text, messages_from_json
from posttrain.core.data.problem_sets import problems_digest
from posttrain.core.math.splits import split_of, too_few
from posttrain.core.rollout.verifiers_client import UNNAMED, VerifiersSource, listed
from posttrain.core.store.manifests import combine_digests
from posttrain.core.types import Problem, Split, Verdict


class VerifiersTaskConfig(VerifiersSource):
    """Settings of `verifiers`; an environment `verifiers` of a stage takes them from here."""

    python: str = Field(
        min_length=1,
        description="Python of the virtual environment that has verifiers, or its folder",
    )
    limit: int | None = Field(
        default=None, ge=2, description="tasks to read at most; null = all, if they have an end"
    )
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 tasks, how many are never trained on"
    )

    @model_validator(mode="after")
    def _is_named(self) -> VerifiersTaskConfig:
        if self.taskset is None and self.path is None:
            raise ValueError(UNNAMED)
        return self


class VerifiersTask(Task[VerifiersTaskConfig]):
    """The tasks of a taskset, judged by the rewards of their episodes.

    Formula: key = the taskset's own key of a task, else the digest of its content without its
    place in the order; held out if and only if sha256(key) mod 1000 < held_out_permille. Equal
    tasks count once. correct = the episode's reward, within [0, 1].
    Source: verifiers 0.4, github.com/PrimeIntellect-ai/verifiers.
    """

    name = "verifiers"
    Config = VerifiersTaskConfig
    by_environment = True

    def __init__(self, config: VerifiersTaskConfig) -> None:
        super().__init__(config)
        kept = {name: getattr(config, name) for name in VerifiersSource.model_fields}
        self._listed = listed(VerifiersSource(**kept), config.limit)
        self._splits: dict[Split, dict[str, Problem]] = {"train": {}, "held_out": {}}
        for index, task in enumerate(self._listed.tasks):
            messages = messages_from_json(task["messages"], f"task {index} of the taskset")
            key, answer = task["key"], task["answer"]
            prompt = chat_text(messages)
            made = Problem(key, prompt, answer, answer, {"index": str(index)}, messages)
            self._splits[split_of(key, config.held_out_permille)].setdefault(key, made)

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct tasks of `split` in an order decided by `seed`."""
        found = list(self._splits[split].values())
        if len(found) < count:
            fix = "ask for fewer, raise task.limit, or change task.held_out_permille"
            raise too_few(self.name, split, count, len(found), fix)
        random.Random(f"verifiers|{split}|{seed}").shuffle(found)
        return found[:count]

    def available(self, split: Split) -> int | None:
        """Every task that belongs to `split`."""
        return len(self._splits[split])

    def fingerprint(self) -> str:
        """Digest of the tasks, the taskset's files and the version of verifiers."""
        rows = problems_digest([p for each in self._splits.values() for p in each.values()])
        return combine_digests({"tasks": rows, "scored by": self._listed.digest})

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Nothing is right without its environment."""
        return Verdict(0.0, None)

    def source(self) -> str:
        """The taskset, and the version of verifiers."""
        return f"taskset {self.config.place()[1]} of verifiers {self._listed.version}"
