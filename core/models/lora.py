"""LoRA (arXiv:2106.09685): low-rank factors next to frozen weights, in peft's format.

A layer computes x W' + (alpha / rank) x A' B', with A drawn and B zero, so that the first forward
pass is the model's own. The factors are parameters of the model like others; what else is trained
(the head of a reward model or critic) stays trainable as a whole.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
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

logger = logging.getLogger(__name__)
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
            "save_pretrained writes"
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
        raise RunError(f"the adapter at {folder} does not fit: {problem}")


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


def save_adapter(
    model: PreTrainedModel, folder: Path, base: str = "", revision: str | None = None
) -> None:
    """Write the adapter as peft does, so that peft and vLLM read it.

    `base` names the model whose weights it was trained next to. The small head of a classifier is
    trained as a whole, and belongs to the adapter.
    """
    from peft import LoraConfig

    folder.mkdir(parents=True, exist_ok=True)
    layers = dict(_layers(model))
    first = next(iter(layers.values()))
    heads = _whole_heads(model)
    config = LoraConfig(
        r=first.r[NAME],
        lora_alpha=first.lora_alpha[NAME],
        use_rslora=bool(first.use_rslora[NAME]),
        target_modules=sorted({name.rpartition(".")[2] for name in layers}),
        fan_in_fan_out=bool(first.fan_in_fan_out),
        lora_dropout=0.0,
        bias="none",
        task_type="SEQ_CLS" if heads else "CAUSAL_LM",
        modules_to_save=sorted({name.partition(".")[0] for name in heads}) or None,
        base_model_name_or_path=base or None,
        revision=revision,
        inference_mode=True,
    )
    # peft keeps names in sets, whose order is another one in every process.
    stored: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    values = {k: sorted(v) if isinstance(v, set) else v for k, v in stored.items()}
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True), "utf-8")
    tensors = {f"{PREFIX}{name}": weight for name, weight in heads.items()}
    for name, layer in layers.items():
        for kind, factor in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            weight = factor[NAME].weight.detach().cpu().contiguous()
            tensors[f"{PREFIX}{name}.{kind}.weight"] = weight
    save_file(tensors, folder / WEIGHTS)


def base_of_adapter_in(folder: Path) -> tuple[str, str | None]:
    """The base model that the adapter in `folder` names, and its revision; else `ResourceError`."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (OSError, ValueError, AttributeError) as error:
        raise ResourceError(f"the adapter at {folder} cannot be read: {error!r}") from error
    if not isinstance(base, str) or not base:
        raise ResourceError(
            f"the adapter at {folder} names no base model: set base_model_name_or_path in its "
            f"{CONFIG} to a folder or a hub id"
        )
    return base, revision if isinstance(revision, str) else None


def merge_into(base: Path, adapter: Path, out: Path) -> None:
    """Write the model in `base` with the LoRA adapter in `adapter` merged, as a folder `out`.

    Raises `RunError` for an adapter that does not fit.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from posttrain.core.data.tokens import load_tokenizer

    auto: Any = AutoModelForCausalLM  # Any: it is not typed
    model = auto.from_pretrained(
        base, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    check_adapter(adapter, {name: weight.shape for name, weight in model.state_dict().items()})
    adapted: Any = PeftModel.from_pretrained(  # Any: its methods are not typed
        model, adapter, trust_remote_code=False
    )
    adapted.merge_and_unload().save_pretrained(out)
    load_tokenizer(base).save_pretrained(out)


def _whole_heads(model: PreTrainedModel) -> dict[str, Tensor]:
    """What an adapted model trains outside its backbone, by name."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name and not _in_backbone(model, name)
    }


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


def check_targets(folder: Path | None, section: LoraSection, place: str) -> None:
    """Raise `ConfigError` if the model in `folder` has not the layers that `section` names.

    Reads its config alone; one that transformers cannot read is refused when it is loaded. Without
    a folder it is the bundled model, a Llama, which a run converts first.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    try:
        config = (
            LlamaConfig(num_hidden_layers=1)
            if folder is None
            else AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM  # Any: it is not typed
            model = auto.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a config makes a model class raise
        logger.info("%s is not checked before the model is loaded: %s", place, error)
        return
    try:
        _targets(model, section.targets)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _targets(model: PreTrainedModel, wanted: Iterable[str] | str) -> list[str]:
    """Full names of the linear layers of the backbone that `wanted` takes."""
    from transformers.pytorch_utils import Conv1D

    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and _in_backbone(model, name)
    ]
    if not linear:
        raise ConfigError(
            f"lora finds no linear layers in model type '{model.config.model_type}': train all "
            "weights with lora: null"
        )
    if wanted == "all":
        _refuse_fused_experts(model, linear)
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


def _refuse_fused_experts(model: PreTrainedModel, linear: Sequence[str]) -> None:
    """Raise `ConfigError` where `all` would leave experts out, whose weights are no layers."""
    reached, fused = set(linear), set()
    for owner, module in model.named_modules():
        if owner in reached or not _in_backbone(model, owner):
            continue
        is_expert = "expert" in f"{owner}.{type(module).__name__}".lower()
        for name, parameter in module.named_parameters(recurse=False):
            if is_expert and parameter.dim() > 1:
                fused.add(re.sub(r"\.\d+(?=\.)", ".*", f"{owner}.{name}"))
    if fused:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"lora.targets: all cannot adapt the experts of model type '{model.config.model_type}' "
            f"({', '.join(sorted(fused))}), whose weights are fused into one tensor: name the "
            f"layers to adapt, of [{kinds}], which leaves the experts as they are, or train all "
            "weights with lora: null"
        )


def _in_backbone(model: PreTrainedModel, name: str) -> bool:
    """Whether `name` is of the model below its head.

    The head stands next to a model of its own; `base_model_prefix` is not right for every type.
    """
    from transformers import PreTrainedModel as Pretrained

    return isinstance(getattr(model, name.partition(".")[0], None), Pretrained)
