"""Write a model as one GGUF file, which llama.cpp and what is built on it read.

Weights, hyperparameters and tokenizer are written for models of the types in `ARCHITECTURES` whose
tokenizer is a byte-level BPE that llama.cpp knows. Everything else is refused with a sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError, reading_model

Json = Mapping[str, Any]  # Any: JSON values
GgufType = Literal["f16", "q8_0"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Model types of transformers that are written; GGUF has the same names."""
LARGEST_F16 = 65504.0
BLOCK = 32
"""Weights of a row that q8_0 scales together."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {WORDS % "{1,3}": "llama-bpe", WORDS % "": "qwen2"}
"""Regular expressions that split text before BPE, and llama.cpp's names of them."""
OTHER_WAY = (
    "llama.cpp's own converter takes more models: export without --gguf, then run `python "
    "convert_hf_to_gguf.py DIR --outtype %s` of a llama.cpp checkout"
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one tensor is written: its name in the file, type, and what is done to the rows."""

    name: str
    source: str
    shape: tuple[int, ...]
    type: str
    change: Callable[[np.ndarray], np.ndarray] | None = None


def write_gguf(folder: Path, out: Path, type: GgufType, name: str, licence: str) -> None:
    """Write the Hugging Face model in `folder` to the file `out`.

    Matrices are stored as `type`, vectors as float32; rows that q8_0 cannot divide into blocks as
    f16. Raises `ResourceError`, with nothing written, for a model that is not supported.
    """
    import gguf

    config = _config(folder, type)
    tokenizer = ChatTokenizer.load(folder)
    vocabulary = _vocabulary(folder, config, type)
    weights = _weights(folder)
    plans = list(_plans(config, weights, type))
    _check_range(plans, weights)
    writer = gguf.GGUFWriter(out, config.model_type)
    try:
        _add_config(writer, config, type, name, licence)
        _add_tokenizer(writer, vocabulary, tokenizer)
        for plan in plans:
            kind = gguf.GGMLQuantizationType[plan.type.upper()]
            size = gguf.GGML_QUANT_SIZES[kind]
            nbytes = math.prod(plan.shape) // size[0] * size[1]
            dtype = np.dtype(np.float32 if plan.type == "f32" else np.float16)
            writer.add_tensor_info(plan.name, plan.shape, dtype, nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for plan in plans:
            writer.write_tensor_data(_encoded(plan, weights))
    except BaseException:
        writer.close()
        out.unlink(missing_ok=True)
        raise
    writer.close()


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weights:
    """Where each tensor lies, with its shape; one is in memory at a time."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as stored:
            found: Tensor = stored.get_tensor(name)
        return found


def _weights(folder: Path) -> _Weights:
    files, shapes = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                files[name] = path
                shapes[name] = tuple(stored.get_slice(name).get_shape())
    return _Weights(files, shapes)


def _plans(config: Any, weights: _Weights, type: GgufType) -> Iterator[_Plan]:
    """How every tensor is written. Raises `ResourceError` for one that GGUF has no place for."""
    import gguf

    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for source, shape in weights.shapes.items():
        if source.endswith(".rotary_emb.inv_freq"):
            continue  # made from the config
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue  # the embedding is read instead
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ResourceError(
                f"the weight '{source}' of this {config.model_type} has no place in GGUF: "
                f"{OTHER_WAY % type}"
            )
        stored = "f32" if len(shape) < 2 else type
        if stored == "q8_0" and shape[-1] % BLOCK:
            stored = "f16"
        yield _Plan(target, source, shape, stored, _change(config, source))


def _change(config: Any, source: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """llama.cpp rotates neighbours of a Llama's queries and keys, transformers halves."""
    if config.model_type != "llama":
        return None
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if f".{part}." in source:
            return lambda rows: (
                rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
                .swapaxes(1, 2)
                .reshape(rows.shape)
            )
    return None


def _check_range(plans: Sequence[_Plan], weights: _Weights) -> None:
    """Raise `ResourceError` for weights that float16 cannot hold."""
    for plan in plans:
        largest = float(weights.read(plan.source).abs().max())
        if not math.isfinite(largest) or (plan.type != "f32" and largest > LARGEST_F16):
            raise ResourceError(
                f"the weight '{plan.source}' reaches {largest:g}, beyond float16's "
                f"{LARGEST_F16:g}: this model cannot be written as {plan.type}"
            )


def _encoded(plan: _Plan, weights: _Weights) -> np.ndarray:
    import gguf

    values = weights.read(plan.source).to(torch.float32).numpy()
    if plan.change is not None:
        values = plan.change(values)
    values = np.ascontiguousarray(values)
    if plan.type == "q8_0":
        made: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        return made
    return values if plan.type == "f32" else values.astype(np.float16)


# --- config --------------------------------------------------------------------------------------


def _config(folder: Path, type: GgufType) -> Any:  # Any: of the model's type
    """The model's config; raises `ResourceError` for a type or setting that is not written."""
    from transformers import AutoConfig

    expected = "expected that of an architecture transformers knows"
    with reading_model(f"model directory '{folder}' has no usable config.json", expected):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    problem = ""
    if config.model_type not in ARCHITECTURES:
        problem = f"model type '{config.model_type}'"
    elif (rope := config.rope_parameters.get("rope_type", "default")) not in ("default", "linear"):
        problem = f"rotary embeddings of type '{rope}'"
    elif getattr(config, "use_sliding_window", False):
        problem = "attention in a sliding window"
    elif config.hidden_act != "silu":
        problem = f"the activation '{config.hidden_act}'"
    if problem:
        raise ResourceError(
            f"posttrain writes no GGUF for {problem} (it does for {', '.join(ARCHITECTURES)}): "
            f"{OTHER_WAY % type}"
        )
    return config


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _add_config(writer: Any, config: Any, type: GgufType, name: str, licence: str) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    if licence:
        writer.add_license(licence)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    if config.rope_parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(config.rope_parameters["factor"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    types = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    writer.add_file_type(types[type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


# --- tokenizer -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id with GGUF's types of them, merges, and how text is split before BPE."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    split: str


def _vocabulary(folder: Path, config: Any, type: GgufType) -> _Vocabulary:
    """The tokenizer of `folder`; raises `ResourceError` for one that llama.cpp would read otherwise
    than transformers."""
    import gguf

    path = folder / "tokenizer.json"
    found: Json = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    model: Json = found.get("model") or {}
    split = _split(found)
    if split is None:
        raise ResourceError(
            "posttrain writes no GGUF for this tokenizer "
            f"({model.get('type', 'no tokenizer.json')}; it does for byte-level BPE as of GPT-2, "
            f"SmolLM2, Llama 3 and Qwen2): {OTHER_WAY % type}"
        )
    kinds = gguf.TokenType
    tokens = {number: (text, kinds.NORMAL) for text, number in model["vocab"].items()}
    for added in found.get("added_tokens") or ():
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        tokens[added["id"]] = (added["content"], kind)
    size = config.vocab_size
    if max(tokens) >= size:
        raise ResourceError(
            f"the tokenizer has the token id {max(tokens)} and the model {size} rows: resize the "
            "embedding with resize_token_embeddings and save the model"
        )
    rows = [tokens.get(number, (f"[PAD{number}]", kinds.UNUSED)) for number in range(size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return _Vocabulary([text for text, _ in rows], [int(k) for _, k in rows], merges, split)


def _split(found: Json) -> str | None:
    """llama.cpp's name of how the tokenizer splits text; None where it has none for it."""
    model, before = found.get("model") or {}, found.get("pre_tokenizer") or {}
    normalizer = (found.get("normalizer") or {}).get("type")
    if model.get("type") != "BPE" or model.get("byte_fallback") or normalizer not in (None, "NFC"):
        return None
    steps = before.get("pretokenizers") if before.get("type") == "Sequence" else [before]
    *first, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    name: str | None = None
    if last.get("use_regex", True):
        digits = [step for step in first if step.get("type") == "Digits"]
        if not first:
            name = "gpt-2"
        elif len(first) == 1 and digits and digits[0].get("individual_digits"):
            name = "smollm"
    elif len(first) == 1 and first[0].get("type") == "Split":
        pattern = first[0].get("pattern", {}).get("Regex")
        isolated = first[0].get("behavior") == "Isolated" and not first[0].get("invert")
        name = SPLITS.get(str(pattern)) if isolated else None
    # llama.cpp takes whole words of the vocabulary without merging for Llama 3 alone.
    return name if bool(model.get("ignore_merges")) == (name == "llama-bpe") else None


def _add_tokenizer(writer: Any, vocabulary: _Vocabulary, chat: ChatTokenizer) -> None:
    tokenizer = chat.tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(bool(begins and tokenizer.bos_token_id is not None))
    writer.add_add_space_prefix(False)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(chat.eos_token_id)
    if chat.turn_end.token != chat.eos_token_id:
        writer.add_eot_token_id(chat.turn_end.token)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_pad_token_id(chat.pad_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
