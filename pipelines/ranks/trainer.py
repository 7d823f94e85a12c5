"""What trains in a stage, called by name: in this process, or on several ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.cluster.group import RankGroup
from posttrain.core.cluster.processes import RankProcesses
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import OptimizerBase
from posttrain.core.models.device import cpu_threads, is_cuda
from posttrain.core.store.artifacts import Artifact
from posttrain.core.store.mirror import mirror_of
from posttrain.core.store.remote import StoreAway
from posttrain.core.training.digests import Block
from posttrain.core.training.finite import NonFinite
from posttrain.core.training.optim import StoredOptimizer, precision_of
from posttrain.core.training.pieces import PIECES, put_pieces, read_pieces, write_pieces
from posttrain.core.training.remote_checkpoints import CHECKPOINTS
from posttrain.pipelines.ranks.far import critic_input, read_plugin_files, sent
from posttrain.pipelines.ranks.methods import BUILDERS, ONLY, UNTRAINED
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import StageInputs

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.connection import Node
    from posttrain.core.cluster.on_ray.ranks import RankResources

WORKER = "posttrain.pipelines.ranks.worker"


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank is given: which stage it trains, and what else its trainer is built from."""

    run: RunConfig
    stage: str
    inputs: Mapping[str, Artifact]
    args: tuple[Any, ...]  # Any: each kind of stage has its own
    url: str = ""
    """The store that inputs come from and checkpoints go to, where ranks see no common files."""
    plugin_files: Mapping[str, bytes] = field(default_factory=dict)


def wants_ranks(stage: StageInputs) -> bool:
    """Whether the run's learners are ranks, in other processes than this one."""
    return stage.run.trains_elsewhere


class Trainer(Protocol):
    """What a stage without a loop of its own trains with."""

    @property
    def stored(self) -> StoredOptimizer:
        """What checkpoints keep."""

    def call(self, method: str, *args: object) -> Any:  # Any: as in `Methods`
        """What `method` of `pipelines.ranks.methods` returns."""

    def finish(self) -> None:
        """Free gradients, masters and moments: there are no steps to come."""

    def trained_model(self) -> PreTrainedModel:
        """The model as it is now, in this process."""


class LocalTrainer:
    """The trainer of a stage in this process."""

    def __init__(self, stage: StageInputs, *args: object) -> None:
        self._trained = BUILDERS[type(stage.stage)](stage, *args)

    @property
    def stored(self) -> StoredOptimizer:
        """As in `Trainer`."""
        return self._trained.optimizers[ONLY]

    def call(self, method: str, *args: object) -> Any:  # Any: as in `Methods`
        """As in `Trainer`."""
        return self._trained.methods[method](*args)

    def finish(self) -> None:
        """As in `Trainer`."""
        for optimizer in self._trained.optimizers.values():
            optimizer.close()

    def trained_model(self) -> PreTrainedModel:
        """As in `Trainer`."""
        return self._trained.model


@contextmanager
def open_trainer(stage: StageContext, *args: object) -> Iterator[Trainer]:
    """The trainer of `stage`, where the run wants it; `args` as its builder takes them."""
    if not wants_ranks(stage):
        yield LocalTrainer(stage, *args)
        return
    with RankTrainer(stage, *args) as trainer:
        yield trainer


def _ranks(stage: StageInputs) -> RankGroup:
    """The ranks that the run's config asks for, on this machine or on a cluster."""
    run, size = stage.run, stage.run.limits.learner_ranks
    if run.cluster is not None:
        from posttrain.core.cluster.on_ray.connection import nodes  # Ray is an extra
        from posttrain.core.cluster.on_ray.ranks import RayRanks

        env = {"OMP_NUM_THREADS": str(run.cluster.learner.cpus)}
        return RayRanks(size, WORKER, env, resources_of_rank(run, nodes()))
    cores = cpu_threads(run.limits.num_threads)
    threads = 0 if is_cuda(stage.runtime.device) else max(1, cores // size)
    return RankProcesses(size, WORKER, {"OMP_NUM_THREADS": str(threads or cores)})


def resources_of_rank(config: RunConfig, nodes: Sequence[Node]) -> RankResources:
    """What a rank takes of a cluster; without `gpus` in the config, one where nodes have some."""
    from posttrain.core.cluster.on_ray.ranks import RankResources

    assert config.cluster is not None
    section = config.cluster.learner
    gpus = section.gpus
    if gpus is None:
        gpus = float(config.model.device != "cpu" and any(node.gpus for node in nodes))
    limit_s = config.cluster.ray.start_timeout_s
    return RankResources(section.cpus, gpus, section.min_ranks, limit_s, section.peer_timeout_s)


class RankTrainer:
    """The trainer of a stage on `limits.learner_ranks` ranks, which end with it.

    Models live in the ranks; `refresh` brings their trained weights into a model of this process.
    """

    def __init__(self, stage: StageContext, *args: object) -> None:
        self.stage = stage
        self._copy: PreTrainedModel | None = None
        far = stage.run.cluster is not None and stage.store is not None
        self.mirror = mirror_of(stage.store) if far and stage.store is not None else None
        self._ranks = _ranks(stage)
        try:
            # Ranks have no use for other stages, whose kinds they may not know.
            run = stage.run.model_copy(update={"stages": {stage.name: stage.stage}})
            setup = RankSetup(run, stage.name, dict(stage.inputs), args)
            if self.mirror is not None:
                setup = replace(
                    setup,
                    inputs=sent(
                        self.mirror,
                        {**stage.inputs, **critic_input(stage.stage)},
                        stage.warn,
                        stage.check,
                    ),
                    url=self.mirror.url,
                    plugin_files=read_plugin_files(run.plugin_files),
                )
            self._ranks.start(setup, stage.check)
            if self._ranks.size < run.limits.learner_ranks:
                ranks = "1 rank" if self._ranks.size == 1 else f"{self._ranks.size} ranks"
                stage.warn(
                    f"{stage.name}: trains on {ranks}, not {run.limits.learner_ranks}: the cluster "
                    "has no room for more"
                )
        except BaseException:
            self._ranks.close()
            raise

    @property
    def on_cluster(self) -> bool:
        """Whether the ranks are actors of a cluster."""
        return self._ranks.folder is None

    @property
    def stored(self) -> StoredOptimizer:
        """As in `Trainer`."""
        section: OptimizerBase = self.stage.stage.optimizer  # type: ignore[attr-defined]
        return RankedOptimizer(self, ONLY, section)

    def call(self, method: str, *args: object) -> Any:  # Any: as in `Methods`
        """What `method` returns on rank 0, after all ranks have run it."""
        return self._ranks.call(method, *args, check=self.stage.check)

    @torch.no_grad()
    def refresh(self, model: PreTrainedModel) -> None:
        """Copy the trained weights, in the precision of `model`, into it."""
        if self._ranks.folder is None:
            weights = self.call("trained_weights", model.dtype)
        else:
            with tempfile.NamedTemporaryFile(dir=self._ranks.folder, suffix=".safetensors") as file:
                self.call("export", Path(file.name), model.dtype)
                weights = load_file(file.name)
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])

    def finish(self) -> None:
        """As in `Trainer`."""
        self.call("finish")

    def trained_model(self) -> PreTrainedModel:
        """As in `Trainer`; a copy, the same model each time."""
        if self._copy is None:
            self._copy = UNTRAINED[type(self.stage.stage)](self.stage)
        self.refresh(self._copy)
        return self._copy

    def close(self) -> None:
        """End the ranks; may be called twice."""
        self._ranks.close()

    def __enter__(self) -> RankTrainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RankedOptimizer:
    """The optimizer of one model on all ranks: what a checkpoint needs of it."""

    def __init__(
        self,
        trainer: RankTrainer,
        of: str,
        section: OptimizerBase,
        after_read: Callable[[], None] = lambda: None,
    ) -> None:
        self._trainer, self._of, self._after_read = trainer, of, after_read
        self.precision = precision_of(section)

    @property
    def step_count(self) -> int:
        """Optimizer steps taken."""
        return int(self._trainer.call("step_count", self._of))

    def write(self, folder: Path) -> None:
        """Every rank writes its piece, into a store with a URL where there is one."""
        mirror = self._trainer.mirror
        if mirror is None:
            self._trainer.call("write", self._of, folder)
            return
        key = f"{CHECKPOINTS}/{self._trainer.stage.checkpoints.name}/files"
        files, away = self._trainer.call("put", self._of, key)
        if away:
            raise StoreAway(away)
        write_pieces(folder, mirror.url, key, files)

    def read(self, folder: Path, step_count: int) -> None:
        """Every rank reads its piece, whatever number of ranks wrote."""
        mirror = self._trainer.mirror
        if mirror is None:
            self._trainer.call("read", self._of, folder, step_count)
        else:
            key = f"{CHECKPOINTS}/{self._trainer.stage.checkpoints.name}/files"
            if (folder / PIECES).is_file():
                files = read_pieces(folder / PIECES)
            else:  # of a run whose ranks saw this folder
                files = put_pieces(mirror, key, folder)
            self._trainer.call("get", self._of, key, files, step_count)
        self._after_read()

    def weights(self, step: int) -> Mapping[str, Tensor | Block]:
        """Each rank has a piece of them: the blocks of `step`, put together."""
        found: dict[str, Block] = self._trainer.call("blocks", self._of, step)
        return found

    def take_non_finite(self) -> list[NonFinite]:
        """As in `StoredOptimizer`; all ranks have found the same."""
        found: list[NonFinite] = self._trainer.call("take_non_finite", self._of)
        return found

    def close(self) -> None:
        """End the ranks."""
        self._trainer.close()
