"""What each rank of a learner runs, on this machine or on a Ray node."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.cluster.shared import SharedWeights
from posttrain.core.contracts import Task
from posttrain.core.errors import ResourceError
from posttrain.core.models.device import ModelRuntime, is_cuda, peak_memory_gb, set_threads
from posttrain.core.models.sharded import mesh_of, put_away, whole
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.weight_sync import share_weights
from posttrain.core.runtime.heap import keep_freed_memory
from posttrain.core.training.digests import Block
from posttrain.core.training.finite import NonFinite
from posttrain.core.training.pieces import fetched_pieces, put_pieces
from posttrain.core.training.ranks import ProcessGroup
from posttrain.core.training.step_record import gather_blocks
from posttrain.pipelines.ranks.far import mirror_here, received, with_critic, written_plugin_files
from posttrain.pipelines.ranks.methods import BUILDERS, Methods, Trained
from posttrain.pipelines.ranks.trainer import RankSetup
from posttrain.pipelines.stage.inputs import StageInputs


class Late:
    """Stands for an object that is made when something of it is asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)


def build(setup: RankSetup) -> Methods:
    """The methods of this rank's trainer."""
    run = setup.run
    set_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    ranks = ProcessGroup()
    runtime = ModelRuntime.from_config(run.model)
    if is_cuda(runtime.device):
        runtime = replace(runtime, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    manager = PluginManager()
    given, files, stage = setup.inputs, dict(run.plugin_files), run.stages[setup.stage]
    if setup.url:
        given = received(setup.url, given)
        files = written_plugin_files(setup.url, files, setup.plugin_files)
        stage = with_critic(stage, given)
    manager.add_files(files)

    def task() -> Task[Any]:
        return manager.task(run.task)

    shard_size = run.cluster.learner.shard_size if run.cluster else None
    inputs = StageInputs(
        run=run,
        name=setup.stage,
        stage=stage,
        inputs=given,
        manager=manager,
        # Its rows may lie on the run's own machine alone, and few stages read them here.
        task=cast(Task[Any], Late(task)) if setup.url else task(),
        runtime=runtime,
        check=lambda: None,
        ranks=ranks,
        mesh=mesh_of(runtime.device.type, ranks.size, shard_size) if ranks.size > 1 else None,
    )
    trained = BUILDERS[type(inputs.stage)](inputs, *setup.args)
    return {**trained.methods, **_common(trained, ranks, setup.url)}


def _common(trained: Trained, ranks: ProcessGroup, url: str) -> Methods:
    """What every trainer can do."""

    def weights(dtype: torch.dtype) -> dict[str, Tensor]:
        return trained_weights(trained.model, dtype, keep=ranks.rank == 0)

    def export(path: Path, dtype: torch.dtype) -> None:
        if found := weights(dtype):
            save_file(found, path)

    def share(dtype: torch.dtype, leave_out: frozenset[str]) -> SharedWeights | None:
        found = whole_weights(trained.model, dtype, leave_out, keep=ranks.rank == 0)
        return share_weights(found, dtype) if ranks.rank == 0 else None

    def blocks(of: str, step: int) -> dict[str, Block]:
        return gather_blocks(trained.optimizers[of].weights(), step, ranks)

    def write(of: str, folder: Path) -> None:
        trained.optimizers[of].write(folder)

    def read(of: str, folder: Path, step_count: int) -> None:
        trained.optimizers[of].read(folder, step_count)

    def put(of: str, key: str) -> tuple[dict[str, str], str]:
        """Write this rank's piece into the store; the digests of all, or why some are missing."""
        mirror, away = mirror_here(url), ""
        mirror.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".put-", dir=mirror.root) as folder:
            write(of, Path(folder))
            try:
                files = put_pieces(mirror, key, Path(folder))
            except ResourceError as error:
                files, away = {}, str(error)
        found = ranks.collect((files, away))
        merged = {name: digest for each, _ in found for name, digest in each.items()}
        return merged, next((why for _, why in found if why), "")

    def get(of: str, key: str, files: Mapping[str, str], step_count: int) -> None:
        read(of, fetched_pieces(url, key, files), step_count)

    def take_non_finite(of: str) -> list[NonFinite]:
        return trained.optimizers[of].take_non_finite()

    def finish() -> None:
        for optimizer in trained.optimizers.values():
            optimizer.close()

    return {
        "trained_weights": weights,
        "export": export,
        "share": share,
        "blocks": blocks,
        "write": write,
        "put": put,
        "get": get,
        "read": read,
        "take_non_finite": take_non_finite,
        "step_count": lambda of: trained.optimizers[of].step_count,
        "finish": finish,
        "peak_memory_gb": peak_memory_gb,
    }


@torch.no_grad()
def trained_weights(model: PreTrainedModel, dtype: torch.dtype, keep: bool) -> dict[str, Tensor]:
    """The trained weights as `dtype` on the CPU; ranks that do not `keep` them help to gather."""
    put_away(model)
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = whole(parameter.detach())
            if keep:
                weights[name] = tensor.to("cpu", dtype).contiguous()
    return weights


@torch.no_grad()
def whole_weights(
    model: PreTrainedModel, dtype: torch.dtype, leave_out: frozenset[str], keep: bool
) -> dict[str, Tensor]:
    """The state dict as `dtype` on the CPU, without `leave_out`; see `trained_weights`.

    All is gathered before anything is sent: a rank that sends while others gather can stop both.
    """
    put_away(model)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name not in leave_out:
            gathered = whole(tensor.detach())
            if keep:
                weights[name] = gathered.to("cpu", dtype).contiguous()
    return weights
