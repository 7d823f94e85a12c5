"""An environment's steps made by the nodes of a cluster, and here where no node is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

from posttrain.core.cluster.node_pool import NodeLost, NodePool, Sharing, Unanswered, map_or_here
from posttrain.core.contracts import Observation
from posttrain.core.contracts.spec import Shipped, spec_of
from posttrain.core.errors import RunError
from posttrain.core.rollout.answers import AnswersHere, Step
from posttrain.core.rollout.node_worker import NodeEnvironment, StepFailed
from posttrain.core.rollout.tool_use import ToolUseConfig, unreachable
from posttrain.core.sandbox.required import isolations

WORKER = "posttrain.core.rollout.node_worker"


def sharing(at_once: int, timeout_s: float) -> Sharing:
    """Several batches at once, `at_once` steps in all; each may take `timeout_s`."""
    return Sharing(
        limit_s=lambda count: timeout_s * math.ceil(count / at_once) + timeout_s, at_once=at_once
    )


class AnswersOnNodes:
    """The answers that `here` would give, by copies of the environment on nodes.

    A step in which a tool or the environment raises, or whose node is lost, is made once more
    elsewhere; then its error counts as it would here. In a step that takes processes of nodes with
    it, the last when alone there, the tools fail. Where no node is left, `here` answers, after a
    warning.
    """

    def __init__(
        self,
        here: AnswersHere,
        nodes: NodePool,
        at_once: int,
        warn: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.here, self.nodes, self.at_once = here, nodes, at_once
        self._warn, self._check = warn, check

    def __enter__(self) -> Self:
        plugins = (self.here.environment, *self.here.tools)
        specs = (spec_of(p, "on nodes", "remove cluster.environments") for p in plugins)
        needed = (isolations(f"{p.kind} '{p.name}'", p.config) for p in plugins)
        setup = NodeEnvironment(
            Shipped.of(tuple(specs), chain.from_iterable(needed)),
            self.at_once,
        )
        self.nodes.start(setup, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()

    def to(self, steps: Sequence[Step]) -> list[Observation]:
        """As in `Answers`."""
        if not steps:
            return []
        found = map_or_here(
            self.nodes,
            steps,
            self._check,
            self.here.to,
            lambda count, reason: self._warn(
                f"environment: {count} of {len(steps)} turns are answered by the run's own "
                f"process: {reason}"
            ),
        )
        return [self._counted(step, answer) for step, answer in zip(steps, found, strict=True)]

    def _counted(self, step: Step, answer: Any) -> Observation:
        """The observation, where no node could make one of tools that fail."""
        if isinstance(answer, StepFailed):
            raise answer.error
        if isinstance(answer, Observation):
            return answer
        assert isinstance(answer, Unanswered)
        environment = self.here.environment
        if not isinstance(environment.config, ToolUseConfig):
            raise RunError(
                f"environment '{environment.name}': a turn took the processes with it that were "
                f"to answer it: {answer.reason}"
            )
        with unreachable(NodeLost(answer.reason)):
            return environment.step(*step)
