"""Every preset learns to copy digits from a random start, on three seeds, through the real command.

What a preset promises in addition to learning is read from the same runs: bounds kept, targets
reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.helpers.learning import (
    AT_ONCE,
    BUDGETS,
    PREFERENCES,
    REACHED,
    SEEDS,
    SHARP_CRITIC,
    SLOW,
    Budget,
    Learned,
    chosen,
    final,
    start,
    start_preferences,
)

pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.timeout(900)]


Runs = dict[str, Future[Learned]]


def only_with(name: str) -> pytest.MarkDecorator:
    """For what is read from the run of one preset."""
    return pytest.mark.skipif(
        not chosen({name: Budget()}), reason=f"POSTTRAIN_LEARNING_PRESETS leaves {name} out"
    )


each_seed = pytest.fixture(scope="module", params=SEEDS, ids=[f"seed{seed}" for seed in SEEDS])


@pytest.fixture(scope="module")
def runs(shared_prefect: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Every run that the tests read, under way; the long ones first."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found: Runs = {}
        for seed in SEEDS:
            name = f"learned{seed}"
            found[name] = start(pool, tmp_path_factory.mktemp(name), chosen(BUDGETS), seed)
        folder = tmp_path_factory.mktemp("controlled")
        found["controlled"] = start(pool, folder, chosen(CONTROLLED), 0)
        for seed in SEEDS:
            name = f"preferred{seed}"
            found[name] = start_preferences(pool, tmp_path_factory.mktemp(name), seed)
        yield found
        pool.shutdown(cancel_futures=True)


@each_seed
def learned(request: pytest.FixtureRequest, runs: Runs) -> Learned:
    return runs[f"learned{request.param}"].result()


@pytest.mark.parametrize("preset", chosen(BUDGETS))
def test_a_preset_learns(learned: Learned, preset: str) -> None:
    rewards = learned.history(preset, BUDGETS[preset].metric)
    assert len(rewards) == BUDGETS[preset].steps
    assert rewards[0] < 0.2, "a random model is not there already"
    assert final(rewards) >= REACHED


@each_seed
def preferred(request: pytest.FixtureRequest, runs: Runs) -> Learned:
    return runs[f"preferred{request.param}"].result()


@pytest.mark.parametrize("preset", chosen(PREFERENCES))
def test_a_preference_preset_learns_to_rank_and_to_answer(preferred: Learned, preset: str) -> None:
    """Pairs are ranked right, of the prompts it is shown and of unseen ones, and the right answer
    is the likeliest one to most unseen prompts (1 in 100 at random)."""
    if preset != "kto":  # it is shown no pairs
        assert final(preferred.history(preset, "rewards/accuracy")) >= REACHED
    assert preferred.metric(preset, "pref/held_out_pair_accuracy") >= REACHED
    assert preferred.metric(f"evaluate_{preset}", "eval/greedy_accuracy") > 0.5


@only_with("trpo")
def test_trpo_keeps_its_measured_kl_within_the_bound(learned: Learned) -> None:
    delta = BUDGETS["trpo"].fields["policy_loss"]["delta"]
    kl, rejected = (learned.history("trpo", f"trpo/{name}") for name in ("kl", "rejected"))
    assert max(kl) <= delta
    assert sum(k > 0 for k in kl) > len(kl) / 2, "most steps move"
    assert all(k == 0 for k, gone in zip(kl, rejected, strict=True) if gone)


@only_with("dapo")
def test_dapo_trains_on_no_group_without_advantage(learned: Learned) -> None:
    """They are replaced by others, or the batch is smaller; what was dropped is counted."""
    assert not any(learned.history("dapo", "group/zero_adv_frac"))
    dropped = learned.history("dapo", "sampling/dropped_all_wrong")
    assert dropped[0] > 0 and max(learned.history("dapo", "sampling/dropped_all_right")) > 0


@only_with("ahead")
def test_a_preset_learns_from_rollouts_sampled_ahead_and_carried_over(controlled: Learned) -> None:
    verdicts = controlled.history("ahead", AHEAD.metric)
    assert verdicts[0] < 0.2 and final(verdicts) >= REACHED
    assert max(controlled.history("ahead", "staleness/max")) == 2
    assert max(controlled.history("ahead", "sampling/carried_in")) > 0


@only_with("adapted")
def test_an_adapter_learns_beside_frozen_weights(controlled: Learned) -> None:
    """With a KL to the model without it."""
    rewards = controlled.history("adapted", "reward/mean")
    assert rewards[0] < 0.2 and final(rewards) >= REACHED
    assert controlled.history("adapted", "kl/ref_token")[-1] > 0.1


@only_with("vapo")
def test_vapo_trains_its_critic_alone_first(learned: Learned) -> None:
    alone = BUDGETS["vapo"].fields["critic"]["pretrain_steps"]
    phases = learned.history("vapo", "value/pretraining")
    assert phases[:alone] == [1.0] * alone and not any(phases[alone:])
    rewards = learned.history("vapo", "reward/mean")
    assert max(rewards[:alone]) < 0.3, "the policy stands still meanwhile"


@only_with("ppo_penalty")
def test_ppo_penalty_adapts_its_coefficient(learned: Learned) -> None:
    beta = learned.history("ppo_penalty", "kl/penalty_beta")
    assert len(set(beta)) > 1


# The policy wants to be 5.4 nats from where it started; the controllers hold it at their target.
TARGET = 1.0
AHEAD = replace(
    BUDGETS["dapo"], fields={**BUDGETS["dapo"].fields, "max_staleness": 1}, preset="dapo"
)
CONTROLLERS: dict[str, Budget] = {
    "adaptive": Budget(
        100,
        {
            "kl": {
                "estimator": "k2",
                "controller": {
                    "name": "adaptive",
                    "coef": 0.05,
                    "target": TARGET,
                    "horizon": 400,
                },
            }
        },
        preset="grpo",
    ),
    "halving": Budget(
        140,
        {
            "kl": {
                "estimator": "k2",
                # Per token. The paper's band, and small steps: in a narrow one (1.2) the KL swings
                # between 0.3 and 3 for ever, as a policy takes some steps to follow.
                "controller": {
                    "name": "ppo_halving",
                    "coef": 0.05,
                    "target": TARGET / 2,
                    "factor": 1.08,
                    "band": 1.5,
                },
            }
        },
        preset="grpo",
    ),
    "ppo": Budget(
        60,
        {
            "kl": {
                "controller": {
                    "name": "adaptive",
                    "coef": 0.1,
                    "target": 2 * TARGET,
                    "horizon": 400,
                }
            },
            "critic": SHARP_CRITIC,
            **SLOW,
        },
    ),
}


# A frozen random head cannot be surer than 0.64 of any token at temperature 1: its logits are
# products of a normed state and a small embedding.
ADAPTED = replace(
    BUDGETS["grpo"],
    steps=60,
    fields={
        **BUDGETS["grpo"].fields,
        "lora": {"rank": 16, "alpha": 32},
        "generation": {"max_response_length": 2, "temperature": 0.4},
    },
    preset="grpo",
)
CONTROLLED = {**CONTROLLERS, "ahead": AHEAD, "adapted": ADAPTED}


@pytest.fixture(scope="module")
def controlled(runs: Runs) -> Learned:
    return runs["controlled"].result()


@pytest.mark.parametrize("name", chosen(CONTROLLERS))
def test_a_kl_controller_brings_the_run_to_its_target(controlled: Learned, name: str) -> None:
    target = 2 * TARGET if name == "ppo" else TARGET
    last = controlled.history(name, "kl/ref_sequence")[-30:]
    assert 0.6 * target < sum(last) / len(last) < 1.6 * target
    coefficients = controlled.history(name, "kl/coef")
    assert max(coefficients) > 2 * coefficients[0], "the start was far too weak"


@only_with("ppo")
def test_ppos_critic_explains_the_returns(controlled: Learned) -> None:
    """While the KL keeps the policy from being always right, so that there is a variance."""
    explained = controlled.history("ppo", "value/ev")[-30:]
    assert sum(explained) / len(explained) > 0.5


# Answers of exactly two tokens are intended, a stage that has solved all goes on, and rates are
# those of a task that is learned in 30 steps.
EXPECTED_ALARMS = {"truncated", "equal_groups", "policy_kl", "grad_spike", "mismatch"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_preset_that_learns_raises_no_alarm_about_learning(runs: Runs, seed: int) -> None:
    """Entropy, length, repetition, groups without signal: all presets here reach their reward."""
    warnings = "\n".join(runs[f"learned{seed}"].result().result["warnings"])
    assert set(re.findall(r"alarm (\w+):", warnings)) <= EXPECTED_ALARMS, warnings
