"""Stages that measure a model: `evaluate` and `benchmark`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from posttrain.core.config.base import StageBase
from posttrain.core.config.sections import (
    EnvironmentComponent,
    EvaluationSection,
)
from posttrain.core.config.suites import installed_version_file, parse_suite


class EvaluateStage(StageBase):
    """Greedy and sampled accuracy on held-out problems, with 95 % intervals. Reads `model`.

    With the input `reward_model` also rm@k: of k sampled answers the one that it scores highest, k
    from `evaluation.pass_at`, or all of `num_samples` where that is empty.
    """

    reads = {"model": "model"}
    may_read = {"baseline": "evaluation", "reward_model": "reward_model"}
    makes = "evaluation"
    repeatable = True

    kind: Literal["evaluate"]
    evaluation: EvaluationSection | None = Field(
        default=None, description="null = the run's own `evaluation` section"
    )
    environment: EnvironmentComponent | None = Field(
        default=None, description="answers in several turns, as in the rl stage that has it"
    )

    def outside_paths(self) -> dict[str, str]:
        return {} if self.environment is None else self.environment.paths()

    def needs_task(self) -> str:
        return "problems"

    def max_sequences(self) -> int:
        return 0 if self.evaluation is None else self.evaluation.batch_size


class BenchmarkStage(StageBase):
    """Measures `model` by benchmark suites of lm-eval or inspect-ai. Makes a `report`."""

    reads = {"model": "model"}
    makes = "report"
    repeatable = True

    kind: Literal["benchmark"]
    suites: tuple[str, ...] = Field(
        min_length=1,
        description="lm_eval:TASK[,TASK], inspect:FILE.py[@TASK] or held_out",
        examples=[["held_out"]],
    )
    tasks_dir: str | None = Field(
        default=None, min_length=1, description="folder with tasks of lm-eval as YAML files"
    )
    limit: int | None = Field(
        default=None, ge=1, description="samples of each task; null = all there are"
    )
    fewshot: int | None = Field(
        default=None,
        ge=0,
        description="examples in each prompt of lm-eval; null = the task's own",
    )
    chat_template: bool | None = Field(
        default=None,
        description="whether prompts of lm-eval go into the chat template; null = where the "
        "tokenizer has one",
    )
    batch_size: int = Field(default=16, ge=1, description="sequences computed together")
    max_tokens: int = Field(
        default=256, ge=1, description="of a response, where the benchmark says nothing"
    )
    download: bool = Field(default=False, description="let tasks fetch their data from a hub")

    @field_validator("suites")
    @classmethod
    def _are_suites(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            parse_suite(text)
        return texts

    def outside_paths(self) -> dict[str, str]:
        """The folder of tasks; files of tasks with the files next to them that may hold data; the
        file that says which version of the harness is installed.
        """
        found = {} if self.tasks_dir is None else {"tasks_dir": self.tasks_dir}
        for index, text in enumerate(self.suites):
            suite = parse_suite(text)
            version = installed_version_file(suite.harness)
            if version is not None:
                found[f"version of {suite.harness}"] = str(version)
            if suite.file:
                found[f"suites.{index}"] = suite.file
                for path in sorted(Path(suite.file).expanduser().parent.glob("*")):
                    if path.suffix in BESIDE and path.is_file() and path.name != suite.file:
                        found[f"suites.{index} {path.name}"] = str(path)
        return found

    def needs_task(self) -> str:
        return "problems" if "held_out" in self.suites else ""

    def reads_task_data(self) -> bool:
        return "held_out" in self.suites

    def max_sequences(self) -> int:
        return self.batch_size


BESIDE = (".py", ".json", ".jsonl", ".csv", ".parquet", ".yaml", ".txt")
"""Files next to a file of tasks on which its results may depend."""
