"""Episodes that are played at once: their order, their limits, and what the others suffer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.contracts import EngineSetup, Opening, PromptGroup, SampledGroup
from posttrain.core.data.task_folders import FOLDER
from posttrain.core.data.tokens import ChatTokenizer, rollout_batch
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.rollout.episodes import groups_from_json, groups_to_json
from posttrain.core.rollout.live import LiveRunner
from posttrain.core.rollout.plays import EpisodeLimits
from posttrain.core.rollout.turns import Turns
from posttrain.core.sandbox.runner import levels_available
from posttrain.core.training.forward import response_logprobs
from posttrain.core.types import Problem, SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from posttrain.plugins.environments.terminal import TerminalConfig
from tests.helpers.live import CHARACTERS, TEMPLATE, DigitGame, DigitGameConfig, Game
from tests.helpers.rollouts import load_tiny
from tests.helpers.typed_shell import TypedShell, task_folder

LIMITS = EpisodeLimits(at_once=2048, episode_s=60, step_s=60, most_failed=0.5, max_model_len=64)
PARAMS = SamplingParams(num_generations=2, max_tokens=40, seed=3)


def started(folder: Path) -> TransformersEngine:
    """An engine of a tiny model that is made in `folder`."""
    tokenizer = make_tiny_tokenizer(CHARACTERS, TEMPLATE)
    make_tiny_model(folder, seed=5, init_std=0.2, tokenizer=tokenizer)
    chat = ChatTokenizer.load(folder)
    made = TransformersEngine(TransformersEngineConfig())
    made.start(
        EngineSetup(
            model_dir=folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
            max_batch_size=256,
            stop_token_ids=chat.end_token_ids,
            pad_token_id=chat.pad_token_id,
            seed=0,
        )
    )
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    made = started(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


class Player:
    """A game with its runner."""

    def __init__(self, engine: TransformersEngine, turns: int = 3, **limits: float) -> None:
        assert engine._setup is not None
        self.engine = engine
        self.tokenizer = ChatTokenizer.load(engine._setup.model_dir)
        self.game = DigitGame(DigitGameConfig(turns=turns))
        self.runner = LiveRunner(self.game, Turns(self.tokenizer, 4, 16), replace(LIMITS, **limits))

    def prompts(self, keys: Sequence[str]) -> list[PromptGroup]:
        problems = [Problem(key, "7", "", "") for key in keys]
        return [PromptGroup(p, self.runner.encode_prompt(p)) for p in problems]

    def play(self, keys: Sequence[str], params: SamplingParams = PARAMS) -> list[SampledGroup]:
        try:
            return self.runner.generate(self.engine, self.prompts(keys), params)
        finally:
            self.runner.close()


def assert_same(found: Sequence[SampledGroup], wanted: Sequence[SampledGroup]) -> None:
    """The same episodes; log-probs differ in rounding, as other rows were computed with them."""
    for group, other in zip(found, wanted, strict=True):
        for one, two in zip(group.completions, other.completions, strict=True):
            assert replace(one, logprobs=()) == replace(two, logprobs=())
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def test_an_episode_is_what_was_sampled_and_what_the_game_showed(
    engine: TransformersEngine,
) -> None:
    player = Player(engine)
    (group,) = player.play(["a"])
    game, chat = player.game, player.tokenizer
    for completion in group.completions:
        assert completion.prompt_ids != group.prompt.prompt_ids, "the game showed a digit"
        ids = (*completion.prompt_ids, *completion.token_ids)
        assert (
            len(completion.turn_ends) == len(completion.turn_rewards) == completion.counts["turns"]
        )
        own = [i for i, sampled in enumerate(completion.sampled) if sampled]
        scores = engine.score([ids])[0]
        start = len(completion.prompt_ids) - 1
        for i in own:
            assert completion.logprobs[i] == pytest.approx(scores[start + i], abs=1e-5)
        given = [r for r in completion.turn_rewards if r is not None]
        assert completion.reward == (pytest.approx(sum(given)) if given else None)
    batch = rollout_batch([group], chat)
    observed, own_mask = batch.column("obs_mask"), batch.response_mask
    assert not (observed * own_mask).any(), "no token is both"
    ends = batch.column("turn_end")
    rows, turns = torch.nonzero(ends >= 0, as_tuple=True)
    assert own_mask[rows, ends[rows, turns]].all(), "a turn ends with a sampled token"
    assert game.seen.closed == 2 and game.seen.open == 0
    assert (game.seen.started, game.seen.stopped) == (1, 1)


def test_a_problem_that_comes_again_has_other_episodes(engine: TransformersEngine) -> None:
    """Equal seeds are equal games, and equal draws unless the engine happens to see both at once:
    the second group would say what the first one says."""
    often, once = Player(engine), Player(engine)
    often.play(["a", "a", "b", "a"])
    once.play(["a", "b"])
    seeds, usual = often.game.seen.seeds, once.game.seen.seeds
    assert len(seeds["a"]) == 3 * PARAMS.num_generations
    assert seeds["b"] == usual["b"] and usual["a"] < seeds["a"]


class Dealt(DigitGame):
    """A game that deals each episode digits of its own."""

    async def reset(self, problem: Problem, seed: int) -> Opening:
        return await super().reset(replace(problem, key=str(seed)), seed)


def test_the_trainer_finds_the_log_probs_that_each_episode_was_sampled_with(
    engine: TransformersEngine,
) -> None:
    """Episodes of one problem begin with what their own game shows."""
    player = Player(engine)
    player.runner = LiveRunner(Dealt(DigitGameConfig()), player.runner.turns, LIMITS)
    params = replace(PARAMS, num_generations=6)
    batch = rollout_batch(player.play(["a", "b"], params), player.tokenizer)
    prompts = {tuple(ids.tolist()) for ids in batch.prompt_ids[batch.group_id == 0]}
    assert len(prompts) > 1
    assert engine._setup is not None
    model = load_tiny(engine._setup.model_dir, torch.float32)
    found = response_logprobs(model, batch, temperature=1.0).logprobs
    own = batch.response_mask.bool()
    torch.testing.assert_close(found[own], batch.rollout_logprobs[own], rtol=0, atol=1e-4)


class Judged(DigitGame):
    """A game that scores whole episodes: the turns that were played, or a fault."""

    name = "judged"

    async def score(self, state: object) -> float | None:
        assert isinstance(state, Game) and not state.closed
        if state.problem.startswith("unfair"):
            raise OSError("the judge is away")
        return None if state.problem.startswith("open") else 10.0 + state.at


def test_an_episode_has_its_score_whatever_ended_it(engine: TransformersEngine) -> None:
    player = Player(engine, turns=9, most_failed=1.0)
    player.game = Judged(DigitGameConfig(turns=9))
    player.runner = LiveRunner(player.game, player.runner.turns, player.runner.limits)
    cut, unfair, unscored = player.play(["a", "unfair 1", "open 1"])
    for completion in cut.completions:
        assert completion.reward is not None and completion.reward >= 10 and not completion.failed
    assert any(c.finish_reason == "length" for c in cut.completions), "cut by its turns or tokens"
    assert {c.failed for c in unfair.completions} == {"OSError: the judge is away"}
    for completion in unscored.completions:
        given = [r for r in completion.turn_rewards if r is not None]
        assert completion.reward == (pytest.approx(sum(given)) if given else None)
    assert player.game.seen.open == 0


@pytest.mark.skipif(
    not set(levels_available()) - {"rlimits"}, reason="no sandbox here has folders of its own"
)
def test_episodes_in_sandboxes_are_judged_by_the_tests_of_their_task(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    assert engine._setup is not None
    tokenizer = ChatTokenizer.load(engine._setup.model_dir)
    shell = TypedShell(TerminalConfig(instructions=""))
    runner = LiveRunner(shell, Turns(tokenizer, 2, 16), LIMITS)
    folders = [task_folder(tmp_path / f"write-{wanted}", wanted) for wanted in "13"]
    problems = [Problem(f.name, f.name[-1], "", "", {FOLDER: str(f)}) for f in folders]
    try:
        prompts = [PromptGroup(p, runner.encode_prompt(p)) for p in problems]
        groups = runner.generate(engine, prompts, replace(PARAMS, num_generations=4))
    finally:
        runner.close()
    for wanted, group in zip("13", groups, strict=True):
        for completion in group.completions:
            assert not completion.failed, completion.failed
            begins = [0, *(end + 1 for end in completion.turn_ends)]
            own = [
                tokenizer.decode_response([t for t, mine in zip(ids, sampled, strict=True) if mine])
                for start, end in zip(begins, completion.turn_ends, strict=False)
                for ids in [completion.token_ids[start : end + 1]]
                for sampled in [(completion.sampled or (True,) * 999)[start : end + 1]]
            ]
            # A turn that was cut by the length of the response is not typed.
            typed = "".join(own[: int(completion.counts["calls"])])
            right = typed.count(wanted) / (len(typed) + 1)
            assert completion.reward == pytest.approx(right, abs=1e-4)


def test_neither_order_nor_company_changes_an_episode(engine: TransformersEngine) -> None:
    first = Player(engine).play(["a", "b", "c"])
    again = Player(engine, at_once=1).play(["c", "a", "b"])
    alone = Player(engine).play(["b"])
    assert_same(first, [again[1], again[2], again[0]])
    assert_same(alone, first[1:2])
    assert len({c.token_ids for c in first[0].completions}) == 2, "generations differ"
    assert groups_from_json(groups_to_json(first)) == first


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash at reset", "OSError: the server is away"),
        ("crash", "ValueError: a bug of the game"),
        ("hang at reset", "`reset` took more than 0.5 s"),
        ("hang", "`step` took more than 0.5 s"),
        ("deaf", "`step` took more than 0.5 s"),
        ("cancel", "a library cancelled the episode"),
    ],
)
def test_an_episode_that_fails_costs_itself_alone(
    engine: TransformersEngine, fault: str, reason: str
) -> None:
    fine = Player(engine).play(["a", "b"])
    player = Player(engine, step_s=0.5)
    found = player.play(["a", f"{fault} 1", "b"])
    assert_same([found[0], found[2]], fine)
    for completion in found[1].completions:
        # A turn that fills the response is the end, and its episode is not stepped.
        assert completion.failed.startswith(reason) or completion.finish_reason == "length"
    assert any(c.failed for c in found[1].completions)
    batch = rollout_batch(found, player.tokenizer)
    assert [bool(reason) for reason in batch.failures][:2] == [False, False]
    assert player.game.seen.open == 0, "what was opened was closed"


def test_an_episode_has_a_limit_of_its_own(engine: TransformersEngine) -> None:
    player = Player(engine, episode_s=5.0)  # several times what the others take on a busy machine
    began = time.monotonic()
    found = player.play(["a", "hang 1"])
    assert time.monotonic() - began < 20
    assert any(c.failed == "the episode took more than 5 s" for c in found[1].completions)
    assert player.game.seen.open == 0


def test_too_many_failures_end_the_run_in_a_sentence(engine: TransformersEngine) -> None:
    with pytest.raises(RunError, match=r"4 of 6 episodes failed.*the server is away.*max_failure"):
        Player(engine).play(["crash at reset 1", "crash at reset 2", "a"])


def test_a_game_that_blocks_the_loop_is_named(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.core.rollout.plays.SLACK_S", 1.0)
    with pytest.raises(RunError, match=r"kept all of its episodes waiting.*live\.py.*to_thread"):
        Player(engine, step_s=0.5).play(["block 1"], replace(PARAMS, max_tokens=4))


def test_a_prompt_that_leaves_no_room_fails_its_episode(engine: TransformersEngine) -> None:
    found = Player(engine, max_model_len=5, most_failed=1.0).play(["a"])
    assert all("leaves no room" in c.failed for c in found[0].completions)


def test_a_stop_is_heard_while_episodes_wait(engine: TransformersEngine) -> None:
    player = Player(engine)
    prompts = player.prompts(["hang 1"])

    def stop() -> None:
        if player.game.seen.open:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        player.runner.generate(engine, prompts, PARAMS, stop)
    player.runner.close()
    assert player.game.seen.open == 0


def test_a_thousand_episodes_of_which_a_tenth_hangs_and_a_tenth_crashes(
    engine: TransformersEngine,
) -> None:
    params = replace(PARAMS, num_generations=1, max_tokens=12)
    sound = [f"game {n}" for n in range(800)]
    began = time.monotonic()
    fine = Player(engine).play(sound, params)
    alone_s = time.monotonic() - began
    # Half of them break when they begin; of the others some end by their length before they would.
    kinds = ("hang", "crash", "hang at reset", "crash at reset")
    faults = [f"{kind} {n}" for kind in kinds for n in range(50)]
    player = Player(engine, step_s=2.0)
    began = time.monotonic()
    found = player.play([*sound, *faults], params)
    both_s = time.monotonic() - began
    assert_same(found[:800], fine)
    assert player.game.seen.open == 0 and player.game.seen.most_open > 500
    broken = sum(any(c.failed for c in group.completions) for group in found[800:])
    assert 150 < broken <= 200
    print(f"800 episodes {alone_s:.1f} s; with 200 that hang or crash {both_s:.1f} s")
