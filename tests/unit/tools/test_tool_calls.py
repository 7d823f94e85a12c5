"""Tools as JSON schemas: prompts that offer them, calls that are answered by messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.contracts import (
    EngineSetup,
    LiveEnvironment,
    NoConfig,
    Observation,
    Opening,
    PromptGroup,
    SampledGroup,
    Task,
    Tool,
    ToolResult,
    Turn,
)
from posttrain.core.data.template import TemplateConfig, TemplateRenderer
from posttrain.core.data.tokens import ChatTokenizer, response_texts, rollout_batch
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import END, make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout import tool_use
from posttrain.core.rollout.episodes import (
    EpisodeRunner,
    episode_metrics,
    prompt_from_json,
    prompt_to_json,
)
from posttrain.core.rollout.live import LiveRunner
from posttrain.core.rollout.plays import EpisodeLimits, ValueEpisodes
from posttrain.core.rollout.turns import Turns
from posttrain.core.training.forward import forward_only
from posttrain.core.types import Completion, Message, Problem, SamplingParams, ToolCall, ToolSchema
from posttrain.pipelines.run.data_checks import check_texts
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from posttrain.plugins.environments.tool_calls import ToolCallsConfig, ToolCallsEnvironment
from posttrain.plugins.tools.calculator import CalculatorConfig, CalculatorTool
from tests.helpers.pipeline import tiny_config
from tests.helpers.rollouts import load_tiny
from tests.helpers.templates import family_tokenizer

PROBLEM = Problem("k", "6 * 7?", "42", "42")
PARAMS = SamplingParams(num_generations=1, max_tokens=400)


class Two(Tool[NoConfig]):
    """Takes two arguments."""

    name = "two"
    Config = NoConfig
    parameters = {"type": "object", "properties": {"a": {}, "b": {}}}

    def call(self, arguments: str) -> ToolResult:
        raise AssertionError

    def call_json(self, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(str(arguments["a"] + arguments["b"]))


class Note(Tool[NoConfig]):
    """Says of which types its arguments are."""

    name = "note"
    Config = NoConfig
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "free": {}},
    }

    def call(self, arguments: str) -> ToolResult:
        raise AssertionError

    def call_json(self, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(repr(dict(arguments)))


def environment(**fields: Any) -> ToolCallsEnvironment:
    made = ToolCallsEnvironment(ToolCallsConfig.model_validate(fields))
    made.setup([CalculatorTool(CalculatorConfig()), Two(NoConfig())])
    return made


def noting() -> ToolCallsEnvironment:
    made = ToolCallsEnvironment(ToolCallsConfig())
    made.setup([Note(NoConfig())])
    return made


class Script:
    """An engine that answers with given texts, turn by turn, whatever the prompt."""

    name = "script"

    def __init__(self, tokenizer: ChatTokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.prompts: list[tuple[int, ...]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        (prompt,) = prompts
        self.prompts.append(tuple(prompt))
        ids = self.tokenizer.encode_response(self.texts.pop(0))
        return [[Completion(ids, (-0.5,) * len(ids), "stop", 0, 1, "script", "1")]]


class Waits:
    """The script as an engine that takes requests one by one."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def submit(self, ids: Sequence[int], params: SamplingParams) -> Future[Completion]:
        made: Future[Completion] = Future()
        made.set_result(self.script.generate([ids], params)[0][0])
        return made


LIMITS = EpisodeLimits(1, 60.0, 10.0, 0.0, 2000)


def played(
    family: str, texts: Sequence[str], **limits: int
) -> tuple[ChatTokenizer, Script, SampledGroup]:
    chat = ChatTokenizer(family_tokenizer(family), None)
    env = noting() if family == "qwen_coder" else environment()
    runner = EpisodeRunner(env, chat, limits.get("turns", 4), limits.get("shown", 64))
    engine: Any = Script(chat, texts)
    prompt = PromptGroup(PROBLEM, runner.encode_prompt(PROBLEM))
    (group,) = runner.generate(engine, [prompt], PARAMS)
    return chat, engine, group


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_answered_by_messages_and_no_token_changes() -> None:
    said = [
        "I multiply.\n"
        + call("calculator", '{"expression": "6 * 7"}')
        + "\n"
        + call("two", '{"a": 1, "b": 2}'),
        call("nothing", "{}"),
        "It is 42.",
    ]
    chat, engine, group = played("qwen3", said)
    (found,) = group.completions
    prompt = str(chat.tokenizer.decode(list(group.prompt.prompt_ids)))
    assert '"name": "calculator"' in prompt and '"expression"' in prompt and "6 * 7?" in prompt
    for before, after in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert after[: len(before)] == before
    text = str(chat.tokenizer.decode(list(found.token_ids)))
    opening = f"{END}\n<|im_start|>assistant\n"
    assert text == (
        f"{said[0]}{END}\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n"
        f"<tool_response>\n3\n</tool_response>{opening}{said[1]}{END}\n<|im_start|>user\n"
        "<tool_response>\nerror: no such tool; the tools are calculator, two\n</tool_response>"
        f"{opening}{said[2]}{END}"
    )
    assert found.counts == {"turns": 3.0, "calls": 3.0, "failed": 1.0}
    own = [t for t, mine in zip(found.token_ids, found.sampled, strict=True) if mine]
    assert own == [token for each in said for token in chat.encode_response(each)]
    assert response_texts(found, chat).last == said[2]
    metrics = episode_metrics([group])
    assert (metrics["tools/turns"], metrics["tools/failed_frac"]) == (3, 1 / 3)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<tool_call>\n{not json", "could not be read"),
        (call("calculator", '{"other": 1}'), "expected the argument 'expression', got other"),
        (call("calculator", "{}"), "expected the argument 'expression', got none"),
        (call("calculator", '{"expression": 6}'), "\n6\n"),
        (call("calculator", '{"expression": "os"}'), "error: Name is not part of arithmetic"),
        (call("two", '{"a": 1}'), "error: the tool failed (KeyError)"),
        (call(f"a{END}b", "{}"), "no such tool"),
    ],
)
def test_a_wrong_call_gets_an_error_to_read(text: str, shown: str) -> None:
    chat, _, group = played("qwen3", [text, "done"])
    (found,) = group.completions
    answer = str(chat.tokenizer.decode(list(found.token_ids)))
    assert shown in answer and answer.endswith(f"done{END}")
    assert found.counts["failed"] == float("error" in answer)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "two", "arguments": {"a": 1, "b": 2}, "id": "x"}]'),
        ("llama3", '{"name": "two", "parameters": {"a": 1, "b": 2}}'),
    ],
)
def test_each_family_has_its_own_form(family: str, text: str) -> None:
    chat = ChatTokenizer(family_tokenizer(family), None)
    ids = [*chat.tokenizer(text, add_special_tokens=False)["input_ids"], chat.turn_end.token]
    message = chat.parse_response(ids, ())
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("two", {"a": 1, "b": 2})]
    answer = environment().step(0, Turn(text, True, message))
    assert [m.content for m in answer.messages] == ["3"]
    follows = chat.extend(answer.messages, ended=True)
    assert "3" in str(chat.tokenizer.decode(list(follows)))


XML_CALL = (
    "<tool_call>\n<function=note>\n<parameter=text>\n7\n</parameter>\n<parameter=count>\n5\n"
    "</parameter>\n<parameter=free>\ntrue\n</parameter>\n</function>\n</tool_call>"
)
TYPED = "{'text': '7', 'count': 5, 'free': True}"


def test_a_tool_gets_a_string_of_digits_as_a_string() -> None:
    texts = [XML_CALL, XML_CALL.replace("7", "null"), "done"]
    chat, _, group = played("qwen_coder", texts)
    answer = str(chat.tokenizer.decode(list(group.completions[0].token_ids)))
    assert TYPED in answer and TYPED.replace("7", "null") in answer


def test_a_tool_gets_it_too_in_an_episode_that_is_played_by_itself() -> None:
    chat = ChatTokenizer(family_tokenizer("qwen_coder"), None)
    plays = ValueEpisodes(EpisodeRunner(noting(), chat, 4, 64), LIMITS, lambda: None)
    prompt = PromptGroup(PROBLEM, plays.encode_prompt(PROBLEM))
    submitting: Any = Waits(Script(chat, [XML_CALL, "done"]))
    (found,) = asyncio.run(plays._episode(submitting, prompt, PARAMS, 0))
    text = str(chat.tokenizer.decode(list(found.token_ids)))
    assert TYPED in text


class Recorder(LiveEnvironment[NoConfig]):
    """Offers one tool and keeps what it is called with."""

    name = "recorder"
    Config = NoConfig
    got: ClassVar[list[str]] = []

    def schemas(self) -> tuple[ToolSchema, ...]:
        return (Note(NoConfig()).schema(),)

    async def reset(self, problem: Problem, seed: int) -> Opening:
        return Opening(0)

    async def step(self, state: object, turn: Turn) -> Observation:
        self.got += [repr(dict(c.arguments)) for c in turn.message.tool_calls]
        return Observation("", True, state)


def test_a_live_environment_gets_it_too() -> None:
    chat = ChatTokenizer(family_tokenizer("qwen_coder"), None)
    plays = LiveRunner(Recorder(NoConfig()), Turns(chat, 4, 64), LIMITS)
    submitting: Any = Waits(Script(chat, [XML_CALL]))
    asyncio.run(plays._episode(submitting, PromptGroup(PROBLEM, ()), PARAMS, 0))
    assert Recorder.got == [TYPED]


def test_what_a_tool_raises_is_logged_once_of_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    tool_use._reported.clear()
    played("qwen3", [call("two", '{"a": 1}'), call("two", '{"a": 2}'), "done"])
    (record,) = [r for r in caplog.records if r.name == tool_use.__name__]
    assert "`Two.call_json`, with KeyError: 'b'" in record.getMessage()


def test_a_long_result_is_cut_and_the_next_turn_still_begins() -> None:
    text = call("calculator", '{"expression": "2 ** 100"}')
    chat, _, group = played("qwen3", [text, "done"], shown=5)
    answer = str(chat.tokenizer.decode(list(group.completions[0].token_ids)))
    assert f"<tool_response>\n{str(2**100)[:5]}\n</tool_response>{END}\n" in answer


def test_calls_and_turns_have_limits() -> None:
    texts = [call("calculator", '{"expression": "1"}')] * 3
    _, _, group = played("qwen3", texts, turns=2)
    assert group.completions[0].counts["turns"] == 2
    made = environment(max_calls=1)
    message = Message("assistant", "", (ToolCall("two", {"a": 1, "b": 2}),) * 2)
    answer = made.step(0, Turn("", True, message))
    assert [m.content for m in answer.messages] == ["3", "error: no call is left of 1"]
    assert answer.counts == {"calls": 2.0, "failed": 1.0}


def test_a_model_without_tools_is_refused_before_anything_is_sampled() -> None:
    for config, works in ((TemplateConfig(), False), (TemplateConfig(tools_in_system=True), True)):
        renderer = TemplateRenderer(config)
        chat = ChatTokenizer(family_tokenizer("chatml"), None, renderer=renderer)
        runner = EpisodeRunner(environment(), chat, 4, 64)
        if works:
            prompt = str(chat.tokenizer.decode(list(runner.encode_prompt(PROBLEM))))
            assert "<tools>" in prompt and "calculator" in prompt
        else:
            with pytest.raises(DataError, match="has no tools: set `model.renderer"):
                runner.encode_prompt(PROBLEM)


def test_a_problem_s_own_messages_and_tools_reach_the_prompt() -> None:
    own = {"type": "function", "function": {"name": "mine", "parameters": {}}}
    messages = (Message("system", "S."), Message("user", "A"), Message("assistant", "B"))
    problem = replace(PROBLEM, messages=(*messages, Message("user", "C")), tools=(own,))
    chat = ChatTokenizer(family_tokenizer("qwen3"), None)
    ids = EpisodeRunner(environment(), chat, 4, 64).encode_prompt(problem)
    text = str(chat.tokenizer.decode(list(ids)))
    for part in ("S.", '"mine"', '"calculator"', f"assistant\nB{END}", f"user\nC{END}"):
        assert part in text
    call_ = Message("assistant", "", (ToolCall("f", {"a": [1]}),))
    kept = PromptGroup(replace(problem, messages=(*problem.messages, call_)), ids)
    assert prompt_from_json(prompt_to_json(kept)) == kept


def test_the_engine_s_log_probs_are_the_trainer_s_over_turns_of_messages(tmp_path: Path) -> None:
    """A random model begins a call now and then, which cannot be read."""
    folder = make_tiny_model(
        tmp_path / "m", seed=3, init_std=0.02, tokenizer=family_tokenizer("qwen3")
    )
    chat = ChatTokenizer.load(folder)
    engine = TransformersEngine(TransformersEngineConfig())
    setup = EngineSetup(
        model_dir=folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=1200,
        max_batch_size=32,
        stop_token_ids=chat.end_token_ids,
        pad_token_id=chat.pad_token_id,
        seed=0,
    )
    engine.start(setup)
    runner = EpisodeRunner(environment(), chat, 4, 64)
    prompts = [
        PromptGroup(p, runner.encode_prompt(p))
        for p in (PROBLEM, replace(PROBLEM, key="l", messages=(Message("user", "1 + 1?"),)))
    ]
    params = SamplingParams(num_generations=16, max_tokens=500, seed=3)
    groups = runner.generate(engine, prompts, params)
    several = [c for g in groups for c in g.completions if c.sampled]
    assert len(several) > 2, "some turns begin a call and end"
    batch = rollout_batch(groups, chat)
    mask = batch.mask.bool()
    model = load_tiny(folder, torch.float32)
    found = forward_only(model, batch, micro_batch_size=4, temperature=1.0)
    torch.testing.assert_close(
        found.logprobs[mask], batch.rollout_logprobs[mask], rtol=0, atol=2e-4
    )
    follows = chat.extend(
        [Message("tool", "error: the tool call could not be read")],
        runner.environment.reset(PROBLEM).tools,
        ended=True,
    )
    for completion in several:
        shown = [
            t for t, own in zip(completion.token_ids, completion.sampled, strict=True) if not own
        ]
        assert tuple(shown[:20]) == follows[:20]


def test_validate_says_that_a_model_has_no_tools(tmp_path: Path, manager: PluginManager) -> None:
    folder = make_tiny_model(tmp_path / "m")
    for renderer, works in (
        ({"name": "chat_template"}, False),
        ({"name": "chat_template", "tools_in_system": True}, True),
    ):
        values = tiny_config(folder)
        values["model"] |= {"renderer": renderer, "max_model_len": 4096}
        values["stages"]["rl"]["environment"] = {"name": "tool_calls", "tools": ["calculator"]}
        path = tmp_path / "c.yaml"
        path.write_text(yaml.safe_dump(values))
        run = resolve(load_config([path]), manager)
        task: Task[Any] = manager.build(Task, run.config.task.name, run.config.task.fields())
        if works:
            assert not check_texts(run, manager, task, tmp_path).warnings
        else:
            with pytest.raises(DataError, match=r"stages\.rl: the model's chat template has no"):
                check_texts(run, manager, task, tmp_path)
