"""Gates, promotions and rounds in a config: what is refused, and what decides their identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.sections import RegisteredName
from posttrain.core.errors import ConfigError, DataError, ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.run.gates import check_answers
from posttrain.pipelines.run.planning import parts_of_stage
from posttrain.pipelines.run.rounds import begin, look
from tests.helpers.pipeline import write_config
from tests.helpers.promotion import common, gated_config, sft_stage
from tests.unit.test_approval import YES

DIGESTS = {"model": "m", "evaluation": "e"}


def resolved(config: dict[str, Any], folder: Path, manager: PluginManager) -> ResolvedRun:
    return resolve(load_config([write_config(folder / "run.yaml", config)]), manager)


def gated(folder: Path) -> dict[str, Any]:
    return gated_config(folder / "model")


def rounds(folder: Path, **fields: object) -> dict[str, Any]:
    """A config about the rows of `rows.jsonl`."""
    (folder / "held_out.jsonl").write_text('{"prompt": "99", "answer": "9"}\n')
    paths = {"path": str(folder / "rows.jsonl"), "held_out_path": str(folder / "held_out.jsonl")}
    config = common(str(folder / "model")) | {"task": {"name": "jsonl", **paths}}
    reads = {"model": "base", "dataset": "rows"}
    stages = {"rows": {"kind": "new_data", **fields}, "sft": sft_stage(1) | {"inputs": reads}}
    return config | {"stages": stages}


def write_rows(folder: Path, *prompts: str) -> None:
    lines = [f'{{"prompt": "{p}", "answer": "{p[-1]}"}}\n' for p in prompts]
    (folder / "rows.jsonl").write_text("".join(lines))


def test_a_gated_pipeline_runs_in_order_and_the_gate_hands_on_a_model(
    tmp_path: Path, manager: PluginManager
) -> None:
    run = resolved(gated(tmp_path), tmp_path, manager)
    assert run.order == ("before", "sft", "after", "gate", "promote")


@pytest.mark.parametrize("name", ["gate", "promote"])
def test_an_evaluation_of_another_model_is_refused(
    tmp_path: Path, manager: PluginManager, name: str
) -> None:
    config = gated(tmp_path)
    config["stages"][name]["inputs"]["evaluation"] = "before"
    with pytest.raises(ConfigError, match=f"stages.{name}.inputs.evaluation: 'before' evaluates"):
        resolved(config, tmp_path, manager)


def test_a_baseline_that_was_measured_otherwise_is_refused(
    tmp_path: Path, manager: PluginManager
) -> None:
    config = gated(tmp_path)
    config["stages"]["promote"]["inputs"]["baseline"] = "before"
    resolved(config, tmp_path, manager)
    config["stages"]["before"]["evaluation"] = {"num_problems": 7}
    with pytest.raises(ConfigError, match="different settings in 'evaluation'"):
        resolved(config, tmp_path, manager)


def test_a_run_has_one_stage_about_new_rows(tmp_path: Path, manager: PluginManager) -> None:
    write_rows(tmp_path, "10")
    config = rounds(tmp_path)
    config["stages"]["more"] = {"kind": "new_data"}
    with pytest.raises(ConfigError, match="one stage of kind 'new_data', which is 'rows'"):
        resolved(config, tmp_path, manager)
    with pytest.raises(ConfigError, match="no run could ever begin"):
        resolved(rounds(tmp_path, min_rows=5, max_rows=4), tmp_path, manager)


@pytest.mark.parametrize(
    "source", ["models:/a", "models:/a@", "models:/a/b", "models:/@c", "models:/"]
)
def test_a_misspelt_registered_model_is_refused(
    tmp_path: Path, manager: PluginManager, source: str
) -> None:
    config = gated(tmp_path)
    config["model"]["source"] = source
    with pytest.raises(ConfigError, match="expected models:/NAME@ALIAS"):
        resolved(config, tmp_path, manager)


def test_names_of_registered_models() -> None:
    assert RegisteredName.parse("models:/a-b@champion") == RegisteredName("a-b", "champion", None)
    assert RegisteredName.parse("models:/a/12") == RegisteredName("a", None, "12")
    assert RegisteredName.parse("org/model") is None


def test_until_registered_goes_with_an_alias_only(tmp_path: Path, manager: PluginManager) -> None:
    config = gated(tmp_path)
    config["model"] |= {"until_registered": "org/model"}
    with pytest.raises(ConfigError, match="until_registered goes with a source such as"):
        resolved(config, tmp_path, manager)


def test_answers_are_for_gates_of_the_run(tmp_path: Path, manager: PluginManager) -> None:
    run = resolved(gated(tmp_path), tmp_path, manager)
    check_answers(run, {"gate": YES, "all": YES})
    with pytest.raises(ConfigError, match="'gat' is not a gate of this run; did you mean 'gate'"):
        check_answers(run, {"gat": YES})
    with pytest.raises(ConfigError, match="'sft' is not a gate"):
        check_answers(run, {"sft": YES})
    write_rows(tmp_path, "10")
    with pytest.raises(ConfigError, match="no stage of kind 'approve'"):
        check_answers(resolved(rounds(tmp_path), tmp_path, manager), {"all": YES})


def parts(run: ResolvedRun, name: str, digests: dict[str, str]) -> dict[str, str]:
    return parts_of_stage(run, name, digests, "transformers", "")


def test_an_approval_is_about_model_evaluations_and_question_alone(
    tmp_path: Path, manager: PluginManager
) -> None:
    config = gated(tmp_path)
    before = parts(resolved(config, tmp_path, manager), "gate", DIGESTS)
    config["stages"]["gate"] |= {"timeout_hours": 1, "on_timeout": "approve", "samples": 0}
    config |= {"seed": 3, "name": "other"}
    assert parts(resolved(config, tmp_path, manager), "gate", DIGESTS) == before
    assert "posttrain" not in before, "an update of posttrain asks nobody again"
    assert parts(resolved(config, tmp_path, manager), "gate", DIGESTS | {"model": "x"}) != before
    config["stages"]["gate"]["question"] = "Is it safe?"
    assert parts(resolved(config, tmp_path, manager), "gate", DIGESTS) != before


def test_a_promotion_is_about_the_champion_and_how_both_were_measured(
    tmp_path: Path, manager: PluginManager
) -> None:
    config = gated(tmp_path)
    run = resolved(config, tmp_path, manager)
    before = parts(run, "promote", DIGESTS)
    assert parts(run, "promote", DIGESTS | {"champion": "c"}) != before
    config["stages"]["after"]["evaluation"] = {"max_response_length": 5}
    assert parts(resolved(config, tmp_path, manager), "promote", DIGESTS) != before
    assert run.plugins["promote"] == run.plugins["after"]


def test_supervised_learning_on_a_data_set_is_not_about_the_task_s_other_rows(
    tmp_path: Path, manager: PluginManager
) -> None:
    write_rows(tmp_path, "10")
    run = resolved(rounds(tmp_path), tmp_path, manager)
    reads = {"model": "m", "dataset": "d"}
    two = [parts_of_stage(run, "sft", reads, "transformers", data) for data in ("x", "y")]
    assert two[0] == two[1]
    config = rounds(tmp_path)
    del config["stages"]["sft"]["inputs"]["dataset"]
    run = resolved(config, tmp_path, manager)
    plain = [parts_of_stage(run, "sft", {"model": "m"}, "transformers", d) for d in ("x", "y")]
    assert plain[0] != plain[1]


def test_a_round_takes_no_more_rows_than_it_may_and_the_others_come_next(
    tmp_path: Path, manager: PluginManager
) -> None:
    write_rows(tmp_path, "10", "11", "12")
    run = resolved(rounds(tmp_path, max_rows=2), tmp_path, manager)
    taken: list[str] = []
    for expected in (2, 1):
        begun = begin(run, manager, tmp_path / "home")
        assert len(begun.rows) == expected and not begun.nothing_new
        taken += [problem.prompt for problem in begun.rows]
        begun.finish()
        begun.close()
    assert sorted(taken) == ["10", "11", "12"]
    assert look(run, manager, tmp_path / "home").nothing_new.startswith("no new data: 3 rows, 0 of")


def test_looking_writes_nothing_and_an_open_round_is_begun_by_one_run_alone(
    tmp_path: Path, manager: PluginManager
) -> None:
    write_rows(tmp_path, "10")
    run = resolved(rounds(tmp_path), tmp_path, manager)
    look(run, manager, tmp_path / "home")
    assert not (tmp_path / "home").exists()
    begun = begin(run, manager, tmp_path / "home")
    with pytest.raises(ResourceError, match="another run of this config is in a round"):
        begin(run, manager, tmp_path / "home")
    begun.close()
    write_rows(tmp_path, "10", "11")
    again = begin(run, manager, tmp_path / "home")
    assert "round 1 goes on: 1 rows" in again.reported and again.rows_digest == begun.rows_digest
    again.close()
    fresh = begin(run, manager, tmp_path / "home", fresh=True)
    assert len(fresh.rows) == 2, "the open round was given up"
    fresh.close()


def test_an_open_round_whose_rows_are_gone_gives_way_to_a_new_one(
    tmp_path: Path, manager: PluginManager
) -> None:
    write_rows(tmp_path, "10", "11")
    run = resolved(rounds(tmp_path), tmp_path, manager)
    begin(run, manager, tmp_path / "home").close()
    write_rows(tmp_path, "11", "12")
    begun = begin(run, manager, tmp_path / "home")
    assert {problem.prompt for problem in begun.rows} == {"11", "12"}
    begun.close()


def test_what_cannot_be_looked_up_is_told(tmp_path: Path, manager: PluginManager) -> None:
    config = gated(tmp_path)
    config["model"]["source"] = "models:/sums@champion"
    run = resolved(config, tmp_path, manager)
    with pytest.raises(ResourceError, match="there is no such model .*until_registered"):
        begin(run, manager, tmp_path / "home")
    config["model"]["until_registered"] = "some/model"
    begun = begin(resolved(config, tmp_path, manager), manager, tmp_path / "home")
    assert begun.resolved.config.model.source == "some/model" and begun.pinned is None
    endless = rounds(tmp_path) | {"task": {"name": "arithmetic", "left_digits": [9, 9]}}
    with pytest.raises(ConfigError, match="makes problems without end"):
        begin(resolved(endless, tmp_path, manager), manager, tmp_path / "home")
    (tmp_path / "home" / "continual" / "tiny" / "cursor.json").write_text("{")
    write_rows(tmp_path, "10")
    with pytest.raises(DataError, match="cannot be read"):
        begin(resolved(rounds(tmp_path), tmp_path, manager), manager, tmp_path / "home")


def test_a_shipped_config_of_rounds_resolves(manager: PluginManager) -> None:
    run = resolve(load_config([Path("continual")]), manager)
    assert run.order == ("new_rows", "sft", "evaluate", "promote")
    assert run.config.model.source == "models:/continual@champion"
    promote = run.config.stages["promote"]
    named = RegisteredName.parse(run.config.model.source)
    assert named is not None and getattr(promote, "registered_name") == named.name  # noqa: B009
