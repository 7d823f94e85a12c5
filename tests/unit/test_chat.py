"""Ends of turns from every place that a model names them, and chats that templates do not take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import EngineSetup, PromptGroup, SampledGroup
from posttrain.core.contracts.preference_rows import PreferenceRow
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.preference import tokenise_pairs
from posttrain.core.data.tokens import ChatTokenizer, rollout_batch
from posttrain.core.errors import DataError, ResourceError
from posttrain.core.kit.tiny import (
    CHARACTERS,
    CHAT_TEMPLATE,
    END,
    START,
    UNKNOWN,
    make_tiny_model,
    make_tiny_tokenizer,
)
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.vllm_server import read_completion
from posttrain.core.training.sft import worked_batch
from posttrain.core.types import Completion, Message, Problem, SamplingParams
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.trained import save_trained
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from tests.helpers.pipeline import tiny_config

EOS, TURN, EOT = "<|endoftext|>", "<|turn|>", "<|eot|>"
CHATML = CHAT_TEMPLATE
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] | trim) + '<|turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[' + m['content'] + ']' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}assistant:"
)
OPENS_NEXT = (
    "{% for m in messages %}{{ ('<|im_start|>' if m['role'] == 'user' else '<|turn|>')"
    " + m['content'] }}{% endfor %}<|turn|>"
)


WITHOUT_HEADERS = (
    "{% for m in messages %}{{ m['content'] }}"
    "{{ '<|im_end|>' if m['role'] == 'assistant' else '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def tokenizer_of(template: str | None, eos: str | None = EOS) -> PreTrainedTokenizerFast:
    """A base model's tokenizer: its end of text is not what its template ends turns with."""
    made = make_tiny_tokenizer(CHARACTERS, CHATML)
    made.add_special_tokens({"eos_token": EOS, "additional_special_tokens": [END, TURN, EOT]})
    made.chat_template = template
    made.eos_token = eos
    return made


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> set[int]:
    return {int(tokenizer.convert_tokens_to_ids(token)) for token in tokens}


def user(text: str) -> Message:
    return Message("user", text)


def shown(chat: ChatTokenizer, ids: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(list(ids)))


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "said", "answer", "ends"),
    [
        (CHATML, f"4{END}", f"4{END}", {EOS, END}),
        (GEMMA, f"4{TURN}", f"4{TURN}", {EOS, TURN}),
        (SPACED, f"4 {EOS}", f" 4 {EOS}", {EOS}),
        (PLAIN, f"4{EOS}", f" 4\n\n{EOS}", {EOS}),
        (OPENS_NEXT, f"4{EOS}", f"4{EOS}", {EOS}),
        ("{{ raise_exception('no') }}", f"4{EOS}", "", {EOS}),
        (None, f"4{EOS}", f"4{EOS}", {EOS}),
    ],
)
def test_what_is_taught_is_what_the_template_writes_after_the_prompt(
    template: str | None, said: str, answer: str, ends: set[str]
) -> None:
    chat = ChatTokenizer(tokenizer_of(template), None)
    assert shown(chat, chat.encode_response("4")) == said
    assert set(chat.end_token_ids) == ids_of(chat.tokenizer, *ends)  # type: ignore[arg-type]
    assert chat.decode_response(chat.encode_response("4")).rstrip() == "4"
    if template == "{{ raise_exception('no') }}":
        return
    batch = worked_batch(chat, [Problem("k", "2 + 2", "4", "4")])
    assert shown(chat, batch.response_ids[0].tolist()) == answer
    row = PreferenceRow.of_texts("f:1", "2 + 2", "4", "5")
    (pair,) = tokenise_pairs([row], chat, LengthRule("drop", 999, "pairs"))
    assert shown(chat, pair.chosen_ids) == answer
    assert shown(chat, pair.rejected_ids) == answer.replace("4", "5")
    whole = chat.encode_conversation([user("2 + 2"), Message("assistant", "4")])
    own = zip(whole.token_ids, whole.sampled, strict=True)
    assert tuple(token for token, sampled in own if sampled) == pair.chosen_ids


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", seed=5, init_std=0.2, tokenizer=tokenizer_of(CHATML))


def set_ends(folder: Path, name: str, value: object, **others: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value, **others}))


def test_the_generation_config_adds_ends_one_or_several(model_dir: Path) -> None:
    tokenizer = ChatTokenizer.load(model_dir).tokenizer
    eos, end, turn, eot = (next(iter(ids_of(tokenizer, t))) for t in (EOS, END, TURN, EOT))  # type: ignore[arg-type]
    for value, found in ((eot, {eot}), ([turn, eot], {turn, eot}), (None, set()), ([9], {9})):
        set_ends(model_dir, "generation_config.json", value)
        assert set(ChatTokenizer.load(model_dir).end_token_ids) == {eos, end} | found
    # A class's default, copied when the model was saved, may be any word.
    set_ends(model_dir, "generation_config.json", 9, _from_model_config=True)
    assert set(ChatTokenizer.load(model_dir).end_token_ids) == {eos, end}
    (model_dir / "generation_config.json").unlink()
    set_ends(model_dir, "config.json", [turn, eos])
    assert set(ChatTokenizer.load(model_dir).end_token_ids) == {eos, end, turn}
    # A model of text and images keeps them with its text part.
    set_ends(model_dir, "config.json", None, text_config={"eos_token_id": [eot, eos]})
    assert set(ChatTokenizer.load(model_dir).end_token_ids) == {eos, end, eot}


@pytest.mark.parametrize("value", ["</s>", True, [1, "a"], 1.5, {"id": 1}])
def test_ends_that_are_no_ids_are_refused(model_dir: Path, value: object) -> None:
    set_ends(model_dir, "generation_config.json", value)
    with pytest.raises(ResourceError, match="eos_token_id is .*expected a token's id or a list"):
        ChatTokenizer.load(model_dir)
    (model_dir / "generation_config.json").write_text("[]")
    with pytest.raises(ResourceError, match="is not a JSON object"):
        ChatTokenizer.load(model_dir)


def test_a_tokenizer_without_eos_takes_the_templates_end() -> None:
    chat = ChatTokenizer(tokenizer_of(CHATML, eos=None), None)
    assert shown(chat, [chat.eos_token_id]) == END
    with pytest.raises(ResourceError, match="no end-of-sequence token"):
        ChatTokenizer(tokenizer_of(None, eos=None), None)


def completion(ids: Sequence[int], reason: str, sampled: tuple[bool, ...] = ()) -> Completion:
    return Completion(tuple(ids), (0.0,) * len(ids), reason, 0, 1, "e", "1", sampled=sampled)  # type: ignore[arg-type]


def test_a_response_that_ends_with_any_end_is_not_truncated() -> None:
    chat = ChatTokenizer(tokenizer_of(GEMMA), None)
    cases = [(completion([9, end], "length"), False) for end in chat.end_token_ids] + [
        (completion([9, 10], "length"), True),
        (completion([9, 10], "stop_string"), False),
        (completion([9, chat.eos_token_id], "length", (True, False)), True),
    ]
    prompt = PromptGroup(Problem("k", "p", "a", "w"), (5,))
    batch = rollout_batch([SampledGroup(prompt, tuple(c for c, _ in cases))], chat)
    assert batch.truncated.tolist() == [cut for _, cut in cases]
    answer = {
        "choices": [
            {
                "token_ids": [9, 7],
                "logprobs": {"token_logprobs": [0.0, 0.0]},
                "finish_reason": "length",
            }
        ]
    }
    origin = {"policy_version": 0, "seed": 1, "engine": "e", "engine_version": "1"}
    for ends, reason in (((7,), "stop"), ((8,), "length")):
        assert read_completion(answer, SamplingParams(), ends, origin).finish_reason == reason


def test_the_engine_ends_where_transformers_own_generate_does(model_dir: Path) -> None:
    """Seven likely tokens as ends: each response of both is the same, with its end."""
    chat = ChatTokenizer.load(model_dir)
    set_ends(model_dir, "generation_config.json", [7, 11, 35, 36, 47, 58, 69])
    chat = ChatTokenizer.load(model_dir)
    engine = TransformersEngine(TransformersEngineConfig())
    device, limit = torch.device("cpu"), 24
    engine.start(
        EngineSetup(
            model_dir, torch.float32, device, 96, 8, chat.end_token_ids, chat.pad_token_id, 0
        )
    )
    prompts = [chat.encode_chat([user(text)]) for text in ("1", "22", "abc")]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    generation = GenerationConfig(
        max_new_tokens=limit, eos_token_id=list(chat.end_token_ids), pad_token_id=0
    )
    for prompt, (found,) in zip(
        prompts,
        engine.generate(prompts, SamplingParams(max_tokens=limit, temperature=0)),
        strict=True,
    ):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, generation_config=generation)[0, len(prompt) :].tolist()
        assert list(found.token_ids) == expected
        assert (found.finish_reason == "stop") == (expected[-1] in chat.end_token_ids)


def test_a_runs_engine_is_started_again_for_a_model_with_other_ends(
    tmp_path: Path, manager: PluginManager
) -> None:
    first, second, same = (
        make_tiny_model(tmp_path / name, tokenizer=tokenizer_of(CHATML)) for name in "abc"
    )
    turn, eot = (next(iter(ids_of(tokenizer_of(CHATML), token))) for token in (TURN, EOT))
    set_ends(second, "generation_config.json", [turn, eot])
    set_ends(same, "generation_config.json", [eot, turn])
    config = RunConfig.model_validate(tiny_config(first))
    pool = EnginePool(config, manager, ModelRuntime.from_config(config.model))
    engines = []
    for folder in (first, second, same):
        with pool.lease(folder) as engine:
            engines.append(engine)
    pool.close()
    assert engines[0] is not engines[1] and engines[1] is engines[2]


# --- chats ----------------------------------------------------------------------------------------


def test_a_problem_without_a_worked_answer_has_its_end_alone() -> None:
    chat = ChatTokenizer(tokenizer_of(WITHOUT_HEADERS), None)
    ids = chat.encode_worked(Problem("k", "Hi", "", "", messages=(user("Hi"),)))
    assert ids == chat.encode_response("") and len(ids) == 1


def test_a_system_prompt_reaches_models_that_take_no_system_message() -> None:
    silent = (
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}"
    )
    for template, expected in (
        (GEMMA, f"{START}user\nBe kind.\n\nHi{TURN}\n{START}model\n"),
        (silent, "Be kind.\n\nHi"),
        (None, "Be kind.\nHi\n"),
    ):
        chat = ChatTokenizer(tokenizer_of(template), "Be kind.")
        assert shown(chat, chat.encode_prompt(Problem("k", "Hi", "", ""))) == expected
        own = [Message("system", "Be kind."), user("Hi")]
        assert chat.encode_chat(own) == chat.encode_chat([user("Hi")])
    chatml = ChatTokenizer(tokenizer_of(CHATML), "Be kind.")
    text = shown(chatml, chatml.encode_chat([user("Hi")]))
    assert text.startswith(f"{START}system\nBe kind.{END}\n{START}user\nHi{END}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, f"{START}assistant\n  So far,  "),
        (GEMMA, f"{START}assistant\n  So far,  "),
        (SPACED, "[Why?]   So far,  "),
        (None, "Why?\n  So far,  "),
    ],
)
def test_a_last_turn_of_the_assistants_is_continued(template: str | None, expected: str) -> None:
    chat = ChatTokenizer(tokenizer_of(template), None)
    messages = [user("Why?"), Message("assistant", "  So far,  ")]
    assert shown(chat, chat.encode_chat(messages)).endswith(expected)


def test_a_template_that_jinja_cannot_read_is_called_wrong() -> None:
    with pytest.raises(ResourceError, match=r"chat template is wrong, line 2: .*'endfor'"):
        ChatTokenizer(tokenizer_of("\n{% for m in messages %}"), None)


def test_messages_that_a_template_refuses_are_named_with_the_way_out() -> None:
    chat = ChatTokenizer(tokenizer_of(GEMMA), None)
    twice = [user("a"), user("b")]
    with pytest.raises(DataError, match="roles user, user.*must alternate: correct their roles"):
        chat.encode_chat(twice)
    answers = tuple((Message("assistant", text),) for text in "ab")
    row = PreferenceRow("f.jsonl:3", (Message("user", "a"), Message("user", "b")), answers)
    with pytest.raises(DataError, match="f.jsonl:3: the model's chat template refuses"):
        tokenise_pairs([row], chat, LengthRule("drop", 999, "pairs"))
    forgets = ChatTokenizer(tokenizer_of("{{ messages[0]['content'] }}"), None)
    with pytest.raises(DataError, match="cannot be continued: end the prompt with the user's"):
        forgets.encode_chat([user("a"), Message("assistant", "b")])


def test_an_end_need_not_be_marked_as_special() -> None:
    raw = make_tiny_tokenizer(CHARACTERS, CHATML.replace(END, "<stop>"))
    raw.add_tokens(["<stop>", "\n\n"])
    chat = ChatTokenizer(raw, None)
    assert set(chat.end_token_ids) == ids_of(raw, END, "<stop>")
    ids = chat.encode_response("4")
    assert shown(chat, ids) == "4<stop>" and chat.decode_response(ids) == "4"
    raw.chat_template = PLAIN  # what it writes after an answer is an added token, but a blank
    assert set(ChatTokenizer(raw, None).end_token_ids) == ids_of(raw, END)


def test_unknown_is_no_end() -> None:
    chat = ChatTokenizer(tokenizer_of(GEMMA), None)
    assert not set(chat.end_token_ids) & ids_of(chat.tokenizer, UNKNOWN, START)  # type: ignore[arg-type]


def test_a_trained_model_is_saved_with_all_ends(model_dir: Path, tmp_path: Path) -> None:
    set_ends(model_dir, "generation_config.json", [7, 11])
    chat = ChatTokenizer.load(model_dir)
    model = load_policy(model_dir, ModelRuntime(torch.device("cpu"), torch.float32, "eager"))
    context: Any = SimpleNamespace(out=tmp_path / "out")  # Any: all that is read of it
    save_trained(context, model, chat, "model")
    saved = json.loads((tmp_path / "out" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == list(chat.end_token_ids) and len(chat.end_token_ids) == 4
    assert ChatTokenizer.load(tmp_path / "out" / "model").end_token_ids == chat.end_token_ids
