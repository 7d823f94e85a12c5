"""What a run would do, what is cached and why not, and what it may cost; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

    from posttrain.core.config.base import StageBase
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.config.schema import RunConfig
    from posttrain.core.estimate.tokens import RunData
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.store.identity import Reason

Device = Literal["h100", "h200", "a100", "cpu"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run of a config would do.

    `stages` has a row for each stage in the order they run: `stage`, `kind`, `reads`, `makes`,
    `cached`, `reason`, `changes` (from earlier results), `arithmetic` (in words), and its estimates
    where there are some: `seconds`, `memory_gb`, `disk_gb`, `step_s`. `estimates` has those of the
    whole run, `total`, with the `model` and the `notes` they are based on. `round` says which new
    rows the run would take, for a config with a `new_data` stage; `cluster`, for one with a Ray
    cluster, which nodes there are and whether the ranks fit; `store`, for one with a URL, whether
    it answers.
    """

    name: str
    stages: tuple[Mapping[str, Any], ...]  # Any: JSON
    estimates: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    round: str = ""
    cluster: str = ""
    store: str = ""

    @property
    def todo(self) -> tuple[str, ...]:
        """The stages that would be computed."""
        return tuple(row["stage"] for row in self.stages if not row["cached"])

    def table(self) -> pd.DataFrame:
        """A row for each stage, with the stage as index."""
        import pandas as pd

        return pd.DataFrame(list(self.stages)).set_index("stage")

    def to_json(self) -> dict[str, object]:
        """As `posttrain plan --json` prints it."""
        places = {"cluster": self.cluster, "store": self.store}
        found = {name: text for name, text in places.items() if text}
        rows = [dict(row) for row in self.stages]
        return {"name": self.name, **self.estimates, **found, "stages": rows}

    def __str__(self) -> str:
        lines = [self.round] if self.round else []
        for row in self.stages:
            cached = "cached" if row["cached"] else f"runs: {row['reason']}"
            lines.append(f"{row['stage']} ({row['kind']}), {cached}; {row['arithmetic']}")
        return "\n".join([*lines, *filter(None, (self.cluster, self.store))])


def planned(
    resolved: ResolvedRun,
    manager: PluginManager,
    home: Path,
    store: Path,
    *,
    device: Device | None = None,
    estimates: bool = True,
) -> Plan:
    """The plan of a run in this home; `estimates` measures the machine unless there is a `device`.

    Reads only; a model is not downloaded.
    """
    from posttrain.core.estimate.tokens import RunData
    from posttrain.pipelines.run.forks import check_forks
    from posttrain.pipelines.run.placement import placement
    from posttrain.pipelines.run.planning import plan_stages
    from posttrain.pipelines.run.rounds import look
    from posttrain.pipelines.run.store import described, require_folders

    require_folders(home, store)
    check_forks(resolved.config, home)
    begun = look(resolved, manager, home, store=store)
    config, order = begun.resolved.config, begun.resolved.order
    plans = plan_stages(begun.resolved, home, manager, store, begun.rows_digest)
    status = {stage.name: (stage.cached, stage.reason) for stage in plans}
    data = RunData(config, manager)
    rows = stage_rows(config, order, status, data)
    todo = [name for name in order if not status[name][0]]
    found = _estimates(data, home, todo, device) if estimates or device else {}
    each: Mapping[str, Mapping[str, Any]] = found.pop("stages", {})
    rows = [row | dict(each.get(str(row["stage"]), {})) for row in rows]
    news, cluster = begun.nothing_new or begun.reported, placement(config, home)
    return Plan(config.name, tuple(rows), found, news, cluster, described(store))


def stage_rows(
    config: RunConfig,
    order: Sequence[str],
    status: Mapping[str, tuple[bool, Reason]],
    data: RunData,
) -> list[dict[str, Any]]:
    """What is reported of each stage, in the order they run."""
    from posttrain.core.contracts.stage import faults_of_plugin
    from posttrain.core.store.identity import Reason

    rows = []
    for name in order:
        stage = config.stages[name]
        cached, reason = status.get(name, (False, Reason("unknown")))
        with faults_of_plugin(name, stage, "describe"):
            words = arithmetic(stage, data)
        if (fork := getattr(stage, "fork", None)) is not None:
            words += f"; the first {fork.step} steps are shared, and are not computed"
        rows.append(
            {
                "stage": name,
                "kind": stage.kind,
                "reads": dict(stage.inputs),
                "makes": stage.makes,
                "cached": cached,
                "reason": str(reason),
                "changes": [asdict(change) for change in reason.changes],
                "arithmetic": words,
            }
        )
    return rows


def _given_steps(stage: RlStage) -> str:
    """What a plan says of steps on answers that the policy did not sample."""
    if stage.on_policy_share == 1:
        return ""
    whose = "the teacher samples" if stage.seq_kd else "the data have"
    return f"; {1 - stage.on_policy_share:.0%} of the steps are on answers that {whose}"


def _sampled_evaluation(stage: RlStage, data: RunData) -> str:
    """What avg@k and pass@k ask for while training."""
    section = stage.sampled_evaluation
    if section is None:
        return ""
    limits = section.as_evaluation(data.config.evaluation)
    problems, times = data.count("held_out", limits.num_problems), stage.steps // section.every
    times += 1 + (stage.steps % section.every > 0)
    return (
        f"; avg@{section.k} and pass@k {times} times, {problems} problems x {section.k} = "
        f"{problems * section.k} answers of at most {limits.max_response_length} tokens each"
    )


def arithmetic(stage: StageBase, data: RunData) -> str:
    """The batch arithmetic of a stage in words, with the counts that the run will have."""
    from posttrain.core.config.evaluation_stages import EvaluateStage
    from posttrain.core.config.gate_stages import ApproveStage, NewDataStage, PromoteStage
    from posttrain.core.config.preference_stages import (
        PreferenceDataStage,
        PreferenceStage,
        ProcessRewardModelStage,
    )
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.config.schema import RegisterStage, TransformStage
    from posttrain.core.config.sft_stage import SftStage

    config = data.config
    match stage:
        case EvaluateStage():
            section = stage.evaluation or config.evaluation
            problems, samples = data.count("held_out", section.num_problems), section.num_samples
            judged = "reward_model" in stage.inputs
            scored = "; the reward model scores the sampled ones" if judged else ""
            return (
                f"{problems} problems x (1 greedy + {samples} sampled) = "
                f"{problems * (1 + samples)} answers of at most {section.max_response_length} "
                f"tokens{scored}"
            )
        case SftStage():
            given = data.supervised(stage)
            count = given.steps * given.batch
            what = "problems" if stage.data is None else "rows"
            again = f", {count / max(1, given.train):.1f} passes over {given.train} {what}"
            micro = -(-given.batch // stage.micro_batch_size)
            about = "" if stage.max_tokens_per_batch is None else "about "
            return (
                f"{about}{given.steps} steps x {given.batch} examples = {count} examples"
                f"{again if 0 < given.train < count else ''}; {micro} micro-batch(es) a step"
            )
        case PreferenceDataStage():
            online = stage.online if isinstance(stage, PreferenceStage) else None
            if online is not None:
                answers = online.prompts_per_round * online.num_generations
                return (
                    f"{online.rounds} round(s) x {online.prompts_per_round} problems x "
                    f"{online.num_generations} answers = {online.rounds * answers} sampled; "
                    f"batches of at most {stage.batch_size} pairs, {online.steps} optimizer "
                    "step(s) in all"
                )
            found = data.judged(stage)  # at most: rows that are too long are left out
            where = "task '" + config.task.name + "'" if stage.data == "task" else stage.data
            rows = f"{found.train + found.held_out} rows of {where}"
            if stage.data is None:
                rows = (
                    f"{stage.num_prompts} problems x {stage.num_generations} answers = "
                    f"{found.sampled} sampled; at most {found.train + found.held_out} pairs"
                )
            return (
                f"{rows}, at most {found.train} to train on and {found.held_out} held out; batches "
                f"of {stage.batch_size}, {stage.epochs} epoch(s): at most {found.steps} "
                "optimizer step(s)"
            )
        case ProcessRewardModelStage():
            passes = f"batches of {stage.batch_size}, {stage.epochs} epoch(s)"
            if stage.data is not None:
                return f"labelled steps of {stage.data}; {passes}"
            answers = stage.num_prompts * stage.num_generations
            return (
                f"{stage.num_prompts} problems x {stage.num_generations} answers = {answers} "
                f"sampled, and {stage.num_continuations} ways to go on from each of their first "
                f"{stage.max_steps} steps but the last (estimates assume 3); {passes}"
            )
        case RlStage() if stage.on_policy_share == 0:
            whose = "the teacher's" if stage.seq_kd else "the data's"
            whose = "the record's" if stage.learns_from_record else whose
            return (
                f"{stage.prompts_per_step} of {whose} answers per step, {stage.steps} steps; the "
                f"policy samples nothing{_sampled_evaluation(stage, data)}"
            )
        case RlStage():
            rows_a_step = stage.prompts_per_step * stage.num_generations
            mini, updates = rows_a_step // stage.num_mini_batches, stage.num_mini_batches
            tokens = stage.steps * rows_a_step * stage.generation.max_response_length
            prompts = stage.steps * stage.prompts_per_step
            problems = prompts if "dataset" in stage.inputs else data.count("train", prompts)
            again = f" ({prompts / max(1, problems):.1f} passes over {problems} problems)"
            return (
                f"{stage.prompts_per_step} prompts x {stage.num_generations} generations = "
                f"{rows_a_step} sequences per step; {stage.epochs} epoch(s) x {updates} "
                f"mini-batch(es) of {mini} = {stage.epochs * updates} optimizer step(s) per "
                f"rollout; {stage.steps} steps{again if 0 < problems < prompts else ''} sample at "
                f"most {tokens:,} tokens; {-(-mini // stage.micro_batch_size)} micro-batch(es) per "
                f"optimizer step{_given_steps(stage)}{_sampled_evaluation(stage, data)}"
            )
        case TransformStage():
            problems, solutions = data.count("train", stage.num_problems), stage.num_solutions
            tokens = problems * (1 + solutions) * stage.generation.max_response_length
            asked = 0 if stage.rewrite == "rules" else tokens
            return (
                f"at most {problems} problems x (1 rewriting + {solutions} solutions), {asked:,} "
                "tokens at most; integers and closed forms need none"
            )
        case ApproveStage():
            limit = stage.timeout_hours
            return "asks a person" + ("" if limit is None else f", and waits up to {limit:g} hours")
        case PromoteStage():
            return (
                f"makes the model champion of '{stage.registered_name}' if the lower bound of the "
                f"paired difference is above {stage.min_improvement:+g}; evaluates the champion "
                "if there is one"
            )
        case NewDataStage():
            most = "all" if stage.max_rows is None else f"at most {stage.max_rows}"
            return f"takes {most} new rows; needs at least {stage.min_rows}"
        case RegisterStage():
            return f"registers as '{stage.registered_name}' with alias '{stage.alias}'"
        case _:
            return data.manager.stage(stage).describe()


def _estimates(
    data: RunData, home: Path, todo: Sequence[str], device: Device | None
) -> dict[str, Any]:
    """The estimates of the stages in `todo`, their totals, and what they are based on."""
    from posttrain.core.estimate.report import estimate_run
    from posttrain.core.models.device import ModelRuntime, set_threads
    from posttrain.pipelines.stage.engines import choose_engine, largest_request

    config = data.config
    set_threads(config.limits.num_threads)
    engine = choose_engine(config, data.manager, ModelRuntime.from_config(config.model))
    if device not in (None, "cpu") and config.engine == "auto":
        engine = "vllm"
    return estimate_run(data, home / "models", todo, engine, largest_request(config), device)
