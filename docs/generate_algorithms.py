"""Writes docs/algorithms.md and its picture from the plugins that are installed: `make docs`.

    python docs/generate_algorithms.py [FOLDER]

The prose is algorithms.template.md; `{{name}}` in it is a number or a part computed here.
Axes: B responses, T tokens.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.presets import axes_of
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    Aggregator,
    KlEstimator,
    PairLoss,
    PairScores,
    PolicyLoss,
    TokenLoss,
)
from posttrain.core.plugin_manager import PluginEntry, PluginManager

DOCS = Path(__file__).resolve().parent
TEMPLATE = DOCS / "algorithms.template.md"
MARK = re.compile(r"\{\{(\w+)\}\}")
KINDS = {
    "advantage": "Advantages",
    "advantage_transform": "Transforms of advantages",
    "policy_loss": "Policy losses",
    "distillation_loss": "Divergences from a teacher",
    "aggregator": "Aggregators",
    "kl": "KL estimates",
    "kl_controller": "KL controllers",
    "entropy_controller": "Entropy controllers",
    "rollout_correction": "Rollout corrections",
    "preference_loss": "Preference losses",
    "reward": "Rewards",
    "sampler": "Samplers",
    "optimizer": "Optimizers",
    "task": "Tasks",
    "environment": "Environments",
    "tool": "Tools",
    "renderer": "Renderers",
    "rollout_engine": "Rollout engines",
}
COMMON_FROM = 3
"""A field that so many plugins of a kind have alike is described once."""
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
NAMES = {float: "number", int: "whole number", str: "text", bool: "true or false"}
AXES = (
    "advantage",
    "advantage_transform",
    "policy_loss",
    "distillation",
    "aggregator",
    "kl",
    "preference_loss",
)
SHORT, VALUES = 2, (1.0, 0.7)
"""Tokens of the short response, and the token loss of the short and of the long one."""
LONG = (8, 88)


# --- plugins as text ----------------------------------------------------------------------------


def built_in(manager: PluginManager, kind: str) -> list[PluginEntry]:
    """The plugins of a kind that come with posttrain."""
    return [entry for entry in manager.entries(kind) if entry.package == "posttrain"]


def prose(text: str) -> str:
    """Plain text as Markdown: one line, arXiv numbers linked, nothing read as markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [part if part.startswith("`") else _escaped(part) for part in parts]
    return "".join(plain)


def _escaped(text: str) -> str:
    text = re.sub(r"([*<>\[\]|~])", r"\\\1", text)
    text = re.sub(r"\b(Sources?|Formula): ", r"**\1:** ", text)
    link = r"[arXiv:\1](https://arxiv.org/abs/\1)"
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", link, text)


def value(what: object) -> str:
    """A setting as YAML would have it, on one line."""
    plain = to_jsonable_python(what)
    return plain if isinstance(plain, str) else json.dumps(plain)


def type_name(annotation: Any) -> str:  # Any: whatever a field is annotated with
    """A type in words."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_name(part) for part in parts)
    if origin is typing.Annotated:
        return type_name(parts[0])
    if origin is tuple:
        return f"list of {type_name(parts[0])}"
    return NAMES.get(annotation, "path" if annotation.__name__ == "Path" else "mapping")


def field_line(name: str, field: FieldInfo) -> str:
    """One setting: type, bounds, default, meaning."""
    bounds = [
        text.format(getattr(item, key))
        for item in field.metadata
        for key, text in BOUNDS.items()
        if hasattr(item, key)
    ]
    about = ", ".join([type_name(field.annotation), *bounds])
    default = field.get_default(call_default_factory=True, validated_data={})
    initial = "required" if default is PydanticUndefined else f"default `{value(default)}`"
    return f"- `{name}` ({about}; {initial}): {prose(field.description or '')}"


# --- plugins ----------------------------------------------------------------------------------


def common_fields(entries: Iterable[PluginEntry]) -> set[str]:
    """Field lines that several plugins share word for word."""
    lines = Counter(
        field_line(name, field)
        for entry in entries
        for name, field in entry.cls.Config.model_fields.items()
    )
    return {line for line, count in lines.items() if count >= COMMON_FROM}


def plugin_section(entry: PluginEntry, common: set[str]) -> str:
    """One plugin: what it is, its formula, facts and source, its fields."""
    summary, _, more = (inspect.getdoc(inspect.getmodule(entry.cls)) or "").partition("\n\n")
    about = inspect.getdoc(entry.cls) or ""
    formula, _, rest = about.partition("\n\n")
    if "Source" not in about and "Source" in more:
        rest = f"{rest}\n\n{more}"
    lines = [f"### `{entry.name}`", "", prose(summary), "", "```text", formula.strip(), "```"]
    for paragraph in rest.split("\n\n"):
        if paragraph.strip():
            lines += ["", prose(paragraph)]
    lines_of = {n: field_line(n, f) for n, f in entry.cls.Config.model_fields.items()}
    own = [line for line in lines_of.values() if line not in common]
    shared = [f"`{name}`" for name, line in lines_of.items() if line in common]
    if own:
        lines += ["", *own]
    if shared:
        lines += ["", f"Also {', '.join(shared)}, as above."]
    return "\n".join(lines)


def kind_section(manager: PluginManager, kind: str, title: str) -> str:
    """All plugins of a kind, after the fields that they share."""
    entries = built_in(manager, kind)
    common = common_fields(entries)
    names = ", ".join(f"`{entry.name}`" for entry in entries)
    lines = [f"## {title}", "", f"`{kind}`: {names}."]
    if common:
        lines += ["", f"Settings that {COMMON_FROM} or more of them have alike:", ""]
        lines += sorted(common)
    return "\n\n".join(["\n".join(lines), *(plugin_section(e, common) for e in entries)])


def reference(manager: PluginManager) -> str:
    """Every kind but the presets."""
    return "\n\n".join(kind_section(manager, kind, title) for kind, title in KINDS.items())


# --- presets ----------------------------------------------------------------------------------


def presets(manager: PluginManager) -> str:
    """Every preset: one row of a table each, then what it says of itself."""
    rl = ["| preset | advantage | policy loss | aggregator | KL | besides |", "|---" * 6 + "|"]
    rest = ["| preset | preference loss | besides |", "|---|---|---|"]
    sections = []
    for entry in built_in(manager, "algorithm"):
        algorithm: Any = entry.cls(entry.cls.Config())  # Any: `expand` is of its own contract
        fields = algorithm.expand()
        cells: dict[str, list[str]] = {}
        for axis in axes_of(algorithm, manager):
            text = _component(axis.name, axis.kind, axis.fields, manager)
            cells.setdefault(axis.kind, []).append(text)
        besides = _besides({k: v for k, v in fields.items() if k not in AXES})
        link = f"[`{entry.name}`](#preset-{entry.name})"
        if algorithm.stage == "preference":
            rest.append(f"| {link} | {' + '.join(cells['preference_loss'])} | {besides} |")
        else:
            losses = " + ".join(cells.get("policy_loss", []) + cells.get("distillation_loss", []))
            parts = cells["advantage"] + cells.get("advantage_transform", [])
            fixed = (" + ".join(parts), losses, cells["aggregator"][0], _kl(fields), besides)
            rl.append(f"| {link} | {' | '.join(fixed)} |")
        sections.append(_preset_section(entry))
    return "\n\n".join(["\n".join(rl), "\n".join(rest), *sections])


def _preset_section(entry: PluginEntry) -> str:
    formula, _, rest = (inspect.getdoc(entry.cls) or "").partition("\n\n")
    other = getattr(entry.cls, "variant_of", None)
    recipe = f"Recipe: [configs/recipes/{other or entry.name}.yaml]"
    recipe += f"(../configs/recipes/{other or entry.name}.yaml)"
    recipe += f", of `{other}`, the preset that this one varies." if other else "."
    return "\n\n".join(
        [
            f'<a id="preset-{entry.name}"></a>\n### Preset `{entry.name}`',
            f"```text\n{formula.strip()}\n```",
            *(prose(paragraph) for paragraph in rest.split("\n\n")),
            recipe,
        ]
    )


def _component(name: str, kind: str, fields: dict[str, Any], manager: PluginManager) -> str:
    """A plugin with the settings in which a preset departs from the plugin's defaults."""
    own = manager.config(kind, name, {}).model_dump(mode="json")
    changed = [f"{key} {value(v)}" for key, v in fields.items() if own.get(key) != v]
    return f"`{name}`" + (f" ({', '.join(changed)})" if changed else "")


def _kl(fields: dict[str, Any]) -> str:
    """Where the KL to the reference stands, and its coefficient."""
    kl = RlStage.model_validate({"kind": "rl", **fields}).kl
    settings = kl.controller.fields()
    if kl.controller.name == "fixed" and settings.get("coef") == 0:
        return "none"
    text = ", ".join(f"{name} {value(v)}" for name, v in settings.items())
    return f"`{kl.estimator.name}` in the {kl.place}, `{kl.controller.name}` ({text})"


def _besides(fields: dict[str, Any]) -> str:
    """What a preset sets that is not a plugin."""
    found = []
    for name, what in fields.items():
        if isinstance(what, dict):
            inner = ", ".join(f"{key} {value(v)}" for key, v in what.items())
            found.append(f"{name} ({inner})" if inner else name)
        else:
            found.append(f"{name} {value(what)}")
    return "; ".join(found)


# --- numbers ------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Six decimals at most, and none that say nothing."""
    return f"{value + 0.0:.6f}".rstrip("0").rstrip(".")


def batch(mask: Tensor, **columns: Tensor) -> RolloutBatch:
    """Rows of one group with this mask [B, T]."""
    rows, width = mask.shape
    return RolloutBatch(
        prompt_ids=torch.ones(rows, 1, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_ids=torch.ones(rows, width, dtype=torch.int64),
        response_mask=mask,
        mask=mask,
        rollout_logprobs=torch.zeros(rows, width),
        policy_version=torch.zeros(rows, width, dtype=torch.int64),
        group_id=torch.zeros(rows, dtype=torch.int64),
        seq_id=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
    ).with_columns(**columns)


def ragged(lengths: Sequence[int]) -> Tensor:
    """Mask [B, T] of responses of these lengths."""
    columns = torch.arange(max(lengths))
    return (columns[None, :] < torch.tensor(lengths)[:, None]).double()


# --- aggregation ------------------------------------------------------------------------------


def token_weights(manager: PluginManager, long: int) -> dict[str, tuple[float, float, float]]:
    """By aggregator: weight of a token of the short response, of the long one, and the loss.

    Each response answers a prompt of its own, and L is the length of the long one.
    """
    mask, found = ragged([SHORT, long]), {}
    losses = torch.tensor(VALUES, dtype=torch.float64)[:, None].expand(mask.shape)
    prompts = torch.arange(2)
    for entry in built_in(manager, "aggregator"):
        fields = {"norm_length": long} if "norm_length" in entry.cls.Config.model_fields else {}
        aggregator = manager.build(Aggregator, entry.name, fields)
        counts = aggregator.count(mask, prompts)
        weights = aggregator.weights(mask, counts)
        loss = aggregator.aggregate(TokenLoss(losses, mask), mask, counts, prompts)
        found[entry.name] = (float(weights[0, 0]), float(weights[1, 0]), float(loss))
    return found


def long_shares(manager: PluginManager) -> dict[str, tuple[float, float]]:
    """By aggregator: the long response's share of all weight, for 8 and for 88 tokens."""
    by_length = []
    for long in LONG:
        weights = token_weights(manager, long).items()
        by_length.append({k: long * b / (SHORT * a + long * b) for k, (a, b, _) in weights})
    return {name: (by_length[0][name], by_length[1][name]) for name in by_length[0]}


def weight_table(manager: PluginManager) -> str:
    """The token weights of both examples as a Markdown table."""
    few, many = (token_weights(manager, long) for long in LONG)
    shares = long_shares(manager)
    lines = [
        "| aggregator | token of 2 | token of 8 | loss | token of 2 | token of 88 | loss "
        "| share of the 88 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in few:
        cells = [number(x) for x in (*few[name], *many[name])]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {100 * shares[name][1]:.1f} % |")
    return "\n".join(lines)


# --- KL estimates -----------------------------------------------------------------------------


def kl_table(manager: PluginManager) -> str:
    """Mean, variance and the two mean gradients of each sampled estimate, two outcomes.

    pi = (1/2, 1/2), q = (1/4, 3/4); gradients are in the logit of the first outcome.
    """
    q = torch.tensor([0.25, 0.75], dtype=torch.float64)
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    pi = logprobs.detach().exp()
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - q.log())).sum(), logits)
    score = torch.tensor([1.0, 0.0]) - pi[0]  # of log pi, in the first logit
    lines = [
        f"| estimate | mean (KL = {number(float((pi * (pi / q).log()).sum()))}) | variance "
        f"| gradient in the loss (wanted: {number(float(true[0]))}) | gradient in the reward |",
        "|---|---|---|---|---|",
    ]
    for name in ("k1", "k2", "k3", "k3+", "abs"):
        logprobs = logits.log_softmax(0)
        values = manager.build(KlEstimator, name).kl(logprobs[None], q.log()[None])[0]
        (in_loss,) = torch.autograd.grad((pi * values).sum(), logits)
        held = values.detach()
        mean = float((pi * held).sum())
        spread = float((pi * (held - mean).square()).sum())
        in_reward = float((pi * held * score).sum())
        cells = (mean, spread, float(in_loss[0]), in_reward)
        lines.append(f"| `{name}` | {' | '.join(map(number, cells))} |")
    return "\n".join(lines)


# --- single facts -----------------------------------------------------------------------------


def _loss(
    manager: PluginManager, name: str, ratios: Sequence[float], advantage: float
) -> tuple[list[float], list[float]]:
    """Token losses of one response with these ratios, and minus their gradients in log-probs.

    The gradient is that of the mean over tokens, times the number of tokens.
    """
    old = torch.zeros(1, len(ratios), dtype=torch.float64)
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    rows = batch(torch.ones_like(old), old_logprobs=old, advantages=torch.full_like(old, advantage))
    result = manager.build(PolicyLoss, name).token_loss(logprobs, rows)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result.loss[0].tolist(), (-gradient[0]).tolist()


def _prefix_weights(manager: PluginManager) -> dict[str, float]:
    """Net weight of a prefix token shared by three answers (10, 11, 11 tokens; one is right)."""
    mask, found = ragged([10, 11, 11]), {}
    rewards = torch.zeros_like(mask)
    rewards[0, 9] = 1.0
    rows = batch(mask, token_rewards=rewards, scored=torch.ones(3, dtype=torch.bool))
    advantages = manager.build(AdvantageEstimator, "dr_grpo").estimate(rows).advantages
    for name in ("token-mean", "seq-mean-token-mean"):
        aggregator = manager.build(Aggregator, name)
        weights = aggregator.weights(mask, aggregator.count(mask))
        found[name] = float((weights * advantages)[:, 0].sum())
    return found


def _both_falling(manager: PluginManager) -> tuple[float, float]:
    """DPO's loss (beta 1) before and after both answers of a pair have lost probability."""
    chosen, rejected = math.log(0.3 / 0.4), math.log(0.1 / 0.3)
    loss = manager.build(PairLoss, "dpo", {"beta": 1.0})
    found = []
    for scale in (0.0, 1.0):
        scores = torch.tensor([[scale * chosen], [scale * rejected]], dtype=torch.float64)
        found.append(float(loss.pair_loss(PairScores.of_rewards(scores[0], scores[1]))))
    return found[0], found[1]


def facts(manager: PluginManager) -> Mapping[str, str]:
    """Single numbers that the prose quotes, by the name it quotes them under."""
    few, many = token_weights(manager, 8), token_weights(manager, 88)
    grpo, _ = _loss(manager, "ppo_clip", (2.0, 0.4), 1.0)
    gspo = manager.build(PolicyLoss, "gspo", {"clip_low": 0.2, "clip_high": 0.2})
    pair = batch(
        torch.ones(1, 2),
        old_logprobs=torch.zeros(1, 2, dtype=torch.float64),
        advantages=torch.ones(1, 2, dtype=torch.float64),
    )
    two = torch.tensor([[2.0, 0.4]], dtype=torch.float64).log()
    _, up = _loss(manager, "ppo_clip", (0.5, 1.5), 1.0)
    _, down = _loss(manager, "ppo_clip", (0.5, 1.5), -1.0)
    prefix, dpo = _prefix_weights(manager), _both_falling(manager)
    thousand = torch.zeros(1, 1000, dtype=torch.float64)
    thousand[0, 0] = math.log(1e-10)
    rows = batch(
        torch.ones(1, 1000),
        old_logprobs=torch.zeros_like(thousand),
        advantages=torch.ones_like(thousand),
    )
    shrunk = gspo.token_loss(thousand, rows).ratio
    assert shrunk is not None
    _, kept = _loss(manager, "gspo", [1.0] * 50 + [1e-6] * 50, 1.0)
    k1 = manager.build(KlEstimator, "k1").kl(torch.tensor([0.2, -0.1, 0.3]), torch.zeros(3))
    shaped = (torch.tensor([0.0, 0.0, 1.0]) - 0.1 * k1).tolist()
    numbers = {
        "short_weight": many["token-mean"][0],
        "long_share": long_shares(manager)["token-mean"][1],
        "two_level": few["seq-mean-token-mean"][2],
        "one_level": few["token-mean"][2],
        "grpo_second": -grpo[1],
        "grpo_mean": -sum(grpo) / 2,
        "gspo_value": -float(gspo.token_loss(two, pair).loss[0, 0]),
        "up_low": up[0],
        "up_high": up[1],
        "down_low": down[0],
        "down_high": down[1],
        "prefix_token": prefix["token-mean"],
        "prefix_seq": prefix["seq-mean-token-mean"],
        "dpo_before": dpo[0],
        "dpo_after": dpo[1],
        "gspo_shrunk": float(shrunk[0, 0]),
        "gspo_garbled": kept[0],
        "kl_first": shaped[0],
        "kl_second": shaped[1],
        "kl_last": shaped[2],
    }
    return {name: number(value) for name, value in numbers.items()}


def draw(path: Path, shares: Mapping[str, tuple[float, float]]) -> None:
    """How much of the weight the longer of two responses gets, as bars in a PNG."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = sorted(shares, key=lambda name: (shares[name], name))
    for index, (long, colour) in enumerate(zip(LONG, ("#56b4e9", "#0072b2"), strict=True)):
        places = [place + 0.36 * (index - 0.5) for place in range(len(names))]
        widths = [100 * shares[name][index] for name in names]
        label = f"{long} tokens next to {SHORT}"
        bars = axes.barh(places, widths, height=0.34, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
    axes.axvline(50, color="#7f7f7f", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(0, 108)
    axes.set_xlabel("share of all weight that the longer response gets (%)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


# --- the page ------------------------------------------------------------------------------------


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with every mark replaced; `ValueError` for unknown and for unused names."""
    marks = set(MARK.findall(template))
    if marks != set(parts):
        raise ValueError(
            f"{TEMPLATE.name} and the parts differ: only in the template "
            f"{sorted(marks - set(parts))}, only computed {sorted(set(parts) - marks)}"
        )
    return MARK.sub(lambda match: parts[match[1]], template)


def page(manager: PluginManager) -> str:
    """The text of docs/algorithms.md."""
    parts = {
        "presets": presets(manager),
        "reference": reference(manager),
        "weight_table": weight_table(manager),
        "kl_table": kl_table(manager),
        **facts(manager),
    }
    return filled(TEMPLATE.read_text("utf-8"), parts)


def write(folder: Path) -> None:
    """Write the page and its picture."""
    manager = PluginManager()
    draw(folder / "images" / "aggregation-weights.png", long_shares(manager))
    (folder / "algorithms.md").write_text(page(manager), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
