"""Why a stage runs again, in words: worked examples of one change each, and of many."""

from __future__ import annotations

import pytest

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.store.identity import Change, explain, stage_parts

RUN = {
    "seed": 0,
    "task": {"name": "arithmetic", "left_digits": [1, 2]},
    "engine": "auto",
    "model": {"source": "x", "dtype": "float32"},
    "evaluation": {"num_problems": 4},
    "name": "n",
}
STAGE = {
    "kind": "rl",
    "inputs": {"model": "sft", "reward_model": "rm"},
    "steps": 3,
    "optimizer": {"learning_rate": 1e-5, "betas": [0.9, 0.999]},
    "advantage": {"name": "grpo", "scale_by_std": True},
    "rewards": [{"name": "accuracy", "weight": 1.0}, {"name": "format", "weight": 0.2}],
    "lora": None,
    "fork": None,
}
PLUGINS = [("reward", "accuracy", "posttrain 0.1"), ("reward", "brevity", "example 1.2 aaaaaa")]
SOURCES = {"model": "sft", "reward_model": "rm"}
DIGESTS = {"model": "m1", "reward_model": "r1"}


def parts(**changes: object) -> dict[str, str]:
    run = {**RUN, **{k: v for k, v in changes.items() if k in RUN}}
    stage = {**STAGE, **{k: v for k, v in changes.items() if k in STAGE}}
    found = stage_parts(
        run,
        stage,
        RlStage,
        {**DIGESTS, **changes.get("digests", {})},  # type: ignore[dict-item]
        changes.get("plugins", PLUGINS),  # type: ignore[arg-type]
        "transformers",
        str(changes.get("data", "")),
        changes.get("files", {}),  # type: ignore[arg-type]
    )
    return found | {"posttrain": str(changes.get("code", "0.1.0+aaaa"))}


def described(*, before: dict[str, object] | None = None, **now: object) -> str:
    return str(explain("rl", parts(**now), [parts(**(before or {}))], SOURCES))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"optimizer": {"learning_rate": 2e-5, "betas": [0.9, 0.999]}},
            "stages.rl.optimizer.learning_rate 1e-5 -> 2e-5",
        ),
        (
            {"optimizer": {"learning_rate": 1e-5, "betas": [0.9, 0.95]}},
            "stages.rl.optimizer.betas [0.9, 0.999] -> [0.9, 0.95]",
        ),
        ({"steps": 4}, "stages.rl.steps 3 -> 4"),
        ({"seed": 7}, "seed 0 -> 7"),
        ({"model": {"source": "y", "dtype": "bfloat16"}}, "model.dtype float32 -> bfloat16"),
        ({"advantage": {"name": "rloo"}}, "stages.rl.advantage grpo -> rloo"),
        (
            {"advantage": {"name": "grpo", "scale_by_std": False}},
            "stages.rl.advantage.scale_by_std true -> false",
        ),
        (
            {"rewards": [{"name": "accuracy", "weight": 1.0}, {"name": "format", "weight": 0.5}]},
            "stages.rl.rewards.1.weight 0.2 -> 0.5",
        ),
        (
            {"rewards": [{"name": "accuracy", "weight": 1.0}]},
            "stages.rl.rewards [accuracy, format] -> [accuracy]",
        ),
        (
            {"lora": {"rank": 16, "alpha": 32.0}},
            "stages.rl.lora null -> {rank: 16, alpha: 32}",
        ),
        (
            {"plugins": [PLUGINS[0], ("reward", "brevity", "example 1.3 bbbbbb")]},
            "reward plugin brevity 1.2 -> 1.3",
        ),
        (
            {"plugins": [PLUGINS[0], ("reward", "brevity", "other 1.2 aaaaaa")]},
            "reward plugin brevity of example 1.2 -> of other 1.2",
        ),
        (
            {"plugins": [PLUGINS[0], ("reward", "brevity", "example 1.2 bbbbbb")]},
            "the source of reward plugin brevity changed",
        ),
        ({"digests": {"model": "m2"}}, "input model changed: sft made another one"),
        ({"files": {"ptx.path": "d2"}}, "the content of stages.rl.ptx.path changed"),
        ({"data": "d2"}, "the task's data changed"),
        ({"code": "0.1.0+bbbb"}, "posttrain's own code changed"),
        ({"code": "0.2.0+bbbb"}, "posttrain 0.1.0 -> 0.2.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_change_reads_as_people_would_say_it(change: dict[str, object], words: str) -> None:
    before: dict[str, object] = {"files": {"ptx.path": "d1"}} if "files" in change else {}
    assert described(before=before, **change) == f"changed: {words}"


def test_settings_come_before_what_follows_from_them_and_three_are_enough() -> None:
    reason = explain(
        "rl",
        parts(
            steps=4,
            seed=1,
            digests={"model": "m2"},
            plugins=[PLUGINS[0], ("reward", "brevity", "example 1.3 bbbbbb")],
            code="0.1.0+bbbb",
        ),
        [parts()],
        SOURCES,
    )
    assert str(reason) == (
        "changed: stages.rl.steps 3 -> 4, seed 0 -> 1, reward plugin brevity 1.2 -> 1.3 and 2 more"
    )
    assert [change.what for change in reason.changes[3:]] == [
        "input model changed: sft made another one",
        "posttrain's own code changed",
    ]
    assert reason.changes[0] == Change("stages.rl.steps", "3", "4")


def test_an_input_that_is_still_to_come_is_named_with_the_stage_that_makes_it() -> None:
    waiting = {k: v for k, v in parts(steps=4).items() if k != "input model"}
    reason = explain("rl", waiting, [parts()], SOURCES, waits_for=["model"])
    assert str(reason) == ("changed: stages.rl.steps 3 -> 4, input model changed because sft runs")
    assert str(explain("rl", waiting, [], SOURCES, waits_for=["model"])) == "never computed"


def test_the_closest_earlier_result_is_compared_and_of_equals_the_newest() -> None:
    earlier = [parts(steps=9, seed=5), parts(steps=8), parts(steps=7)]
    assert str(explain("rl", parts(), earlier, SOURCES)) == "changed: stages.rl.steps 8 -> 3"


def test_a_plugin_that_came_with_a_setting_is_told_by_the_setting() -> None:
    rewards = [*STAGE["rewards"], {"name": "brevity", "weight": 1.0}]  # type: ignore[misc]
    assert described(before={"plugins": PLUGINS[:1]}, rewards=rewards) == (
        "changed: stages.rl.rewards [accuracy, format] -> [accuracy, format, brevity]"
    )
    assert (
        described(before={"plugins": PLUGINS[:1]}) == "changed: reward plugin brevity is used now"
    )


def test_of_a_fork_the_changes_are_told_and_not_that_it_is_one() -> None:
    fork = {"stage": f"rl/{'a' * 64}", "step": 2, "seed": None}
    other = {"stage": f"rl/{'b' * 64}", "step": 1, "seed": 1}
    assert described(fork=fork, steps=4) == "changed: stages.rl.steps 3 -> 4"
    for before in ({}, {"fork": {**other, "seed": None}}):
        reason = explain("rl", parts(fork=fork), [parts(**before)], SOURCES)
        assert not reason.changes
        assert str(reason) == "it begins with the first 2 steps of another run"
    assert described(fork=other) == "changed: stages.rl.fork.seed null -> 1"
    assert described(fork=other, before={"fork": fork}) == "changed: stages.rl.fork.seed null -> 1"
    assert described(before={"fork": fork}).startswith("changed: stages.rl.fork {stage: rl/aaa")
