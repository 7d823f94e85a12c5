"""A stage: training problems with a short prompt."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from posttrain.core.contracts import Stage, StageBase, StageOutput, StageRun


class ExampleConfig(StageBase):
    """Settings of `example`. The class attributes say what it makes and what decides the result."""

    makes = "dataset"
    sections: ClassVar[tuple[str, ...]] = ("seed", "task", "evaluation")

    num_problems: int = Field(default=64, ge=1, description="training problems to look at")
    max_chars: int = Field(default=400, ge=1, description="longest prompt kept, characters")

    def needs_task(self) -> str:
        """It reads the run's task."""
        return "problems"


class Example(Stage[ExampleConfig]):
    """dataset = those of num_problems training problems whose prompt is short. Source: an example.

    Another stage reads it as its input `dataset`. Load heavy modules in `run`, not here.
    """

    name = "example"
    Config = ExampleConfig

    def describe(self) -> str:
        """For `plan`."""
        return f"{self.config.num_problems} problems"

    def run(self, context: StageRun) -> StageOutput:
        """Filter; equal settings make equal files, because the result is reused."""
        problems = context.problems("train", self.config.num_problems)
        kept = [p for p in problems if len(p.prompt) <= self.config.max_chars]
        context.say(f"{len(kept)} of {len(problems)} problems are short")
        metrics = {"plugin/kept": float(len(kept))}
        return StageOutput({"dataset": context.write_problems(kept)}, metrics)
