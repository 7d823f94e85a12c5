"""The contract of a stage, a node of the run's DAG: its settings, and what it works with.

A stage has two classes. Its config, a `StageBase`, has the fields that people write in the YAML,
and says what the stage reads and makes and what decides its result: the DAG, identities and `plan`
need no more. Its plugin, a `Stage`, has the code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import ConfigDict, Field

from posttrain.core.contracts.base import Component, Plugin, PluginConfig
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.core.types import Artifact, ArtifactKind, Message, Problem, Split

if TYPE_CHECKING:
    import torch

    from posttrain.core.contracts.rollout import RolloutEngine, Task

__all__ = [
    "FieldPlace",
    "ModelSize",
    "Stage",
    "StageBase",
    "StageConfigT",
    "StageEstimate",
    "StageOutput",
    "StageRun",
    "StageSetting",
    "StageTokenizer",
]

StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=100)]

FieldPlace = tuple[str | int, ...]
"""The place of a field in a stage's section of the YAML: `("rewards", 0)`."""


class StageBase(PluginConfig):
    """The config of a stage: the artifacts it reads, by the name of the stage that makes them.

    The class attributes say what every stage of the kind reads and makes, and what decides its
    result. Their defaults are the safe ones.
    """

    model_config = ConfigDict(validate_default=True)

    reads: ClassVar[Mapping[str, ArtifactKind]] = {}
    """Inputs that the stage needs: role -> kind of artifact."""
    may_read: ClassVar[Mapping[str, ArtifactKind]] = {}
    """Inputs that it takes if they are given."""
    makes: ClassVar[ArtifactKind]
    """The kind of artifact that it makes: model, reward_model, dataset, evaluation, report, ..."""
    passes_on: ClassVar[str] = ""
    """The role of the input that it hands on, by the same digest, instead of making `makes`."""
    sections: ClassVar[tuple[str, ...]] = ("seed", "task", "engine", "model", "evaluation")
    """Sections of the run's config that decide its result, in addition to its own fields."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Own fields that do not decide its result."""
    outlives_code: ClassVar[bool] = False
    """Whether its result stays valid when the program changes, as a person's answer does."""
    takes_steps: ClassVar[bool] = False
    """Whether it takes optimizer steps, which are recorded for `replay`."""
    repeatable: ClassVar[bool] = False
    """Whether it may be started again after a lost connection: it writes its result at its end."""

    kind: str = Field(description="the stage's kind: the name of a plugin")
    inputs: dict[str, StageName] = Field(
        default_factory=dict,
        description="role -> stage that produces it, or 'base' for the base model",
    )

    def outside_paths(self) -> dict[str, str]:
        """Files and folders that the stage reads in addition to its inputs, by the field that
        names them.

        Their contents are part of the stage's identity.
        """
        return {}

    def components(self) -> Iterable[tuple[FieldPlace, str, Component]]:
        """(place, plugin kind, component) of each field that names a plugin.

        Their fields are checked and filled in, and they are part of the stage's identity.
        """
        return ()

    def needs_task(self) -> str:
        """What the stage needs from the run's task, in words; empty if it runs without a task."""
        return ""

    def reads_task_data(self) -> bool:
        """Whether the task's data decide the result."""
        return "task" in self.sections

    def max_sequences(self) -> int:
        """Most sequences that it samples at once; 0 if it uses no engine."""
        return 0


StageConfigT = TypeVar("StageConfigT", bound=StageBase)


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage made: files or folders below its own folder, by kind, and its final metrics.

    `resumed` says that it went on from a checkpoint of an interrupted run.
    """

    made: Mapping[ArtifactKind, Path]
    metrics: Mapping[str, float]
    resumed: bool = False


class StageTokenizer(Protocol):
    """A model's tokenizer with its chat template."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows up."""

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """A problem's prompt as the model is given it."""

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation up to where the model's next message begins."""

    def encode_response(self, text: str) -> tuple[int, ...]:
        """A response with the token that ends it."""

    def decode_response(self, ids: Sequence[int]) -> str:
        """A response's text without special tokens."""


class StageSetting(Protocol):
    """A stage of a run that has not begun: what `Stage.check` may look at."""

    @property
    def name(self) -> str:
        """The stage's name in the YAML."""

    @property
    def seed(self) -> int:
        """The run's seed."""

    @property
    def task(self) -> Task[Any]:
        """The run's task."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, `model.max_model_len`."""


class StageRun(Protocol):
    """A stage while it runs: its inputs, its folder, the run's parts, and where it reports to."""

    @property
    def name(self) -> str:
        """The stage's name in the YAML, which its random numbers should depend on too."""

    @property
    def seed(self) -> int:
        """The run's seed."""

    @property
    def inputs(self) -> Mapping[str, Artifact]:
        """The artifacts that the stage reads, by role; `path` is the file or folder."""

    @property
    def out(self) -> Path:
        """The stage's own folder. What it makes goes below; it is discarded if the stage fails."""

    @property
    def checkpoints(self) -> Path:
        """A folder that survives an interruption, and is emptied when the stage is done.

        It need not exist yet.
        """

    @property
    def task(self) -> Task[Any]:
        """The run's task."""

    @property
    def device(self) -> torch.device:
        """Where models go."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights."""

    def check(self) -> None:
        """Call it between pieces of work: it raises when the run is asked to stop.

        A run from which no call comes for `limits.stall_minutes` is taken to hang.
        """

    def warn(self, text: str) -> None:
        """Show a warning now, and again in the run's summary."""

    def say(self, text: str) -> None:
        """Show a line, and keep it in the run's log."""

    def started(self, total_steps: int) -> None:
        """Tell the person watching that the work begins, and how many steps it has."""

    def progress(self, step: int) -> None:
        """Show how many steps are done."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, show them, and tell the listeners."""

    def log_table(self, name: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Record rows that MLflow shows as a table."""

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Record final metrics."""

    def log_file(self, path: Path, folder: str = "") -> None:
        """Keep a file with the stage's run in MLflow."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Tag the stage's run in MLflow."""

    def problems(self, split: Split, count: int) -> list[Problem]:
        """Problems of the task, recorded in MLflow; those of `train` are not among the held-out."""

    def read_problems(self, role: str = "dataset") -> list[Problem]:
        """The problems in an input of kind `dataset`."""

    def write_problems(self, problems: Sequence[Problem]) -> Path:
        """Write problems below `out` as a `dataset` that other stages can read; its folder."""

    def tokenizer_of(self, role: str = "model") -> StageTokenizer:
        """The tokenizer of an input model."""

    def engine(self, role: str = "model") -> AbstractContextManager[RolloutEngine[Any]]:
        """The run's rollout engine with the weights of an input model, for as long as it is held.

        One stage has it at a time.
        """

    def build(self, contract: type[Any], component: Component) -> Any:  # Any: of that contract
        """The plugin that a component of the stage's config names."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of the run's model: its parameters, and its bytes on the disk."""

    parameters: int
    disk_bytes: float


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """What a stage is expected to take on this machine; `disk_gb` is what it leaves behind."""

    seconds: float
    memory_gb: float = 0.0
    disk_gb: float = 0.0


@contextmanager
def faults_of_plugin(name: str, stage: StageBase, what: str) -> Iterator[None]:
    """Name the stage and its kind in the errors of a plugin's `what`; our own kinds are let alone.

    Raises `ConfigError`.
    """
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:  # somebody's code
        module = type(stage).__module__
        if module.startswith("posttrain."):
            raise
        raise ConfigError(
            f"stage '{name}': `{what}` of kind '{stage.kind}' ({module}) failed with "
            f"{type(error).__name__}: {error}; correct it there"
        ) from error


class Stage(Plugin[StageConfigT]):
    """What a node of the DAG does. `name` is the YAML's `kind`, `Config` is a `StageBase`.

    Load heavy modules in `run`, not at import: every command loads the plugins.
    """

    kind = "stage"

    def check(self, setting: StageSetting) -> Iterable[str]:
        """Warnings, before anything is computed; `validate` and `run` call it.

        Raises `ConfigError`, `DataError` or `ResourceError` for what cannot work.
        """
        return ()

    def describe(self) -> str:
        """How much work it is, in words, for `plan`."""
        return ""

    def estimate(self, model: ModelSize) -> StageEstimate | None:
        """What it takes; None = not estimated."""
        return None

    @abstractmethod
    def run(self, context: StageRun) -> StageOutput:
        """Do the work and return what was made.

        Equal config, inputs and seed must make equal files, since the result is reused.
        """
