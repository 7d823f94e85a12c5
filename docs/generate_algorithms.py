"""Writes docs/algorithms.md and its picture from the plugins that are installed.

    python docs/generate_algorithms.py            # write
    python docs/generate_algorithms.py --check    # exit 1 unless both are current

The prose is algorithm_page/template.md; `{{name}}` in it is a number or a part computed here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent
if str(DOCS) not in sys.path:
    sys.path.insert(0, str(DOCS))

from algorithm_page import numbers, picture, plugins  # noqa: E402 - needs the path above

from posttrain.core.plugin_manager import PluginManager  # noqa: E402

PAGE = DOCS / "algorithms.md"
PICTURE = DOCS / "images" / "aggregation-weights.png"
TEMPLATE = DOCS / "algorithm_page" / "template.md"
MARK = re.compile(r"\{\{(\w+)\}\}")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with every mark replaced; `ValueError` for unknown and for unused names."""
    marks = set(MARK.findall(template))
    if marks != set(parts):
        raise ValueError(
            f"{TEMPLATE.name} and the parts differ: only in the template "
            f"{sorted(marks - set(parts))}, only computed {sorted(set(parts) - marks)}"
        )
    return MARK.sub(lambda match: parts[match[1]], template)


def page(manager: PluginManager) -> str:
    """docs/algorithms.md as it should be."""
    parts = {
        "presets": plugins.presets(manager),
        "reference": plugins.reference(manager),
        "weight_table": numbers.weight_table(manager),
        "kl_table": numbers.kl_table(manager),
        **numbers.facts(manager),
    }
    return filled(TEMPLATE.read_text("utf-8"), parts)


def stale(manager: PluginManager) -> list[str]:
    """Files that are not what the plugins say."""
    current = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    found = [] if current == page(manager) else [PAGE.name]
    if not picture.is_current(PICTURE, numbers.long_shares(manager)):
        found.append(f"{PICTURE.parent.name}/{PICTURE.name}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, or check; returns the exit code."""
    parser = argparse.ArgumentParser(description="docs/algorithms.md from the installed plugins")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is stale")
    check = parser.parse_args(arguments).check
    manager = PluginManager()
    if check:
        old = stale(manager)
        if old:
            print(f"stale: {', '.join(old)}; run python docs/generate_algorithms.py")
        return 1 if old else 0
    PAGE.write_text(page(manager), "utf-8")
    if not picture.is_current(PICTURE, numbers.long_shares(manager)):
        picture.draw(PICTURE, numbers.long_shares(manager))
    return 0


if __name__ == "__main__":
    sys.exit(main())
