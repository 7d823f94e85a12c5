"""Tasksets of verifiers: its package plays and scores, the run's gateway records."""

from __future__ import annotations

import asyncio
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from posttrain.core.contracts import ModelEndpoint, Outcome, PlayedEnvironment
from posttrain.core.errors import PosttrainError
from posttrain.core.rollout.plays import EpisodeFailed
from posttrain.core.rollout.verifiers_client import (
    VerifiersSource,
    Worker,
    WorkerFailed,
    without_key,
)
from posttrain.core.types import Problem

INDEX = "index"
"""The field of a problem's metadata that says which task of the taskset it is."""


class VerifiersConfig(VerifiersSource):
    """Settings of `verifiers`. What is not set is taken from the run's task `verifiers`."""

    agent: dict[str, Any] = Field(  # Any: verifiers checks its own settings
        default={},
        description="settings of verifiers' agent, such as {max_turns: 8} or {harness: {id: bash}}",
    )
    timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="seconds of a tool's call, at most"
    )


class VerifiersEnvironment(PlayedEnvironment[VerifiersConfig]):
    """reward = that of verifiers: the sum of weight x score over the taskset's rewards.

    One process in the virtual environment plays all episodes. The conversation with its tools runs
    in that process, unless `agent.harness` or the taskset names a harness. An episode that
    verifiers calls not ok (a tool server that is gone, an exception in a reward) has failed; a
    process that dies fails its episodes, and is started again.
    Source: verifiers 0.4, github.com/PrimeIntellect-ai/verifiers.
    """

    name = "verifiers"
    Config = VerifiersConfig
    needs_task: ClassVar[str] = "verifiers"
    at_once = 8 * (os.cpu_count() or 1)

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__(config)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._current: Worker | None = None

    async def start(self) -> None:
        """Start the worker. Raises `ConfigError` for what no episode could be played with."""
        self._folder = tempfile.TemporaryDirectory(
            prefix="posttrain-verifiers-", ignore_cleanup_errors=True
        )
        self._starting = asyncio.Lock()
        await self._worker()

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        """Let the worker play one task, with this episode's address."""
        index = problem.metadata.get(INDEX, "")
        if not index.isdigit():
            raise EpisodeFailed("the problem is not one of task 'verifiers'")
        request = {
            "index": int(index),
            "key": problem.key,
            "base_url": endpoint.base_url,
            "key_of_api": endpoint.key,
            "model": endpoint.model,
        }
        try:
            worker = await self._worker()
            answer = await worker.play(request)
        except (PosttrainError, WorkerFailed) as error:
            raise EpisodeFailed(without_key(str(error), endpoint.key)) from error
        if why := answer.get("failed"):
            return Outcome(failed=without_key(why, endpoint.key))
        reward = answer["reward"]
        if reward is not None and not math.isfinite(reward):
            return Outcome(failed=f"the taskset gives the reward {reward}")
        metrics = {f"metric/{name}": value for name, value in _shown(answer["metrics"]).items()}
        return Outcome(reward, _shown(answer["rewards"]), metrics)

    async def stop(self) -> None:
        """End the worker, and what it left on the disk."""
        current, self._current = self._current, None
        if current is not None:
            await current.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def _worker(self) -> Worker:
        """The worker; another one, where it has ended."""
        async with self._starting:
            if self._current is None or not self._current.alive:
                assert self._folder is not None
                config = self.config
                self._current = await Worker.start(
                    config,
                    Path(self._folder.name),
                    agent=config.agent,
                    timeout_s=config.timeout_s,
                )
            return self._current


def _shown(values: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers, by names that a metric may have."""
    return {
        re.sub(r"[^\w.-]", "_", name): float(value)
        for name, value in values.items()
        if math.isfinite(value)
    }
