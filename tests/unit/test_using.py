"""A model in use: answers that are stopped, how a turn goes on, requests, commands, the card."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from copy import copy
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rich.console import Console
from typer.testing import CliRunner

import posttrain
from posttrain.core.data.problem_sets import repeat_problems
from posttrain.core.data.template import TemplateConfig, TemplateRenderer
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, DataError, ResourceError
from posttrain.core.kit.tiny import make_tiny_bpe_tokenizer, make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.artifacts import Artifact
from posttrain.core.types import SamplingParams
from posttrain.pipelines.cli.main import app as program
from posttrain.pipelines.run.model_reference import find_model
from posttrain.pipelines.using.chat import Chat, Conversation
from posttrain.pipelines.using.export import ExportOptions, export, upload
from posttrain.pipelines.using.model_card import gather, model_card
from posttrain.pipelines.using.serving import MOST_BYTES, build_app
from posttrain.pipelines.using.speaker import Cancelled, Speaker, unread_config
from tests.helpers.hub import running_hub
from tests.helpers.made_runs import RUN, made_run
from tests.helpers.pipeline import tiny_config


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    folder = tmp_path_factory.mktemp("speaker")
    make_tiny_model(folder / "tiny", tokenizer=make_tiny_bpe_tokenizer())
    return Speaker(find_model(str(folder / "tiny"), folder / "home"), PluginManager())


def test_a_turn_that_a_stop_string_ended_is_closed_before_the_next(speaker: Speaker) -> None:
    chat = Conversation("tiny", speaker)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    whole = chat.ask("1 + 2 = ?", params, lambda text: None)
    chat.reset()
    stops = tuple(c for c in whole.text if c.isprintable())[:1]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, stop_strings=stops)
    first = chat.ask("1 + 2 = ?", params, lambda text: None)
    assert first.finish == "stop" and first.token_ids[-1] not in speaker.tokenizer.end_token_ids
    second = chat.ask("and 3?", params, lambda text: None)
    written = chat._tokens[first.prompt_tokens + len(first.token_ids) : second.prompt_tokens]
    assert written[0] == speaker.tokenizer.turn_end.token


def test_answers_that_are_stopped_are_returned(speaker: Speaker) -> None:
    def stop(number: int, piece: str) -> None:
        raise Cancelled

    params = SamplingParams(num_generations=3, max_tokens=40, stop_strings=("never said",))
    prompt = speaker.tokenizer.encode_text("1 + 2", special=False)
    answers = speaker.complete(prompt, params, stop)
    assert [answer.finish for answer in answers] == ["cancelled"] * 3


def test_calls_are_read_by_the_schemas_of_the_tools_that_were_offered(speaker: Speaker) -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>"
    chat = ChatTokenizer(
        speaker.tokenizer.tokenizer,
        None,
        renderer=TemplateRenderer(TemplateConfig(tool_calls="glm")),
    )
    other = copy(speaker)
    other.tokenizer = chat
    schema = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    tools = [{"type": "function", "function": schema}]
    ids = chat.encode_text(text, special=False)
    for offered, value in ((tools, "5"), ([], 5)):
        _, said = other._read(ids, (), offered)
        assert said.tool_calls[0].arguments == {"a": value}


def test_a_temperature_of_almost_nothing_is_greedy(speaker: Speaker) -> None:
    prompt = speaker.tokenizer.encode_text("1 + 2", special=False)
    (cold,) = speaker.complete(prompt, SamplingParams(max_tokens=8, temperature=1e-40))
    (greedy,) = speaker.complete(prompt, SamplingParams(max_tokens=8, temperature=0.0))
    assert cold.token_ids == greedy.token_ids


def test_a_server_that_stops_answers_with_what_it_has(speaker: Speaker) -> None:
    app = build_app(speaker, "tiny", None)
    app.state.served.stopping.set()
    ask = {"messages": [{"role": "user", "content": "1"}], "n": 3, "logprobs": True}
    answer = asyncio.run(_post(app, "/v1/chat/completions", json=ask))
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 3


async def _post(app: FastAPI, path: str, **request: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://here"
    ) as client:
        return await client.post(path, **request)


def test_the_command_by_hand_keeps_the_key(speaker: Speaker) -> None:
    words = ["serve-model", str(speaker.found.path), "--host", "0.0.0.0", "--dry-run"]
    done = CliRunner().invoke(program, [*words, "--api-key", "secret-of-mine"])
    assert done.exit_code == 0, done.output
    assert "by hand, with vLLM: VLLM_API_KEY=... python -m vllm" in done.stdout
    assert "secret-of-mine" not in done.output


def test_the_renderer_of_the_run_may_be_a_file_of_its_own(speaker: Speaker, tmp_path: Path) -> None:
    config = tiny_config(speaker.found.path) | {"plugin_files": {"own.py": "own.py"}}
    config["model"]["renderer"] = {"name": "own.py:Own"}
    folder = made_run(tmp_path, speaker.found.path, config=config).folder
    (folder / "own.py").write_text(
        '"""Own."""\nfrom posttrain.core.data.template import TemplateRenderer\n\n\n'
        'class Own(TemplateRenderer):\n    """Own."""\n\n    name = "own"\n'
    )
    found = Speaker(find_model(f"{RUN}/sft", tmp_path), PluginManager())
    assert type(found.tokenizer.renderer).__name__ == "Own"


def test_a_card_names_no_folder_of_this_machine(speaker: Speaker, tmp_path: Path) -> None:
    home = tmp_path / "home"
    made_run(home, speaker.found.path)
    broken = home / "runs" / "broken" / "run.json"
    broken.parent.mkdir()
    broken.write_text("{}")
    facts = gather(find_model(f"{RUN}/sft", home), home, home / "artifacts")
    assert any(str(broken) in note for note in facts.notes)
    card = model_card(facts, "tiny", "model", None).replace("\\", "")
    assert "run.json is not the record that a run wrote" in card
    assert str(tmp_path) not in card and str(speaker.found.path.parent) not in card


def test_a_request_of_unknown_size_is_refused(speaker: Speaker) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(MOST_BYTES // 2**20 + 1):
            yield b" " * 2**20

    app = build_app(speaker, "tiny", None)
    answer = asyncio.run(_post(app, "/v1/completions", content=parts()))
    assert answer.status_code == 411 and "Content-Length" in answer.json()["error"]["message"]


def test_requests_as_clients_may_send_them(speaker: Speaker) -> None:
    app = build_app(speaker, "tiny", None)
    nulls = {"temperature": None, "n": None, "stop": None, "seed": None, "stream": None}
    ask = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2}
    answer = asyncio.run(_post(app, "/v1/chat/completions", json=ask | nulls))
    assert answer.status_code == 200, answer.text
    half = b'{"prompt": "\\ud83d", "max_tokens": 1}'
    headers = {"Content-Type": "application/json"}
    answer = asyncio.run(_post(app, "/v1/completions", content=half, headers=headers))
    assert answer.status_code == 400 and "half of a character" in answer.text


def test_an_adapter_that_names_itself_is_a_sentence(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ResourceError, match="names itself as its base model"):
        find_model(str(tmp_path), tmp_path / "home")


def test_a_turn_that_one_model_has_no_room_for_is_kept_by_none(
    speaker: Speaker, tmp_path: Path
) -> None:
    small = Speaker(speaker.found, PluginManager(), max_model_len=8)
    both = [Conversation("large", speaker), Conversation("small", small)]
    with (tmp_path / "shown").open("w") as file:
        chat = Chat(both, SamplingParams(max_tokens=2), Console(file=file), side_by_side=False)
        with pytest.raises(DataError, match="context 8"):
            chat.ask("1 + 2 = ?")
    assert [(one.messages, one.answers, one._tokens) for one in both] == [([], [], [])] * 2


def test_a_config_that_cannot_be_read_is_told(speaker: Speaker, tmp_path: Path) -> None:
    folder = made_run(tmp_path, speaker.found.path).folder
    found = find_model(f"{RUN}/sft", tmp_path)
    assert unread_config(found) == ""
    config = folder / "config.yaml"
    for changed in (config.read_text() + "seed: 7\n", "name: 1\nno_such_field: 2\n"):
        config.write_text(changed)
        note = unread_config(found)
        assert "system prompt and renderer are not used" in note and "was changed" in note
        assert any(
            "was changed" in each for each in gather(found, tmp_path, tmp_path / "artifacts").notes
        )


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_temperature_that_is_no_number_is_refused(speaker: Speaker, value: str) -> None:
    words = ["chat", str(speaker.found.path), "--prompt", "1", "--temperature", value]
    done = CliRunner().invoke(program, words)
    assert done.exit_code != 0 and "--temperature" in done.output + str(done.exception)


def test_sampling_fields_are_taken_at_their_defaults_alone(speaker: Speaker) -> None:
    app = build_app(speaker, "tiny", None)
    ask = {"prompt": "1", "max_tokens": 1}
    plain = {"best_of": 1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": []}
    answer = asyncio.run(_post(app, "/v1/completions", json=ask | plain))
    assert answer.status_code == 200, answer.text
    for name, value in (("best_of", 2), ("min_p", 0.1), ("repetition_penalty", 1.1)):
        answer = asyncio.run(_post(app, "/v1/completions", json=ask | {name: value}))
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def test_the_list_of_models_names_no_folder(speaker: Speaker) -> None:
    async def models() -> str:
        transport = httpx.ASGITransport(build_app(speaker, "tiny", None))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get("/v1/models")).text

    assert str(speaker.found.path.parent) not in asyncio.run(models())


def test_files_put_into_the_folder_meanwhile_are_kept(speaker: Speaker, tmp_path: Path) -> None:
    facts = gather(speaker.found, tmp_path / "home", tmp_path / "store")
    out = tmp_path / "out"
    out.mkdir()
    export(speaker.found, facts, ExportOptions(out, "tiny"))  # an empty folder is taken
    with pytest.raises(ConfigError, match="got files"):
        export(speaker.found, facts, ExportOptions(out, "other"))
    assert "other" not in (out / "README.md").read_text()


def test_nothing_private_goes_to_a_public_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.txt").write_text("text")
    with running_hub() as hub:
        hub.private = False
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 30)
        with pytest.raises(ConfigError, match="--public"):
            upload(tmp_path, "me/tiny", private=True)
    assert hub.files == {}


def test_an_empty_dataset_is_a_sentence_that_names_the_stage() -> None:
    with pytest.raises(DataError, match="stage 'rl'.*no problems"):
        repeat_problems([], 3, 0, "rl")


@pytest.mark.parametrize("part", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_folder_is_not_exported(speaker: Speaker, tmp_path: Path, part: str) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(speaker.found.path, damaged)
    (damaged / part).write_bytes((damaged / part).read_bytes()[:-10])
    for more in ([], ["--dry-run"], ["--gguf", "f16"]):
        words = ["export", str(damaged), str(out), "--home", str(tmp_path / "home"), *more]
        done = CliRunner().invoke(program, words)
        assert done.exit_code == 4, done.output
        assert done.stderr.startswith("error: ") and str(damaged) in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize("part", ["model.safetensors", "tokenizer.json"])
def test_the_python_api_refuses_a_damaged_store_in_a_sentence(
    speaker: Speaker, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(speaker.found.path, damaged)
    (damaged / part).write_bytes((damaged / part).read_bytes()[:-10])
    made = Artifact("model", str(damaged), "0" * 64, "sft")
    monkeypatch.setattr(posttrain.Run, "_model", lambda run, stage: made)
    run = object.__new__(posttrain.Run)
    with pytest.raises(ResourceError, match=f"{damaged}"):
        run.model() if part == "model.safetensors" else run.tokenizer()
