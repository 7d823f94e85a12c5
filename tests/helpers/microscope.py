"""Hand-built and synthetic evidence, a page's own numbers, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from posttrain.core.evidence.step import StepEvidence
from posttrain.core.microscope.packing import unpack
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem
from tests.helpers.batches import build_batch

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


FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1500,1100")


def in_browser(path: Path, fragment: str = "", script: str = "") -> str:
    """The document after its scripts ran in Chromium, with `script` of the test after them.

    Time in the page is skipped while it waits. The test is skipped where there is no Chromium.
    """
    place = _scripted(path, script).as_uri() + (f"#{fragment}" if fragment else "")
    done = subprocess.run(
        [_chromium(), *FLAGS, "--virtual-time-budget=20000", "--dump-dom", place],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def real_time(path: Path, script: str, told: Sequence[object], limit_s: float = 60.0) -> None:
    """The page in Chromium under the real clock, until its `script` has told something."""
    program, deadline = _chromium(), time.monotonic() + limit_s
    command = [program, *FLAGS, "--remote-debugging-port=0", _scripted(path, script).as_uri()]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as browser:
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
        browser.terminate()
    assert told, f"the page told nothing within {limit_s:.0f} s"


def _scripted(path: Path, script: str) -> Path:
    if not script:
        return path
    found = path.with_name(f"scripted-{path.name}")
    text = path.read_text("utf-8").replace("</body>", f"<script>{script}</script></body>")
    found.write_text(text, "utf-8")
    return found


def _chromium() -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no Chromium to show the page in")
    return program
