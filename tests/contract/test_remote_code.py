"""Code in a model's or a data set's folder is never run, and nobody is asked whether to run it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.core.config.sections import ModelSection
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.estimate.shape import find_model
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.source import check_source

ROOT = Path(__file__).resolve().parents[2]
LOADERS = ("from_pretrained", "load_dataset", "pipeline", "LLM")
"""Functions and methods of libraries that load by a name or a path, wherever they are used."""
AUTO = ("from_config",)
"""Methods of the Auto classes alone; others of that name are our own."""


def sources() -> Iterator[tuple[str, str]]:
    """Python files, the Python in documentation, and snippets that we write for users."""
    for folder in ("core", "pipelines", "plugins", "docs", "infra"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "typing" not in path.parts:
                yield str(path.relative_to(ROOT)), path.read_text()
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, block in enumerate(re.findall(r"```py\w*\n(.*?)```", path.read_text(), re.S)):
            yield f"{path.relative_to(ROOT)}, block {number}", block


def loading_calls(code: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute):
            of_auto = isinstance(function.value, ast.Name) and function.value.id.startswith("Auto")
            if function.attr in LOADERS or (function.attr in AUTO and of_auto):
                yield node
        elif isinstance(function, ast.Name) and function.id in LOADERS:
            yield node


def refuses_code(call: ast.Call) -> bool:
    return any(
        keyword.arg == "trust_remote_code"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in call.keywords
    )


def test_every_call_that_loads_a_model_or_data_refuses_their_code() -> None:
    found = [(name, call) for name, code in sources() for call in loading_calls(code)]
    assert len(found) >= 12, "the loading calls were found"
    open_ = [f"{name}:{call.lineno}" for name, call in found if not refuses_code(call)]
    assert not open_, "without trust_remote_code=False"


def with_own_code(folder: Path, model_type: str) -> Path:
    """A model directory whose code would leave a file behind if it ran."""
    make_tiny_model(folder)
    (folder / "evil.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w')\n"
        "from transformers import LlamaConfig as Evil, LlamaForCausalLM as EvilModel\n"
        "from transformers import PreTrainedTokenizerFast as EvilTokenizer\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = model_type
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.EvilModel"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
    tokenizer["tokenizer_class"] = "EvilTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_model_that_needs_its_own_code_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = with_own_code(tmp_path / "evil", "evil")
    with pytest.raises(ResourceError, match=r"never runs a model's code.*choose a model"):
        check_source(ModelSection(source=str(folder)))
    assert find_model(ModelSection(source=str(folder)), tmp_path) is None
    assert not (folder / "ran").exists()


def test_a_known_model_is_loaded_without_its_own_code(tmp_path: Path) -> None:
    folder = with_own_code(tmp_path / "llama", "llama")
    check_source(ModelSection(source=str(folder)))
    assert find_model(ModelSection(source=str(folder)), tmp_path) is not None
    try:
        ChatTokenizer.load(folder)
    except ResourceError as error:
        assert "tokenizer" in str(error)
    assert not (folder / "ran").exists()


def test_nobody_is_asked_on_standard_input(tmp_path: Path) -> None:
    """A `y` that waits on standard input stays unread by every command that loads the model."""
    folder = with_own_code(tmp_path / "evil", "evil")
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{source: {folder}}}\ntask: arithmetic\n"
        "stages: {evaluate: {kind: evaluate, inputs: {model: base}}}\n"
    )
    for command in ("validate", "plan", "run"):
        done = subprocess.run(
            [*(sys.executable, "-m", "posttrain.pipelines.cli", command, str(config))]
            + ["--home", str(tmp_path / "home")],
            input="y\n" * 9,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "custom code? [y/N]" not in done.stdout + done.stderr, command
        assert not (folder / "ran").exists(), command
        assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == ResourceError.exit_code
