"""A reward that does what the response says, and that is mostly harm; for tests of the pool."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward, RewardContext
from posttrain.core.types import Problem, RewardSample, Score, StepVerdict, Verdict

SLEEPER = "import time; time.sleep(600)  # left behind by a reward"


def segfault() -> None:
    ctypes.string_at(0)


def endless_regex() -> None:
    """Busy in C, where no Python signal handler or exception can interrupt."""
    re.fullmatch(r"(a+)+b", "a" * 64)


def leave_children() -> None:
    """One child in the group, one in a session of its own; both outlive this process."""
    for own_session in (False, True):
        subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], start_new_session=own_session)
    os._exit(0)


def close_everything() -> None:
    os.closerange(3, 256)
    time.sleep(600)


def write_everywhere() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            pass
    time.sleep(600)


def fail() -> None:
    raise ValueError("no such\nanswer")


HARM: dict[str, Callable[[], Any]] = {
    "exit": lambda: os._exit(3),
    "segfault": segfault,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(600),
    "regex": endless_regex,
    "children": leave_children,
    "close": close_everything,
    "write": write_everywhere,
    "raise": fail,
    "sys_exit": lambda: sys.exit("enough"),
}
NONSENSE: dict[str, Any] = {
    "nan": [Score(float("nan"))],
    "inf": [Score(float("inf"))],
    "text": [Score("1.0")],  # type: ignore[arg-type]
    "string": "1.0",
    "number": [1.0],
    "none": None,
    "two": [Score(1.0), Score(1.0)],
    "nothing": [],
    "status": [Score(1.0, "fine")],  # type: ignore[arg-type]
    "steps": [Score(1.0, steps=(StepVerdict(1, float("nan")),))],
}


class FaultyConfig(PluginConfig):
    """Settings of `faulty`."""

    work_s: float = Field(default=0.0, description="seconds that every sample takes")
    harm_in_setup: str = Field(default="", description="what `setup` does")
    harm_in_worker: str = Field(default="", description="what building it in a worker does")
    limit_s: float | None = Field(default=None, description="what `time_limit_s` says")


class FaultyReward(Reward[FaultyConfig]):
    """R = the number that the response is, after whatever harm its text asks for."""

    name = "faulty"
    Config = FaultyConfig

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(config)
        if config.harm_in_worker and "posttrain.core.rewards.server" in sys.modules:
            HARM[config.harm_in_worker]()

    @classmethod
    def preload(cls) -> None:
        import tomllib

        tomllib.preloaded_in = os.getpid()  # type: ignore[attr-defined]

    def setup(self, context: RewardContext) -> None:
        if self.config.harm_in_setup:
            HARM[self.config.harm_in_setup]()

    def time_limit_s(self) -> float | None:
        return self.config.limit_s

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        (sample,) = samples
        if self.config.work_s:
            time.sleep(self.config.work_s)
        if sample.text in HARM:
            HARM[sample.text]()
        if sample.text in NONSENSE:
            found: list[Score] = NONSENSE[sample.text]
            return found
        if sample.text == "has torch":
            return [Score(float("torch" in sys.modules))]
        if sample.text == "preloaded by the parent":
            found_in = getattr(sys.modules.get("tomllib"), "preloaded_in", 0)
            return [Score(float(found_in == os.getppid()))]
        if sample.text == "unscored":
            return [Score(None, "unscored", "nothing to say")]
        value = float(sample.text)
        steps = (StepVerdict(len(sample.text), value),)
        return [Score(value, detail=sample.problem.key, steps=steps, components={"part": value})]


def samples_of(texts: Sequence[str]) -> list[RewardSample]:
    """One sample per text; the problem's key is its place."""
    return [
        RewardSample(
            Problem(str(place), "a prompt", "", ""), (1,), (2, 3), text, False, Verdict(0.0, None)
        )
        for place, text in enumerate(texts)
    ]
