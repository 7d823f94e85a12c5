"""What importing costs, which way imports go, and that every folder with code is packaged."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from posttrain.core.config.sections import ModelSection
from posttrain.core.models.source import TINY_ID, obtain
from posttrain.core.runtime.config_model import ConfigModel

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "mlflow", "prefect", "transformers", "math_verify", "datasets", "aiohttp")


MODEL_CODE = (
    "transformers.modeling_utils",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "matplotlib",
)


def loaded_heavy(code: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the heavy packages a fresh interpreter holds after `code`."""
    program = f"import sys\n{code}\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [name for name in heavy if f"'{name}'" in done.stdout.splitlines()[-1]]


@pytest.mark.parametrize("module", ["schema", "loading", "resolve", "dag", "positions", "presets"])
def test_configuration_is_read_without_loading_anything_heavy(module: str) -> None:
    assert loaded_heavy(f"import posttrain.core.config.{module}") == []


def test_a_reward_is_imported_without_loading_torch() -> None:
    """Worker processes are forked from one that holds nothing else: see core/rewards."""
    code = "import posttrain.core.rewards.server, posttrain.plugins.rewards.format"
    assert loaded_heavy(code) == []


def test_every_plugin_is_loaded_without_what_only_runs_need() -> None:
    """Every command that looks at a config loads all of them."""
    code = "from posttrain.core.plugin_manager import PluginManager\nPluginManager()"
    assert loaded_heavy(code) == ["torch"]


def test_a_config_builds_its_schema_when_it_is_first_used() -> None:
    """Of the plugins that every command loads, it uses a few."""

    class Config(ConfigModel):
        share: float = 0.5

    assert not Config.__pydantic_complete__
    assert Config().share == 0.5 and Config.__pydantic_complete__


@pytest.mark.slow
def test_a_run_that_reuses_every_stage_need_not_load_model_code(tmp_path: Path) -> None:
    assert loaded_heavy("import posttrain.pipelines.run.flow", MODEL_CODE) == []
    section = ModelSection(source=TINY_ID)
    obtain(section, tmp_path)
    again = f"""
from pathlib import Path
from posttrain.core.config.sections import ModelSection
from posttrain.core.models.source import obtain
print(obtain(ModelSection(source={TINY_ID!r}), Path({str(tmp_path)!r})).digest)
"""
    assert loaded_heavy(again, MODEL_CODE) == []
    stage = "import posttrain.pipelines.stages.sft"  # which kinds.py imports when one is computed
    assert "transformers.modeling_utils" in loaded_heavy(stage, MODEL_CODE)


def test_validate_counts_the_tokens_of_a_model_without_loading_model_code() -> None:
    """The prompts of every shipped config are counted; transformers' models take seconds."""
    code = """
import tempfile
from pathlib import Path
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.pipelines.run.checks import check_inputs, resolve_configs
from posttrain.pipelines.run import data_checks

folder = Path(tempfile.mkdtemp())
from tokenizers import Tokenizer, models
Tokenizer(models.WordLevel({"a": 0, "<e>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
data_checks.known_folder = lambda section, models: folder
resolved, manager = resolve_configs([Path("quickstart")], [])
inputs = check_inputs(resolved, manager)
data_checks.check_texts(resolved, manager, inputs.task, folder)
"""
    assert loaded_heavy(code, (*MODEL_CODE, "scipy", "transformers")) == ["transformers"]


def test_every_public_name_of_the_contracts_is_found_in_one_of_their_modules() -> None:
    from posttrain.core import contracts

    assert [name for name in contracts.__all__ if not hasattr(contracts, name)] == []
    assert set(contracts.CONTRACTS) == {cls.kind for cls in contracts.CONTRACTS.values()}
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = contracts.no_such_name  # type: ignore[attr-defined]


def test_the_probe_sees_a_heavy_import() -> None:
    assert loaded_heavy("import torch") == ["torch"]


def test_help_and_version_are_shown_without_loading_anything_heavy() -> None:
    call = (
        "from posttrain.pipelines.cli.main import app\n"
        "import sys\n"
        "sys.argv = ['posttrain', {argument!r}]\n"
        "try:\n    app()\nexcept SystemExit:\n    pass"
    )
    for argument in ("--help", "--version"):
        slow = (*HEAVY, "pydantic", "yaml", "packaging", "urllib.request")
        assert loaded_heavy(call.format(argument=argument), slow) == []


def test_a_mistake_in_the_yaml_is_told_without_loading_anything_heavy(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("wrong: 1\n")
    call = (
        "from posttrain.pipelines.cli.main import app\n"
        f"sys.argv = ['posttrain', 'run', {str(path)!r}]\n"
        "try:\n    app()\nexcept SystemExit as stop:\n    assert stop.code == 2"
    )
    assert loaded_heavy(call) == []


@pytest.mark.alone
def test_help_is_there_within_two_seconds() -> None:
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        command = [sys.executable, "-m", "posttrain.pipelines.cli", "--help"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 2.0


def test_every_folder_with_code_is_a_package_in_the_wheel_and_the_other_way_round() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {
        "posttrain." + ".".join(path.parent.relative_to(REPOSITORY).parts)
        for root in ("core", "plugins", "pipelines")
        for path in (REPOSITORY / root).rglob("*.py")
    }
    assert set(settings["packages"]) == on_disk | {"posttrain", "posttrain.configs"}


def test_imports_go_only_in_the_allowed_directions() -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("import-linter is not installed: make dev")
    done = subprocess.run([command], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
