"""Configurations and data files as nobody should write them, made from good ones by a seed."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import yaml
from pyarrow import parquet

from posttrain.core.kit.tiny import CHAT_TEMPLATE, make_tiny_model, make_tiny_tokenizer

GOOD_CONFIGS: tuple[dict[str, Any], ...] = (  # Any: nested YAML values
    {
        "name": "sums",
        "seed": 3,
        "engine": "auto",
        "model": {"dtype": "float32", "max_model_len": 512},
        "task": {"name": "arithmetic", "left_digits": [1, 2], "style": "mixed"},
        "evaluation": {"num_problems": 20, "num_samples": 4, "pass_at": [1, 4]},
        "limits": {"num_threads": 2, "min_free_gb": 0.5},
        "alarms": {"truncated": 0.4, "policy_kl": None},
        "stages": {
            "sft": {
                "kind": "sft",
                "steps": 4,
                "inputs": {"model": "base"},
                "optimizer": {"learning_rate": 1e-4, "betas": [0.9, 0.99], "warmup_steps": 1},
                "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]},
            },
            "rl": {
                "kind": "rl",
                "inputs": {"model": "sft"},
                "algorithm": {"name": "dapo"},
                "steps": 3,
                "prompts_per_step": 4,
                "rewards": [
                    {"name": "accuracy", "weight": 1.0},
                    {"name": "repetition", "ngram": 2, "weight": 0.5},
                ],
                "reward_clip": [-1.0, 1.0],
                "policy_loss": [{"name": "ppo_clip", "clip_high": 0.3}],
                "kl": {"controller": {"name": "fixed", "coef": 0.01}, "estimator": "k3"},
                "generation": {"max_response_length": 32, "temperature": 0.9, "top_p": 0.95},
            },
            "after": {"kind": "evaluate", "inputs": {"model": "rl"}},
            "keep": {
                "kind": "register",
                "inputs": {"model": "rl", "evaluation": "after"},
                "registered_name": "sums",
                "alias": "candidate",
            },
        },
    },
    {
        "task": "arithmetic",
        "stages": {
            "rm": {
                "kind": "reward_model",
                "inputs": {"model": "base"},
                "num_prompts": 8,
                "held_out_fraction": 0.25,
            },
            "ppo": {
                "kind": "rl",
                "inputs": {"model": "base", "reward_model": "rm"},
                "algorithm": "ppo",
                "rewards": [{"name": "reward_model"}],
                "critic": {"epochs": 1, "clip": 0.2},
                "kl_guard": {"max_kl": 0.2, "action": "lower_rate", "factor": 0.5},
            },
            "dpo": {
                "kind": "preference",
                "inputs": {"model": "base"},
                "algorithm": {"name": "dpo"},
                "preference_loss": {"name": "dpo", "beta": 0.2, "coef": 1.0},
                "ld_alpha": 0.5,
            },
        },
    },
    {
        "task": "arithmetic",
        "engine": {"name": "vllm_server"},
        "limits": {"learner_ranks": 4},
        "cluster": {
            "ray": {"address": "10.0.0.1:6379", "start_timeout_s": 60},
            "learner": {"cpus": 2, "gpus": 0, "min_ranks": 2, "shard_size": 2},
            "engines": {"replicas": 2, "cpus": 2, "gpus": 0},
            "rewards": {"cpus": 2, "nodes": 2},
            "environments": {"cpus": 2, "at_once": 64, "timeout_s": 60},
        },
        "keep": {"checkpoint_minutes": 5, "checkpoints": 3, "every": 10, "evidence_mb": 16},
        "forked_from": {"run": "0123abcd", "stage": "rl", "step": 2},
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": "grpo",
                "steps": 6,
                "rewards": ["accuracy", "math_accuracy"],
                "fork": {"stage": "rl/" + "0" * 64, "step": 2, "seed": 4},
                "environment": {
                    "name": "tool_calls",
                    "tools": ["calculator"],
                    "max_calls": 3,
                    "max_turns": 4,
                },
                "reward_pool": {"workers": 2, "timeout_s": 5, "max_failure_rate": 0.1},
                "resample": {"method": "pow", "power": 2},
                "sampled_evaluation": {"every": 2, "num_problems": 8, "k": 4},
            },
        },
        "variants": {
            "seeds": [0, 1],
            "base": "plain",
            "target": 0.5,
            "measure": {"stage": "rl", "metric": "reward/mean"},
            "named": {
                "plain": {},
                "+ higher": {
                    "extends": "plain",
                    "set": {"stages.rl.policy_loss.clip_high": 0.28, "limits.keep_engine": False},
                },
            },
        },
    },
    {
        "task": "arithmetic",
        "stages": {
            "teacher": {"kind": "sft", "inputs": {"model": "base"}, "epochs": 1},
            "record": {
                "kind": "record_teacher",
                "inputs": {"model": "teacher"},
                "num_problems": 8,
                "answers": "worked",
                "top_k": 4,
            },
            "student": {
                "kind": "distill",
                "inputs": {"model": "base", "recorded": "record"},
                "distillation": {"name": "gkd", "top_k": 4, "coef": 0.5},
                "steps": 2,
            },
            "given": {
                "kind": "distill",
                "inputs": {"model": "base", "teacher": "teacher"},
                "on_policy_share": 0.5,
                "teachers": {"teacher": {"routes": ["a"]}, "self": {"policy": {"ema_rate": 0.1}}},
                "teacher_routing": {"by": "dataset", "unknown": "skip", "balance": "equal"},
            },
            "prm": {
                "kind": "process_reward_model",
                "inputs": {"model": "base"},
                "num_prompts": 4,
                "num_continuations": 2,
                "separator": "\n",
            },
            "online": {
                "kind": "preference",
                "inputs": {"model": "base"},
                "preference_loss": [{"name": "dpo", "beta": 0.1}],
                "online": {
                    "steps": 4,
                    "refresh_every": 2,
                    "prompts_per_round": 8,
                    "num_generations": 2,
                },
            },
            "after": {"kind": "evaluate", "inputs": {"model": "online"}},
            "harness": {"kind": "benchmark", "inputs": {"model": "online"}, "suites": ["held_out"]},
            "ask": {
                "kind": "approve",
                "inputs": {"model": "online", "evaluation": "after"},
                "samples": 2,
                "timeout_hours": 1.5,
            },
            "champion": {
                "kind": "promote",
                "inputs": {"model": "ask", "evaluation": "after"},
                "min_improvement": 0.01,
            },
            "rows": {"kind": "transform", "inputs": {"model": "base"}, "num_problems": 8},
        },
        "variants": {
            "search": {
                "trials": 3,
                "space": {
                    "stages.student.optimizer.learning_rate": {
                        "low": 1e-5,
                        "high": 1e-3,
                        "log": True,
                    },
                    "stages.student.steps": [1, 2],
                },
            },
        },
    },
    {
        "task": {"name": "episodes", "prompt": "Walk."},
        "variants": {
            "measure": {"stage": "rl", "metric": "reward/mean"},
            "grid": {"stages.rl.steps": [1, 2], "stages.rl.algorithm": ["grpo", "rloo"]},
        },
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": "grpo",
                "steps": 2,
                "rewards": [{"name": "environment"}],
                "environment": {
                    "name": "mcp",
                    "servers": [{"url": "http://127.0.0.1:9/mcp"}],
                    "allow": ["read"],
                    "max_turns": 3,
                },
                "schedule": "streaming",
                "max_staleness": 2,
            },
        },
    },
)

ODD_VALUES: tuple[Any, ...] = (  # Any: whatever YAML can hold
    float("nan"),
    float("inf"),
    -1,
    0,
    True,
    1e30,
    10**400,
    None,
    "",
    "x" * 5000,
    "\u00b2",
    "..",
    "/dev/null",
    "models:/a/b/c",
    "~nosuchuser/a",
    [{"name": {"a": 1}}],
    "a\x85b",
    [],
    {},
    [[[[]]]],
    {"name": 3},
    {"name": "grpo", "nested": {"a": [1, {"b": 2}]}},
    ["accuracy", "accuracy"],
    "2024-13-45",
    -0.0,
    1e-320,
)
ODD_TEXT = (
    "\ufeff",
    "\t",
    "\x00",
    "\x07",
    "&a [*a]",
    "!!python/object:os.system x",
    "!!bool perhaps",
    "!!timestamp x",
    "!!binary =",
    "!!int ''",
    "2024-13-45",
    "0x" + "f" * 6000,
    "1" * 6000,
    '"\\ud800"',
    "<<: [1]",
    "? [a, b] : c",
    "%YAML 9.9\n",
    "---\n---\n",
    "{" * 3000,
    "[" * 3000,
    "- " * 3000,
    "*nothing",
    "1:30:00",
    "=",
)


@dataclass(frozen=True, slots=True)
class Case:
    """What was done to a good input, for messages, and the arguments of `validate`."""

    what: str
    arguments: tuple[str, ...]


def places(value: Any, loc: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in nested YAML values but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*loc, key))
        if isinstance(item, dict | list):
            found += places(item, (*loc, key))
    return found


def changed(values: Any, loc: tuple[str | int, ...], change: Callable[[Any, Any], None]) -> Any:
    """A copy of `values` in which `change` was applied to (the holder of `loc`, its last key)."""
    made: Any = json.loads(json.dumps(values))
    holder = made
    for key in loc[:-1]:
        holder = holder[key]
    change(holder, loc[-1])
    return made


def _changes(rng: random.Random) -> tuple[str, Callable[[Any, Any], None]]:
    value = rng.choice(ODD_VALUES)

    def put(holder: Any, key: Any) -> None:
        holder[key] = value

    def remove(holder: Any, key: Any) -> None:
        del holder[key]

    def misspell(holder: Any, key: Any) -> None:
        if isinstance(holder, dict):
            letters = list(str(key))
            letters.insert(rng.randrange(len(letters) + 1), rng.choice("aexz_ \u00e9\u00b2."))
            holder["".join(letters)] = holder.pop(key)

    def wrap(holder: Any, key: Any) -> None:
        for _ in range(rng.choice((1, 2, 100))):
            holder[key] = rng.choice(([holder[key]], {"name": holder[key]}))

    names = {f"put {value!r:.30}": put, "remove": remove, "misspell": misspell, "wrap": wrap}
    return rng.choice([*names.items(), (f"put {value!r:.30}", put)])


def config_cases(folder: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """`count` configurations: values changed, texts damaged, files that are none, odd `--set`."""
    rng = random.Random(seed)
    for number in range(count):
        good = rng.choice(GOOD_CONFIGS)
        path = folder / f"config{number}.yaml"
        kind = rng.choice(("value", "value", "value", "text", "set", "file"))
        if kind == "value":
            loc = rng.choice(places(good))
            what, change = _changes(rng)
            made = changed(good, loc, change)
            path.write_text(yaml.safe_dump(made, sort_keys=False, allow_unicode=True))
            yield Case(f"{number}: {what} at {loc}", (str(path),))
        elif kind == "text":
            what, data = _damaged(yaml.safe_dump(good, sort_keys=False), rng)
            path.write_bytes(data)
            yield Case(f"{number}: {what}", (str(path),))
        elif kind == "set":
            path.write_text(yaml.safe_dump(good, sort_keys=False))
            override = _override(good, rng)
            yield Case(f"{number}: --set {override[:60]!r}", (str(path), "--set", override))
        else:
            what = irregular_file(path, rng)
            yield Case(f"{number}: the file is {what}", (str(path),))


def _damaged(text: str, rng: random.Random) -> tuple[str, bytes]:
    at = rng.randrange(len(text))
    odd = rng.choice(ODD_TEXT)
    levels = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
    ways = {
        "cut": text[:at].encode(),
        f"insert {odd[:20]!r}": (text[:at] + odd + text[at:]).encode("utf-8", "surrogatepass"),
        f"value {odd[:20]!r}": (text + f"description: {odd}\n").encode("utf-8", "surrogatepass"),
        "utf-16": text.encode("utf-16"),
        "utf-8 with BOM": text.encode("utf-8-sig"),
        "bytes that are no text": text.encode()[:at] + b"\xff\xfe\xc3" + text.encode()[at:],
        "alias bomb": f"{text}a0: &a0 [x]\n{levels}\n".encode(),
        "merge bomb": (
            f"{text}m0: &m0 {{a: 1}}\n"
            + "\n".join(
                f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}" for i in range(1, 9)
            )
        ).encode(),
        "deep": f"{text}description: {'[' * 2000}{']' * 2000}\n".encode(),
        "deep block": (text + "".join(f"{' ' * i}a:\n" for i in range(1500))).encode(),
        "twice": f"{text}task: arithmetic\n".encode(),
        "large": text.encode() + b"# comment\n" * 200_000,
        "random": bytes(rng.randrange(256) for _ in range(300)),
    }
    return rng.choice(list(ways.items()))


def _override(good: dict[str, Any], rng: random.Random) -> str:
    place = ".".join(map(str, rng.choice(places(good))))
    odd = ("\u00b2", "9" * 5000, "", "-1", "\u0663", "a.b.c", "x" * 300, "a" + ".b" * 2000)
    place = rng.choice((place, f"{place}.{rng.choice(odd)}", rng.choice(odd)))
    value = rng.choice(ODD_VALUES)
    text = rng.choice((yaml.safe_dump(value, allow_unicode=True).strip(), rng.choice(ODD_TEXT)))
    return f"{place}={text}"


def irregular_file(path: Path, rng: random.Random) -> str:
    """Put something at `path` that is not a file to read; what it is."""
    what = rng.choice(("a folder", "a pipe", "a socket", "empty", "a device", "a loop", "missing"))
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    elif what == "empty":
        path.write_text(rng.choice(("", "\n\n", "# nothing\n", "---\n...\n")))
    elif what == "a device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/urandom")))
    elif what == "a loop":
        path.symlink_to(path)
    return what


# --- data -------------------------------------------------------------------------------------

ROWS: dict[str, list[dict[str, Any]]] = {  # Any: JSON values
    "problems": [{"prompt": f"What is {i} + 2?", "answer": i + 2} for i in range(60)],
    "pairs": [
        {"prompt": f"Say {i}", "chosen": f"yes {i}", "rejected": f"no {i}", "margin": 1.5}
        for i in range(12)
    ],
    "chats": [
        {
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "chosen": [{"role": "assistant", "content": f"yes {i}"}],
            "rejected": [{"role": "assistant", "content": f"no {i}"}],
        }
        for i in range(12)
    ],
    "labels": [
        {"prompt": f"Say {i}", "completion": f"yes {i}", "label": i % 2 == 0} for i in range(12)
    ],
    "gsm8k": [
        {"question": f"What is {i} + 2?", "answer": f"Easy.\n#### {i + 2}"} for i in range(40)
    ],
    "sft messages": [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"What is {i} + 2?"}]},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "add", "arguments": {"a": i, "b": 2}}}],
                },
                {"role": "tool", "content": str(i + 2)},
                {"role": "assistant", "content": str(i + 2), "train": True},
            ],
            "tools": [
                {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
            ],
        }
        for i in range(12)
    ],
    "sft sharegpt": [
        {
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": f"What is {i} + 2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": str(i + 2)},
            ],
            "tools": '[{"name": "add", "parameters": {}}]',
        }
        for i in range(12)
    ],
    "sft alpaca": [
        {"instruction": "Add.", "input": f"{i}", "output": "x", "history": [["a", "b"]]}
        for i in range(12)
    ],
    "sft text": [{"text": f"Once {i}"} for i in range(12)],
    "steps": [
        {"prompt": f"What is {i}?", "completions": ["one", "two"], "labels": [True, i % 2 == 0]}
        for i in range(12)
    ],
    "rated": [
        {
            "instruction": f"Say {i}",
            "completions": [
                {"response": "yes", "overall_score": 4.5},
                {"response": "no", "overall_score": 1},
            ],
        }
        for i in range(12)
    ],
    "verl": [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + 2?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 2)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(40)
    ],
    "trl": [
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": f"What is {i} + 2?"}]},
            ],
            "answer": str(i + 2),
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        }
        for i in range(40)
    ],
}
TEMPLATE = CHAT_TEMPLATE.replace(
    "message['content'] +",
    "(message['content'] or '') + (message['tool_calls'] | tojson if message['tool_calls'] else '')"
    " + (tools | tojson if tools else '') +",
)
"""The tiny model's, with calls and tools."""
ODD_CELLS: tuple[Any, ...] = (  # Any: JSON values
    None,
    True,
    -1,
    0.5,
    10**400,
    "",
    "   ",
    "x" * 200_000,
    [],
    {},
    [{"role": "wizard", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    [{"role": "user", "content": [{"type": "text"}, 3, None]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": "{"}}]}],
    [{"role": "assistant", "content": "x", "tool_calls": "none", "train": "perhaps"}],
    [{"from": "gpt", "value": 3}],
    [True, None],
    [0.5, 2, -1],
    {"ground_truth": None},
    {"a": {"b": [1, {"c": None}]}},
    '[{"name": ',
    [[["deep"]]],
    "\ud800",
    "a\x00b",
    "\u2028",
    "1e400",
)
ODD_LINES = (
    "{",
    "[1, 2]",
    "3",
    "null",
    '{"prompt": NaN, "answer": 1}',
    '{"prompt": "p", "answer": 1e400}',
    '{"prompt": "p", "answer": 1, "answer": 2}',
    '{"prompt": "\\ud800", "answer": 1}',
    '{"prompt": "p", "answer": ' + "1" * 6000 + "}",
    '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}",
    '{"prompt": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}",
)


SFT, STEPS, TASK = "sft", "steps", ("verl", "trl")
ENDINGS = (".jsonl",) * 6 + (".json", ".jsonl.gz", ".csv", ".tsv", ".arrow", ".feather", ".txt")


def data_cases(folder: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """`count` data files of every format that a config can name, damaged; with their configs."""
    rng = random.Random(seed)
    model = make_tiny_model(folder / "model", tokenizer=make_tiny_tokenizer(chat_template=TEMPLATE))
    for number in range(count):
        kind = rng.choice((*ROWS, "parquet"))
        path = folder / f"data{number}.jsonl"
        if kind == "parquet":
            path = path.with_suffix(".parquet")
            what = damaged_parquet(path, rng)
        else:
            path = path.with_suffix(rng.choice(ENDINGS))
            what = damaged_rows(path, ROWS[kind], rng)
        config = folder / f"config{number}.yaml"
        values = {"model": {"source": str(model), "dtype": "float32"}}
        config.write_text(yaml.safe_dump({**values, **_reading(kind, path, folder)}))
        yield Case(f"{number}: {kind}{path.suffix}: {what}", (str(config),))


def _reading(kind: str, path: Path, folder: Path) -> dict[str, Any]:
    sft = {"kind": "sft", "inputs": {"model": "base"}}
    if kind.startswith(SFT):
        return {"stages": {"sft": {**sft, "data": str(path)}}}
    if kind == STEPS:
        stage = {**sft, "kind": "process_reward_model", "data": str(path), "separator": " "}
        return {"stages": {"prm": stage}}
    if kind in TASK:
        stage = {"kind": "evaluate", "inputs": {"model": "base"}}
        return {"task": {"name": "rows", "path": str(path)}, "stages": {"after": stage}}
    if kind in ("problems", "parquet"):
        name = "jsonl" if kind == "problems" else "parquet"
        return {"task": {"name": name, "path": str(path)}, "stages": {"sft": sft}}
    if kind == "gsm8k":
        other = folder / "test.jsonl"
        row = {"question": "What is 100 + 100?", "answer": "#### 200"}
        other.write_text(json.dumps(row) + "\n")
        task = {"name": "gsm8k", "path": str(path), "held_out_path": str(other)}
        return {"task": task, "stages": {"sft": sft}}
    loss = "kto" if kind == "labels" else "dpo"
    stage = {"kind": "preference", "data": str(path), "inputs": {"model": "base"}}
    return {"task": "arithmetic", "stages": {"dpo": {**stage, "algorithm": loss}}}


def damaged_rows(path: Path, rows: list[dict[str, Any]], rng: random.Random) -> str:
    """Write `rows` with one fault, in the form that the ending of `path` names; which."""
    if path.suffix in (".jsonl", ".txt"):
        return damaged_lines(path, rows, rng)
    if path.suffix in (".csv", ".tsv"):
        return damaged_cells(path, rows, rng)
    if path.suffix in (".arrow", ".feather"):
        what, rows = _with_odd_cell(rows, rng)
        try:
            table = pyarrow.Table.from_pylist(rows)
        except (pyarrow.ArrowException, UnicodeError, OverflowError):
            table = pyarrow.Table.from_pylist(ROWS["problems"])
        with path.open("wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return what if rng.random() < 0.4 else f"{what}; {spoil(path, rng)}"
    if path.suffix == ".json":
        what, rows = _with_odd_cell(rows, rng)
        wrapped = rng.choice((rows, {"data": rows}, {"rows": {"a": rows}}, [rows], {"data": None}))
        path.write_text(json.dumps(wrapped))
        return what if rng.random() < 0.5 else f"{what}; {spoil(path, rng)}"
    what = damaged_lines(path, rows, rng)
    if path.is_file() and not path.is_symlink():
        path.write_bytes(gzip.compress(path.read_bytes()))
        what += f"; {spoil(path, rng)}" if rng.random() < 0.5 else ""
    return what


def _with_odd_cell(
    rows: list[dict[str, Any]], rng: random.Random
) -> tuple[str, list[dict[str, Any]]]:
    """The rows with one odd value at any depth of one of them, or of all; what it is."""
    cell = rng.choice(ODD_CELLS)
    loc = rng.choice(places(rows[0]))

    def put(holder: Any, key: Any) -> None:
        holder[key] = cell

    among = range(len(rows)) if rng.random() < 0.3 else [rng.randrange(len(rows))]
    made = [changed(row, loc, put) if i in among else row for i, row in enumerate(rows)]
    return f"{cell!r:.30} at {loc} of {len(among)}", made


def damaged_cells(path: Path, rows: list[dict[str, Any]], rng: random.Random) -> str:
    """Write `rows` as text with a delimiter, with one fault; which."""
    what, rows = _with_odd_cell(rows, rng)
    names = list(rows[0])
    head = rng.choice((names, names, names, names[:-1], [*names, names[0]], [*names, ""]))
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
        writer.writerow(head)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow([c if isinstance(c, str) else json.dumps(c) for c in cells])
    return f"{what}, {len(head)} columns" + (f"; {spoil(path, rng)}" if rng.random() < 0.3 else "")


def spoil(path: Path, rng: random.Random) -> str:
    """Cut the file or change some bytes of it; which."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        path.write_bytes(data[: rng.randrange(len(data))])
        return "cut"
    for _ in range(rng.choice((1, 20))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    return "bytes changed"


def damaged_lines(path: Path, rows: list[dict[str, Any]], rng: random.Random) -> str:
    """Write `rows` as JSON Lines with one fault; which."""
    lines = [json.dumps(row) for row in rows]
    at = rng.randrange(len(rows))
    field = rng.choice(list(rows[at]))
    cell = rng.choice(ODD_CELLS)
    odd = rng.choice(ODD_LINES)
    text = "\n".join(lines)
    cut = rng.randrange(len(text))
    without = {name: value for name, value in rows[at].items() if name != field}
    deep, changed_rows = _with_odd_cell(rows, rng)
    ways: dict[str, bytes | None] = {
        deep: "\n".join(map(json.dumps, changed_rows)).encode(),
        f"{field} = {cell!r:.30}": _lines(lines, at, json.dumps({**rows[at], field: cell})),
        f"all {field} = {cell!r:.30}": "\n".join(
            json.dumps({**row, field: cell}) for row in rows
        ).encode(),
        f"without {field}": _lines(lines, at, json.dumps(without)),
        f"line {odd[:30]!r}": _lines(lines, at, odd),
        "cut": text[:cut].encode(),
        "a byte": text[:cut].encode() + bytes([rng.randrange(256)]) + text[cut:].encode(),
        "utf-16": text.encode("utf-16"),
        "utf-8 with BOM": text.encode("utf-8-sig"),
        "NUL": text[:cut].encode() + b"\0" + text[cut:].encode(),
        "CRLF": text.replace("\n", "\r\n").encode(),
        "one line": text.replace("\n", " ").encode(),
        "a JSON list": json.dumps(rows).encode(),
        "twice": f"{text}\n{text}".encode(),
        "one row": lines[0].encode(),
        "random": bytes(rng.randrange(256) for _ in range(500)),
        "irregular": None,
    }
    what, data = rng.choice(list(ways.items()))
    if data is None:
        return irregular_file(path, rng)
    path.write_bytes(data)
    return what


def _lines(lines: list[str], at: int, line: str) -> bytes:
    return "\n".join([*lines[:at], line, *lines[at + 1 :]]).encode("utf-8", "surrogatepass")


def damaged_parquet(path: Path, rng: random.Random) -> str:
    """Write a Parquet file of problems with one fault; which."""
    rows = ROWS["problems"]
    columns: dict[str, list[Any]] = {
        "nulls": [None] * len(rows),
        "lists": [[1, 2]] * len(rows),
        "mappings": [{"a": 1}] * len(rows),
        "bytes": [b"\xff\xfe"] * len(rows),
        "NaN": [float("nan")] * len(rows),
        "booleans": [True] * len(rows),
        "equal": ["What is 1?"] * len(rows),
    }
    what = rng.choice((*columns, "cut", "bytes changed", "no rows", "no column", "irregular"))
    if what == "irregular":
        return irregular_file(path, rng)
    field = rng.choice(("prompt", "answer"))
    table = pyarrow.Table.from_pylist(rows)
    if what in columns:
        values = {name: table.column(name) for name in table.column_names}
        table = pyarrow.table({**values, field: columns[what]})
    elif what == "no rows":
        table = table.slice(0, 0)
    elif what == "no column":
        table = table.drop_columns([field])
    parquet.write_table(table, path, row_group_size=10)
    data = bytearray(path.read_bytes())
    if what == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif what == "bytes changed":
        for _ in range(rng.choice((1, 20))):
            data[rng.randrange(4, len(data) - 8)] = rng.randrange(256)
        path.write_bytes(data)
    return f"{what} of {field}"
