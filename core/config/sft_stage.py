"""The stage `sft` in the YAML: supervised fine-tuning, and where its rows come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from posttrain.core.config.base import Section
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.sections import (
    LoraSection,
    OptimizerField,
    OptimizerSection,
)

HUB = "hub:"
"""How sources of data that are on the hub begin: `hub:owner/name/subset@revision#split`."""


class DataSource(Section):
    """One source of training data: a path by itself, or with its share of the rows."""

    path: str = Field(
        min_length=1,
        description="file, folder of files, or hub:owner/name[/subset][@revision][#split]",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="share of the rows, relative to the other sources; null = by number of rows",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:  # Any: whatever YAML held
        return {"path": value} if isinstance(value, str) else value


class EarlyStopping(Section):
    """When training ends before its last step, by the held-out loss."""

    patience: int = Field(
        default=3, ge=1, le=1_000_000, description="evaluations in a row without an improvement"
    )
    min_improvement: float = Field(
        default=0.0, ge=0, description="nats per token; a smaller decrease is not an improvement"
    )


class SftStage(StepStage):
    """Supervised fine-tuning on conversations, texts or worked answers. Reads `model`.

    Exactly one of `steps` and `epochs` is set, and one of `batch_size` and `max_tokens_per_batch`;
    setting the second of a pair turns the first one's default off.
    """

    reads = {"model": "model"}
    may_read = {"dataset": "dataset"}
    makes = "model"
    sections = ("seed", "task", "model")

    kind: Literal["sft"]
    data: tuple[DataSource, ...] | None = Field(
        default=None,
        min_length=1,
        description="file, folder, hub:owner/name, or a list of these, each as {path, weight}; "
        "the format is recognised by the columns (docs/sft-data.md); null = the task's worked "
        "answers",
    )
    loss_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant",
        description="tokens that are learned: of all assistant messages, of the last one, or all; "
        "never those of messages with train: false",
    )
    weighting: Literal["none", "dft", "phi"] = Field(
        default="none",
        description="weigh each token's loss by its probability p (dft, arXiv:2508.05629) or by "
        "p (1 - p) (phi, arXiv:2508.11408)",
    )
    steps: int | None = Field(default=10, ge=1, description="optimizer steps")
    epochs: int | None = Field(
        default=None, ge=1, le=100_000, description="passes over the data; instead of steps"
    )
    batch_size: int | None = Field(default=32, ge=1, description="rows per optimizer step, at most")
    max_tokens_per_batch: int | None = Field(
        default=None,
        ge=1,
        description="rows are put together up to this many tokens per optimizer step; instead of "
        "batch_size. A longer row is a batch by itself",
    )
    micro_batch_size: int = Field(default=32, ge=1)
    held_out_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="of the conversations by their prompt; never trained on",
    )
    held_out: str | None = Field(
        default=None, min_length=1, description="file or folder; instead of held_out_fraction"
    )
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="steps between measurements of the held-out loss; 0 = before the first step "
        "and after the last",
    )
    early_stopping: EarlyStopping | None = Field(
        default=None, description="{} = after 3 evaluations without an improvement; null = never"
    )
    keep_best: bool = Field(
        default=False, description="the model of the evaluation with the lowest held-out loss"
    )
    optimizer: OptimizerField = OptimizerSection()
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps; 0 = by time alone, keep.checkpoint_minutes"
    )

    @model_validator(mode="before")
    @classmethod
    def _instead(cls, value: Any) -> Any:  # Any: whatever YAML held
        """Without `steps` where `epochs` are given, and so for the batch."""
        if not isinstance(value, dict):
            return value
        for usual, other in (("steps", "epochs"), ("batch_size", "max_tokens_per_batch")):
            if value.get(other) is not None:
                if value.get(usual) is not None:
                    raise ValueError(f"{usual} and {other} exclude each other; remove one of them")
                value = {**value, usual: None}
            elif usual in value and value[usual] is None:
                raise ValueError(f"neither {usual} nor {other} is set; set one of them")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SftStage:
        if self.held_out is not None and self.held_out_fraction:
            raise ValueError(
                "held_out and held_out_fraction exclude each other; remove one of them"
            )
        weights = [source.weight for source in self.data or ()]
        if None in weights and any(weights):
            raise ValueError(
                "some sources of data have a weight and others have none; give each one a weight, "
                "or none of them"
            )
        if self.data is not None and "dataset" in self.inputs:
            raise ValueError(
                "data and inputs.dataset both say what is learned from; remove one of them"
            )
        if self.data is None and self.held_out is None and self.loss_on != "assistant":
            raise ValueError(
                f"loss_on: {self.loss_on} is for conversations in `data`, and of the task's worked "
                "answers the answer alone is learned; remove it, or give data"
            )
        for name in ("early_stopping", "keep_best"):
            if getattr(self, name) not in (None, False) and not self.evaluate_every:
                raise ValueError(f"{name} needs evaluate_every, such as 50 steps; set it")
        if self.keep_best and self.fork is not None:
            raise ValueError(
                "the best weights of the steps before a fork are not kept; set keep_best: false"
            )
        if self.evaluate_every and not self.measures:
            raise ValueError(
                "evaluate_every needs held-out rows; set held_out_fraction, such as 0.05, or "
                "held_out"
            )
        return self

    @property
    def measures(self) -> bool:
        """Whether there are held-out rows."""
        return self.held_out is not None or self.held_out_fraction > 0

    def outside_paths(self) -> dict[str, str]:
        """Files and folders of data. A data set on the hub is known by its name and revision."""
        given = {f"data.{i}.path": source.path for i, source in enumerate(self.data or ())}
        if self.held_out is not None:
            given["held_out"] = self.held_out
        return {field: path for field, path in given.items() if not path.startswith(HUB)}

    def needs_task(self) -> str:
        return "problems, or a file as its `data`" if self.data is None else ""

    def reads_task_data(self) -> bool:
        return self.data is None and "dataset" not in self.inputs
