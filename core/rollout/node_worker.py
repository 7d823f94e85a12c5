"""A node's part of an environment: it and its tools are built there, and make steps in threads."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.cluster.node_pool import TryElsewhere
from posttrain.core.contracts import Environment, Observation, Tool
from posttrain.core.contracts.spec import Shipped
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.rollout.answers import MOST_THREADS, Step
from posttrain.core.rollout.tool_use import noting_errors


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What a node builds: the environment, then its tools, and how many steps at once it makes."""

    plugins: Shipped
    at_once: int


@dataclass(frozen=True, slots=True)
class StepFailed:
    """What `step` raised, which no environment should."""

    error: PosttrainError


def build(setup: NodeEnvironment) -> AnsweringNode:
    """The environment of this node. Raises where a plugin is missing, or a sandbox is too weak."""
    return AnsweringNode(setup)


class AnsweringNode:
    """A `NodeWorker` that makes an environment's steps."""

    def __init__(self, setup: NodeEnvironment) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-plugins-")
        try:
            first, *rest = setup.plugins.unpacked(Path(self._folder.name))
            self._environment: Environment[Any] = first.make(Environment)
            self._environment.setup([tool.make(Tool) for tool in rest])
        except BaseException:
            self._folder.cleanup()
            raise
        self._threads = ThreadPoolExecutor(min(setup.at_once, MOST_THREADS), "turns")

    def answer(self, items: Sequence[Step]) -> Sequence[Observation | StepFailed | TryElsewhere]:
        """The answer to each step; one in which something raised may be better elsewhere."""
        return list(self._threads.map(self._step, items))

    def _step(self, step: Step) -> Observation | StepFailed | TryElsewhere:
        with noting_errors() as errors:
            try:
                observation = self._environment.step(*step)
            except Exception as error:  # somebody else's code
                kept = error if isinstance(error, PosttrainError) else RunError(_said(error))
                return TryElsewhere(StepFailed(kept))
        return TryElsewhere(observation) if errors else observation

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
