"""A tiny random language model with a character tokenizer, made on the spot, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIAL = (PAD, START, END, UNKNOWN)
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))

# ChatML, as SmolLM2 has it: a default system message when the chat has none.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# The shortest chat there is: the last message, and a mark that the answer begins.
BARE_TEMPLATE = (
    "{{ messages[-1]['content'] }}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def make_tiny_tokenizer(
    characters: str = CHARACTERS, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """One token a character (printable ASCII and newline), ChatML, `<|im_end|>` ends a turn."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer, chat_template, unk_token=UNKNOWN, model_max_length=512)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    init_std: float = 0.1,
    tied: bool = True,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Save a random Llama (about 80,000 parameters) and its tokenizer; return `folder`.

    The same `seed` gives the same weights; torch's global generator is left alone. A larger
    `init_std` makes a more decided model: 0.02 is nearly uniform, 0.3 strongly prefers some tokens.
    """
    tokenizer = tokenizer or make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=512,
        initializer_range=init_std,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class: Any = LlamaForCausalLM  # Any: its constructor is not typed
        model = model_class(config).to(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_bpe_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 and some tokens that splits text as SmolLM2's, with ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["the sum of two numbers is a number", "what is the sum? it's the answer 'forty-two'"]
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer, chat_template, unk_token=UNKNOWN, model_max_length=512)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text survives, with the control tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return _fast(tokenizer)


def _fast(
    tokenizer: Tokenizer, chat_template: str = CHAT_TEMPLATE, **fields: str | int
) -> PreTrainedTokenizerFast:
    """As transformers has it, with ChatML's tokens."""
    tokenizer_class: Any = PreTrainedTokenizerFast  # Any: its constructor is not typed
    made: PreTrainedTokenizerFast = tokenizer_class(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **fields,
    )
    return made
