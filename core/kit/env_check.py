"""An environment, played by scripted turns as training plays it: what `posttrain env check` finds.

Each check plays episodes in one event loop, in a thread of its own; an environment that blocks the
loop or hangs fails the check and holds up nothing.
"""

from __future__ import annotations

import asyncio
import copy
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from posttrain.core.contracts import (
    Environment,
    LiveEnvironment,
    Observation,
    Opening,
    PlayedEnvironment,
    PromptGroup,
    SampledGroup,
    Turn,
)
from posttrain.core.contracts.rollout import Episode
from posttrain.core.data.tokens import rollout_batch
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.kit.checks import Broken, Finding, Skipped, broken, expect, raised
from posttrain.core.kit.env_play import (
    SCORE_S,
    AsLive,
    EnvironmentSubject,
    Played,
    Playing,
    Says,
    always,
    limited,
    scripted,
)
from posttrain.core.kit.env_played import check_played, no_reward
from posttrain.core.rollout.event_loop import Blocked, EventLoop
from posttrain.core.rollout.turns import Turns, completion_of
from posttrain.core.types import Completion, Message, Problem

START_S = 120.0
ROOM = 1_000_000
SHORTEST_ANSWER = 3
"""A shorter one would be found in ordinary texts."""


def check_environment(subject: EnvironmentSubject) -> list[Finding]:
    """How each check ended. Raises `PosttrainError` where the environment refuses to start."""
    made = subject.environment
    if isinstance(made, Environment):
        live: LiveEnvironment[Any] = AsLive(made)
    elif isinstance(made, LiveEnvironment):
        live = made
    else:
        assert isinstance(made, PlayedEnvironment)
        return check_played(made, subject)
    loop = EventLoop(subject.limit_s)
    playing = Playing(subject, live)
    findings: list[Finding] = []
    try:
        try:
            loop.run(limited(live.start(), START_S, "`start`"))
        except (Broken, Blocked) as error:
            why = blocks(error) if isinstance(error, Blocked) else str(error)
            raise RunError(f"environment '{made.name}' does not start: {why}") from error
        for name, function in CHECKS:
            if findings and findings[0].state == "failed":
                findings.append(Finding(name, "skipped", f"first correct: {CHECKS[0][0]}"))
            else:
                findings.append(_found(name, function, playing, loop))
    finally:
        findings.append(_found("it stops", _stops, playing, loop))
        loop.close()
    return findings


Function = Callable[[Playing], Awaitable[str]]
CHECKS: list[tuple[str, Function]] = []


def _check(name: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        CHECKS.append((name, function))
        return function

    return register


def blocks(error: Blocked) -> str:
    """What is wrong with an environment whose loop stands still."""
    return (
        f"it blocks the event loop{error.place}, so that all episodes wait: call what blocks by "
        "`await asyncio.to_thread(...)`"
    )


def _found(name: str, function: Function, playing: Playing, loop: EventLoop) -> Finding:
    if loop.blocked:
        return Finding(name, "skipped", "the event loop is blocked")

    async def run() -> str:
        return await function(playing)

    try:
        return Finding(name, "passed", loop.run(run()))
    except Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except Broken as error:
        return Finding(name, "failed", str(error))
    except PosttrainError as error:
        return Finding(name, "failed", str(error))
    except Blocked as error:
        return Finding(name, "failed", blocks(error))
    except Exception as error:  # somebody else's code: what it raised is the finding
        return Finding(name, "failed", raised(error))


async def _stops(playing: Playing) -> str:
    await limited(playing.live.stop(), START_S, "`stop`")
    return ""


@_check("episodes begin, answer and are closed")
async def _episodes(playing: Playing) -> str:
    found = [await playing.play(problem) for problem in playing.subject.problems]
    turns = sum(len(each.answers) for each in found)
    ended = sum(bool(e.answers) and (e.answers[-1].done or e.answers[-1].truncated) for e in found)
    slowest = max(each.slowest_s for each in found)
    expect(turns, "no turn was played: give some by --turn TEXT")
    return (
        f"{len(found)} episodes of {turns} turns, {ended} ended; slowest call {1000 * slowest:.1f} "
        f"ms; {_moves(found)}"
    )


def _moves(found: Sequence[Played]) -> str:
    """How many calls or actions failed, so that one sees whether anything was tried."""
    failed = sum(a.counts.get("failed", 0.0) for each in found for a in each.answers)
    made = sum(a.counts.get("calls", 0.0) for each in found for a in each.answers)
    if not made:
        return "no calls"
    hint = ": give better turns by --turn TEXT" if failed == made else ""
    return f"{failed:g} of {made:g} calls or actions failed{hint}"


@_check("equal seeds and turns give equal episodes")
async def _deterministic(playing: Playing) -> str:
    for problem in playing.subject.problems:
        first, second = [(await playing.play(problem, seed=1)).view() for _ in range(2)]
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if at is None and len(first) != len(second):
            at = min(len(first), len(second))
        if at is None:
            continue
        where = f"turn {at}" if at else "the opening"
        what = f"{where} of problem '{problem.key}' differs the second time"
        if not playing.live.deterministic:
            raise Skipped(f"it does not promise that (deterministic = False); {what}")
        broken(f"{what}: {_first_difference(first[at:], second[at:])}")
    own = [(await playing.play(seed=seed)).view()[0] for seed in (1, 2)]
    alike = "alike" if own[0] == own[1] else "differently, so that a group's episodes do too"
    kept = "" if playing.live.deterministic else ", which it does not promise"
    return f"with other seeds a problem begins {alike}{kept}"


def _first_difference(first: Sequence[object], second: Sequence[object]) -> str:
    one, two = (str(view[0]) if view else "nothing" for view in (first, second))
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    start = max(0, at - 20)
    return f"{one[start : start + 60]!r} and {two[start : start + 60]!r}"


@_check("a state can be gone on from again")
async def _forkable(playing: Playing) -> str:
    value = playing.value
    if value is None:
        raise Skipped("its states are sessions of their own: trees and branches cannot use it")
    problem = playing.subject.problems[0]
    played = await playing.play(problem)
    state, steps = played.opening.state, 0
    for turn, answer in zip(played.said, played.answers, strict=True):
        before = copy.deepcopy(state)
        again = await playing.live.step(state, turn)
        expect(state == before, f"the step with {turn.text[:40]!r} changes the state it began from")
        expect(again == answer, f"the second step with {turn.text[:40]!r} answers otherwise")
        state, steps = answer.state, steps + 1
    return f"{steps} steps made again"


async def _written(playing: Playing) -> tuple[Turns, Played, Episode, list[Message]]:
    """An episode as tokens, up to an observation, and the messages of its conversation."""
    turns, tokenizer = playing.turns(), playing.subject.tokenizer
    for problem in playing.subject.problems:
        played = await playing.play(problem)
        if any(not (a.done or a.truncated) for a in played.answers):
            break
    else:
        raise Skipped("no turn was followed by another: give turns by --turn TEXT")
    tools = (*played.problem.tools, *played.opening.tools)
    ids = turns.prompt(played.problem, played.opening)
    chat = turns.chat(played.problem, played.opening)
    episode = Episode(PromptGroup(played.problem, ids), None, tools)
    for turn, answer in zip(played.said, played.answers, strict=True):
        if turn.ended:
            said = tokenizer.encode_answer(chat, turn.message, tools)
        else:
            said = tokenizer.encode_text(turn.text, special=False)
        completion = _completion(said, ended=turn.ended)
        before = turns.after(episode, completion)
        if before.finish_reason is not None:
            break
        after = turns.answered(before, answer, ROOM)
        if after.finish_reason is not None:
            break
        episode, kept = after, len(before.token_ids)
        expect(
            episode.token_ids[:kept] == before.token_ids,
            f"the answer to {turn.text[:40]!r} changes tokens before it",
        )
        chat += [turn.message, *answer.messages]
        if answer.messages:
            expect(
                episode.token_ids[-1:] == ids[-1:],
                "after an observation the model's turn does not begin as after the prompt",
            )
    return turns, played, episode, chat


def _completion(ids: Sequence[int], *, ended: bool) -> Completion:
    reason: Any = "stop" if ended else "stop_string"
    return Completion(tuple(ids), (0.0,) * len(ids), reason, 0, 0, "check", "")


@_check("tokens before an observation stay as they were sampled")
async def _continuity(playing: Playing) -> str:
    turns, played, episode, chat = await _written(playing)
    if not all(answer.messages for answer in played.answers[: len(episode.turns)]):
        return f"{len(episode.token_ids)} tokens; observations go on in the model's own turn"
    tools = (*played.problem.tools, *played.opening.tools)
    ids = (*episode.prompt.prompt_ids, *episode.token_ids)
    whole = playing.subject.tokenizer.encode_chat(chat, tools)
    if whole == ids:
        return f"{len(ids)} tokens, as the template writes the whole conversation"
    pairs = enumerate(zip(ids, whole, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(whole)))
    return (
        f"{len(ids)} tokens; the template would write the history otherwise from token {at} on, "
        "and what was sampled is kept"
    )


@_check("observations take no loss")
async def _masks(playing: Playing) -> str:
    turns, played, episode, _ = await _written(playing)
    completion = completion_of(episode)
    own = completion.sampled or (True,) * len(completion.token_ids)
    batch = rollout_batch([SampledGroup(episode.prompt, (completion,))], playing.subject.tokenizer)
    mask = [bool(value) for value in batch.response_mask[0].tolist()]
    said = sum(len(turn.token_ids) for turn in episode.turns)
    expect(mask == list(own), "the mask of the loss is not that of what was sampled")
    expect(sum(mask) == said, f"the loss sees {sum(mask)} tokens, and {said} were sampled")
    return f"{said} tokens of turns, {len(mask) - said} of observations"


@_check("special tokens in an observation are text")
async def _injection(playing: Playing) -> str:
    turns, played, episode, _ = await _written(playing)
    names = playing.subject.tokenizer.control.ids
    planted = " ".join(names)
    # A character that the vocabulary lacks is the token for unknown ones, which controls nothing.
    control = set(names.values()) - {playing.subject.tokenizer.tokenizer.unk_token_id}

    def count(answer: Observation) -> int:
        first = replace(episode, segments=episode.segments[:1], counts={"turns": 1.0})
        after = turns.answered(first, answer, ROOM)
        return sum(token in control for token in after.segments[-1].token_ids)

    answer = replace(played.answers[0], done=False, truncated=False)
    if answer.messages:
        first = replace(answer.messages[0], content=planted + answer.messages[0].content)
        attacked = replace(answer, messages=(first, *answer.messages[1:]))
    else:
        attacked = replace(answer, text=planted + answer.text)
    expect(
        count(attacked) == count(answer),
        f"the names of {len(names)} special tokens in an observation become control tokens; set "
        "reads_special_tokens = False, or choose another renderer",
    )
    opening = replace(played.opening, suffix=f"{played.opening.suffix} {planted}")
    plain = replace(played.opening, suffix=f"{played.opening.suffix} x")
    prompts = [turns.prompt(played.problem, each) for each in (opening, plain)]
    found = [sum(token in control for token in ids) for ids in prompts]
    expect(found[0] == found[1], "the names of special tokens in an opening become control tokens")
    return f"{len(names)} names of special tokens, planted in an observation and in the opening"


@_check("a step that is cut off harms nobody")
async def _cut(playing: Playing) -> str:
    if playing.value is not None:
        slowest = (await playing.play()).slowest_s
        raise Skipped(f"its steps are made in threads; the slowest took {1000 * slowest:.1f} ms")
    live, limit = playing.live, playing.subject.limit_s
    problem = playing.subject.problems[0]
    wanted = (await playing.play(problem)).view()
    opening = await limited(live.reset(problem, 0), limit, "`reset`")
    says = playing.says(problem, replace(opening, tools=(*live.schemas(), *opening.tools)))
    step = asyncio.ensure_future(live.step(opening.state, says[0]))
    await asyncio.sleep(0)
    step.cancel()
    done, _ = await asyncio.wait({step}, timeout=limit)
    expect(done, f"a cancelled `step` goes on for more than {limit:g} s")
    cut = step.cancelled()
    if not cut:
        step.exception()
    await limited(live.close(opening.state), limit, "`close` after a cancelled `step`")
    again = (await playing.play(problem)).view()
    if live.deterministic:
        expect(again == wanted, "an episode after one that was cut off is another")
    return "cancelled, closed, and played again" if cut else "it answered before it was cancelled"


async def _attack(playing: Playing, says: Says, what: str) -> str:
    """The rewards of a policy that knows nothing; `Broken` where one is above 0."""
    task, rewards = playing.subject.task, []
    for problem in playing.subject.problems:
        played = await playing.play(problem, says=says)
        score = played.score()
        if score is None and task is not None and not task.by_environment and played.said:
            score = task.verify(problem, played.said[-1].text).correct
        if score is not None:
            rewards.append(score)
    return no_reward(rewards, what)


@_check("attack: empty answers")
async def _empty(playing: Playing) -> str:
    return await _attack(playing, always("", playing.subject.max_turns), "saying nothing")


@_check("attack: one word again and again")
async def _repeated(playing: Playing) -> str:
    says = always("yes " * 200, playing.subject.max_turns)
    return await _attack(playing, says, "a word again and again")


@_check("attack: the prompt as the answer")
async def _echo(playing: Playing) -> str:
    def says(problem: Problem, opening: Opening) -> list[Turn]:
        return [scripted(problem.prompt + opening.suffix)] * playing.subject.max_turns

    return await _attack(playing, says, "repeating the prompt")


@_check("attack: the answer is not shown")
async def _leak(playing: Playing) -> str:
    found = 0
    for problem in playing.subject.problems:
        if len(problem.answer) < SHORTEST_ANSWER:
            continue
        found += 1
        for text in ("", problem.prompt):
            played = await playing.play(problem, says=always(text, playing.subject.max_turns))
            leaks = re.search(rf"(?<!\w){re.escape(problem.answer)}(?!\w)", played.shown())
            expect(not leaks, f"it shows the answer {problem.answer[:60]!r} to '{problem.key}'")
    if not found:
        raise Skipped(f"no problem has an answer of {SHORTEST_ANSWER} characters or more")
    return f"{found} problems"


@_check("the known solution scores 1")
async def _solved(playing: Playing) -> str:
    live, subject, count = playing.live, playing.subject, 0
    for problem in subject.problems:
        opening = await limited(live.reset(problem, 0), subject.limit_s, "`reset`")
        try:
            if not await limited(live.solve(opening.state), SCORE_S, "`solve`"):
                continue
            score = await limited(live.score(opening.state), SCORE_S, "`score`")
        finally:
            await limited(live.close(opening.state), subject.limit_s, "`close`")
        expect(score == 1, f"the solution of '{problem.key}' scores {score}, not 1")
        count += 1
    if not count:
        raise Skipped("it knows no solutions")
    return f"{count} solutions"


@_check("many episodes at once")
async def _many(playing: Playing) -> str:
    subject = playing.subject
    problems = [subject.problems[n % len(subject.problems)] for n in range(subject.at_once)]
    room = asyncio.Semaphore(playing.live.at_once)

    async def one(problem: Problem, seed: int) -> Played:
        async with room:
            return await playing.play(problem, seed)

    began = time.perf_counter()
    tasks = [one(problem, seed) for seed, problem in enumerate(problems)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    took = time.perf_counter() - began
    played = [each for each in found if isinstance(each, Played)]
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        first = str(errors[0]) if isinstance(errors[0], Broken) else raised(errors[0])
        broken(f"{len(errors)} of {len(found)} episodes failed, the first: {first}")
    turns = sum(len(each.answers) for each in played)
    slowest = max(each.slowest_s for each in played)
    return (
        f"{len(played)} episodes in {took:.2f} s: {len(played) / took:.1f} episodes/s, "
        f"{turns / took:.1f} turns/s; slowest call {1000 * slowest:.0f} ms"
    )
