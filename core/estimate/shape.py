"""Parameters and widths of a model, from its configuration alone; no weights are loaded.

The model is built on torch's `meta` device, where tensors have shapes but no memory, so any
architecture that transformers knows is counted by its own code.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from posttrain.core.config.sections import LoraSection, ModelSection
from posttrain.core.errors import ResourceError, reading_model
from posttrain.core.models.lora import adaptable, kind_of
from posttrain.core.models.source import BUNDLED_ID, bundled_gguf, known_folder


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters and widths of a causal language model.

    `head` is 0 if the output layer shares the embedding's weights. `idle` parameters belong to
    experts that a token does not use. `linear_width` is the sum of inputs and outputs of all linear
    layers except the output layer, `adaptable` has those of each weight that LoRA reaches, by its
    kind; `kv_width` counts keys and values of one layer.
    """

    total: int
    embedding: int
    head: int
    idle: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    attention_width: int
    kv_width: int
    linear_width: int
    adaptable: tuple[tuple[str, int], ...]

    @property
    def active(self) -> int:
        """Parameters of the layers that each token is multiplied with."""
        return self.total - self.embedding - self.head - self.idle

    def trained(self, lora: LoraSection | None, *, head: bool = True) -> int:
        """Trained parameters: all, or rank x (inputs + outputs) of each target of LoRA.

        Without `head`, of a reward model or critic: one output in place of the vocabulary.
        """
        if lora is None:
            return self.total if head else self.total - self.head + self.hidden
        names = None if lora.targets == "all" else lora.targets
        return lora.rank * sum(
            width for kind, width in self.adaptable if names is None or kind in names
        )


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A shape, how it is known, and what transformers loads config and tokenizer from, if it is
    on this disk: a source and options."""

    shape: ModelShape
    how: str
    source: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)  # Any: arguments of from_pretrained


def shape_of(config: Any) -> ModelShape:  # Any: every architecture has its own config class
    """The shape of the causal language model that a transformers config describes."""
    text = config.get_text_config()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=False
        )
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    available = getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0)
    used = getattr(text, "num_experts_per_tok", None) or available
    linears = [m for m in model.modules() if isinstance(m, Linear | Conv1D) and m is not output]
    layers, fused = adaptable(model)
    weights = [(kind_of(name), model.get_submodule(name).weight.shape) for name in layers]
    weights += [(kind_of(name), model.get_parameter(name).shape) for name in fused]
    return ModelShape(
        total=sum(parameter.numel() for parameter in model.parameters()),
        embedding=embedding.numel(),
        head=0 if output.weight is embedding else output.weight.numel(),
        idle=round(experts * (1 - used / available)) if available else 0,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads=heads,
        attention_width=heads * head_size,
        kv_width=2 * (getattr(text, "num_key_value_heads", None) or heads) * head_size,
        linear_width=sum(sum(layer.weight.shape) for layer in linears),
        # [experts, out, in]: factors of each expert
        adaptable=tuple((kind, sum(w[-2:]) * math.prod(w[:-2])) for kind, w in weights),
    )


def find_model(section: ModelSection, cache: Path) -> KnownModel | None:
    """The model's shape from this disk, or from the size in its name; None without either.

    `cache` is where the bundled model is converted to. Downloads nothing, writes nothing.
    """
    for source, options in _places(section, cache):
        try:
            with reading_model(f"the config of '{source}'", "it is not used"):
                config = AutoConfig.from_pretrained(
                    source, local_files_only=True, trust_remote_code=False, **options
                )
                return KnownModel(shape_of(config), "counted from its config", source, options)
        except ResourceError:
            continue  # not there, or an architecture that transformers cannot build
    match = re.search(r"(\d+(?:\.\d+)?)([MmBb])(?![A-Za-z])", Path(section.source).name)
    if match is None:
        return None
    size = float(match[1]) * (1e6 if match[2] in "Mm" else 1e9)
    return KnownModel(shape_of(stand_in(size)), "not on this disk; as a Llama of that size")


def _places(section: ModelSection, cache: Path) -> list[tuple[str | Path, dict[str, Any]]]:
    """Where the configuration may be: a folder, the hub's cache, or the bundled GGUF."""
    if (folder := known_folder(section, cache)) is not None:
        return [(folder, {})]
    places: list[tuple[str | Path, dict[str, Any]]]
    places, gguf = [(section.source, {"revision": section.revision})], bundled_gguf()
    if section.fallback == "bundled" and section.source == BUNDLED_ID and gguf is not None:
        places.append((gguf.parent, {"gguf_file": gguf.name}))
    return places


def stand_in(parameters: float) -> LlamaConfig:
    """The largest Llama of at most that many parameters, with half as many layers as heads.

    Llama 2 7B, GPT-2 and Pythia have about these proportions: depth grows with width.
    """
    heads = 1
    while 12 * (64 * heads + 64) ** 2 * ((heads + 1) // 2) + 64_000 * 64 * (heads + 1) < parameters:
        heads += 1
    return LlamaConfig(
        hidden_size=64 * heads,
        intermediate_size=512 * heads // 3,
        num_hidden_layers=max(1, heads // 2),
        num_attention_heads=heads,
        vocab_size=32_000,
    )
