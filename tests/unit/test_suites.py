"""What names a suite, the intervals of its metrics, and the files with results."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.config.evaluation_stages import BenchmarkStage
from posttrain.core.config.sections import ModelSection
from posttrain.core.config.suites import parse_suite
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.evaluation import suites as module
from posttrain.core.evaluation.inspect_suite import _output, _Request
from posttrain.core.evaluation.suites import (
    SuiteMetric,
    SuiteOptions,
    SuiteResult,
    measured_mean,
    metric_values,
    read_suites,
    require_suites,
    write_suites,
)
from posttrain.core.math.intervals import wilson
from posttrain.core.store.identity import outside_digests
from posttrain.core.types import Completion, SamplingParams
from tests.helpers.benchmarks import write_benchmarks
from tests.helpers.pipeline import environment
from tests.helpers.templates import family_tokenizer


def test_suites_are_read_from_their_texts() -> None:
    assert parse_suite("lm_eval:a, b").tasks == ("a", "b")
    assert parse_suite("held_out").harness == "held_out"
    whole, one = parse_suite("inspect:x@y/sums.py"), parse_suite("inspect:x@y/sums.py@hard")
    assert (whole.file, whole.tasks) == ("x@y/sums.py", ())
    assert (one.file, one.tasks) == ("x@y/sums.py", ("hard",))


@pytest.mark.parametrize("text", ["", "lm_eval", "lm_eval:", "inspect:sums", "held_out:x", "mmlu"])
def test_another_text_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected lm_eval:TASK\[,TASK\]"):
        parse_suite(text)


def test_a_misspelt_harness_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'lm_eval'"):
        parse_suite("lm-eval:arc")


def test_what_is_missing_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", {"lm_eval": ("no_such_module", "lm-eval")})
    with pytest.raises(ResourceError, match=r"pip install 'posttrain\[eval\]'"):
        require_suites([parse_suite("lm_eval:arc")])
    write_benchmarks(tmp_path)
    with pytest.raises(ResourceError, match="did you mean 'sums.py'"):
        require_suites([parse_suite(f"inspect:{tmp_path}/sum.py")])
    require_suites([parse_suite(f"inspect:{tmp_path}/sums.py"), parse_suite("held_out")])


def test_intervals_fit_the_metric() -> None:
    right = [1.0, 0.0, 1.0, 1.0]
    assert measured_mean(right, 0.75, 0.25) == wilson(3, 4)
    low, high = measured_mean([0.0, 10.0, 20.0], 10.0, None)
    assert low is not None and high is not None and low < 0 < 20 < high
    # A perplexity is not the mean of what its samples have.
    assert measured_mean([-1.0, -3.0], 7.4, 1.0) == pytest.approx((5.44, 9.36), abs=1e-3)
    assert measured_mean([], 7.4, None) == (None, None)
    assert measured_mean([5.0], 5.0, None) == (None, None)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    metric = SuiteMetric("lm_eval", "mmlu: pro", "acc", 0.5, 0.25, 0.75, 8)
    unknown = SuiteMetric("lm_eval", "wiki", "perplexity", 7.5, None, None, 2)
    result = SuiteResult(parse_suite("lm_eval:x"), (metric, unknown), ({"sample": 1},), "lm-eval 1")
    write_suites(tmp_path, [result], SuiteOptions(limit=8), "abc")
    stored = read_suites(tmp_path)
    assert stored is not None
    assert stored.metrics == (metric, unknown) and stored.digest == "abc"
    assert metric_values(stored.metrics) == {
        "suite/lm_eval/mmlu_ pro/acc": 0.5,
        "suite_low/lm_eval/mmlu_ pro/acc": 0.25,
        "suite_high/lm_eval/mmlu_ pro/acc": 0.75,
        "suite/lm_eval/wiki/perplexity": 7.5,
    }
    (tmp_path / "suites.json").write_text("{}")
    assert read_suites(tmp_path) is None
    assert read_suites(tmp_path / "none") is None


def test_files_of_tasks_decide_the_identity_of_a_stage(tmp_path: Path) -> None:
    folder = write_benchmarks(tmp_path / "tasks")
    stage = BenchmarkStage(
        kind="benchmark",
        inputs={"model": "base"},
        suites=("lm_eval:sums", f"inspect:{folder}/sums.py"),
        tasks_dir=str(folder),
    )
    before = outside_digests(stage.outside_paths())
    installed = importlib.util.find_spec("lm_eval") is not None
    assert {"version of lm_eval", "version of inspect"} & set(before) or not installed
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    after = outside_digests(stage.outside_paths())
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"tasks_dir", "suites.1 sums.jsonl"}


def test_without_the_packages_the_command_says_how_to_install_them(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['lm_eval'] = sys.modules['inspect_ai'] = None\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.pipelines.cli", "eval", "m", "--suite", "lm_eval:arc"],
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 4
    assert "pip install 'posttrain[eval]'" in done.stderr and "Traceback" not in done.stderr


def test_a_column_that_the_data_have_not_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: posttrain[eval]")
    from posttrain.core.evaluation.lm_eval_suite import run_lm_eval
    from posttrain.core.models.device import ModelRuntime

    folder = write_benchmarks(tmp_path)
    task = folder / "capitals.yaml"
    task.write_text(task.read_text().replace("{{", "{{no_such_"))
    with pytest.raises(ConfigError, match="'no_such_.*' is undefined.*correct the task's YAML"):
        run_lm_eval(
            parse_suite("lm_eval:capitals"),
            tmp_path / "no model is read before",
            ModelRuntime.from_config(ModelSection()),
            SuiteOptions(tasks_dir=folder),
            lambda: None,
            lambda what, done, total: None,
        )


def test_calls_are_read_by_the_schemas_of_the_tools_that_a_task_offers() -> None:
    pytest.importorskip("inspect_ai", reason="inspect-ai is not installed: posttrain[eval]")
    chat = ChatTokenizer(family_tokenizer("qwen_coder"), None)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    ids = chat.encode_text(text, special=True)
    said = Completion(ids, (0.0,) * len(ids), "stop", 0, 0, "none", "0")
    for kind, value in (("string", "5"), ("integer", 5)):
        parameters = {"type": "object", "properties": {"a": {"type": kind}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        made = _output(chat, _Request((1,), SamplingParams(), tools, said))
        assert made.message.tool_calls[0].arguments == {"a": value}
