"""Suites of inspect-ai: the tasks in a Python file of the user's, which is run in this process.

inspect-ai talks to the model through `EngineModel`: messages and tools go through the model's own
renderer, responses come from the rollout engine, and calls of tools are read back by the renderer,
as in training. There is no server and no network.
"""

from __future__ import annotations

import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.config.suites import Suite
from posttrain.core.contracts import RolloutEngine
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, PosttrainError, RunError, nearest
from posttrain.core.evaluation.offline import without_network
from posttrain.core.evaluation.suites import (
    SHOWN,
    Progress,
    SuiteMetric,
    SuiteOptions,
    SuiteResult,
    measured_mean,
)
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Message, SamplingParams, ToolCall, ToolSchema

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog
    from inspect_ai.model import ModelOutput

LINGER_S = 0.05
"""How long the first request of a batch waits for others."""
SPREADS = ("stderr", "std", "var", "bootstrap_stderr")
"""Metrics that say how sure another one is."""


def run_inspect(
    suite: Suite,
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    max_model_len: int,
    options: SuiteOptions,
    check: Callable[[], None],
    progress: Progress,
) -> SuiteResult:
    """Measure all tasks of the suite's file, or the one that it names.

    Raises `ConfigError` for a file without such a task, and `RunError` where a task fails.
    """
    import inspect_ai
    from inspect_ai.model import GenerateConfig, get_model, modelapi

    modelapi("posttrain")(_engine_model(engine, tokenizer, max_model_len, options, check, progress))
    config = GenerateConfig(max_connections=options.batch_size)
    model = get_model("posttrain/model", config=config, memoize=False)
    with without_network(not options.download), tempfile.TemporaryDirectory() as logs:
        try:
            found = inspect_ai.eval(
                _task_names(suite),
                model=model,
                limit=options.limit,
                log_dir=logs,
                display="none",
                max_samples=2 * options.batch_size,
                acp_server=False,
                ctl_server=False,
                fail_on_error=True,
            )
        except PosttrainError:
            raise
        except Exception as error:  # the file is the user's own code
            raise RunError(
                f"suite '{suite.text}' failed with {type(error).__name__}: {error}; correct the "
                "file (--debug shows the traceback)"
            ) from error
        check()  # inspect-ai ends a cancelled evaluation as if it were done
        model.api.raise_own()
        for log in found:
            _require_success(suite, log)
        # Inside, since samples are read from the logs when they are asked for.
        metrics = tuple(metric for log in found for metric in _metrics(log))
        rows = tuple(row for log in found for row in _rows(log))
    return SuiteResult(suite, metrics, rows, f"inspect-ai {version('inspect-ai')}")


def _require_success(suite: Suite, log: EvalLog) -> None:
    if log.status == "cancelled":
        raise KeyboardInterrupt
    if log.status != "success":
        reason = log.error.message if log.error is not None else log.status
        raise RunError(f"suite '{suite.text}', task '{_name(log)}' failed: {reason}")


def _task_names(suite: Suite) -> list[str]:
    """The tasks to run, as inspect-ai names them: FILE@TASK."""
    from inspect_ai import list_tasks

    file = Path(suite.file).expanduser().resolve()
    names = [task.name for task in list_tasks(file.name, root_dir=file.parent)]
    if not names:
        raise ConfigError(
            f"suite '{suite.text}': {file} has no function with inspect-ai's decorator @task"
        )
    for wanted in suite.tasks:
        if wanted not in names:
            raise ConfigError(
                f"suite '{suite.text}': {file.name} has no task '{wanted}'"
                f"{nearest(wanted, names)} (tasks: {names})"
            )
    return [f"{file}@{name}" for name in suite.tasks or names]


# --- the model -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Request:
    """One response that is asked for, and the response once it is there."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tools: Sequence[ToolSchema]
    completion: Completion | None = None


def _engine_model(
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    max_model_len: int,
    options: SuiteOptions,
    check: Callable[[], None],
    progress: Progress,
) -> Any:  # Any: a class of inspect-ai's, which is imported late
    import anyio
    from inspect_ai.model import GenerateConfig, ModelAPI, ModelOutput

    class EngineModel(ModelAPI):  # type: ignore[misc]
        """The rollout engine as a model of inspect-ai's; requests that wait together are one batch.

        Temperature 0 unless the task sets one. A prompt that is asked again, as in a second epoch,
        draws with another seed.
        """

        def __init__(
            self,
            model_name: str,
            base_url: str | None = None,
            api_key: str | None = None,
            config: GenerateConfig = GenerateConfig(),  # noqa: B008 - inspect-ai's own signature
        ) -> None:
            super().__init__(model_name, base_url, api_key, [], config)
            self.waiting: list[_Request] = []
            self.lock = anyio.Lock()
            self.asked: Counter[tuple[int, ...]] = Counter()
            self.done = 0
            self.stopped: PosttrainError | None = None

        async def generate(
            self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig
        ) -> ModelOutput:
            schemas = [_schema(tool) for tool in tools]
            prompt = tokenizer.encode_chat([_message(message) for message in input], schemas)
            room = max_model_len - len(prompt)
            if room < 1:
                return ModelOutput.from_content("posttrain", "", stop_reason="model_length")
            request = _Request(prompt, self._params(prompt, room, config), schemas)
            self.waiting.append(request)
            async with self.lock:
                while request.completion is None:
                    await anyio.sleep(LINGER_S)
                    await anyio.to_thread.run_sync(self._sample, request.params)
            return _output(tokenizer, request)

        def _params(
            self, prompt: tuple[int, ...], room: int, config: GenerateConfig
        ) -> SamplingParams:
            temperature = config.temperature or 0.0
            self.asked[prompt] += temperature > 0
            seed = options.seed if config.seed is None else config.seed
            return SamplingParams(
                max_tokens=min(config.max_tokens or options.max_tokens, room),
                temperature=temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=config.top_k or 0,
                seed=derive_seed(seed, f"suite {self.asked[prompt]}") % 2**31,
                stop_strings=tuple(config.stop_seqs or ()),
            )

        def _sample(self, params: SamplingParams) -> None:
            """Answer the requests that wait with these settings, `batch_size` of them at most."""
            fitting = [r for r in self.waiting if r.params == params][: options.batch_size]
            try:
                check()
                found = engine.generate([request.prompt for request in fitting], params)
            except PosttrainError as error:
                self.stopped = error  # inspect-ai would make it the error of a sample
                raise
            for request, (completion,) in zip(fitting, found, strict=True):
                request.completion = completion
                self.waiting.remove(request)
            self.done += len(fitting)
            progress("answers", self.done, None)

        def raise_own(self) -> None:
            """Raise what ended the evaluation, if it was ours."""
            if self.stopped is not None:
                raise self.stopped

        def max_connections(self) -> int:
            return options.batch_size

        def should_retry(self, ex: BaseException) -> bool:
            return False

    return EngineModel


def _message(message: Any) -> Message:  # Any: inspect-ai's ChatMessage
    """One of inspect-ai's messages as ours; pictures and sounds are left out."""
    calls = tuple(
        ToolCall(call.function, call.arguments, call.id)
        for call in getattr(message, "tool_calls", None) or ()
    )
    thought = "" if isinstance(message.content, str) else _reasoning(message.content)
    return Message(
        role=message.role,
        content=message.text,
        tool_calls=calls,
        reasoning=thought,
        name=getattr(message, "function", None) or "",
        tool_call_id=getattr(message, "tool_call_id", None) or "",
    )


def _reasoning(content: Sequence[Any]) -> str:  # Any: inspect-ai's Content
    return "\n".join(part.reasoning for part in content if part.type == "reasoning")


def _schema(tool: Any) -> Mapping[str, Any]:  # Any: inspect-ai's ToolInfo, JSON
    values = tool.model_dump(exclude_none=True, include={"name", "description", "parameters"})
    return {"type": "function", "function": values}


def _output(tokenizer: ChatTokenizer, request: _Request) -> ModelOutput:
    """The response as inspect-ai takes it: its text without the stop string, its calls of tools."""
    from inspect_ai.model import ChatMessageAssistant, ContentReasoning, ContentText, ModelUsage
    from inspect_ai.model import ModelOutput as Output
    from inspect_ai.tool import ToolCall as Call

    completion = request.completion
    assert completion is not None
    said = tokenizer.parse_response(completion.token_ids, request.tools)
    text = "\n".join([said.content, *said.malformed]) if said.malformed else said.content
    if completion.finish_reason == "stop_string":
        ends = [text.find(stop) for stop in request.params.stop_strings if stop in text]
        text = text[: min(ends, default=len(text))]
    calls = [
        Call(call.id or uuid.uuid4().hex, call.name, dict(call.arguments))
        for call in said.tool_calls
    ]
    content = [ContentReasoning(reasoning=said.reasoning), ContentText(text=text)]
    made = Output.from_message(
        ChatMessageAssistant(
            content=content if said.reasoning else text,
            tool_calls=calls or None,
            model="posttrain",
            source="generate",
        ),
        "max_tokens" if tokenizer.is_truncated(completion) else "tool_calls" if calls else "stop",
    )
    read, written = len(request.prompt), len(completion.token_ids)
    made.usage = ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)
    return made


# --- results -------------------------------------------------------------------------------------


def _name(log: EvalLog) -> str:
    return str(log.eval.task).rpartition("/")[2]


def _metrics(log: EvalLog) -> list[SuiteMetric]:
    """Every number of the task; the interval is over samples, epochs of one reduced first."""
    from inspect_ai.scorer import value_to_float

    as_number: Callable[[Any], float] = value_to_float()
    assert log.results is not None, "the evaluation succeeded"
    metrics = []
    several = len(log.results.scores) > 1
    for score in log.results.scores:
        reduced = [
            row.value
            for reduction in log.reductions or ()
            if reduction.scorer == score.name and reduction.reducer == score.reducer
            for row in reduction.samples
        ]
        numbers = [as_number(v) for v in reduced if isinstance(v, str | int | float)]
        error = next((m.value for n, m in score.metrics.items() if n in SPREADS[:1]), None)
        for name, metric in score.metrics.items():
            if name in SPREADS:
                continue
            value = float(metric.value)
            low, high = measured_mean(numbers, value, None if error is None else float(error))
            shown = f"{score.name}.{name}" if several else name
            count = score.scored_samples or len(reduced)
            metrics.append(SuiteMetric("inspect", _name(log), shown, value, low, high, count))
    return metrics


def _rows(log: EvalLog) -> list[dict[str, Any]]:  # Any: JSON
    return [
        {
            "suite": "inspect",
            "task": _name(log),
            "sample": sample.id,
            "epoch": sample.epoch,
            "prompt": _text(sample.input),
            "target": _text(sample.target),
            "answers": [_text(sample.output.completion)],
            **{name: score.value for name, score in (sample.scores or {}).items()},
        }
        for sample in log.samples or ()
    ]


def _text(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(str(getattr(item, "text", item)) for item in value)[:SHOWN]
    return str(value)[:SHOWN]
