"""The kit's tiny model and tokenizer, under the name that tests use."""

from posttrain.core.kit.tiny import (
    BARE_TEMPLATE,
    CHARACTERS,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL,
    START,
    UNKNOWN,
    make_tiny_bpe_tokenizer,
    make_tiny_model,
    make_tiny_tokenizer,
)

__all__ = [
    "BARE_TEMPLATE",
    "CHARACTERS",
    "CHAT_TEMPLATE",
    "END",
    "PAD",
    "SPECIAL",
    "START",
    "UNKNOWN",
    "make_tiny_bpe_tokenizer",
    "make_tiny_model",
    "make_tiny_tokenizer",
]
