"""What `validate` refuses of preference and reward-model stages, each with its fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from posttrain.core.config.preference_stages import PreferenceStage
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.run.checks import check_inputs, resolve_configs

MANAGER = PluginManager()
PAIR = {"prompt": "P", "chosen": "A", "rejected": "B"}
LABEL = {"prompt": "P", "completion": "A", "label": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, row in (
        ("pairs", PAIR),
        ("labels", LABEL),
        ("completions", {"prompt": "P", "completion": "A"}),
        ("broken", {"prompt": "P", "chosen": "A"}),
    ):
        rows = (row, {**row, "prompt": "Q"})
        text = "".join(json.dumps(line) + "\n" for line in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def write(folder: Path, kind: str = "preference", **fields: Any) -> Path:
    if "data" in fields:
        fields["data"] = str(folder / f"{fields['data']}.jsonl")
    stage = {"kind": kind, "inputs": {"model": "base"}, **fields}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"task": "arithmetic", "stages": {"it": stage}}))
    return path


def resolved(folder: Path, kind: str = "preference", **fields: Any) -> ResolvedRun:
    return resolve_configs([write(folder, kind, **fields)], None)[0]


@pytest.mark.parametrize(
    ("algorithm", "data", "loss", "field", "value"),
    [
        ("dpo", "pairs", "dpo", "beta", 0.1),
        ("ipo", "pairs", "ipo", "tau", 0.1),
        ("kto", "labels", "kto", "desirable_weight", 1.0),
        ("kto", None, "kto", "beta", 0.1),
    ],
)
def test_presets_expand_and_fit_their_data(
    folder: Path, algorithm: str, data: str | None, loss: str, field: str, value: float
) -> None:
    more = {} if data is None else {"data": data}
    run = resolved(folder, algorithm=algorithm, **more)
    stage = run.config.stages["it"]
    assert isinstance(stage, PreferenceStage)
    (term,) = stage.loss_terms
    assert (term.name, term.coef, term.fields()[field]) == (loss, 1.0, value)
    used = {(use.kind, use.name) for use in run.plugins["it"]}
    assert {("algorithm", algorithm), ("preference_loss", loss)} <= used
    assert resolve_configs([save(folder, run)], None)[0].config == run.config


def save(folder: Path, run: ResolvedRun) -> Path:
    path = folder / "resolved.yaml"
    path.write_text(run.to_yaml())
    return path


def test_fields_of_a_preset_are_overridden_one_by_one(folder: Path) -> None:
    run = resolved(folder, algorithm="dpo", preference_loss={"name": "dpo", "sft_coef": 1})
    stage = run.config.stages["it"]
    assert isinstance(stage, PreferenceStage)
    assert stage.loss_terms[0].fields()["sft_coef"] == 1.0
    listed = resolved(folder, preference_loss=["ipo", {"name": "sft", "coef": 0.2}])
    stage = listed.config.stages["it"]
    assert isinstance(stage, PreferenceStage)
    assert [(t.name, t.coef) for t in stage.loss_terms] == [("ipo", 1.0), ("sft", 0.2)]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "preference",
            {"algorithm": "kto", "data": "pairs"},
            r"it.data: 'kto' reads .*label.*pairs.jsonl:1 is of the form .*rejected.*or choose one "
            r"of \[.*'dpo'",
        ),
        (
            "preference",
            {"algorithm": "dpo", "data": "labels"},
            r"'dpo' reads .*labels.jsonl:1 is of the form .*choose one of \[.*'kto'",
        ),
        (
            "preference",
            {"data": "completions"},
            r"completions.jsonl:1 is of the form .*give another file$",
        ),
        (
            "preference",
            {"preference_loss": "bradley_terry"},
            "'bradley_terry' trains a reward model, not a policy; use it in a stage of kind "
            "'reward_model', or choose one of .*'dpo'",
        ),
        (
            "reward_model",
            {"preference_loss": "dpo"},
            r"'dpo' trains a policy, not a reward model; use it in a stage of kind 'preference', "
            r"or choose one of \['bradley_terry'",
        ),
        (
            "reward_model",
            {"data": "labels"},
            "'bradley_terry' reads .*rejected.*labels.jsonl:1 is of the form",
        ),
        (
            "preference",
            {"preference_loss": ["dpo", "kto"]},
            "one kind of data, but 'dpo' reads pairs, 'kto' reads labels; keep those of one kind",
        ),
        (
            "preference",
            {"preference_loss": [{"name": "dpo", "coef": 0}, {"name": "sft", "coef": 0}]},
            "every loss has coef 0, so nothing can be learned",
        ),
        (
            "preference",
            {"algorithm": "kto", "wpo": True},
            "it.wpo: is for pairs, and 'kto' reads labelled answers; set it to false, or choose",
        ),
        ("preference", {"algorithm": "kto", "ld_alpha": 0.5}, "it.ld_alpha: .*set it to null"),
        (
            "preference",
            {"preference_loss": ["simpo", "sft"], "f_divergence": "js"},
            r"it.f_divergence: maps log-ratios to scores, and \['simpo', 'sft'\] read bare",
        ),
        (
            "preference",
            {"preference_loss": {"name": "hinge", "alpha_po": 0.2}, "f_divergence": "js"},
            r"it.f_divergence: maps log-ratios to scores, and \['hinge'\] read bare",
        ),
        (
            "preference",
            {"algorithm": "kto", "batch_size": 1},
            "it.batch_size: 'kto' measures its reference point on answers to other prompts.*2 or",
        ),
        (
            "preference",
            {"data": "pairs", "num_prompts": 9},
            "it.num_prompts: says how answers are sampled, but `data` gives them",
        ),
        *(
            (
                "process_reward_model",
                {"data": "steps", field: value},
                f"it.{field}: says how answers are sampled, but `data` gives them; remove one",
            )
            for field, value in (
                ("num_prompts", 9),
                ("num_continuations", 4),
                ("estimate", "any"),
                ("max_steps", 3),
                ("generation", {"temperature": 0.5}),
            )
        ),
        (
            "preference",
            {"f_alpha": 0.3},
            "it.f_alpha: is the coefficient of f_divergence: alpha, and that is reverse_kl; remove",
        ),
        *(
            (
                kind,
                {"pairs_from_scores": "all"},
                "it.pairs_from_scores: is for a file that gives each answer a score, and `data`",
            )
            for kind in ("preference", "reward_model")
        ),
        (
            "preference",
            {"online": {}, "data": "pairs"},
            "it.online: makes pairs of the policy's own answers, but `data` gives them; remove one",
        ),
        (
            "preference",
            {"online": {}, "algorithm": "kto"},
            r"it.online: makes pairs, and 'kto' reads labelled answers; choose one of \['",
        ),
        (
            "preference",
            {"online": {}, "num_generations": 4},
            "it.num_generations: has no effect with `online`; set online.num_generations",
        ),
        ("preference", {"online": {}, "epochs": 2}, "it.epochs: has no .* set online.steps"),
        (
            "preference",
            {"online": {}, "evaluate_every": 2},
            "it.evaluate_every: has no .*measure with a stage of kind 'evaluate'",
        ),
        (
            "preference",
            {"online": {"ranked_by": "reward_model"}},
            "stage kind 'preference' reads 'reward_model', which its rewards need; add",
        ),
        ("preference", {"online": {"ranked_by": "judge"}}, "online.ranked_by.*'verifier'"),
        ("preference", {"online": {"num_generations": 1}}, "online.num_generations.*2"),
        ("preference", {"algorithm": "grpo"}, "'grpo' is an algorithm for a stage of kind 'rl'"),
        ("rl", {"algorithm": "dpo"}, "'dpo' is an algorithm for a stage of kind 'preference', not"),
        (
            "preference",
            {"preference_loss": [{"name": "dpo", "betta": 1}]},
            r"preference_loss.0.betta: unknown field .*did you mean 'beta'",
        ),
        ("preference", {"preference_loss": "dpoo"}, "no preference_loss named 'dpoo'.*'dpo'"),
        ("preference", {"preference_loss": []}, "preference_loss: must have at least 1 item"),
        ("preference", {"generation": {"temperature": 0}}, "at 0 all responses .* are the same"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_a_mend(
    folder: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(folder, kind, **fields)
    assert "run.yaml:" in str(caught.value)


@pytest.mark.parametrize("kind", ["preference", "reward_model"])
def test_a_missing_or_broken_file_is_a_data_error_that_names_it(folder: Path, kind: str) -> None:
    with pytest.raises(
        DataError, match=r"cannot read .*none.jsonl, .*correct stages.it.data .*yaml"
    ):
        resolved(folder, kind, data="none")
    with pytest.raises(DataError, match=r"broken.jsonl:1 has the fields \['chosen', 'prompt'\]"):
        resolved(folder, kind, data="broken")


def test_validate_refuses_from_the_command_line(folder: Path) -> None:
    runner = CliRunner()
    wrong = runner.invoke(app, ["validate", str(write(folder, algorithm="kto", data="pairs"))])
    assert wrong.exit_code == 2 and "'kto' reads" in wrong.output
    missing = runner.invoke(app, ["validate", str(write(folder, data="none"))])
    assert missing.exit_code == 3 and "cannot read" in missing.output
    right = runner.invoke(app, ["validate", str(write(folder, data="pairs"))])
    assert right.exit_code == 0


@pytest.mark.parametrize("online", [None, {"steps": 2}])
def test_pairs_by_the_verifier_need_answers_and_those_by_a_model_do_not(
    folder: Path, online: dict[str, Any] | None
) -> None:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Q{i}"}) + "\n" for i in range(40)))
    path = write(folder, **({} if online is None else {"online": online}))
    config = yaml.safe_load(path.read_text())
    config["task"] = {"name": "rows", "path": str(prompts), "answer_field": None}
    path.write_text(yaml.safe_dump(config))
    run, manager = resolve_configs([path], None)
    with pytest.raises(ConfigError, match="stages.it: right answers .*prompts.jsonl.* no answer"):
        check_inputs(run, manager)
    if online is not None:
        rewards = {"kind": "reward_model", "inputs": {"model": "base"}}
        rewards["data"] = str(folder / "pairs.jsonl")
        config["stages"]["rewards"] = rewards
        config["stages"]["it"]["online"]["ranked_by"] = "reward_model"
        config["stages"]["it"]["inputs"]["reward_model"] = "rewards"
        path.write_text(yaml.safe_dump(config))
        notes = check_inputs(*resolve_configs([path], None)).notes
        assert any("accuracies count such problems as wrong" in note for note in notes)


def test_plan_counts_rows_and_steps(folder: Path) -> None:
    from posttrain.core.estimate.tokens import RunData
    from posttrain.pipelines.api.planned import arithmetic

    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(PAIR | {"prompt": f"P{i}"}) + "\n" for i in range(100))
    )
    run = resolved(folder, data="pairs", batch_size=8, epochs=2)
    text = arithmetic(run.config.stages["it"], RunData(run.config, MANAGER))
    assert "100 rows" in text and ", at most 80 to train on and 20 held out" in text
    assert "20 optimizer step(s)" in text
    own = resolved(folder).config
    text = arithmetic(own.stages["it"], RunData(own, MANAGER))
    assert "64 problems x 8 answers = 512 sampled; at most 128 pairs" in text
    assert re.search(r"at most \d+ optimizer step", text)
    rounds = {"steps": 7, "refresh_every": 2, "prompts_per_round": 8, "num_generations": 4}
    online = resolved(folder, online=rounds).config
    data = RunData(online, MANAGER)
    text = arithmetic(online.stages["it"], data)
    assert "4 round(s) x 8 problems x 4 answers = 128 sampled" in text and "7 optimizer" in text
    stage = online.stages["it"]
    assert isinstance(stage, PreferenceStage)
    found = data.judged(stage)
    assert (found.steps, found.train, found.sampled) == (7, 4 * 8 * 2, 128)
