"""The model card of an exported model: what made it, whether it helped, how to load it.

A card may be published, so it names files and folders of this machine by their last part only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from posttrain.core.analysis.report import Row, Table, in_words, table, table_markdown
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import PosttrainError
from posttrain.core.models.source import BUNDLED_ID, BUNDLED_PACKAGE
from posttrain.core.redaction import redacted
from posttrain.core.store.artifacts import ArtifactStore, StageResult
from posttrain.pipelines.run.blame import Blame, Blamed
from posttrain.pipelines.run.model_reference import FoundModel
from posttrain.pipelines.run.summary import evaluations, gain

Form = Literal["model", "adapter", "gguf"]
SETTINGS = 60
FOLDERS = re.compile(r"(?<![\w./:-])(?:(?:file|sqlite):/*)?~?(?:/[^\s/'\",;:)]+)+/")
"""Folders of this machine before the last part of a path, in a sentence."""
NOT_RECORDED = "not recorded: see its own page before you publish"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What is known of a model. `past` is its lineage, `config` that of its run."""

    found: FoundModel
    past: Sequence[Blamed]
    config: RunConfig | None
    results: Mapping[str, StageResult]
    notes: Sequence[str]

    @property
    def base(self) -> str:
        """Hub id of the base model, or the last part of its folder's name; empty if unknown."""
        roots = [item.source for item in self.past if not item.stage and item.source]
        if not roots and not self.found.stage:
            roots = [self.found.origin]
        origin = roots[-1] if roots else ""
        if origin.startswith(f"package {BUNDLED_PACKAGE}"):
            return BUNDLED_ID
        what, _, name = origin.partition(" ")
        return name if what == "hub" else Path(name).name

    @property
    def base_licence(self) -> str:
        """Of the bundled model; of others nothing is recorded."""
        return "apache-2.0" if self.base == BUNDLED_ID else ""


def gather(found: FoundModel, home: Path, store: Path) -> CardFacts:
    """Everything that home, store and MLflow know of a model; less where something is away."""
    past: list[Blamed] = []
    notes: list[str] = []
    config: RunConfig | None = None
    try:
        if found.stage:
            walked = Blame(home, store)
            past = walked.of(str(found.path))
            notes = list(walked.notes)
        config = found.config()
    except PosttrainError as error:
        notes.append(str(error))
    results: dict[str, StageResult] = {}
    for name, identity in () if found.run is None else found.run.stages.items():
        result, _ = ArtifactStore(store).lookup(name, identity)
        if result is not None:
            results[name] = result
    return CardFacts(found, past, config, results, notes)


def model_card(facts: CardFacts, name: str, form: Form, licence: str | None) -> str:
    """The card as Markdown with the hub's metadata in front."""
    licence = licence or facts.base_licence
    parts = [
        f"---\n{yaml.safe_dump(_metadata(facts, form, licence), sort_keys=False)}---",
        f"# {name}",
        _about(facts),
        "## How to load it",
        _loading(facts, name, form),
        *_results(facts),
        *_training(facts),
        table_markdown(_licences(facts, licence)),
        table_markdown(Table("Provenance", ["", ""], [list(row) for row in _provenance(facts)])),
        *_config(facts),
    ]
    return redacted("\n\n".join(parts) + "\n")


def _metadata(facts: CardFacts, form: Form, licence: str) -> dict[str, object]:
    ranks = facts.found.kind == "reward_model"
    found: dict[str, object] = {
        "library_name": {"model": "transformers", "adapter": "peft", "gguf": "gguf"}[form],
        "pipeline_tag": "text-classification" if ranks else "text-generation",
        "license": licence or "unknown",
    }
    if "/" in facts.base and facts.found.stage:  # of a hub: a folder's name means nothing there
        found["base_model"] = facts.base
    data = [row.name for item in facts.past for row in item.data if row.source.startswith("hub:")]
    if data:
        found["datasets"] = list(dict.fromkeys(data))
    return found | {"tags": ["posttrain", *dict.fromkeys(_algorithms(facts))]}


def _algorithms(facts: CardFacts) -> Iterator[str]:
    for item in reversed(facts.past):
        stage = facts.config.stages.get(item.stage) if facts.config and item.stage else None
        if stage is not None:
            algorithm = getattr(stage, "algorithm", None)
            yield stage.kind if algorithm is None else algorithm.name


def _about(facts: CardFacts) -> str:
    found, steps = facts.found, list(dict.fromkeys(_algorithms(facts)))
    if not found.stage:
        return f"A copy of {facts.base or 'a model'}, not changed."
    what = "A reward model" if found.kind == "reward_model" else "A language model"
    about = "" if facts.config is None else facts.config.description or ""
    by = ", ".join(steps) or "posttrain"
    return f"{what}: {facts.base or 'a base model'}, post-trained by {by}. {about}".strip()


def _loading(facts: CardFacts, name: str, form: Form) -> str:
    if form == "gguf":
        return (
            "```\nllama-cli -m FILE.gguf -cnv\n```\n\n"
            "```python\nfrom llama_cpp import Llama\n\nmodel = Llama('FILE.gguf')\n"
            "model.create_chat_completion([{'role': 'user', 'content': 'Hello'}])\n```"
        )
    if form == "adapter":
        return (
            "Low-rank factors for the base model that `adapter_config.json` names:\n\n"
            "```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
            "model = AutoPeftModelForCausalLM.from_pretrained('.')\n```"
        )
    ranks = facts.found.kind == "reward_model"
    auto = "AutoModelForSequenceClassification" if ranks else "AutoModelForCausalLM"
    lines = [
        f"from transformers import AutoTokenizer, {auto}\n",
        f"model = {auto}.from_pretrained('.', trust_remote_code=False)",
        "tokenizer = AutoTokenizer.from_pretrained('.', trust_remote_code=False)",
    ]
    if not ranks:
        lines += [
            "messages = [{'role': 'user', 'content': 'Hello'}]",
            "prompt = tokenizer.apply_chat_template(",
            "    messages, add_generation_prompt=True, return_tensors='pt', return_dict=True",
            ")",
            "answer = model.generate(**prompt, max_new_tokens=64)",
            "print(tokenizer.decode(answer[0, prompt['input_ids'].shape[1] :]))",
        ]
    system = "" if facts.config is None else facts.config.model.system_prompt
    more = f"\n\nIn training every chat began with the system message {system!r}." if system else ""
    return "```python\n" + "\n".join(lines) + f"\n```{more}"


def _results(facts: CardFacts) -> Iterator[str]:
    """Evaluations of this model, what they are compared with, and of the base model."""
    yield "## Results"
    config, stage = facts.config, facts.found.stage
    if config is None:
        yield "Nothing was measured by a run that is known."
        return
    baselines = {
        n: s.inputs["baseline"] for n, s in config.stages.items() if "baseline" in s.inputs
    }
    of_this = [
        n
        for n, s in config.stages.items()
        if s.kind == "evaluate" and s.inputs.get("model") == stage
    ]
    named = {*of_this, *(baselines[n] for n in of_this if n in baselines)}
    named |= {
        n
        for n, s in config.stages.items()
        if s.kind == "evaluate" and s.inputs.get("model") == "base"
    }
    shown = [result for n, result in facts.results.items() if n in named]
    if not any(result.name in of_this for result in shown):
        yield "No evaluation of this model was made by its run."
    if shown:
        yield table_markdown(evaluations(shown, baselines)).replace("## ", "### ", 1)
        last = [result for result in shown if result.name in of_this]
        if last and "eval/gain_low" in last[-1].metrics:
            metrics = last[-1].metrics
            holds = metrics["eval/gain_low"] <= 0 <= metrics["eval/gain_high"]
            change = gain(metrics, baselines.get(last[-1].name, ""))
            yield f"Change: {change}" + ("; the interval holds 0." if holds else ".")
        yield (
            f"Held-out problems of the task `{config.task.name}`; intervals are over problems. "
            "Nothing else was measured: neither safety nor other abilities."
        )


def _training(facts: CardFacts) -> Iterator[str]:
    made = [item for item in reversed(facts.past) if item.stage and not item.reported_above]
    if not made:
        return
    rows: list[Row] = [
        {
            "stage": item.stage,
            "kind": item.kind,
            "algorithm": _algorithm(facts, item.stage),
            "steps": _field(facts, item.stage, "steps"),
            "made": f"{item.what} {item.digest[:12]}",
        }
        for item in made
    ]
    yield table_markdown(table("Training", rows))
    settings = {
        s.place: {"setting": s.place, "default": in_words(s.default), "value": shortened(s.value)}
        for item in made
        for s in item.settings
    }
    if settings:
        note = "all that are not what the algorithm's preset and the defaults make them"
        yield table_markdown(table("Settings", list(settings.values())[:SETTINGS], note))
    data: list[Row] = [
        {
            "stage": item.stage,
            "data set": row.name,
            "use": row.context,
            "rows": row.num_rows,
            "sha256": row.sha256[:12],
            "from": without_folders(row.source),
        }
        for item in made
        for row in item.data
    ]
    yield table_markdown(table("Data", data, "" if data else "no record of data is at hand"))


def _algorithm(facts: CardFacts, stage: str) -> str | None:
    found = getattr(facts.config.stages.get(stage), "algorithm", None) if facts.config else None
    return None if found is None else str(found.name)


def _field(facts: CardFacts, stage: str, field: str) -> int | None:
    found = getattr(facts.config.stages.get(stage), field, None) if facts.config else None
    return found if isinstance(found, int) else None


def _licences(facts: CardFacts, licence: str) -> Table:
    rows = [["this model", licence or "unknown: set it with --license"]]
    rows.append([f"base model {facts.base}".strip(), facts.base_licence or NOT_RECORDED])
    read = [row.source for item in facts.past for row in item.data]
    sources = [without_folders(s) for s in read if not s.startswith("generated by ")]
    rows += [[f"data: {source}", NOT_RECORDED] for source in dict.fromkeys(sources)]
    return Table("Licences", ["of", "licence"], [list(row) for row in rows])


def _provenance(facts: CardFacts) -> Iterator[tuple[str, str]]:
    found = facts.found
    yield "sha256 of the model", found.digest
    if found.run is not None:
        yield "run", found.run_id
    if found.stage:
        yield "stage", f"{found.stage} ({found.identity[:16]})"
        yield "in MLflow", f"run {found.mlflow_run_id}, model {found.mlflow_model_id or '-'}"
    own = next((item for item in facts.past if item.stage), None)
    if own is not None:
        yield "posttrain", own.code
        yield from own.environment.items()
    for note in facts.notes:
        yield "note", FOLDERS.sub("", note)


def _config(facts: CardFacts) -> Iterator[str]:
    if facts.config is None:
        return
    values = without_folders(facts.config.model_dump(mode="json"))
    text = yaml.safe_dump(values, sort_keys=False)
    yield "## Config"
    yield (
        "The complete config of the run; paths are shortened.\n\n<details><summary>YAML</summary>\n"
        f"\n```yaml\n{text}```\n\n</details>"
    )


def shortened(value: object) -> str:
    """A setting in words, without folders of this machine."""
    return in_words(without_folders(value))


def without_folders(value: Any) -> Any:  # Any: nested JSON values
    """The value with every path of this machine reduced to its last part."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~", "file:/")) and "\n" not in value:
        return Path(value).name
    return value
