"""GGUF files of our own: read back by transformers, and by llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from posttrain.core.config.sections import ModelSection
from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import make_tiny_bpe_tokenizer, make_tiny_model
from posttrain.core.models.gguf_export import write_gguf
from posttrain.core.models.source import obtain
from tests.helpers.gguf import PROMPTS, behind_the_likeliest, by_llama_cpp, tokens_of_llama_cpp

TEXT = "what is the sum of 12 and 30? it's 42, <|im_end|> naïve 東京"


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_back_what_was_written(tmp_path: Path, tied: bool) -> None:
    tokenizer = make_tiny_bpe_tokenizer()
    folder = make_tiny_model(
        tmp_path / "model", tokenizer=tokenizer, heads=4, kv_heads=2, init_std=0.2, tied=tied
    )
    write_gguf(folder, tmp_path / "tiny-f16.gguf", "f16", "tiny", "apache-2.0")
    write_gguf(folder, tmp_path / "tiny-q8_0.gguf", "q8_0", "tiny", "")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    wanted = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    for kind, close in (("f16", 0.005), ("q8_0", 0.15)):
        file = {"pretrained_model_name_or_path": tmp_path, "gguf_file": f"tiny-{kind}.gguf"}
        read = AutoTokenizer.from_pretrained(**file)
        assert read(TEXT).input_ids == ids[0].tolist()
        assert read.eos_token == "<|im_end|>"
        assert read.chat_template == tokenizer.chat_template
        got = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32)(ids).logits
        assert (got - wanted).abs().mean() < close, kind  # logits are of -5 to 5


def test_a_qwen2_keeps_its_biases(tmp_path: Path) -> None:
    tokenizer = make_tiny_bpe_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "q.gguf", "f16", "q", "")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="q.gguf", dtype=torch.float32)
    assert (read(ids).logits - model(ids).logits).abs().max() < 0.02


def test_what_llama_cpp_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    by_characters = make_tiny_model(tmp_path / "characters")
    with pytest.raises(ResourceError, match="this tokenizer .WordLevel.*convert_hf_to_gguf.py"):
        write_gguf(by_characters, tmp_path / "no.gguf", "f16", "no", "")
    folder = make_tiny_model(tmp_path / "model", tokenizer=make_tiny_bpe_tokenizer())
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ResourceError, match="rotary embeddings of type 'yarn'"):
        write_gguf(folder, tmp_path / "no.gguf", "f16", "no", "")
    assert not (tmp_path / "no.gguf").exists()


@pytest.mark.slow
def test_llama_cpp_answers_as_the_original_does(tmp_path: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed (it is compiled from source: pip install)")
    folder = obtain(ModelSection(), tmp_path / "models").path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in PROMPTS
    ]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    file = tmp_path / "smollm2-f16.gguf"
    write_gguf(folder, file, "f16", "smollm2", "apache-2.0")
    assert tokens_of_llama_cpp(file, texts) == prompts
    answers = by_llama_cpp(file, prompts, count=24)
    ends = [
        answer if len(answer) == 24 else [*answer, tokenizer.eos_token_id] for answer in answers
    ]
    behind = behind_the_likeliest(folder, prompts, ends)
    assert behind == [0.0] * len(PROMPTS)
