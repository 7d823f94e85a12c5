"""Whether two models read and write the same tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from posttrain.core.data.tokens import load_tokenizer
from posttrain.core.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` tokens, and a `digest` of which token has which id."""

    size: int
    digest: str


@lru_cache(maxsize=16)
def vocabulary_of(folder: Path) -> Vocabulary:
    """The vocabulary of the tokenizer in a model's folder. Raises `ResourceError` without one."""
    tokens = sorted(load_tokenizer(folder).get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return Vocabulary(len(tokens), digest)


def check_vocabulary(policy: Path, teacher: Path, who: str) -> None:
    """Raise `ResourceError` unless both folders hold models of one vocabulary.

    Compared are the size and a digest of the tokenizers, and the number of logits.
    """
    own, other = vocabulary_of(policy.resolve()), vocabulary_of(teacher.resolve())
    if own == other and logits_of(policy) == logits_of(teacher):
        return
    if own.size != other.size:
        what = f"its tokenizer has {other.size} tokens and the policy's {own.size}"
    elif own.digest != other.digest:
        what = f"its tokenizer gives other ids to its {own.size} tokens than the policy's"
    else:
        what = f"it gives {logits_of(teacher)} logits and the policy {logits_of(policy)}"
    raise ResourceError(
        f"{who} ({teacher}): {what}, so its probabilities are of other tokens; use a teacher of "
        f"the policy's family ({policy}), or `distillation: uld`, which compares stretches of text"
    )


def logits_of(folder: Path) -> int | None:
    """How many logits the model in `folder` gives, as its config says."""
    return _number(folder, "vocab_size")


def positions_of(folder: Path) -> int | None:
    """How many tokens the model in `folder` was made for, as its config says."""
    return _number(folder, "max_position_embeddings")


def _number(folder: Path, name: str) -> int | None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    found = config.get(name, config.get("text_config", {}).get(name))
    return None if found is None else int(found)
