"""The tiny random models of `core/models/tiny.py`, for the tests of plugins."""

from posttrain.core.models.tiny import (
    BARE_TEMPLATE,
    CHARACTERS,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL,
    START,
    UNKNOWN,
    make_byte_tokenizer,
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
    "make_byte_tokenizer",
    "make_tiny_bpe_tokenizer",
    "make_tiny_model",
    "make_tiny_tokenizer",
]
