"""Loading YAML: merging, overrides, line numbers and errors that a person can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.errors import ConfigError

GOOD = """\
task: {name: arithmetic}
model:
  dtype: float32
stages:
  sft:
    kind: sft
    inputs: {model: base}
    steps: 3
"""


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([path], overrides)
    return str(caught.value)


def test_a_later_file_wins_key_by_key_and_keeps_the_rest(tmp_path: Path) -> None:
    first = write(tmp_path, GOOD)
    second = write(tmp_path, "seed: 7\nmodel: {source: here}\n", "b.yaml")
    loaded = load_config([first, second])
    assert (loaded.config.seed, loaded.config.model.source) == (7, "here")
    assert loaded.config.model.dtype == "float32"
    assert loaded.where("seed") == f"{second}:1"
    assert loaded.where("model.dtype") == f"{first}:3"


def test_an_override_is_yaml_and_reaches_into_lists_and_new_mappings(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    loaded = load_config(
        [path],
        ["stages.sft.optimizer.betas=[0.5, 0.6]", "stages.sft.optimizer.betas.1=0.7", "seed=3"],
    )
    stage = loaded.config.stages["sft"]
    assert getattr(stage, "optimizer").betas == (0.5, 0.7)  # noqa: B009
    assert loaded.config.seed == 3
    assert loaded.where("seed") == "--set seed=3"
    assert loaded.where("stages.sft.optimizer.betas.1") == "--set stages.sft.optimizer.betas.1=0.7"


def test_an_override_of_an_aliased_value_changes_one_place(tmp_path: Path) -> None:
    text = "a: &shared {kind: sft, inputs: {model: base}}\n"
    path = write(tmp_path, "task: arithmetic\nstages:\n  " + text + "  b: *shared\n")
    loaded = load_config([path], ["stages.b.steps=9"])
    stages = loaded.raw["stages"]
    assert isinstance(stages, dict)
    assert "steps" not in stages["a"]
    assert stages["b"]["steps"] == 9


@pytest.mark.parametrize(
    ("line", "place", "says"),
    [
        ("modle: {}", "modle", "did you mean 'model'?"),
        ("limits: {num_thread: 2}", "limits.num_thread", "did you mean 'num_threads'?"),
        ("seed: ten", "seed", "must be a valid integer"),
        (
            "evaluation: 3",
            "evaluation",
            "must be a mapping of fields, such as {num_problems: ...}, got 3",
        ),
        ("engine: {x: 1}", "engine", "must be 'auto' or the name of a rollout engine"),
        ("limits: {min_free_gb: -1}", "limits.min_free_gb", "greater than or equal to 0 (got -1)"),
    ],
)
def test_a_bad_value_is_told_with_line_place_and_what_is_allowed(
    tmp_path: Path, line: str, place: str, says: str
) -> None:
    path = write(tmp_path, GOOD + line + "\n")
    reported = message(path)
    assert reported.startswith(f"{path}:9: {place}: ")
    assert says in reported
    assert "\n" not in reported


@pytest.mark.parametrize(
    ("stage", "place", "says"),
    [
        ("{kind: srt}", "stages.x.kind", "no stage is of kind 'srt'; did you mean 'sft'?"),
        ("{steps: 1}", "stages.x", "has no kind; add 'kind: ...'"),
        ("{kind: rl, stpes: 1}", "stages.x.stpes", "did you mean 'steps'?"),
        ("{kind: rl, kl: {plce: loss}}", "stages.x.kl.plce", "did you mean 'place'?"),
        ("{kind: rl, kl: {place: los}}", "stages.x.kl.place", "did you mean 'loss'?"),
        ("{kind: rl, algorithm: 3}", "stages.x.algorithm", "must be a plugin name or {name: ..."),
        ("{kind: rl, rewards: [{weight: 1}]}", "stages.x.rewards.0.name", "is missing"),
        ("{kind: rl, policy_loss: []}", "stages.x.policy_loss", "must have at least 1 item(s)"),
    ],
)
def test_a_bad_stage_is_told_without_words_of_the_validator(
    tmp_path: Path, stage: str, place: str, says: str
) -> None:
    path = write(tmp_path, GOOD + f"  x: {stage}\n")
    reported = message(path)
    assert reported.startswith(f"{path}:9: {place}: ")
    assert says in reported
    assert not any(word in reported for word in ("Input", "discriminator", "Tuple"))


@pytest.mark.parametrize(
    ("targets", "reported"),
    [
        ("[3, q_proj]", "targets.0: must be a valid string (got 3)"),
        ("{a: 1}", "targets.0: must be a valid string (got {'a': 1})"),
        ("[]", "targets: must have at least 1 item(s), got []"),
    ],
)
def test_a_value_of_two_forms_has_one_problem(targets: str, reported: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    lora = f"sft: {{kind: sft, inputs: {{model: base}}, lora: {{targets: {targets}}}}}"
    path.write_text(f"task: arithmetic\nstages:\n  {lora}\n")
    with pytest.raises(ConfigError) as error:
        load_config([path])
    assert str(error.value) == f"{path}:3: stages.sft.lora.{reported}"


def test_the_ends_of_a_range_are_told_without_words_of_the_validator(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    space = "variants: {search: {space: {stages.rl.steps: {low: .inf, high: 2}}}}"
    path.write_text(f"{space}\nstages: {{rl: {{kind: rl, inputs: {{model: base}}}}}}\n")
    with pytest.raises(ConfigError) as error:
        load_config([path])
    place = f"{path}:1: variants.search.space.stages.rl.steps.low"
    assert str(error.value) == f"{place}: must be a finite number (got inf)"


def test_a_stage_name_with_capitals_is_told_by_name(tmp_path: Path) -> None:
    reported = message(write(tmp_path, GOOD + "  Bad: {kind: sft}\n"))
    assert ":9: stages.Bad: a stage name must be lower-case letters" in reported


def test_all_problems_are_told_at_once_and_counted_beyond_ten(tmp_path: Path) -> None:
    wrong = "".join(f"wrong_{i}: 1\n" for i in range(12))
    lines = message(write(tmp_path, GOOD + wrong)).split("\n")
    assert lines[0] == "12 problems in the configuration:"
    assert len(lines) == 12
    assert lines[-1] == "  and 2 more"


def test_a_bad_override_is_told_as_the_place_it_was_written(tmp_path: Path) -> None:
    reported = message(write(tmp_path, GOOD), "stages.sft.steps=many")
    assert reported.startswith(
        "--set stages.sft.steps=many: stages.sft.steps: must be a valid integer"
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed", "must look like a.b=c"),
        ("a..b=1", "must look like a.b=c"),
        ("seed=[1", "is not YAML"),
        ("task.name.x=1", "which has no 'x'"),
        ("stages.sft.optimizer.betas.5=1", "which has no '5'"),
    ],
)
def test_an_override_that_cannot_be_applied_is_a_config_error(
    tmp_path: Path, override: str, says: str
) -> None:
    path = write(tmp_path, GOOD + "    optimizer: {betas: text}\n")
    assert says in message(path, override)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a is written twice, first in line 1"),
        ("a:\n  x: 1\n  x: 2\n", 3, "a.x is written twice, first in line 2"),
        ("a: 1\n\tb: 2\n", 2, "indent with spaces, not tabs"),
        ("a: [1\nb: 2\n", 2, "this is not YAML"),
        ("- 1\n", 1, "must hold a mapping"),
        ("a: &x [*x]\n", 1, "is an alias of a value that holds it"),
        ("task: x\n7: 2\n", 2, "is not text"),
        ("task: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
    ],
)
def test_a_broken_file_is_told_with_its_line(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    path = write(tmp_path, text)
    reported = message(path)
    assert reported.startswith(f"{path}:{line}: ")
    assert says in reported


@pytest.mark.parametrize("content", [b"", b"\xff", b"a: \x01", b"a: 2024-13-45"])
def test_unreadable_bytes_are_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    assert str(path) in message(path)


def test_a_merge_key_is_no_duplicate_and_its_own_lines_win(tmp_path: Path) -> None:
    text = (
        "task: arithmetic\nstages:\n"
        "  a: &a {kind: sft, inputs: {model: base}, steps: 1}\n"
        "  b:\n    <<: *a\n    steps: 2\n"
    )
    loaded = load_config([write(tmp_path, text)])
    assert getattr(loaded.config.stages["b"], "steps") == 2  # noqa: B009
    assert loaded.where("stages.b.steps").endswith(":6")
    assert loaded.where("stages.b.inputs").endswith(":3")


def test_a_missing_file_is_told_with_its_nearest_neighbour(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "train.yaml")
    assert "did you mean 'train.yaml'?" in message(tmp_path / "trian.yaml")
    assert "does not exist" in message(tmp_path / "no" / "x.yaml")
    assert "is a folder" in message(tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("short run.yaml", "short-run"),
        ("gsm8k_v1.2.yml", "gsm8k_v1.2"),
        ("-odd-.yaml", "odd"),
        ("été.yaml", "t"),
        ("???.yaml", "posttrain"),
    ],
)
def test_a_config_without_a_name_has_that_of_its_file(tmp_path: Path, file: str, name: str) -> None:
    loaded = load_config([write(tmp_path, GOOD, file), write(tmp_path, "seed: 7\n", "b.yaml")])
    assert loaded.config.name == loaded.raw["name"] == name
    assert load_config([tmp_path / file], ["name=other"]).config.name == "other"
    named = write(tmp_path, "name: given\n", "c.yaml")
    assert load_config([tmp_path / file, named]).config.name == "given"
