"""Answers of several turns, with calls and tools: tokens, what is learned, and the reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.contracts import PreferenceLoss
from posttrain.core.contracts.preference_rows import Answer, PreferenceRow
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.preference import (
    Pair,
    as_labelled,
    fitting_pairs,
    scored_pairs,
    tokenise_labelled,
    tokenise_pairs,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy, load_reward_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.preference import LabelMini, PairMini, PreferenceLearner
from posttrain.core.training.preference_objective import PreferenceObjective, PreferenceTerm
from posttrain.core.training.reward_model import score_pairs
from posttrain.core.training.step_record import preference_tensors
from posttrain.core.types import Message, ToolCall

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RULE = LengthRule("drop", 1_000, "pairs")
RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")


def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tiny_tokenizer(chat_template=TEMPLATE), None)


def says(text: str, *calls: ToolCall, train: bool = True) -> Message:
    return Message("assistant", text, calls, train=train)


CALLS: Answer = (says("", ToolCall("add", {"a": 1})), Message("tool", "3"), says("So 3."))
SHORT: Answer = (says("4"),)


def row(chosen: Answer, rejected: Answer = SHORT, **more: object) -> PreferenceRow:
    prompt = (Message("user", "1 + 2?"),)
    return PreferenceRow("f:1", prompt, (chosen, rejected), tools=(TOOL,), **more)  # type: ignore[arg-type]


def shown(tokenizer: ChatTokenizer, ids: tuple[int, ...]) -> str:
    return str(tokenizer.tokenizer.decode(list(ids)))


def test_the_assistants_tokens_are_learned_and_all_are_what_the_template_writes() -> None:
    tokenizer = chat()
    (pair,) = tokenise_pairs([row(CALLS)], tokenizer, RULE)
    whole = tokenizer.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
                ],
            },
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "So 3."},
        ],
        tools=[TOOL],
        tokenize=False,
    )
    assert shown(tokenizer, pair.prompt_ids + pair.chosen_ids) + "\n" == whole
    own = [i for i, one in zip(pair.chosen_ids, pair.chosen_learned, strict=True) if one]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert shown(tokenizer, tuple(own)) == f"{call}So 3.<|im_end|>"
    assert shown(tokenizer, pair.rejected_ids) == "4<|im_end|>" and pair.rejected_learned == ()
    assert "add" in shown(tokenizer, pair.prompt_ids)


def test_a_message_with_train_false_is_context() -> None:
    tokenizer = chat()
    first = (says("no", train=False), *CALLS[1:])
    both = row(first, label=True)
    (answer,) = tokenise_labelled([replace(both, answers=both.answers[:1])], tokenizer, RULE)
    own = [i for i, one in zip(answer.answer_ids, answer.answer_learned, strict=True) if one]
    assert shown(tokenizer, tuple(own)) == "So 3.<|im_end|>"
    mini = LabelMini.of([answer], tokenizer.pad_token_id)
    assert int(mini.batch.mask.sum()) == len(own)


def test_a_pair_that_is_cut_keeps_its_mask_or_is_left_out() -> None:
    learned = (False, False, True, True)
    pair = Pair("k", (1, 2), (3, 4, 5, 6), (7,), chosen_learned=learned)
    (cut,) = fitting_pairs([pair], LengthRule("truncate", 5, "pairs"))
    assert (cut.chosen_ids, cut.chosen_learned) == ((3, 4, 5), learned[:3])
    rule = LengthRule("truncate", 4, "pairs")
    assert fitting_pairs([pair], rule) == [] and rule.dropped == 1
    assert [one.answer_learned for one in as_labelled([pair])] == [learned, ()]
    assert preference_tensors([pair])["lengths"].tolist() == [7], "tokens, not masks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, tokenizer=make_tiny_tokenizer(chat_template=TEMPLATE))


def test_losses_read_the_log_probs_of_learned_tokens_given_all_before_them(model: Path) -> None:
    (pair,) = tokenise_pairs([row(CALLS)], chat(), RULE)
    policy = load_policy(model, RUNTIME)
    ids = torch.tensor([[*pair.prompt_ids, *pair.chosen_ids]])
    with torch.no_grad():
        logprobs = policy(input_ids=ids).logits[0].log_softmax(-1)
    places = range(len(pair.prompt_ids), ids.shape[1])
    expected = sum(
        float(logprobs[place - 1, ids[0, place]])
        for place, own in zip(places, pair.chosen_learned, strict=True)
        if own
    )
    term = PreferenceTerm(PluginManager().build(PreferenceLoss, "simpo"))
    learner = PreferenceLearner(policy, PreferenceObjective((term,)), 0, 4)
    mini = PairMini.of([pair], 0)
    found = learner.forward_only(policy, mini.batch)[0] * mini.batch.mask[0]
    assert float(found.sum()) == pytest.approx(expected, abs=1e-4)
    metrics, _ = learner.accumulate([pair])
    assert metrics["tokens/response"] == sum(pair.chosen_learned) + len(pair.rejected_ids)


def test_a_reward_is_read_at_the_end_of_the_last_turn(model: Path) -> None:
    context = (says("4"), Message("user", "Sure?"), says("No.", train=False))
    (pair,) = tokenise_pairs([row(CALLS, context)], chat(), RULE)
    scorer = load_reward_model(model, RUNTIME, new_head=True)
    with torch.no_grad():
        torch.nn.init.normal_(scorer.get_submodule("score").weight, std=0.5)  # type: ignore[arg-type]
        scores = score_pairs(scorer, [pair])
        for found, answer in (
            (scores.chosen, pair.chosen_ids),
            (scores.rejected, pair.rejected_ids),
        ):
            ids = torch.tensor([[*pair.prompt_ids, *answer]])
            states = scorer.get_submodule("model")(input_ids=ids).last_hidden_state
            alone = scorer.get_submodule("score")(states[0, -1])
            assert float(found) == pytest.approx(float(alone), abs=1e-4)


def test_the_best_answers_are_paired_with_the_worst_and_ties_make_no_pair() -> None:
    scored = [((1,), 0.5), ((2,), 1.0), ((3,), 0.0), ((4,), 0.5), ((2,), 1.0), ((5,), 0.2)]
    found = scored_pairs("k", (9,), scored, 3)
    assert [(p.chosen_ids, p.rejected_ids, p.margin) for p in found] == [
        ((2,), (3,), 1.0),
        ((1,), (5,), 0.3),
    ]
    assert len(scored_pairs("k", (9,), scored, 1)) == 1
    assert scored_pairs("k", (9,), [((1,), 1.0), ((2,), 1.0)], 3) == []
    assert scored_pairs("k", (9,), [((1,), 1.0), ((1,), 1.0)], 3) == []
