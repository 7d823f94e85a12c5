"""A filter of problems, a merge of two models, and Lion."""

from __future__ import annotations

import shutil

import torch
from pydantic import Field

from posttrain.core.contracts import (
    Optimizer,
    PluginConfig,
    Stage,
    StageBase,
    StageEstimate,
    StageOutput,
)
from posttrain.core.errors import ConfigError
from posttrain.core.hooks import hookimpl


class KeepEvenConfig(StageBase):
    """Keeps problems with an even answer."""

    makes = "dataset"
    sections = ("seed", "task", "evaluation")

    count: int = Field(default=16, ge=1, description="problems looked at")

    def needs_task(self) -> str:
        return "problems to filter"


class KeepEven(Stage[KeepEvenConfig]):
    """Keeps problems with an even answer."""

    name, Config = "keep_even", KeepEvenConfig

    def check(self, setting):
        if self.config.count > 1000:
            raise ConfigError(f"stages.{setting.name}.count: at most 1000; lower it")
        return ["few problems are looked at"] if self.config.count < 4 else []

    def describe(self):
        return f"looks at {self.config.count} problems"

    def run(self, context):
        found = context.problems("train", self.config.count)
        context.started(len(found))
        kept = []
        for number, problem in enumerate(found, start=1):
            context.check()
            if int(problem.answer) % 2 == 0:
                kept.append(problem)
            context.progress(number)
        context.log_table("kept", 0, [{"prompt": problem.prompt} for problem in kept])
        metrics = {"plugin/kept": float(len(kept)), "plugin/seen": float(len(found))}
        context.log_summary(metrics)
        return StageOutput({"dataset": context.write_problems(kept)}, metrics)


class MergeConfig(StageBase):
    """Averages two models of one shape."""

    reads = {"model": "model", "other": "model"}
    makes = "model"
    sections = ()

    weight: float = Field(default=0.5, ge=0, le=1, description="of `model`; the rest is `other`'s")


class Merge(Stage[MergeConfig]):
    """w = weight * w_model + (1 - weight) * w_other."""

    name, Config = "merge", MergeConfig

    def estimate(self, model):
        return StageEstimate(seconds=3 * model.disk_bytes / 1e9, disk_gb=model.disk_bytes / 1e9)

    def run(self, context):
        from safetensors.torch import load_file, save_file

        context.started(1)
        out = context.out / "model"
        shutil.copytree(context.inputs["model"].path, out)
        other, share = context.inputs["other"].path, self.config.weight
        for path in sorted(out.glob("*.safetensors")):
            ours, theirs = load_file(path), load_file(other / path.name)
            merged = {name: share * w + (1 - share) * theirs[name] for name, w in ours.items()}
            save_file(merged, path, metadata={"format": "pt"})
        context.progress(1)
        return StageOutput({"model": out}, {"plugin/weight": share})


class LionConfig(PluginConfig):
    betas: tuple[float, float] = Field(default=(0.9, 0.99), description="decay of the averages")


class _Lion(torch.optim.Optimizer):
    def __init__(self, weights, rate, betas):
        super().__init__(weights, {"lr": rate, "betas": betas, "total": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["total"] += 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                state.setdefault("m", torch.zeros_like(weight))
                state["seen"] = state.get("seen", 0) + 1
                fast, slow = group["betas"]
                direction = (fast * state["m"] + (1 - fast) * weight.grad).sign()
                # What is kept as a number counts too, so that a resumed run shows if it is lost.
                rate = group["lr"] / (1 + 0.1 * state["seen"] + 0.1 * group["total"])
                weight.add_(direction, alpha=-rate)
                state["m"].mul_(slow).add_(weight.grad, alpha=1 - slow)


class Lion(Optimizer[LionConfig]):
    """w <- w - lr sign(beta1 m + (1 - beta1) g). Source: arXiv:2302.06675."""

    name, Config = "lion", LionConfig

    def build(self, weights, learning_rate, seed):
        return _Lion(weights, learning_rate, self.config.betas)

    def state_bytes(self):
        return 4.0


@hookimpl
def posttrain_register():
    return [KeepEven, Merge, Lion]
