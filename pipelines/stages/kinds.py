"""The built-in stage kinds, registered by the hook that other packages use.

The code of a kind is `run_<kind>` in the module of that name. It is imported when a stage is
computed: a run that reuses every stage does not wait for transformers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from posttrain.core.config.distill_stage import DistillStage, RecordTeacherStage
from posttrain.core.config.evaluation_stages import BenchmarkStage, EvaluateStage
from posttrain.core.config.gate_stages import ApproveStage, NewDataStage, PromoteStage
from posttrain.core.config.preference_stages import (
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RegisterStage, TransformStage
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.config.suites import parse_suite
from posttrain.core.contracts import Stage, StageConfigT, StageOutput, StageRun, StageSetting
from posttrain.core.hooks import hookimpl
from posttrain.core.runtime.collector import loading_more

_IMPORTING = threading.Lock()  # stages of two branches start in two threads
MODEL_CODE = "transformers.modeling_utils"
"""The first stage that is computed loads it, with most of what stages load."""


class BuiltIn(Stage[StageConfigT]):
    """A stage whose code is in a module of this package."""

    def run(self, context: StageRun) -> StageOutput:
        no_model_yet = MODEL_CODE not in sys.modules
        with _IMPORTING, loading_more(spare=no_model_yet):
            module = import_module(f"posttrain.pipelines.stages.{self.name}")
        run: Callable[[StageRun], StageOutput] = getattr(module, f"run_{self.name}")
        return run(context)


class Evaluate(BuiltIn[EvaluateStage]):
    """Measures a model: greedy and sampled accuracy on held-out problems, with 95 % intervals."""

    name, Config = "evaluate", EvaluateStage


class Benchmark(BuiltIn[BenchmarkStage]):
    """Measures a model by benchmark suites of lm-eval or inspect-ai, with 95 % intervals."""

    name, Config = "benchmark", BenchmarkStage

    def check(self, setting: StageSetting) -> Iterable[str]:
        """Raises `ResourceError` where a package or a file of the suites is missing."""
        from posttrain.core.evaluation.suites import require_suites

        require_suites([parse_suite(text) for text in self.config.suites])
        return ()

    def describe(self) -> str:
        limit = self.config.limit
        samples = "all samples" if limit is None else f"{limit} samples at most"
        return f"{', '.join(self.config.suites)}; {samples} of each task"


class Sft(BuiltIn[SftStage]):
    """Fine-tunes a model on conversations, texts or the task's worked answers."""

    name, Config = "sft", SftStage


class RewardModel(BuiltIn[RewardModelStage]):
    """Trains a Bradley-Terry reward model on pairs of answers."""

    name, Config = "reward_model", RewardModelStage


class ProcessRewardModel(BuiltIn[ProcessRewardModelStage]):
    """Trains a model that scores each step of an answer, on labelled steps or on own answers."""

    name, Config = "process_reward_model", ProcessRewardModelStage


class Preference(BuiltIn[PreferenceStage]):
    """Trains a model on preferences: DPO, IPO, KTO and their relatives."""

    name, Config = "preference", PreferenceStage


class Rl(BuiltIn[RlStage]):
    """Trains a model by reinforcement learning: rollout, scores, advantages, update, repeated."""

    name, Config = "rl", RlStage


class Distill(BuiltIn[DistillStage]):
    """Teaches a model what another one knows, on its own answers or on others; no reward."""

    name, Config = "distill", DistillStage


class RecordTeacher(BuiltIn[RecordTeacherStage]):
    """Writes down what a teacher says of answers, so that it can be learned from without it."""

    name, Config = "record_teacher", RecordTeacherStage

    def describe(self) -> str:
        stage = self.config
        each = f" x {stage.num_generations} sampled" if stage.answers == "sampled" else " worked"
        return (
            f"at most {stage.num_problems} problems{each} answer(s), each token with the teacher's "
            f"best {stage.top_k}"
        )


class Transform(BuiltIn[TransformStage]):
    """Rewrites training problems so that answers are integers, and keeps what verifies (DAPO)."""

    name, Config = "transform", TransformStage


class NewData(BuiltIn[NewDataStage]):
    """Takes the training problems that no earlier run of the config was trained on."""

    name, Config = "new_data", NewDataStage


class Approve(BuiltIn[ApproveStage]):
    """Asks a person whether the model may go on, and passes it on."""

    name, Config = "approve", ApproveStage


class Register(BuiltIn[RegisterStage]):
    """Registers a model in MLflow's registry under an alias."""

    name, Config = "register", RegisterStage


class Promote(BuiltIn[PromoteStage]):
    """Makes a model the champion of the registry if it is better than the present one."""

    name, Config = "promote", PromoteStage


@hookimpl
def posttrain_register() -> list[type[Stage[Any]]]:
    return [
        Evaluate,
        Benchmark,
        Sft,
        RewardModel,
        ProcessRewardModel,
        Preference,
        Rl,
        Distill,
        RecordTeacher,
        Transform,
        NewData,
        Approve,
        Register,
        Promote,
    ]
