"""Links between Markdown pages lead somewhere, and docs/README.md lists every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FOLDERS = (".", "docs", "docs/decisions", "docs/tutorials", "docs/explanations", "configs/recipes")
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in (REPO / folder).glob("*.md")
    if ".template" not in page.name
)
GENERATED = (
    "docs/algorithms.md",
    "docs/peers.md",
    "docs/microscope",
    "docs/plugins/",
    "docs/theory/",
)  # by scripts of docs/; may not be there yet
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page as GitHub makes them, and explicit ones."""
    text = page.read_text("utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    made = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(page.read_text("utf-8")):
        target = (page.parent / name).resolve() if name else page
        if not target.exists() and str(target.relative_to(REPO)).startswith(GENERATED):
            continue
        assert target.exists(), f"{page.name} links to {name}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {name}#{anchor}"


def test_the_index_lists_every_page() -> None:
    index = (REPO / "docs" / "README.md").read_text("utf-8")
    listed = {name for name, _ in LINK.findall(index)}
    pages = {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"}
    decisions = {f"decisions/{path.name}" for path in (REPO / "docs" / "decisions").glob("*.md")}
    assert pages | decisions <= listed
