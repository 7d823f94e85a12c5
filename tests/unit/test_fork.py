"""Forks: what a config says of them, what is refused, what plugins carry over, and the page."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.analysis.fork_page import RunLine, fork_page, in_tree_order
from posttrain.core.config.fork_section import ForkSection, StepStage
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.run_record import RunRecord, RunRecorder, find_run
from posttrain.pipelines.analysis.fork_tree import tree_report
from posttrain.pipelines.api.fork import make_fork
from posttrain.pipelines.run.fork_start import carried
from posttrain.pipelines.run.forks import Parent, check_settings, find_parent, nearest_checkpoint
from posttrain.pipelines.stage.files import checkpoint_folder

RL = {"kind": "rl", "inputs": {"model": "sft"}, "steps": 50}
SFT = {"kind": "sft", "inputs": {"model": "base"}}
OF = f"rl/{'a' * 64}"


@functools.cache
def plugins() -> PluginManager:
    return PluginManager()


def resolved(*overrides: str, **rl: Any) -> ResolvedRun:
    made = {"name": "forked", "task": "arithmetic", "stages": {"sft": SFT, "rl": RL | rl}}
    return resolve(load_config([made], overrides), plugins())


def parent(*overrides: str, **rl: Any) -> Parent:
    config = resolved(*overrides, **rl).config
    stage = config.stages["rl"]
    assert isinstance(stage, StepStage)
    fork = ForkSection(stage=OF, step=40)
    return Parent(fork, (RunRecord("b" * 32, "forked", Path()),), config, stage)


# --- config --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fork", "said"),
    [
        ({"stage": "rl", "step": 1}, "stages.rl.fork.stage"),
        ({"stage": OF, "step": 0}, "stages.rl.fork.step"),
        ({"stage": OF, "step": 1, "seed": -1}, "stages.rl.fork.seed"),
        ({"stage": OF, "step": 50}, "steps is 50, and the first 50 are shared"),
        ({"stage": OF, "step": 1, "run": "x"}, "unknown field"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_at_its_place(fork: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        resolved(fork=fork)


def test_the_best_weights_of_shared_steps_are_not_there() -> None:
    kept = {"keep_best": True, "evaluate_every": 1, "held_out_fraction": 0.1}
    fork = {"stage": f"sft/{'a' * 64}", "step": 2}
    stages = {"sft": SFT | kept | {"fork": fork, "batch_size": 4, "steps": 9}}
    with pytest.raises(ConfigError, match="keep_best: false"):
        load_config([{"task": "arithmetic", "stages": stages}])


# --- what may differ -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"policy_loss": "gspo", "steps": 60},
        {"advantage": "rloo", "optimizer": {"learning_rate": 1.0}},
        {"num_generations": 4, "generation": {"temperature": 0.5}, "rewards": ["accuracy"]},
        {"kl": {"ref_update": {"rule": "ema"}, "controller": {"name": "fixed", "coef": 0.1}}},
        {"max_staleness": 2},
    ],
)
def test_what_the_optimizer_can_go_on_with_may_change(change: dict[str, Any]) -> None:
    check_settings("rl", resolved(**change).config, parent())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stages.rl.lora={}"], "stages.rl.lora: is .*rank.* and null"),
        (["stages.rl.optimizer.moments=8bit"], "stages.rl.optimizer.moments: is 8bit"),
        (["model.dtype=bfloat16"], "model.dtype: is bfloat16, and auto"),
        (["model.source=elsewhere"], "model.source: is elsewhere"),
        (["seed=3"], "seed: is 3, and 0 .*--seeds"),
        (["stages.sft.steps=3"], "stages.sft.steps: is 3, and 10"),
        (["stages.rl.inputs={model: base}"], "stages.rl.inputs.model: comes from base"),
        (["stages.rl.algorithm=ppo"], "stages.rl.critic: the run that is forked has none"),
    ],
)
def test_what_it_cannot_go_on_with_is_named_with_what_to_do(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings("rl", resolved(*overrides).config, parent())


def test_a_critic_that_is_not_needed_any_more_is_left_behind() -> None:
    check_settings("rl", resolved().config, parent(algorithm="ppo"))


# --- what plugins carry over ---------------------------------------------------------------------

PARTS: dict[str, Any] = {
    "controller": {"coef": 0.3},
    "estimator": {},
    "reward_shaping": {"count": 3.0},
    "policy_loss/ppo_clip": {},
    "rollouts": {"sampler": {}, "prompts": 640, "stream": None, "waiting": []},
}


def of(*overrides: str, **rl: Any) -> StepStage:
    stage = resolved(*overrides, **rl).config.stages["rl"]
    assert isinstance(stage, StepStage)
    return stage


def test_a_plugin_goes_on_with_its_state_unless_its_settings_changed() -> None:
    assert carried(PARTS, of(), of(steps=80)) == PARTS
    other = of(kl={"controller": {"name": "fixed", "coef": 0.0}}, advantage="rloo")
    assert "controller" in carried(PARTS, of(kl=other.model_dump()["kl"]), other)
    found = carried(PARTS, of(kl={"controller": {"name": "fixed", "coef": 0.1}}), other)
    assert set(PARTS) - set(found) == {"controller", "estimator"}
    assert "reward_shaping" not in carried(PARTS, of(), of(reward_whiten="running"))
    assert "policy_loss/ppo_clip" not in carried(PARTS, of(), of(policy_loss="gspo"))
    assert "sampler" not in carried(PARTS, of(), of(sampler="dynamic"))["rollouts"]


def test_a_stream_begins_where_the_prompts_stood_and_ends_where_it_stood() -> None:
    streaming = of(schedule="streaming", max_staleness=2)
    begun = carried(PARTS, of(), streaming)["rollouts"]
    assert begun["stream"] == {"next": 640, "again": []}
    stood = {**PARTS, "rollouts": PARTS["rollouts"] | {"stream": {"next": 700, "again": [699]}}}
    ended = carried(stood, streaming, of())["rollouts"]
    assert (ended["prompts"], ended["stream"]) == (700, None)


# --- from a run to the config of its fork --------------------------------------------------------

Recorded = Callable[..., str]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Records a run with stages of these identities, as `run` does; returns its id."""

    def record(run_id: str, identity: str, config: str = "", *overrides: str) -> str:
        text = config or resolved(*overrides).to_yaml()
        made = RunRecorder(tmp_path, run_id * 32, "forked", f"2026-01-0{run_id}", text)
        made.stage("rl", identity * 64)
        return run_id * 32

    return record


def forked(home: Path, run: str, step: int | None = 40, *sets: str, **more: Any) -> ResolvedRun:
    made = make_fork(run, home, step=step, overrides=sets, **{"stage": None, **more})
    return resolve(load_config([made.config], made.overrides), plugins())


def test_a_fork_names_the_stage_by_content_and_the_run_for_people(
    tmp_path: Path, recorded: Recorded
) -> None:
    run = recorded("1", "a")
    made = forked(tmp_path, run, 40, "stages.rl.policy_loss=gspo", seed=7).config
    assert made.stages["rl"].model_dump()["fork"] == {"stage": OF, "step": 40, "seed": 7}
    assert made.forked_from is not None
    assert (made.forked_from.run, made.forked_from.step) == (run, 40)
    assert find_parent(ForkSection(stage=OF, step=40), tmp_path).record.run_id == run


def test_a_fork_of_a_fork_names_whoever_took_the_step(tmp_path: Path, recorded: Recorded) -> None:
    first = recorded("1", "a")
    second = recorded("2", "b", forked(tmp_path, first, 40, seed=3).to_yaml())
    third = recorded("3", "c", forked(tmp_path, second, 45).to_yaml())

    def fork_of(run: str, step: int) -> dict[str, Any]:
        found: dict[str, Any] = forked(tmp_path, run, step).config.stages["rl"].model_dump()["fork"]
        return found

    assert fork_of(second, 45) == {"stage": f"rl/{'b' * 64}", "step": 45, "seed": 3}
    assert fork_of(second, 40) == {"stage": OF, "step": 40, "seed": 3}
    assert fork_of(third, 48)["stage"] == f"rl/{'c' * 64}"
    assert fork_of(third, 43)["stage"] == f"rl/{'b' * 64}"
    assert fork_of(third, 12)["stage"] == OF


@pytest.mark.parametrize(
    ("options", "sets", "said"),
    [
        ({"step": 51}, [], "has 50 steps"),
        ({"step": None}, [], "say where to fork"),
        ({"step": None, "stage": "rl"}, [], "without a change is the run itself"),
        ({"step": None, "stage": "rl", "seed": 1}, ["stages.rl.steps=60"], "add --step"),
        ({"step": 3, "stage": "rm"}, [], "no stage 'rm'"),
        ({"step": 3}, ["stages.sft.steps=4"], "fork there: --stage sft"),
        ({"step": None, "stage": "rl"}, ["seed=4"], "fork there: --stage sft"),
        ({"step": 3, "stage": "sft"}, [], "never began"),
    ],
)
def test_a_place_that_cannot_be_forked_says_which_can(
    tmp_path: Path, recorded: Recorded, options: dict[str, Any], sets: list[str], said: str
) -> None:
    run = recorded("1", "a")
    with pytest.raises((ConfigError, ResourceError), match=said):
        make_fork(run, tmp_path, **{"stage": None, "overrides": sets, **options})


def test_another_algorithm_sets_what_the_old_one_had_set(
    tmp_path: Path, recorded: Recorded
) -> None:
    """The recorded config says every field, which would hide the new algorithm."""
    run = recorded("1", "a", "", "stages.rl.num_generations=6")
    made = forked(tmp_path, run, 40, "stages.rl.algorithm=dapo").config.stages["rl"]
    fresh = resolved("stages.rl.algorithm=dapo").config.stages["rl"]
    for field in ("policy_loss", "aggregator", "kl", "advantage"):
        assert getattr(made, field) == getattr(fresh, field), field
    assert made.model_dump()["num_generations"] == 6


def test_a_missing_parent_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="name the home of that run with --home"):
        find_parent(ForkSection(stage=OF, step=1), tmp_path)


# --- the page ------------------------------------------------------------------------------------


def test_a_fork_after_damaged_checkpoints_says_which_are(tmp_path: Path) -> None:
    stage, _, identity = OF.partition("/")
    root = checkpoint_folder(tmp_path, stage, identity)
    for step in (30, 40, 50):
        (root / f"step-{step:06d}").mkdir(parents=True)
        (root / f"step-{step:06d}" / "state.json").write_text("")
    says = "keeps checkpoints of steps 30, 40, 50, damaged are .*40, .*30; fork after step 50"
    with pytest.raises(ResourceError, match=says):
        nearest_checkpoint(parent(), tmp_path)


def test_forks_stand_below_their_parent_in_the_order_of_their_steps() -> None:
    stages = {"sft": 10, "rl": 50}
    runs = [
        RunLine("b", "late", stages, "a", "rl", 40),
        RunLine("a", "root", stages),
        RunLine("c", "early", stages, "a", "rl", 20),
        RunLine("d", "of late", {"sft": 10, "rl": 60}, "b", "rl", 45),
        RunLine("e", "all of rl", stages, "a", "rl"),
    ]
    ordered = in_tree_order(runs)
    assert [line.run for line in ordered] == ["a", "e", "c", "b", "d"]
    assert [line.begins for line in ordered] == [0, 10, 30, 50, 55]


def test_the_page_escapes_what_it_shows_and_runs_nothing() -> None:
    page = fork_page([RunLine("a" * 32, "<script>", {"rl": 5})], "Forks <b>")
    assert "<script" not in page and "<b>" not in page and "default-src 'none'" in page


def test_the_tree_tells_what_was_changed(tmp_path: Path, recorded: Recorded) -> None:
    first = recorded("1", "a")
    changed = ("stages.rl.policy_loss=gspo", "stages.rl.steps=80")
    recorded("2", "b", forked(tmp_path, first, 40, *changed, seed=5).to_yaml())
    recorded("3", "d", "", "stages.rl.steps=7")  # which no fork belongs to
    report = tree_report(tmp_path, tmp_path / "artifacts", None)
    root, fork = report.values["runs"]  # type: ignore[misc]
    assert (root["run"], root["changes"]) == (first, ())
    assert list(fork["changes"]) == [
        "rl.steps 50 -> 80",
        "rl.policy_loss ppo_clip -> gspo",
        "seed 5 after the fork",
    ]
    with pytest.raises(ConfigError, match="no run"):
        tree_report(tmp_path / "empty", tmp_path / "artifacts", None)


def test_the_recorded_config_of_a_fork_is_a_config_like_any_other(
    tmp_path: Path, recorded: Recorded
) -> None:
    text = forked(tmp_path, recorded("1", "a"), 40).to_yaml()
    record = find_run(tmp_path, recorded("2", "b", text))
    again, written = load_config([record.config]).config, yaml.safe_load(text)
    assert again.model_dump(mode="json") == written
