"""The reward `"process_reward"` with tiny real models: where steps end, and what they score."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.data.steps import ending_token, last_turn, step_ends
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import CHARACTERS, make_tiny_model, make_tiny_tokenizer
from posttrain.core.types import Message, RewardSample, Score
from tests.helpers.plugins import MANAGER
from tests.helpers.rewards import sample

HEADS: dict[str, tuple[Any, int]] = {  # Any: model classes
    "token": (LlamaForTokenClassification, 2),
    "scalar": (LlamaForSequenceClassification, 1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model, and on it a token classifier and a scalar head of random weights."""
    folder = tmp_path_factory.mktemp("models")
    base = make_tiny_model(folder / "language")
    found = {"language": base}
    for name, (cls, labels) in HEADS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = cls.from_pretrained(base, num_labels=labels, dtype=torch.float32)
            torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(folder / name)
        make_tiny_tokenizer().save_pretrained(folder / name)
        found[name] = folder / name
    return found


def build(path: Path, *, batch_size: int = 2, **fields: object) -> Reward:  # type: ignore[type-arg]
    reward = MANAGER.build(Reward, "process_reward", {"separator": "\n", **fields})
    inputs = {"process_reward_model": path}
    reward.setup(RewardContext(inputs, torch.float32, torch.device("cpu"), "eager", batch_size))
    return reward


def response(tokenizer: ChatTokenizer, text: str, *, ended: bool = True) -> RewardSample:
    ids = tokenizer.encode_response(text)
    prompt = tokenizer.encode_chat([Message("user", "What is 1 + 1?")])
    return sample(text, prompt_ids=prompt, response_ids=ids if ended else ids[:-1])


def by_hand(path: Path, prompt: tuple[int, ...], text: str) -> list[float]:
    """The probability of "right" after each newline of `text`, one prefix at a time."""
    tokenizer = ChatTokenizer.load(path)
    cls = HEADS[path.name][0]
    model = cls.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for place in (i + 1 for i, character in enumerate(text) if character == "\n"):
        ids = torch.tensor([(*prompt, *tokenizer.encode_response(text[:place])[:-1])])
        with torch.no_grad():
            logits = model(ids).logits
        last = logits[0, -1] if logits.dim() == 3 else logits[0]
        found.append(float(last.softmax(-1)[1] if len(last) == 2 else last.sigmoid()))
    return found


@pytest.mark.parametrize("head", HEADS)
def test_each_step_scores_what_the_model_says_after_its_separator(
    models: dict[str, Path], head: str
) -> None:
    tokenizer = ChatTokenizer.load(models[head])
    texts = ["1 + 1\n= 2\n", "a\nbc\ndef\n", "one\n"]
    rows = [response(tokenizer, text) for text in texts]
    found = build(models[head]).score(rows)
    for row, text, given in zip(rows, texts, found, strict=True):
        wanted = by_hand(models[head], row.prompt_ids, text)
        assert len(set(wanted)) == len(wanted)
        assert [step.correct for step in given.steps] == pytest.approx(wanted, abs=1e-5)
        assert [text[step.end - 1] for step in given.steps] == ["\n"] * len(wanted)
        assert given.value == pytest.approx(min(wanted), abs=1e-5)


def test_of_an_episode_the_last_turn_is_read_after_all_that_was_before(
    models: dict[str, Path],
) -> None:
    """What the policy said in other turns, or another branch learns, is read and has no steps."""
    tokenizer = ChatTokenizer.load(models["token"])
    first, last = "look\n", "1 + 1\n= 2\n"
    before = (*tokenizer.encode_response(first), *tokenizer.encode_text("found", special=True))
    row = response(tokenizer, last)
    sampled = (*tokenizer.encode_response(first), *row.response_ids)
    episode = replace(row, response_ids=sampled, token_ids=(*before, *row.response_ids))
    branch = replace(episode, response_ids=row.response_ids[3:])
    found = build(models["token"]).score([episode, branch])
    wanted = by_hand(models["token"], (*row.prompt_ids, *before), last)
    for given in found:
        assert [step.correct for step in given.steps] == pytest.approx(wanted, abs=1e-5)
        assert [step.end for step in given.steps] == [6, 10]


@pytest.mark.parametrize("aggregate", ["min", "mean", "last", "product"])
def test_the_reward_is_the_aggregate_of_the_steps(models: dict[str, Path], aggregate: str) -> None:
    row = response(ChatTokenizer.load(models["token"]), "a\nb\nc\n")
    (found,) = build(models["token"], aggregate=aggregate).score([row])
    steps = [step.correct for step in found.steps]
    wanted = {"min": min(steps), "mean": sum(steps) / 3, "last": steps[2]}
    wanted["product"] = steps[0] * steps[1] * steps[2]
    assert found.value == pytest.approx(wanted[aggregate])
    assert found.components["steps"] == 3.0


def test_the_last_separator_is_put_in_for_the_model_alone(models: dict[str, Path]) -> None:
    tokenizer = ChatTokenizer.load(models["token"])
    reward = build(models["token"])
    with_it, without, cut = reward.score(
        [
            response(tokenizer, "a\nb\n"),
            response(tokenizer, "a\nb"),
            response(tokenizer, "a\nb", ended=False),
        ]
    )
    assert [s.correct for s in without.steps] == pytest.approx([s.correct for s in with_it.steps])
    assert cut == without
    assert [step.end for step in without.steps] == [2, 3]


def test_neither_batches_nor_order_change_a_score(models: dict[str, Path]) -> None:
    tokenizer = ChatTokenizer.load(models["token"])
    rows = [response(tokenizer, text) for text in ("a\n", "", "long text\nof two\n", "b\nc\n")]
    together = build(models["token"], batch_size=4).score(rows)
    alone = [build(models["token"], batch_size=1).score([row])[0] for row in rows]
    turned = build(models["token"], batch_size=3).score(rows[::-1])[::-1]
    for others in (alone, turned):
        assert [s.value for s in others] == pytest.approx([s.value for s in together], abs=1e-6)
    assert together[1] == Score(0.0, detail="no step found")


def test_another_tokenizer_is_an_error_unless_texts_are_tokenised_anew(
    models: dict[str, Path], tmp_path: Path
) -> None:
    other = make_tiny_tokenizer(CHARACTERS[::-1])
    row = response(ChatTokenizer(other, None), "a\nb\n")
    (found,) = build(models["token"]).score([row])
    assert (found.value, found.status) == (None, "error")
    assert found.detail.endswith("set tokens: own")
    (again,) = build(models["token"], tokens="own").score([row])
    same = response(ChatTokenizer.load(models["token"]), "a\nb\n")
    (wanted,) = build(models["token"]).score([same])
    assert again.value == pytest.approx(wanted.value) and again.steps
    # A text that the model's tokenizer cannot hold has no places for its steps.
    (lost,) = build(models["token"], tokens="own").score([sample("\U0001f600\n")])
    assert (lost.value, lost.status) == (None, "error")


def test_a_response_longer_than_the_model_is_an_error(models: dict[str, Path]) -> None:
    row = response(ChatTokenizer.load(models["token"]), "a" * 600 + "\n")
    (found,) = build(models["token"]).score([row])
    assert (found.value, found.status) == (None, "error")
    assert found.detail.endswith("the process reward model reads 512")


def test_a_model_without_such_a_head_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="holds LlamaForCausalLM with 2 labels, not a process"):
        build(models["language"])
    with pytest.raises(ResourceError, match="has no usable config.json"):
        build(tmp_path)


def test_a_named_directory_takes_the_place_of_the_input(models: dict[str, Path]) -> None:
    fields = {"path": str(models["scalar"])}
    named = MANAGER.build(Reward, "process_reward", fields)
    assert named.required_inputs() == frozenset()
    assert MANAGER.build(Reward, "process_reward").required_inputs() == {"process_reward_model"}
    named.setup(RewardContext({}, torch.float32, torch.device("cpu"), "eager", 1))
    assert named.score([sample("")])[0].value == 0.0
    # What is in the directory is part of the stage's identity.
    stage = RlStage.model_validate(
        {"kind": "rl", "rewards": [{"name": "process_reward", **fields}]}
    )
    assert stage.outside_paths() == {"rewards.0.path": str(models["scalar"])}


def test_steps_end_after_their_separators_and_blank_ones_are_none() -> None:
    assert step_ends("a\n\nb\n\n", "\n\n") == (3, 6)
    assert step_ends("a\n\nb", "\n\n") == (3, 4)
    assert step_ends("\n\na\n\n \n\nb", "\n\n") == (5, 9)
    assert step_ends("a\n\n\n\n", "\n\n") == (3,)
    assert step_ends("", "\n\n") == step_ends(" \n\n ", "\n\n") == ()


class PiecesTokenizer:
    """Decodes byte pieces as byte-level tokenizers do: what is incomplete becomes U+FFFD."""

    pieces = (b"a\xf0\x9f", b"\x98", b"\x80", b"\n", b"b\n", b"\xff")

    def decode_response(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def test_a_step_ends_at_the_token_that_completes_its_last_character() -> None:
    tokenizer: Any = PiecesTokenizer()  # Any: a stand-in with the one method that is used
    ids = [0, 1, 2, 3, 4]  # a, an emoji in three tokens, newline, "b\n"
    assert [ending_token(ids, end, tokenizer) for end in (1, 2, 3, 5)] == [0, 2, 3, 4]
    assert ending_token(ids, 6, tokenizer) is None
    assert ending_token([5], 1, tokenizer) is None  # never a whole character
    assert last_turn([4, 0, 1, 2, 3], "a\U0001f600\n", tokenizer) == 1
    assert last_turn([4, 5, 3], "\ufffd\n", tokenizer) == 1
    assert last_turn([4, 0, 1, 2, 3], "\U0001f600\n", tokenizer) is None
    assert math.isfinite(ending_token([4, 4], 4, tokenizer) or math.nan)
