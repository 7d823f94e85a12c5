"""A sync that left old weights in the engine is noticed, whole or in part; a right one never is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.config.sections import LoraSection
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.models.lora import add_adapter
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.training.sync_check import BOUNDS, SyncCheck, When, check_stored, make_probe
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from tests.helpers.engines import AnyEngine, make_engine, make_setup

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
LIMIT = 256
Weights = Iterable[tuple[str, Tensor]]


class Sloppy(TransformersEngine):
    """Gives each sync's weights to `filter` first, and cannot tell what weights it has."""

    name = "sloppy"
    filter: Callable[[Weights, dict[str, Tensor]], Weights] = staticmethod(lambda new, own: new)

    def sync_weights(self, weights: Weights, policy_version: int) -> None:
        own = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        super().sync_weights(self.filter(weights, own), policy_version)

    def differing_weights(self, weights: Weights) -> tuple[str, ...] | None:  # type: ignore[override]
        return None


def keep_all(new: Weights, own: dict[str, Tensor]) -> Weights:
    return own.items()


def keep(part: str) -> Callable[[Weights, dict[str, Tensor]], Weights]:
    return lambda new, own: ((n, own[n] if n.startswith(part) else t) for n, t in new)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Sloppy]:
    made = Sloppy(TransformersEngineConfig())
    made.start(make_setup(folder))
    yield made
    made.close()


def checker(engine: AnyEngine, folder: Path, when: When = "every") -> SyncCheck:
    model = load_policy(folder, RUNTIME)
    return SyncCheck(engine, model, make_probe(ChatTokenizer.load(folder), LIMIT), when)


def train(model: PreTrainedModel, rate: float) -> None:
    """An optimizer step on some tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    ids = torch.randint(4, 90, (4, 20), generator=torch.Generator().manual_seed(1))
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def sync(check: SyncCheck) -> dict[str, float]:
    check.engine.sync_weights(check.model.state_dict().items(), 1)
    return check.after("the sync of step 1")


@pytest.mark.parametrize("rate", [1e-2, 1e-4, 1e-7])
def test_right_syncs_pass_and_are_measured(engine: Sloppy, folder: Path, rate: float) -> None:
    check = checker(engine, folder)
    assert check.after("the start")["sync/probe_abs_max"] < 1e-5
    for _ in range(4):
        train(check.model, rate)
        found = sync(check)
        assert found["sync/probe_abs_max"] < 1e-4
        assert found["sync/probe_abs_mean"] <= found["sync/probe_abs_max"]
        assert found["sync/probe_change"] > 0
    assert sync(check)["sync/probe_change"] == 0, "nothing moved, and nothing is claimed"


@pytest.mark.parametrize("rate", [1e-2, 1e-4, 1e-7])
def test_a_sync_that_only_counts_is_noticed_however_small_the_update(
    engine: Sloppy, folder: Path, rate: float
) -> None:
    check = checker(engine, folder)
    check.after("the start")
    train(check.model, rate)
    engine.filter = keep_all
    with pytest.raises(RunError, match="'sloppy' kept its old weights after the sync of step 1"):
        sync(check)


@pytest.mark.parametrize(
    "part", ["model.layers.0.", "model.layers.1.", "model.embed", "model.norm"]
)
def test_one_part_left_old_after_one_update_of_normal_size_is_noticed(
    engine: Sloppy, folder: Path, part: str
) -> None:
    check = checker(engine, folder)
    check.after("the start")
    train(check.model, 1e-3)
    engine.filter = keep(part)
    with pytest.raises(
        RunError, match="(kept old|does not answer with the trainer's) weights after"
    ):
        sync(check)


def test_an_engine_that_answers_with_noise_is_still_known_to_stand_still(
    engine: Sloppy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in bfloat16: gaps of 0.03 nats, never twice the same."""
    check = checker(engine, folder)
    exact, generator = engine.score, torch.Generator().manual_seed(0)

    def noisy(sequences: list[list[int]]) -> list[list[float]]:
        rows = [torch.tensor(row) for row in exact(sequences)]
        return [(r + 0.03 * torch.randn(r.shape, generator=generator)).tolist() for r in rows]

    monkeypatch.setattr(engine, "score", noisy)
    monkeypatch.setitem(BOUNDS, torch.float32, BOUNDS[torch.bfloat16])
    check.after("the start")
    train(check.model, 1e-3)
    sync(check)
    train(check.model, 2e-3)
    engine.filter = keep_all
    with pytest.raises(RunError, match=r"kept old weights after .* from the trainer of before"):
        sync(check)


def test_a_few_tokens_may_be_far_apart_in_bfloat16_and_none_in_float32(
    engine: Sloppy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, num_far = engine.score, 2

    def with_tail(sequences: list[list[int]]) -> list[list[float]]:
        first, *others = exact(sequences)
        return [[v - 5.0 * (i < num_far) for i, v in enumerate(first)], *others]

    monkeypatch.setattr(engine, "score", with_tail)
    wanted = "does not answer with the trainer's weights"
    with pytest.raises(RunError, match=f"{wanted} .* 0.0002 and 0.001 in float32; some"):
        checker(engine, folder).after("the start")
    monkeypatch.setitem(BOUNDS, torch.float32, BOUNDS[torch.bfloat16])
    check = checker(engine, folder)
    for event in ("the start", "the same weights"):
        assert check.after(event)["sync/probe_abs_max"] == pytest.approx(5.0, abs=1e-3)
    num_far = 3  # of 46
    with pytest.raises(RunError, match=f"{wanted} .* in float32, but for 5% of the tokens"):
        check.after("a worse engine")


def test_moves_too_small_to_tell_add_up_until_they_tell(engine: Sloppy, folder: Path) -> None:
    check = checker(engine, folder)
    check.after("the start")
    engine.filter = keep_all
    # One input embedding: fewer than half of the probe's log-probs move, and by next to nothing.
    weight = check.model.get_input_embeddings().weight
    ids = check.probe[1]
    rare = next(token for token in reversed(ids[:-1]) if ids.count(token) == 1)
    with torch.no_grad():
        check.model.get_output_embeddings().weight = torch.nn.Parameter(weight.clone())
        weight[rare] += 2e-6
    assert sync(check)["sync/probe_change"] > 0
    assert check.trusted is check.start, "the engine is not known to have followed"
    train(check.model, 1e-6)
    with pytest.raises(RunError, match="kept its old weights"):
        sync(check)


def test_an_engine_that_can_tell_names_the_weights_that_differ(folder: Path) -> None:
    engine = make_engine("transformers")
    engine.start(make_setup(folder))
    check = checker(engine, folder)
    check.after("the start")
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        check.model.get_parameter(name)[3, 4] += 1e-3
    with pytest.raises(RunError, match=rf"kept some old weights .*: 1 of \d+ differ .*\({name}\)"):
        check.after("the sync of step 1")
    sync(check)
    train(check.model, 1e-3)
    with pytest.raises(RunError, match="kept its old weights after the sync of step 2"):
        check.after("the sync of step 2")
    engine.close()


def test_scores_of_another_length_are_no_answer(
    engine: Sloppy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = checker(engine, folder)
    monkeypatch.setattr(engine, "score", lambda sequences: [[-1.0] * len(s) for s in sequences])
    with pytest.raises(RunError, match="expected one less than tokens"):
        check.after("the start")


def test_which_syncs_are_looked_at(engine: Sloppy, folder: Path) -> None:
    due = {when: checker(engine, folder, when) for when in ("every", "first", "never")}  # type: ignore[arg-type]
    assert [due["every"].is_due() for _ in range(3)] == [True, True, True]
    assert [due["first"].is_due() for _ in range(3)] == [True, True, False]
    assert [due["never"].is_due() for _ in range(3)] == [False, False, False]


@pytest.mark.parametrize("tells", [True, False])
def test_an_engine_that_shows_its_weights_is_probed_twice(folder: Path, tells: bool) -> None:
    engine = make_engine("transformers") if tells else Sloppy(TransformersEngineConfig())
    engine.start(make_setup(folder))
    check = checker(engine, folder)
    measured = []
    for _ in range(4):
        assert check.is_due()
        measured.append("sync/probe_abs_max" in sync(check))
        train(check.model, 1e-3)
    assert measured == [True, True, not tells, not tells]
    with pytest.raises(RunError, match="kept its old weights after the sync of step 5"):
        check.after("the sync of step 5")
    engine.close()


def test_an_adapter_is_probed_each_time(folder: Path) -> None:
    engine = make_engine("transformers")
    engine.start(make_setup(folder))
    check = checker(engine, folder)
    add_adapter(check.model, LoraSection(rank=4), seed=1)
    for version in range(4):
        assert check.is_due()
        send_policy(engine, check.model, version)
        assert "sync/probe_abs_max" in check.after(f"the sync of step {version}")
    engine.close()


def test_a_probe_fits_the_engine_and_ends_where_the_texts_do(folder: Path) -> None:
    tokenizer = ChatTokenizer.load(folder)
    assert [len(ids) for ids in make_probe(tokenizer, 256)] == [24, 24]
    assert [len(ids) for ids in make_probe(tokenizer, 16)] == [15, 15]
    texts = [list(range(40)), [7], list(range(5))]
    given = make_probe(tokenizer, 256, texts)
    assert given == [list(range(16, 40)), [7, tokenizer.eos_token_id]]


def test_an_engine_given_another_stages_model_is_compared_with_it(
    engine: Sloppy, folder: Path, tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer.load(folder)
    other = make_tiny_model(tmp_path / "other", seed=1)
    check_stored(engine, folder, RUNTIME, tokenizer, LIMIT)
    with pytest.raises(RunError, match="does not answer with the trainer's weights"):
        check_stored(engine, other, RUNTIME, tokenizer, LIMIT)
