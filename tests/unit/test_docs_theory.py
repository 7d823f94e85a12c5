"""The theory pages: written whole, and their numbers against closed forms and simulations."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.scripts import load_script

REPO = Path(__file__).resolve().parents[2]
GENERATOR = load_script("generate_theory")
THEORY: dict[str, Any] = {name: GENERATOR.module_of(name) for name in GENERATOR.PAGES}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("theory")
    THEORY["importance-weights"].TRIALS = 200  # the simulation's length, not its subject
    GENERATOR.write(folder)
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def test_each_page_is_whole_with_a_plot_and_says_what_to_do(pages: dict[str, str]) -> None:
    for name in GENERATOR.PAGES:
        page = pages[f"{name}.md"]
        assert "{{" not in page and "| ---: |" in page
        assert page.rstrip().rpartition("## ")[2].startswith("What to do with this")
        for plot in re.findall(r"!\[[^\]]+\]\(([\w-]+\.svg)\)", page):
            assert "<polyline" in pages[plot] and "nan" not in pages[plot]
        assert f"{name}.svg" in page


def test_links_of_the_pages_lead_somewhere(pages: dict[str, str]) -> None:
    for name in GENERATOR.PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", pages[f"{name}.md"]):
            there = (REPO / "docs" / "theory" / target).resolve()
            assert target in pages or there.exists(), f"{name} links to {target}"


def test_a_page_with_a_mark_that_nothing_fills_is_refused() -> None:
    assert GENERATOR.filled("a {{b}}", {"b": "1"}) == "a 1"
    for template, values in (("{{a}} {{b}}", {"a": "1"}), ("{{a}}", {"a": "1", "b": "2"})):
        with pytest.raises(SystemExit, match="'b'"):
            GENERATOR.filled(template, values)


def test_importance_weights_lose_samples_as_the_formula_says() -> None:
    theory = THEORY["importance-weights"]
    assert theory.effective(0.5) == pytest.approx(math.exp(-1))
    assert theory.measured(0.5) == pytest.approx(theory.effective(0.5), rel=0.02)
    equal = 0.5 * math.erfc(theory.EFFECT * math.sqrt(32) / math.sqrt(2))  # normal, N = 32
    theory.wrong_sign.cache_clear()
    theory.TRIALS = 5000
    assert theory.wrong_sign(0.0, 32) == pytest.approx(equal, abs=0.015)
    assert theory.wrong_sign(1.0, 32) > equal + 0.05
    assert theory.wrong_sign(1.0, 32, theory.CAP) < theory.wrong_sign(1.0, 32)


def test_gae_sends_lambda_to_the_distance_of_a_reward_back() -> None:
    theory = THEORY["gae-lambda"]
    shares = theory.reach(0.95, 101)
    assert float(shares[0]) == pytest.approx(0.95**100)
    # Errors of independent values: the first one whole, later ones (1 - lambda) lambda^(k-1).
    later = sum(((1 - 0.9) * 0.9 ** (k - 1)) ** 2 for k in range(1, 100))
    assert theory.noise(0.9, 100) == pytest.approx(theory.NOISE * math.sqrt(1 + later), rel=1e-6)
    assert theory.adaptive(0.05, 1000) == pytest.approx(0.98)


def test_ppo_holds_a_second_model_and_a_reference() -> None:
    theory = THEORY["ppo-memory"]
    size, found = theory.parameters(0.5e9) / 1e9, theory.memory(0.5e9)
    # 2 + 4 + 4 + 8 bytes a parameter; the head of a critic is one output, its embedding stays.
    assert theory.held(found["GRPO without KL"]) == pytest.approx(18 * size, rel=0.01)
    assert theory.held(found["GRPO"]) == pytest.approx(20 * size, rel=0.01)
    assert 34 * size < theory.held(found["PPO"]) < 38.1 * size


def test_kl_estimates_are_those_of_the_literature() -> None:
    theory = THEORY["kl-estimators"]
    for target in (0.01, 0.5):
        logits, reference = theory.pair(target)
        policy = logits.log_softmax(0)
        assert float(theory.exact(policy, reference)) == pytest.approx(target, rel=1e-6)
        assert theory.estimates("k1", target)[0] == pytest.approx(target, rel=1e-6)
        assert theory.estimates("k3", target)[0] == pytest.approx(target, rel=1e-6)
        gap = policy - reference
        variance = float((policy.exp() * (gap - target) ** 2).sum())
        assert theory.estimates("k1", target)[1] == pytest.approx(math.sqrt(variance), rel=1e-6)
        assert theory.gradient("k2", target) == pytest.approx((1.0, 1.0), rel=1e-6)
        assert theory.gradient("k1", target)[1] == 0
    # k3's mean gradient is that of KL(reference || policy): policy less reference, per logit.
    logits, reference = theory.pair(2.0)
    policy, start = logits.softmax(0), logits.clone().requires_grad_()
    wanted = torch.autograd.grad(theory.exact(start.log_softmax(0), reference), start)[0]
    other = policy - reference.exp()
    cosine = float(other @ wanted / other.norm() / wanted.norm())
    assert theory.gradient("k3", 2.0)[0] == pytest.approx(cosine, abs=1e-3)


def test_the_best_policy_under_beta_is_the_one_that_a_search_finds() -> None:
    theory = THEORY["beta"]
    for rate, beta in ((0.1, 0.5), (0.01, 0.2), (0.5, 1.0)):
        assert theory.searched(rate, beta) == pytest.approx(theory.best(rate, beta), abs=1e-4)
    assert theory.best(0.01, 0.001) == 1.0, "without an overflow"
    assert theory.deviation(0.1) == pytest.approx(0.3, abs=1e-3)
    assert theory.pair_weight(theory.margin_at(0.05, 0.1), 0.1) == pytest.approx(0.05)


def test_group_sizes_against_draws() -> None:
    theory = THEORY["groups"]
    draw = torch.Generator().manual_seed(0)
    rewards = (torch.rand(40_000, 8, generator=draw, dtype=torch.float64) < 0.1).double()
    equal = (rewards == rewards[:, :1]).all(dim=1)
    assert theory.silent(8, 0.1) == pytest.approx(float(equal.double().mean()), abs=0.01)
    assert theory.silent(4, 0.5) == 0.125
    assert theory.silent(8, 0.9) == pytest.approx(theory.silent(8, 0.1))
    spread = rewards.std(dim=1, keepdim=True) + theory.EPS
    advantages = torch.where(
        equal[:, None], 0.0, (rewards - rewards.mean(1, keepdim=True)) / spread
    )
    pushes = (advantages * (rewards - 0.1)).mean()
    assert theory.push(8, 0.1, "grpo") == pytest.approx(float(pushes), abs=0.005)
    for size in theory.SIZES:
        assert theory.push(size, 0.3, "rloo") == pytest.approx(0.21)
        assert theory.push(size, 0.3, "dr_grpo") == pytest.approx(0.21 * (size - 1) / size)
