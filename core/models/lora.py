"""LoRA (arXiv:2106.09685): low-rank factors next to frozen weights, in peft's format.

A layer computes x W' + (alpha / rank) x A' B', with A drawn and B zero, so that the first forward
pass is the model's own. The factors are parameters of the model like others; what else is trained
(the head of a reward model or critic) stays trainable as a whole.

Experts of a mixture whose weights are fused into one tensor [experts, out, in] have factors of each
expert, which peft keeps side by side: A [rank * experts, in] and B [out, rank * experts].
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.core.config.sections import LoraSection
from posttrain.core.errors import ConfigError, ResourceError, RunError, reading_model
from posttrain.core.runtime.seeding import generator

if TYPE_CHECKING:  # plugins are listed without loading transformers
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
WRAPPED = ".base_layer"
"""What peft adds to the name of a layer that it wraps, once for each of a layer's weights."""


def check_adapter(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    max_rank: int | None = None,
    *,
    experts: bool = False,
) -> None:
    """Raise `RunError` unless `folder` holds a LoRA adapter for the weights of `shapes`.

    Only pairs A [rank, in], B [out, rank] of weights [out, in] are taken, of `max_rank` at most;
    with `experts` those of fused experts as well.
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
    if experts:
        found = {
            name: shape for name, shape in found.items() if not _of_experts(name, shape, shapes)
        }
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


def _of_experts(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a tensor has the shape of factors of fused experts in the layer that it names."""
    layer = name.removeprefix(PREFIX).removesuffix(A).removesuffix(B).replace(WRAPPED, "")
    rows, width = shape if name.endswith(A) else reversed(shape)
    return any(
        len(fused) == 3 and width in fused[1:] and rows % fused[0] == 0
        for weight, fused in shapes.items()
        if weight.rpartition(".")[0] == layer
    )


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

    names, experts = _targets(model, section.targets)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft takes any number
        use_rslora=section.rank_stabilised,
        target_modules=names,
        target_parameters=experts or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(config, model, NAME)  # freezes all else
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]  # the small head of a classifier
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or not _in_backbone(model, name))
    draw = generator(seed, "lora")
    for adapted in adapted_weights(model):
        factor = adapted.layer.lora_A[NAME].weight
        bound = 1 / math.sqrt(factor.shape[1])
        drawn = torch.empty(factor.shape).uniform_(-bound, bound, generator=draw)
        with torch.no_grad():
            factor.copy_(drawn)


class AdaptedWeight(NamedTuple):
    """A weight with factors next to it: its name in the plain model, and peft's layer.

    `module` is the layer's name in the adapted model.
    """

    name: str
    module: str
    layer: Any  # Any: peft is not typed

    @property
    def owner(self) -> Any:
        """The plain layer that has the weight."""
        return self.layer.get_base_layer()

    @property
    def own_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_fused(self) -> bool:
        """Whether it holds all experts of a layer."""
        return hasattr(self.layer, "parameter_name")

    def merged(self) -> Tensor:
        """W + (alpha / rank) B A, added in float32."""
        base = getattr(self.owner, self.own_name).detach()
        wide = torch.float64 if base.dtype == torch.float64 else torch.float32
        factors = (self.layer.lora_A, self.layer.lora_B)
        a, b = (factor[NAME].weight.detach().to(wide) for factor in factors)
        if base.dim() == 3:  # [experts, out, in], or [experts, in, out]
            count = len(base)
            a, b = a.view(count, -1, a.shape[1]), b.view(len(b), -1, count)
            change = torch.einsum("ore,eri->eoi", b, a)
            swapped = getattr(self.owner, "is_transposed", False)
        else:
            change, swapped = b @ a, self.layer.fan_in_fan_out
        change = change.transpose(-1, -2) if swapped else change
        merged: Tensor = base.to(wide) + change * self.layer.scaling[NAME]
        return merged.to(base.dtype)


def adapted_weights(model: torch.nn.Module) -> Iterator[AdaptedWeight]:
    for module, layer in model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            own = getattr(layer, "parameter_name", "weight")
            yield AdaptedWeight(f"{module.replace(WRAPPED, '')}.{own}", module, layer)


def is_adapted(model: torch.nn.Module) -> bool:
    return any(True for _ in adapted_weights(model))


def fits_engines(model: torch.nn.Module) -> bool:
    """Whether engines have adapters for the adapted weights.

    They have none for weights that are kept as [in, out] (GPT-2), nor for fused experts.
    """
    return not any(each.is_fused or each.layer.fan_in_fan_out for each in adapted_weights(model))


def base_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            yield name.replace(WRAPPED, ""), tensor


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict of `model` with its adapter in the weights; one is made at a time."""
    adapted = {each.name: each for each in adapted_weights(model)}
    for name, tensor in base_weights(model):
        yield name, adapted[name].merged() if name in adapted else tensor


@torch.no_grad()
def merge_adapter(model: torch.nn.Module) -> None:
    """Make `model` a plain one again, with its adapter in the weights; a twin stays as it is."""
    found = list(adapted_weights(model))
    for each in found:
        merged = torch.nn.Parameter(each.merged(), requires_grad=False)
        setattr(each.owner, each.own_name, merged)
    for each in found:
        if not each.module.endswith(WRAPPED):  # a layer inside another one of peft's goes with it
            parent, _, own = each.module.rpartition(".")
            setattr(model.get_submodule(parent), own, each.owner)
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
    adapted = list(adapted_weights(model))
    first = adapted[0].layer
    heads = _whole_heads(model)
    kinds: dict[bool, set[str]] = {False: set(), True: set()}
    for each in adapted:  # of experts `experts.down_proj`, else the layer's name
        path = each.name.split(".")
        kinds[each.is_fused].add(".".join(path[-2:]) if each.is_fused else path[-2])
    config = LoraConfig(
        r=first.r[NAME],
        lora_alpha=first.lora_alpha[NAME],
        use_rslora=bool(first.use_rslora[NAME]),
        target_modules=sorted(kinds[False]),
        target_parameters=sorted(kinds[True]) or None,
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
    for each in adapted:
        for kind, factor in ((A, each.layer.lora_A), (B, each.layer.lora_B)):
            weight = factor[NAME].weight.detach().cpu().contiguous()
            tensors[f"{PREFIX}{each.module}{kind}"] = weight
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
    with reading_model(f"model directory '{base}' cannot be loaded", "save the model again"):
        model = auto.from_pretrained(
            base, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    check_adapter(adapter, shapes, experts=True)
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


def _targets(model: PreTrainedModel, wanted: Iterable[str] | str) -> tuple[list[str], list[str]]:
    """Full names of the linear layers, and of the weights of fused experts, to be adapted.

    `wanted` are kinds of them (`kind_of`), or `all`.
    """
    linear, experts = adaptable(model)
    if not linear:
        raise ConfigError(
            f"lora finds no linear layers in model type '{model.config.model_type}': train all "
            "weights with lora: null"
        )
    if wanted == "all":
        return linear, experts
    kinds = sorted({kind_of(name) for name in (*linear, *experts)})
    unknown = sorted(set(wanted) - set(kinds))
    if unknown:
        raise ConfigError(
            f"lora.targets names {', '.join(unknown)}, which model type "
            f"'{model.config.model_type}' has no linear layers of: choose of {', '.join(kinds)}, "
            "or 'all'"
        )
    chosen = set(wanted)
    return (
        [name for name in linear if kind_of(name) in chosen],
        [name for name in experts if kind_of(name) in chosen],
    )


def adaptable(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Full names of the backbone's linear layers, and of its weights [experts, ...]."""
    from transformers.pytorch_utils import Conv1D

    linear, experts = [], []
    for owner, module in model.named_modules():
        if not _in_backbone(model, owner):
            continue
        # A model's own kind of linear layer may return more than a product (Llama 4's router).
        own_kind = type(module).__module__.startswith("transformers.models.")
        if isinstance(module, torch.nn.Linear | Conv1D) and not own_kind:
            linear.append(owner)
        elif "expert" in f"{owner}.{type(module).__name__}".lower():
            weights = module.named_parameters(recurse=False)
            experts += [f"{owner}.{name}" for name, weight in weights if weight.dim() == 3]
    return linear, experts


def kind_of(name: str) -> str:
    """What users call a layer or a weight: the last part of its name that says what it is."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _in_backbone(model: PreTrainedModel, name: str) -> bool:
    """Whether `name` is of the model below its head.

    The head stands next to a model of its own; `base_model_prefix` is not right for every type.
    """
    from transformers import PreTrainedModel as Pretrained

    return isinstance(getattr(model, name.partition(".")[0], None), Pretrained)
