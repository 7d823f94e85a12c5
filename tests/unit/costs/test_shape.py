"""Parameters counted from a configuration, against those of models that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.core.config.sections import LoraSection, ModelSection
from posttrain.core.costs.shape import find_model, shape_of, stand_in, truncated
from posttrain.core.models.lora import add_adapter
from tests.helpers.tiny import make_tiny_model


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=tied, layers=3)
    known = find_model(ModelSection(source=str(folder)), tmp_path)
    assert known is not None and known.how == "counted"
    model = AutoModelForCausalLM.from_pretrained(folder)
    embedding = model.get_input_embeddings().weight.numel()
    assert known.shape.total == sum(p.numel() for p in model.parameters())
    assert known.shape.embedding == embedding and known.shape.layers == 3
    assert known.shape.head == (0 if tied else embedding)
    assert known.shape.in_layers == sum(
        p.numel() for n, p in model.named_parameters() if "layers." in n or n == "model.norm.weight"
    )
    lora = LoraSection(rank=4)
    add_adapter(model, lora, seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert known.shape.adapter(lora) == trained


def test_the_tokenizer_s_files_are_weighed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    known = find_model(ModelSection(source=str(folder)), tmp_path)
    assert known is not None
    files = {p.name: p.stat().st_size for p in folder.iterdir() if p.suffix != ".safetensors"}
    assert known.tokenizer_bytes == sum(files.values())


@pytest.mark.parametrize("parameters", [135e6, 1.5e9, 7e9, 70e9])
def test_a_name_stands_for_a_llama_of_its_size(tmp_path: Path, parameters: float) -> None:
    assert shape_of(stand_in(parameters)).total == pytest.approx(parameters, rel=0.3)


def test_a_model_that_is_not_here_is_known_by_its_name_or_not_at_all(tmp_path: Path) -> None:
    named = find_model(ModelSection(source="Someone/Model-1.5B-Chat"), tmp_path)
    assert named is not None and "its name" in named.how and named.folder is None
    assert find_model(ModelSection(source="Someone/model"), tmp_path) is None


def test_a_truncated_configuration_leaves_the_whole_one_alone(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_tiny_model(tmp_path / "model", layers=4))
    short = truncated(config, 1)
    assert (short.num_hidden_layers, config.num_hidden_layers) == (1, 4)
    one, two = (shape_of(truncated(config, n)).in_layers for n in (1, 2))
    assert two - one == (shape_of(config).in_layers - one) // 3
