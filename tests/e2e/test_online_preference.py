"""Online preference learning through the real command: it learns, goes on after kills, replays."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import killer
from tests.helpers.learning import AT_ONCE, SEEDS, Learned, final, make_model, run_config
from tests.helpers.pipeline import prepared, run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

TASK = {"places": 1, "repeats": 2, "held_out_permille": 300}
MEASURED = ("time/", "memory/", "throughput/")


def online_stage(steps: int, **online: Any) -> dict[str, Any]:
    rounds = {"refresh_every": 2, "prompts_per_round": 16, "num_generations": 8}
    return {
        "kind": "preference",
        "inputs": {"model": "base"},
        "preference_loss": {"name": "dpo", "beta": 0.5},
        "batch_size": 16,
        "micro_batch_size": 64,
        "pairs_per_prompt": 1,
        "generation": {"max_response_length": 2},
        "optimizer": {"learning_rate": 5.0e-3},
        "online": {"steps": steps, **rounds, **online},
    }


def written(folder: Path, seed: int, stages: dict[str, Any], **more: Any) -> Path:
    config = run_config(make_model(folder, seed), seed, stages, TASK, held_out=3) | more
    return write_config(folder / "run.yaml", config)


# --- exactness ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounds of three steps, a checkpoint after every one, so that most lie within a round."""
    folder = tmp_path_factory.mktemp("online")
    stage = online_stage(8, refresh_every=3) | {"checkpoint_every": 1, "batch_size": 5}
    keep = {"every": 1, "records": 1, "checkpoints": 2}
    return written(folder, 0, {"online": stage}, keep=keep)


def histories(learned: Learned) -> dict[str, list[tuple[int, float]]]:
    """Every metric of the stage that does not measure time or memory."""
    from mlflow import MlflowClient

    client = MlflowClient(learned.result["mlflow_uri"])
    stage = client.get_run(learned.result["stages"]["online"]["mlflow_run_id"])
    names = [name for name in stage.data.metrics if not name.startswith(MEASURED)]
    return {name: learned.curve("online", name) for name in names}


def digests(learned: Learned) -> dict[str, str]:
    made = learned.result["stages"]["online"]["artifacts"]
    return {item["kind"]: item["digest"] for item in made if item["kind"] == "model"}


@pytest.fixture(scope="module")
def whole(exact: Path) -> Learned:
    """The run that nothing happens to."""
    home = prepared(exact.parent / "whole")
    done = run_command("run", str(exact), "--home", str(home), "--json")
    assert done.code == 0, done.text
    return Learned(done.result)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((3, 5), id="two", marks=pytest.mark.slow),
        pytest.param((1, 2, 3, 5), id="four", marks=pytest.mark.slow),
    ],
)
def test_kills_within_and_between_rounds_change_nothing(
    exact: Path, whole: Learned, tmp_path: Path, kills: tuple[int, ...]
) -> None:
    """A round has three steps: killed at the end of the first, and within the second."""
    pairs = whole.curve("online", "online/num_pairs")
    assert [step for step, _ in pairs] == [1, 4, 7], "pairs are made again every three steps"
    path = killer.install(tmp_path / "killer")
    home = prepared(tmp_path / "killed")
    for step in kills:
        at = {"PYTHONPATH": path, killer.WHERE: f"online:{step}"}
        ended = run_command("run", str(exact), "--home", str(home), variables=at)
        assert ended.code != 0
    done = run_command("run", str(exact), "--home", str(home), "--json")
    assert done.code == 0, done.text
    again = Learned(done.result)
    assert digests(again) == digests(whole), "bit for bit the same weights"
    assert histories(again) == histories(whole)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("5", id="on_pairs_of_a_checkpoint"),
        pytest.param("7", id="on_pairs_of_a_new_round", marks=pytest.mark.slow),
    ],
)
def test_a_step_replays(exact: Path, whole: Learned, step: str) -> None:
    home = str(exact.parent / "whole")
    found = run_command("replay", whole.result["run_id"], "--home", home, "--json", "--step", step)
    assert found.code == 0 and found.result["equal"], found.text


# --- learning -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> list[Learned]:
    """On each seed: online DPO by the verifier's ranking, and by that of a reward model."""
    folders = [(seed, tmp_path_factory.mktemp(f"learned{seed}")) for seed in SEEDS]
    for seed, folder in folders:
        rewards = {
            "kind": "reward_model",
            "inputs": {"model": "base"},
            "data": str(write_pairs(folder / "pairs.jsonl")),
            "epochs": 8,
            "batch_size": 64,
            "optimizer": {"learning_rate": 5.0e-3},
        }
        ranked = online_stage(40, ranked_by="reward_model")
        ranked["inputs"] = {"model": "base", "reward_model": "rewards"}
        stages = {"verified": online_stage(60), "rewards": rewards, "ranked": ranked}
        written(folder, seed, stages)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda place: finished(place[1]), folders))


def write_pairs(path: Path) -> Path:
    """The right answer to each training prompt before every other answer of two digits."""
    from posttrain.core.contracts import Task
    from posttrain.core.plugin_manager import PluginManager

    task = PluginManager().build(Task, "digits", TASK)
    rows = [
        {"prompt": problem.prompt, "chosen": problem.answer, "rejected": f"{other:02}"}
        for problem in task.problems("train", task.available("train") or 1, seed=0)
        for other in range(100)
        if f"{other:02}" != problem.answer
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finished(folder: Path) -> Learned:
    home = prepared(folder / "home")
    done = run_command("run", str(folder / "run.yaml"), "--home", str(home), "--json", timeout=900)
    assert done.code == 0, done.text[-3000:]
    return Learned(done.result)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_policys_own_pairs_raise_its_accuracy_on_every_seed(learned: list[Learned]) -> None:
    """From below 0.2 (0.07 at random) to 0.9 of the digits right, in 30 rounds of 16 prompts."""
    for run in learned:
        accuracy = run.history("verified", "online/accuracy")
        assert len(accuracy) == 30
        assert accuracy[0] < 0.2
        assert final(accuracy) >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pairs_ranked_by_a_reward_model_raise_its_score_on_every_seed(
    learned: list[Learned],
) -> None:
    """By 2 or more, in 20 rounds; what the reward model is worth is another matter."""
    for run in learned:
        score = run.history("ranked", "online/reward_mean")
        assert len(score) == 20
        assert final(score) >= score[0] + 2.0
