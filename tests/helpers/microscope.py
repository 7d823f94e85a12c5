"""Hand-built and synthetic evidence, a page's own numbers, and the page in a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.kit.batches import build_batch
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem

if TYPE_CHECKING:
    from playwright.sync_api import Page

WHOLE = UpdateSettings(epochs=1, num_mini_batches=1, micro_batch_size=64, temperature=1.0, seed=0)
"""One update on the whole batch."""


def synthetic_evidence(num_rows: int, width: int, group_size: int = 8) -> StepEvidence:
    """A step of ragged responses with every column, ratios of both sides, and texts of words."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 2, width + 1, (num_rows,), generator=draw)
    lengths[0] = width
    mask = (torch.arange(width)[None, :] < lengths[:, None]).double()

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(num_rows, width, generator=draw)

    old = -noise(1.0).abs()
    right = torch.rand(num_rows, generator=draw) > 0.5
    advantages = torch.where(right, 1.0, -0.5)[:, None] * mask.float()
    batch = build_batch(
        mask,
        group_id=[row // group_size for row in range(num_rows)],
        old_logprobs=old,
        ref_logprobs=old + noise(0.1),
        rollout_logprobs=old + noise(0.02),
        advantages=advantages,
        rewards=right.float(),
        acc=right.float(),
        reward_components=right.float()[:, None],
    )
    ids = torch.randint(0, 900, (num_rows, width), generator=draw)
    problems = tuple(
        Problem(f"k{row // group_size}", f"Question {row // group_size}?", "a", "w")
        for row in range(num_rows)
    )
    batch = replace(batch, response_ids=ids, problems=problems)
    return StepEvidence(
        step=1,
        batch=batch,
        seen_logprobs=old + noise(0.15),
        seen_entropy=noise(1.0).abs(),
        seen_by=torch.zeros(num_rows, dtype=torch.int64),
        kl_coef=0.0,
        component_names=("accuracy",),
        token_texts={i: f" w{i}" if i % 40 else "\n" for i in range(900)},
    )


def meta_of(page: str) -> dict[str, Any]:
    """The JSON in a page."""
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', page, re.S)
    assert found is not None
    meta: dict[str, Any] = json.loads(found[1])
    return meta


def unpack(text: str, kind: DTypeLike) -> NDArray[Any]:
    """What `pack` was given, of that kind."""
    data = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    size = np.dtype(kind).itemsize
    return np.frombuffer(data.reshape(size, -1).T.tobytes(), dtype=kind)


def column_of(page: str, name: str) -> NDArray[Any]:
    """One of the columns in a page: tokens, clip-N, or numbers."""
    found = re.search(rf'<script type="text/plain" id="column-{name}">(.*?)</script>', page)
    assert found is not None
    known: dict[str, Any] = {"tokens": np.uint32, "clip": np.uint8}
    return unpack(found[1], known.get(name.split("-")[0], np.float32))


def weights_of(page: str, variant: str) -> list[list[float]]:
    """The weights of each response's tokens in a page, under the variant of that name."""
    meta = meta_of(page)
    place = [v["name"] for v in meta["variants"]].index(variant)
    flat, offsets = column_of(page, f"weight-{place}").tolist(), meta["offsets"]
    return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]


def shown(path: Path, page: Page, fragment: str = "") -> None:
    """Let `page` show the file and what `fragment` asks for, until all in view is drawn.

    Nothing but the file may be asked for.
    """
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("about:blank")
    page.goto(path.as_uri() + (f"#{fragment}" if fragment else ""))
    page.wait_for_selector("html[data-drawn-ms]", state="attached")
    assert [url for url in asked if not url.startswith((path.as_uri(), "about:"))] == []
