"""The kit for plugin authors: what `new` writes is green for every kind; `check` finds faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.core.contracts import CONTRACTS
from posttrain.core.errors import ConfigError
from posttrain.core.kit.checks import Subject, checks_of, run_checks
from posttrain.core.kit.new import EXAMPLES, USES, file_of, package_of, write_new
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.cli.main import app


def test_there_is_an_example_and_checks_of_every_kind() -> None:
    files = {path.stem for path in EXAMPLES.glob("[!_]*.py")}
    assert files == {*CONTRACTS, *(f"test_{kind}" for kind in CONTRACTS)}
    assert set(USES) == set(CONTRACTS)
    assert all(any(check.kinds for check in checks_of(kind)) for kind in CONTRACTS)


def test_packages_of_all_kinds_pass_their_own_tests(tmp_path: Path) -> None:
    tests, sources = [], []
    for kind in CONTRACTS:
        folder, files = package_of(kind, f"my_{kind}")
        write_new(files, tmp_path / folder)
        tests.append(str(tmp_path / folder / "tests"))
        sources.append(str(tmp_path / folder / "src"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
        + tests,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{2 * len(CONTRACTS) - 1} passed" in done.stdout, done.stdout[-500:]


def test_new_check_and_show_by_the_commands(tmp_path: Path) -> None:
    made = ask("plugins", "new", "reward", "brief", "--file", "--out", str(tmp_path))
    assert made["plugin"] == f"{tmp_path}/brief.py:Brief"
    found = ask("plugins", "check", made["plugin"])
    assert found["failed"] == 0 and found["plugins"][0]["kind"] == "reward"
    assert ask("plugins", "check", f"{tmp_path}/brief.py")["plugins"] == found["plugins"]
    (shown,) = ask("plugins", "show", made["plugin"])["plugins"]
    assert [field["name"] for field in shown["fields"]] == ["max_tokens"]
    again = CliRunner().invoke(
        app, ["plugins", "new", "reward", "brief", "--file", "--out", str(tmp_path)]
    )
    assert again.exit_code == 2 and "is there already" in again.output


BY_PLACE = "Score(float(i)) for i, _ in enumerate(samples)"


@pytest.mark.parametrize(
    ("old", "new", "check", "says"),
    [
        ("[Score(max", "[Score(float('nan') or max", "sound score", "the score is nan"),
        ("for sample in samples]", "for sample in samples[1:]]", "sound score", "scores: got 0"),
        ("description=", "title=", "description", "['max_tokens']"),
        ("Source: an example", "It is mine", "docstring", ""),
        pytest.param(
            "limit = self.config.max_tokens",
            "import time; time.sleep(1.2); limit = 9",
            "second",
            "1.",
            marks=pytest.mark.slow,  # every call of every check sleeps
        ),
        ("return [", f"return [{BY_PLACE}] or [", "same scores", "reverse"),
        ("limit =", "1 / len(samples[0].text); limit =", "sound score", "ZeroDivisionError at "),
    ],
)
def test_a_broken_reward_is_found(
    tmp_path: Path, old: str, new: str, check: str, says: str
) -> None:
    name, text = file_of("reward", "brief")
    assert old in text
    text = text.replace(old, new).replace("R = max(0, 1 - n / max_tokens), n the", "The")
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(
        app, ["plugins", "check", f"{tmp_path / name}:Brief", "--json", "--home", str(tmp_path)]
    )
    assert result.exit_code == 1, result.output
    findings = json.loads(result.stdout.splitlines()[-1])["plugins"][0]["checks"]
    failed = {each["check"]: each["detail"] for each in findings if each["state"] == "failed"}
    assert any(check in name and says in detail for name, detail in failed.items()), failed


BROKEN = [
    ("advantage", "rewards - rewards.mean()", "rewards - rewards", "finite, detached", "all are 0"),
    ("advantage", "rewards - rewards.mean()", "rewards - rewards[0]", "permuting", "another order"),
    (
        "policy_loss",
        'masked(logprobs - micro.column("old_logprobs"), mask).exp()',
        '(logprobs - micro.column("old_logprobs")).exp()',
        "masked tokens",
        "NaN",
    ),
    (
        "policy_loss",
        "mask).exp()\n",
        "mask).exp().detach() * logprobs\n",
        "finite differences",
        "autograd",
    ),
    (
        "policy_loss",
        "return TokenLoss(loss, mask",
        "return TokenLoss(loss / loss.shape[0], mask",
        "other rows",
        "alone",
    ),
    ("aggregator", "weights / counts.num_tokens", "weights / mask.sum()", "micro-batches", "value"),
    (
        "kl",
        "(logprobs - ref_logprobs).square() / 2",
        "(logprobs - ref_logprobs) + 1",
        "exactly 0",
        "got 1.0",
    ),
    ("kl_controller", "1 + sign * self.config.step", "1 - 3 * sign", "continues", "-0.2"),
    ("entropy_controller", "max(0.0, ", "max(-1.0, ", "continues", "it is -"),
    (
        "rollout_correction",
        'Weighting("token",',
        'Weighting("token", low=1.5,',
        "not corrected",
        "1.5",
    ),
    ("preference_loss", "relu(1 - ", "relu(1 + ", "lower where", "right order"),
    ("task", "split_of(key, 100) == split", "True", "held out", "both splits"),
    (
        "environment",
        'return Observation("", done=True',
        'return Observation("", done=False',
        "comes to an end",
        "goes on",
    ),
    ("tool", "if not arguments.strip()", "if arguments[0] == ' '", "any text", "IndexError"),
    ("optimizer", "return 4.0", "return 8.0", "as large", "holds 4"),
    (  # a number of steps that no checkpoint keeps
        "optimizer",
        'weight.sub_(direction, alpha=group["lr"])',
        'group["n"] = (*group.get("n", ()), 1)\n'
        '                weight.sub_(direction, alpha=group["lr"] / len(group["n"]))',
        "continues from a checkpoint",
        "after a resume",
    ),
    (
        "stage",
        "float(len(kept))",
        "float(__import__('time').time_ns() % 10**9)",
        "equal files",
        "a second run",
    ),
    ("sampler", "[:wanted]", "[:0]", "groups hold", "no group"),
    ("algorithm", '"grpo"', '"no_such"', "each axis", "no advantage named"),
]


@pytest.mark.parametrize(("kind", "old", "new", "check", "says"), BROKEN)
def test_a_broken_plugin_of_each_kind_is_found(
    tmp_path: Path, kind: str, old: str, new: str, check: str, says: str
) -> None:
    name, text = file_of(kind, "mine")
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    manager = PluginManager()
    (entry,) = manager.all_in_file(tmp_path / name)
    failed = {f.check: f.detail for f in run_checks(Subject(entry, manager)) if f.state == "failed"}
    assert any(check in name and says in detail for name, detail in failed.items()), failed


def test_a_broken_renderer_is_found(tmp_path: Path) -> None:
    name, text = file_of("renderer", "mine")
    (tmp_path / name).write_text(text.replace("given(system)", "fixed(system)"))
    manager = PluginManager()
    (entry,) = manager.all_in_file(tmp_path / name)
    failed = [f.check for f in run_checks(Subject(entry, manager)) if f.state == "failed"]
    assert failed == ["control tokens in what people bring stay text"]


@pytest.mark.parametrize("name", ["Brief", "my plugin", "class", "1st", "a__b", "../x", ""])
def test_a_name_that_no_module_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a plugin's and a module's: use lower-case"):
        package_of("reward", name)


def test_an_unknown_kind_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no plugin kind 'rewrd'; did you mean 'reward'"):
        file_of("rewrd", "brief")


def ask(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found
