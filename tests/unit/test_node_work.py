"""How items are shared among nodes: each is answered once, whatever is lost or fails."""

from __future__ import annotations

import random

import pytest

from posttrain.core.cluster.node_pool import Batch, Sharing, TryElsewhere, Unanswered, Work


def shares(at_once: int | None, least: int = 1) -> Sharing:
    return Sharing(limit_s=lambda count: 1.0, at_once=at_once, least=least)


def served(
    work: Work, names: list[str], sharing: Sharing, rng: random.Random, deadly: set[int]
) -> int:
    """Let nodes take batches until all is answered; a batch with a deadly item loses its node."""
    running: dict[str, list[Batch]] = {name: [] for name in names}
    losses = 0
    while not work.is_done:
        for name in names:
            batches = running[name]
            held = sum(len(batch.places) for batch in batches)
            while not any(batch.is_alone for batch in batches):
                batch = work.next_for(name, held, len(names), sharing)
                if batch is None:
                    break
                batches.append(batch)
                held += len(batch.places)
        busy = [name for name in names if running[name]]
        if not busy:
            work.settle(names)
            continue
        name = rng.choice(busy)
        if any(deadly & set(batch.places) for batch in running[name]):
            losses += 1
            for batch in running[name]:
                work.lost(batch, "gone")
            running[name] = []
            continue
        batch = running[name].pop(rng.randrange(len(running[name])))
        work.answered(batch, name, [(name, work.items[place]) for place in batch.places])
    return losses


@pytest.mark.parametrize("at_once", [None, 1, 3, 8, 1000])
@pytest.mark.parametrize("count", [1, 2, 7, 64, 333])
def test_every_item_is_answered_and_a_deadly_one_is_found(count: int, at_once: int | None) -> None:
    rng = random.Random(count)
    for deadly in (set(), {rng.randrange(count)}, {0, count - 1}):
        work = Work([f"item {place}" for place in range(count)])
        losses = served(work, ["a", "b", "c"], shares(at_once, least=4), rng, deadly)
        for place in range(count):
            answer = work.answers[place]
            if place in deadly:
                assert isinstance(answer, Unanswered) and answer.to_blame
            else:
                assert answer[1] == f"item {place}"
        assert losses <= len(deadly) * (count.bit_length() + 3)


def test_shares_are_small_towards_the_end_and_fair_from_the_start() -> None:
    batches = shares(None, least=16)
    assert [batches.size(1000, left, 4, 0) for left in (1000, 875, 400, 100, 3)] == [
        *(125, 110, 50, 16, 16)
    ]
    assert batches.size(8, 8, 4, 0) == 2, "few items are for all nodes"
    assert batches.size(1000, 500, 4, 1) == 0, "one batch after another"
    calls = shares(100)
    assert calls.size(1000, 1000, 2, 0) == 25 and calls.size(1000, 900, 2, 90) == 10
    assert calls.size(1000, 900, 2, 100) == 0
    assert shares(1).size(10, 10, 2, 0) == 1


def test_an_answer_that_another_node_may_better_is_asked_for_once_more() -> None:
    work = Work(["x", "y"])
    batch = work.next_for("a", 0, 2, shares(4))
    second = work.next_for("a", 1, 2, shares(4))
    assert batch is not None and second is not None
    work.answered(batch, "a", [TryElsewhere("bad")])
    work.answered(second, "a", ["good"])
    assert work.next_for("a", 0, 2, shares(4)) is None, "it had its turn"
    again = work.next_for("b", 0, 2, shares(4))
    assert again is not None and again.places == batch.places
    work.answered(again, "b", [TryElsewhere("worse")])
    assert work.answers == {0: "worse", 1: "good"}


def test_an_answer_that_nobody_can_better_counts() -> None:
    for end in ("settle", "lost", "give up"):
        work = Work(["x"])
        batch = work.next_for("a", 0, 1, shares(4))
        assert batch is not None
        work.answered(batch, "a", [TryElsewhere("bad")])
        if end == "settle":
            work.settle(["a", "b"])
            assert not work.is_done
            work.settle(["a"])
        elif end == "lost":
            again = work.next_for("b", 0, 2, shares(4))
            assert again is not None
            work.lost(again, "gone")
        else:
            work.give_up("none")
        assert work.is_done and work.answers == {0: "bad"}


def test_what_finds_no_node_is_not_to_blame() -> None:
    work = Work(["x", "y"])
    work.give_up("none is left")
    assert work.answers == dict.fromkeys((0, 1), Unanswered("none is left"))
