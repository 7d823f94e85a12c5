"""What `validate` and `run` refuse before the first step, kind by kind, and how they say it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from tokenizers import AddedToken
from typer.testing import CliRunner

from posttrain.core import plugin_manager
from posttrain.core.config.loading import load_config
from posttrain.core.config.sections import ModelSection
from posttrain.core.config.spec import parse_spec
from posttrain.core.contracts import CONTRACTS
from posttrain.core.data.preference_files import doubtful, read_preference_rows
from posttrain.core.errors import ConfigError, DataError, PosttrainError, ResourceError
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.models.source import check_source
from posttrain.core.runtime.json_files import read_json_lines
from posttrain.core.store.manifests import combine_digests, tree_digests
from posttrain.core.tracking.mlflow_store import prepare_database
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.run.checks import resolve_configs
from tests.helpers.plugins import MANAGER

RL: dict[str, Any] = {  # Any: nested YAML values
    "task": {"name": "arithmetic"},
    "stages": {"rl": {"kind": "rl", "inputs": {"model": "base"}, "rewards": "accuracy"}},
}
GATED: dict[str, Any] = {
    "task": "arithmetic",
    "stages": {
        "eval": {"kind": "evaluate", "inputs": {"model": "base"}},
        "last": {"kind": "register", "inputs": {"model": "base", "evaluation": "eval"}},
    },
}


def validate(folder: Path, config: dict[str, Any], *sets: str) -> tuple[int, str]:
    """The exit code of `posttrain validate` and what it printed."""
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    options = [word for override in sets for word in ("--set", override)]
    arguments = ["validate", str(path), *options, "--home", str(folder / "home")]
    result = CliRunner().invoke(app, arguments)
    assert "unexpected" not in result.output and "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages.rl.learning_rate=1e-5", "did you mean 'optimizer.learning_rate'?"),
        ("stages.rl.lr=1e-5", "did you mean 'optimizer.learning_rate'?"),
        ("lr=1e-5", "did you mean 'stages.<stage>.optimizer.learning_rate'?"),
        ("stages.rl.max_new_tokens=9", "did you mean 'generation.max_response_length'?"),
        ("stages.rl.optimizer.steps=4", "did you mean 'stages.rl.steps'?"),
        ("stages.rl.kl.max_model_len=4", "did you mean 'model.max_model_len'?"),
        ("stages.rl.kl_coef=4", "did you mean 'kl.controller.coef'?"),
        ("stages.rl.beta=4", "did you mean 'kl.controller.coef'?"),
        ("stages.rl.model=sft", "did you mean 'inputs.model'?"),
        ("stages.rl.task=arithmetic", "; 'task' stands at the top level of the file ("),
        ("stages.rl.stepz=4", "did you mean 'steps'?"),
        ("stages.rl.rollout_correction=none", "a mapping of fields, such as {plugin: ...}, got"),
        ("stages.rl.zzz=4", "unknown field of stages.rl, got 4 (allowed: "),
        ("stages.rl.rewards=[{name: accuracy, wieght: 3}]", "did you mean 'weight'?"),
        ("stages.rl.policy_loss={name: ppo_clip, coeff: 3}", "did you mean 'coef'?"),
        ("stages.rl.environment={name: tools, max_turnz: 3}", "did you mean 'max_turns'?"),
        ("task={name: mixture, tasks: [{name: digits, wieght: 3}]}", "did you mean 'weight'?"),
        ("stages.rl.optimizer.betas=[0.9, 5]", "must be less than 1 (got 5)"),
        ("stages.rl.reward_clip=[3, 1]", "3 is not below 1"),
        ("stages.rl.policy_loss={name: clip_cov, cov_low: 3, cov_high: 1}", "is not below"),
        ("stages.rl.policy_loss={name: ppo_clip, coef: .nan}", "must be a finite number"),
        ("stages.rl.steps=true", "must be a number, not true or false"),
        ("stages.rl.advantage.eps=1", "stages.rl.advantage needs 'name'"),
        ("stages.rl.advantage=nothing", "(installed: 2"),
        ("stages.\u00b2=3", "a stage name must be"),
        ("stages.rl.rewards=[accuracy]", ""),
        ("description=2024-01-01", "the value is a date"),
        ("description=!!bool perhaps", "its tag (!!...) does not fit its text"),
        ('description="\\ud800"', "is not text"),
        ("stages.rl.generation.max_response_length=1024", "leave no room for a prompt"),
        ("evaluation.max_response_length=2000", "leave no room for a prompt"),
        ("name=" + "x" * 101, "at most 100 characters"),
        ("a" + ".b" * 2000 + "=1", "nests deeper than"),
    ],
)
def test_an_override_that_cannot_be_right_is_named(
    tmp_path: Path, override: str, says: str
) -> None:
    code, output = validate(tmp_path, RL, override)
    assert (code == 0) == (not says), output
    assert says in output
    assert not says or f"--set {override.partition('=')[0][:90]}" in output
    assert max(map(len, output.splitlines())) < 1300


def test_an_index_of_another_script_is_not_a_number(tmp_path: Path) -> None:
    config = {**RL, "stages": {"rl": {**RL["stages"]["rl"], "rewards": ["accuracy"]}}}
    for index in ("\u00b2", "\u0663", "9" * 5000, "-1"):
        code, output = validate(tmp_path, config, f"stages.rl.rewards.{index}.weight=1")
        assert code == 2 and "is a list of 1" in output


def test_the_override_behind_a_combination_is_named(tmp_path: Path) -> None:
    sets = ("stages.rl.optimizer.warmup_steps=2", "stages.rl.optimizer.warmup_rollouts=2")
    config = {**RL, "stages": {"rl": {**RL["stages"]["rl"], "optimizer": {"eps": 1e-8}}}}
    code, output = validate(tmp_path, config, *sets)
    assert code == 2
    assert "a.yaml:9 with --set stages.rl.optimizer.warmup_steps=2: stages.rl.optimizer" in output


@pytest.mark.parametrize("rewards", ["accuracy", ["accuracy", "repetition"], {"name": "accuracy"}])
def test_rewards_may_be_a_name_names_or_one_mapping(tmp_path: Path, rewards: object) -> None:
    config = {**RL, "stages": {"rl": {**RL["stages"]["rl"], "rewards": rewards}}}
    code, output = validate(tmp_path, config, "stages.rl.num_generations=4")
    assert code == 0, output


def test_model_may_be_a_directory(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "model")
    for config, sets in (({**RL, "model": str(made)}, ()), (RL, (f"model={made}",))):
        code, output = validate(tmp_path, config, *sets, "model.dtype=float32")
        assert code == 0, output
        assert f"model {made}" in output
    code, output = validate(tmp_path, {**RL, "model": str(tmp_path / "modle")})
    assert code == 4 and "did you mean 'model'?" in output


# --- what a config file may be -----------------------------------------------------------------


ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "m0: &m0 {a: 1}\n" + "".join(
    f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


def nested(depth: int) -> str:
    return f"task: arithmetic\ndescription: {'[' * depth}{']' * depth}\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (ALIASES, "the file has more than 50000 values once its aliases are expanded"),
        (MERGES, "values once its aliases"),
        (nested(100), "nests deeper than 60 levels"),
        (nested(100_000), "nests deeper than 60 levels"),
        ("a: 1\n".encode("utf-16"), "is not UTF-8 text"),
        (b"a: \xff\n", "is not UTF-8 text"),
        ("# \n" * 500_000, "is larger than 1000 kB"),
        ("a: 1\na: 2\n", "a is written twice"),
        ("a: !!python/object/apply:os.system [ls]\n", "this is not YAML"),
        ("a: !!timestamp x\n", "does not fit its text"),
        ("a: !!binary aGk=\n", "the value is of type bytes"),
        (f"a: 0x{'f' * 5000}\n", "more than 100 digits"),
        (f"a: {'1' * 5000}\n", "a value cannot be read"),
        ("? [a]\n: 1\n", "is not text"),
        ("a: &a [*a]\n", "an alias of a value that holds it"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, data: str | bytes, says: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(ConfigError) as refused:
        load_config([path])
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(yaml.safe_dump(RL).encode("utf-8-sig"))
    assert load_config([path]).config.task.name == "arithmetic"


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a named pipe": os.mkfifo,
    "a socket": put_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "it"
    IRREGULAR[kind](path)
    with pytest.raises(ConfigError, match=f"is {kind}"):
        load_config([path])
    with pytest.raises(DataError, match=f"is {kind}.* correct task.path"):
        read_json_lines(path, "task.path", "{}")


def test_values_with_a_wrong_tag_are_refused_in_a_spec() -> None:
    for value in ("!!bool perhaps", "2024-13-45", "[" * 5000):
        with pytest.raises(ConfigError, match="is not YAML"):
            parse_spec("--what-if", f"grpo,eps={value}")


def test_a_search_tool_reads_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "texts")
    with pytest.raises(DataError, match="is a named pipe"):
        MANAGER.build(CONTRACTS["tool"], "search", {"path": str(tmp_path / "texts")})


# --- names and models --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register", "promote"])
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *(("registered_name", n, "MLflow takes names") for n in ("a/b", "a:b", "a@b", ".", "")),
        ("registered_name", "x" * 300, "MLflow takes names"),
        ("alias", "latest", "MLflow keeps 'latest'"),
        ("alias", "v1", "MLflow keeps 'latest'"),
        ("alias", "a b", "pattern"),
        ("registered_name", "a b-c.d", ""),
        ("alias", "v1-good", ""),
    ],
)
def test_names_that_mlflow_refuses_at_the_end_are_refused_at_the_beginning(
    tmp_path: Path, kind: str, field: str, value: str, says: str
) -> None:
    last = {**GATED["stages"]["last"], "kind": kind, field: value}
    code, output = validate(tmp_path, {**GATED, "stages": {**GATED["stages"], "last": last}})
    assert (code, says in output) == (2 if says else 0, True), output


def test_a_registered_model_is_named_by_its_version_as_well(tmp_path: Path) -> None:
    home, model = tmp_path / "home", make_tiny_model(tmp_path / "model")
    client = MlflowClient(prepare_database(home))
    client.create_registered_model("sums")
    tags = {"digest": combine_digests(tree_digests(model)), "uri": str(model)}
    client.create_model_version("sums", str(model), tags=tags)
    check_source(ModelSection(source="models:/sums/1"))  # what `run` asks before it looks it up
    code, output = validate(tmp_path, RL, "model.source=models:/sums/1")
    assert code == 0, output
    for source in ("models:/sums/2", "models:/other/1", "models:/sums@champion"):
        code, output = validate(tmp_path, RL, f"model.source={source}")
        assert code == 4 and "there is no such model in MLflow" in output


def test_a_hub_model_that_is_not_here_is_reported_as_not_checked(tmp_path: Path) -> None:
    code, output = validate(tmp_path, {**RL, "model": "nobody/nothing"})
    assert code == 0 and "note: no copy of model 'nobody/nothing' is on this disk" in output
    assert "it was not checked" in output
    code, output = validate(tmp_path, {**RL, "model": "no body/nothing"})
    assert code == 4 and "neither a directory nor the id of a model" in output


@pytest.mark.parametrize("source", ["models:/a/b/c", "models:/a/\u00b2", "runs:/xyz", "runs:/"])
@pytest.mark.parametrize("command", [["init", "made", "--yes"], ["data", "show", "rows.jsonl"]])
def test_an_option_that_names_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    result = CliRunner().invoke(app, [*command, "--model", source])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: --model '{source}' names no r")
    assert not Path("made").exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    model = make_tiny_model(tmp_path / "model", tokenizer=tokenizer)
    check_source(ModelSection(source=str(model)))
    tokenizer.add_tokens([AddedToken("<image>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(model)
    check_source(ModelSection(source=str(model)))  # as Gemma 3: a token that no text has
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(model)
    with pytest.raises(ResourceError, match="the tokenizer has the token id 10.*embedding has 10"):
        check_source(ModelSection(source=str(model)))
    (model / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(ResourceError, match="cannot be read as JSON"):
        check_source(ModelSection(source=str(model)))


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "longrope", "original_max_position_embeddings": 64}),
        (
            "rope_parameters",
            {"full": {"rope_type": "longrope"}, "sliding": {"rope_type": "default"}},
        ),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}),
        ("rope_scaling", {"type": "su"}),
    ],
)
def test_positions_that_depend_on_the_longest_text_of_a_pass_are_refused(
    tmp_path: Path, name: str, rope: dict[str, object]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "original_max_position_embeddings": 64}
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps({**config, name: rope}))
    check_source(ModelSection(source=str(model), max_model_len=64))
    with pytest.raises(ResourceError, match="change for all .* set model.max_model_len to 64 or"):
        check_source(ModelSection(source=str(model), max_model_len=65))


def put(file: str, *place: str | int, value: object) -> Callable[[Path], object]:
    """What puts `value` at a place of a model's JSON file."""

    def change(model: Path) -> None:
        whole = json.loads((model / file).read_text())
        holder = whole
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value
        (model / file).write_text(json.dumps(whole))

    return change


def write(file: str, data: str) -> Callable[[Path], object]:
    return lambda model: (model / file).write_text(data)


TEMPLATE = "chat_template.jinja"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (write("config.json", "[" * 100_000), "cannot be read as JSON"),
        (write("config.json", "[]"), "is not a file with a JSON object"),
        (put("config.json", "num_attention_heads", value=10**30), "cannot be loaded: "),
        (
            put("config.json", "attention_dropout", value=True),
            "Field 'attention_dropout' with",
        ),
        (put("config.json", "hidden_size", value="x"), "cannot be loaded: "),
        (put("config.json", "auto_map", value={"a": "b"}), ""),
        (write("model.safetensors", ""), "cannot be loaded: SafetensorError"),
        (write("model.safetensors", "[]"), "cannot be loaded: SafetensorError"),
        (put("tokenizer.json", "added_tokens", value=3), "has no usable tokenizer: TypeError"),
        (put("tokenizer.json", "added_tokens", 1, value=["x"]), "has no usable tokenizer: "),
        (put("tokenizer.json", "post_processor", value=[[1]]), "has no usable tokenizer: "),
        (put("tokenizer.json", "truncation", value={}), "has no usable tokenizer: "),
        (put("tokenizer_config.json", "model_max_length", value=[]), "has no usable tokenizer: "),
        (write("generation_config.json", "[" * 100_000), "is not a JSON object"),
        (write(TEMPLATE, "{{ 1/0 }}"), "chat template refuses the prompt's messages"),
        (write(TEMPLATE, "{% for i in range(10**9) %}{% endfor %}"), "chat template refuses"),
        (write(TEMPLATE, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"), "recursion depth"),
    ],
)
def test_a_damaged_model_is_refused_in_a_sentence(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    model = make_tiny_model(tmp_path / "model")
    damage(model)
    stage = {"kind": "sft", "inputs": {"model": "base"}, "steps": 1}
    made = {"source": str(model), "dtype": "float32"}
    code, output = validate(tmp_path, {"task": "arithmetic", "model": made, "stages": {"a": stage}})
    assert code in ((3, 4) if says else (0,)) and says in output, output


@pytest.mark.parametrize(
    ("arguments", "damage"),
    [
        (["chat", "model", "--prompt", "a"], write("model.safetensors", "x")),
        (["export", "model", "out", "--gguf", "f16"], put("config.json", "hidden_size", value="x")),
        (["plan", "a.yaml"], put("config.json", "hidden_size", value="x")),
        (["plan", "a.yaml"], put("tokenizer.json", "model", value={"type": "None"})),
    ],
)
def test_every_command_says_which_model_is_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    damage: Callable[[Path], object],
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(make_tiny_model(tmp_path / "model"))
    Path("a.yaml").write_text(yaml.safe_dump({**RL, "model": "./model"}))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 4), result.output
    assert "unexpected" not in result.output


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "p", "answer": "\\ud800"}', "holds \\ud800, half of a surrogate pair"),
        ('{"prompt": "p", "prompt": "q"}', "the key 'prompt' is written twice"),
        ('{"prompt": 1e400}', "beyond the range of numbers"),
        ('{"prompt": NaN}', "NaN is not JSON"),
        (f'{{"prompt": {"[" * 300}{"]" * 300}}}', "nested deeper than 200"),
        (f'{{"prompt": {"[" * 90_000}{"]" * 90_000}}}', "is not JSON"),
        ("[1]", "expected a JSON object"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "\\ud83d\\ude00"}}\n{line}\n')
    with pytest.raises(DataError) as refused:
        read_json_lines(path, "task.path", "{}")
    assert says in str(refused.value) and f"{path}:2" in str(refused.value)


@pytest.mark.parametrize("margin", ["1" + "0" * 400, "true", '"2"', "-1e7", "[1]"])
def test_a_margin_is_a_number_of_sane_size(tmp_path: Path, margin: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"prompt": "p", "chosen": "a", "rejected": "b", "margin": {margin}}}\n')
    with pytest.raises(DataError, match="field 'margin' is .*: correct this line") as refused:
        read_preference_rows(path, "data", ("pairs",))
    assert len(str(refused.value)) < 400


def pair(chosen: str, rejected: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "Say it"}]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_rows_that_contradict_repeat_or_prefer_the_lower_score_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    worse = {**pair("c", "d"), "score_chosen": 1, "score_rejected": 3}
    worse["prompt"] = [{"role": "user", "content": "Say that"}]
    rows = [pair("a", "b"), pair("b", "a"), pair("a", "b"), worse]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    against, again, odd = doubtful(read_preference_rows(path, "data", ("pairs",)).rows)
    assert (
        against.startswith("1 of 4 rows say the opposite") and f"{path}:2 and {path}:1" in against
    )
    assert again.startswith("1 of 4 rows occur again") and f"{path}:3" in again
    assert odd.startswith("1 of 4 rows give the rejected answer the higher score") and ":4" in odd
    stage = {"kind": "preference", "data": str(path), "inputs": {"model": "base"}}
    code, output = validate(tmp_path, {"task": "arithmetic", "stages": {"dpo": stage}})
    assert code == 0 and f"note: stages.dpo: {against}" in output


def test_labels_that_contradict_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    rows = [{"prompt": "p", "completion": "a", "label": label} for label in (True, False, True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = doubtful(read_preference_rows(path, "data", ("labels",)).rows)
    assert [line.split(" such")[0] for line in found] == [
        "1 of 3 rows say the opposite of an earlier row about the same answers,",
        "1 of 3 rows occur again as they are,",
    ]


# --- what `run` refuses before its first step ---------------------------------------------------


def test_what_stops_a_run_before_its_first_step_is_refused_by_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model, texts = make_tiny_model(tmp_path / "model"), tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "a"}\n')
    base = {**RL, "model": {"source": str(model), "dtype": "float32"}}
    address = "http://127.0.0.1:9/v1"
    judge = f"{{name: llm_judge, base_url: '{address}', model: x, api_key_env: NO_KEY_HERE}}"
    ptx = "[{name: ppo_clip}, {name: ptx}]"
    for sets, code, says in (
        (["stages.rl.lora={targets: [q_proj, v_prj]}"], 2, "lora.targets names v_prj"),
        (["stages.rl.lora={targets: q_proj}"], 0, ""),
        (["stages.rl.optimizer.rounding=stochastic"], 2, "is for bfloat16 weights"),
        (["model.device=cuda"], 4, "torch finds no CUDA device"),
        (["limits.min_free_gb=1000000"], 4, "not enough disk space"),
        ([f"stages.rl.rewards={judge}"], 4, "'NO_KEY_HERE'"),
        ([f"stages.rl.policy_loss={ptx}", f"stages.rl.ptx.path={texts}"], 3, f"{texts}:1 needs"),
    ):
        found, output = validate(tmp_path, base, *sets)
        assert (found, says in output) == (code, True), output


def test_preferences_of_one_prompt_are_refused_by_validate(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair("a", f"b{i}")) + "\n" for i in range(4)))
    stage = {"kind": "preference", "data": str(path), "inputs": {"model": "base"}}
    code, output = validate(tmp_path, {"task": "arithmetic", "stages": {"dpo": stage}})
    assert code == 3 and "has answers to one prompt only" in output


@pytest.mark.parametrize("name", ["a\x85b", "a b", "-", "\u00e9", "x" * 300])
def test_a_reward_by_a_name_that_no_plugin_can_have_is_refused(tmp_path: Path, name: str) -> None:
    stages = {"rl": {**RL["stages"]["rl"], "rewards": name}}
    code, output = validate(tmp_path, {**RL, "stages": stages})
    assert code == 2 and "no reward named" in output and "unexpected" not in output


@pytest.mark.parametrize("target", ["x" * 5000, "no_such_layer"])
def test_layers_are_checked_of_a_model_that_the_run_converts_first(
    tmp_path: Path, target: str
) -> None:
    stage = {"kind": "sft", "inputs": {"model": "base"}, "lora": {"targets": ["q_proj", target]}}
    code, output = validate(tmp_path, {"task": "arithmetic", "stages": {"sft": stage}})
    assert code == 2 and "stages.sft.lora" in output and "q_proj" in output


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"rl": {"environment": {"name": "tools", "tools": [{"name": {"a": 1}}]}}}, "tools.0.name"),
        ({"task": {"name": "mixture", "tasks": ["digits", {"name": [1]}]}}, "task.tasks.1.name"),
        ({"task": {"name": "mixture", "tasks": ["digits", 3]}}, "task.tasks.1: must be a plugin"),
        ({"task": {"name": "mixture", "tasks": ["digits", "arithmetic"]}}, ""),
        (
            {"task": {"name": "rows", "path": "~nosuchuser/a"}},
            "this machine has no user 'nosuchuser'",
        ),
        ({"plugin_files": {"a": "~nosuchuser/a.py"}}, "a name that no user of this machine has"),
        ({"rl": {"ptx": {"path": "x" * 5000}, "policy_loss": ["ptx"]}}, "no file can have a name"),
    ],
)
def test_parts_of_plugins_and_paths_that_are_none_are_named(
    tmp_path: Path, place: dict[str, Any], says: str
) -> None:
    config = {**RL, "stages": {"rl": {**RL["stages"]["rl"], **place.get("rl", {})}}}
    code, output = validate(tmp_path, {**config, **{k: v for k, v in place.items() if k != "rl"}})
    assert (code == 0) == (not says), output
    assert says in output and "unexpected" not in output and len(output) < 1500


def test_a_home_of_nobody_is_refused_in_a_sentence() -> None:
    result = CliRunner().invoke(app, ["doctor", "--home", "~nosuchuser/x"])
    assert result.exit_code == 2
    assert "a path begins with '~' and a name that no user" in result.output


PLACES: dict[str, str] = {  # of the config, of plugins of each kind
    "task": "task",
    "reward": "stages.rl.rewards",
    "sampler": "stages.rl.sampler",
    "advantage": "stages.rl.advantage",
    "policy_loss": "stages.rl.policy_loss",
    "environment": "stages.rl.environment",
    "distillation_loss": "stages.rl.distillation",
    "optimizer": "stages.rl.optimizer",
    "kl_controller": "stages.rl.kl.controller",
    "rollout_correction": "stages.rl.rollout_correction.plugin",
    "rollout_engine": "engine",
    "renderer": "model.renderer",
}


@pytest.mark.slow
def test_no_field_of_a_plugin_takes_what_ends_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin_manager, "PluginManager", lambda: MANAGER)  # loaded once
    values = (None, "", -1, "..", [], {}, [None], [{"name": {"a": 1}}], {"a": {"b": [1]}}, ["a"])
    tried = 0
    for entry in MANAGER.entries():
        place = PLACES.get(entry.kind)
        for field, value in product(entry.cls.Config.model_fields, values if place else ()):
            component = json.dumps({"name": entry.name, field: value})
            tried += 1
            with contextlib.suppress(PosttrainError):  # anything else is a fault
                resolve_configs([RL], [f"{place}={component}"])
    assert tried > 2000
