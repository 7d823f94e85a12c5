"""A run whose layers are compiled takes the same steps as one whose layers are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.learning import Learned
from tests.helpers.pipeline import run_command, tiny_config, write_config


@pytest.mark.slow
def test_compiled_layers_take_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    sft, rl = config["stages"]["sft"], config["stages"]["rl"]
    short = {"name": "soft_overlong", "buffer_length": 6}  # answers differ in length
    rl["inputs"], rl["rewards"] = {"model": "sft"}, ["accuracy", short]
    config["stages"] = {"sft": sft, "rl": rl}
    path = write_config(tmp_path / "run.yaml", config)
    kernels = tmp_path / "kernels"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))

    def norms(value: str) -> list[list[float]]:
        done = run_command(
            *("run", str(path), "--home", str(tmp_path / value), "--json"),
            *("--set", f"model.compile={value}"),
        )
        assert done.code == 0, done.text
        learned = Learned(done.result)
        return [learned.history(stage, "grad/norm") for stage in ("sft", "rl")]

    plain = norms("false")
    assert not any(kernels.rglob("*.cpp")), "nothing is compiled unless it is asked for"
    compiled = norms("true")
    assert any(kernels.rglob("*.cpp")), "layers were compiled"
    for found, wanted in zip(compiled, plain, strict=True):
        assert min(wanted) > 0
        assert found == pytest.approx(wanted, rel=1e-3)
