"""Answers that the policy did not sample: at which steps, a record of them, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.distill_stage import DistillStage
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.data.teacher_record import (
    RecordedRows,
    TeacherRecord,
    check_record,
    file_name,
    read_index,
    write_index,
    write_rows,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.teacher_pass import candidate_pass
from posttrain.core.types import Problem
from posttrain.pipelines.rl.given_answers import GivenAnswers, WorkedAnswers
from posttrain.pipelines.run.teacher_checks import check_teachers
from tests.helpers.rollouts import load_tiny, ragged_batch

TOP_K, TEMPERATURE = 4, 0.7


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, init_std=0.3)


def scored(teacher: Path) -> RolloutBatch:
    """Answers of three lengths with what the teacher says of them."""
    batch = ragged_batch([5, 9, 3], group_size=1)
    rows = [torch.arange(len(batch))]
    said = candidate_pass(
        load_tiny(teacher), batch, rows, top_k=TOP_K, temperature=TEMPERATURE, check=lambda: None
    )
    return batch.with_columns(
        teacher_logprobs=said.logprobs,
        teacher_topk_ids=said.topk_ids,
        teacher_topk_logprobs=said.topk_logprobs,
    )


@pytest.fixture
def record(teacher: Path, tmp_path: Path) -> Path:
    """A record of two files: two answers in the first, one in the second."""
    batch, folder = scored(teacher), tmp_path / "record"
    folder.mkdir()
    lengths = batch.response_mask.sum(dim=1).tolist()
    for number, places in enumerate(([0, 1], [2])):
        columns = {
            name: [batch.column(name)[place, : lengths[place]] for place in places]
            for name in (
                *("response_ids", "teacher_logprobs"),
                *("teacher_topk_ids", "teacher_topk_logprobs"),
            )
        }
        rows = RecordedRows(
            problems=[Problem(f"p{place}", "1+1", "2", "2") for place in places],
            prompts=[batch.prompt_ids[p][batch.prompt_mask[p].bool()].tolist() for p in places],
            answers=[ids.tolist() for ids in columns["response_ids"]],
            truncated=[place == 1 for place in places],
            logprobs=columns["teacher_logprobs"],
            topk_ids=columns["teacher_topk_ids"],
            topk_logprobs=columns["teacher_topk_logprobs"],
        )
        write_rows(folder / file_name(number), rows)
    write_index(
        folder,
        teacher="big",
        teacher_digest="0",
        model=teacher,
        answers="worked",
        temperature=TEMPERATURE,
        top_k=TOP_K,
    )
    return folder


def test_a_record_gives_back_what_the_teacher_said(record: Path, teacher: Path) -> None:
    opened, wanted = TeacherRecord.open(record), scored(teacher)
    found = opened.batch([2, 0, 1], ChatTokenizer.load(teacher))
    for row, place in enumerate([2, 0, 1]):
        length = int(wanted.response_mask[place].sum())
        assert int(found.response_mask[row].sum()) == length
        for name in (
            *("response_ids", "teacher_logprobs"),
            *("teacher_topk_ids", "teacher_topk_logprobs"),
        ):
            own = found.column(name)[row, :length]
            assert torch.equal(own.float(), wanted.column(name)[place, :length].float()), name
        ids = found.prompt_ids[row][found.prompt_mask[row].bool()]
        assert ids.tolist() == wanted.prompt_ids[place][wanted.prompt_mask[place].bool()].tolist()
    assert found.truncated.tolist() == [False, False, True]
    assert found.group_id.tolist() == [0, 1, 2]
    prompt, answer = len(opened.prompts[1].prompt_ids), int(wanted.response_mask[1].sum())
    assert opened.longest == prompt + answer


def test_a_changed_byte_a_missing_file_and_another_version_are_refused(record: Path) -> None:
    path = record / file_name(1)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(ResourceError, match="is not the file that was recorded; make it again"):
        TeacherRecord.open(record)
    path.unlink()
    with pytest.raises(ResourceError, match=f"lacks {path.name}"):
        read_index(record)
    path.write_bytes(sound)
    index = json.loads((record / "index.json").read_text())
    (record / "index.json").write_text(json.dumps({**index, "version": 9}))
    with pytest.raises(ResourceError, match="is of version 9, expected 1"):
        read_index(record)
    (record / "index.json").write_text(json.dumps({**index, "columns": ["teacher_logprobs"]}))
    with pytest.raises(ResourceError, match="has no teacher_topk_ids, teacher_topk_logprobs"):
        read_index(record)
    (record / "index.json").unlink()
    with pytest.raises(ResourceError, match=r"holds no teacher's record: index\.json"):
        read_index(record)


def test_a_record_about_other_tokens_is_refused(record: Path, tmp_path: Path) -> None:
    other = make_tiny_tokenizer("abc", BARE_TEMPLATE)
    policy = make_tiny_model(tmp_path / "other", tokenizer=other)
    with pytest.raises(ResourceError, match="it was made with a tokenizer of .* tokens"):
        check_record(read_index(record), policy, "the record")


def test_which_steps_are_given_is_a_draw_of_seed_and_step() -> None:
    source = WorkedAnswers(None, 1, 1)  # type: ignore[arg-type]  # nothing is asked of it
    for share, wanted in ((0.0, 400), (1.0, 0)):
        given = GivenAnswers(source, share, 3)
        assert sum(given.are_of(step) for step in range(400)) == wanted
    draws = [[GivenAnswers(source, 0.7, seed).are_of(s) for s in range(400)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    # Five standard deviations of a binomial.
    assert abs(sum(draws[0]) - 120) < 5 * math.sqrt(400 * 0.7 * 0.3)


def resolved(folder: Path, manager: PluginManager, **stage: Any) -> ResolvedRun:
    """A run whose stage `student` is `stage`, after a teacher and what was recorded of it."""
    record = {"top_k": 4, "generation": {"temperature": 0.7}, **stage.pop("record", {})}
    inputs = {"model": "base", "teacher": "big"}
    config = {
        "task": "arithmetic",
        "model": {"dtype": "float32"},
        "stages": {
            "big": {"kind": "sft", "inputs": {"model": "base"}},
            "rec": {"kind": "record_teacher", "inputs": {"model": "big"}, **record},
            "student": {"kind": "distill", "inputs": inputs, **stage},
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return resolve(load_config([path]), manager)


def test_little_has_to_be_said(tmp_path: Path, manager: PluginManager) -> None:
    run = resolved(tmp_path, manager, steps=5)
    stage = run.config.stages["student"]
    assert isinstance(stage, DistillStage)
    assert stage.distillation is not None and stage.distillation.name == "gkd"
    assert (stage.rewards, stage.loss_terms, stage.on_policy_share) == ((), (), 1.0)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert resolve(load_config([tmp_path / "run.yaml"]), manager).to_yaml() == run.to_yaml()


FROM_RECORD: dict[str, Any] = {
    "inputs": {"model": "base", "recorded": "rec"},
    "distillation": {"name": "gkd", "top_k": 4},
    "generation": {"temperature": 0.7},
}


def test_a_record_is_learned_from_without_a_teacher(tmp_path: Path, manager: PluginManager) -> None:
    stage = resolved(tmp_path, manager, **FROM_RECORD).config.stages["student"]
    assert isinstance(stage, DistillStage) and stage.distillation is not None
    assert stage.on_policy_share == 0 and stage.teachers == {}
    section = stage.distillation.fields()
    assert (section["support"], section["of"], section["top_k"]) == ("topk", "teacher", 4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "a teacher that samples at no step",
        {"seq_kd": True},
        r"student\.seq_kd: every step samples from the policy",
    ),
    (
        "advantages of answers that nobody sampled",
        {"algorithm": "opd", "on_policy_share": 0.5},
        r"student\.advantage_transform: advantages are of answers that the policy sampled, and "
        r"on_policy_share is 0\.5",
    ),
    (
        "a policy loss on them",
        {
            "algorithm": "gkd",
            "policy_loss": "ppo_clip",
            "advantage": "grpo",
            "rewards": ["accuracy"],
            "on_policy_share": 0.5,
        },
        r"student\.policy_loss: 'ppo_clip' reads \['advantages', 'old_logprobs'\]",
    ),
    (
        "the answer's own token alone",
        {
            "distillation": {"name": "gkd", "divergence": "reverse", "support": "sampled"},
            "on_policy_share": 0,
        },
        r"student\.distillation: it reads",
    ),
    (
        "an environment",
        {"on_policy_share": 0.5, "environment": {"name": "tools", "tools": ["calculator"]}},
        r"student\.environment: a step on given answers has no samples",
    ),
    (
        "samples of an older policy",
        {"on_policy_share": 0.5, "max_staleness": 1},
        r"student\.max_staleness: a step on given answers has no samples",
    ),
    (
        "the policy as the teacher that samples",
        {
            "inputs": {"model": "base"},
            "teachers": {"me": {"policy": {}}},
            "on_policy_share": 0.5,
            "seq_kd": True,
        },
        r"student\.seq_kd: teacher 'me' is the policy itself",
    ),
    (
        "a teacher of another tokenizer that samples",
        {"distillation": {"name": "uld"}, "on_policy_share": 0.5, "seq_kd": True},
        r"student\.seq_kd: 'uld' is for a teacher with a tokenizer of its own",
    ),
    (
        "a teacher and a record",
        {"inputs": {"model": "base", "teacher": "big", "recorded": "rec"}},
        r"a stage learns from a record or from teachers",
    ),
    (
        "a record and the policy's own answers",
        {**FROM_RECORD, "on_policy_share": 0.5},
        r"student\.on_policy_share: a record says nothing of what the policy samples; set 0",
    ),
    (
        "the whole distribution of a record",
        {**FROM_RECORD, "distillation": {"name": "gkd", "support": "full"}},
        r"student\.distillation: it reads the teacher's whole distribution",
    ),
    (
        "the policy's candidates of a record",
        {**FROM_RECORD, "distillation": {"name": "gkd", "of": "student", "top_k": 4}},
        r"student\.distillation: .* a record has the teacher's best candidates",
    ),
    (
        "more candidates than there are",
        {**FROM_RECORD, "distillation": {"name": "gkd", "top_k": 9}},
        r"student\.distillation: it reads the teacher's best 9 tokens, and the record has 4; set "
        r"top_k: 4, or record more",
    ),
    (
        "another temperature",
        {**FROM_RECORD, "generation": {"temperature": 1.0}},
        r"student\.generation\.temperature: the record's log-probs are at temperature 0\.7",
    ),
    (
        "a record that is not there",
        {**FROM_RECORD, "inputs": {"model": "base"}, "recorded": "/nowhere"},
        r"student\.recorded: there is no folder '/nowhere'",
    ),
    (
        "many worked answers to a problem",
        {"record": {"num_generations": 4}},
        r"rec: .*a problem has one worked answer; set num_generations: 1, or answers: sampled",
    ),
    (
        "sampling of worked answers",
        {"record": {"generation": {"top_p": 0.9}}},
        r"generation\.top_p is of sampled answers, and worked ones are there already; remove it",
    ),
    (
        "a record at temperature 0",
        {"record": {"generation": {"temperature": 0.0}}},
        r"at generation\.temperature 0 every log-prob is 0 or minus infinity",
    ),
]


@pytest.mark.parametrize(
    ("stage", "says"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
def test_what_cannot_be_learned_from_is_one_sentence(
    tmp_path: Path, manager: PluginManager, stage: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(tmp_path, manager, **stage)


def test_validate_opens_a_record_that_the_config_names(
    record: Path, tmp_path: Path, manager: PluginManager, teacher: Path
) -> None:
    named = {**FROM_RECORD, "inputs": {"model": "base"}, "recorded": str(record)}
    run = resolved(tmp_path, manager, **named)
    assert check_teachers(run.config, teacher, None, manager) == []
    other = make_tiny_model(tmp_path / "m", tokenizer=make_tiny_tokenizer("abc", BARE_TEMPLATE))
    with pytest.raises(ResourceError, match=r"stages\.student: the record .* about other tokens"):
        check_teachers(run.config, other, None, manager)
    more = resolved(tmp_path, manager, **{**named, "distillation": {"name": "gkd", "top_k": 9}})
    with pytest.raises(ConfigError, match=r"stages\.student\.distillation: .* the record has 4"):
        check_teachers(more.config, teacher, None, manager)
