"""A teacher behind a server says what its weights say, or it is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.core.config.teachers import TeacherSection
from posttrain.core.contracts import PromptGroup
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.teacher_pass import candidate_pass
from posttrain.core.training.teacher_server import ServerAway, TeacherServer, server_of
from posttrain.core.training.teachers import Teachers
from posttrain.core.training.updates import no_check
from posttrain.core.types import Problem, SamplingParams
from tests.helpers.rollouts import load_tiny, ragged_batch
from tests.helpers.scoring_server import scoring_server

LEARNER = None  # whoever trains is not asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, init_std=0.3)


@pytest.mark.parametrize("fault", ["", "busy"])
def test_a_server_says_what_the_weights_say(folder: Path, fault: str) -> None:
    batch = ragged_batch([5, 9, 3], group_size=3)
    with scoring_server(folder, fault) as state:
        server = TeacherServer(state.url, "big", "t")
        server.check(ChatTokenizer.load(folder))
        found = server.scores(batch, 4)
    rows = [torch.arange(len(batch))]
    wanted = candidate_pass(load_tiny(folder), batch, rows, top_k=4, temperature=1.0)
    mask = batch.response_mask.bool()
    assert found.topk_ids is not None and found.topk_logprobs is not None
    assert wanted.topk_ids is not None and wanted.topk_logprobs is not None
    close = {"rtol": 0, "atol": 2e-5}  # float32 sums in another order, by processor
    torch.testing.assert_close(found.logprobs[mask], wanted.logprobs[mask].float(), **close)
    assert torch.equal(found.topk_ids[mask], wanted.topk_ids[mask])
    torch.testing.assert_close(
        found.topk_logprobs[mask], wanted.topk_logprobs[mask].float(), **close
    )
    assert found.logprobs[~mask].isnan().all() and (found.topk_ids[~mask] == -1).all()
    assert {request["model"] for request in state.requests} == {"big"}


def test_a_token_that_the_server_leaves_out_is_missing(folder: Path) -> None:
    batch = ragged_batch([5], group_size=2)
    with scoring_server(folder, "deaf") as state:
        server = TeacherServer(state.url, "big", "t")
        server.check(ChatTokenizer.load(folder))
        teachers = Teachers({"t": server}, on_missing="mask")
        filled, metrics = teachers.fill(
            batch,
            {"teacher_logprobs"},
            LEARNER,  # type: ignore[arg-type]
        )
    lengths = batch.response_mask.sum(dim=1).tolist()
    missing = filled.column("teacher_logprobs").isnan() & batch.response_mask.bool()
    assert missing.nonzero().tolist() == [[row, n - 1] for row, n in enumerate(lengths)]
    assert metrics["distil/missing_frac"] > 0


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("plain", "gives no log-probs of the tokens it was sent .*: use a vLLM server"),
        ("other", "has another tokenizer than the policy: of a test sentence it makes"),
    ],
)
def test_a_server_that_cannot_teach_is_refused(folder: Path, fault: str, says: str) -> None:
    with scoring_server(folder, fault) as state:
        section = TeacherSection(base_url=state.url, model="big")
        with pytest.raises(ResourceError, match=says):
            server_of("t", section).check(ChatTokenizer.load(folder))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"top_k": 21}, "prompt logprobs of 21, max allowed: 20.*: check how it was started"),
        ({"longest": 512}, "takes 512 tokens, .* start it with --max-model-len 513, or lower"),
    ],
)
def test_a_server_that_cannot_take_what_is_coming_is_refused_at_once(
    folder: Path, asked: dict[str, int], says: str
) -> None:
    tokenizer = ChatTokenizer.load(folder)
    with scoring_server(folder) as state:
        server = TeacherServer(state.url, "big", "t")
        server.check(tokenizer, **{name: number - 1 for name, number in asked.items()})
        with pytest.raises(ResourceError, match=says):
            server.check(tokenizer, **asked)


def test_nobody_there_is_another_matter_than_a_refusal(folder: Path) -> None:
    server = TeacherServer("http://127.0.0.1:9/v1", "big", "t")
    with pytest.raises(ServerAway, match=r"the server of teacher 't' .* does not answer"):
        server.check(ChatTokenizer.load(folder))


def test_the_key_comes_from_the_environment_and_is_in_no_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResourceError, match="'MY_TEACHER_KEY', which holds the key of a teacher"):
        TeacherServer("http://127.0.0.1:9/v1", "big", "t", api_key_env="MY_TEACHER_KEY")
    monkeypatch.setenv("MY_TEACHER_KEY", "s3cret-key")
    with scoring_server(folder, "plain") as state:
        server = TeacherServer(state.url, "big", "t", api_key_env="MY_TEACHER_KEY")
        with pytest.raises(ResourceError) as refused:
            server.check(ChatTokenizer.load(folder))
    assert state.keys == {"Bearer s3cret-key"} and "s3cret" not in str(refused.value)


def test_a_server_samples_answers_in_order(folder: Path) -> None:
    tokenizer, model = ChatTokenizer.load(folder), load_tiny(folder)
    prompts = [PromptGroup(Problem("k", "p", "a", "w"), ids) for ids in ((5, 6, 7), (8, 9))]
    params = SamplingParams(num_generations=2, max_tokens=4, seed=2**31 - 1)
    with scoring_server(folder) as state:
        server = TeacherServer(state.url, "big", "t")
        server.check_sampling(tokenizer)
        groups = server.sample(prompts, params, ends=tokenizer.end_token_ids, check=no_check)
    for prompt, group in zip(prompts, groups, strict=True):
        assert group.prompt is prompt and len(group.completions) == 2
        ids = list(prompt.prompt_ids)
        for token in group.completions[0].token_ids:
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
    seeds = [request["seed"] for request in state.requests[1:]]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**31 for seed in seeds)


def test_a_server_that_does_not_say_what_it_sampled_is_refused(folder: Path) -> None:
    with scoring_server(folder, "plain") as state:
        server = TeacherServer(state.url, "big", "t")
        with pytest.raises(ResourceError, match=r"no tokens of what it samples: .* seq_kd: false"):
            server.check_sampling(ChatTokenizer.load(folder))
    with pytest.raises(ServerAway):
        server.check_sampling(ChatTokenizer.load(folder))
