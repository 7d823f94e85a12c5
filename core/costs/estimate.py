"""What each stage of a run will take: time, memory and disk, from its config and measured rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import Task
from posttrain.core.costs.calibration import Calibration
from posttrain.core.costs.lengths import measured_lengths
from posttrain.core.costs.memory import Holder, StageDisk, StageMemory, stage_disk, uses_engine
from posttrain.core.costs.parts import parts_of
from posttrain.core.costs.rates import Rates
from posttrain.core.costs.shape import KnownModel
from posttrain.core.costs.sureness import answers_read, idle_groups
from posttrain.core.costs.times import PAIRED, StageTime, compares_answers, stage_time
from posttrain.core.costs.work import SHARES_PROMPTS, Work
from posttrain.core.models.packed_linear import When, packs
from posttrain.core.models.runtime import ModelRuntime
from posttrain.core.models.wide_products import product_type
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.seeding import derive_seed

GB = 1e9


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage; `time` is None where its amount of work is known only once it runs."""

    time: StageTime | None
    memory: StageMemory
    disk: StageDisk

    def row(self) -> dict[str, object]:
        """The figures by name: seconds and GB."""
        memory = {**self.memory.held, **self.memory.passing}
        found: dict[str, object] = {
            "memory_gb": round(self.memory.peak / GB, 3),
            "memory": {name: round(value / GB, 3) for name, value in memory.items()},
            "disk_gb": round(self.disk.left / GB, 4),
            "disk_peak_gb": round((self.disk.left + self.disk.passing) / GB, 4),
        }
        if self.time is not None:
            found |= {
                "steps": self.time.steps,
                "step_s": round(self.time.step_s, 4),
                "phases": {name: round(value, 4) for name, value in self.time.phases.items()},
                "seconds": round(self.time.total_s, 2),
            }
        return found


@dataclass(frozen=True, slots=True)
class Estimator:
    """A run on this machine; `notes` say what the figures rest on."""

    work: Work
    holder: Holder
    manager: PluginManager

    @classmethod
    def of(
        cls,
        config: RunConfig,
        manager: PluginManager,
        model: KnownModel,
        engine: str,
        engine_rows: int,
        rates: Rates | None = None,
    ) -> Estimator:
        """For a run with that engine, which decodes `engine_rows` sequences at once, at most.

        `rates` are measured unless they are given.
        """
        runtime = ModelRuntime.from_config(config.model)
        task = manager.build(Task, config.task.name, config.task.fields())
        seed = derive_seed(config.seed, "plan") % 2**31
        lengths = measured_lengths(task, model, config.model.system_prompt, seed)
        checkpointing = config.model.gradient_checkpointing
        fields = {} if isinstance(config.engine, str) else config.engine.fields()
        shape, when = model.shape, fields.get("packed_weights", "auto")
        each = product_type(runtime.dtype, runtime.device).itemsize
        size = each * (shape.in_layers + shape.vocabulary * shape.hidden)
        packs_weights = packs(size, runtime.dtype, runtime.device, cast(When, when))
        packed = size if engine == "transformers" and packs_weights else 0
        work = Work(
            config=config,
            shape=model.shape,
            lengths=lengths,
            rates=rates
            or Calibration(shape, runtime, checkpointing=checkpointing, packed=packed > 0),
            engine=engine,
            engine_rows=engine_rows,
            padded=runtime.attention != "stream",
            tokenizer_bytes=model.tokenizer_bytes,
            device=runtime.device,
            bytes_each=2 if runtime.dtype == torch.bfloat16 and not runtime.autocast else 4,
        )
        cache = fields.get("kv_cache_gb")
        bytes_of_cache = float(str(cache)) * 2**30 if cache else None
        on_gpu = runtime.device.type != "cpu"
        return cls(work, Holder(work, manager, on_gpu, bytes_of_cache, packed), manager)

    def costs(self, names: Sequence[str]) -> dict[str, StageCost]:
        """Of the stages of that name, which run one after the other."""
        found: dict[str, StageCost] = {}
        engine_runs = False
        for name in names:
            stage = self.work.config.stages[name]
            engine_runs = engine_runs or uses_engine(stage)
            found[name] = StageCost(
                stage_time(self.work, stage, self.manager),
                self.holder.stage(stage, engine_runs=engine_runs),
                stage_disk(self.work, stage),
            )
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed, a sentence each."""
        notes = [
            f"lengths: {self.work.lengths.known}; a model answers as long as it may, and the more "
            "of them an sft stage has shown it, the more as worked answers do",
            "not counted: the start of the run, rewards that are programs or judges, tools, groups "
            "drawn again",
        ]
        notes += self._guesses
        if self.work.config.model.compile:
            notes.append(
                "layers are measured as they are without model.compile, so updates are at most that"
            )
        if self.work.config.limits.learner_ranks > 1:
            notes.append("all figures are of one process, not of limits.learner_ranks")
        if self.work.engine not in SHARES_PROMPTS:
            notes.append(
                f"'{self.work.engine}' is not started here: its layers are taken to cost what "
                "those of the transformers engine do, and each response to have its prompt read"
            )
        return tuple(notes)

    @property
    def _guesses(self) -> list[str]:
        """Of policies that an sft stage made; of others nothing is guessed."""
        stages, found = self.work.config.stages, []
        tuned = {n: s for n, s in stages.items() if answers_read(self.work.config, s)}
        for name, stage in tuned.items():
            if isinstance(stage, RlStage):
                if not parts_of(stage, self.manager).compares:
                    continue
                share = idle_groups(self.work, stage)
                found.append(
                    f"guessed: the policy of '{name}' grows sure, and {share:.0%} of its groups "
                    "have answers worth the same and teach nothing"
                )
            elif compares_answers(stage):
                found.append(f"guessed: '{name}' finds {PAIRED:.0%} of the pairs asked for")
        return found
