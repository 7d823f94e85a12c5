"""The page shows the step's tokens and numbers, answers at once, and lets no text become markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.microscope import LARGE, Weigh, look, notes_of, pack
from posttrain.core.analysis.token_weights import token_weights
from posttrain.core.analysis.what_if import objective_under, usual
from posttrain.core.types import Problem
from tests.helpers.browser import open_browser
from tests.helpers.losses import MANAGER, build_loss, objective_of
from tests.helpers.microscope import (
    WHOLE,
    column_of,
    meta_of,
    shown,
    synthetic_evidence,
    unpack,
    weights_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

OWN = objective_of(build_loss("ppo_clip"), "seq-mean-token-mean")


def page_of(evidence: StepEvidence) -> str:
    width = evidence.batch.mask.shape[1]
    others: dict[str, Weigh] = {}
    for what in usual(OWN, MANAGER):
        objective = objective_under(what, OWN, MANAGER, width)
        others[what.text] = partial(token_weights, objective=objective, settings=WHOLE)
    own, notes = token_weights(evidence, OWN, WHOLE), notes_of(evidence, OWN, WHOLE)
    return look(evidence, own, usual=others, title="step 1 & <others>", notes=notes).page()


@pytest.mark.parametrize("bits", [23, 13])
def test_a_column_comes_back_as_it_was(bits: int) -> None:
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    values[:4] = [np.nan, np.inf, -np.inf, 0.0]
    found = unpack(pack(values, bits), np.float32)
    np.testing.assert_allclose(found, values, rtol=2.0 ** -(bits + 1) if bits < 23 else 0)
    ids = np.arange(70000, dtype=np.uint32)
    assert (unpack(pack(ids), np.uint32) == ids).all()


def test_the_page_holds_the_weights_of_every_variant() -> None:
    evidence = synthetic_evidence(8, 20, group_size=4)
    text = page_of(evidence)
    wanted = token_weights(evidence, objective_of(OWN.terms[0].loss, "token-mean"), WHOLE).total
    flat = np.concatenate([np.array(row) for row in weights_of(text, "own@token-mean")])
    shown = evidence.batch.response_mask.bool()
    np.testing.assert_allclose(flat, wanted[shown].float().numpy(), rtol=1e-6)
    meta = meta_of(text)
    assert [row["group"] for row in meta["rows"]] == [0] * 4 + [1] * 4
    assert meta["rows"][4]["prompt"] == "Question 1?"
    place = [v["name"] for v in meta["variants"]].index("own@token-mean")
    sizes = wanted.abs().sum(dim=1).tolist()
    assert meta["variants"][place]["size"] == pytest.approx(sizes)
    assert "http" not in re.sub(r"<script type=.*?</script>", "", text, flags=re.S)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_browser() as page:
        yield page


def test_tokens_colours_and_totals_are_there_and_follow_the_address(
    tmp_path: Path, browser: Page
) -> None:
    evidence, path = synthetic_evidence(8, 20, group_size=4), tmp_path / "page.html"
    path.write_text(page_of(evidence), "utf-8")
    colours = "(spans) => spans.map((span) => span.style.backgroundColor)"
    shown(path, browser)
    ids = evidence.batch.response_ids[evidence.batch.response_mask.bool()].tolist()
    known = evidence.token_texts or {}
    tokens = browser.locator(".tokens span")
    assert tokens.all_text_contents() == [known[i].replace("\n", "⏎\n") for i in ids]
    assert browser.locator("h2").count() == 2 and "Question 1?" in browser.content()
    assert "→" not in browser.locator("#totals").inner_text()
    first = tokens.evaluate_all(colours)
    assert any(colour.startswith("rgb(") for colour in first)
    shown(path, browser, "colour=weight&what=own%40token-mean")
    assert "→  own@token-mean: sum |weight|" in browser.locator("#totals").text_content()
    other = tokens.evaluate_all(colours)
    assert len(other) == len(first) and other != first
    shown(path, browser, "colour=entropy&show=wrong&sort=weight")
    assert browser.locator("h2").count() == 0 and browser.locator(".row.right").count() == 0
    assert 0 < browser.locator(".row.wrong").count() < 8
    shown(path, browser, "colour=pink")
    assert "colour has no 'pink'" in browser.content()


def test_a_choice_changes_the_page_and_its_address(tmp_path: Path, browser: Page) -> None:
    path = tmp_path / "page.html"
    text = page_of(synthetic_evidence(8, 20, group_size=4))
    path.write_text(text, "utf-8")
    shown(path, browser)
    browser.locator("#what").select_option(label="cispo")
    browser.wait_for_function("location.hash.includes('what=cispo')")
    browser.wait_for_function("document.getElementById('totals').textContent.includes('→  cispo')")
    (chosen,) = (found for found in meta_of(text)["variants"] if found["name"] == "cispo")
    told = browser.locator("#totals").inner_text().split("→")[1]
    numbers = re.search(r"sum .weight. (\S+), net (\S+), (\d+) clipped", told)
    assert numbers is not None, told
    assert float(numbers[1]) == pytest.approx(sum(chosen["size"]), rel=1e-3)  # four digits
    assert float(numbers[2]) == pytest.approx(sum(chosen["net"]), rel=1e-3, abs=1e-6)
    assert int(numbers[3]) == sum(chosen["clipped"])


def test_a_token_tells_its_numbers_to_mouse_and_keyboard(tmp_path: Path, browser: Page) -> None:
    evidence, path = synthetic_evidence(4, 10, group_size=4), tmp_path / "page.html"
    text = page_of(evidence)
    path.write_text(text, "utf-8")
    for by_keyboard in (True, False):
        shown(path, browser, "what=cispo")
        tip = browser.locator("#tip")
        assert not tip.is_visible()
        if by_keyboard:
            browser.locator(".tokens").first.focus()
            for _ in range(3):
                browser.keyboard.press("ArrowRight")
        else:
            browser.locator(".tokens span").nth(2).hover()
        tip.wait_for(state="visible")
        reported = tip.inner_text()
        assert "token 2 of #0" in reported
        assert f"gradient weight (own): {weights_of(text, 'own')[0][2]:.6g}" in reported
        assert f"gradient weight (cispo): {weights_of(text, 'cispo')[0][2]:.6g}" in reported
        assert f"entropy (nats): {column_of(text, 'entropy')[2]:.6g}" in reported
    browser.keyboard.press("Escape")
    tip.wait_for(state="hidden")


def test_what_a_model_or_a_person_wrote_is_never_markup(tmp_path: Path, browser: Page) -> None:
    evil = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>\u2028"
    evidence = synthetic_evidence(2, 6, group_size=2)
    batch = replace(evidence.batch, problems=(Problem("k", evil, "a", "w"),) * 2)
    evidence = replace(evidence, batch=batch, token_texts={i: evil for i in range(900)})
    text, path = page_of(evidence), tmp_path / "page.html"
    assert evil not in text and "<img" not in text and "step 1 &amp; &lt;others&gt;" in text
    assert meta_of(text)["texts"][0] == evil
    path.write_text(text, "utf-8")
    shown(path, browser)
    assert browser.title() == "step 1 & <others>" and browser.locator("img").count() == 0
    tokens = browser.locator(".tokens span").all_text_contents()
    assert tokens == [evil] * int(evidence.batch.mask.sum())


@pytest.mark.alone
def test_512_responses_of_1024_tokens_are_there_and_answer_within_two_seconds(
    tmp_path: Path, browser: Page
) -> None:
    evidence, path = synthetic_evidence(512, 1024), tmp_path / "page.html"
    assert evidence.batch.mask.sum() > 2 * LARGE
    text = page_of(evidence)
    assert len(text) < 40e6
    path.write_text(text, "utf-8")
    shown(path, browser)
    numbers = browser.evaluate("""async () => {
      const moment = () => new Promise((go) => setTimeout(go, 5));
      const drawn = Number(root.dataset.drawnMs);
      const all = {ready: began + drawn, rows: Number(root.dataset.drawnRows)};
      for (const [name, hash] of [["colour", "colour=entropy"], ["what", "what=cispo"],
                                  ["sort", "what=cispo&sort=change"]]) {
        const began = performance.now();
        location.hash = hash;
        delete root.dataset.drawnMs;
        while (!root.dataset.drawnMs) await moment();
        all[name] = performance.now() - began;
      }
      return all;
    }""")
    print(numbers)
    assert 0 < numbers["rows"] < 60, "rows out of view are not drawn"
    assert 0 < numbers["ready"] < 2000
    assert 0 < max(numbers[name] for name in ("colour", "what", "sort")) < 2000
