"""The page shows the step's tokens and numbers, answers at once, and lets no text become markup."""

from __future__ import annotations

import http.server
import re
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.core.evidence.step import StepEvidence
from posttrain.core.microscope.packing import pack, unpack
from posttrain.core.microscope.page import page
from posttrain.core.microscope.report import LARGE, Variant, make_report
from posttrain.core.microscope.weights import token_weights
from posttrain.core.microscope.what_if import objective_under, usual
from posttrain.core.types import Problem
from tests.helpers.losses import MANAGER, build_loss, objective_of
from tests.helpers.microscope import (
    WHOLE,
    column_of,
    in_browser,
    meta_of,
    real_time,
    synthetic_evidence,
    weights_of,
)

OWN = objective_of(build_loss("ppo_clip"), "seq-mean-token-mean")


def page_of(evidence: StepEvidence) -> str:
    width = evidence.batch.mask.shape[1]
    others = [Variant(w.text, objective_under(w, OWN, MANAGER, width)) for w in usual(OWN, MANAGER)]
    return page(make_report(evidence, OWN, WHOLE, usual=others, title="step 1 & <others>"))


def tokens_in(dom: str) -> list[str]:
    return re.findall(r'<span data-i="\d+"[^>]*>([^<]*)</span>', dom)


def totals_in(dom: str) -> str:
    found = re.search(r'id="totals">([^<]*)<', dom)
    assert found is not None
    return found[1]


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


def test_tokens_colours_and_totals_are_there_and_follow_the_address(tmp_path: Path) -> None:
    evidence, path = synthetic_evidence(8, 20, group_size=4), tmp_path / "page.html"
    path.write_text(page_of(evidence), "utf-8")
    first = in_browser(path)
    ids = evidence.batch.response_ids[evidence.batch.response_mask.bool()].tolist()
    known = evidence.token_texts or {}
    assert tokens_in(first) == [known[i].replace("\n", "⏎\n") for i in ids]
    assert first.count("<h2>") == 2 and "Question 1?" in first
    assert "background-color: rgb(" in first and "→" not in totals_in(first)
    other = in_browser(path, "colour=weight&what=own%40token-mean")
    assert "→  own@token-mean: sum |weight|" in totals_in(other)
    colours = [re.findall(r"background-color: (rgb[^;]*)", dom) for dom in (first, other)]
    assert len(colours[0]) == len(colours[1]) and colours[0] != colours[1]
    entropy = in_browser(path, "colour=entropy&show=wrong&sort=weight")
    assert "<h2>" not in entropy and 0 < entropy.count('class="row wrong"') < 8
    assert 'class="row right"' not in entropy
    assert "colour has no &#39;pink&#39;" in in_browser(path, "colour=pink").replace("'", "&#39;")


def test_a_token_tells_its_numbers_to_mouse_and_keyboard(tmp_path: Path) -> None:
    evidence, path = synthetic_evidence(4, 10, group_size=4), tmp_path / "page.html"
    text = page_of(evidence)
    path.write_text(text, "utf-8")
    script = """setTimeout(() => {
      document.querySelector('.tokens').focus();
      for (const key of ['ArrowRight', 'ArrowRight', 'ArrowRight'])
        document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    }, 500);"""
    focused = in_browser(path, "what=cispo", script)
    point = """setTimeout(() => document.querySelectorAll('.tokens span')[2].dispatchEvent(
      new MouseEvent('mouseover', {bubbles: true})), 500);"""
    for dom in (focused, in_browser(path, "what=cispo", point)):
        tip = re.search(r'<div id="tip"[^>]*>([^<]*)</div>', dom)
        assert tip is not None and "hidden" not in tip[0]
        assert "token 2 of #0" in tip[1]
        assert f"gradient weight (own): {weights_of(text, 'own')[0][2]:.6g}" in tip[1]
        assert f"gradient weight (cispo): {weights_of(text, 'cispo')[0][2]:.6g}" in tip[1]
        assert f"entropy (nats): {column_of(text, 'entropy')[2]:.6g}" in tip[1]


def test_what_a_model_or_a_person_wrote_is_never_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>\u2028"
    evidence = synthetic_evidence(2, 6, group_size=2)
    batch = replace(evidence.batch, problems=(Problem("k", evil, "a", "w"),) * 2)
    evidence = replace(evidence, batch=batch, token_texts={i: evil for i in range(900)})
    text, path = page_of(evidence), tmp_path / "page.html"
    assert evil not in text and "<img" not in text and "step 1 &amp; &lt;others&gt;" in text
    assert meta_of(text)["texts"][0] == evil
    path.write_text(text, "utf-8")
    dom = in_browser(path)
    assert "<title>step 1 &amp; &lt;others&gt;</title>" in dom and "<img" not in dom
    shown = [t for t in tokens_in(dom) if t.startswith("&lt;/script&gt;&lt;img src=x")]
    assert len(shown) == int(evidence.batch.mask.sum())


@pytest.fixture
def told() -> Iterator[tuple[str, list[dict[str, float]]]]:
    """An address that pages can call with numbers, and what they called it with."""
    found: list[dict[str, float]] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = urllib.parse.parse_qsl(urllib.parse.urlparse(self.path).query)
            found.append({name: float(value) for name, value in query})
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", found
    server.shutdown()
    server.server_close()


def test_512_responses_of_1024_tokens_are_there_and_answer_within_two_seconds(
    tmp_path: Path, told: tuple[str, list[dict[str, float]]]
) -> None:
    """The clock is the page's own; time that Chromium pretends in --dump-dom would be too short."""
    evidence, path = synthetic_evidence(512, 1024), tmp_path / "page.html"
    assert evidence.batch.mask.sum() > 2 * LARGE
    text = page_of(evidence)
    assert len(text) < 40e6
    path.write_text(text, "utf-8")
    address, found = told
    script = f"""
      const moment = () => new Promise((go) => setTimeout(go, 5));
      const after = async () => {{ while (!root.dataset.drawnMs) await moment(); }};
      (async () => {{
        await after();
        const all = {{ready: performance.now(), rows: root.dataset.drawnRows}};
        for (const [name, hash] of [["colour", "colour=entropy"], ["what", "what=cispo"],
                                    ["sort", "what=cispo&sort=change"]]) {{
          const began = performance.now();
          location.hash = hash;
          delete root.dataset.drawnMs;
          await after();
          all[name] = performance.now() - began;
          all[name + "_own"] = root.dataset.drawnMs;
        }}
        await fetch("{address}?" + new URLSearchParams(all), {{mode: "no-cors"}});
      }})();"""
    real_time(path, script, found)
    (numbers,) = found
    print(numbers)
    assert numbers["ready"] < 2000
    assert 0 < numbers["rows"] < 60, "rows out of view are not drawn"
    assert max(numbers[name] for name in ("colour", "what", "sort")) < 2000
    assert torch.isfinite(torch.tensor(list(numbers.values()))).all()
