"""Builds the documentation site: `make docs`. Dead links and dead anchors are errors.

    python docs/build_site.py [--pages-only]

Pages are collected in build/site-source: those of docs/, the generated ones, and pages of other
folders that these link to. Links to files that are not part of the site become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
# Files by their place in the site; all of docs/ keep their own.
ELSEWHERE = {
    "README.md": "index.md",
    "README.zh.md": "README.zh.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "docs/README.md": "pages.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")
KEPT = (".md", ".png", ".html", ".yaml", ".css", ".svg")


def places() -> dict[Path, Path]:
    """Every file of the site: where it is, and its place in the site."""
    found = {ROOT / name: Path(place) for name, place in ELSEWHERE.items()}
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in KEPT and ".template" not in path.name and path.name != "mkdocs.yml":
            found.setdefault(path, path.relative_to(DOCS))
    for path in sorted((ROOT / "configs").rglob("*")):
        if path.suffix in KEPT:
            found[path] = path.relative_to(ROOT)
    return {path: place for path, place in found.items() if path.is_file()}


def relinked(text: str, page: Path, known: dict[Path, Path]) -> str:
    """The page with links that fit its place in the site."""

    def link(match: re.Match[str]) -> str:
        image, label, name, anchor = match[1], match[2], match[3], match[4] or ""
        target = (page.parent / name).resolve()
        if target.is_dir() and target / "README.md" in known:
            target /= "README.md"
        place = known.get(target)
        if place is not None:
            up = "../" * (len(known[page].parts) - 1)
            return f"{image}[{label}]({up}{place.as_posix()}{anchor})"
        if target.exists():
            return label
        return match[0]  # dead: the build says so

    return LINK.sub(link, text)


def collect() -> None:
    """Fill build/site-source from nothing."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    known = places()
    for path, place in known.items():
        out = SOURCE / place
        out.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            out.write_text(relinked(path.read_text("utf-8"), path, known), "utf-8")
        else:
            shutil.copyfile(path, out)


def main(arguments: list[str]) -> int:
    collect()
    sys.path.insert(0, str(DOCS))
    import generate_reference

    generate_reference.write(SOURCE / "reference")
    if "--pages-only" in arguments:
        return 0
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*command, "-f", str(DOCS / "mkdocs.yml")], env=quiet)
    if done.returncode == 0:
        print(f"built {SITE / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
