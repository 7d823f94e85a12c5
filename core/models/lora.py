"""LoRA (arXiv:2106.09685): low-rank factors next to frozen weights, in peft's format.

A layer computes x W' + (alpha / rank) x A' B', with A drawn and B zero, so that the first forward
pass is the model's own. The factors are parameters of the model like others; what else is trained
(the head of a reward model or critic) stays trainable as a whole.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.core.config.sections import LoraSection
from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.runtime.seeding import generator

if TYPE_CHECKING:  # plugins are listed without loading transformers
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def check_adapter(
    folder: Path, shapes: Mapping[str, Sequence[int]], max_rank: int | None = None
) -> None:
    """Raise `RunError` unless `folder` holds a LoRA adapter for the weights of `shapes`.

    Only pairs A [rank, in], B [out, rank] of weights [out, in] are taken, of `max_rank` at most.
    """
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise RunError(
            f"no adapter at {folder}: {' and '.join(missing)} missing; expected what peft's "
            "save_pretrained writes (the engine keeps what it has)"
        )
    try:
        kind = json.loads((folder / CONFIG).read_text("utf-8"))["peft_type"]
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"the adapter at {folder} cannot be read: {error!r}") from error
    problem = f"it is a '{kind}', expected LORA" if kind != "LORA" else ""
    problem = problem or _misfit(found, shapes, max_rank)
    if problem:
        raise RunError(
            f"the adapter at {folder} does not fit: {problem} (the engine keeps its own)"
        )


def _misfit(
    found: Mapping[str, Sequence[int]],
    shapes: Mapping[str, Sequence[int]],
    max_rank: int | None,
) -> str:
    """What is wrong with the adapter's tensors; empty when nothing is."""
    if not found:
        return "it has no tensors"
    for name, shape in found.items():
        end = A if name.endswith(A) else B
        base = shapes.get(name.removeprefix(PREFIX).removesuffix(end) + ".weight")
        if not (name.startswith(PREFIX) and name.endswith(end)) or base is None:
            return (
                f"it changes '{name}', which is not a weight of this model that engines can adapt"
            )
        rank, width = shape if end == A else reversed(shape)
        if len(base) != 2 or width != base[1 if end == A else 0]:
            return f"'{name}' is {list(shape)} for a weight of {list(base)}"
        if max_rank is not None and rank > max_rank:
            return f"'{name}' has rank {rank}, above engine.max_lora_rank {max_rank}: raise that"
    return ""


NAME = "default"  # peft's name of a model's only adapter


def frozen_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same model once more, frozen, on the same weights in memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.requires_grad_(False)
    return twin


def add_adapter(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Freeze the backbone of `model` and put factors next to the weights that `section` names."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    names = _targets(model, section.targets)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft takes any number
        use_rslora=section.rank_stabilised,
        target_modules=names,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(config, model, NAME)  # freezes all else
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]  # the small head of a classifier
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or not _in_backbone(model, name))
    draw = generator(seed, "lora")
    for _, layer in _layers(model):
        factor = layer.lora_A[NAME].weight
        bound = 1 / math.sqrt(factor.shape[1])
        drawn = torch.empty(factor.shape).uniform_(-bound, bound, generator=draw)
        with torch.no_grad():
            factor.copy_(drawn)


def is_adapted(model: torch.nn.Module) -> bool:
    return any(True for _ in _layers(model))


def is_transposed(model: torch.nn.Module) -> bool:
    """Whether the adapted weights are kept as [in, out] (GPT-2), as no engine's adapters are."""
    return any(layer.fan_in_fan_out for _, layer in _layers(model))


def base_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict of `model` with its adapter in the weights; one is made at a time."""
    layers = dict(_layers(model))
    for name, tensor in base_weights(model):
        layer = layers.get(name.removesuffix(".weight"))
        yield name, tensor if layer is None else _merged(layer)


@torch.no_grad()
def merge_adapter(model: torch.nn.Module) -> None:
    """Make `model` a plain one again, with its adapter in the weights; a twin stays as it is."""
    for name, layer in list(_layers(model)):
        base = layer.base_layer
        base.weight = torch.nn.Parameter(_merged(layer), requires_grad=False)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, base)
    model.__dict__.pop("peft_config", None)  # peft's mark of an adapted model


def save_adapter(model: PreTrainedModel, folder: Path, base: str = "") -> None:
    """Write the adapter as peft does, so that peft and vLLM read it; `base` names its model."""
    from peft import LoraConfig

    folder.mkdir(parents=True, exist_ok=True)
    layers = dict(_layers(model))
    first = next(iter(layers.values()))
    LoraConfig(
        r=first.r[NAME],
        lora_alpha=first.lora_alpha[NAME],
        use_rslora=bool(first.use_rslora[NAME]),
        target_modules=sorted({name.rpartition(".")[2] for name in layers}),
        fan_in_fan_out=bool(first.fan_in_fan_out),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        inference_mode=True,
    ).save_pretrained(str(folder))
    tensors = {}
    for name, layer in layers.items():
        for kind, factor in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            weight = factor[NAME].weight.detach().cpu().contiguous()
            tensors[f"{PREFIX}{name}.{kind}.weight"] = weight
    save_file(tensors, folder / WEIGHTS)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:  # Any: peft is not typed
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def _merged(layer: Any) -> Tensor:  # Any: as above
    """W + (alpha / rank) B A, added in float32."""
    base = layer.base_layer.weight.detach()
    wide = torch.float64 if base.dtype == torch.float64 else torch.float32
    a, b = (factor[NAME].weight.detach().to(wide) for factor in (layer.lora_A, layer.lora_B))
    change = (b @ a) * layer.scaling[NAME]
    merged: Tensor = base.to(wide) + (change.t() if layer.fan_in_fan_out else change)
    return merged.to(base.dtype)


def _targets(model: PreTrainedModel, wanted: Iterable[str] | str) -> list[str]:
    """Full names of the linear layers of the backbone that `wanted` takes."""
    from transformers.pytorch_utils import Conv1D

    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and _in_backbone(model, name)
    ]
    if wanted == "all":
        return linear
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    unknown = sorted(set(wanted) - set(kinds))
    if unknown:
        raise ConfigError(
            f"lora.targets names {', '.join(unknown)}, which model type "
            f"'{model.config.model_type}' has no linear layers of: choose of {', '.join(kinds)}, "
            "or 'all'"
        )
    return [name for name in linear if name.rpartition(".")[2] in set(wanted)]


def _in_backbone(model: PreTrainedModel, name: str) -> bool:
    return name.startswith(f"{model.base_model_prefix}.")


def check_targets(folder: Path, wanted: Iterable[str]) -> None:
    """Raise `ConfigError` for names that no linear layer of the model in `folder` has.

    The model is made without weights, from its config alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM  # Any: its constructors are not typed
            model = auto.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"model directory '{folder}' cannot be loaded: {str(error).splitlines()[0]}; expected "
            "the config.json of a causal language model that transformers knows"
        ) from error
    _targets(model, wanted)
