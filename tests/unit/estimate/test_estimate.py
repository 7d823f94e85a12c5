"""Estimates against examples worked by hand, models that exist, and the counts of real files."""

from __future__ import annotations

import itertools
import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.sections import LoraSection, ModelSection, OptimizerSection
from posttrain.core.estimate.estimate import ADAMW_BYTES, FILE_BYTES_S, LOADING_S, Estimator
from posttrain.core.estimate.memory import checkpoints, kept_for_backward, trained_model
from posttrain.core.estimate.rates import BUDGET_S, PEAKS, Rates, measure
from posttrain.core.estimate.report import estimate_run
from posttrain.core.estimate.shape import find_model, shape_of, stand_in
from posttrain.core.estimate.tokens import Lengths, Rows, RunData
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.lora import add_adapter
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.adamw import AdamW
from posttrain.core.training.optim import MasterOptimizer
from posttrain.pipelines.api.planned import arithmetic
from tests.helpers.pipeline import write_config

MANAGER = PluginManager()
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SFT: dict[str, Any] = {"kind": "sft", "inputs": {"model": "base"}}
RL: dict[str, Any] = {"kind": "rl", "inputs": {"model": "base"}}
CPU = Rates("made up", 3e9, 1e9, 1e9, 0.0, 1e9, on_gpu=False)
LENGTHS = Lengths(20.0, (8.0, 10), 0, "made up")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def run_data(folder: Path, stages: dict[str, Any], source: Path, **sections: Any) -> RunData:
    section = {"source": str(source), "dtype": "float32", "max_model_len": 256}
    given = {
        "model": section | sections.pop("model", {}),
        "task": {"name": "arithmetic"},
        "engine": "transformers",
        "stages": stages,
        **sections,
    }
    path = write_config(folder / "run.yaml", given)
    return RunData(resolve(load_config([path], []), MANAGER).config, MANAGER)


def estimator(data: RunData, rates: Rates = CPU, each: int = 4) -> Estimator:
    known = find_model(data.config.model, Path("no-cache"))
    assert known is not None
    size = float(each * known.shape.total)
    return Estimator(data, LENGTHS, known.shape, rates, "transformers", 64, size, each, each)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=tied, layers=3)
    known = find_model(ModelSection(source=str(folder)), tmp_path)
    assert known is not None and known.how == "counted from its config"
    real = AutoModelForCausalLM.from_pretrained(folder)
    shape, embedding = known.shape, real.get_input_embeddings().weight.numel()
    assert shape.total == sum(p.numel() for p in real.parameters())
    assert (shape.embedding, shape.head) == (embedding, 0 if tied else embedding)
    assert shape.active == shape.total - shape.embedding - shape.head and shape.layers == 3
    lora = LoraSection(rank=4)
    add_adapter(real, lora, seed=0)
    trained = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert shape.trained(lora) == trained
    assert shape.trained(None, head=False) == shape.total - shape.head + shape.hidden


def test_a_token_uses_some_of_a_model_s_experts() -> None:
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=100,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    experts = 2 * 8 * 3 * 64 * 128
    shape = shape_of(config)
    assert shape.idle == experts * 6 // 8
    real = AutoModelForCausalLM.from_config(config)
    add_adapter(real, LoraSection(rank=4), seed=0)
    factors = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert shape.trained(LoraSection(rank=4)) == factors


@pytest.mark.parametrize("parameters", [135e6, 1.5e9, 7e9, 70e9])
def test_a_name_stands_for_a_llama_of_its_size(parameters: float) -> None:
    assert shape_of(stand_in(parameters)).total == pytest.approx(parameters, rel=0.3)


def test_a_model_that_is_not_here_is_known_by_its_name_or_not_at_all(tmp_path: Path) -> None:
    named = find_model(ModelSection(source="Someone/Model-1.5B-Chat"), tmp_path)
    assert named is not None and "not on this disk" in named.how and named.source is None
    assert find_model(ModelSection(source="Someone/model"), tmp_path) is None


@pytest.mark.parametrize(("size", "least"), [("7B", 100.0), ("32B", 450.0)])
def test_a_large_model_is_estimated_without_its_memory(
    tmp_path: Path, model: Path, size: str, least: float
) -> None:
    data = run_data(tmp_path, {"rl": RL}, model, model={"source": f"x/Foo-{size}"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = estimate_run(data, tmp_path, ["rl"], "transformers", 64)
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    assert held < 0.7 and found["calibration"]["seconds"] <= BUDGET_S
    assert found["stages"]["rl"]["memory_gb"] > least and not found["stages"]["rl"]["fits"]
    assert any("rl does not fit" in n and "stages.rl.lora={}" in n for n in found["notes"])


def test_rows_share_prompts_and_what_all_prompts_begin_with() -> None:
    rows = Rows(number=8, group=4, micro=4, prompt=10, response=6, longest=8, shared=3)
    assert rows.passes == 2
    assert rows.tokens == 2 * 3 + 2 * (10 - 3) + 8 * (6 - 1)


def test_counts_are_those_of_the_file(tmp_path: Path, model: Path) -> None:
    """Not 200 problems and 1,000 answers, which the config allows."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{i} + {i}?", "answer": str(2 * i)}) + "\n" for i in range(60)
        )
    )
    stages = {"it": {"kind": "evaluate", "inputs": {"model": "base"}}, "sft": SFT}
    task = {"name": "jsonl", "path": str(path), "held_out_permille": 300}
    data = run_data(tmp_path, stages, model, task=task)
    held, train = data.count("held_out", 200), data.count("train", 10_000)
    assert 0 < held < 60 and held + train == 60
    text = arithmetic(data.config.stages["it"], data)
    assert f"{held} problems x (1 greedy + 4 sampled) = {5 * held} answers" in text
    assert f"{320 / train:.1f} passes over {train} problems" in arithmetic(
        data.config.stages["sft"], data
    )
    passes = estimator(data).work(data.config.stages["it"]).passes
    sampled = [(each.rows.number, each.times) for each in passes if each.sampled]
    assert sampled == [(held, 1), (4 * held, 1)]


@pytest.mark.parametrize("permille", [1, 999])
def test_a_split_without_problems_has_a_plan(tmp_path: Path, model: Path, permille: int) -> None:
    """What is wrong with it, the run says; the plan counts no problems."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(3)))
    kinds = ("evaluate", "sft", "reward_model", "process_reward_model", "rl", "transform")
    stages = {kind: {"kind": kind, "inputs": {"model": "base"}} for kind in kinds}
    stages["transform"]["generation"] = {"max_response_length": 16}  # type: ignore[assignment]
    task = {"name": "jsonl", "path": str(path), "held_out_permille": permille}
    data = run_data(tmp_path, stages, model, task=task)
    assert 0 in (data.count("held_out", 1), data.count("train", 1))
    assert all(arithmetic(stage, data) for stage in data.config.stages.values())
    found = estimate_run(data, tmp_path, kinds, "transformers", 64, "cpu")
    assert list(found["stages"]) == [*kinds] and math.isfinite(found["total"]["seconds"])


def test_preferences_are_split_as_the_run_splits_them(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    row = {"chosen": "x" * 40, "rejected": "y" * 40}
    path.write_text("".join(json.dumps({"prompt": f"P{i}"} | row) + "\n" for i in range(50)))
    stage = {"kind": "preference", "inputs": {"model": "base"}, "data": str(path), "epochs": 2}
    data = run_data(tmp_path, {"it": stage}, model)
    found = data.judged(data.config.stages["it"])  # type: ignore[arg-type]
    assert (found.train, found.held_out, found.steps) == (40, 10, 2 * 3)
    assert (found.sampled, found.tokens) == (0, 10)


def test_responses_are_as_long_as_the_limit_until_an_sft_stage(tmp_path: Path, model: Path) -> None:
    after = {**RL, "inputs": {"model": "sft"}}
    data = run_data(tmp_path, {"sft": SFT, "raw": RL, "rl": after}, model)
    stages = data.config.stages
    assert LENGTHS.response(data.config, stages["raw"], 16) == (16, 16)
    assert LENGTHS.response(data.config, stages["rl"], 16) == (8.0, 10)


def test_an_sft_step_is_worked_out_by_hand(tmp_path: Path, model: Path) -> None:
    stage = {**SFT, "steps": 3, "batch_size": 4, "micro_batch_size": 2}
    found = estimator(run_data(tmp_path, {"sft": stage}, model))
    shape = found.shape
    tokens = 4 * (20 + 8 - 1)
    attention = shape.attention_width * 28 * shape.layers
    products = (shape.active + attention) * tokens + shape.hidden * shape.vocabulary * 4 * 8
    step = 6 * products / 3e9 + shape.total * ADAMW_BYTES / 1e9
    row = found.stages(["sft"])["sft"]
    assert row["steps"] == 3 and row["phases"]["update"] == pytest.approx(step, abs=1e-4)
    files = 2 * 4 * shape.total / FILE_BYTES_S  # the model is read and written
    assert row["seconds"] == pytest.approx(3 * step + LOADING_S + files, abs=0.01)


def test_sampling_is_worked_out_by_hand(tmp_path: Path, model: Path) -> None:
    """Compute-bound, and with nothing to compute, bound by reading the weights."""
    made = estimator(run_data(tmp_path, {"rl": RL}, model))
    shape, rows = made.shape, Rows(8, 4, 8, 20, 5, 5, 0)
    output = shape.hidden * shape.vocabulary
    reading = 2 * (shape.active * 2 * 20 + output * 2) / 1e9
    decoding = 2 * (shape.active + output) * 8 * 4 / 1e9
    numbers = 8 * 4 * (20 + 2.5) * shape.kv_width * shape.layers
    traffic = (numbers * 4 + 8 * 5 * shape.vocabulary * 24) / 1e9
    assert made.generate(rows) == pytest.approx(reading + decoding + traffic)
    quick = estimator(made.data, Rates("", 1e30, 1e30, 1e9, 0.5, 1e9, on_gpu=False))
    weights = 4 * 4 * (shape.active + output) / 1e9
    assert quick.generate(rows) == pytest.approx(traffic + weights + 4 * shape.layers * 0.5)


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({"kl": {"controller": {"name": "fixed", "coef": 0.1}}}, "update"),
        ({"kl": {"controller": {"name": "fixed", "coef": 0.0}}, "epochs": 3}, "update"),
        ({"evaluate_every": 1}, "evaluate"),
        ({"sampled_evaluation": {"every": 10}}, "evaluate_sampled"),
        ({"checkpoint_every": 1}, "checkpoint"),
        ({"critic": {}, "advantage": "gae"}, "advantage"),
    ],
)
def test_what_a_step_computes_takes_time(
    tmp_path: Path, model: Path, change: dict[str, Any], phase: str
) -> None:
    plain = {**RL, "evaluate_every": 0, "kl": {"controller": {"name": "fixed", "coef": 0.0}}}
    rows = []
    for stage in (plain, plain | change):
        rows.append(estimator(run_data(tmp_path, {"rl": stage}, model)).stages(["rl"])["rl"])
    assert rows[1]["phases"][phase] > rows[0]["phases"][phase]
    assert rows[1]["seconds"] > rows[0]["seconds"]


def test_a_step_on_given_answers_samples_nothing(tmp_path: Path, model: Path) -> None:
    inputs = {"model": "base", "teacher": "big"}
    stages: dict[str, Any] = {"big": {"kind": "sft", "inputs": {"model": "base"}}}
    shares = {"own": 1.0, "half": 0.5, "data": 0.0}
    for name, share in shares.items():
        stages[name] = {"kind": "distill", "inputs": inputs, "on_policy_share": share}
    stages["seq"] = {**stages["half"], "seq_kd": True}
    stages["record"] = {"kind": "record_teacher", "inputs": {"model": "big"}}
    stages["sampled"] = {**stages["record"], "answers": "sampled", "num_generations": 4}
    found = estimator(run_data(tmp_path, stages, model)).stages([*stages])
    rollout = {name: found[name]["phases"]["rollout"] for name in shares}
    assert rollout["own"] > 0 and rollout["data"] == 0
    assert rollout["half"] == pytest.approx(rollout["own"] / 2, abs=1e-4)
    assert found["seq"]["memory"]["teachers"] > found["half"]["memory"]["teachers"]
    phases = {name: found[name]["phases"] for name in ("record", "sampled")}
    assert phases["record"]["generate"] == 0 < phases["record"]["score"]
    assert phases["sampled"]["generate"] > 0
    assert phases["sampled"]["score"] > phases["record"]["score"]


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, "masters"), (torch.bfloat16, "masters")]
)
def test_a_model_in_training_holds_what_the_optimizer_holds(
    model: Path, dtype: torch.dtype, rounding: Any
) -> None:
    real, section = AutoModelForCausalLM.from_pretrained(model, dtype=dtype), OptimizerSection()
    optimizer = MasterOptimizer(real, section, 1)
    optimizer.fill_gradients()
    weights = {id(parameter) for parameter in real.parameters()}
    masters = [m for m in optimizer._masters if id(m) not in weights]
    gradients = [m.grad for m in optimizer._masters]
    optimizer.step()
    state = optimizer.state_dict()["optimizer"]["state"].values()
    moments = [s[name] for s in state for name in ("exp_avg", "exp_avg_sq")]

    def size(tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    known = find_model(ModelSection(source=str(model)), model)
    assert known is not None
    found = trained_model(known.shape, None, AdamW.of(section), dtype.itemsize, head=True)
    assert found.held == {
        "weights": size(real.parameters()),
        "masters": size(masters),
        "gradients": size(gradients),
        "moments": size(moments),
    }
    assert found.checkpoint == 12 * known.shape.total


def test_options_that_save_memory_do() -> None:
    shape = shape_of(stand_in(1e9))
    plain = trained_model(shape, None, AdamW.of(OptimizerSection()), 2, head=True)
    assert sum(plain.held.values()) == (2 + 4 + 4 + 8) * shape.total
    small = OptimizerSection(moments="8bit", rounding="stochastic")
    assert (
        sum(trained_model(shape, None, AdamW.of(small), 2, head=True).held.values())
        == 8 * shape.total
    )
    lora = trained_model(shape, LoraSection(), AdamW.of(OptimizerSection()), 2, head=True)
    assert lora.held["weights"] > 2 * shape.total and lora.held["moments"] < 0.1 * shape.total
    rows, kept = Rows(32, 8, 32, 100, 100, 100, 0), []
    for micro, checkpointing in ((32, False), (8, False), (32, True)):
        part = rows._replace(micro=micro)
        kept.append(
            kept_for_backward(shape, part, 2, head=False, checkpointing=checkpointing, on_gpu=True)
        )
    assert kept[1] == kept[0] / 4 and kept[2] < kept[0] / 4


def test_what_is_kept_for_the_backward_pass_is_near_what_torch_keeps() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(  # type: ignore[call-arg]
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=1000, attn_implementation="eager",
    )  # fmt: skip
    real: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    weights, kept = {p.untyped_storage().data_ptr() for p in real.parameters()}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states = real.base_model(input_ids=torch.ones(4, 64, dtype=torch.int64))
    del states
    rows = Rows(4, 1, 4, 32, 33, 33, 0)
    found = kept_for_backward(
        shape_of(config), rows, 4, head=False, checkpointing=False, on_gpu=False
    )
    assert found == pytest.approx(sum(size for size, _ in kept.values()), rel=0.3)


def test_checkpoints_are_counted_once_where_periods_meet() -> None:
    assert checkpoints(3, 8, 0) == 2, "after 3 and 6"
    assert checkpoints(3, 9, 2) == 5, "after 2, 3, 4, 6 and 8; not after the last"
    assert checkpoints(0, 9, 0) == 0


def test_checkpoints_take_disk_while_the_stage_runs_and_those_kept_stay(
    tmp_path: Path, model: Path
) -> None:
    stage = {**RL, "steps": 9, "checkpoint_every": 3}
    plain, kept = (
        estimator(run_data(tmp_path, {"rl": stage}, model, keep=keep)).stages(["rl"])["rl"]
        for keep in ({}, {"every": 2})
    )
    size = 12 * AutoModelForCausalLM.from_pretrained(model).num_parameters() / 1e9
    assert plain["disk_peak_gb"] - plain["disk_gb"] == pytest.approx(2 * size, abs=2e-4)
    assert kept["disk_gb"] - plain["disk_gb"] == pytest.approx(4 * size, abs=2e-4)


def test_checkpoints_that_the_time_asks_for_take_disk_too(tmp_path: Path, model: Path) -> None:
    stage = {**RL, "steps": 9, "checkpoint_every": 0}
    size = 12 * AutoModelForCausalLM.from_pretrained(model).num_parameters() / 1e9
    for minutes, count in ((0, 0), (1e-9, 3), (1e9, 0)):  # two that are kept, one being written
        data = run_data(tmp_path, {"rl": stage}, model, keep={"checkpoint_minutes": minutes})
        found = estimator(data).stages(["rl"])["rl"]
        assert found["disk_peak_gb"] - found["disk_gb"] == pytest.approx(count * size, abs=2e-4)


def test_the_engine_stays_once_it_was_needed(tmp_path: Path, model: Path) -> None:
    stages = {
        "first": SFT,
        "judge": {"kind": "evaluate", "inputs": {"model": "first"}},
        "second": {**SFT, "inputs": {"model": "first"}},
    }
    rows = estimator(run_data(tmp_path, stages, model)).stages(list(stages))
    assert ["engine" in row["memory"] for row in rows.values()] == [False, True, True]


def test_the_suite_held_out_is_estimated_as_an_evaluation(tmp_path: Path, model: Path) -> None:
    bench = {"kind": "benchmark", "inputs": {"model": "base"}, "suites": ["held_out"]}
    evaluate = {"kind": "evaluate", "inputs": {"model": "base"}}
    stages = {"bench": bench, "limited": {**bench, "limit": 1}, "evaluate": evaluate}
    rows = estimator(run_data(tmp_path, stages, model)).stages(list(stages))
    assert rows["bench"] == rows["evaluate"] and rows["bench"]["seconds"] > 0
    assert rows["limited"]["step_s"] < rows["bench"]["step_s"]


def test_other_benchmarks_are_not_estimated_rather_than_for_nothing(
    tmp_path: Path, model: Path
) -> None:
    bench = {"kind": "benchmark", "inputs": {"model": "first"}}
    bench |= {"suites": ["held_out", "lm_eval:gsm8k"]}
    data = run_data(tmp_path, {"first": SFT, "bench": bench}, model)
    found = estimate_run(data, tmp_path, ["first", "bench"], "transformers", 64, "cpu")
    assert list(found["stages"]) == ["first"]
    assert "Not estimated, and not in the totals: bench." in found["notes"]
    assert any("lm-eval or inspect-ai takes is known only" in note for note in found["notes"])


def slow_clock(step: float, start: float = 0.0) -> Callable[[], float]:
    """A clock that has moved by `step` each time it is read, the first time by `start` more."""
    times = itertools.chain([0.0], itertools.count(start + step, step))
    return lambda: next(times)


@pytest.mark.parametrize("step", [0.05, 0.2, 1.0, 10.0])
def test_measuring_ends_in_time_however_slow_the_machine_is(step: float) -> None:
    """Only one reading of the clock, the last, comes after the time is up."""
    runtime = ModelRuntime.from_config(ModelSection(dtype="float32", device="cpu"))
    threads = torch.get_num_threads()
    rates = measure(runtime, slow_clock(step))
    assert rates.measured["seconds"] <= max(BUDGET_S, 12 * step), "12: one per piece, no loops"
    assert min(rates.train_flops, rates.forward_flops, rates.bytes_s) > 0
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("start", [1.4, 2.4, 4.0])
def test_rates_are_finite_when_the_probe_takes_long_to_build(start: float) -> None:
    runtime = ModelRuntime.from_config(ModelSection(dtype="float32", device="cpu"))
    rates = measure(runtime, slow_clock(0.1, start))
    assert all(math.isfinite(value) for value in rates.measured.values())


def test_a_machine_is_measured_in_time() -> None:
    runtime = ModelRuntime.from_config(ModelSection(dtype="float32", device="cpu"))
    rates = measure(runtime)
    assert rates.measured["seconds"] <= BUDGET_S
    assert rates.measured["training_gflops"] > 0 and rates.memory > 1e9


@pytest.mark.parametrize("device", PEAKS)
def test_a_device_of_the_table_is_estimated_without_measuring(
    tmp_path: Path, model: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.core.estimate.report.measure", pytest.fail)
    data = run_data(tmp_path, {"rl": RL}, model)
    found = estimate_run(data, tmp_path, ["rl"], "transformers", 64, device)
    assert found["calibration"] == {} and device in found["notes"][0]
    assert found["stages"]["rl"]["seconds"] > 0


RECIPES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_shipped_config_has_estimates(path: Path, tmp_path: Path, model: Path) -> None:
    sample = Path(__file__).resolve().parents[2] / "data" / "gsm8k"
    sets = [f"model.source={model}", "engine=transformers", "model.until_registered=null"]
    sets += [f"task.path={sample}"] if "gsm8k" in path.stem else []
    resolved = resolve(load_config([path], sets), MANAGER)
    data = RunData(resolved.config, MANAGER)
    found = estimate_run(data, tmp_path, resolved.order, "transformers", 64, "cpu")
    assert list(found["stages"]) == list(resolved.order)
    assert found["total"]["seconds"] > 0 and found["total"]["memory_gb"] > 0
    assert all(arithmetic(stage, data) for stage in resolved.config.stages.values())
