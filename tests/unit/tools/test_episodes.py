"""Responses of several turns: what is sampled, what is observed, what the trainer makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import NoConfig, Observation, PromptGroup, SampledGroup, Task
from posttrain.core.contracts.rollout import Episode
from posttrain.core.data.tokens import ResponseTexts, response_texts, rollout_batch
from posttrain.core.evaluation.accuracy import evaluate_policy
from posttrain.core.rewards.scoring import reward_samples, score_batch
from posttrain.core.rollout.episodes import episode_metrics, generate_groups
from posttrain.core.rollout.turns import Turns, completion_of
from posttrain.core.training.forward import forward_only
from posttrain.core.types import Completion, Problem, SamplingParams, Split, Verdict
from tests.helpers.episodes import PROBLEMS, Tiny
from tests.helpers.rollouts import load_tiny

PARAMS = SamplingParams(num_generations=6, max_tokens=40, seed=3)


class Sevens(Task[NoConfig]):
    """Right is a text with a 7."""

    name = "sevens"
    Config = NoConfig

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        return list(PROBLEMS[:count])

    def verify(self, problem: Problem, text: str) -> Verdict:
        return Verdict(float("7" in text), text or None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def groups(tiny: Tiny) -> list[SampledGroup]:
    runner = tiny.runner()
    params = replace(PARAMS, entropy=True)
    return runner.generate(tiny.engine, tiny.prompts(runner), params)


def completions(groups: list[SampledGroup]) -> list[Completion]:
    return [c for group in groups for c in group.completions]


def test_an_observation_follows_each_call_and_was_not_sampled(
    tiny: Tiny, groups: list[SampledGroup]
) -> None:
    decode = tiny.tokenizer.decode_response
    several = [c for c in completions(groups) if c.sampled]
    assert len(several) > 8
    for completion in several:
        turn: list[int] = []
        answer: list[int] = []
        pairs = []
        for token, own in zip(completion.token_ids, completion.sampled, strict=True):
            if own and answer:
                pairs.append((turn, answer))
                turn, answer = [], []
            (turn if own else answer).append(token)
        for said, shown in pairs:
            call = decode(said)
            assert call.endswith("?") and "?" not in call[:-1]
            count = len(call) - 1
            assert decode(shown) == f"[{str(count) * (1 + count % 4)}]"[:8]


def test_every_list_of_a_response_has_its_length(groups: list[SampledGroup]) -> None:
    for c in completions(groups):
        sizes = {len(c.token_ids), len(c.logprobs), len(c.entropies), len(c.sampled or c.token_ids)}
        assert len(sizes) == 1
        for logprob, entropy, own in zip(
            c.logprobs, c.entropies, c.sampled or [True] * len(c.token_ids), strict=True
        ):
            assert (logprob < 0 and entropy > 0) if own else (logprob == entropy == 0)


def test_trainer_and_engine_agree_on_every_sampled_token_of_several_turns(
    tiny: Tiny, groups: list[SampledGroup]
) -> None:
    """The strongest proof that masks and positions are right: float32 to 1e-4."""
    batch = rollout_batch(groups, tiny.tokenizer)
    mask = batch.response_mask.bool()
    gaps = (~mask[:, :-1] & mask[:, 1:]).sum()
    assert gaps > 8, "observations stand between sampled tokens"
    model = load_tiny(tiny.folder, torch.float32)
    found = forward_only(model, batch, micro_batch_size=5, temperature=1.0)
    torch.testing.assert_close(
        found.logprobs[mask], batch.rollout_logprobs[mask], rtol=0, atol=1e-4
    )
    expected = torch.cat(
        [
            torch.tensor(c.entropies)[torch.tensor(c.sampled or [True] * len(c.token_ids))]
            for c in completions(groups)
        ]
    )
    torch.testing.assert_close(found.entropy[mask], expected, rtol=0, atol=1e-4)


def test_observations_are_in_no_mask_and_padding_in_no_node(
    tiny: Tiny, groups: list[SampledGroup]
) -> None:
    batch = rollout_batch(groups, tiny.tokenizer)
    for row, c in enumerate(completions(groups)):
        own = list(c.sampled or [True] * len(c.token_ids))
        expected = own + [False] * (batch.response_ids.shape[1] - len(own))
        assert batch.response_mask[row].bool().tolist() == expected
        assert batch.mask[row].tolist() == batch.response_mask[row].tolist()
    assert batch.node_id is None


def test_the_same_seed_gives_the_same_episodes_and_another_seed_others(tiny: Tiny) -> None:
    runner = tiny.runner()
    prompts = tiny.prompts(runner)
    first = runner.generate(tiny.engine, prompts, PARAMS)
    assert runner.generate(tiny.engine, prompts, PARAMS) == first
    assert runner.generate(tiny.engine, prompts, replace(PARAMS, seed=4)) != first
    texts = {c.token_ids for c in first[0].completions}
    assert len(texts) == 6


def test_a_response_of_one_turn_is_the_engine_s_own(tiny: Tiny) -> None:
    runner = tiny.runner(max_turns=1)
    prompts = tiny.prompts(runner)
    plain = generate_groups(
        tiny.engine, prompts, replace(PARAMS, stop_strings=runner.environment.stop_strings())
    )
    for mine, theirs in zip(
        completions(runner.generate(tiny.engine, prompts, PARAMS)), completions(plain), strict=True
    ):
        assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)
        expected = "length" if theirs.finish_reason == "stop_string" else theirs.finish_reason
        assert mine.finish_reason == expected, "a call that nobody answers is a cut response"


@pytest.mark.parametrize("limit", [3, 9, 14])
def test_no_response_exceeds_its_budget_observations_included(tiny: Tiny, limit: int) -> None:
    runner = tiny.runner()
    found = completions(
        runner.generate(tiny.engine, tiny.prompts(runner), replace(PARAMS, max_tokens=limit))
    )
    assert max(len(c.token_ids) for c in found) == limit
    for c in found:
        if len(c.token_ids) == limit and c.token_ids[-1] != tiny.tokenizer.eos_token_id:
            assert c.finish_reason == "length"
        assert len(c.token_ids) == limit or c.finish_reason in ("stop", "length")


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_no_response_has_more_turns_than_allowed(tiny: Tiny, turns: int) -> None:
    runner = tiny.runner(max_turns=turns)
    found = completions(runner.generate(tiny.engine, tiny.prompts(runner), PARAMS))
    assert max(c.counts["turns"] for c in found) == turns
    assert all(c.counts.get("calls", 0) <= turns - 1 for c in found)


def test_a_last_turn_with_a_stop_string_is_answered_where_turns_have_rewards(tiny: Tiny) -> None:
    runner = tiny.runner(max_turns=2)
    runner.turns.answers_last = True
    found = completions(runner.generate(tiny.engine, tiny.prompts(runner), PARAMS))
    last = [c for c in found if c.counts["turns"] == 2 and c.counts.get("calls") == 2]
    assert last, "some last turn was a call"
    assert all(c.finish_reason == "length" and len(c.turn_ends) == 2 for c in last)
    assert all(c.sampled[-1] for c in last), "its result is not shown"


@pytest.mark.parametrize(
    ("done", "truncated", "max_turns", "cut"),
    [
        (True, False, 1, False),
        (False, False, 1, True),  # its turns are used up
        (False, True, 4, True),  # by the environment
        (True, True, 4, True),
    ],
)
def test_an_episode_that_did_not_end_is_cut_also_after_a_turn_that_the_policy_ended(
    tiny: Tiny, done: bool, truncated: bool, max_turns: int, cut: bool
) -> None:
    chat, end = tiny.tokenizer, tiny.tokenizer.end_token_ids[0]
    turns = Turns(chat, max_turns, 16)
    said = Completion((5, end), (-1.0, -1.0), "stop", 0, 0, "", "")
    episode = turns.after(Episode(PromptGroup(PROBLEMS[0], (4, 5)), 0), said)
    answer = Observation("more", done, 0, truncated=truncated)
    found = completion_of(turns.answered(episode, answer, 16))
    assert chat.is_truncated(found) is cut
    assert not chat.is_truncated(replace(said, finish_reason="length")), "whole, of one turn"


def test_observations_are_cut_to_their_limit(tiny: Tiny) -> None:
    runner = tiny.runner(max_observation_tokens=2)
    found = completions(runner.generate(tiny.engine, tiny.prompts(runner), PARAMS))
    for c in (c for c in found if c.sampled):
        joined = "".join("1" if own else "0" for own in c.sampled)
        assert max(map(len, joined.split("1"))) == 2


def test_calls_and_failures_are_counted(groups: list[SampledGroup]) -> None:
    found = completions(groups)
    metrics = episode_metrics(groups)
    calls = sum(c.counts.get("calls", 0.0) for c in found)
    assert metrics["tools/calls_per_response"] == pytest.approx(calls / len(found))
    assert metrics["tools/turns"] == pytest.approx(
        sum(c.counts["turns"] for c in found) / len(found)
    )
    assert 0 < metrics["tools/failed_frac"] < 1, "an empty argument fails here"
    plain = Completion((1,), (-1.0,), "stop", 0, 0, "e", "1")
    assert episode_metrics([SampledGroup(groups[0].prompt, (plain,))]) == {}


def test_verifiers_read_the_last_turn_and_rewards_also_the_transcript(
    tiny: Tiny, groups: list[SampledGroup]
) -> None:
    batch = rollout_batch(groups, tiny.tokenizer)
    samples = reward_samples(batch, Sevens(NoConfig()))
    for sample, c in zip(samples, completions(groups), strict=True):
        own = [t for t, s in zip(c.token_ids, c.sampled or (1,) * 99, strict=False) if s]
        assert sample.response_ids == tuple(own), "tool output counts for no length penalty"
        assert sample.transcript == tiny.tokenizer.decode_response(c.token_ids)
        assert sample.transcript.endswith(sample.text)
        assert "".join(sample.turns) == tiny.tokenizer.decode_response(own)
        assert sample.turns[-1].endswith(sample.text)
        seen = c.sampled or (True,) * len(c.token_ids)
        start = len(seen) - next((i for i, s in enumerate(seen[::-1]) if not s), len(seen))
        assert sample.text == tiny.tokenizer.decode_response(c.token_ids[start:])
    assert any(not c.sampled[-1] for c in completions(groups) if c.sampled), "some end unanswered"


def test_a_tool_s_output_is_no_answer(tiny: Tiny) -> None:
    ids = tiny.tokenizer.encode_text("1?[7]", special=False)
    sampled = (True, True, False, False, False)
    call = Completion(ids, (0.0,) * 5, "length", 0, 0, "e", "1", sampled=sampled)
    assert response_texts(call, tiny.tokenizer) == ResponseTexts("", ("1?",), "1?[7]")
    answer = tiny.tokenizer.encode_text("4", special=False)
    more = replace(call, token_ids=(*ids, *answer), sampled=(*sampled, True))
    assert response_texts(more, tiny.tokenizer) == ResponseTexts("4", ("1?", "4"), "1?[7]4")


def test_the_reward_sits_on_the_last_sampled_token_even_before_an_observation(tiny: Tiny) -> None:
    from posttrain.core.contracts import Reward
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.rewards.weighted import WeightedReward

    runner = tiny.runner()
    # So little room that some responses end with an observation.
    found = runner.generate(tiny.engine, tiny.prompts(runner), replace(PARAMS, max_tokens=12))
    assert any(c.sampled and not c.sampled[-1] for c in completions(found))
    batch = rollout_batch(found, tiny.tokenizer)
    overlong = PluginManager().build(Reward, "soft_overlong", {"max_length": 1, "buffer_length": 0})
    scored = score_batch(batch, Sevens(NoConfig()), [WeightedReward(overlong, 1.0)])
    rewards = scored.column("token_rewards")
    assert not rewards[~batch.response_mask.bool()].any()
    assert torch.equal(rewards.sum(dim=1), scored.column("rewards"))


def test_special_tokens_in_an_observation_are_plain_text(tiny: Tiny) -> None:
    end = tiny.tokenizer.tokenizer.eos_token
    assert tiny.tokenizer.eos_token_id not in tiny.tokenizer.encode_text(f"1{end}2", special=False)
    assert tiny.tokenizer.eos_token_id in tiny.tokenizer.encode_text(f"1{end}2", special=True)


def test_an_evaluation_runs_whole_episodes(tiny: Tiny) -> None:
    runner = tiny.runner()
    section = EvaluationSection(num_problems=4, max_response_length=30, num_samples=3)
    task = Sevens(NoConfig())
    result = evaluate_policy(
        tiny.engine, tiny.tokenizer, task, tiny.prompts(runner), section, 1, episodes=runner
    )
    greedy = runner.generate(
        tiny.engine, tiny.prompts(runner), SamplingParams(max_tokens=30, temperature=0.0)
    )
    for row, group in zip(result.rows, greedy, strict=True):
        said = response_texts(group.completions[0], tiny.tokenizer)
        assert row.greedy_text == said.transcript
        assert row.greedy_correct == float("7" in said.last)
    assert any(c.sampled for c in completions(greedy))
