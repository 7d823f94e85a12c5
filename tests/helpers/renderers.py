"""Small tokenizers with the control tokens of known families, and conversations for renderers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.core.kit.renderers import CALL
from posttrain.core.types import Message, ToolCall

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "templates"

# Pre-tokenization of GPT-4's successors (Llama 3, Qwen, GLM, DeepSeek), where punctuation takes the
# line ends after it along, and of GPT-2's (SmolLM2).
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECES = "sentencepiece"


@dataclass(frozen=True)
class Family:
    """A model family: its renderer, its template's file, and its tokens.

    `tags` are added tokens that are not marked as special, as in Qwen's and GLM's tokenizers.
    """

    renderer: str
    template: str
    split: str
    special: tuple[str, ...]
    tags: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = ""
    rstrip: bool = False


THINK = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")
RESPONSES = ("<tool_response>", "</tool_response>")
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>"),
)
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
MISTRAL_7 = (*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PHI = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

FAMILIES = {
    "qwen2_5": Family("chatml", "qwen2_5", GPT4, QWEN, CALLS, eos="<|im_end|>"),
    "smollm2": Family("chatml", "smollm2", GPT2, QWEN, bos="<|im_start|>", eos="<|im_end|>"),
    "qwen3": Family("qwen3", "qwen3", GPT4, QWEN, THINK + CALLS + RESPONSES, eos="<|im_end|>"),
    "llama3": Family("llama3", "llama3", GPT4, LLAMA, bos=LLAMA[0], eos="<|eot_id|>"),
    "llama3_1": Family(
        "llama3", "llama3_1", GPT4, (*LLAMA, "<|python_tag|>"), bos=LLAMA[0], eos="<|eot_id|>"
    ),
    "mistral_v3": Family("mistral", "mistral_v3", PIECES, MISTRAL, bos="<s>", eos="</s>"),
    "mistral_v7": Family("mistral", "mistral_v7", GPT4, MISTRAL_7, bos="<s>", eos="</s>"),
    "mistral_v11": Family(
        "mistral", "mistral_v11", GPT4, (*MISTRAL_7, "[ARGS]", "[CALL_ID]"), bos="<s>", eos="</s>"
    ),
    "mistral_v13": Family(
        *("mistral", "mistral_v13", GPT4),
        (*MISTRAL_7, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        bos="<s>",
        eos="</s>",
    ),
    "gemma": Family(
        *("gemma", "gemma", PIECES),
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
    ),
    "glm4": Family(
        *("glm4", "glm4", GPT4),
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
        + ("<|observation|>",),
        (*THINK, *CALLS, *RESPONSES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
    ),
    "deepseek_v3": Family(
        "deepseek", "deepseek_v3", GPT4, DEEPSEEK, bos=DEEPSEEK[0], eos=DEEPSEEK[1]
    ),
    "deepseek_r1": Family(
        "deepseek", "deepseek_r1", GPT4, DEEPSEEK, THINK, bos=DEEPSEEK[0], eos=DEEPSEEK[1]
    ),
    "phi3": Family("phi", "phi3", PIECES, PHI, bos="<s>", eos="<|endoftext|>", rstrip=True),
    "phi4": Family(
        *("phi", "phi4", GPT4),
        ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        eos="<|im_end|>",
    ),
    "phi4_mini": Family(
        *("phi", "phi4_mini", GPT4), (*PHI, "<|tool|>", "<|/tool|>"), eos="<|endoftext|>"
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of about 1,000 tokens that splits text as the family's does."""
    family = FAMILIES[name]
    made = Tokenizer.from_str(_trained(family.split))
    for content in family.special:
        made.add_special_tokens([AddedToken(content, rstrip=family.rstrip, normalized=False)])
    made.add_tokens([AddedToken(tag, normalized=False) for tag in family.tags])
    tokenizer_class: Any = PreTrainedTokenizerFast  # Any: its constructor is not typed
    tokenizer: PreTrainedTokenizerFast = tokenizer_class(
        tokenizer_object=made,
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=(TEMPLATES / f"{family.template}.jinja").read_text("utf-8"),
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


@cache
def _trained(split: str) -> str:
    """A BPE tokenizer trained on a text with code, line ends and signs, as JSON."""
    texts = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = Tokenizer(models.BPE(byte_fallback=split == PIECES, unk_token=None))
    alphabet: list[str] = []
    if split == PIECES:
        # As Gemma's and Mistral's: spaces are ▁, nothing is put in front of a text.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special = [f"<0x{byte:02X}>" for byte in range(256)]
        texts = [line + "\n" for text in texts for line in text.splitlines()]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), []
    trainer = trainers.BpeTrainer(
        vocab_size=1000 + len(special),
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    held = json.loads(tokenizer.to_str())
    held["added_tokens"] = []  # bytes are pieces of the vocabulary, not special tokens
    return json.dumps(held)


SECOND = ToolCall("add", {"a": 2}, "123456789")


def said(content: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", content, calls, reasoning=reasoning)


CHATS: dict[str, list[Message]] = {
    "single": [Message("user", "What is 2 + 2?"), said("It is 4.")],
    "system": [Message("system", "Be brief."), Message("user", "Hi\nthere)"), said("Yo!\n\n- a")],
    "several": [Message("user", "Hi"), said("Yo"), Message("user", "More?"), said("No.")],
    "unicode": [Message("user", "ünï ☃ 日本"), said("数学 🙂")],
    "blanks": [Message("user", "  x \n\n y\t"), said("a  b")],
    "reasoning": [Message("user", "1 + 1?"), said("2", reasoning="Easy.")],
    "call": [
        *(Message("system", "Be brief."), Message("user", "1 + 1?"), said("", CALL)),
        *(Message("tool", "2", tool_call_id=CALL.id), said("It is 2.")),
    ],
    "content and call": [
        *(Message("user", "1 + 1?"), said("I add.", CALL)),
        *(Message("tool", "two)", tool_call_id=CALL.id), said("It is 2.")),
    ],
    "two calls": [
        *(Message("user", "1 + 1?"), said("", CALL, SECOND)),
        Message("tool", "(2)", tool_call_id=CALL.id),
        *(Message("tool", "3", tool_call_id=SECOND.id), said("It is 2.")),
    ],
}
WITH_CALLS = {"call", "content and call", "two calls"}
