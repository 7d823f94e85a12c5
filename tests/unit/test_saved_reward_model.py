"""A saved reward model scores the same through transformers, alone, in a batch, padded anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from posttrain.core.data.tokens import response_batch
from posttrain.core.kit.tiny import END, PAD, START, UNKNOWN, make_tiny_tokenizer
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_reward_model, save_reward_model
from posttrain.core.training.reward_model import score_batch_rows

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
TEXTS = [
    f"1{END}",
    f"what is 3 + 4? It is 7{END}",
    f"no{END}{END}",
    "cut of",
    "x",
    "not known: \u20ac",
]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
}


def tokenizer_with(pad: str | None) -> PreTrainedTokenizerFast:
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = pad
    return tokenizer


def base(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast, rows: int) -> Path:
    """A random language model with `rows` embeddings, which has not heard of padding."""
    config = AutoConfig.for_model(
        family,
        **FAMILIES[family],
        vocab_size=rows,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CASES = {  # what the tokenizer pads with, ends of generation, the padding that is saved
    "end": (END, (), PAD),  # as SmolLM2 has it; the vocabulary has a token for padding
    "none": (None, (), PAD),
    "own": (PAD, (), PAD),
    "start": (START, (), START),  # no text ends with it
    "also an end": (START, (START,), PAD),
    "unknown": (UNKNOWN, (), PAD),  # as Llama 2 is often padded; any text may end with it
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_scores_that_training_gave(
    family: str, case: str, tmp_path: Path
) -> None:
    pad, more_ends, wanted = CASES[case]
    tokenizer = tokenizer_with(pad)
    ends = {tokenizer.convert_tokens_to_ids(end) for end in more_ends}
    check(tmp_path, family, tokenizer, ends, wanted, rows=len(tokenizer))


@pytest.mark.parametrize("spare", [0, 5], ids=["no spare rows", "spare rows"])
def test_a_vocabulary_without_a_token_for_padding_is_given_one(tmp_path: Path, spare: int) -> None:
    tokenizer = tokenizer_with(END)
    state = tokenizer.backend_tokenizer.to_str().replace(PAD, "<|other|>")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(state),
        eos_token=END,
        pad_token=END,
    )
    size = len(tokenizer)
    model = check(tmp_path, "llama", tokenizer, set(), "<|pad|>", rows=size + spare)
    assert model.config.vocab_size == max(size + 1, size + spare)
    if not spare:
        assert not model.get_input_embeddings().weight[size].any(), "the same in every run"


def check(
    folder: Path,
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    ends: set[int],
    wanted: str,
    rows: int,
) -> Any:
    source = base(folder / "base", family, tokenizer, rows)
    model = load_reward_model(source, RUNTIME, new_head=True)
    torch.nn.init.normal_(
        model.get_submodule("score").weight, generator=torch.Generator().manual_seed(1)
    )
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    made = response_batch(
        prompts=[row[:0] or [row[0]] for row in ids],
        responses=[row[1:] for row in ids],
        group_ids=range(len(ids)),
        pad_token_id=0,
        problems=(),
    )
    with torch.no_grad():
        ours = score_batch_rows(model, made)
    assert len({round(float(score), 4) for score in ours}) == len(TEXTS), "all are different"
    save_reward_model(model, tokenizer, folder / "rm", ends)
    assert (tokenizer.pad_token, tokenizer.padding_side) != (wanted, None), "the given one stays"

    read = AutoModelForSequenceClassification.from_pretrained(folder / "rm", dtype=torch.float32)
    given = AutoTokenizer.from_pretrained(folder / "rm")
    assert given.pad_token == wanted and given.pad_token_id == read.config.pad_token_id
    for side in ("right", "left") if family != "gpt2" else ("right",):  # it counts positions
        batch = given.pad({"input_ids": ids}, return_tensors="pt", padding_side=side)
        with torch.no_grad():
            theirs = read(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits[:, 0]
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    for row, score in zip(ids, ours, strict=True):
        with torch.no_grad():
            alone = read(input_ids=torch.tensor([row])).logits[0, 0]
        assert float(alone) == pytest.approx(float(score), abs=1e-4)
    again = load_reward_model(folder / "rm", RUNTIME, new_head=False)
    with torch.no_grad():
        torch.testing.assert_close(score_batch_rows(again, made), ours, rtol=0, atol=1e-5)
    return read
