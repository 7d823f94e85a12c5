"""What follows from rates: counts in closed form, and what costs more than what."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.supervised_stages import PreferenceDataStage
from posttrain.core.costs import reuse
from posttrain.core.costs.lengths import ROWS_TO_END, Lengths, Responses
from posttrain.core.costs.rates import Line, Sequences
from posttrain.core.costs.sureness import SURE, UNSURE, idle_groups
from posttrain.core.costs.times import LOADING_S, StageTime, preference_rows
from tests.helpers.costs import ALL, MadeUp, estimator, run_config
from tests.helpers.tiny import make_tiny_model

RL: dict[str, Any] = {
    "reuse_outputs": False,
    "kind": "rl",
    "inputs": {"model": "base"},
    "prompts_per_step": 4,
    "num_generations": 4,
    "micro_batch_size": 16,
    "generation": {"max_response_length": 8},
    "evaluate_every": 0,
    "kl": {"controller": {"name": "fixed", "coef": 0.0}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def rl(model: Path, rates: MadeUp = ALL, engine: str = "transformers", **fields: Any) -> StageTime:
    config = run_config(model, {"rl": RL | fields})
    found = estimator(config, rates, engine).costs(["rl"])["rl"].time
    assert found is not None
    return found


def test_every_response_is_drawn_token_by_token(model: Path) -> None:
    assert rl(model, MadeUp(drawn=1.0)).phases["rollout"] == pytest.approx(4 * 4 * 8)


UNTRAINED = Responses((8,), UNSURE)


def test_the_layers_decode_all_tokens_but_the_last(model: Path) -> None:
    """Those of responses that have said the same once."""
    decoded = rl(model, MadeUp(decoded=1.0)).phases["rollout"]
    rows = [4 * 4 * UNTRAINED.distinct(4, tokens) for tokens in range(1, 8)]
    assert 4 < rows[0] < rows[1] < 15.5 < rows[-1] < 16
    assert decoded == pytest.approx(2 * sum(rows))  # two layers
    passes = rl(model, MadeUp(decoding_pass=1.0)).phases["rollout"]
    assert passes == pytest.approx(len(rows))


def test_a_prompt_is_read_once_a_group_or_for_each_response(model: Path) -> None:
    """And what all begin with once."""
    config = run_config(model, {"rl": RL})
    found = {}
    for engine in ("transformers", "vllm"):
        made = estimator(config, MadeUp(read=1.0), engine)
        time = made.costs(["rl"])["rl"].time
        assert time is not None
        found[engine] = time.phases["rollout"]
    prompt, shared = round(made.work.lengths.prompt), made.work.lengths.shared
    assert prompt > shared > 0
    assert found["transformers"] == pytest.approx(2 * (shared + 4 * (prompt - shared)))
    assert found["vllm"] == pytest.approx(2 * 16 * prompt)


def test_an_engine_of_our_own_takes_weights_as_long_as_it_was_seen_to(model: Path) -> None:
    """Another one's copies are taken for plain ones."""
    rates = MadeUp(sync_s=3.0, copy_s=1.0)
    ours, other = (rl(model, rates, name).phases["sync"] for name in ("transformers", "vllm"))
    assert ours == pytest.approx(3 * other) and other > 0


def test_an_engine_that_tells_of_its_weights_is_probed_once(model: Path) -> None:
    """Unless it has an adapter. Its weights are compared after each sync."""

    def check(rates: MadeUp, when: str, engine: str = "transformers", **fields: Any) -> float:
        return rl(model, rates, engine, steps=5, check_sync=when, **fields).phases["sync_check"]

    probe, compare = MadeUp(decoded=1.0), MadeUp(copy_s=1.0)
    once = check(probe, "first")
    assert check(probe, "every") == once > 0
    assert check(probe, "every", "vllm") == pytest.approx(5 * once)
    assert check(probe, "every", lora={}) == pytest.approx(5 * once)
    assert check(compare, "every") == pytest.approx(5 * check(compare, "first")) != 0
    assert check(ALL, "never") == check(ALL, "never", "vllm") == 0


def test_an_update_computes_each_prompt_once_and_no_last_token(model: Path) -> None:
    config = run_config(model, {"rl": RL})
    made = estimator(config, MadeUp(trained=1.0))
    prompt, shared = round(made.work.lengths.prompt), made.work.lengths.shared
    update = made.costs(["rl"])["rl"].time
    assert update is not None and shared > 0
    prompts = shared + 4 * (prompt - shared)
    own = 16 * 7 * UNTRAINED.computed(4)
    assert update.phases["update"] == pytest.approx(2 * (prompts + own)) and own < 16 * 7


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({"num_generations": 8}, "rollout"),
        ({"num_generations": 8}, "update"),
        ({"generation": {"max_response_length": 16}}, "update"),
        ({"epochs": 2}, "update"),
        ({"num_mini_batches": 2}, "update"),  # the old policy's log-probs are needed
        ({"kl": {"controller": {"name": "fixed", "coef": 0.1}}}, "update"),
        ({"critic": {}, "advantage": "gae"}, "update"),
        ({"critic": {}, "advantage": "gae"}, "advantage"),
        ({"advantage": "remax"}, "advantage"),
        ({"evaluate_every": 10}, "evaluate"),
        ({"checkpoint_every": 10}, "checkpoint"),
        ({"rewards": ["reward_model"], "inputs": {"model": "base", "reward_model": "r"}}, "score"),
    ],
)
def test_what_asks_for_more_takes_longer(model: Path, fields: dict[str, Any], phase: str) -> None:
    stages = {"r": {"kind": "reward_model", "inputs": {"model": "base"}}, "rl": RL | fields}
    more = estimator(run_config(model, stages)).costs(["rl"])["rl"].time
    assert more is not None
    assert more.phases[phase] > rl(model).phases[phase]


def test_micro_batches_add_up_and_each_reads_what_prompts_share(model: Path) -> None:
    free = MadeUp(trained=1.0)
    whole, parts = (rl(model, free, micro_batch_size=n).phases["update"] for n in (16, 4))
    shared = estimator(run_config(model, {"rl": RL})).work.lengths.shared
    assert parts - whole == pytest.approx(2 * 3 * shared) and shared > 0
    assert rl(model, micro_batch_size=4).phases["update"] > rl(model).phases["update"]


@pytest.mark.parametrize(
    ("fields", "reused"),
    [
        ({}, 1.0),
        ({"num_mini_batches": 2}, 0.5),
        ({"num_mini_batches": 2, "epochs": 2}, 0.25),
        ({"reuse_outputs": False}, 0.0),
        ({"max_staleness": 1}, 0.0),
        ({"kl": {"controller": {"name": "fixed", "coef": 0.1}}}, 1.0),
        ({"lora": {"rank": 2}}, 0.0),
        ({"generation": {"max_response_length": 200}, "num_generations": 50_000}, 0.0),  # 6 GB
    ],
)
def test_the_first_update_takes_what_sampling_computed(
    model: Path, fields: dict[str, Any], reused: float
) -> None:
    given = {"reuse_outputs": True, **fields}
    taken, made = (
        rl(model, MadeUp(**{name: 1.0}), **given).phases["update"]
        for name in ("trained_reused", "trained")
    )
    assert taken == pytest.approx(reused * (taken + made))
    assert made == pytest.approx((1 - reused) * (taken + made))


@pytest.mark.parametrize("short", [0, 1])
def test_logits_are_known_if_those_of_a_whole_step_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """Those of two mini-batches, drawn after 4 prompts and 16 x 7 tokens."""
    vocabulary = estimator(run_config(model, {"rl": RL})).work.shape.vocabulary
    monkeypatch.setattr(reuse, "MAX_LOGITS_BYTES", 4 * vocabulary * (4 + 16 * 7) - short)
    found = rl(model, MadeUp(known_logits=1.0), reuse_outputs=True, num_mini_batches=2)
    assert (found.phases["update"] > 0) == (not short)


def test_no_engine_but_transformers_keeps_products(model: Path) -> None:
    kept = MadeUp(trained_reused=1.0)
    assert rl(model, kept, reuse_outputs=True).phases["update"] > 0
    assert rl(model, kept, "vllm", reuse_outputs=True).phases["update"] == 0


def test_time_grows_with_steps_and_evaluations_come_on_top(model: Path) -> None:
    saved = rl(model, steps=10).once
    first = rl(model, steps=10, check_sync="first").phases["sync_check"] * 10  # once a stage
    first -= rl(model, MadeUp(copy_s=ALL.copy_s), steps=1).phases["sync_check"]  # at each step
    beside = saved + LOADING_S + first
    short, long = rl(model, steps=10), rl(model, steps=20)
    assert long.total_s - beside == pytest.approx(2 * (short.total_s - beside))
    judged = rl(model, steps=10, evaluate_every=5)
    before, after = judged.once - saved, judged.phases["evaluate"]
    assert after == pytest.approx(before * 2 / 10)


def test_after_sft_responses_are_as_long_as_worked_answers(model: Path) -> None:
    sft = {"kind": "sft", "inputs": {"model": "base"}}
    after = {**RL, "inputs": {"model": "sft"}, "generation": {"max_response_length": 100}}
    config = run_config(
        model, {"sft": sft, "rl": after, "raw": {**after, "inputs": {"model": "base"}}}
    )
    found = estimator(config, MadeUp(drawn=1.0))
    times = found.costs(["sft", "rl", "raw"])
    learnt, raw = (times[name].time for name in ("rl", "raw"))
    assert learnt is not None and raw is not None
    mean = sum(found.work.lengths.worked) / len(found.work.lengths.worked)
    assert learnt.phases["rollout"] == pytest.approx(16 * mean)
    assert raw.phases["rollout"] == pytest.approx(16 * 100)


def test_a_model_that_read_few_worked_answers_runs_on(model: Path) -> None:
    """Not at all alike before it has read any, and fewer of its answers the more it has."""

    def rollout(steps: int) -> float:
        sft = {"kind": "sft", "inputs": {"model": "base"}, "steps": steps, "batch_size": 8}
        after = {**RL, "inputs": {"model": "more"}, "generation": {"max_response_length": 100}}
        stages = {"sft": sft, "more": {**sft, "inputs": {"model": "sft"}}, "rl": after}
        found = estimator(run_config(model, stages), MadeUp(drawn=1.0)).costs(["rl"])["rl"].time
        assert found is not None
        return found.phases["rollout"] / 16

    few, more, many = (rollout(steps) for steps in (1, 3, 100))
    assert 100 > few > more > many
    lengths = Lengths((9,), (10,) * 50, "")
    cut = [lengths.responses(99, read=rows).running(10) for rows in (0, 16, 64, 400)]
    expected = [math.exp(-rows / ROWS_TO_END) for rows in (0, 16, 64, 400)]
    assert cut == pytest.approx(expected, abs=0.01)


def test_what_was_reused_is_checked_on_a_few_rows(model: Path) -> None:
    scored = MadeUp(scored=1.0)
    rows, no_rows = (
        rl(model, scored, reuse_outputs=reused, num_mini_batches=1).phases["update"]
        for reused in (True, False)
    )
    assert no_rows == 0
    prompt = round(estimator(run_config(model, {"rl": RL})).work.lengths.prompt)
    assert rows >= 2 * (prompt + 7)  # two layers; two responses of 8 tokens that begin alike


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, None),
        ({"skip_idle_rows": False}, 1.0),
        ({"inputs": {"model": "base"}}, 1.0),
        ({"entropy_coef": 0.01}, 1.0),
        ({"critic": {}, "advantage": "gae"}, 1.0),
        ({"sampler": "dynamic"}, 1.0),
        ({"policy_loss": "gspo_token"}, None),
        ({"aggregator": {"name": "token-mean", "counts": "micro", "allow_local": True}}, 1.0),
    ],
)
def test_groups_that_are_worth_the_same_are_left_out_of_updates(
    model: Path, fields: dict[str, Any], left: float | None
) -> None:
    """Of a policy that was fine-tuned, where nothing else reads them; None: all that differ."""
    sft = {"kind": "sft", "inputs": {"model": "base"}}
    stages = {"sft": sft, "rl": {**RL, "inputs": {"model": "sft"}, "micro_batch_size": 4} | fields}
    every = {**stages, "rl": {**stages["rl"], "skip_idle_rows": False}}
    some, all_rows = (
        estimator(run_config(model, which), MadeUp(trained=1.0)).costs(["rl"])["rl"].time
        for which in (stages, every)
    )
    assert some is not None and all_rows is not None
    if left is None:
        found = estimator(run_config(model, stages))
        stage = found.work.config.stages["rl"]
        assert isinstance(stage, RlStage)
        left = 1 - idle_groups(found.work, stage)
        assert 0.5 < left < 0.7, "of one that is sure"
    share = some.phases["update"] / all_rows.phases["update"]
    assert share == pytest.approx(left, abs=0.05)
    assert some.phases["rollout"] == all_rows.phases["rollout"]


@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_longer_stage_has_quicker_steps_as_its_policy_grows_sure(model: Path, phase: str) -> None:
    sft = {"kind": "sft", "inputs": {"model": "base"}, "steps": 1, "batch_size": 8}
    rates = MadeUp(trained=1.0, decoded=1.0)
    one, many = (
        estimator(
            run_config(model, {"sft": sft, "rl": {**RL, "inputs": {"model": "sft"}, "steps": n}}),
            rates,
        )
        .costs(["rl"])["rl"]
        .time
        for n in (1, 100)
    )
    assert one is not None and many is not None
    assert many.phases[phase] < 0.9 * one.phases[phase]


@pytest.mark.parametrize("kind", ["reward_model", "preference"])
@pytest.mark.parametrize(("learned", "steps", "pairs_each"), [("sft", 4, 13), ("base", 7, 15)])
def test_a_fine_tuned_policy_gives_fewer_pairs_in_equal_mini_batches(
    model: Path, kind: str, learned: str, steps: int, pairs_each: int
) -> None:
    """Two pairs of each of 64 prompts, a fifth held out: 51 or 102 to train on, 16 at most."""
    sft = {"kind": "sft", "inputs": {"model": "base"}}
    pairs = {"kind": kind, "inputs": {"model": learned}, "num_prompts": 64, "pairs_per_prompt": 2}
    stages = {"sft": sft, "pairs": pairs | {"held_out_fraction": 0.2, "batch_size": 16}}
    found = estimator(run_config(model, stages), MadeUp())
    time, stage = found.costs(["pairs"])["pairs"].time, found.work.config.stages["pairs"]
    assert time is not None
    assert time.steps == steps
    assert isinstance(stage, PreferenceDataStage)
    assert preference_rows(found.work, stage).count == 2 * pairs_each


@pytest.mark.parametrize("learned", ["sft", "base"])
def test_guesses_of_what_a_fine_tuned_policy_answers_are_told(model: Path, learned: str) -> None:
    sft = {"kind": "sft", "inputs": {"model": "base"}}
    pairs = {"kind": "reward_model", "inputs": {"model": learned}}
    stages = {"sft": sft, "pairs": pairs, "rl": {**RL, "inputs": {"model": learned}}}
    notes = [n for n in estimator(run_config(model, stages)).notes if n.startswith("guessed")]
    assert len(notes) == (2 if learned == "sft" else 0)
    told = "\n".join(notes)
    assert all(f"'{name}'" in told for name in stages if name != "sft") == bool(notes)
    stages["rl"]["skip_idle_rows"] = False
    assert "teach nothing" not in "".join(estimator(run_config(model, stages)).notes)


def test_files_take_new_memory_twice_and_a_digest(model: Path) -> None:
    """A checkpoint before the last step, and the model in the end."""
    fields = {"steps": 2, "checkpoint_every": 1}
    found = rl(model, MadeUp(fresh_s=1.0, digest_s=10.0), **fields).total_s - LOADING_S
    weights = estimator(run_config(model, {"rl": RL})).work.shape.total
    model_file, checkpoint = 4 * weights, 12 * weights  # a checkpoint has two moments
    assert found == pytest.approx(12 * (model_file + checkpoint), rel=1e-3)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_decoding_pass_is_made_where_one_of_the_rows_needs_it(model: Path, rows: int) -> None:
    work = estimator(run_config(model, {"rl": RL}), MadeUp(decoding_pass=1.0)).work
    rare = Responses((10,) * 99 + (60,))
    expected = 9 + 50 * (1 - 0.99**rows)
    assert work.generate(rows, 1, rare, 60) == pytest.approx(expected)


def test_prompts_that_are_read_together_are_as_wide_as_the_longest(model: Path) -> None:
    work = estimator(run_config(model, {"rl": RL}), MadeUp(read=1.0)).work
    work = replace(work, lengths=Lengths((10,) * 8 + (50,), (), ""))
    one = Responses((1,))
    assert work.generate(8, 1, one, 1) == pytest.approx(2 * 8 * 50)
    other = replace(work, engine="vllm")
    assert other.generate(8, 1, one, 1) == pytest.approx(2 * 8 * round((80 + 50) / 9))


def test_lengths_are_the_tokenizer_s(model: Path) -> None:
    lengths = estimator(run_config(model, {"rl": RL})).work.lengths
    # A token a character: "What is 12 + 34?" in the chat, and "12 + 34 = 46" with its end.
    assert max(lengths.worked) == len("99 + 99 = 198") + 1
    assert len(lengths.prompts) == 64 and min(lengths.prompts) > len("What is 1 + 1?")


def test_a_line_goes_through_what_was_measured() -> None:
    line = Line.through((10, 3.0), (110, 13.0))
    assert (line.fixed, line.each) == pytest.approx((2.0, 0.1))
    assert line.of(0) == 0 and Line.through((10, 5.0), (110, 3.0)).each == 0


def test_how_many_responses_are_expected_to_differ() -> None:
    """As many as draws with replacement find; counted for small numbers of texts and draws."""
    for texts, group in ((2, 3), (3, 2), (5, 4)):
        draws = list(itertools.product(range(texts), repeat=group))
        mean = sum(len(set(draw)) for draw in draws) / len(draws)
        found = Responses((1,), math.log(texts)).distinct(group, 1)
        assert found * group == pytest.approx(mean)
    sure = Responses((40,), SURE)
    assert [sure.distinct(8, n) for n in (0, 4000)] == [pytest.approx(1 / 8), pytest.approx(1.0)]
    assert Responses((40,)).computed(8) == sure.computed(1) == pytest.approx(1.0)
    assert sure.computed(8) < Responses((40,), UNSURE).computed(8) < 1


def test_rows_of_different_lengths_are_as_many_tokens() -> None:
    uneven = Sequences(2, 10, 6, shared=4, longest=(16, 10))
    assert uneven.uneven(6) == [(16, [10, 5]), (7, [5, 5]), (7, [5, 5])]
    assert uneven.uneven(1) == [(10, [6])], "one alone is as long as the mean"
    assert Sequences(2, 10, 6).uneven(3) == [(10, [6, 6]), (10, [6])]
    assert Sequences(1, 10, 2, shared=9, longest=(40, 9)).uneven(2) == [(40, [9]), (10, [1])]


def test_padding_and_sharing_of_rows() -> None:
    rows = Responses((2, 4, 6, 8))
    assert (rows.longest_of(1), rows.longest_of(64), rows.mean) == (6, 8, 5)
    assert [rows.running(n) for n in (1, 2, 7, 8)] == [1.0, 0.75, 0.25, 0.0]
    assert Sequences(4, 10, 5).tokens(8) == 2 * 10 + 8 * 4
    assert Sequences(4, 10, 5, shared=6).tokens(8) == 6 + 2 * 4 + 8 * 4
    assert Lengths((4, 6), (), "").responses(9, read=math.inf).lengths == (9,)
