"""Writes docs/theory/*.md and their plots, with every number computed: `make docs`.

    python docs/generate_theory.py [FOLDER]

The prose of a page is theory/NAME.template.md; `{{name}}` in it is a number or a table that
theory/NAME.py computes with this project's own functions. Simulations have fixed seeds.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core.analysis.svg import chart_svg

DOCS = Path(__file__).resolve().parent
PAGES = ("importance-weights", "gae-lambda", "ppo-memory", "kl-estimators", "beta", "groups")
MARK = re.compile(r"\{\{(\w+)\}\}")
HEAD = "<!-- Written by docs/generate_theory.py (make docs); edit {}.template.md and {}.py. -->\n"


def module_of(name: str) -> Any:  # Any: a module with VALUES and CHARTS
    """theory/NAME.py, whose functions `values` and `charts` are what the page shows."""
    spec = importlib.util.spec_from_file_location(
        f"theory_{name.replace('-', '_')}", DOCS / "theory" / f"{name.replace('-', '_')}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def filled(template: str, values: Mapping[str, str]) -> str:
    """The page; raises `SystemExit` for a mark without a value, or a value that nothing shows."""
    marks = set(MARK.findall(template))
    if odd := marks ^ values.keys():
        raise SystemExit(f"marks and values differ: {sorted(odd)}")
    return MARK.sub(lambda match: values[match[1]], template)


def write(folder: Path) -> None:
    """All pages and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        module = module_of(name)
        template = (DOCS / "theory" / f"{name}.template.md").read_text("utf-8")
        page = HEAD.format(name, name.replace("-", "_")) + filled(template, module.values())
        for plot, chart in module.charts().items():
            (folder / f"{plot}.svg").write_text(chart_svg(chart, alone=True) + "\n", "utf-8")
        (folder / f"{name}.md").write_text(page, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "theory")
