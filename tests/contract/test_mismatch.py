"""Every engine in addition to a learner: ten updates, under each distribution, and every rollout
correction.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.core.contracts import RolloutCorrection
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.types import SamplingParams
from tests.helpers.engines import make_engine
from tests.helpers.mismatch import make_rig
from tests.helpers.plugins import MANAGER
from tests.helpers.updates import update, with_old_logprobs

LAWS = [(1.0, 1.0, 0), (0.7, 0.8, 20)]
# Largest and mean difference of a token's log-prob, nats. In bfloat16 a token at the edge of a cut
# may be in one program's support and not in the other's: the gap is then the log of its mass.
BOUNDS = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.3, 0.03)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        pytest.param("transformers", torch.float32, marks=pytest.mark.slow),
        ("transformers", torch.bfloat16),
        pytest.param("vllm", torch.float32, marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param("vllm", torch.bfloat16, marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_engine_and_trainer_agree_before_and_after_ten_updates(
    folder: Path, engine: str, dtype: torch.dtype
) -> None:
    made = make_engine(engine)
    if made.unavailable_reason():
        pytest.skip(str(made.unavailable_reason()))
    largest, mean = BOUNDS[dtype]
    for distribution in LAWS:
        params = SamplingParams(4, 12, *distribution, seed=1)
        rig = make_rig(engine, folder, params, dtype=dtype, correction="tis_token", engine=made)
        # In bfloat16 ties are common, and its bounds allow for them.
        rig.leave_out_ties = dtype == torch.float32
        try:
            rig.check.after("the start")
            steps = [rig.step() for _ in range(11)]
            for found in steps:
                assert found["mismatch/abs_max"] < largest, distribution
                assert found["mismatch/abs_mean"] < mean, distribution
                assert 1 - found["ess/token"] < mean
                assert found["sync/probe_abs_max"] < largest
            assert rig.left_out <= 4  # Of some two thousand.
            # Far enough that weights of before the updates would be seen.
            assert sum(found["sync/probe_change"] for found in steps) > 10 * mean
            if dtype == torch.float32:
                batch = with_old_logprobs(rig.learner, rig.sample())
                old, roll = batch.column("old_logprobs"), batch.rollout_logprobs
                for entry in MANAGER.entries("rollout_correction"):
                    plugin = MANAGER.build(RolloutCorrection, entry.name)
                    got, live = plugin.correct(old, roll, batch.mask), batch.mask.bool()
                    if got.weight is not None:
                        assert (got.weight[live] - 1).abs().max() < 1e-3, entry.name
                    assert got.keep is None or got.keep[live].all(), entry.name
                    kept = plugin.keeps(old, batch)
                    assert kept is None or kept[live].all(), entry.name
            update(rig.learner, rig.sample(), 99, 0.0)
            with pytest.raises(RunError, match=f"'{engine}' kept "):
                rig.check.after("a sync that never was")
        finally:
            made.close()
