"""Teachers in the config: what reads best, and what is refused with what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import decoders

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.kit.tiny import (
    BARE_TEMPLATE,
    make_byte_tokenizer,
    make_tiny_model,
    make_tiny_tokenizer,
)
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.run.planning import parts_of_stage
from posttrain.pipelines.run.teacher_checks import check_teachers

SERVER = {"base_url": "http://127.0.0.1:9/v1", "model": "big"}
MODEL = {"model": "base"}
OWN: dict[str, Any] = {"algorithm": "gkd", "inputs": MODEL}
SIBLING = {"teachers": {"me": {"policy": {"context": "sibling"}}}}


def resolved(tmp_path: Path, manager: PluginManager, **stage: Any) -> ResolvedRun:
    """A run whose stage `rl` is `stage`, after one that makes a model."""
    inputs = stage.pop("inputs", {"model": "base", "teacher": "big"})
    config = {
        "task": "arithmetic",
        "model": {"dtype": "float32"},
        "limits": stage.pop("limits", {}),
        "stages": {
            "big": {"kind": "sft", "inputs": {"model": "base"}},
            "rl": {"kind": "rl", "inputs": inputs, **stage},
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return resolve(load_config([path]), manager)


def stage_of(run: ResolvedRun) -> RlStage:
    stage = run.config.stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


def test_the_input_teacher_is_a_teacher_without_being_listed(
    tmp_path: Path, manager: PluginManager
) -> None:
    run = resolved(tmp_path, manager, algorithm="opd")
    stage = stage_of(run)
    assert list(stage.teachers) == ["teacher"] and stage.teacher_roles == ("teacher",)
    assert stage.rewards == () and stage.advantage.name == "zero"
    assert run.order == ("big", "rl")
    again = resolve(load_config([tmp_path / "run.yaml"]), manager)
    assert again.to_yaml() == run.to_yaml()


def test_several_teachers_are_inputs_folders_and_servers(
    tmp_path: Path, manager: PluginManager
) -> None:
    make_tiny_model(tmp_path / "code")
    run = resolved(
        tmp_path,
        manager,
        algorithm="opd",
        inputs={"model": "base", "maths": "big"},
        teachers={"maths": {}, "code": {"model": str(tmp_path / "code")}, "prose": SERVER},
        teacher_routing={"by": "field"},
    )
    assert stage_of(run).teacher_roles == ("maths",)
    assert stage_of(run).outside_paths() == {"teachers.code.model": str(tmp_path / "code")}


def test_the_policy_itself_is_no_input(tmp_path: Path, manager: PluginManager) -> None:
    run = resolved(tmp_path, manager, **OWN, teachers={"me": {"policy": {"weights": "base"}}})
    stage = stage_of(run)
    assert stage.teacher_roles == () and stage.teachers["me"].weights == "base"
    assert stage.outside_paths() == {}


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_sdpo_blends_with_grpo_on_all_responses(
    tmp_path: Path, manager: PluginManager, weight: float
) -> None:
    algorithm = {"name": "sdpo", "weight": weight}
    run = resolved(tmp_path, manager, algorithm=algorithm, inputs={"model": "base"})
    stage = stage_of(run)
    own = stage.teachers["self"].policy
    assert own is not None and (own.weights, own.ema_rate, own.context) == ("ema", 0.05, "sibling")
    assert stage.distillation is not None and stage.distillation.coef == weight
    terms = [(term.name, term.coef) for term in stage.loss_terms]
    assert terms == ([] if weight == 1 else [("ppo_clip", 0.75)])
    assert stage.advantage.name == ("zero" if weight == 1 else "grpo")
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert resolve(load_config([tmp_path / "run.yaml"]), manager).to_yaml() == run.to_yaml()


def test_a_teacher_of_a_preset_is_changed_field_by_field(
    tmp_path: Path, manager: PluginManager
) -> None:
    live = {"self": {"policy": {"weights": "live"}}}
    run = resolved(tmp_path, manager, algorithm="sdft", inputs={"model": "base"}, teachers=live)
    own = stage_of(run).teachers["self"].policy
    assert own is not None and (own.weights, own.context) == ("live", "worked")


def test_mopd_routes_to_its_teachers(tmp_path: Path, manager: PluginManager) -> None:
    run = resolved(
        tmp_path,
        manager,
        algorithm="mopd",
        inputs={"model": "base", "maths": "big", "code": "big"},
        teachers={"maths": {"routes": ["gsm", "math"]}, "code": {}},
    )
    routing = stage_of(run).teacher_routing
    assert routing is not None and (routing.by, routing.unknown) == ("dataset", "error")
    assert stage_of(run).rewards == () and stage_of(run).transforms[0].name == "opd"


def test_another_folder_of_a_teacher_is_another_stage(
    tmp_path: Path, manager: PluginManager
) -> None:
    folder = tmp_path / "teacher"
    found = []
    for seed in (0, 0, 1):
        make_tiny_model(folder, seed=seed)
        run = resolved(
            tmp_path,
            manager,
            algorithm="opd",
            inputs={"model": "base"},
            teachers={"t": {"model": str(folder)}},
        )
        found.append(parts_of_stage(run, "rl", {"model": "x"}, "transformers", ""))
    assert found[0] == found[1] != found[2]
    changed = {key for key in found[0] if found[0][key] != found[2][key]}
    assert changed == {"file teachers.t.model"}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "a transform without a teacher",
        {"inputs": {"model": "base"}, "advantage_transform": "opd"},
        r"rl\.advantage_transform: advantage_transform 'opd' reads the column 'teacher_logprobs', "
        r"filled by a teacher, and this stage has none: add `inputs: \{teacher: <stage>\}`",
    ),
    (
        "a divergence without a teacher",
        {"inputs": {"model": "base"}, "algorithm": "gkd"},
        r"rl\.distillation: 'gkd' learns from a teacher, and this stage has none",
    ),
    (
        "a teacher that nobody reads",
        {},
        r"rl\.inputs\.teacher: nothing in this stage learns from a teacher",
    ),
    (
        "a teacher that is not there",
        {"algorithm": "opd", "teachers": {"maths": {}}, "inputs": {"model": "base"}},
        r"stage kind 'rl' reads 'maths', the teacher of that name without a `model`; add 'maths: "
        r"<name of a stage>'",
    ),
    (
        "a teacher that no stage makes",
        {"algorithm": "opd", "inputs": {"model": "base", "teacher": "missing"}},
        r"no stage named 'missing'",
    ),
    (
        "a folder that is not there",
        {"algorithm": "opd", "inputs": {"model": "base"}, "teachers": {"t": {"model": "/nowhere"}}},
        r"rl\.teachers\.t\.model: there is no folder '/nowhere'",
    ),
    (
        "several teachers and no routing",
        {"algorithm": "opd", "teachers": {"teacher": {}, "b": SERVER}},
        r"rl\.teachers: there are 2 \(teacher, b\), and nothing says which of them judges",
    ),
    (
        "one value of two teachers",
        {
            "algorithm": "opd",
            "teachers": {"teacher": {"routes": ["x"]}, "b": {**SERVER, "routes": ["x"]}},
            "teacher_routing": {"by": "field"},
        },
        r"'x' is routed to 2 teachers; keep one",
    ),
    (
        "teachers that count alike next to rewards",
        {
            "algorithm": "grpo",
            "advantage_transform": "opd",
            "teachers": {"teacher": {}, "b": SERVER},
            "teacher_routing": {"by": "field", "balance": "equal"},
        },
        r"rl\.teacher_routing\.balance: equal is for terms that read teachers alone",
    ),
    (
        "the whole vocabulary of a server",
        {"algorithm": "gkd", "inputs": {"model": "base"}, "teachers": {"t": SERVER}},
        r"rl\.distillation: it reads the whole vocabulary of teacher 't', and a server gives a few "
        r"candidates; set support: topk and of: teacher",
    ),
    (
        "a server at another temperature",
        {
            "algorithm": "opd",
            "inputs": {"model": "base"},
            "teachers": {"t": SERVER},
            "generation": {"temperature": 0.7},
        },
        r"rl\.generation\.temperature: the server of teacher 't' gives log-probs at temperature 1",
    ),
    (
        "one ratio per response",
        {
            "algorithm": "opd",
            "policy_loss": {"name": "gspo"},
            "aggregator": "seq-mean-token-mean",
        },
        r"rl\.advantage_transform: 'opd' gives the tokens of a response different advantages, and "
        r"'gspo' has one ratio per response",
    ),
    (
        "an engine that renormalises",
        {
            "algorithm": "opd",
            "advantage_transform": "iw_opd",
            "generation": {"top_p": 0.9},
        },
        r"rl\.advantage_transform: 'iw_opd' compares the teacher with the engine's log-probs",
    ),
    (
        "groups left out for their rewards",
        {"algorithm": "grpo", "advantage_transform": "opd", "drop_groups": "zero_advantage"},
        r"rl\.drop_groups: 'opd' learns from groups of equal rewards as well",
    ),
    (
        "a sampler that replaces them",
        {"algorithm": "dapo", "advantage_transform": "opd"},
        r"rl\.sampler: 'opd' learns from groups of equal rewards as well",
    ),
    (
        "the same next to a loss that asks the teacher",
        {"algorithm": "dapo", "policy_loss": ["ppo_clip", "ref_kl"]},
        r"rl\.sampler: 'ref_kl' learns from groups of equal rewards as well",
    ),
    (
        "no term at all",
        {"algorithm": "opd", "policy_loss": None, "advantage_transform": []},
        r"rl\.policy_loss: without a policy loss there is nothing to learn",
    ),
    (
        "zero advantages alone",
        {"inputs": {"model": "base"}, "advantage": "zero", "rewards": []},
        r"rl\.advantage: 'zero' leaves nothing to learn",
    ),
    (
        "a transform that nobody reads",
        {"algorithm": "gkd", "advantage_transform": "opd"},
        r"rl\.advantage_transform: it changes advantages, which no policy loss of this stage reads",
    ),
    (
        "no rewards where they are read",
        {"inputs": {"model": "base"}, "rewards": []},
        r"rl\.rewards: there is none, and the update depends on",
    ),
    (
        "a server without its model's name",
        {"algorithm": "opd", "teachers": {"t": {"base_url": "http://127.0.0.1:9/v1"}}},
        r"a server needs `model`",
    ),
    (
        "a key in a URL",
        {
            "algorithm": "opd",
            "teachers": {"t": {"base_url": "http://me:pw@127.0.0.1/v1", "model": "m"}},
        },
        r"a URL is logged, so it holds no key",
    ),
    (
        "logits of several teachers on ranks",
        {
            "algorithm": "gkd",
            "inputs": {"model": "base", "a": "big", "b": "big"},
            "teachers": {"a": {}, "b": {}},
            "teacher_routing": {"by": "field"},
            "limits": {"learner_ranks": 2},
        },
        r"ranks cannot compute logits of several teachers",
    ),
    (
        "the policy and a folder",
        {**OWN, "teachers": {"me": {"policy": {}, "model": "/nowhere"}}},
        r"keep one of `policy`, `model` and `base_url`",
    ),
    (
        "a template without its places",
        {**OWN, "teachers": {"me": {"policy": {"template": "{context}"}}}},
        r"the template needs the places \{prompt\} and \{context\}",
    ),
    (
        "metadata of no field",
        {**OWN, "teachers": {"me": {"policy": {"context": "metadata"}}}},
        r"`field` names a field of the problems' metadata",
    ),
    (
        "siblings of nobody",
        {**OWN, **SIBLING, "rewards": ["accuracy"], "num_generations": 1},
        r"rl\.teachers\.me\.policy\.context: a sibling is another response to the same prompt",
    ),
    (
        "siblings without a reward",
        {**OWN, **SIBLING},
        r"rl\.teachers\.me\.policy\.context: a sibling succeeds by its reward, and there is none",
    ),
    (
        "siblings of whitened rewards",
        {**OWN, **SIBLING, "rewards": ["accuracy"], "reward_whiten": "batch"},
        r"rl\.reward_whiten: a sibling succeeds by the reward itself",
    ),
    (
        "two copies that follow the policy",
        {
            **OWN,
            "teachers": {"me": {"policy": {}}},
            "kl": {"controller": {"name": "fixed", "coef": 0.1}, "ref_update": {}},
        },
        r"rl\.teachers: a stage has one copy of the policy that follows it",
    ),
    (
        "two rates of one copy",
        {
            **OWN,
            "teachers": {"a": {"policy": {}}, "b": {"policy": {"ema_rate": 0.5}}},
            "teacher_routing": {"by": "field"},
        },
        r"teachers with weights: ema are one model; give them one `ema_rate`",
    ),
    (
        "logits of the live policy on ranks",
        {
            **OWN,
            "teachers": {"me": {"policy": {"weights": "live"}}},
            "limits": {"learner_ranks": 2},
        },
        r"ranks cannot compute logits of the policy twice in one step",
    ),
    (
        "an environment",
        {**OWN, "teachers": {"me": {"policy": {}}}, "environment": "tools"},
        r"with an environment the prompt is not the problem's own",
    ),
    (
        "texts of a server",
        {"algorithm": "gkd", "distillation": "uld", "inputs": MODEL, "teachers": {"t": SERVER}},
        r"rl\.distillation: it reads the whole vocabulary of teacher .*; give the teacher's folder",
    ),
    (
        "texts of the policy itself",
        {**OWN, "distillation": "uld", "teachers": {"me": {"policy": {}}}},
        r"rl\.teachers\.me\.policy: the policy has its own tokens, and 'uld' is for a teacher of",
    ),
    (
        "texts in which others write",
        {"algorithm": "gkd", "distillation": "uld", "environment": "tools"},
        r"rl\.distillation: 'uld' compares a response that is one text, and with an environment",
    ),
    (
        "texts next to tokens",
        {"algorithm": "opd", "distillation": "uld"},
        r"rl\.advantage_transform: 'opd' reads what the teacher says of the policy's tokens, and",
    ),
]


@pytest.mark.parametrize(
    ("stage", "says"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, manager: PluginManager, stage: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(tmp_path, manager, **stage)


def test_a_teacher_of_another_vocabulary_is_refused_before_the_run(
    tmp_path: Path, manager: PluginManager
) -> None:
    policy = make_tiny_model(tmp_path / "policy")
    same, other = make_tiny_model(tmp_path / "same", seed=3), tmp_path / "other"
    make_tiny_model(other, tokenizer=make_tiny_tokenizer("\n0123456789", BARE_TEMPLATE))
    for folder, fits in ((same, True), (other, False)):
        run = resolved(
            tmp_path,
            manager,
            algorithm="opd",
            inputs={"model": "base"},
            teachers={"t": {"model": str(folder)}},
        )
        if fits:
            assert check_teachers(run.config, policy, None, manager) == []
            continue
        with pytest.raises(
            ResourceError,
            match=r"teacher 't' .*: its tokenizer has \d+ tokens and.*, or `distillation: uld`",
        ):
            check_teachers(run.config, policy, None, manager)


def test_a_teacher_of_another_vocabulary_is_for_a_loss_of_texts(
    tmp_path: Path, manager: PluginManager
) -> None:
    policy, own = make_tiny_model(tmp_path / "policy"), ChatTokenizer(make_tiny_tokenizer(), None)
    bytes_model = make_tiny_model(tmp_path / "bytes", tokenizer=make_byte_tokenizer())
    joined = make_tiny_tokenizer("\n0123456789", BARE_TEMPLATE)
    joined.backend_tokenizer.decoder = decoders.WordPiece()
    words = make_tiny_model(tmp_path / "words", tokenizer=joined)
    for folder, readable in ((bytes_model, True), (words, False)):
        run = resolved(
            tmp_path,
            manager,
            algorithm="gkd",
            distillation={"name": "uld", "merge": "observed"},
            inputs=MODEL,
            teachers={"t": {"model": str(folder)}},
        )
        if readable:
            assert check_teachers(run.config, policy, own, manager) == []
            continue
        with pytest.raises(ResourceError, match="words' is neither byte-level nor SentencePiece"):
            check_teachers(run.config, policy, own, manager)
