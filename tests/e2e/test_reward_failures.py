"""An RL stage whose reward hangs, dies and raises: it goes on, and MLflow shows what happened."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import load_dict

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

BRITTLE = '''
import os, time
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.hooks import hookimpl
from posttrain.core.types import Score

class Brittle(Reward[NoConfig]):
    """R = 0.5, on three of four first tokens; harm on the others, by the second one."""

    name = "brittle"
    Config = NoConfig

    def score(self, samples):
        print("no line of this may reach the run's own output")
        first, second = (*samples[0].response_ids, 0, 0)[:2]
        if first % 2 == 0:
            if second % 3 == 0:
                time.sleep(600)
            if second % 3 == 1:
                os._exit(1)
            raise ValueError("cannot read this")
        return [Score(0.5)]

@hookimpl
def posttrain_register():
    return [Brittle]
'''


@pytest.fixture
def brittle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers the reward through an entry point."""
    info = tmp_path / "site" / "brittle-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posttrain.plugins]\nbrittle = brittle\n")
    (tmp_path / "site" / "brittle.py").write_text(BRITTLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=":")


def config_of(folder: Path) -> Path:
    """A stage that bears failures, and after it one that does not."""
    made = tiny_config(make_tiny_model(folder / "model"))
    shared = made["stages"]["rl"] | {
        "steps": 2,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "rewards": ["accuracy", {"name": "brittle", "weight": 0.2}],
    }
    pool = {"workers": 2, "timeout_s": 0.5}
    bears = shared | {
        "inputs": {"model": "base"},
        "reward_pool": pool | {"max_failure_rate": 1.0},
    }
    stops = shared | {
        "inputs": {"model": "rl"},
        "reward_pool": pool | {"max_failure_rate": 0.05},
    }
    return write_config(folder / "run.yaml", made | {"stages": {"rl": bears, "strict": stops}})


@pytest.mark.usefixtures("brittle")
@pytest.mark.slow
def test_failures_are_metrics_and_rows_of_the_samples_table_and_too_many_stop_the_run(
    tmp_path: Path,
) -> None:
    home = prepared(tmp_path / "home")
    done = run_command("run", str(config_of(tmp_path)), "--home", str(home), timeout=550)
    assert done.code == 1, done.text
    assert "no line of this" not in done.text and "Traceback" not in done.text
    text = " ".join(done.text.split())
    assert "rewards failed on" in text and "reward_pool.max_failure_rate" in text
    assert all(f"{number}. reward 'brittle': " in text for number in (1, 2, 3))

    mlflow.set_tracking_uri(f"sqlite:///{home}/mlflow/mlflow.db")
    client = MlflowClient()
    experiments = [e.experiment_id for e in client.search_experiments()]
    run = client.search_runs(experiments, "tags.posttrain.stage = 'rl'")[0].info
    assert run.status == "FINISHED"

    def metric(name: str) -> list[float]:
        return [point.value for point in client.get_metric_history(run.run_id, name)]

    failures = metric("reward/failures")
    assert len(failures) == 2 and 0 < sum(failures) < 32
    by_status = [metric(f"reward/{kind}") for kind in ("timeouts", "crashes", "errors")]
    assert [sum(parts) for parts in zip(*by_status, strict=True)] == failures
    # A reward that failed is not a zero: the row is unscored though `accuracy` has its say.
    assert metric("reward/unscored_frac") == [count / 16 for count in failures]
    assert metric("reward/failed_frac/brittle") == [n / 16 for n in failures if n]
    assert all(rate > 0 for rate in metric("reward/pool_samples_per_s"))
    details: list[str] = []
    for step in (1, 2):
        table = load_dict(f"runs:/{run.run_id}/tables/samples/step-{step:06d}.json")
        for values in table["data"]:
            row = dict(zip(table["columns"], values, strict=True))
            failed = row["reward_status"] != "ok"
            assert (row["reward"] is None) == failed and (row["reward/brittle"] is None) == failed
            details += [row["reward_detail"]] if failed else []
    assert len(details) == sum(failures)
    assert any("brittle: ValueError: cannot read this" in detail for detail in details)
