"""Benchmark suites of a model, within a stage or after a run: which harness measures which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.suites import Suite
from posttrain.core.contracts import PromptGroup, RolloutEngine, Task
from posttrain.core.data.lengths import LengthRule, fitting_prompts
from posttrain.core.data.problem_sets import held_out_problems
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError
from posttrain.core.evaluation.accuracy import evaluate_policy
from posttrain.core.evaluation.suites import (
    Progress,
    SuiteMetric,
    SuiteOptions,
    SuiteResult,
)
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.inputs import load_tokenizer

TABLE_ROWS = 100
"""Samples that MLflow shows as a table; the file has all."""
HELD_OUT = {"accuracy": "greedy", "sampled_accuracy": "sampled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A model to measure, the run's config and plugins, and its engine. `check` raises to stop."""

    model: Path
    run: RunConfig
    manager: PluginManager
    runtime: ModelRuntime
    engines: EnginePool
    options: SuiteOptions
    check: Callable[[], None]
    progress: Progress

    def measure(self, suites: Sequence[Suite]) -> list[SuiteResult]:
        """The results of each suite, in their order."""
        return [self._measure(suite) for suite in suites]

    def _measure(self, suite: Suite) -> SuiteResult:
        if suite.harness == "lm_eval":
            from posttrain.core.evaluation.lm_eval_suite import run_lm_eval

            return run_lm_eval(
                suite, self.model, self.runtime, self.options, self.check, self.progress
            )
        with self._engine() as (engine, tokenizer):
            if suite.harness == "held_out":
                return self._held_out(suite, engine, tokenizer)
            from posttrain.core.evaluation.inspect_suite import run_inspect

            limit = self.run.model.max_model_len
            return run_inspect(
                suite, engine, tokenizer, limit, self.options, self.check, self.progress
            )

    @contextmanager
    def _engine(self) -> Iterator[tuple[RolloutEngine[Any], ChatTokenizer]]:
        tokenizer = load_tokenizer(self.model, self.run, self.manager)
        with self.engines.lease(self.model) as engine:
            yield engine, tokenizer

    def _held_out(
        self, suite: Suite, engine: RolloutEngine[Any], tokenizer: ChatTokenizer
    ) -> SuiteResult:
        """The run's own evaluation of its held-out problems."""
        stages = self.run.stages.values()
        if any(getattr(stage, "environment", None) is not None for stage in stages):
            raise ConfigError(
                "suite 'held_out' answers in one turn, and stages of this run have an environment: "
                "a stage of kind 'evaluate' with the environment measures that"
            )
        task: Task[Any] = self.manager.task(self.run.task)
        section = self.run.evaluation
        count = min(section.num_problems, self.options.limit or section.num_problems)
        problems = held_out_problems(task, count, self.run.seed)
        rule = LengthRule.of(self.run.model, "held-out prompts with their response")
        prompts = [(problem, tokenizer.encode_prompt(problem)) for problem in problems]
        fitting = fitting_prompts(prompts, section.max_response_length, rule)
        rule.check()
        groups = [PromptGroup(problem, ids) for problem, ids in fitting]

        def progress(done: int) -> None:
            self.check()
            self.progress("answers", done, len(groups))

        found = evaluate_policy(engine, tokenizer, task, groups, section, self.run.seed, progress)
        metrics = tuple(
            SuiteMetric(
                "held_out",
                task.name,
                name,
                found.metrics[f"eval/{short}_accuracy"],
                found.metrics[f"eval/{short}_low"],
                found.metrics[f"eval/{short}_high"],
                len(groups),
            )
            for name, short in HELD_OUT.items()
            if f"eval/{short}_accuracy" in found.metrics
        )
        rows = tuple(
            {
                "suite": "held_out",
                "task": task.name,
                "sample": row.problem.key,
                "prompt": row.problem.prompt,
                "target": row.problem.answer,
                "answers": [row.greedy_text],
                "correct": row.greedy_correct,
            }
            for row in found.rows
        )
        return SuiteResult(suite, metrics, rows, "posttrain")
