"""What each rank runs: `torchrun -m posttrain.pipelines.ranks.worker FOLDER`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.cluster.processes import serve
from posttrain.core.cluster.shared import SharedWeights
from posttrain.core.contracts import Task
from posttrain.core.models.device import ModelRuntime, is_cuda, peak_memory_gb, set_threads
from posttrain.core.models.sharded import mesh_of, put_away, whole
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.weight_sync import share_weights
from posttrain.core.runtime.heap import keep_freed_memory
from posttrain.core.training.digests import Block
from posttrain.core.training.finite import NonFinite
from posttrain.core.training.ranks import ProcessGroup, Ranks
from posttrain.core.training.step_record import gather_blocks
from posttrain.pipelines.ranks.methods import BUILDERS, Methods, Trained
from posttrain.pipelines.ranks.trainer import RankSetup
from posttrain.pipelines.stage.inputs import StageInputs


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
    manager.add_files(run.plugin_files)
    task: Task[Any] = manager.build(Task, run.task.name, run.task.fields())
    shard_size = run.cluster.learner.shard_size if run.cluster else None
    inputs = StageInputs(
        run=run,
        name=setup.stage,
        stage=run.stages[setup.stage],
        inputs=setup.inputs,
        manager=manager,
        task=task,
        runtime=runtime,
        check=lambda: None,
        ranks=ranks,
        mesh=mesh_of(runtime.device.type, ranks.size, shard_size) if ranks.size > 1 else None,
    )
    trained = BUILDERS[type(inputs.stage)](inputs, *setup.args)
    return {**trained.methods, **_common(trained, ranks)}


def _common(trained: Trained, ranks: Ranks) -> Methods:
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


if __name__ == "__main__":
    serve(Path(sys.argv[1]), build)
