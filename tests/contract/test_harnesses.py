"""lm-eval and inspect-ai measure a tiny model in this process, without a network."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow import MlflowClient

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.suites import Suite, parse_suite
from posttrain.core.errors import ConfigError, DataError, RunError
from posttrain.core.evaluation.suites import SuiteOptions, SuiteResult, read_suites
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.run_record import RunRecorder, find_run
from posttrain.core.tracking.mlflow_store import prepare_database
from posttrain.core.types import Message, SamplingParams
from posttrain.pipelines.run.model_evaluation import evaluate_model
from posttrain.pipelines.run.model_reference import find_model
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.inputs import load_tokenizer
from posttrain.pipelines.stage.suites import Measurement
from tests.helpers.benchmarks import CHOICES, write_benchmarks

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'posttrain[eval]'")
pytest.importorskip(
    "inspect_ai", reason="inspect-ai is not installed: pip install 'posttrain[eval]'"
)

EVAL = "evaluate"


class Bench:
    """A tiny model with an engine, and what measures it."""

    def __init__(self, folder: Path, manager: PluginManager) -> None:
        self.model = make_tiny_model(folder / "model", init_std=0.3)
        self.tasks = write_benchmarks(folder / "tasks")
        self.manager = manager
        self.config = RunConfig.model_validate(
            {
                "engine": "transformers",
                "model": {"source": str(self.model), "dtype": "float32", "max_model_len": 256},
                "stages": {EVAL: {"kind": EVAL, "inputs": {"model": "base"}}},
            }
        )
        self.runtime = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
        self.engines = EnginePool(self.config, manager, self.runtime)
        self.done: list[tuple[str, int, int | None]] = []

    def measure(
        self,
        text: str,
        check: Callable[[], None] = lambda: None,
        **options: Any,  # Any: fields of SuiteOptions
    ) -> SuiteResult:
        measurement = Measurement(
            model=self.model,
            run=self.config,
            manager=self.manager,
            runtime=self.runtime,
            engines=self.engines,
            options=SuiteOptions(**{"tasks_dir": self.tasks, "limit": 6, **options}),
            check=check,
            progress=lambda *now: self.done.append(now),
        )
        (result,) = measurement.measure([self.suite(text)])
        return result

    def suite(self, text: str) -> Suite:
        return parse_suite(text.replace("FILE", str(self.tasks / "sums.py")))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, manager: PluginManager) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"), manager)
    yield made
    made.engines.close()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The addresses of other machines that were called; a call fails."""
    called: list[object] = []
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:  # Any: as of the family
        if self.family == socket.AF_UNIX or str(address[0]).startswith(
            ("127.", "::1", "localhost")
        ):
            return connect(self, address)
        called.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return called


def test_choices_of_lm_eval_are_those_that_the_engine_finds_likeliest(
    bench: Bench, reached: list[object]
) -> None:
    result = bench.measure("lm_eval:capitals", chat=False)
    (accuracy,) = result.metrics
    tokenizer = load_tokenizer(bench.model, bench.config, bench.manager)
    right = []
    with bench.engines.lease(bench.model) as engine:
        for number in range(6):
            question = f"Q: {('France', 'Italy', 'Norway')[number % 3]} {number}? A:"
            likelihoods = []
            for choice in CHOICES:
                ids = tokenizer.encode_text(f"{question} {choice}", special=False)
                start = len(tokenizer.encode_text(question, special=False))
                (logprobs,) = engine.score([ids])
                likelihoods.append(sum(logprobs[start - 1 :]))
            right.append(max(range(3), key=likelihoods.__getitem__) == number % 3)
            answers = result.rows[number]["answers"]
            told = [float(answer.strip("()").split(",")[0]) for answer in answers]
            assert told == pytest.approx(likelihoods, abs=1e-3)
    assert accuracy.value == sum(right) / 6 and accuracy.num_samples == 6
    assert accuracy.low is not None and accuracy.low < accuracy.value or accuracy.value == 0
    assert not reached


def test_answers_of_lm_eval_are_greedy_and_the_engine_s_own(bench: Bench) -> None:
    result = bench.measure("lm_eval:sums")
    tokenizer = load_tokenizer(bench.model, bench.config, bench.manager)
    with bench.engines.lease(bench.model) as engine:
        prompts = [tokenizer.encode_chat([Message("user", f"{i % 5}+{i % 3}=")]) for i in range(6)]
        params = SamplingParams(max_tokens=4, temperature=0.0)
        found = [
            tokenizer.decode_response(c.token_ids) for (c,) in engine.generate(prompts, params)
        ]
    assert [row["answers"] for row in result.rows] == [[text.split("\n")[0]] for text in found]
    assert ("answers", 6, 6) in bench.done


def test_a_group_of_tasks_has_a_line_for_each(bench: Bench) -> None:
    metrics = bench.measure("lm_eval:both").metrics
    assert {"capitals", "sums"} <= {metric.task for metric in metrics}
    bounds = [b for m in metrics if "acc" in m.metric for b in (m.low, m.high) if b is not None]
    assert bounds and all(0 <= bound <= 1 for bound in bounds)


def test_tasks_of_inspect_are_asked_through_the_engine(bench: Bench, reached: list[object]) -> None:
    result = bench.measure("inspect:FILE")
    found = {metric.task: metric for metric in result.metrics}
    assert set(found) == {"sums", "echo"}
    assert (found["echo"].value, found["echo"].num_samples) == (1.0, 6)
    assert found["echo"].low is not None and found["echo"].low > 0.5
    free = {row["prompt"]: row["answers"] for row in result.rows if row["task"] == "sums"}
    by_lm_eval = bench.measure("lm_eval:sums")
    # The same chat, the same weights, two harnesses: the same words, up to lm-eval's line end.
    for row in by_lm_eval.rows:
        question = row["prompt"].split("user\n")[1].split("<|im_end|>")[0]
        if question in free:
            assert free[question][0].split("\n")[0].strip() == row["answers"][0].strip()
    assert not reached


def test_names_that_do_not_exist_are_corrected(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"no task 'ehco'; did you mean 'echo'\? .*sums"):
        bench.measure("inspect:FILE@ehco")


def test_what_is_wrong_with_a_benchmark_is_a_sentence(bench: Bench, tmp_path: Path) -> None:
    write_benchmarks(tmp_path)
    (tmp_path / "capitals.jsonl").unlink()
    with pytest.raises(DataError, match="its data cannot be read .*next to the task's YAML"):
        bench.measure("lm_eval:capitals", tasks_dir=tmp_path)
    (tmp_path / "odd.yaml").write_text("task: [odd\n")
    with pytest.raises(ConfigError, match=r"odd\.yaml is not YAML"):
        bench.measure("lm_eval:odd", tasks_dir=tmp_path)
    (tmp_path / "odd.yaml").unlink()
    (tmp_path / "sums.py").write_text("import inspect_ai\n")
    with pytest.raises(ConfigError, match="no function with inspect-ai's decorator @task"):
        bench.measure(f"inspect:{tmp_path}/sums.py")
    broken = "@task\ndef sums():\n    raise ValueError('a mistake')\n"
    (tmp_path / "broken.py").write_text(f"from inspect_ai import task\n{broken}")
    with pytest.raises(RunError, match="failed with ValueError: a mistake; correct the file"):
        bench.measure(f"inspect:{tmp_path}/broken.py")


def test_results_are_kept_and_recorded_below_the_run(bench: Bench, tmp_path: Path) -> None:
    uri = prepare_database(tmp_path)
    client = MlflowClient(uri, uri)
    experiment = client.create_experiment("tiny", (tmp_path / "artifacts").as_uri())
    parent = client.create_run(experiment).info.run_id
    config = {
        "name": "tiny",
        **bench.config.model_dump(mode="json", include={"engine", "model"}),
        "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
        "evaluation": {"num_problems": 4, "max_response_length": 4, "num_samples": 2},
        "stages": {EVAL: {"kind": EVAL, "inputs": {"model": "base"}}},
    }
    RunRecorder(tmp_path, parent, "tiny", "2026-01-01", yaml.safe_dump(config))
    found = find_model(str(bench.model), tmp_path)
    of_run = replace(found, run=find_run(tmp_path, parent), stage="sft")
    suites = [bench.suite("inspect:FILE@echo"), bench.suite("held_out")]
    options = SuiteOptions(limit=3)
    evaluated = evaluate_model(of_run, suites, options, tmp_path, lambda *now: None)
    assert evaluated.note == ""
    stored = read_suites(evaluated.folder)
    assert stored is not None and stored.digest == found.digest
    assert [(m.suite, m.metric, m.num_samples) for m in stored.metrics] == [
        ("inspect", "accuracy", 3),
        ("held_out", "accuracy", 3),
        ("held_out", "sampled_accuracy", 3),
    ]
    (child,) = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert child.info.run_id == evaluated.mlflow_run_id and child.info.status == "FINISHED"
    assert child.data.metrics["suite/inspect/echo/accuracy"] == 1.0
    assert child.data.metrics["suite_low/inspect/echo/accuracy"] < 1.0
    assert child.data.tags["posttrain.evaluated_stage"] == "sft"
    assert child.data.tags["posttrain.suite.inspect"].startswith("inspect-ai ")
    files = {file.path for file in client.list_artifacts(child.info.run_id)}
    assert {"suites.json", "rows.jsonl", "tables"} <= files


def test_a_model_of_no_run_has_no_held_out_problems(bench: Bench, tmp_path: Path) -> None:
    found = find_model(str(bench.model), tmp_path)
    with pytest.raises(ConfigError, match="was made by no run of this home"):
        evaluate_model(found, [bench.suite("held_out")], SuiteOptions(), tmp_path, lambda *n: None)


def test_a_stop_ends_a_suite_with_its_own_error(bench: Bench) -> None:
    def stop() -> None:
        raise RunError("asked to stop")

    for text in ("lm_eval:sums", "inspect:FILE@echo"):
        with pytest.raises(RunError, match="^asked to stop$"):
            bench.measure(text, check=stop)
