"""The reward pool: whatever a reward does, every other sample is scored and no process is left.

Over 300 lines because every way to misbehave is tried on one pool, with one check of what is left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.rewards import pool as pool_module
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.types import Score
from tests.helpers.faulty_rewards import (
    HARM,
    NONSENSE,
    SLEEPER,
    FaultyConfig,
    FaultyReward,
    samples_of,
)


def make_pool(
    timeout_s: float = 5.0,
    workers: int = 2,
    check: Callable[[], None] = lambda: None,
    **settings: object,
) -> RewardPool:
    reward = FaultyReward(FaultyConfig.model_validate(settings))
    return RewardPool([reward], workers=workers, timeout_s=timeout_s, check=check)


def score(pool: RewardPool, texts: list[str]) -> list[Score]:
    (column,) = pool.score(samples_of(texts))
    return column


def below() -> set[int]:
    """Process ids below this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def left_behind() -> list[int]:
    """Processes that a reward started, wherever they hang now."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if SLEEPER in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = below()
    yield
    assert soon(lambda: not (below() - before)), psutil.Process().children(recursive=True)
    assert soon(lambda: not left_behind())


def mixed(rng: random.Random, count: int) -> tuple[list[str], dict[str, list[int]]]:
    """So many texts, 5 % of them crash, 5 % hang and 5 % return nonsense."""
    texts, each = [str(place) for place in range(count)], count // 20
    places = rng.sample(range(count), 3 * each)
    bad = {"crashed": places[:each], "timeout": places[each:-each], "error": places[-each:]}
    kinds = {"crashed": ["exit", "segfault"], "timeout": ["sleep", "regex"], "error": [*NONSENSE]}
    for status, rows in bad.items():
        for turn, row in enumerate(rows):
            texts[row] = kinds[status][turn % len(kinds[status])]
    return texts, bad


@pytest.mark.alone
@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.slow)])
def test_samples_of_which_15_in_100_misbehave_cost_no_more_than_their_timeouts(count: int) -> None:
    timeout_s, workers = 0.5, 4
    texts, bad = mixed(random.Random(0), count)
    with make_pool(timeout_s, workers, work_s=0.02) as pool:
        score(pool, ["1"] * workers)  # the start of the processes
        for _ in range(3):  # a busy machine gets another chance to be quick, not to be right
            began = time.monotonic()
            clean = score(pool, [str(place) for place in range(count)])
            middle = time.monotonic()
            found = score(pool, texts)
            took = time.monotonic() - middle
            assert [s.value for s in clean] == [float(place) for place in range(count)]
            wrong = {row for rows in bad.values() for row in rows}
            for row in set(range(count)) - wrong:
                assert (found[row].value, found[row].status) == (float(row), "ok")
                assert found[row].detail == str(row)
            for status, rows in bad.items():
                assert {(found[row].status, found[row].value) for row in rows} == {(status, None)}
            if took <= 1.3 * (middle - began) + len(bad["timeout"]) * timeout_s / workers:
                break
        else:
            pytest.fail(f"{took:.1f} s against {middle - began:.1f} s clean")


def test_every_kind_of_harm_costs_its_own_sample_and_says_what_happened() -> None:
    texts = [text for kind in HARM for text in ("1", kind, "2")]
    with make_pool(timeout_s=0.6) as pool:
        found = dict(zip(texts[1::3], score(pool, texts)[1::3], strict=True))
        again = score(pool, ["3", "4"])
    assert [s.value for s in again] == [3.0, 4.0]
    assert all(s.value is None for s in found.values())
    reported = {kind: (s.status, s.detail) for kind, s in found.items()}
    late = ("timeout", "no score within 0.6 s")
    assert reported.pop("close")[0] in ("crashed", "timeout")
    status, detail = reported.pop("write")
    assert status == "crashed" and "wrote into the pool's channel" in detail
    assert reported == {
        "exit": ("crashed", "its process ended with exit code 3"),
        "segfault": ("crashed", "its process was killed by SIGSEGV"),
        "killed": ("crashed", "its process was killed by SIGKILL, perhaps for want of memory"),
        "sleep": late,
        "regex": late,
        "children": ("crashed", "its process ended with exit code 0"),
        "raise": ("error", "ValueError: no such answer"),
        "sys_exit": ("error", "SystemExit: enough"),
    }


def test_what_a_dead_worker_started_is_killed_while_the_pool_lives_on() -> None:
    with make_pool() as pool:
        assert score(pool, ["children"])[0].status == "crashed"
        assert soon(lambda: not left_behind())
        assert score(pool, ["1"])[0].value == 1.0


def test_nonsense_is_an_error_that_says_what_came() -> None:
    with make_pool() as pool:
        found = dict(zip(NONSENSE, score(pool, list(NONSENSE)), strict=True))
    assert {(s.status, s.value) for s in found.values()} == {("error", None)}
    assert "the value nan" in found["nan"].detail
    assert "'1.0', expected a list with one Score" in found["string"].detail
    assert "2 scores for one sample" in found["two"].detail


def test_scores_keep_their_order_their_parts_and_what_is_unscored() -> None:
    rewards = [FaultyReward(FaultyConfig()), FaultyReward(FaultyConfig(work_s=0.002))]
    texts = [str(number) for number in range(90)] + ["unscored"]
    with RewardPool(rewards, workers=3) as pool:
        columns = pool.score(samples_of(texts))
        assert pool.samples_per_s > 0
    assert columns[0] == columns[1]
    assert [s.value for s in columns[0]] == [*map(float, range(90)), None]
    assert columns[0][7].components == {"part": 7.0}
    assert [(s.end, s.correct) for s in columns[0][12].steps] == [(2, 12.0)]
    assert columns[0][90] == Score(None, "unscored", "nothing to say")


def test_the_clock_of_a_sample_starts_when_its_scoring_does() -> None:
    with make_pool(timeout_s=1.0, workers=1, work_s=0.15) as pool:
        found = score(pool, ["1"] * 16)  # shares of eight: the last waits a second for its turn
    assert {s.status for s in found} == {"ok"}


def test_a_reward_may_ask_for_more_time_than_the_pool_gives() -> None:
    with make_pool(timeout_s=0.05, work_s=0.3, limit_s=5.0) as pool:
        assert score(pool, ["1"])[0].value == 1.0
    with make_pool(timeout_s=0.05, work_s=0.3) as pool:
        assert score(pool, ["1"])[0].status == "timeout"


def workers_of(pool: RewardPool) -> list[psutil.Process]:
    server = pool._server
    assert server is not None
    return psutil.Process(server.process.pid).children()


def test_the_pool_survives_the_death_of_all_its_workers_and_of_their_server() -> None:
    with make_pool(work_s=0.02) as pool:
        score(pool, ["1", "2"])
        for worker in workers_of(pool):  # idle ones: nobody is to blame
            worker.kill()
        assert [s.value for s in score(pool, ["3", "4", "5"])] == [3.0, 4.0, 5.0]

        def kill_server() -> None:
            time.sleep(0.3)
            assert pool._server is not None
            pool._server.process.kill()

        thread = threading.Thread(target=kill_server)
        thread.start()
        found = score(pool, [str(number) for number in range(100)])
        thread.join()
    assert [s.value for s in found] == [float(number) for number in range(100)]


def test_a_worker_has_no_torch_to_copy_at_each_fork() -> None:
    with make_pool() as pool:
        assert score(pool, ["has torch"])[0].value == 0.0


def test_slow_imports_are_made_once_before_the_workers_are_forked() -> None:
    with make_pool() as pool:
        assert score(pool, ["preloaded by the parent"] * 3)[2].value == 1.0


def test_a_stop_is_heard_while_a_sample_hangs() -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    before = below()  # other tests' nodes, where they run in this process
    with make_pool(timeout_s=60, check=check) as pool:
        score(pool, ["1"])
        threading.Timer(0.3, stop.set).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            score(pool, ["sleep", "regex", "1"])
        assert time.monotonic() - began < 5
        assert soon(lambda: not (below() - before))


class Local(Reward[NoConfig]):
    """R = 0, in a module that a worker cannot import."""

    name, Config = "local", NoConfig

    def score(self, samples: object) -> list[Score]:
        return [Score(0.0)]


def test_a_reward_that_no_worker_could_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"reward 'local' .* runs in worker processes"):
        RewardPool([Local(NoConfig())])
    monkeypatch.setattr(Local, "__module__", "no_such_module")
    with RewardPool([Local(NoConfig())]) as pool:
        with pytest.raises(RunError, match=r"importing a reward failed with ModuleNotFoundError"):
            score(pool, ["1"])


def test_a_reward_that_cannot_be_set_up_stops_the_run() -> None:
    import torch

    from posttrain.core.contracts import RewardContext

    context = RewardContext({}, torch.float32, torch.device("cpu"), "eager", 1)
    reward = FaultyReward(FaultyConfig(harm_in_setup="raise"))
    with RewardPool([reward], workers=1, context=context) as pool:
        reported = "building its rewards failed with ValueError: no such answer"
        with pytest.raises(RunError, match=reported):
            score(pool, ["1"])


def test_workers_that_die_while_they_start_stop_the_run() -> None:
    with make_pool(harm_in_worker="exit") as pool:
        reported = "3 workers of the reward pool died while they built their rewards: .* code 3"
        with pytest.raises(RunError, match=reported):
            score(pool, ["1"])


PARENT = """
import os, signal, sys
import psutil
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from tests.helpers.faulty_rewards import FaultyConfig, FaultyReward, samples_of
from posttrain.core.rewards.pool import RewardPool
pool = RewardPool([FaultyReward(FaultyConfig())], workers=2, timeout_s=600)
pool.score(samples_of(["1", "2"]))
def reported():
    if not reported.done:
        below = psutil.Process().children(recursive=True)
        print(*[process.pid for process in below], flush=True)
    reported.done = True
reported.done = False
pool._check = reported
pool.score(samples_of(["sleep", "regex"]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_parent_that_is_killed(number: signal.Signals) -> None:
    path = os.pathsep.join([entry or os.getcwd() for entry in sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3 and all(map(psutil.pid_exists, pids))  # the server and two workers
    process.send_signal(number)
    process.wait(timeout=20)
    assert soon(lambda: not any(map(psutil.pid_exists, pids)))


def test_as_many_workers_as_cores_but_no_more_than_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert pool_module.default_workers() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert pool_module.default_workers() == 1
