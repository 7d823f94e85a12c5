"""Suites of lm-eval (EleutherAI's Language Model Evaluation Harness), in this process.

The model is lm-eval's own `hf` around the weights as we load them, so that its scores are those of
`lm_eval --model hf` on the same folder: likelihoods, rolling likelihoods and greedy generation are
computed by the harness. Tasks are its own, or YAML files in a folder of the user's, whose relative
`data_files` are looked for next to the YAML.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posttrain.core.config.suites import Suite
from posttrain.core.errors import ConfigError, DataError, ResourceError, nearest, shortlist
from posttrain.core.evaluation.offline import without_network
from posttrain.core.evaluation.suites import (
    SHOWN,
    Progress,
    SuiteMetric,
    SuiteOptions,
    SuiteResult,
    measured_mean,
)

if TYPE_CHECKING:
    from posttrain.core.models.device import ModelRuntime

BATCHES = 4
"""Batches between two looks at whether to stop."""
BOOTSTRAP = 1000
"""Resamplings for the standard error of a metric that is not a mean."""
LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")


def run_lm_eval(
    suite: Suite,
    model_dir: Path,
    runtime: ModelRuntime,
    options: SuiteOptions,
    check: Callable[[], None],
    progress: Progress,
) -> SuiteResult:
    """Measure the tasks of `suite`; `check` raises when asked to stop.

    Raises `ConfigError` for a task that does not exist or cannot be loaded, `DataError` for one
    without its data, `ResourceError` for one that needs something that is not allowed here.
    """
    from jinja2 import TemplateError
    from lm_eval.evaluator import simple_evaluate

    _quiet()
    manager = _manager(suite, options)
    tasks = _load(suite, options, manager)
    model = _model(model_dir, runtime, options, check, progress)
    chat = options.chat
    if chat is None:
        chat = model.tokenizer.chat_template is not None
    try:
        found = simple_evaluate(
            model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.fewshot,
            limit=options.limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            system_instruction=options.system_prompt if chat else None,
            bootstrap_iters=BOOTSTRAP,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except (ValueError, TemplateError) as error:
        raise ConfigError(f"suite '{suite.text}': {_first_line(error)}") from error
    finally:
        model.forget()
    assert found is not None, "there is one process"
    return SuiteResult(suite, _metrics(found), _rows(found), f"lm-eval {version('lm-eval')}")


def _quiet() -> None:
    """Leave one display: ours, and start no programs that report what is installed.

    lm-eval has no switch for the bar over a task's documents, nor for that report.
    """
    import datasets
    import lm_eval.api.task
    import lm_eval.evaluator
    from tqdm import tqdm

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    lm_eval.evaluator.add_env_info = lambda storage: None
    lm_eval.evaluator.get_git_commit_hash = lambda: None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- tasks ---------------------------------------------------------------------------------------


def _load(suite: Suite, options: SuiteOptions, manager: Any) -> list[Any]:  # Any: lm-eval's types
    """The tasks and groups that the suite names, with their data."""
    unknown = [name for name in suite.tasks if name not in manager.task_index]
    if unknown:
        where = f" (in {options.tasks_dir} and lm-eval itself)" if options.tasks_dir else ""
        raise ConfigError(
            f"suite '{suite.text}': lm-eval has no task '{unknown[0]}'"
            f"{nearest(unknown[0], manager.all_tasks)} (known{where}: "
            f"{shortlist(unknown[0], manager.all_tasks)}); a folder with YAML files of your own is "
            "named by --tasks-dir, or tasks_dir of a stage"
        )
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    try:
        with without_network(not options.download):
            return _whole(manager.load(list(suite.tasks)))
    except (OSError, DatasetsError) as error:
        raise DataError(
            f"suite '{suite.text}': its data cannot be read ({_first_line(error)}): tasks of "
            "lm-eval's own fetch them from a hub, which --download (download: true of a stage) "
            "allows; data_files of your own are looked for next to the task's YAML"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, TemplateError) as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        if isinstance(error, KeyError) and error.args == (None,):
            what = "it names a metric, an aggregation or a filter that lm-eval does not have"
        raise ConfigError(
            f"suite '{suite.text}': lm-eval cannot load it ({what}): correct the task's YAML"
        ) from error


def _manager(suite: Suite, options: SuiteOptions) -> Any:  # Any: lm-eval's TaskManager
    """The tasks of the user's folder; with lm-eval's own, which take seconds, where needed."""
    from lm_eval.tasks import TaskManager

    if options.tasks_dir is None:
        return TaskManager()
    if not options.tasks_dir.is_dir():
        raise ResourceError(f"the folder of tasks {options.tasks_dir} does not exist")
    _check_yaml(options.tasks_dir)
    folder = str(options.tasks_dir)
    manager = TaskManager(include_path=folder, include_defaults=False)
    if any(name not in manager.task_index for name in suite.tasks):
        manager = TaskManager(include_path=folder)
    _read_next_to_yaml(manager)
    return manager


def _check_yaml(folder: Path) -> None:
    """Raise `ConfigError` for a file that is not YAML, which lm-eval would pass over in silence."""
    for path in sorted(folder.rglob("*.yaml")):
        try:
            # Only its form: lm-eval's own tags, such as !function, are not loaded.
            for _ in yaml.parse(path.read_text("utf-8"), Loader=yaml.SafeLoader):
                pass
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            what = " ".join(str(error).split())
            raise ConfigError(f"{path} is not YAML: {what}") from error


def _read_next_to_yaml(manager: Any) -> None:  # Any: as above
    """Let relative `data_files` be relative to the YAML file instead of the working directory."""
    factory = manager._factory
    load = factory._load_full_config

    def loaded(entry: Any, overrides: Any) -> Any:  # Any: lm-eval's own types
        config = load(entry, overrides)
        files = (config.get("dataset_kwargs") or {}).get("data_files")
        if entry.yaml_path is None or not files or config.get("dataset_path") not in LOCAL_FORMATS:
            return config
        placed = _placed(files, Path(entry.yaml_path).parent)
        return {**config, "dataset_kwargs": {**config["dataset_kwargs"], "data_files": placed}}

    factory._load_full_config = loaded


def _placed(files: Any, folder: Path) -> Any:  # Any: a name, a list, or a mapping of either
    if isinstance(files, Mapping):
        return {split: _placed(names, folder) for split, names in files.items()}
    if isinstance(files, list | tuple):
        return [_placed(name, folder) for name in files]
    return files if "://" in str(files) else str(folder / str(files))


def _whole(tasks: Any) -> list[Any]:  # Any: lm-eval's Task and Group
    """Groups that are in no other, and the tasks that are in none."""
    inside = {name for children in tasks["group_map"].values() for name in children}
    tops = [group for name, group in tasks["groups"].items() if name not in inside]
    return tops + [task for name, task in tasks["tasks"].items() if name not in inside]


# --- the model -----------------------------------------------------------------------------------


def _model(
    model_dir: Path,
    runtime: ModelRuntime,
    options: SuiteOptions,
    check: Callable[[], None],
    progress: Progress,
) -> Any:  # Any: a class of lm-eval's, which is imported late
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.core.models.loading import LOADING, from_folder

    class Measured(HFLM):  # type: ignore[misc]
        """lm-eval's `hf`, a part of the requests at a time."""

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return self._in_parts(super().loglikelihood, requests, "likelihoods")

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return self._in_parts(super().loglikelihood_rolling, requests, "rolling likelihoods")

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return self._in_parts(super().generate_until, requests, "answers")

        @property
        def max_gen_toks(self) -> int:
            return options.max_tokens

        def _in_parts(self, compute: Any, requests: Any, what: str) -> list[Any]:
            found: list[Any] = []
            size = BATCHES * options.batch_size
            for start in range(0, len(requests), size):
                check()
                found += compute(requests[start : start + size], disable_tqdm=True)
                progress(what, len(found), len(requests))
            return found

        def forget(self) -> None:
            self._model = None
            gc.collect()

    with LOADING:
        loaded = from_folder(
            AutoModelForCausalLM, model_dir, runtime.dtype, runtime.plain_attention
        )
    tokenizer = AutoTokenizer.from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    )
    made = loaded.to(runtime.device).eval().requires_grad_(False)
    return Measured(made, tokenizer=tokenizer, batch_size=options.batch_size)


# --- results -------------------------------------------------------------------------------------


def _metrics(found: Mapping[str, Any]) -> tuple[SuiteMetric, ...]:
    """Every number of every task, groups last, each name once."""
    by_task = {**found["results"], **found.get("groups", {})}
    shares = _shares(found.get("samples", {}))
    metrics = []
    for task, values in by_task.items():
        samples = found.get("samples", {}).get(task, ())
        for key, value in values.items():
            name, comma, selected = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{name}_stderr,{selected}")
            own = [row for row in samples if row["filter"] == selected and name in row]
            numbers = [float(row[name]) for row in own if isinstance(row[name], int | float)]
            low, high = measured_mean(
                numbers, float(value), error if isinstance(error, int | float) else None
            )
            if not own and name in shares and low is not None and high is not None:
                low, high = max(0.0, low), min(1.0, high)
            metrics.append(
                SuiteMetric(
                    "lm_eval",
                    task,
                    name if selected == "none" else f"{name}.{selected}",
                    float(value),
                    low,
                    high,
                    len(own) or _samples_of(values, key),
                )
            )
    return tuple(metrics)


def _shares(samples: Mapping[str, Any]) -> set[str]:
    """The metrics whose values are from 0 to 1 in every sample of every task."""
    rows = [row for of_task in samples.values() for row in of_task]
    names = {name for row in rows for name in row["metrics"]}
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {
        name
        for name, found in values.items()
        if all(isinstance(value, int | float) and 0 <= value <= 1 for value in found)
    }


def _samples_of(values: Mapping[str, Any], key: str) -> int:
    """How many samples a group's number is of."""
    counts = values.get("sample_count") or {}
    return int(counts.get(key) or values.get("sample_len") or 0)


def _rows(found: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """One row for each sample and filter: what was asked and answered, what it scored."""
    return tuple(
        {
            "suite": "lm_eval",
            "task": task,
            "sample": row["doc_id"],
            "filter": row["filter"],
            "prompt": _text(row["arguments"][0][0]),
            "target": _text(row["target"]),
            "answers": [_text(answer) for answer in row["filtered_resps"]],
            **{n: float(row[n]) for n in row["metrics"] if isinstance(row[n], int | float)},
        }
        for task, rows in found.get("samples", {}).items()
        for row in rows
    )


def _text(value: object) -> object:
    return value[:SHOWN] if isinstance(value, str) else str(value)[:SHOWN]
