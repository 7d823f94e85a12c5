"""What a user does after a run: chat, serve, export, go on from the model. One tiny run for all."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from posttrain.core.kit.tiny import make_tiny_bpe_tokenizer, make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.cli.main import app as program
from posttrain.pipelines.run.model_reference import find_model
from posttrain.pipelines.using.serving import build_app
from posttrain.pipelines.using.speaker import Speaker
from tests.helpers.hub import running_hub
from tests.helpers.pipeline import COMMAND, environment, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")


class Done(NamedTuple):
    """A finished command."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Trained:
    """A finished run: its home, id, config and base model, and what it printed."""

    home: Path
    run: str
    config: dict[str, Any]
    model: Path
    text: str

    def command(self, *words: str, stdin: str | None = None) -> Done:
        """A command of this home, in this process."""
        found = CliRunner().invoke(program, [*words, "--home", str(self.home)], input=stdin)
        return Done(found.exit_code, found.stdout, found.stderr)

    def program(self, *words: str, **variables: str) -> Done:
        """A command of this home in a process of its own, with `variables` in its environment."""
        command = [*COMMAND, *words, "--home", str(self.home)]
        env = environment() | variables
        found = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
        return Done(found.returncode, found.stdout, found.stderr)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An `sft` stage with an adapter between two evaluations."""
    folder = tmp_path_factory.mktemp("after")
    model = make_tiny_model(folder / "tiny", tokenizer=make_tiny_bpe_tokenizer(), heads=4)
    config = tiny_config(model)
    stages = config["stages"]
    sft = stages["sft"] | {"lora": {"rank": 4}}
    evaluate = {"kind": "evaluate", "inputs": {"model": "sft", "baseline": "evaluate_base"}}
    config["stages"] = {
        "evaluate_base": stages["evaluate_base"],
        "sft": sft,
        "evaluate": evaluate,
    }
    config["model"]["system_prompt"] = "Add."
    home = folder / "home"
    path = write_config(folder / "run.yaml", config)
    done = run_command("run", str(path), "--home", str(home), "--plain")
    assert done.code == 0, done.text
    (run,) = [path.parent.name for path in (home / "runs").glob("*/run.json")]
    return Trained(home, run, config, model, done.text)


def test_a_run_ends_with_the_next_commands(trained: Trained) -> None:
    end = trained.text[trained.text.index("next:") :]
    for words in ("chat", "export", "ui"):
        assert f"posttrain {words}" in end
    assert trained.run[:12] in end and f"--home {trained.home}" in end


def test_chat_answers_what_is_piped_in_and_continues(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    words = ("chat", f"{trained.run[:8]}/sft", "--temperature", "0", "--max-tokens", "6", "--json")
    done = trained.command(*words, stdin=f"1 + 2 = ?\nand 3?\n/save {file}\n")
    assert done.code == 0, done.stderr
    (said,) = json.loads(done.stdout.splitlines()[-1])["models"]
    assert (said["run_id"], said["stage"]) == (trained.run, "sft")
    assert [m["role"] for m in said["messages"]] == ["user", "assistant"] * 2
    first, second = said["answers"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"]
    assert json.loads(file.read_text())["messages"] == said["messages"]
    # The same as transformers says to the same tokens, with the system prompt of the run.
    folder = next(trained.home.glob("artifacts/sft-*/model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 = ?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert ids.shape[1] == first["prompt_tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
    assert tokenizer.decode(made, skip_special_tokens=True) == first["text"]


def test_base_and_trained_answer_one_prompt(trained: Trained) -> None:
    words = ("chat", trained.run, "--compare", "base", "--prompt", "1 + 2 = ?", "--max-tokens", "6")
    done = trained.command(*words)
    assert done.code == 0, done.stderr
    assert f"[{trained.run[:8]}/sft]" in done.stdout and "[base]" in done.stdout
    again = trained.command(*words)
    assert again.stdout == done.stdout, "the same seed gives the same answers"
    hot = trained.command("chat", trained.run, "--prompt", "1", "--temperature", "nan")
    assert hot.code == 2 and "--temperature" in hot.stderr
    wrong = trained.command("chat", trained.run[:8] + "/evaluate", "--prompt", "1")
    assert wrong.code == 2 and "made no model" in wrong.stderr


def test_a_run_whose_config_cannot_be_read_is_reported(trained: Trained, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(trained.home, home, symlinks=True)
    config = home / "runs" / trained.run / "config.yaml"
    config.write_text(config.read_text() + "\nof_a_plugin: 1\n")
    other = replace(trained, home=home)
    done = other.command("chat", trained.run, "--prompt", "1", "--max-tokens", "2")
    assert done.code == 0, done.stderr
    assert "its system prompt and renderer are not used" in done.stderr


def test_export_is_a_folder_that_transformers_loads_with_a_card(
    trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    dry = trained.command("export", trained.run, str(out), "--hub", "me/tiny", "--dry-run")
    assert dry.code == 0 and "would upload them to me/tiny, private" in dry.stdout
    assert not out.exists()
    done = trained.command("export", trained.run, str(out), "--license", "mit")
    assert done.code == 0, done.stderr
    stored = next(trained.home.glob("artifacts/sft-*/model"))
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = AutoModelForCausalLM.from_pretrained(stored)(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(ids).logits, wanted)
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "mit" and front["library_name"] == "transformers"
    for text in ("| evaluate |", "over evaluate", "sha256 of the model", "stages.sft.lora"):
        assert text in card
    assert str(trained.home.parent) not in card, "paths of this machine stay here"
    again = trained.command("export", trained.run, str(out))
    assert again.code == 2 and "is there already" in again.stderr
    assert not list(tmp_path.glob(".partial*"))


def test_export_of_the_adapter_and_of_gguf(trained: Trained, tmp_path: Path) -> None:
    done = trained.command("export", trained.run, str(tmp_path / "adapter"), "--adapter")
    assert done.code == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(trained.model)
    ids = torch.tensor([[5, 6, 7, 8]])
    merged = AutoModelForCausalLM.from_pretrained(next(trained.home.glob("artifacts/sft-*/model")))
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-4
    words = ("export", str(tmp_path / "adapter"), str(tmp_path / "again"))
    done = trained.command(*words)
    assert done.code == 0, done.stderr
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert (again(ids).logits - merged(ids).logits).abs().max() < 1e-4, "merged into its base"
    done = trained.command("export", trained.run, str(tmp_path / "g"), "--gguf", "f16")
    assert done.code == 0, done.stderr
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "g", gguf_file="tiny-sft-f16.gguf", dtype=torch.float32
    )
    assert (read(ids).logits - merged(ids).logits).abs().max() < 0.05


def test_a_hub_gets_what_the_folder_holds(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "to-hub"
    words = ("export", trained.run, str(out), "--hub", "me/tiny")
    none = {"HF_TOKEN": "", "HF_HOME": str(tmp_path / "nobody")}
    refused = trained.program(*words, **none)
    assert refused.code == 4 and "set HF_TOKEN" in refused.stderr and not out.exists()
    with running_hub() as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_" + "s" * 30}
        done = trained.program(*words, **online)
    assert done.code == 0, done.stderr
    assert hub.created == [{"name": "tiny", "organization": "me", "visibility": "private"}]
    assert hub.files == {p.name: p.read_bytes() for p in out.iterdir()}
    assert hub.tokens == {"Bearer hf_" + "s" * 30}
    assert "hf_s" not in done.stdout + done.stderr
    public = ("export", trained.run, str(tmp_path / "public"), "--hub", "me/tiny")
    with running_hub() as hub:
        hub.private = False
        online["HF_ENDPOINT"] = hub.url
        refused = trained.program(*public, **online)
        assert refused.code == 2 and "public repository" in refused.stderr, refused.stderr
        assert not hub.files


@pytest.mark.slow
def test_another_run_begins_with_the_stage(trained: Trained, tmp_path: Path) -> None:
    config = trained.config | {"name": "more"}
    config["model"] = config["model"] | {"source": f"{trained.run[:8]}/sft"}
    config["stages"] = {"sft": trained.config["stages"]["sft"]}
    path = write_config(tmp_path / "more.yaml", config)
    checked = trained.command("validate", str(path))
    assert checked.code == 0, checked.stderr
    done = trained.program("run", str(path), "--json")
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    blamed = trained.command("blame", result["run_id"], "--json")
    past = json.loads(blamed.stdout.splitlines()[-1])["past"]
    assert [item["stage"] for item in past] == ["sft", "sft", ""], "back to the first run's base"
    assert past[1]["run_id"] == trained.run


@contextmanager
def served(trained: Trained, *words: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A server of the run's model by the built-in engine."""
    (port,) = free_ports(1)
    command = [*COMMAND, "serve-model", trained.run, "--engine", "builtin", "--name", "tiny"]
    command += ["--port", str(port), "--home", str(trained.home), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("serving"):
                break
        else:
            raise AssertionError(said)
        assert "python -m vllm.entrypoints.openai.api_server" in said
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_server_speaks_openais_protocol(trained: Trained) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "1 + 2 = ?"}]}
    ask |= {"max_tokens": 6, "temperature": 0}
    with served(trained, "--api-key", "secret-of-mine") as (client, process):
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret-of-mine"
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny"]
        whole = client.post("/v1/chat/completions", json=ask).json()
        said = whole["choices"][0]["message"]["content"]
        assert whole["usage"]["completion_tokens"] <= 6
        stream = ask | {"stream": True, "stream_options": {"include_usage": True}}
        parts = chunks(client.post("/v1/chat/completions", json=stream))
        deltas = [c["delta"].get("content", "") for p in parts for c in p["choices"]]
        assert "".join(deltas) == said and parts[-1]["usage"] == whole["usage"]
        two = client.post("/v1/chat/completions", json=ask | {"n": 2, "temperature": 1}).json()
        assert [choice["index"] for choice in two["choices"]] == [0, 1]
        plain = {"model": "tiny", "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 3, "logprobs": 0}
        texts = client.post("/v1/completions", json=plain).json()
        assert [c["index"] for c in texts["choices"]] == [0, 1]
        assert all(1 <= len(c["logprobs"]["tokens"]) <= 3 for c in texts["choices"])
        stop = client.post("/v1/completions", json=plain | {"prompt": "a", "stop": "\n"})
        assert stop.status_code == 200 and "\n" not in stop.json()["choices"][0]["text"]
        for wrong, status, says in (
            ({"model": "other"}, 404, "this server has 'tiny'"),
            ({"messages": []}, 400, "non-empty list of messages"),
            ({"temperature": -1}, 400, "temperature"),
            ({"response_format": {"type": "json_object"}}, 400, "does not constrain"),
            ({"min_p": 0.1}, 400, "top_p and top_k alone"),
            ({"best_of": 2}, 400, "use n"),
            ({"messages": [{"role": "user", "content": "1" * 900}]}, 400, "shorten it"),
        ):
            answer = client.post("/v1/chat/completions", json=ask | wrong)
            assert answer.status_code == status and says in answer.json()["error"]["message"]
        neutral = {"best_of": 1, "min_p": 0, "repetition_penalty": 1.0, "user": "me"}
        same = client.post("/v1/chat/completions", json=ask | neutral).json()
        assert same["choices"][0]["message"]["content"] == said
        assert str(trained.home) not in client.get("/v1/models").text
        long = ask | {"max_tokens": 400, "temperature": 100, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=long) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)  # in the middle of an answer
        assert process.wait(timeout=30) == 130


def test_tools_reach_the_template(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "with-tools"
    assert trained.command("export", trained.run, str(out)).code == 0
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}{# <tool_call> #}"
    )
    (out / "chat_template.jinja").write_text(template)
    tool = {"type": "function", "function": {"name": "sum", "description": "adds"}}
    ask = {"messages": [{"role": "user", "content": "1 + 2 = ?"}], "tools": [tool], "max_tokens": 2}
    speaker = Speaker(find_model(str(out), trained.home), PluginManager())
    app = build_app(speaker, "tiny", None)

    async def tokens_read(more: dict[str, Any]) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answer = await client.post("/v1/chat/completions", json=ask | more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    name = len(speaker.tokenizer.encode_text("sum ", special=False))
    with_tool, without = (asyncio.run(tokens_read(m)) for m in ({}, {"tool_choice": "none"}))
    assert with_tool == without + name


def test_another_host_needs_a_key(trained: Trained) -> None:
    done = trained.command("serve-model", trained.run, "--host", "0.0.0.0")
    assert done.code == 2 and "POSTTRAIN_API_KEY" in done.stderr
