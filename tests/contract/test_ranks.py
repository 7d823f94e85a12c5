"""Two ranks train as one process does, and their checkpoints fit any number of ranks.

They are processes of this machine, or actors of a Ray cluster: the same tests over both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.cluster.group import RankGroup
from posttrain.core.training.digests import block_digests
from tests.helpers.ranks import nothing, started
from tests.helpers.speed import (
    SPEED_FAMILIES,
    Options,
    assert_equal_gradients,
    plain_gradients,
    speed_batch,
    speed_learner,
    speed_model,
)

PLAIN = Options()
ALL = Options(stream=True, packed=True, skip_idle=True, checkpointing=True, micro_batch_size=2)


@pytest.fixture(scope="module")
def ranks(rank_kind: str) -> Iterator[RankGroup]:
    group = started(rank_kind)
    yield group
    group.close()


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "lora"])
@pytest.mark.parametrize(
    "family",
    [
        # qwen3 is in `test_ranks_on_nodes`.
        pytest.param(name, marks=[] if name == "gpt2" else pytest.mark.slow)
        for name in SPEED_FAMILIES
    ],
)
def test_the_gradient_of_two_ranks_is_the_plain_one(
    ranks: RankGroup, family: str, lora: bool
) -> None:
    wanted = plain_gradients(family, Options(lora=lora))
    for options in (
        Options(lora=lora),
        Options(stream=True, lora=lora),
        # Three parts for two ranks: one of them computes a part that does not count.
        Options(packed=True, micro_batch_size=3, lora=lora),
        # Micro-batches with nothing but a response of one token, on one of them.
        Options(micro_batch_size=1, lora=lora),
        Options(True, True, True, True, 2, lora),
    ):
        found = ranks.call("gradient", family, options, check=nothing)
        assert_equal_gradients(found, wanted)


@pytest.mark.parametrize(
    ("family", "lora", "options"),
    [
        pytest.param(
            family,
            lora,
            options,
            id=f"{family}-{'lora' if lora else 'weights'}-{name}",
            marks=pytest.mark.slow,  # compiling takes minutes; one process is in unit/training
        )
        for family in SPEED_FAMILIES
        for lora in (False, True)
        for name, options in (("stream", Options(stream=True)), ("all", ALL))
    ],
)
@pytest.mark.parametrize("rank_kind", ["processes"], indirect=True)  # compiled alike anywhere
def test_the_gradient_of_two_ranks_with_compiled_layers_is_the_plain_one(
    ranks: RankGroup, family: str, lora: bool, options: Options
) -> None:
    wanted = plain_gradients(family, Options(lora=lora))
    compiled = replace(options, lora=lora, compiled=True)
    assert_equal_gradients(ranks.call("gradient", family, compiled, check=nothing), wanted)


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_updates_and_metrics_are_those_of_one_process(ranks: RankGroup, options: Options) -> None:
    ranks.call("start", "llama", options, check=nothing)
    model = speed_model("llama", options)
    learner = speed_learner(model, options)
    for step in range(3):
        found = ranks.call("update", step, check=nothing)
        wanted = learner.update(speed_batch(), step, 0.0).metrics
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    weights = ranks.call("weights", check=nothing)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-5)


def test_ranks_agree_that_a_step_is_not_taken(ranks: RankGroup) -> None:
    """Only one of them computes the row that is not finite."""
    options = Options(micro_batch_size=3)
    ranks.call("start", "llama", options, check=nothing)
    ranks.call("update", 0, check=nothing)
    before = ranks.call("weights", check=nothing)
    for row in (0, 3):  # one for each rank
        metrics, found = ranks.call("update_spoiled", row, check=nothing)
        assert metrics["grad/non_finite"] == 1.0
        assert [one.rows for one in found] == [(row,)]
        after = ranks.call("weights", check=nothing)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
    alone = speed_learner(speed_model("llama", options), options)
    for step in range(2):
        alone.update(speed_batch(), step, 0.0)
    ranks.call("update", 1, check=nothing)
    for name, weight in ranks.call("weights", check=nothing).items():
        wanted = alone.model.get_parameter(name).detach()
        torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-5)


def test_what_two_ranks_wrote_one_process_continues_and_the_other_way_round(
    ranks: RankGroup, tmp_path: Path
) -> None:
    ranks.call("start", "llama", PLAIN, check=nothing)
    for step in range(2):
        ranks.call("update", step, check=nothing)
    ranks.call("write", tmp_path / "two", check=nothing)
    assert len(list((tmp_path / "two" / "exp_avg").iterdir())) == 2, "a piece for each rank"
    files = [path for path in (tmp_path / "two").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors"}, "nothing is pickled"

    model = speed_model("llama", PLAIN)
    alone = speed_learner(model, PLAIN)
    alone.optimizer.read(tmp_path / "two", 2)
    assert alone.optimizer.step_count == 2
    eps = alone.optimizer.optimizer.param_groups[0]["eps"]
    assert eps == 0.01, "a number keeps its 64 bits"
    for name, weight in ranks.call("weights", check=nothing).items():
        assert torch.equal(weight, model.get_parameter(name).detach()), name
    alone.optimizer.write(tmp_path / "one")

    ranks.call("update", 2, check=nothing)
    wanted = ranks.call("weights", check=nothing)
    alone.update(speed_batch(), 2, 0.0)
    for name, weight in wanted.items():
        found = model.get_parameter(name).detach()
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-5)

    ranks.call("start", "llama", PLAIN, check=nothing)
    ranks.call("read", tmp_path / "one", 2, check=nothing)
    ranks.call("update", 2, check=nothing)
    for name, weight in ranks.call("weights", check=nothing).items():
        assert torch.equal(weight, wanted[name]), name


@pytest.mark.parametrize("shape", [(301, 113), (1, 20_000), (3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_blocks_of_pieces_are_those_of_the_whole(
    ranks: RankGroup, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Uneven pieces, a rank without any, blocks that begin on one rank and end on the other."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for step in range(4):
        found = ranks.call("blocks_of", tensor, step, check=nothing)
        wanted = block_digests({"cut": tensor, "whole": tensor}, step)
        assert block_digests(found, step) == wanted


def test_the_digests_of_trained_weights_in_pieces_are_those_of_the_whole(
    ranks: RankGroup,
) -> None:
    ranks.call("start", "llama", PLAIN, check=nothing)
    ranks.call("update", 0, check=nothing)
    weights = ranks.call("weights", check=nothing)
    for step in (1, 2):
        found = ranks.call("blocks", step, check=nothing)
        assert block_digests(found, step) == block_digests(weights, step)
