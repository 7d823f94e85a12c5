"""A first config for one's own data: from answers to five questions to commented YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METHODS = {
    "sft": "imitate answers that are in the data",
    "dpo": "learn from pairs of a better and a worse answer",
    "rl": "sample answers and reward the right ones (GRPO)",
    "sft+rl": "imitate first, then reward",
    "distill": "learn from a larger model what to say in the place of each sampled token (GKD)",
}
FOR_PURPOSE: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "preference": ("dpo",),
    "rl": ("rl", "sft+rl", "sft", "dpo", "distill"),
}
"""Methods by what the rows of a file are for; the first is the default."""

FEW_ROWS, MORE_HELD_OUT = 1000, 200
"""Of fewer rows, this many of 1000 are held out: the usual tenth would measure next to nothing."""
LENGTHS = {"short": 1, "normal": 3, "long": 10}
"""How long, as a factor of the shortest run that shows something."""
RL_STEPS, SFT_STEPS = 10, 20
TASK_ROWS = 512
"""Rows that a task is taken to have when batches are chosen."""
FILE_HELD_OUT = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What the answers come to. `task` are the fields of the config's task; empty = none.

    `rows` and `longest` (tokens, of prompt and answer) are of the data; `response` is the limit of
    a sampled answer, in tokens. `file` is the data of an sft or preference stage; empty = the
    task's.
    """

    name: str
    model: str
    method: str
    length: str
    rows: int = TASK_ROWS
    longest: int = 0
    response: int = 256
    file: str = ""
    taken: str = ""
    task: Mapping[str, Any] = field(default_factory=dict)  # Any: YAML values
    reward: Mapping[str, Any] = field(default_factory=dict)
    teacher: str = ""


def first_config(plan: Plan, head: str) -> str:
    """The YAML of a run; `head` is the line by which editors find the schema."""
    factor = LENGTHS[plan.length]
    parts = [
        f"{head}\n"
        f"# {plan.method}: {METHODS[plan.method]}. Paths are relative to the folder in which "
        "posttrain is started.\n"
        "# posttrain show stage KIND, posttrain show section NAME: every field and its default\n"
        f"name: {value(plan.name)}\nseed: 0 # another seed is another run\n",
        _model(plan),
    ]
    if plan.task:
        taken = f" # {plan.taken}" if plan.taken else ""
        task = dict(plan.task)
        if plan.taken and plan.rows < FEW_ROWS:
            task["held_out_permille"] = MORE_HELD_OUT
        parts.append(f"task: {value(task)}{taken}\n")
        parts.append(
            "evaluation: # on held-out problems, which no stage trains on\n"
            "  num_problems: 200 # all there are, if fewer\n"
            f"  max_response_length: {plan.response}\n"
            "  num_samples: 4 # sampled answers per problem, in addition to the greedy one\n"
        )
    parts.append("stages:\n" + "\n".join(_stages(plan, factor)))
    return "\n".join(parts)


def _model(plan: Plan) -> str:
    room = max(plan.longest, 0) + (plan.response if plan.task and plan.method != "sft" else 0)
    limit = max(256, 1 << (room - 1).bit_length()) if room else 1024
    return (
        "model:\n"
        f"  source: {value(plan.model)} # hub id, folder, or models:/NAME@champion\n"
        f"  max_model_len: {limit} # tokens of prompt and answer; longer rows are left out\n"
        "  dtype: auto # bfloat16 where the processor has it, else float32\n"
    )


def _stages(plan: Plan, factor: int) -> list[str]:
    batch = batch_size(plan.rows)
    made, model = [], "base"
    if plan.task:
        made.append("  evaluate_base: {kind: evaluate, inputs: {model: base}}\n")
    if plan.method in ("sft", "sft+rl"):
        made.append(_sft(plan, factor, batch))
        model = "sft"
    if plan.method == "dpo":
        made.append(_preference(plan, factor, batch))
        model = "preference"
    if plan.method in ("rl", "sft+rl"):
        made.append(_rl(plan, factor, batch, model))
        model = "rl"
    if plan.method == "distill":
        made.append(_distill(plan, factor, batch))
        model = "distill"
    if plan.task:
        made.append(
            "  evaluate: # with a 95 % interval of the difference to the base model\n"
            "    kind: evaluate\n"
            f"    inputs: {{model: {model}, baseline: evaluate_base}}\n"
        )
        made.append(
            "  register: # in MLflow's registry, as models:/NAME@candidate\n"
            "    kind: register\n"
            f"    inputs: {{model: {model}, evaluation: evaluate}}\n"
            f"    registered_name: {value(plan.name)}\n"
        )
    return made


def _sft(plan: Plan, factor: int, batch: int) -> str:
    if plan.file:
        source = (
            f"    data: {value(plan.file)} # {plan.taken}\n"
            f"    epochs: {factor} # passes over the data\n"
            f"    held_out_fraction: {FILE_HELD_OUT} # for the held-out loss; never trained on\n"
        )
    else:
        source = f"    steps: {SFT_STEPS * factor} # on the worked answers of the task\n"
    return (
        "  sft:\n"
        "    kind: sft\n"
        "    inputs: {model: base}\n"
        f"{source}"
        f"    batch_size: {batch} # rows per optimizer step\n"
        f"    micro_batch_size: {min(batch, 8)} # less = less memory, the same result\n"
        "    optimizer: {learning_rate: 1.0e-5, schedule: cosine, warmup_steps: 2}\n"
        "    # lora: {rank: 16} # train an adapter instead of all weights\n"
    )


def _preference(plan: Plan, factor: int, batch: int) -> str:
    if plan.file:
        source = f"    data: {value(plan.file)} # {plan.taken}\n"
    else:
        source = (
            "    num_prompts: 64 # the model's right answers are paired with its wrong ones\n"
            "    num_generations: 8\n"
            f"    generation: {{max_response_length: {plan.response}}}\n"
        )
    return (
        "  preference:\n"
        "    kind: preference\n"
        "    inputs: {model: base} # also the frozen reference\n"
        "    algorithm: dpo # posttrain plugins list --kind algorithm\n"
        "    preference_loss: {name: dpo, beta: 0.1}\n"
        f"{source}"
        f"    epochs: {factor}\n"
        f"    batch_size: {batch} # pairs per optimizer step\n"
        f"    micro_batch_size: {min(batch, 4)} # less = less memory, the same result\n"
        "    held_out_fraction: 0.2 # pairs that say how well the model ranks\n"
        "    optimizer: {learning_rate: 5.0e-6, warmup_steps: 2}\n"
    )


def _rl(plan: Plan, factor: int, batch: int, model: str) -> str:
    return (
        "  rl:\n"
        "    kind: rl\n"
        f"    inputs: {{model: {model}}}\n"
        "    algorithm: grpo # posttrain plugins list --kind algorithm\n"
        f"    steps: {RL_STEPS * factor}\n"
        f"    prompts_per_step: {min(batch, 16)}\n"
        "    num_generations: 8 # answers per prompt\n"
        "    micro_batch_size: 16 # less = less memory, the same result\n"
        "    generation:\n"
        f"      max_response_length: {plan.response} # tokens; longer answers are cut\n"
        "      temperature: 1.0\n"
        "    rewards: # posttrain plugins list --kind reward\n"
        f"      - {value(dict(plan.reward))}\n"
        "    kl: {controller: {name: fixed, coef: 0.0}} # 0: no reference model is loaded\n"
        "    optimizer: {learning_rate: 5.0e-6, warmup_steps: 2}\n"
        "    evaluate_every: 10 # steps\n"
    )


def _distill(plan: Plan, factor: int, batch: int) -> str:
    return (
        "  distill:\n"
        "    kind: distill\n"
        "    inputs: {model: base}\n"
        "    teachers: # or a vLLM server: {base_url: http://127.0.0.1:8000/v1, model: NAME}\n"
        f"      large: {{model: {value(plan.teacher)}}}\n"
        "    distillation: {name: gkd, divergence: forward} # at each token, over the vocabulary\n"
        f"    steps: {RL_STEPS * factor}\n"
        f"    prompts_per_step: {batch}\n"
        "    micro_batch_size: 16 # less = less memory, the same result\n"
        "    generation:\n"
        f"      max_response_length: {plan.response} # tokens; longer answers are cut\n"
        "      temperature: 1.0\n"
        "    optimizer: {learning_rate: 2.0e-5, warmup_steps: 2}\n"
        "    evaluate_every: 10 # steps\n"
    )


def batch_size(rows: int) -> int:
    """A power of two from 1 to 32, so that the training rows make at least four batches."""
    most = max(1, rows // 5)
    return int(min(32, 1 << (most.bit_length() - 1)))


def value(item: object) -> str:
    """One line of YAML."""
    import yaml  # `posttrain --help` needs only the names above

    text: str = yaml.safe_dump(
        item, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n...\n").strip()
