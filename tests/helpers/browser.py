"""Chromium, driven by Playwright: the pages that a person would look at, under the real clock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser(width: int = 1500, height: int = 1000, *, ours: bool = True) -> Iterator[Page]:
    """An empty page. The test is skipped where there is no Chromium to show it.

    When a script fails the test does, unless the pages are not `ours`.
    """
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    failures: list[str] = []
    with sync_playwright() as driver:
        # Chromium's own sandbox does not start as root, and these pages are ours.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.on("pageerror", lambda error: failures.append(str(error)))
            yield page
        finally:
            browser.close()
    assert not (ours and failures), failures
