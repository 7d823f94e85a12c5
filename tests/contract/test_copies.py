"""HSDP: four ranks that hold two copies of the weights compute what one process does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from posttrain.core.cluster.group import RankGroup
from posttrain.core.cluster.processes import RankProcesses
from posttrain.core.training.digests import block_digests
from tests.helpers.ranks import WORKER, nothing
from tests.helpers.speed import (
    Options,
    assert_equal_gradients,
    plain_gradients,
    speed_batch,
    speed_learner,
    speed_model,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    group = RankProcesses(4, WORKER, {"OMP_NUM_THREADS": "1"})
    group.start(2, nothing)
    yield group
    group.close()


@pytest.mark.parametrize(
    "lora",
    [pytest.param(False, id="weights"), pytest.param(True, id="lora", marks=pytest.mark.slow)],
)
def test_the_gradient_is_the_plain_one(ranks: RankGroup, lora: bool) -> None:
    options = Options(lora=lora, micro_batch_size=1)
    found = ranks.call("gradient", "llama", options, check=nothing)
    assert_equal_gradients(found, plain_gradients("llama", options))


@pytest.mark.slow
def test_updates_checkpoints_and_digests_are_those_of_one_process(
    ranks: RankGroup, tmp_path: Path
) -> None:
    ranks.call("start", "llama", Options(), check=nothing)
    model = speed_model("llama", Options())
    alone = speed_learner(model, Options())
    for step in range(2):
        found = ranks.call("update", step, check=nothing)
        wanted = alone.update(speed_batch(), step, 0.0).metrics
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    weights = ranks.call("weights", check=nothing)
    for name, weight in weights.items():
        kept = model.get_parameter(name).detach()
        torch.testing.assert_close(weight, kept, rtol=0, atol=1e-5)
    for step in (1, 2):
        blocks = ranks.call("blocks", step, check=nothing)
        assert block_digests(blocks, step) == block_digests(weights, step)

    ranks.call("write", tmp_path, check=nothing)
    alone.optimizer.read(tmp_path, 2)
    for name, weight in weights.items():
        assert torch.equal(weight, model.get_parameter(name).detach()), name
    ranks.call("update", 2, check=nothing)
    wanted_weights = ranks.call("weights", check=nothing)
    ranks.call("start", "llama", Options(), check=nothing)
    ranks.call("read", tmp_path, 2, check=nothing)
    ranks.call("update", 2, check=nothing)
    for name, weight in ranks.call("weights", check=nothing).items():
        assert torch.equal(weight, wanted_weights[name]), name
