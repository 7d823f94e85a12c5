"""`posttrain` from Python: the examples, the notebooks, the code of the page, and the process that
they run in.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import runpy
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import posttrain
from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.made_runs import made_run
from tests.helpers.pipeline import environment, journal_lines, write_config

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
ANSI = re.compile(r"\x1b\[")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("api") / "model")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes and files of examples are made here; no server of the developer's is used."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def reports_there(_own_folder: None, prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this process report to the tests' server, as where PREFECT_API_URL was set before
    Prefect was imported; the tests below it have servers of their own."""
    import prefect.context
    from prefect.settings import PREFECT_API_URL, get_current_settings

    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    there = prefect.context.SettingsContext(
        profile=prefect.context.get_settings_context().profile,
        settings=get_current_settings().copy_with_update(updates={PREFECT_API_URL: prefect_url}),
    )
    monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", there)


def tiny(model: Path, **sft: Any) -> dict[str, Any]:
    """A config of one short stage."""
    return {
        "name": "api",
        "model": {"source": model, "dtype": "float32", "max_model_len": 128},
        "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
        "evaluation": {"num_problems": 4, "max_response_length": 4, "num_samples": 1},
        "limits": {"num_threads": 1},
        "stages": {
            "sft": {"kind": "sft", "inputs": {"model": "base"}, "steps": 3, "batch_size": 4, **sft}
        },
    }


@contextmanager
def process_stays_as_it_is() -> Iterator[None]:
    """Signal handlers, environment, threads of torch, processes."""
    import torch

    from posttrain.core.tracking.mlflow_store import HTTP_SETTINGS

    once = {*HTTP_SETTINGS, "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "GOMP_SPINCOUNT"}

    def state() -> dict[str, object]:
        return {
            "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
            "watchdog": signal.getsignal(signal.SIGUSR1),
            "environment": {k: v for k, v in os.environ.items() if k not in once},
            "torch threads": torch.get_num_threads(),
            "processes": {child.pid for child in psutil.Process().children()},
        }

    before = state()
    yield
    assert state() == before


RESULTS = {
    "run_and_read.py": r"run \w+ 'run-and-read': completed(.|\n)*sft/loss",
    "own_reward.py": r"reward/mean(.|\n)*prompt",
    "dpo_from_pairs.py": r"ok: 1 stages \(dpo\)(.|\n)*loss/preference",
    "sft_on_chats.py": r"Name: sft/loss",
    "compare_two.py": r"what differs between the configs(.|\n)*stages.rl.algorithm|policy_loss",
}
LONG_EXAMPLES = ("own_reward.py", "compare_two.py", "dpo_from_pairs.py", "run_and_read.py")


@pytest.mark.usefixtures("reports_there")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG_EXAMPLES else [], id=name)
        for name in RESULTS
    ],
)
def test_an_example_runs(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(model)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert re.search(RESULTS[name], capsys.readouterr().out)


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {*RESULTS, "grpo_loop.py"}
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in text for path in [*EXAMPLES.glob("*.py"), *NOTEBOOKS])


def test_the_loop_is_short_and_learns(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "grpo_loop.py"
    assert len(script.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [script.name, str(model), "12"])
    runpy.run_path(str(script), run_name="__main__")
    rewards = [float(found) for found in re.findall(r"reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 12
    assert rewards[-1] > rewards[0] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_progress(
    path: Path, model: Path, prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbformat")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient")
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "outputs are committed"
    (chosen,) = [cell for cell in code if cell.source.startswith("MODEL = ")]
    chosen.source = f"MODEL = {str(model)!r}"
    for name, value in {**environment(), "PREFECT_API_URL": prefect_url}.items():
        monkeypatch.setenv(name, value)
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    client.execute(cwd=str(Path.cwd()))
    shown = json.dumps([cell.outputs for cell in code])
    assert "ran in" in shown and "<table>" in shown  # the progress, as HTML
    assert not ANSI.search("".join(o.get("text", "") for c in code for o in c.outputs))
    assert "\\u001b" not in shown


@pytest.mark.usefixtures("reports_there")
def test_the_code_of_the_page_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one program, as a reader would type it."""
    config = tiny(model)
    config["model"]["source"] = str(model)
    config["stages"]["evaluate"] = {"kind": "evaluate", "inputs": {"model": "sft"}}
    write_config(Path("my.yaml"), config)
    text = (REPOSITORY / "docs" / "python-api.md").read_text("utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "docs/python-api.md", "exec"), names)  # noqa: S102 - our own page
    out = capsys.readouterr().out
    assert "stages.sft.stepz: unknown field" in out
    assert names["run"].status == "completed"
    assert names["plan"].todo == ()


def flow_runs(home: Path) -> list[str]:
    """Names of the flow runs that Prefect's database in a home has."""
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        return [name for (name,) in database.execute("select name from flow_run")]


@pytest.mark.slow
def test_two_homes_in_one_process_below_a_running_event_loop(model: Path) -> None:
    """As in Jupyter, and each run is in its own home's Prefect and MLflow."""

    async def cell() -> list[posttrain.Run]:
        made = []
        for home in ("one", "two"):
            thread = threading.current_thread()
            made.append(posttrain.run(tiny(model), home=home, progress=False))
            assert threading.current_thread() is thread
        return made

    posttrain.validate(tiny(model))  # torch and Prefect are loaded before the process is looked at
    with process_stays_as_it_is():
        runs = asyncio.run(cell())
    for run, home in zip(runs, ("one", "two"), strict=True):
        assert run.status == "completed" and run.home == Path(home).resolve()
        assert len(flow_runs(run.home)) == 1
        back = posttrain.load(run.id[:12], home=home)
        assert back.status == "completed"
        assert back.links == run.links and len(run.links) == 2
        assert list(back.metrics("sft").index) == [0, 1, 2, 3]
    # As a DataLoader's workers: what Prefect left would make it end with exit code 1.
    forked = multiprocessing.get_context("fork").Process(target=os.getpid)
    forked.start()
    forked.join(60)
    assert forked.exitcode == 0


def test_an_interrupt_stops_the_run_and_the_same_call_continues(model: Path) -> None:
    home = Path("home").resolve()
    config = tiny(model, steps=400, checkpoint_every=1)

    def interrupt() -> None:
        while not any('"step":2' in line for line in journal_lines(home, "sft")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with process_stays_as_it_is(), pytest.raises(KeyboardInterrupt):
        posttrain.run(config, home=home, progress=False)
    (record,) = (home / "runs").glob("*/run.json")
    assert posttrain.load(record.parent.name, home=home).status == "stopped"


def test_a_run_below_an_event_loop_stops_when_it_is_asked_to_and_is_waited_for() -> None:
    from posttrain.pipelines.api.host import call

    stop, waiting = threading.Event(), threading.Event()
    ended: list[bool] = []

    def run() -> None:
        waiting.set()
        asked = stop.wait(30)
        time.sleep(0.5)  # to the next safe point
        ended.append(asked)

    def interrupt() -> None:
        waiting.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        # asyncio has a handler of its own in the main thread; a kernel has Python's.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        call(run, stop)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert ended == [True]


def test_an_interrupt_that_does_not_wake_the_waiting_thread_is_noticed_too() -> None:
    """As one that comes just before the wait: here another thread receives the signal."""
    from posttrain.pipelines.api.host import call

    stop, waiting = threading.Event(), threading.Event()
    ended: list[bool] = []

    def run() -> None:
        waiting.set()
        ended.append(stop.wait(20))

    def interrupt() -> None:
        waiting.wait(30)
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def cell() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            call(run, stop)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert ended == [True], "the run was asked to stop; it did not end its wait"


def test_mistakes_are_errors_with_the_sentences_of_the_command(model: Path) -> None:
    with pytest.raises(posttrain.ConfigError, match="the config: stages.sft.stepz: unknown field"):
        posttrain.validate(tiny(model, stepz=3))
    with pytest.raises(posttrain.ConfigError, match="a config is a path, .* got int"):
        posttrain.run(3)  # type: ignore[arg-type]
    with pytest.raises(posttrain.ConfigError, match=r"got the text 'seed=1'; write \['seed=1'\]"):
        posttrain.plan(tiny(model), overrides="seed=1")
    with pytest.raises(posttrain.ConfigError, match="no run 'abc'"):
        posttrain.load("abc", home="empty")
    with pytest.raises(posttrain.ConfigError, match="name two or more"):
        posttrain.compare("abc")
    assert not Path("empty").exists() and not Path(".posttrain").exists()


def test_a_run_says_what_it_does_not_have(model: Path) -> None:
    run = posttrain.run(tiny(model), home="home", progress=False)
    with pytest.raises(posttrain.ConfigError, match="no stage 'sfd'; did you mean 'sft'"):
        run.metrics("sfd")
    with pytest.raises(posttrain.ConfigError, match="stage 'sft' keeps no samples"):
        run.samples("sft")
    assert run.model().get_input_embeddings().weight.shape[1] == 64


def test_the_status_is_read_when_it_is_asked_for(model: Path, tmp_path: Path) -> None:
    from posttrain.core.tracking.mlflow_store import connect, prepare_database

    client = connect(prepare_database(tmp_path))
    begun = client.create_run(client.create_experiment("api")).info.run_id
    made_run(tmp_path, model, begun)
    run = posttrain.load(begun, home=tmp_path)
    assert run.status == "running"
    client.set_terminated(begun, "FAILED")
    assert run.status == "failed"
