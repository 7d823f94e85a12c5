"""Writes docs/microscope/*.html: four small steps under the losses that people mix up.

    python docs/generate_microscope.py            # write
    python docs/generate_microscope.py --check    # exit 1 unless all are current

The steps are microscope_page/examples.py; the pages are those that `posttrain inspect` makes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

DOCS = Path(__file__).resolve().parent
if str(DOCS) not in sys.path:
    sys.path.insert(0, str(DOCS))

from microscope_page.examples import EXAMPLES, Example  # noqa: E402 - needs the path above

from posttrain.core.analysis.microscope import (  # noqa: E402
    Report,
    Variant,
    make_report,
    page,  # noqa: E402
    unpack,  # noqa: E402
)
from posttrain.core.analysis.what_if import objective_under, parse  # noqa: E402
from posttrain.core.contracts import Aggregator, PolicyLoss  # noqa: E402
from posttrain.core.plugin_manager import PluginManager  # noqa: E402
from posttrain.core.training.objective import LossTerm, Objective  # noqa: E402
from posttrain.core.training.updates import UpdateSettings  # noqa: E402

FOLDER = DOCS / "microscope"
ONE_UPDATE = UpdateSettings(
    epochs=1, num_mini_batches=1, micro_batch_size=64, temperature=1.0, seed=0
)
_DATA = re.compile(r'<script type="[^"]*" id="([^"]*)">(.*?)</script>', re.S)
_KINDS: dict[str, DTypeLike] = {"tokens": np.uint32, "clip": np.uint8}


def report_of(example: Example, manager: PluginManager) -> Report:
    """The example's step under its own loss and the others."""
    asked = parse(example.own)
    assert asked.aggregator is not None, "an example names its aggregator"
    aggregator = manager.build(Aggregator, asked.aggregator, asked.aggregator_fields)
    loss = manager.build(PolicyLoss, asked.loss, asked.loss_fields)
    own = Objective((LossTerm(loss, aggregator),), aggregator)
    longest = max(len(answer.words) for answer in example.answers)
    others = [
        Variant(text, objective_under(parse(text), own, manager, longest))
        for text in example.others
    ]
    step = example.evidence()
    return make_report(step, own, ONE_UPDATE, others, title=example.title, notes=example.says)


def path_of(example: Example) -> Path:
    """Where its page is."""
    return FOLDER / f"{example.slug}.html"


def stale(manager: PluginManager) -> list[str]:
    """Pages that are not what the plugins and the page's own code say.

    Numbers may differ in their last digits, and zlib may pack them otherwise: machines do.
    """
    found = []
    for example in EXAMPLES:
        path = path_of(example)
        current = path.read_text("utf-8") if path.is_file() else ""
        if not same_page(current, page(report_of(example, manager))):
            found.append(path.name)
    return found


def same_page(first: str, second: str) -> bool:
    """Whether two pages show the same."""
    if _DATA.sub(r"\1", first) != _DATA.sub(r"\1", second):
        return False
    wanted = dict(_DATA.findall(second))
    return all(_same(_value(k, v), _value(k, wanted[k])) for k, v in _DATA.findall(first))


def _value(name: str, text: str) -> object:
    """What a part of a page holds: JSON, or numbers."""
    if name == "meta":
        return json.loads(text)
    kind = _KINDS.get(name.removeprefix("column-").split("-")[0], np.float32)
    return unpack(text, kind).tolist()


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    return a == b


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, or check; returns the exit code."""
    parser = argparse.ArgumentParser(description="docs/microscope from the installed plugins")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one is stale")
    check, manager = parser.parse_args(arguments).check, PluginManager()
    old = stale(manager)
    if check:
        if old:
            print(f"stale: {', '.join(old)}; run python docs/generate_microscope.py")
        return 1 if old else 0
    FOLDER.mkdir(exist_ok=True)
    for example in EXAMPLES:
        if path_of(example).name in old:
            path_of(example).write_text(page(report_of(example, manager)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
