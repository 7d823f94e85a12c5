"""Which samples show what an alarm is about: rows of a step's tables, and the step's microscope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.core.analysis.alarms import Raised

SHOWN = 5
"""Rows that an alarm names."""
EVALUATED = ("overoptimised", "held_out_flat", "length_shrinks")
"""Alarms that compare with held-out answers."""
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step's responses as its table `samples` has them, and some figures of each row.

    `lengths` are tokens, `entropies` nats per token where the update read them.
    """

    step: int
    rows: Sequence[Row] = ()
    lengths: Sequence[float] = ()
    entropies: Sequence[float] = field(default=())

    @property
    def table(self) -> str:
        """The table among the artifacts of the stage's MLflow run."""
        return f"tables/samples/step-{self.step:06d}.json"


Picked = tuple[str, list[int]]
"""What the rows are, and their numbers from 0."""


def _largest(what: str, values: Sequence[float], *, sign: float = 1.0) -> Picked:
    known = [i for i, value in enumerate(values) if value == value]
    return what, sorted(known, key=lambda i: -sign * values[i])[:SHOWN]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _longest(samples: StepSamples) -> Picked:
    return _largest("the longest responses", samples.lengths)


def _shortest(samples: StepSamples) -> Picked:
    return _largest("the shortest responses", samples.lengths, sign=-1)


def _most_entropy(samples: StepSamples) -> Picked:
    return _largest("the responses of highest entropy", samples.entropies)


def _least_entropy(samples: StepSamples) -> Picked:
    return _largest("the responses of lowest entropy", samples.entropies, sign=-1)


def _most_weight(samples: StepSamples) -> Picked:
    values = [abs(_number(row.get("advantage"))) for row in samples.rows]
    return _largest("the responses of largest advantage", values)


def _cut(samples: StepSamples) -> Picked:
    found = [i for i, row in enumerate(samples.rows) if row.get("finish_reason") == "length"]
    return "responses that the limit cut", found[:SHOWN]


def _paid_though_wrong(samples: StepSamples) -> Picked:
    rewards = [_number(row.get("reward")) for row in samples.rows]
    wrong = [_number(row.get("correct")) < 1 for row in samples.rows]
    paid = [r if w else float("nan") for r, w in zip(rewards, wrong, strict=True)]
    what, found = _largest("wrong responses with the most reward", paid)
    return (what, found) if found else _largest("responses with the most reward", rewards)


def _equal_groups(samples: StepSamples) -> Picked:
    """The first row of each group whose rewards are all equal."""
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(samples.rows):
        groups.setdefault(row.get("group"), []).append(index)
    equal = [
        rows[0]
        for rows in groups.values()
        if len(rows) > 1 and len({samples.rows[i].get("reward") for i in rows}) == 1
    ]
    return "first rows of groups with equal rewards", equal[:SHOWN]


def _repeated(samples: StepSamples) -> Picked:
    seen, found = set[tuple[object, object]](), list[int]()
    for index, row in enumerate(samples.rows):
        key = (row.get("group"), row.get("response"))
        if key in seen:
            found.append(index)
        seen.add(key)
    return "responses that repeat one of their group", found[:SHOWN]


PICKS: Mapping[str, Callable[[StepSamples], Picked]] = {
    "mismatch": _longest,
    "entropy_collapse": _least_entropy,
    "entropy_rise": _most_entropy,
    "truncated": _cut,
    "length_explosion": _longest,
    "length_stalled": _longest,
    "length_shrinks": _shortest,
    "held_out_flat": _paid_though_wrong,
    "overoptimised": _paid_though_wrong,
    "equal_groups": _equal_groups,
    "signal_fades": _equal_groups,
    "clip_high": _most_weight,
    "policy_kl": _most_weight,
    "kl_target": _most_weight,
    "grad_spike": _most_weight,
    "duplicates": _repeated,
    "ess_seq": _longest,
}
"""The rows of a step's samples that show an alarm; `diversity_lost` is about other answers."""


def with_samples(alarm: Raised, microscope: str = "") -> Raised:
    """The alarm with where to look, where the step's samples are not at hand: no rows."""
    shown = look_at(alarm.name, StepSamples(alarm.steps[0]), microscope)
    return replace(alarm, text=f"{alarm.text}. Look at {shown}")


def look_at(name: str, samples: StepSamples, microscope: str = "") -> str:
    """Where to see what the alarm is about: "rows 3 and 7 of tables/...; posttrain inspect ...".

    `microscope` is the command that opens the step token by token, empty where nothing was kept.
    Tables are among the artifacts of the stage's MLflow run.
    """
    step, places = samples.step, []
    if name == "diversity_lost":
        folder = "tables/held_out_sampled"
        places.append(
            f"{folder}/step-{step:06d}.json against step-000000.json (columns right, different)"
        )
    else:
        what, rows = PICKS[name](samples) if name in PICKS else ("", [])
        numbers = ", ".join(map(str, rows))
        places.append(f"rows {numbers} of {samples.table} ({what})" if rows else samples.table)
    if name in EVALUATED:
        places.append(f"tables/held_out/step-{step:06d}.json")
    return "; ".join([*places, microscope] if microscope and name != "diversity_lost" else places)
