"""The shape of a model, from its configuration alone: parameters by part, exact to the last one.

The model is made on torch's `meta` device, where tensors have shapes and no memory, so that any
architecture that transformers knows is counted by its own code.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from posttrain.core.artifacts import file_digest
from posttrain.core.config.sections import LoraSection, ModelSection
from posttrain.core.models.lora import add_adapter
from posttrain.core.models.sampled_outputs import num_linear_outputs
from posttrain.core.models.source import BUNDLED_ID, bundled_gguf, converted_folder

HEAD_SIZE = 64
"""Of the Llama that stands in for a model of which only the size is known, as its vocabulary."""
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters of a causal language model. `head` is 0 where it shares the embedding's weights.

    `config` is transformers' own; `layers` is how many layers `in_layers` are spread over.
    """

    config: Any  # Any: every architecture has a class of its own
    total: int
    embedding: int
    head: int
    layers: int
    hidden: int
    vocabulary: int
    linear_outputs: int
    """Numbers that linear layers give for each token, the head's left out."""

    @property
    def in_layers(self) -> int:
        """Parameters that every token passes through: all but embedding and head."""
        return self.total - self.embedding - self.head

    @property
    def backbone(self) -> int:
        """Parameters of a reward model or critic, whose own head is of one row."""
        return self.total - self.head + self.hidden

    def adapter(self, lora: LoraSection) -> int:
        """Parameters that are trained with `lora`."""
        model = _on_meta(self.config)
        add_adapter(model, lora, seed=0)
        return sum(p.numel() for p in model.parameters() if p.requires_grad)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model's shape, how it is known, and where its tokenizer is (None: not on this disk).

    `gguf` is the file in that folder that holds the tokenizer, where it is not converted yet.
    """

    shape: ModelShape
    how: str
    folder: Path | None
    gguf: str | None = None

    @property
    def tokenizer_bytes(self) -> int:
        """What is saved beside the weights; 0 where it is not known."""
        if self.folder is None or self.gguf is not None:
            return 0
        names = ("*.json", "*.txt", "*.model", "*.jinja")
        return sum(path.stat().st_size for name in names for path in self.folder.glob(name))


def shape_of(config: Any) -> ModelShape:  # Any: as above
    """The shape of the causal language model that `config` describes."""
    model = _on_meta(config)
    text = config.get_text_config()
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    head: Tensor = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return ModelShape(
        config=config,
        total=sum(p.numel() for p in model.parameters()),
        embedding=embedding.numel(),
        head=0 if head is embedding else head.numel(),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        linear_outputs=num_linear_outputs(model),
    )


def find_model(section: ModelSection, cache: Path) -> KnownModel | None:
    """What this disk, or else the model's name, tells of it; None when neither does.

    `cache` is where the bundled model is converted to. Downloads and writes nothing.
    """
    folder, gguf, how = _find_folder(section, cache)
    if folder is not None:
        options = {} if gguf is None else {"gguf_file": gguf}
        try:
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
            return KnownModel(shape_of(config), how, folder, gguf)
        except (OSError, ValueError, ImportError, KeyError):
            pass  # transformers cannot make it: the run will say why, and its name may tell
    match = re.search(r"(\d+(?:\.\d+)?)([MmBb])(?![A-Za-z])", Path(section.source).name)
    if match is None:
        return None
    parameters = float(match[1]) * (1e6 if match[2] in "Mm" else 1e9)
    return KnownModel(shape_of(stand_in(parameters)), "its name; a Llama of that size", None)


def stand_in(parameters: float) -> LlamaConfig:
    """A Llama of about that many parameters: its layers have 12 x hidden^2, half as many as heads.

    Such are the proportions of Llama 2 7B, GPT-2 and Pythia: depth grows with width.
    """
    heads = 1
    while _llama_size(heads + 1) <= parameters:
        heads += 1
    hidden = heads * HEAD_SIZE
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=max(1, heads // 2),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY,
    )


def _llama_size(heads: int) -> float:
    hidden = heads * HEAD_SIZE
    return 12.0 * hidden**2 * max(1, heads // 2) + 2.0 * hidden * VOCABULARY


def _find_folder(section: ModelSection, cache: Path) -> tuple[Path | None, str | None, str]:
    """Folder with the configuration, the GGUF in it if it is one, and how it was found."""
    path = Path(section.source).expanduser()
    if (path / "config.json").is_file():
        return path, None, "counted"
    from huggingface_hub import try_to_load_from_cache

    try:
        known = try_to_load_from_cache(section.source, "config.json", revision=section.revision)
    except ValueError:  # no name that a hub can have
        known = None
    if isinstance(known, str):
        return Path(known).parent, None, "counted"
    gguf = bundled_gguf()
    if section.fallback != "bundled" or section.source != BUNDLED_ID or gguf is None:
        return None, None, ""
    converted = converted_folder(cache, file_digest(gguf))
    if (converted / "source.json").is_file():
        return converted, None, "counted"
    return gguf.parent, gguf.name, "counted"


def truncated(config: Any, layers: int) -> Any:  # Any: as above
    """The same configuration with that many layers and a small vocabulary."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        text.layer_types = list(kinds)[:layers]
    text.num_hidden_layers = layers
    text.vocab_size = SMALL_VOCABULARY
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, token, 0)
    return found


SMALL_VOCABULARY = 1024
"""Of a truncated model: its embedding and head take no time beside a layer; as many rows
of a batch can begin with different tokens."""


def _on_meta(config: Any) -> PreTrainedModel:  # Any: as above
    with torch.device("meta"):
        return make_model(copy.deepcopy(config))


def make_model(config: Any, **options: Any) -> PreTrainedModel:  # Any: transformers' own
    """A causal language model of that configuration, with weights as they come."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, trust_remote_code=False, **options
    )
    return model
