"""What a worker needs to build the pool's rewards: where each class is, and its config.

The parent found the classes through the plugin manager. A worker imports only the modules of those
it was given, by the parent's own `sys.path`: loading every installed plugin costs seconds and may
start threads, which a process that forks must not have.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward: the address of its class and its config as JSON."""

    name: str
    module: str
    qualname: str
    config: dict[str, object]

    def load(self) -> type[Reward[Any]]:
        found: object = attrgetter(self.qualname)(importlib.import_module(self.module))
        if not (isinstance(found, type) and issubclass(found, Reward)):
            raise ConfigError(f"{self.module}.{self.qualname} is no reward")
        return found

    def build(self, context: RewardContext | None) -> Reward[Any]:
        cls = self.load()
        reward = cls(cls.Config.model_validate(self.config))
        if context is not None:
            reward.setup(context)
        return reward


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """What every worker of a pool is given."""

    rewards: tuple[RewardSpec, ...]
    context: bytes
    """The pickled `RewardContext` for rewards that override `setup`; empty where none does, because
    reading it loads torch."""

    @classmethod
    def of(cls, rewards: Sequence[Reward[Any]], context: RewardContext | None) -> PoolSetup:
        reads_context = any(type(reward).setup is not Reward.setup for reward in rewards)
        needed = context is not None and reads_context
        return cls(specs_of(rewards), pickle.dumps(context) if needed else b"")

    def load(self) -> RewardContext | None:
        """Import what the rewards need; the context they are set up with."""
        for spec in self.rewards:
            spec.load().preload()
        if not self.context:
            return None
        found: RewardContext = pickle.loads(self.context)  # noqa: S301 - from our own parent
        return found


def specs_of(rewards: Sequence[Reward[Any]]) -> tuple[RewardSpec, ...]:
    """The specs of `rewards`; `ConfigError` for a class that another process cannot import."""
    specs = []
    for reward in rewards:
        cls = type(reward)
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            raise ConfigError(
                f"reward '{reward.name}' ({cls.__module__}.{cls.__qualname__}) runs in worker "
                "processes, which cannot import it from there: define the class at the top of a "
                "module of its own, or set runs_in = 'host' on it if it can neither hang nor crash"
            )
        config = reward.config.model_dump(mode="json")
        specs.append(RewardSpec(reward.name, cls.__module__, cls.__qualname__, config))
    return tuple(specs)
