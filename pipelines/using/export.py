"""Export a model: a Hugging Face folder, its adapter or GGUF files, with a card; and to a hub."""

from __future__ import annotations

import errno
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.gguf_export import GgufType, write_gguf
from posttrain.core.models.quiet import quiet_libraries
from posttrain.core.models.source import MODEL_PATTERNS, NOT_THE_MODEL
from posttrain.core.redaction import redacted
from posttrain.core.runtime.files import put_in_place
from posttrain.core.store.ancestry import Family
from posttrain.core.store.artifacts import check_free_disk
from posttrain.core.store.attestation import Attestation, attest, kept_at, read_attestation
from posttrain.core.store.manifests import ADAPTER, ATTESTATION, file_digest
from posttrain.pipelines.run.model_reference import FoundModel
from posttrain.pipelines.using.model_card import CardFacts, Form, model_card
from posttrain.pipelines.using.speaker import architectures, chat_section, check_talks

CARD = "README.md"
REPOSITORY = re.compile(r"(?=.{3,96}$)[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVE_GB = 0.5


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is written: weights as they are, without `gguf` or `adapter`; `name` is its title."""

    out: Path
    name: str
    adapter: bool = False
    gguf: tuple[GgufType, ...] = ()
    licence: str | None = None

    @property
    def form(self) -> Form:
        """What the folder holds."""
        return "adapter" if self.adapter else "gguf" if self.gguf else "model"

    def gguf_name(self, type: GgufType) -> str:
        """File name of the model in this type."""
        return f"{slug(self.name)}-{type}.gguf"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of the export; the digest is sha256."""

    name: str
    size: int
    digest: str


def gguf_types(wanted: Sequence[str]) -> tuple[GgufType, ...]:
    """The types by their names, each once; raises `ConfigError` for another name."""
    known: dict[str, GgufType] = {"f16": "f16", "q8_0": "q8_0"}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--gguf {name}: expected f16 or q8_0; llama-quantize makes others")
    return tuple(known[name] for name in dict.fromkeys(wanted))


def slug(name: str) -> str:
    """The name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def sources(found: FoundModel, options: ExportOptions) -> list[Path]:
    """The files that are copied, none for GGUF; raises `ConfigError` where there is no adapter."""
    folder = found.path
    if options.adapter:
        folder = found.path / ADAPTER
        if not folder.is_dir():
            raise ConfigError(
                f"'{found.given}' has no adapter: its stage trained all weights (set `lora` of a "
                "stage to train one); leave out --adapter"
            )
        return sorted(path for path in folder.iterdir() if path.is_file())
    if options.gguf:
        return []
    paths = {path for pattern in MODEL_PATTERNS for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.name not in NOT_THE_MODEL)


def check(found: FoundModel, options: ExportOptions) -> None:
    """Raise before anything is written what can be known: a folder in the way, no room.

    Files that no stage's record knows are loaded, so that a damaged model is not copied.
    """
    if options.adapter and options.gguf:
        raise ConfigError("--adapter and --gguf are two kinds of exports; make one at a time")
    if options.gguf:
        check_talks(found)
    out = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose another folder, or remove it")
    needed = sum(path.stat().st_size for path in sources(found, options))
    if options.gguf:
        weights = sum(path.stat().st_size for path in found.path.glob("*.safetensors"))
        needed = weights * len(options.gguf)
    parent = next(folder for folder in out.parents if folder.is_dir())
    check_free_disk(parent, float(needed), RESERVE_GB, "the export")
    if not found.stage:
        _check_loads(found)


def _check_loads(found: FoundModel) -> None:
    """Raise `ResourceError` for files of which no model or tokenizer can be made."""
    from posttrain.core.data.tokens import load_tokenizer
    from posttrain.core.models.loading import load_policy, load_process_reward_model

    quiet_libraries()
    load_tokenizer(found.path)
    runtime = ModelRuntime.from_config(chat_section(found))
    scores = any(name.endswith("Classification") for name in architectures(found))
    (load_process_reward_model if scores else load_policy)(found.path, runtime)


def attestation_of(found: FoundModel, home: Path, store: Path) -> Attestation | None:
    """What is recorded of the model's past, with its newest verification if it was of this past.

    None of a model that no stage of the store made.
    """
    family = Family(store)
    if not family.knows(found.digest):
        return None
    made, kept = attest(family, found.digest), kept_at(home, found.digest)
    if not kept.is_file():
        return made
    verified = read_attestation(kept)
    same = verified.stages == made.stages and verified.outside == made.outside
    return made.model_copy(update={"verification": verified.verification}) if same else made


def attested(folder: Path, statement: Attestation | None) -> str:
    """What the attestation in an exported folder holds, in a line."""
    if statement is None:
        return f"no {ATTESTATION}: no stage of this store made the model"
    line = f"{ATTESTATION}: sha256 {file_digest(folder / ATTESTATION)}"
    if statement.verification is None:
        return f"{line}; not verified yet (`posttrain verify`, then export again)"
    verified = statement.verification
    return f"{line}; with the verification of {verified.when}: {verified.counts()}"


def export(
    found: FoundModel,
    facts: CardFacts,
    options: ExportOptions,
    say: Callable[[str], None] = lambda text: None,
    attestation: Attestation | None = None,
) -> list[ExportedFile]:
    """Write the folder, which has its name once it is complete; returns what is in it.

    Raises `ResourceError` for a model that GGUF cannot hold, `ConfigError` where others put files
    there meanwhile.
    """
    out = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".partial-{out.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        licence = options.licence or facts.base_licence
        for type in options.gguf:
            say(f"writing {options.gguf_name(type)}")
            write_gguf(found.path, partial / options.gguf_name(type), type, options.name, licence)
        for path in sources(found, options):
            shutil.copyfile(path, partial / path.name)
        card = model_card(facts, options.name, options.form, options.licence)
        (partial / CARD).write_text(card, encoding="utf-8")
        if attestation is not None:
            attestation.with_files(partial).write(partial / ATTESTATION)
        try:
            put_in_place(partial, out, replace=False)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ConfigError(
                f"{out} got files while the export was made, which are kept: nothing is written; "
                "choose another folder"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(path for path in out.iterdir() if path.is_file())
    return [ExportedFile(p.name, p.stat().st_size, file_digest(p)) for p in files]


# --- to a hub ------------------------------------------------------------------------------------


def check_hub(repo: str, *, needs_token: bool) -> None:
    """Raise `ConfigError` for a name no hub takes, `ResourceError` without a token."""
    from huggingface_hub import get_token

    if REPOSITORY.fullmatch(repo) is None:
        raise ConfigError(
            f"--hub '{repo}': expected OWNER/NAME of letters, digits, '-', '_' and '.', at most 96 "
            "characters"
        )
    if needs_token and get_token() is None:
        raise ResourceError(
            "--hub needs a token that may write: set HF_TOKEN, or log in with `hf auth login`"
        )


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Put the folder's files on the hub as one commit; returns the page's address.

    Raises `ConfigError` for a public repository that `private` does not expect, `ResourceError`
    where the hub refuses or cannot be reached; the folder stays.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise ConfigError(
                f"{repo} is a public repository, so nothing is uploaded: --public uploads to it, "
                f"or choose another --hub; {folder} is complete"
            )
        made = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload by posttrain export"
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        first = redacted((str(error).splitlines() or [type(error).__name__])[0])
        raise ResourceError(
            f"the hub took nothing ({first}): {folder} is complete; `hf upload {repo} {folder}` "
            "tries again"
        ) from error
    return str(made.repo_url if hasattr(made, "repo_url") else f"{api.endpoint}/{repo}")


def names(files: Sequence[ExportedFile]) -> str:
    """The files in words."""
    return ", ".join(f"{file.name} ({file.size / 1e6:,.1f} MB)" for file in files)
