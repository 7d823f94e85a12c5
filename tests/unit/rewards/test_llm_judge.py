"""The reward `"llm_judge"` against a real HTTP server that fails in every way it is reported to."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.types import Score
from tests.helpers.judge_server import JudgeServer, judge_server
from tests.helpers.plugins import MANAGER
from tests.helpers.rewards import sample

CONTEXT = RewardContext({}, torch.float32, torch.device("cpu"), "eager", 1)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """A judge without a key."""
    with judge_server() as state:
        yield state


def judge(server: JudgeServer, **fields: object) -> Reward:  # type: ignore[type-arg]
    """The reward, pointed at `server`, impatient and without a cache."""
    quick = {"base_url": server.url, "model": "m", "cache": None, "backoff_s": 0.01}
    made = MANAGER.build(Reward, "llm_judge", {**quick, "timeout_s": 5, **fields})
    made.setup(CONTEXT)
    return made


def judged(server: JudgeServer, text: str, **fields: object) -> Score:
    return judge(server, **fields).score([sample(text)])[0]


# --- scores -----------------------------------------------------------------------------------


def test_a_score_is_read_and_put_between_0_and_1(server: JudgeServer) -> None:
    found = judged(server, "hello")
    assert found == Score(0.7, components={"judge": 7.0, "votes": 1.0})
    assert judged(server, "hello", rescale=False).value == 7.0
    assert judged(server, "says:Score:_3", low=1, high=5).value == 0.5
    assert judged(server, "says:Score:_1_no,_Score:_4").value == 0.4  # the last one
    assert judged(server, 'says:so_{"score":_2.5}', reply="json").value == 0.25


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("says:I_like_it", "no score in the judge's reply: 'I like it'"),
        ("says:Score:_11", "the judge's score 11 is outside [0, 10]"),
        ("says:Score:_-1", "the judge's score -1 is outside [0, 10]"),
        ("says:", "no score in the judge's reply: ''"),
        ("garbage", "not a chat completion: '\\x00\ufffd{'"),
        ("html", "not a chat completion: '<html>it works</html>'"),
        ("status:400", "HTTP 400: no, None"),
        ("status:302", "HTTP 302: no, None"),
        ("endless", "gave up after 2 attempts: a reply longer than 1048576 bytes"),
        ("fails:500:9", "gave up after 2 attempts: HTTP 500: busy"),
    ],
)
def test_what_cannot_be_graded_is_an_error_and_never_a_zero(
    server: JudgeServer, text: str, detail: str
) -> None:
    assert judged(server, text, max_retries=1) == Score(None, "error", detail)


def test_a_slow_reply_is_a_timeout_however_it_drips(server: JudgeServer) -> None:
    found = judged(server, "slow", timeout_s=0.3)
    assert found == Score(None, "timeout", "no reply in 0.3 s")
    assert len(server.requests) == 1  # not tried again


@pytest.mark.parametrize("failure", ["fails:429:2", "fails:500:2", "fails:503:1", "fails:408:2"])
def test_what_may_pass_is_tried_again(server: JudgeServer, failure: str) -> None:
    assert judged(server, failure).value == 0.7
    assert len(server.requests) == int(failure[-1]) + 1


def test_broken_connections_are_tried_again_and_then_given_up(server: JudgeServer) -> None:
    found = judged(server, "hangup", max_retries=2)
    assert (found.value, found.status) == (None, "error") and "gave up after 3" in found.detail
    assert len(server.requests) == 3
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        found = judged(server, "hello", base_url=nobody, max_retries=1)
    assert "gave up after 2 attempts: ClientConnectorError: Cannot connect" in found.detail


def test_one_bad_sample_leaves_the_others_their_scores_in_order(server: JudgeServer) -> None:
    texts = ["says:Score:_1", "garbage", "says:Score:_2", "fails:429:1", "says:Score:_3"]
    found = judge(server).score([sample(text) for text in texts])
    assert [s.value for s in found] == [0.1, None, 0.2, 0.7, 0.3]
    assert judge(server).score([]) == []


def test_it_can_be_called_where_an_event_loop_runs(server: JudgeServer) -> None:
    async def inside() -> Score:
        return judged(server, "hello")

    assert asyncio.run(inside()).value == 0.7


# --- votes ------------------------------------------------------------------------------------


def test_votes_are_separate_requests_whose_median_counts(server: JudgeServer) -> None:
    found = judged(server, "varies", votes=3)
    assert found == Score(0.4, components={"judge": 4.0, "votes": 3.0})
    assert sorted(request["seed"] for request in server.requests) == [0, 1, 2]
    assert {request["temperature"] for request in server.requests} == {0.0}


def test_more_than_half_of_the_votes_must_be_read(server: JudgeServer) -> None:
    # Of attempts at one text, the first is refused and not tried again.
    assert judged(server, "fails:500:1 a", votes=3, max_retries=0).components["votes"] == 2.0
    assert judged(server, "fails:500:1 b", votes=2, max_retries=0).status == "error"


# --- limits -----------------------------------------------------------------------------------


def test_no_more_requests_run_at_once_than_allowed() -> None:
    with judge_server(hold=0.05) as server:
        texts = [sample(f"text {n}") for n in range(12)]
        assert {s.value for s in judge(server, max_concurrency=3).score(texts)} == {0.7}
    assert server.most_busy == 3


def test_requests_start_no_faster_than_allowed(server: JudgeServer) -> None:
    reward = judge(server, requests_per_second=20)
    reward.score([sample("first")])  # opens the connection, which delays its arrival
    del server.times[:]
    for part in (range(3), range(3, 5)):  # the pace holds from call to call
        reward.score([sample(f"text {n}") for n in part])
    assert len(server.times) == 5
    assert max(server.times) - min(server.times) >= 4 / 20 - 0.02


def test_a_spent_budget_is_an_error_for_what_is_left(server: JudgeServer) -> None:
    reward = judge(server, max_requests=3, max_concurrency=1)
    found = reward.score([sample(f"text {n}") for n in range(5)])
    assert [s.value for s in found] == [0.7, 0.7, 0.7, None, None]
    assert found[3] == Score(None, "error", "the budget is spent: 3 requests were sent")
    assert reward.score([sample("more")])[0].status == "error"  # for good
    assert len(server.requests) == 3


def test_attempts_and_tokens_count_against_the_budget(server: JudgeServer) -> None:
    found = judged(server, "fails:429:5", max_requests=2)
    assert found.detail == "the budget is spent: 2 requests were sent"
    reward = judge(server, max_total_tokens=15, max_concurrency=1)  # 10 a reply
    found_all = reward.score([sample(f"text {n}") for n in range(3)])
    assert [s.value for s in found_all] == [0.7, 0.7, None]
    assert found_all[2].detail == "the budget is spent: 20 tokens were used"


# --- keys -------------------------------------------------------------------------------------


def test_the_key_comes_from_the_environment_and_is_told_to_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    caplog.set_level(logging.DEBUG)
    with judge_server(key="sk-secret") as server:
        reward = judge(server, api_key_env="JUDGE_KEY", max_retries=0)
        found = reward.score([sample("hello"), sample("status:400"), sample("status:500")])
        assert [s.value for s in found] == [0.7, None, None]
        assert "no, Bearer ***" in found[1].detail and "Bearer ***" in found[2].detail
        reported = caplog.text + reward.config.model_dump_json() + "".join(s.detail for s in found)
    with judge_server(key="another") as server:
        with pytest.raises(RunError, match="HTTP 401.*JUDGE_KEY") as refusal:
            judged(server, "hello", api_key_env="JUDGE_KEY")
    assert "sk-secret" not in reported + str(refusal.value)


def test_a_key_that_is_not_there_is_found_out_before_the_first_sample(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ResourceError, match="'NO_SUCH_KEY'.* is not set: export it"):
        judge(server, api_key_env="NO_SUCH_KEY")
    monkeypatch.setenv("NO_SUCH_KEY", "sk-\u00fc")
    with pytest.raises(ResourceError, match="no HTTP header"):
        judge(server, api_key_env="NO_SUCH_KEY")


def test_a_wrong_address_stops_the_run_in_one_sentence(server: JudgeServer) -> None:
    with pytest.raises(RunError, match="refuses: HTTP 404.*check base_url"):
        judged(server, "hello", base_url=server.url + "/v2")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"base_url": "localhost:8000"}, "expected a URL like"),
        ({"base_url": "http://user:key@host/v1"}, "holds no key"),
        ({"base_url": "http://host/v1?key=5"}, "holds no key"),
        ({"rubric": "Is it good?"}, r"has no \{response\}"),
        ({"low": 5, "high": 5}, "not below"),
        ({"score_pattern": "Score"}, "has no group"),
        ({"score_pattern": "("}, "not a regular expression"),
        ({"api_key_env": "sk-12345"}, "api_key_env"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MANAGER.build(Reward, "llm_judge", {"base_url": "http://h/v1", "model": "m", **fields})


# --- the cache --------------------------------------------------------------------------------


def test_what_was_judged_once_is_not_asked_again(server: JudgeServer, tmp_path: Path) -> None:
    cache = {"cache": str(tmp_path / "judge"), "max_retries": 0}
    texts = [sample("a"), sample("b"), sample("a"), sample("says:nothing")]
    first = judge(server, **cache).score(texts)
    assert [s.value for s in first] == [0.7, 0.7, 0.7, None]
    assert len(server.requests) == 3  # a response that is there twice is judged once
    assert judge(server, **cache).score(texts) == first
    assert len(server.requests) == 4  # what had no score is asked for again
    for changed in ({"model": "n"}, {"rubric": "R {response}"}, {"temperature": 0.5}):
        judge(server, **cache, **changed).score(texts[:1])
    judge(server, **cache).score([sample("a", prompt="Another?")])
    assert len(server.requests) == 8
    # Another endpoint with the same model is the same judge, and costs nothing.
    assert judge(server, **cache, base_url="http://127.0.0.1:9/v1").score(texts[:1])[0].value == 0.7


def test_a_damaged_or_unwritable_cache_is_a_miss_or_a_clear_error(
    server: JudgeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    judged(server, "a", cache=str(folder))
    (file,) = folder.rglob("*.json")
    for damaged in (b"", b"\xff", b"[]", b'{"reply": 5}'):
        file.write_bytes(damaged)
        assert judged(server, "a", cache=str(folder)).value == 0.7
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="the judge's cache '.*file' cannot be written"):
        judge(server, cache=str(tmp_path / "file"))


def test_texts_that_utf8_cannot_hold_are_judged_too(server: JudgeServer) -> None:
    assert judged(server, "\ud800 \x00 \U0001f600").value == 0.7
    assert "\U0001f600" in json.dumps(server.requests[0], ensure_ascii=False)
