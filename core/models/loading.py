"""Load and save policies and reward models: Hugging Face directories, safetensors only."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttrain.core.errors import ResourceError, RunError, reading_model
from posttrain.core.models.decoding import why_no_shared_keys, why_no_stream
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.linear import is_emulated, widen
from posttrain.core.models.paths import paths_of
from posttrain.core.models.sharded import use_autocast
from posttrain.core.models.stream_attention import use_stream_attention

logger = logging.getLogger(__name__)

# transformers swaps global state (default dtype, weight initialisers) while it loads a model, so
# two stage threads must not load at once.
LOADING = threading.Lock()


def load_policy(path: Path, runtime: ModelRuntime) -> PreTrainedModel:
    """The causal language model in `path`, in training precision, without dropout."""
    return _load(AutoModelForCausalLM, path, runtime)


def load_reward_model(path: Path, runtime: ModelRuntime, *, new_head: bool) -> PreTrainedModel:
    """A sequence classifier with one label. `new_head` starts from a language model's backbone."""
    extra = {"num_labels": 1} if new_head else {}
    model = _load(AutoModelForSequenceClassification, path, runtime, **extra)
    if new_head:
        head: torch.nn.Linear = model.get_submodule("score")  # type: ignore[assignment]
        torch.nn.init.zeros_(head.weight)
    return model


def load_value_model(
    path: Path,
    runtime: ModelRuntime,
    head: Literal["keep", "zero", "normal"],
    *,
    seed: int = 0,
) -> PreTrainedModel:
    """A sequence classifier with one label whose score is a state's value.

    `keep` takes a reward model or a saved critic as it is. `zero` and `normal` give any model's
    backbone a new head: zeros, so every first value is 0, or N(0, 1 / (hidden size + 1)) drawn from
    `seed` (arXiv:2009.01325).
    """
    if head == "keep":
        model = load_reward_model(path, runtime, new_head=False)
        architectures = model.config.architectures or []
        classifies = any(name.endswith("ForSequenceClassification") for name in architectures)
        if model.config.num_labels != 1 or not classifies:
            raise ResourceError(
                f"model directory '{path}' holds {', '.join(architectures) or 'no known head'}, "
                "not a model with a scalar head: name a reward model or a saved critic, or start "
                "the critic with a new head"
            )
        return model
    model = load_reward_model(path, runtime, new_head=True)
    if head == "normal":
        score: torch.nn.Linear = model.get_submodule("score")  # type: ignore[assignment]
        chance = torch.Generator().manual_seed(seed)
        drawn = torch.randn(score.weight.shape, generator=chance) / (score.in_features + 1) ** 0.5
        with torch.no_grad():
            score.weight.copy_(drawn)
    return model


def load_process_reward_model(path: Path, runtime: ModelRuntime) -> PreTrainedModel:
    """A model that scores every token: a token classifier of one or two labels, or a scalar head.

    Of two labels, the second one is "right" (TRL's process reward models).
    """
    expected = "expected that of an architecture transformers knows"
    with reading_model(f"model directory '{path}' has no usable config.json", expected):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    heads, labels = ", ".join(config.architectures or []), config.num_labels
    if heads.endswith("ForTokenClassification") and labels in (1, 2):
        return _load(AutoModelForTokenClassification, path, runtime)
    if heads.endswith("ForSequenceClassification") and labels == 1:
        return load_reward_model(path, runtime, new_head=False)
    raise ResourceError(
        f"model directory '{path}' holds {heads or 'no known head'} with {labels} labels, not a "
        "process reward model: expected a token classifier of one or two labels, or a sequence "
        "classifier of one label, whose head is then read at the end of each step"
    )


def non_finite_weights(model: PreTrainedModel) -> list[str]:
    """Names of the weights that hold a value that is not finite."""
    return [name for name, tensor in model.named_parameters() if not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return True
    # Quick, and makes nothing as large as the weight; of large values it may overflow.
    norm = torch.linalg.vector_norm(tensor.detach()).item()
    return math.isfinite(norm) or bool(tensor.isfinite().all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, config and tokenizer as a Hugging Face directory.

    Raises `RunError`, with nothing written, for weights that are not finite.
    """
    if names := non_finite_weights(model):
        raise RunError(
            f"the trained weights are not finite ({_some(names)}) and were not stored: try a lower "
            "optimizer.learning_rate, a larger optimizer.eps or model.dtype: float32"
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_reward_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, ends: Collection[int]
) -> None:
    """Write a sequence classifier whose scores are the same wherever it is loaded.

    `AutoModelForSequenceClassification` reads a row at its last token that is not padding. So the
    padding must be a token that no text ends with: `ends` are those that end one, and the unknown
    token stands for any text. Padding is on the right, where positions do not depend on it.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    others = (tokenizer.eos_token_id, tokenizer.unk_token_id)
    last = {*ends, *(i for i in others if isinstance(i, int))}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in last:
        unused = [
            token
            for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
            if token in _PADDING and number not in last
        ]
        tokenizer.add_special_tokens({"pad_token": unused[0] if unused else _PADDING[0]})
    pad = int(tokenizer.pad_token_id)
    rows = len(_embeddings(model))
    if pad >= rows:
        model.resize_token_embeddings(pad + 1, mean_resizing=False)
        with torch.no_grad():
            _embeddings(model)[rows:] = 0.0  # transformers draws them
    model.config.pad_token_id = pad
    model.config.get_text_config().pad_token_id = pad
    save_model(model, tokenizer, folder)


def _embeddings(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return found


_PADDING = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|vision_pad|>")
"""Names of tokens that no text ends with; the first is added where a vocabulary has none."""


def _load(auto: type, path: Path, runtime: ModelRuntime, **extra: object) -> PreTrainedModel:
    with LOADING:
        model = from_folder(
            auto,
            path,
            torch.float32 if runtime.autocast else runtime.dtype,
            runtime.plain_attention,
            **extra,
        )
    model.to(runtime.device)
    if names := non_finite_weights(model):
        raise ResourceError(
            f"model directory '{path}' holds weights that are not finite ({_some(names)}): choose "
            "another model; to train on these numbers is of no use"
        )
    model.eval()  # no dropout: the old and new log-probs of one policy must be equal
    paths_of(model).checked = False  # before its first pass, by core.training.agreement
    attend_as(model, runtime)
    widen(model)
    if is_emulated(model.dtype, model.device):
        logger.info("no bfloat16 instructions here: its products are made in float32 and rounded")
    if runtime.autocast:
        use_autocast(model, runtime.dtype)
    loaded: PreTrainedModel = model
    return loaded


def from_folder(
    auto: Any,  # Any: transformers' auto classes are not typed
    path: Path,
    dtype: torch.dtype,
    attention: str,
    **extra: object,
) -> Any:
    """The model in `path`; eager where its type does not know SDPA. `LOADING` must be held.

    Raises `ResourceError` for files of which none can be made.
    """
    expected = (
        "expected config.json, *.safetensors and a tokenizer of an architecture transformers knows"
    )

    def load(how: str) -> Any:
        return auto.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=how,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **extra,
        )

    with reading_model(f"model directory '{path}' cannot be loaded", expected):
        try:
            return load(attention)
        except ValueError as error:
            if attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
                raise
            return load("eager")


def attend_as(model: PreTrainedModel, runtime: ModelRuntime) -> None:
    """Let `model`, made with `runtime.plain_attention`, attend as configured, if it can."""
    if runtime.attention == "stream":
        reason = why_no_stream(model)
        if reason is None:
            use_stream_attention(model)
        else:
            logger.info("prompts are padded and not shared in one stream: %s", reason)
    reason = why_no_shared_keys(model)
    if reason is not None:
        logger.info("each response is computed with its whole prompt: %s", reason)
