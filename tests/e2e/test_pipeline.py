"""The whole DAG through the real command: real Prefect, real SQLite MLflow, a tiny random Llama.

Over 300 lines because one run, made once, is looked at from every side.
"""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.artifacts import load_text

import posttrain
from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.microscope import meta_of
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_loaded,
    run_whole,
    tiny_config,
    write_config,
)

STAGES = ["evaluate_base", "sft", "reward_model", "rl", "evaluate", "register"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    model = make_tiny_model(folder / "model")
    config = tiny_config(model)
    evaluate = config["stages"]["evaluate"]
    evaluate["inputs"]["reward_model"] = "reward_model"
    evaluate["evaluation"] = config["evaluation"] | {"num_samples": 4}
    write_config(folder / "run.yaml", config)
    return folder


@pytest.fixture(scope="module")
def first(workspace: Path) -> Finished:
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_whole(
        "run", str(workspace / "run.yaml"), "--home", str(workspace / "home"), "--json"
    )
    assert done.code == 0, done.text
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    # Processor time, so that a busy machine does not decide.
    assert spent < 60, "the whole tiny DAG takes under a minute"
    return done


@pytest.fixture(scope="module")
def client(first: Finished) -> MlflowClient:
    uri = first.result["mlflow_uri"]
    return MlflowClient(uri, registry_uri=uri)


def children(client: MlflowClient, first: Finished) -> dict[str, Any]:
    runs = client.search_runs(
        [first.result["mlflow_experiment_id"]],
        f"tags.mlflow.parentRunId = '{first.result['mlflow_run_id']}'",
    )
    # A search leaves model inputs out.
    return {r.data.tags["posttrain.stage"]: client.get_run(r.info.run_id) for r in runs}


def test_every_stage_ran_and_left_what_it_makes(first: Finished) -> None:
    stages = first.result["stages"]
    assert list(stages) == STAGES
    assert {s["status"] for s in stages.values()} == {"ran"}
    for name in ("sft", "rl"):
        model = next(a for a in stages[name]["artifacts"] if a["kind"] == "model")
        assert (Path(model["uri"]) / "model.safetensors").is_file()
        assert len(model["digest"]) == 64
        begins = first.text.index(f"[{name}] reads its inputs")
        assert begins < first.text.index(f"[{name}] started ({name}")
    digests = {a["digest"] for s in stages.values() for a in s["artifacts"]}
    assert len(digests) == sum(len(s["artifacts"]) for s in stages.values())


def test_stages_are_child_runs_with_a_metric_history_per_step(
    first: Finished, client: MlflowClient
) -> None:
    runs = children(client, first)
    assert set(runs) == set(STAGES)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    parent = client.get_run(first.result["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["evaluate/eval/greedy_accuracy"] >= 0
    rl = runs["rl"].info.run_id
    for key in ("reward/mean", "entropy/mean", "mismatch/k3", "clip/high_frac", "kl/ref_k3", "lr"):
        steps = [m.step for m in client.get_metric_history(rl, key)]
        assert steps == [1, 2, 3, 4], key
    evaluated = [m.step for m in client.get_metric_history(rl, "eval/greedy_accuracy")]
    assert evaluated == [0, 2, 4]


def test_the_reward_model_chooses_among_sampled_answers(
    workspace: Path, first: Finished, client: MlflowClient
) -> None:
    metrics = children(client, first)["evaluate"].data.metrics
    best, mean = metrics["eval/rm_at/4"], metrics["eval/avg_at/4"]
    assert metrics["eval/rm_gain_at/4"] == pytest.approx(best - mean)
    assert mean <= metrics["eval/pass_at/4"] >= best
    assert "rm@4" in first.text
    folder = next(Path(a["uri"]) for a in first.result["stages"]["evaluate"]["artifacts"])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [len(row["scores"]) for row in rows] == [4] * 4


def test_engine_and_trainer_agree_on_every_step(first: Finished, client: MlflowClient) -> None:
    rl = children(client, first)["rl"].info.run_id
    history = client.get_metric_history(rl, "mismatch/abs_max")
    assert len(history) == 4
    assert max(m.value for m in history) < 1e-4  # float32 on both sides, weights synced each step


def test_pictures_tables_and_lineage_are_in_mlflow(first: Finished, client: MlflowClient) -> None:
    runs = children(client, first)
    plots = {f.path for f in client.list_artifacts(runs["rl"].info.run_id, "plots")}
    names = ("learning_curves.png", "learning_curves.html", "dashboard.html")
    assert plots == {f"plots/{name}" for name in names}
    tables = client.list_artifacts(runs["rl"].info.run_id, "tables/samples")
    assert len(tables) == 4
    uri = f"{runs['rl'].info.artifact_uri}/{tables[0].path}"
    table = json.loads(load_text(uri))
    assert {"prompt", "response", "reward", "advantage", "policy_version"} <= set(table["columns"])
    assert len(table["data"]) == 16
    summary = {f.path for f in client.list_artifacts(first.result["mlflow_run_id"], "summary")}
    assert {"summary/before_after.png", "summary/lineage.html"} <= summary


def test_the_first_and_the_last_step_of_rl_have_a_page_token_by_token(
    workspace: Path, first: Finished, client: MlflowClient
) -> None:
    rl = children(client, first)["rl"].info
    pages = {f.path for f in client.list_artifacts(rl.run_id, "microscope")}
    assert pages == {"microscope/step-000001.html", "microscope/step-000004.html"}
    meta = meta_of(load_text(f"{rl.artifact_uri}/microscope/step-000004.html"))
    assert meta["step"] == 4 and len(meta["rows"]) == 16
    names = {variant["name"] for variant in meta["variants"]}
    assert {"own", "own@token-mean", "gspo@seq-mean-token-mean", "cispo"} <= names
    own = sum(meta["variants"][0]["size"])
    home = str(workspace / "home")
    listed = run_loaded("inspect", first.result["run_id"], "--home", home, "--json").result
    assert [row["step"] for row in listed["steps"]] == [1, 2, 3, 4]
    looked = run_loaded(
        "inspect", first.result["run_id"], "--home", home, "--json", "--step", "4"
    ).result
    assert looked["variants"][0]["size"] == pytest.approx(own)
    assert Path(looked["page"]).is_relative_to(home)


def test_steps_of_sft_and_of_the_reward_model_are_looked_at_too(
    workspace: Path, first: Finished, client: MlflowClient
) -> None:
    home, found = str(workspace / "home"), dict[str, Any]()
    for stage in ("sft", "reward_model"):
        run = children(client, first)[stage].info
        pages = {f.path for f in client.list_artifacts(run.run_id, "microscope")}
        assert "microscope/step-000001.html" in pages
        given = ("inspect", first.result["run_id"], "--home", home, "--json", "--stage", stage)
        assert run_loaded(*given).result["steps"][0]["step"] == 1
        found[stage] = run_loaded(*given, "--step", "1").result
        page = meta_of(load_text(f"{run.artifact_uri}/microscope/step-000001.html"))
        ours = next(v for v in page["variants"] if v["name"] == "own")
        assert sum(ours["size"]) == pytest.approx(found[stage]["variants"][0]["size"])
    # The mean over learned tokens: each is pulled alike, and all together by 1.
    assert found["sft"]["variants"][0]["net"] == pytest.approx(-1, rel=1e-5)
    assert [v["name"] for v in found["sft"]["variants"]] == ["own", "dft", "phi"]
    logged = client.get_metric_history(children(client, first)["sft"].info.run_id, "sft/loss")[
        0
    ].value
    rows = found["sft"]["samples"]
    tokens = sum(row["tokens"] for row in rows)
    mean = sum(row["loss"] * row["tokens"] for row in rows) / tokens
    assert mean == pytest.approx(logged, rel=1e-4), "the loss that the step reported"
    # A new head scores 0: each pair is pulled by 1/2, over the number of pairs.
    assert found["reward_model"]["variants"][0]["size"] == pytest.approx(1, rel=1e-4)
    assert {row["answer"] for row in found["reward_model"]["samples"]} == {"chosen", "rejected"}


def test_the_same_prompts_are_followed_and_a_few_responses_are_traces(
    first: Finished, client: MlflowClient
) -> None:
    rl = children(client, first)["rl"].info
    table = json.loads(load_text(f"{rl.artifact_uri}/tables/held_out_over_time.json"))
    assert table["columns"] == ["prompt", "answer", "step 0", "step 2", "step 4"]
    assert len(table["data"]) == 4 and all(
        cell[0] in "✓✗" for row in table["data"] for cell in row[2:]
    )
    found = client.search_traces(locations=[first.result["mlflow_experiment_id"]], run_id=rl.run_id)
    assert len(found) == 2, "the best and the worst paid of the first of four steps"
    for trace in found:
        feedback = {a.name: a.feedback.value for a in trace.info.assessments if a.feedback}
        assert {"reward", "reward.accuracy", "reward.reward_model", "advantage"} <= set(feedback)
        total = feedback["reward.accuracy"] + 0.2 * feedback["reward.reward_model"]
        assert feedback["reward"] == pytest.approx(total, abs=1e-5)


def test_models_and_datasets_are_linked(first: Finished, client: MlflowClient) -> None:
    runs = children(client, first)
    made = runs["sft"].outputs.model_outputs[0].model_id
    read = {m.model_id for m in runs["rl"].inputs.model_inputs}
    assert made in read, "the model sft made is an input of rl"
    assert len(read) == 2, "and so is the reward model"
    contexts = {
        tag.value
        for d in runs["rl"].inputs.dataset_inputs
        for tag in d.tags
        if "context" in tag.key
    }
    assert contexts == {"train", "held_out"}


def test_code_environment_and_what_was_set_are_on_record(
    workspace: Path, first: Finished, client: MlflowClient
) -> None:
    parent = client.get_run(first.result["mlflow_run_id"])
    experiment = client.get_experiment(first.result["mlflow_experiment_id"])
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    repo = Path(__file__).resolve().parents[2]
    ask = ["git", "-C", str(repo), "rev-parse", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    for run in (parent, children(client, first)["rl"]):
        assert run.data.tags["mlflow.source.git.commit"] == commit
        assert run.data.tags["mlflow.source.name"] == "posttrain"
    lock = load_text(f"{parent.info.artifact_uri}/environment.txt").splitlines()
    assert f"torch=={version('torch')}" in lock and f"mlflow=={version('mlflow')}" in lock
    changes = yaml.safe_load(load_text(f"{parent.info.artifact_uri}/config_changes.yaml"))
    assert changes["stages.rl.steps"]["value"] == 4 != changes["stages.rl.steps"]["default"]
    assert "stages.rl.seed" not in changes
    plugins = yaml.safe_load(load_text(f"{parent.info.artifact_uri}/plugins.yaml"))
    assert plugins["rl"]["policy_loss ppo_clip"] == f"posttrain {version('posttrain')}"
    assert set(plugins) == set(STAGES) and "reward reward_model" in plugins["rl"]
    assert {d.dataset.name for d in parent.inputs.dataset_inputs} >= {"arithmetic-train"}
    assert len(parent.outputs.model_outputs) == 3, "sft, the reward model and rl"


def test_the_model_is_registered_as_candidate(first: Finished, client: MlflowClient) -> None:
    version = client.get_model_version_by_alias("tiny", "candidate")
    rl = children(client, first)["rl"]
    assert version.run_id == rl.info.run_id
    assert "eval.greedy_accuracy" in version.tags
    model = client.get_logged_model(rl.outputs.model_outputs[0].model_id)
    versions = json.loads(model.tags["mlflow.modelVersions"])
    assert versions == [{"name": "tiny", "version": str(version.version)}]
    shown = {metric.key for metric in model.metrics or []}
    assert {"eval/greedy_accuracy", "eval/gain"} <= shown, "the model's page has its evaluation"


def test_prefect_knows_the_flow_its_stages_and_its_phases(workspace: Path, first: Finished) -> None:
    database = sqlite3.connect(f"file:{workspace}/home/prefect/prefect.db?mode=ro", uri=True)
    flows = dict(
        database.execute(
            "select f.name, r.state_type from flow_run r join flow f on f.id = r.flow_id"
        )
    )
    assert flows == {"post_training": "COMPLETED", "rl": "COMPLETED"}
    tagged = dict(database.execute("select name, tags from task_run"))
    names = [row[0] for row in database.execute("select name from task_run")]
    assert set(STAGES) <= set(names)
    assert {tagged[stage] for stage in STAGES} == {"[]"}, "each tag is a slot to be asked for"
    for phase in (
        "rollout",
        "score_rewards",
        "compute_advantages",
        "update_policy",
        "sync_weights",
    ):
        assert sum(name.startswith(f"{phase}-") for name in names) == 1, phase
    assert "steps 2 to 4" in names
    run = client_tags(first)
    assert run["prefect.flow_run_id"] == first.result["prefect_flow_run_id"]


def test_prefect_shows_the_log_progress_samples_and_card(workspace: Path, first: Finished) -> None:
    database = sqlite3.connect(f"file:{workspace}/home/prefect/prefect.db?mode=ro", uri=True)
    flow_run = first.result["prefect_flow_run_id"].replace("-", "")
    ((tags,),) = database.execute(
        "select tags from flow_run where replace(id, '-', '') = ?", (flow_run,)
    )
    assert json.loads(tags) == [*("posttrain", "tiny", "seed:0", "device:cpu", "algorithm:grpo")]
    lines = [row[0] for row in database.execute("select message from log")]
    assert [line for line in lines if line.startswith("[rl] step 4/4  reward ")]
    assert [line for line in lines if line.startswith("[register] ran in ")]
    found = list(database.execute("select key, type, data from artifact"))
    kinds = {(key, kind) for key, kind, _ in found}
    assert {(f"progress-{stage.replace('_', '-')}", "progress") for stage in STAGES} <= kinds
    assert {("samples-evaluate", "table"), ("mlflow-run", "markdown")} <= kinds
    data = {key: value for key, _, value in found}
    assert {data[key] for key in data if key.startswith("progress-")} == {100}
    assert "response" in data["samples-evaluate"]
    assert "| rl | rl | ran |" in data["run-card"]
    assert first.result["mlflow_run_id"] in data["mlflow-run"]
    saved = "select count(*) from events where event = 'posttrain.checkpoint.saved'"
    assert next(database.execute(saved)) == (3,)


def test_the_log_is_in_mlflow_too(first: Finished) -> None:
    run = MlflowClient(first.result["mlflow_uri"]).get_run(first.result["mlflow_run_id"])
    text = load_text(f"{run.info.artifact_uri}/log.txt")
    assert "INFO    [rl] step 4/4  reward " in text and "[register] ran in " in text


def client_tags(first: Finished) -> dict[str, str]:
    client = MlflowClient(first.result["mlflow_uri"])
    tags: dict[str, str] = client.get_run(first.result["mlflow_run_id"]).data.tags
    return tags


def test_the_same_command_again_reuses_every_stage(workspace: Path, first: Finished) -> None:
    again = run_loaded(
        "run", str(workspace / "run.yaml"), "--home", str(workspace / "home"), "--json"
    )
    assert again.code == 0, again.text
    assert {s["status"] for s in again.result["stages"].values()} == {"cached"}
    assert "reads its inputs" not in again.text
    for name in STAGES:
        assert (
            again.result["stages"][name]["artifacts"] == first.result["stages"][name]["artifacts"]
        )


def test_the_plan_of_a_finished_run_has_nothing_to_compute(
    workspace: Path, first: Finished
) -> None:
    home = str(workspace / "home")
    plan = run_loaded("plan", str(workspace / "run.yaml"), "--home", home, "--json")
    assert {row["stage"]: row["reason"] for row in plan.result["stages"] if not row["cached"]} == {}


@pytest.mark.usefixtures("reports_to_shared_prefect")
def test_a_changed_kl_coefficient_reruns_rl_and_what_follows_only(
    workspace: Path, first: Finished
) -> None:
    change = "stages.rl.kl.controller={name: fixed, coef: 0.5}"
    home = str(workspace / "home")
    plan = run_loaded(
        "plan", str(workspace / "run.yaml"), "--set", change, "--home", home, "--json"
    )
    assert plan.code == 0, plan.text
    rows = {row["stage"]: row for row in plan.result["stages"]}
    (changed,) = rows["rl"]["changes"]
    assert changed["what"] == "stages.rl.kl.controller.coef" and changed["now"] == "0.5"
    assert rows["evaluate"]["reason"] == "changed: input model changed because rl runs"
    assert rows["sft"]["cached"] and not rows["sft"]["changes"]
    done = run_loaded("run", str(workspace / "run.yaml"), "--set", change, "--home", home, "--json")
    assert done.code == 0, done.text
    assert f"rl: runs again, {rows['rl']['reason']}" in done.text
    assert "evaluate: runs again, changed: input model changed: rl made another one" in done.text
    status = {name: stage["status"] for name, stage in done.result["stages"].items()}
    assert status == {
        "evaluate_base": "cached",
        "sft": "cached",
        "reward_model": "cached",
        "rl": "ran",
        "evaluate": "ran",
        "register": "ran",
    }


@pytest.mark.usefixtures("reports_to_shared_prefect")
def test_a_damaged_artifact_is_computed_again_with_a_warning(
    workspace: Path, first: Finished
) -> None:
    report = next(
        a for a in first.result["stages"]["evaluate_base"]["artifacts"] if a["kind"] == "evaluation"
    )
    (Path(report["uri"]) / "rows.jsonl").write_text("tampered\n")
    done = run_loaded(
        "run", str(workspace / "run.yaml"), "--home", str(workspace / "home"), "--json"
    )
    assert done.code == 0, done.text
    assert "damaged" in done.text
    (warning,) = done.result["warnings"]
    assert warning.startswith("evaluate_base: computed again")
    loaded = posttrain.load(done.result["run_id"], home=workspace / "home")
    assert loaded.warnings == (warning,)
    status = {name: stage["status"] for name, stage in done.result["stages"].items()}
    assert status["evaluate_base"] == "ran"
    assert status["rl"] == "cached"


@pytest.mark.slow
def test_independent_stages_may_run_at_once_and_end_in_the_same_models(
    workspace: Path, first: Finished
) -> None:
    done = run_loaded(
        "run",
        str(workspace / "run.yaml"),
        "--set",
        "limits.max_parallel_stages=2",
        "--home",
        str(prepared(workspace / "parallel")),
        "--json",
    )
    assert done.code == 0, done.text

    def digests(run: Finished) -> dict[str, str]:
        made = {name: stage["artifacts"][0] for name, stage in run.result["stages"].items()}
        return {name: item["digest"] for name, item in made.items() if "model" in item["kind"]}

    assert digests(done) == digests(first)
    assert len(digests(done)) == 3


def test_blame_walks_back_from_the_registered_model_to_the_base_model(
    workspace: Path, first: Finished
) -> None:
    home = str(workspace / "home")
    done = run_loaded("blame", "tiny/1", "--home", home, "--json")
    assert done.code == 0, done.text
    past = done.result["past"]
    assert [(p["depth"], p["place"], p["stage"], p["reported_above"]) for p in past] == [
        (0, "", "rl", False),
        (1, "model", "sft", False),
        (2, "model", "", False),
        (1, "reward_model", "reward_model", False),
        (2, "model", "sft", True),
    ]
    made = {name: stage["artifacts"][0] for name, stage in first.result["stages"].items()}
    assert [p["digest"] for p in past[:2]] == [made["rl"]["digest"], made["sft"]["digest"]]
    assert past[2]["what"] == "base model"
    assert past[2]["source"] == f"directory {workspace / 'model'}"
    rl = past[0]
    assert {s["place"]: (s["default"], s["value"]) for s in rl["settings"]} == {
        "model.dtype": ("auto", "float32"),
        "model.max_model_len": (1024, 256),
        "task.left_digits": ([2, 2], [1, 1]),
        "task.right_digits": ([2, 2], [1, 1]),
        "evaluation.num_problems": (200, 4),
        "evaluation.max_response_length": (16, 8),
        "evaluation.num_samples": (4, 2),
        "stages.rl.steps": (30, 4),
        "stages.rl.prompts_per_step": (16, 4),
        "stages.rl.num_generations": (8, 4),
        "stages.rl.num_mini_batches": (1, 2),
        "stages.rl.micro_batch_size": (32, 6),
        "stages.rl.generation.max_response_length": (16, 8),
        "stages.rl.rewards": (
            [
                {
                    "name": "accuracy",
                    "weight": 1.0,
                    "label": "accuracy",
                    "only_if": None,
                    "tasks": None,
                }
            ],
            [
                {
                    "name": "accuracy",
                    "weight": 1.0,
                    "label": "accuracy",
                    "only_if": None,
                    "tasks": None,
                },
                {
                    **{
                        "name": "reward_model",
                        "weight": 0.2,
                        "label": "reward_model",
                        "only_if": None,
                        "tasks": None,
                    },
                    "transform": "sigmoid",
                },
            ],
        ),
        "stages.rl.optimizer.learning_rate": (5e-6, 1e-3),
        "stages.rl.evaluate_every": (10, 2),
        "stages.rl.checkpoint_every": (0, 1),
    }
    read = {(data["name"], data["context"]): data for data in rl["data"]}
    assert read["arithmetic-train", "train"]["num_rows"] == 16
    assert len(read["arithmetic-held_out", "held_out"]["sha256"]) == 64
    assert rl["plugins"]["reward accuracy"].startswith("posttrain ")
    assert rl["mlflow_run_id"] == first.result["stages"]["rl"]["mlflow_run_id"]
    assert rl["run_id"] == first.result["run_id"]


def test_blame_refuses_what_is_no_model_and_names_those_there_are(
    workspace: Path, first: Finished
) -> None:
    home = str(workspace / "home")
    wanted = {
        "tinny": "did you mean 'tiny'?",
        "tiny@nobody": "has no alias 'nobody'",
        "tiny/9": "has no version 9",
        str(workspace): "no stage of this store made",
    }
    for model, text in wanted.items():
        done = run_loaded("blame", model, "--home", home)
        assert done.code == (2 if model == "tinny" else 4) and text in done.text, done.text
        assert "Traceback" not in done.text


def test_a_run_leaves_a_card_with_what_was_done_and_whether_it_helped(
    workspace: Path, first: Finished
) -> None:
    folder = workspace / "home" / "runs" / first.result["run_id"]
    card = (folder / "run_card.md").read_text()
    assert "No difference is shown" in card or "Better:" in card or "Worse:" in card
    metrics = first.result["stages"]["evaluate"]["metrics"]
    if metrics["eval/gain_low"] <= 0 <= metrics["eval/gain_high"]:
        sampled_shows = (
            not metrics["eval/sampled_gain_low"] <= 0 <= metrics["eval/sampled_gain_high"]
        )
        lead = "" if sampled_shows else "> "
        assert f"{lead}No difference is shown: held-out accuracy, evaluate: " in card
    assert " points " in card and "] over evaluate" in card, "the baseline has its name"
    for name, stage in first.result["stages"].items():
        row = f"| {name} | {stage['kind']} | ran |".replace("_", "\\_")
        assert row in card, row
    assert "| stages.rl.steps | 30 | 4 |" in card
    assert "| in MLflow | <http://127.0.0.1:5000/#/experiments/" in card
    assert "?workflowType=machine_learning> |" in card and "/runs/flow-run/" in card
    assert "## Sample answers" in card and "What is" in card
    assert "{'" not in card and "accuracy (" in card, "no Python in it"
    client = MlflowClient(first.result["mlflow_uri"])
    points = client.get_metric_history(
        first.result["stages"]["rl"]["mlflow_run_id"], "tokens/response"
    )
    assert f"| tokens sampled in training | {sum(p.value for p in points):.4g} |" in card
    page = (folder / "run_card.html").read_text()
    assert 'src="data:image/png;base64,' in page and 'src="http' not in page
    stored = {item.path for item in client.list_artifacts(first.result["mlflow_run_id"])}
    assert {"run_card.md", "run_card.html"} <= stored
