"""One suite for every rollout engine, on a tiny model in float32 against plain transformers.

Engines start once per module: vLLM takes seconds. Over 300 lines because it is one suite.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from posttrain.core.cluster.servers import HttpServer
from posttrain.core.contracts import (
    Environment,
    NoConfig,
    Observation,
    Opening,
    PromptGroup,
    Turn,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, DataError, ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.replicas import Replica
from posttrain.core.rollout.vllm_fleet import VllmFleet
from posttrain.core.runtime.processes import ServerProcess
from posttrain.core.types import Message, Problem, SamplingParams
from posttrain.plugins.engines.vllm_server import VllmServerEngine
from tests.helpers.engines import (
    MAX_LEN,
    STOP,
    AnyEngine,
    Host,
    Running,
    assert_logprobs,
    assert_same,
    ids_of,
    make_adapter,
    make_engine,
    make_setup,
    next_logprobs,
    teacher_forced,
)

TEXTS = ("What is 2+3?", "Hi", "Count: 1, 2, 3, 4, 5, 6, 7, 8", "Hi", "abc abc abc a")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models; the first comes with sampling defaults that no engine may obey."""
    root = tmp_path_factory.mktemp("models")
    pair = tuple(make_tiny_model(root / f"{i}", seed=i, init_std=0.25) for i in range(2))
    stop = {"max_new_tokens": 3, "eos_token_id": [2, 11, 35, 36, 47, 58, 69]}
    leak = stop | {"do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.2}
    (pair[0] / "generation_config.json").write_text(json.dumps(leak))
    return pair[0], pair[1]


@pytest.fixture(
    scope="module",
    params=[
        "transformers",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("vllm_server", marks=pytest.mark.vllm),
    ],
)
def running(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Running]:
    engine = make_engine(request.param)
    if reason := engine.unavailable_reason():
        pytest.skip(reason)
    yield from started(engine, folders)


def started(engine: AnyEngine, folders: tuple[Path, Path]) -> Iterator[Running]:
    """The engine at work, and closed afterwards."""
    model, other = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders)
    tokenizer = make_tiny_tokenizer()
    before, setup = Host.now(), make_setup(folders[0])
    engine.start(setup)
    started = Host.now()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    yield Running(engine, setup, model, other, prompts, before, started)
    engine.close()


def test_starting_and_sampling_leave_the_host_process_as_it_was(running: Running) -> None:
    assert running.host_started == running.host_before
    before = Host.now()
    running.engine.generate(running.prompts, SamplingParams(num_generations=2, seed=1))
    assert Host.now() == before


def test_each_prompt_gets_its_generations_in_order(running: Running) -> None:
    params = SamplingParams(num_generations=3, max_tokens=9, seed=1)
    groups = running.engine.generate(running.prompts, params)
    assert [len(group) for group in groups] == [3] * len(TEXTS)
    for completion in (c for group in groups for c in group):
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 9
        assert completion.engine == running.engine.name
        assert completion.engine_version
        assert completion.policy_version == 0
    assert len({c.seed for group in groups for c in group}) == 3 * len(TEXTS)
    assert running.engine.generate([], params) == []


class Asks(Environment[NoConfig]):
    """Says "Go on." as the user after each of the first two turns."""

    name = "asks"
    Config = NoConfig

    def reset(self, problem: Problem) -> Opening:
        return Opening(0)

    def step(self, state: object, turn: Turn) -> Observation:
        assert isinstance(state, int) and turn.message.role == "assistant"
        return Observation("", state == 2, state + 1, messages=(Message("user", "Go on."),))


def test_turns_of_messages_have_the_same_tokens_in_every_engine(running: Running) -> None:
    """Greedy: each sampled token is the argmax after the very tokens that stand before it."""
    chat = ChatTokenizer(make_tiny_tokenizer(), None, STOP)
    runner = EpisodeRunner(Asks(NoConfig()), chat, 3, 20)
    problems = [Problem(text, text, "", "") for text in ("Hi", "abc", "2+3?")]
    prompts = [
        PromptGroup(p, chat.encode_chat([Message("user", p.prompt)])[-30:]) for p in problems
    ]
    params = SamplingParams(num_generations=1, max_tokens=MAX_LEN - 30, temperature=0)
    follows = {end: chat.extend([Message("user", "Go on.")], ended=True) for end in STOP}
    turns = 0
    for prompt, group in zip(
        prompts, runner.generate(running.engine, prompts, params), strict=True
    ):
        (found,) = group.completions
        ids, at = list(prompt.prompt_ids), 0
        while at < len(found.token_ids):
            if found.sampled and not found.sampled[at]:
                answer = follows[ids[-1]][: len(found.token_ids) - at]
                assert found.token_ids[at : at + len(answer)] == answer
                assert not any(found.sampled[at : at + len(answer)])
                ids += answer
                at += len(answer)
                turns += 1
                continue
            assert found.token_ids[at] == int(next_logprobs(running.model, ids)[-1].argmax())
            ids.append(found.token_ids[at])
            at += 1
    assert turns > 1


def test_greedy_equals_the_argmax_of_a_plain_forward_pass(running: Running) -> None:
    params = SamplingParams(num_generations=2, max_tokens=12, temperature=0, top_p=0.5, top_k=3)
    groups = running.engine.generate(running.prompts, params)
    for prompt, group in zip(running.prompts, groups, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and not (ids[len(prompt) :] and ids[-1] in STOP):
            ids.append(int(next_logprobs(running.model, ids)[-1].argmax()))
        assert [list(c.token_ids) for c in group] == [ids[len(prompt) :]] * 2
    assert_logprobs(running, running.model, groups)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    running: Running, temperature: float
) -> None:
    params = SamplingParams(num_generations=4, max_tokens=20, temperature=temperature, seed=2)
    groups = running.engine.generate(running.prompts, params)
    assert_logprobs(running, running.model, groups, temperature)


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.6, 0), (1.0, 3), (0.7, 5)], ids=["top-p", "top-k", "both"]
)
def test_a_cut_distribution_is_never_left_and_is_renormalised(
    running: Running, top_p: float, top_k: int
) -> None:
    params = SamplingParams(8, max_tokens=8, temperature=1.3, top_p=top_p, top_k=top_k, seed=4)
    groups = running.engine.generate(running.prompts, params)
    for prompt, group in zip(running.prompts, groups, strict=True):
        for completion in group:
            rows = teacher_forced(running.model, prompt, completion, 1.3)
            for row, token, logprob in zip(
                rows, completion.token_ids, completion.logprobs, strict=True
            ):
                best = row.sort(descending=True)
                kept = (best.values[: top_k or None]).log_softmax(-1).exp()
                size = int((kept.cumsum(-1) < top_p).sum()) + 1 if top_p < 1 else len(kept)
                assert token in best.indices[:size]
                expected = row[token] - best.values[:size].logsumexp(-1)
                assert logprob == pytest.approx(float(expected), abs=running.tolerance)


def test_given_tokens_are_scored_as_by_a_plain_forward_pass(running: Running) -> None:
    scores = running.engine.score(running.prompts)
    for ids, values in zip(running.prompts, scores, strict=True):
        expected = next_logprobs(running.model, ids)[:-1].gather(-1, torch.tensor(ids)[1:, None])
        assert values == pytest.approx(expected[:, 0].tolist(), abs=running.tolerance)


def test_sampled_frequencies_follow_the_distribution(running: Running) -> None:
    # Each draw is a request; over HTTP fewer do, as the sampler behind it is the one of vllm.
    draws = 1200 if running.engine.name == "vllm_server" else 3000
    prompt = running.prompts[0]
    sampled = running.one(prompt, SamplingParams(draws, max_tokens=1, seed=5))
    counts = np.bincount([c.token_ids[0] for c in sampled], minlength=100)
    expected = next_logprobs(running.model, prompt)[-1].exp().double().numpy() * draws
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    assert len(wanted) > 10
    assert statistic < chi2.ppf(0.999, df=len(wanted) - 1)


def test_the_seed_alone_decides_the_samples(running: Running) -> None:
    params = SamplingParams(num_generations=3, max_tokens=12, seed=6)
    first = running.engine.generate(running.prompts, params)
    assert_same(running, running.engine.generate(running.prompts, params), first)
    other = running.engine.generate(running.prompts, SamplingParams(3, 12, seed=7))
    assert all(a != b for a, b in zip(ids_of(first), ids_of(other), strict=True))


def test_equal_prompts_and_the_generations_of_one_prompt_differ(running: Running) -> None:
    groups = running.engine.generate(running.prompts, SamplingParams(4, 12, seed=8))
    assert TEXTS[1] == TEXTS[3]
    first, second = ids_of(groups)[1], ids_of(groups)[3]
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert len({*first, *second}) >= 7  # two that stop at once may be equal by chance


def test_the_order_of_prompts_changes_no_response(running: Running) -> None:
    # Prompt 3 equals prompt 1: the two would swap their samples.
    order = [4, 2, 1, 0]
    for temperature in (0.0, 1.0):
        params = SamplingParams(2, max_tokens=12, temperature=temperature, seed=9)
        all_ids = ids_of(running.engine.generate(running.prompts, params))
        moved = running.engine.generate([running.prompts[i] for i in order], params)
        assert ids_of(moved) == [all_ids[i] for i in order]


def test_a_response_ends_with_its_first_stop_token_or_at_the_limit(running: Running) -> None:
    groups = running.engine.generate(running.prompts, SamplingParams(8, max_tokens=16, seed=10))
    completions = [c for group in groups for c in group]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(STOP)
        stopped = completion.token_ids[-1] in STOP
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 16


def test_a_response_ends_with_the_token_that_completes_a_stop_string(running: Running) -> None:
    tokenizer = make_tiny_tokenizer()
    free = running.engine.generate(running.prompts, SamplingParams(8, max_tokens=24, seed=21))

    def text(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    texts = [text(c.token_ids) for group in free for c in group]
    # Two characters that were really said, one pair across what would be a word; and one never.
    pairs = [said[i : i + 2] for said in texts for i in range(2, len(said) - 4)]
    strings = (pairs[0], pairs[len(pairs) // 2], "never said")
    params = SamplingParams(8, max_tokens=24, seed=21, stop_strings=strings)
    ended = running.engine.generate(running.prompts, params)
    reasons = []
    for whole, cut in zip(sum(free, []), sum(ended, []), strict=True):
        prefixes = (whole.token_ids[: n + 1] for n in range(len(whole.token_ids)))
        hits = (len(p) for p in prefixes if any(s in text(p) for s in strings))
        first = next(hits, None)
        stopped = whole.token_ids[-1] in STOP and first in (None, len(whole.token_ids))
        expected = whole.finish_reason if first is None or stopped else "stop_string"
        assert cut.token_ids == whole.token_ids[: first or len(whole.token_ids)]
        assert cut.logprobs == pytest.approx(
            whole.logprobs[: len(cut.token_ids)], abs=running.tolerance
        )
        assert cut.finish_reason == expected
        reasons.append(cut.finish_reason)
    assert reasons.count("stop_string") >= 2


def test_a_stop_string_in_the_prompt_ends_no_response(running: Running) -> None:
    params = SamplingParams(2, max_tokens=6, seed=22, stop_strings=("What", "Hi"))
    plain = SamplingParams(2, max_tokens=6, seed=22)
    assert ids_of(running.engine.generate(running.prompts, params)) == ids_of(
        running.engine.generate(running.prompts, plain)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
def test_entropies_are_those_of_the_model_at_temperature_one(
    running: Running, temperature: float
) -> None:
    """Exact from the transformers engine, over the 20 likeliest tokens from the others."""
    params = SamplingParams(2, max_tokens=8, temperature=temperature, seed=23, entropy=True)
    for prompt, group in zip(
        running.prompts, running.engine.generate(running.prompts, params), strict=True
    ):
        for completion in group:
            rows = teacher_forced(running.model, prompt, completion)
            if running.engine.name != "transformers":
                rows = rows.topk(20).values.log_softmax(-1)
            expected = -(rows.exp() * rows).sum(-1)
            assert completion.entropies == pytest.approx(expected.tolist(), abs=running.tolerance)
    without = running.engine.generate(running.prompts[:1], SamplingParams(max_tokens=2))
    assert without[0][0].entropies == ()


def test_each_prompt_may_have_its_own_limit(running: Running) -> None:
    plain = SamplingParams(3, max_tokens=12, seed=24)
    limits = (1, 12, 5, 3, 7)
    own = SamplingParams(3, max_tokens=12, seed=24, max_tokens_each=limits)
    whole = running.engine.generate(running.prompts, plain)
    for group, cut, limit in zip(
        whole, running.engine.generate(running.prompts, own), limits, strict=True
    ):
        assert [c.token_ids for c in cut] == [c.token_ids[:limit] for c in group]
        for long, short in zip(group, cut, strict=True):
            ends = len(long.token_ids) <= limit
            assert short.finish_reason == (long.finish_reason if ends else "length")


def test_more_prompt_tokens_than_one_step_takes_are_served(running: Running) -> None:
    # They differ from the start, or a cache of prefixes would make them few.
    prompts = [[40 + i] + running.prompts[0] * 22 for i in range(24)]
    groups = running.engine.generate(prompts, SamplingParams(max_tokens=3, seed=15))
    assert sum(map(len, prompts)) > 6000
    assert_logprobs(running, running.model, groups, prompts=prompts)


def test_keys_and_values_of_old_weights_do_not_serve_new_ones(running: Running) -> None:
    prompts = [running.prompts[0] * 24]  # long enough for a cache of prefixes to keep it
    params = SamplingParams(num_generations=2, max_tokens=3, seed=16)
    running.engine.generate(prompts, params)
    try:
        running.engine.sync_weights(running.other.state_dict().items(), policy_version=1)
        after = running.engine.generate(prompts, params)
        assert_logprobs(running, running.other, after, prompts=prompts)
    finally:
        running.engine.sync_weights(running.model.state_dict().items(), policy_version=0)


def test_synced_weights_answer_and_stamp_the_next_samples(running: Running) -> None:
    params = SamplingParams(num_generations=3, max_tokens=12, seed=11)
    full = running.other.state_dict()
    untied = {name: tensor for name, tensor in full.items() if name != "lm_head.weight"}
    before = running.engine.generate(running.prompts, params)
    for version, weights in ((7, untied), (8, full)):
        try:
            # The learner's own copy may be in another precision; it must not change the engine's.
            given = ((name, tensor.double()) for name, tensor in weights.items())
            running.engine.sync_weights(given, policy_version=version)
            assert running.engine.policy_version == version
            after = running.engine.generate(running.prompts, params)
            assert {c.policy_version for group in after for c in group} == {version}
            assert_logprobs(running, running.other, after)
        finally:
            running.engine.sync_weights(running.model.state_dict().items(), policy_version=0)
    assert_same(running, running.engine.generate(running.prompts, params), before)


def test_the_engine_keeps_its_own_copy_of_synced_weights(running: Running) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    copies = {name: tensor.clone() for name, tensor in running.model.state_dict().items()}
    running.engine.sync_weights(copies.items(), policy_version=0)
    before = running.engine.generate(running.prompts, params)
    for tensor in copies.values():
        tensor.zero_()
    assert_same(running, running.engine.generate(running.prompts, params), before)


@pytest.mark.parametrize("fault", ["missing", "misshaped", "unknown"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    running: Running, fault: str
) -> None:
    params = SamplingParams(num_generations=2, max_tokens=8, seed=12)
    before = running.engine.generate(running.prompts, params)
    name = "model.layers.1.mlp.up_proj.weight"
    weights = dict(running.other.state_dict())
    if fault == "missing":
        del weights[name]
    elif fault == "misshaped":
        weights[name] = weights[name].T
    else:
        name, weights["model.extra"] = "model.extra", torch.zeros(1)
    with pytest.raises(RunError, match=f"{fault} weight.*{name}"):
        running.engine.sync_weights(weights.items(), policy_version=9)
    assert_same(running, running.engine.generate(running.prompts, params), before)


def test_requests_that_cannot_be_served_are_refused(running: Running) -> None:
    longest = running.prompts[0] * 40
    with pytest.raises(DataError, match="prompt 1 has"):
        running.engine.generate([running.prompts[0], longest[:MAX_LEN]], SamplingParams())
    with pytest.raises(ConfigError, match="temperature is -1"):
        running.engine.generate(running.prompts, SamplingParams(temperature=-1))
    fitting = running.one(longest[: MAX_LEN - 4], SamplingParams(max_tokens=4, seed=1))
    rows = teacher_forced(running.model, longest[: MAX_LEN - 4], fitting[0])
    assert rows[0, fitting[0].token_ids[0]].item() == pytest.approx(
        fitting[0].logprobs[0], abs=running.tolerance
    )


def test_a_directory_without_a_model_is_refused(running: Running, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no model at"):
        make_engine(running.engine.name).start(make_setup(tmp_path))


@pytest.mark.parametrize(
    "attention",
    ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "sdpa"))],
)
def test_how_prompts_are_split_into_batches_changes_no_response(
    folders: tuple[Path, Path], attention: str
) -> None:
    """The transformers engine only: vLLM schedules by itself."""
    tokenizer = make_tiny_tokenizer()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    params = SamplingParams(num_generations=5, max_tokens=16, seed=13)
    results = []
    for batch in (1, 3, 7, 64):  # 1 and 3: a group is split; 7: one prompt at a time; 64: all
        engine = make_engine("transformers", attention=attention)
        engine.start(make_setup(folders[0], batch))
        results.append(engine.generate(prompts, params))
        engine.close()
    for other in results[1:]:
        assert ids_of(other) == ids_of(results[0])
        for mine, theirs in zip(sum(results[0], []), sum(other, []), strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_an_adapter_answers_as_peft_merges_it_and_the_next_replaces_it(
    running: Running, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    params = SamplingParams(num_generations=2, max_tokens=10, seed=17)
    before = running.engine.generate(running.prompts, params)
    try:
        for version in (3, 4):
            merged = make_adapter(tmp_path / "adapter", folders[0], seed=version)
            running.engine.sync_adapter(tmp_path / "adapter", policy_version=version)
            shutil.rmtree(tmp_path / "adapter")
            after = running.engine.generate(running.prompts, params)
            assert {c.policy_version for group in after for c in group} == {version}
            assert_logprobs(running, merged, after)
            ids = running.prompts[2]
            expected = next_logprobs(merged, ids)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
            plain = next_logprobs(running.model, ids)[:-1].gather(-1, torch.tensor(ids)[1:, None])
            scores = running.engine.score([ids])[0]
            assert scores == pytest.approx(expected.tolist(), abs=running.tolerance)
            assert (expected - plain[:, 0]).abs().max() > 0.2
    finally:
        running.engine.sync_weights(running.model.state_dict().items(), policy_version=0)
    assert_same(running, running.engine.generate(running.prompts, params), before)


def test_an_adapter_that_does_not_fit_is_refused_and_nothing_changes(
    running: Running, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    params = SamplingParams(num_generations=2, max_tokens=8, seed=18)
    before = running.engine.generate(running.prompts, params)
    other = make_tiny_model(tmp_path / "wide", hidden=96)
    make_adapter(tmp_path / "misshaped", other, seed=1)
    cases = {"misshaped": r"is \[4, 192\]", "absent": "no adapter at"}
    if running.engine.name != "transformers":  # which takes any rank
        make_adapter(tmp_path / "large", folders[0], seed=1, rank=16)
        cases["large"] = "rank 16, above engine.max_lora_rank 8"
    for name, message in cases.items():
        with pytest.raises(RunError, match=message):
            running.engine.sync_adapter(tmp_path / name, policy_version=9)
    assert_same(running, running.engine.generate(running.prompts, params), before)


@pytest.fixture(scope="module")
def two_servers(folders: tuple[Path, Path]) -> Iterator[Running]:
    """An engine with two servers, which are killed."""
    engine = make_engine("vllm_server", replicas=2)
    if reason := engine.unavailable_reason():
        pytest.skip(reason)
    yield from started(engine, folders)


def servers_of(running: Running) -> VllmFleet:
    assert isinstance(running.engine, VllmServerEngine) and running.engine._fleet is not None
    return running.engine._fleet


def process_of(replica: Replica) -> ServerProcess:
    assert isinstance(replica.server, HttpServer) and replica.server.process is not None
    return replica.server.process


def kill_server(process: ServerProcess) -> None:
    """SIGKILL to the whole group of a server, not to its guard."""
    (server,) = psutil.Process(process.pid).children()
    os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.slow  # vLLM's servers take long to start: test_server_replicas.py has light ones
@pytest.mark.vllm
def test_a_server_killed_at_work_loses_no_sample_and_doubles_none(
    two_servers: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running, fleet = two_servers, servers_of(two_servers)
    params = SamplingParams(num_generations=40, max_tokens=40, seed=19)
    whole = running.engine.generate(running.prompts, params)
    first, second = fleet.replicas
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(running.engine.generate, running.prompts, params)
        deadline = time.monotonic() + 60
        while not first.in_flight and time.monotonic() < deadline:
            time.sleep(0.005)
        kill_server(process_of(first))
        assert_same(running, future.result(timeout=300), whole)
    assert (first.alive, second.alive) == (False, True)
    assert f"vLLM server {first.name} is lost" in caplog.text
    # One that is left takes weights and gives samples as before.
    running.engine.sync_weights(running.other.state_dict().items(), policy_version=5)
    after = running.engine.generate(running.prompts, SamplingParams(2, max_tokens=8, seed=20))
    assert_logprobs(running, running.other, after)


@pytest.mark.slow
@pytest.mark.vllm
def test_when_no_server_is_left_the_error_has_the_end_of_their_logs(two_servers: Running) -> None:
    running, fleet = two_servers, servers_of(two_servers)
    processes = [process_of(replica) for replica in fleet.replicas if replica.alive]
    params = SamplingParams(num_generations=40, max_tokens=40, seed=21)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(running.engine.generate, running.prompts, params)
        time.sleep(0.3)
        for process in processes:
            kill_server(process)
        with pytest.raises(
            RunError, match=r"no vLLM server is left \(2 at the start\), \d+ of 200"
        ):
            future.result(timeout=300)
    with pytest.raises(RunError, match=r"(?s)last lines of \S*server-1\.log:\n.*EngineCore"):
        running.engine.sync_weights(running.model.state_dict().items(), policy_version=6)


def test_an_engine_closes_twice_and_starts_again(running: Running) -> None:
    """Last, because it stops the engine of this module.

    Starting new servers would only repeat the first start: of them, that closing leaves none
    behind.
    """
    params = SamplingParams(num_generations=2, max_tokens=8, seed=14)
    fleet = running.engine._fleet if isinstance(running.engine, VllmServerEngine) else None
    before = [] if fleet else running.engine.generate(running.prompts, params)
    guards = [process_of(replica).pid for replica in fleet.replicas] if fleet else []
    running.engine.close()
    assert not any(map(psutil.pid_exists, guards))
    running.engine.close()
    for call in (
        lambda: running.engine.generate(running.prompts, params),
        lambda: running.engine.sync_weights([], 1),
    ):
        with pytest.raises(RunError, match="is not running"):
            call()
    assert not torch.distributed.is_initialized()
    if fleet:
        return
    running.engine.start(running.setup)
    assert running.engine.generate(running.prompts, params) == before
