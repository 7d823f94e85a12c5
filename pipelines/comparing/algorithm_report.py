"""A comparison of algorithms as a report, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict

from posttrain.core.compare.pairs import PairResult, TokenGap
from posttrain.core.compare.variant import VariantResult
from posttrain.core.reports.report import Cell, Picture, Report, Table, shortened
from posttrain.pipelines.comparing.algorithms import AlgorithmComparison, ModelGradients


def to_json(made: AlgorithmComparison) -> dict[str, object]:
    """Everything but the tokens themselves, and responses' mean advantages."""
    mask = made.frozen.batch.mask
    return {
        "run_id": made.run_id,
        "stage": made.stage,
        "step": made.frozen.step,
        "responses": len(made.frozen.batch),
        "tokens": int(made.frozen.tokens.sum()),
        "notes": made.notes,
        "advantage_gap": made.advantage_gap,
        "variants": [
            {
                "label": result.label,
                "loss": result.loss,
                "parts": dict(result.parts),
                "metrics": dict(result.metrics),
                "weight_norm": float(result.weights.double().norm()),
                "advantages": result.row_advantages(mask).tolist(),
            }
            for result in made.results
        ],
        "pairs": [
            asdict(pair) | {"largest": [_gap(made, gap) for gap in pair.largest]}
            for pair in made.pairs
        ],
        "gradients": None if made.gradients is None else asdict(made.gradients),
    }


def report_of(made: AlgorithmComparison) -> Report:
    """Tables, then pictures."""
    parts: list[Table | Picture] = [_variants(made), _clips(made), _pairs(made.pairs)]
    if made.gradients is not None:
        parts += _gradients(made.gradients)
    parts += [_largest(made, pair) for pair in made.pairs if pair.first == made.results[0].label]
    title = f"algorithms on step {made.frozen.step} of stage {made.stage}, run {made.run_id[:12]}"
    return Report(title, made.notes, [*parts, *_pictures(made)])


def _variants(made: AlgorithmComparison) -> Table:
    mask = made.frozen.batch.mask
    rows: list[list[Cell]] = []
    for result in made.results:
        advantages = result.row_advantages(mask)[made.frozen.tokens.any(dim=1)]
        known = advantages.numel() > 0
        rows.append(
            [
                result.label,
                result.loss,
                result.parts.get("loss/policy"),
                result.parts.get("loss/kl"),
                float(advantages.mean()) if known else None,
                float(advantages.abs().max()) if known else None,
                int((advantages != 0).sum()),
                float(result.weights.double().norm()),
                int((result.weights[made.frozen.tokens] != 0).sum()),
            ]
        )
    columns = ["variant", "loss", "policy term", "KL term", "mean advantage", "largest |advantage|"]
    columns += ["responses with advantage", "norm of weights", "tokens with weight"]
    note = (
        f"{len(made.frozen.batch)} responses, {int(made.frozen.tokens.sum())} tokens; a weight is "
        "d loss / d log-prob of a token; losses are means over the step's mini-batches"
    )
    return Table("variants", columns, rows, note)


def _clips(made: AlgorithmComparison) -> Table:
    names = list(dict.fromkeys(n for r in made.results for n in r.metrics if _told(n)))
    rows = [[r.label, *(r.metrics.get(name) for name in names)] for r in made.results]
    note = "means over tokens with loss (of clip/seq_frac: over responses); - where a loss has none"
    return Table("clip fractions and ratios", ["variant", *names], rows, note)


def _told(name: str) -> bool:
    return name.startswith(("clip/", "ratio/", "contrib/"))


def _pairs(pairs: list[PairResult]) -> Table:
    rows: list[list[Cell]] = [
        [
            pair.first,
            pair.second,
            pair.weights.cosine,
            pair.weights.norm_ratio,
            pair.weights.sign_differs,
            pair.weights.opposite,
            pair.advantage_rank,
        ]
        for pair in pairs
    ]
    columns = ["first", "second", "cosine", "norm ratio", "sign differs", "opposite sign"]
    note = (
        "of the weights, over tokens with loss: norm of the second over the first; shares are of "
        "tokens that either weighs; advantage rank is Spearman's rho over responses"
    )
    return Table("token weights, pair by pair", [*columns, "advantage rank"], rows, note)


def _gradients(found: ModelGradients) -> list[Table | Picture]:
    where = f"at {found.source}" + ("" if found.exact else " (not where the step began)")
    if found.logprob_gap is not None:
        where += f"; its log-probs differ by up to {found.logprob_gap:.2g} nats from those read"
    if found.exact:
        where += "; where a step begins every ratio is 1, so that no clip can act"
    norms: list[list[Cell]] = [[label, norm] for label, norm in found.norms.items()]
    pairs: list[list[Cell]] = [[p.first, p.second, p.cosine, p.norm_ratio] for p in found.pairs]
    return [
        Table("parameter gradients", ["variant", "norm"], norms, where),
        Table(
            "parameter gradients, pair by pair",
            ["first", "second", "cosine", "norm ratio"],
            pairs,
            where,
        ),
    ]


def _largest(made: AlgorithmComparison, pair: PairResult) -> Table:
    rows: list[list[Cell]] = []
    for gap in pair.largest:
        found = _gap(made, gap)
        prompt = found["prompt"]
        where = shortened(prompt, 60) if isinstance(prompt, str) else None
        rows.append([gap.row, gap.column, f"{found['token']!r}", where, gap.first, gap.second])
    columns = ["response", "token number", "token", "prompt", pair.first, pair.second]
    title = f"tokens weighed most differently: {pair.first} and {pair.second}"
    return Table(title, columns, rows, "d loss / d log-prob, by |difference|")


def _gap(made: AlgorithmComparison, gap: TokenGap) -> dict[str, object]:
    batch = made.evidence.batch
    token = int(batch.response_ids[gap.row, gap.column])
    texts = made.evidence.token_texts or {}
    return asdict(gap) | {
        "token": texts.get(token, f"<{token}>"),
        "prompt": batch.problems[gap.row].prompt if batch.problems else None,
    }


def _pictures(made: AlgorithmComparison) -> list[Table | Picture]:
    from posttrain.core.reports.pictures import bars, histogram, scatter

    first, others = made.results[0], made.results[1:]
    mask, kept = made.frozen.batch.mask, made.frozen.tokens
    rows = kept.any(dim=1)

    def advantages(result: VariantResult) -> list[float]:
        return [float(value) for value in result.row_advantages(mask)[rows]]

    points = {result.label: (advantages(first), advantages(result)) for result in others}
    clips = {r.label: {n: v for n, v in r.metrics.items() if "clip/" in n} for r in made.results}
    gaps = {
        f"{result.label} - {first.label}": (result.weights - first.weights)[kept].tolist()
        for result in others
    }
    return [
        Picture(
            "advantages",
            scatter(points, "advantage of each response", first.label, "variant"),
            "each dot is a response's mean advantage, against that of the run's own; grey: equal",
        ),
        Picture("clip fractions", bars(clips, "clip fractions", "share of tokens")),
        Picture(
            "differences of token weights",
            histogram(gaps, "variant minus run", "difference of d loss / d log-prob"),
            "over all tokens with loss",
        ),
    ]
