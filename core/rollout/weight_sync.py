"""How a policy's weights reach an engine: in memory, as an adapter, or by files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from posttrain.core.cluster.servers import SentFiles
from posttrain.core.cluster.shared import SharedFiles, SharedWeights
from posttrain.core.contracts import RolloutEngine
from posttrain.core.errors import ResourceError
from posttrain.core.models.linear import When, can_pack, pack, widen
from posttrain.core.models.lora import (
    base_weights,
    check_adapter,
    fits_engines,
    is_adapted,
    merged_weights,
    save_adapter,
)
from posttrain.core.rollout.sampling import checked_weights
from posttrain.core.runtime.files import put_in_place
from posttrain.core.store.manifests import combine_digests, file_digest

if TYPE_CHECKING:  # plugins are listed without loading transformers
    from transformers import PreTrainedModel


class EngineWeights:
    """Weights of `model` (transformers'), and the adapter that may be around its layers."""

    def __init__(self, model: Any, packed: When) -> None:  # Any: model classes are not typed
        self._model = model
        self._adapter: Any = None  # Any: peft's, imported when one is synced
        parameters = {name for name, _ in model.named_parameters()}
        buffers = {name for name, _ in model.named_buffers()}
        state = model.state_dict()
        self._tied = frozenset(set(state) - parameters - buffers)
        # The base weights by name, whatever wraps them later.
        self._own: dict[str, Tensor] = {n: t for n, t in state.items() if n not in self._tied}
        self._packs = can_pack(model, packed)
        self._pack()

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights in place and drop the adapter. Only a tied output layer may be left out.

        Raises `RunError` on a missing, unknown or misshaped weight and keeps the old weights.
        """
        given = checked_weights(weights, self._shapes, self._tied)
        self._drop_adapter()
        for name, tensor in self._own.items():
            tensor.copy_(given[name])
        self._pack()

    @torch.no_grad()
    def differing(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
        own = self._own
        return tuple(
            name
            for name, tensor in weights
            if name in own and not _same_bits(own[name], tensor.to(own[name]))
        )

    def take_adapter(self, folder: Path) -> None:
        """Put the adapter's layers around the base layers, in place of those before."""
        check_adapter(folder, self._shapes)
        from peft import PeftModel

        self._drop_adapter()
        device = str(self._model.device)
        self._adapter = PeftModel.from_pretrained(
            self._model, folder, torch_device=device, trust_remote_code=False
        )

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.unload()
            self._adapter = None

    def _pack(self) -> None:
        if self._packs:
            pack(self._model)
        else:
            widen(self._model)

    @property
    def _shapes(self) -> dict[str, Sequence[int]]:
        return {name: tensor.shape for name, tensor in self._own.items()}


def _same_bits(*pair: Tensor) -> bool:
    """Whether two tensors of one shape and type are equal, eight bytes at a time where they can."""
    one, other = pair
    if all(
        x.is_contiguous() and x.nbytes % 8 == 0 and x.storage_offset() * x.itemsize % 8 == 0
        for x in pair
    ):
        one, other = (x.view(-1).view(torch.int64) for x in pair)
    return torch.equal(one, other)


SHARD_BYTES = 2 * 2**30


def check_model_dir(model_dir: Path) -> None:
    if not (model_dir / "config.json").is_file():
        raise ResourceError(
            f"no model at {model_dir}: expected a directory with config.json and "
            "*.safetensors; check the stage that should have made it"
        )


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a model directory, one tensor in memory at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def digest_of(folder: Path) -> str:
    return combine_digests({p.name: file_digest(p) for p in sorted(folder.glob("*.safetensors"))})


def write_weights(
    parent: Path, name: str, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> SentFiles:
    """Write `weights`, in `dtype`, to the folder `parent/name`; it replaces one of that name."""
    from safetensors.torch import save_file

    partial, final = parent / f".partial-{name}", parent / name
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for number, shard in enumerate(_shards(weights, dtype)):
            save_file(shard, partial / f"model-{number:05d}.safetensors")
        digest = digest_of(partial)
        put_in_place(partial, final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(
            f"weights for the servers cannot be written to {final}: {error}; free some space, or "
            "set engine.sync_dir to a folder that all servers can read"
        ) from error
    return SentFiles(digest, folder=final)


def share_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> SharedWeights:
    """Put `weights`, in `dtype`, into the object store of the cluster that was joined."""
    from safetensors.torch import save

    from posttrain.core.cluster.on_ray.objects import put_files  # Ray is an extra

    files = put_files(
        (f"model-{number:05d}.safetensors", save(shard))
        for number, shard in enumerate(_shards(weights, dtype))
    )
    return SharedWeights(files, {name: tuple(tensor.shape) for name, tensor in weights.items()})


def share_folder(folder: Path) -> SentFiles:
    """Put the files in `folder` into the object store of the cluster that was joined."""
    from posttrain.core.cluster.on_ray.objects import put_files  # Ray is an extra

    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return sent(put_files((path.name, path.read_bytes()) for path in paths))


def sent(files: SharedFiles) -> SentFiles:
    """`files` with the digest that `digest_of` finds in a folder with them."""
    return SentFiles(combine_digests(files.digests), shared=files)


def _shards(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        copy = tensor.detach().to("cpu", dtype).contiguous()
        if size and size + copy.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = copy
        size += copy.nbytes
    yield shard


def send_policy(engine: RolloutEngine[Any], model: PreTrainedModel, policy_version: int) -> None:
    if not is_adapted(model):
        engine.sync_weights(model.state_dict().items(), policy_version=policy_version)
    elif takes_adapter(engine, model):
        with tempfile.TemporaryDirectory(prefix="posttrain-adapter-") as folder:
            save_adapter(model, Path(folder))
            engine.sync_adapter(Path(folder), policy_version=policy_version)
    else:
        engine.sync_weights(merged_weights(model), policy_version=policy_version)


def weights_sent(
    engine: RolloutEngine[Any], model: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """The weights, named as in a plain state dict, that `engine` has when it has `model`."""
    merged = is_adapted(model) and not takes_adapter(engine, model)
    yield from merged_weights(model) if merged else base_weights(model)


def takes_adapter(engine: RolloutEngine[Any], model: PreTrainedModel) -> bool:
    """Whether an engine knows what an adapter is, and can take this one."""
    knows = type(engine).sync_adapter is not RolloutEngine.sync_adapter
    return knows and fits_engines(model)
