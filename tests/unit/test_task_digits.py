"""The `digits` task and the reward that scores its steps."""

from __future__ import annotations

import torch

from posttrain.core.contracts import Reward, Task
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.kit.tiny import make_tiny_tokenizer
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.scoring import score_batch
from posttrain.core.rewards.weighted import WeightedReward
from posttrain.core.types import StepVerdict


def test_the_answer_is_the_last_digit_repeated(manager: PluginManager) -> None:
    task = manager.build(Task, "digits", {"places": 2, "repeats": 3})
    problem = next(p for p in task.problems("train", 50, 0) if p.prompt[-1] == "7")
    assert problem.answer == "777"
    shares = {"777": 1.0, "77": 2 / 3, "787": 2 / 3, "888": 0.0, "": 0.0, "7777": 0.75}
    for text, share in shares.items():
        assert task.verify(problem, text).correct == share
    assert task.verify_steps(problem, "78") == (StepVerdict(1, 1.0), StepVerdict(2, 0.0))


def test_step_scores_become_columns(manager: PluginManager) -> None:
    """`"step_verdict"` scores each digit at the token that writes it; tool tokens are no steps."""
    task = manager.build(Task, "digits", {"places": 1, "repeats": 3})
    problem = task.problems("train", 1, 0)[0]
    right, wrong = problem.answer[0], "0" if problem.answer[0] != "0" else "1"
    tokenizer = ChatTokenizer(make_tiny_tokenizer(), None)
    texts = [right * 3, right + wrong, ""]
    batch = response_batch(
        prompts=[tokenizer.encode_prompt(problem)] * 3,
        responses=[tokenizer.encode_response(text) for text in texts],
        group_ids=[0, 0, 0],
        pad_token_id=tokenizer.pad_token_id,
        problems=[problem] * 3,
        texts=texts,
    )
    reward = WeightedReward(manager.build(Reward, "step_verdict"), 1.0)
    scored = score_batch(batch, task, [reward], tokenizer)
    assert scored.column("step_end").tolist() == [[0, 1, 2], [0, 1, -1], [-1, -1, -1]]
    assert scored.column("step_score").tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(scored.column("rewards"), torch.tensor([1.0, 0.5, 0.0]))
