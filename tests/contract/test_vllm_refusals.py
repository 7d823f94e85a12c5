"""What vLLM cannot do with a model is said in a sentence, whichever of its parts found out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import make_tiny_tokenizer
from posttrain.core.types import SamplingParams
from posttrain.plugins.engines.vllm import VllmEngine
from tests.helpers.engines import make_engine, make_setup


@pytest.mark.vllm
@pytest.mark.skipif(
    VllmEngine.unavailable_reason() is not None or torch.cuda.is_available(),
    reason="vLLM's build for CPUs, whose attention has heads of some sizes only",
)
@pytest.mark.slow
def test_a_head_size_without_a_kernel_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(tokenizer),
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = make_engine("vllm")
    try:
        with pytest.raises(ResourceError, match="vLLM cannot .*head_dim=16.*engine: transformers"):
            engine.start(make_setup(tmp_path))
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    finally:
        engine.close()
