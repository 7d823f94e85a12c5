"""A teacher behind a vLLM server says what the same weights say in the trainer.

`tests/unit/teaching/test_server.py` has the same of a small server, which starts at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from posttrain.core.contracts import PromptGroup
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.rollout.vllm_server import ENTRY
from posttrain.core.runtime.processes import ServerProcess, free_ports
from posttrain.core.training.teacher_pass import candidate_pass
from posttrain.core.training.teacher_server import TeacherServer
from posttrain.core.training.updates import no_check
from posttrain.core.types import Problem, SamplingParams
from posttrain.plugins.engines.vllm_server import VllmServerEngine
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config
from tests.helpers.rollouts import load_tiny, ragged_batch

LONGEST, CANDIDATES = 64, 24  # more candidates than vLLM gives unless asked
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, init_std=0.3)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server as `vllm serve` starts it, with what docs/distillation.md says of a teacher."""
    if reason := VllmServerEngine.unavailable_reason():
        pytest.skip(reason)
    (port,) = free_ports(1)
    command = [
        *(sys.executable, "-c", ENTRY, "--model", str(folder), "--served-model-name", "big"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(LONGEST), "--max-logprobs", str(CANDIDATES)),
        *("--kv-cache-memory-bytes", str(2**28)),
    ]
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    process = ServerProcess(command, env, folder / "vllm.log")
    address = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(trust_env=False) as client:
            for _ in range(600):
                assert process.exit_code is None, process.log_tail(40)
                try:
                    if client.get(f"{address}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)
        yield f"{address}/v1"
    finally:
        process.stop()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_vllm_says_what_the_same_weights_say(folder: Path, url: str) -> None:
    """Slow: a start of vLLM of its own."""
    batch = ragged_batch([5, 9, 3], group_size=3)
    server, tokenizer = TeacherServer(url, "big", "t"), ChatTokenizer.load(folder)
    server.check(tokenizer, top_k=CANDIDATES, longest=LONGEST - 1)
    rows, mask = [torch.arange(len(batch))], batch.response_mask.bool()
    close = {"rtol": 0, "atol": TOLERANCE}
    for top_k in (0, CANDIDATES):
        found = server.scores(batch, top_k)
        wanted = candidate_pass(
            load_tiny(folder, torch.float32), batch, rows, top_k=top_k, temperature=1.0
        )
        assert found.logprobs[~mask].isnan().all()
        torch.testing.assert_close(found.logprobs[mask], wanted.logprobs[mask], **close)
        if not top_k:
            assert found.topk_ids is None
            continue
        assert found.topk_ids is not None and found.topk_logprobs is not None
        assert wanted.topk_ids is not None and wanted.topk_logprobs is not None
        values = wanted.topk_logprobs[mask]
        torch.testing.assert_close(found.topk_logprobs[mask], values, **close)
        # Which one comes first of two that are equal up to rounding is not said.
        apart = (values[:, 1:] - values[:, :-1]).abs() > 2 * TOLERANCE
        edge = torch.ones(len(values), 1, dtype=torch.bool)
        alone = torch.cat([edge, apart], dim=1) & torch.cat([apart, ~edge], dim=1)
        assert alone.double().mean() > 0.8
        assert torch.equal(found.topk_ids[mask][alone], wanted.topk_ids[mask][alone])
    for asked, says in (
        ({"longest": LONGEST}, "start it with --max-model-len 65"),
        ({"top_k": CANDIDATES + 1}, "HTTP 400.*: check how it was started"),
    ):
        with pytest.raises(ResourceError, match=says):
            server.check(tokenizer, **asked)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("shared_prefect")
def test_vllm_samples_the_answers_that_a_student_learns_from(
    folder: Path, url: str, tmp_path: Path
) -> None:
    server, tokenizer = TeacherServer(url, "big", "t"), ChatTokenizer.load(folder)
    server.check_sampling(tokenizer)
    problems = [Problem(text, f"{text}?", "", "") for text in ("2", "3+4")]
    prompts = [PromptGroup(p, tokenizer.encode_prompt(p)) for p in problems]
    params = SamplingParams(max_tokens=6, num_generations=3, seed=5)
    groups = server.sample(prompts, params, ends=tokenizer.end_token_ids, check=no_check)
    model = load_tiny(folder, torch.float32)
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group.completions) == 3
        for completion in group.completions:
            ids = torch.tensor([[*prompt.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt.prompt_ids) - 1 : -1]
            own = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt.prompt_ids) :, None])
            said = torch.tensor(completion.logprobs)
            torch.testing.assert_close(said, own[:, 0], rtol=0, atol=TOLERANCE)

    config = tiny_config(make_tiny_model(tmp_path / "student", seed=2))
    config["model"]["max_model_len"] = LONGEST - 1
    config["stages"] = {
        "student": {
            "kind": "distill",
            "inputs": {"model": "base"},
            "teachers": {"t": {"base_url": url, "model": "big"}},
            "on_policy_share": 0,
            "seq_kd": True,
            "distillation": {"name": "gkd", "support": "topk", "of": "teacher", "top_k": 24},
            "steps": 4,
            "prompts_per_step": 8,
            "micro_batch_size": 8,
            "generation": {"max_response_length": 6},
            "optimizer": {"learning_rate": 3.0e-3},
            "evaluate_every": 0,
        },
        "record": {
            "kind": "record_teacher",
            "inputs": {"model": "base"},
            "teacher": {"base_url": url, "model": "big"},
            "num_problems": 16,
            "answers": "sampled",
            "top_k": CANDIDATES,
            "generation": {"max_response_length": 6},
        },
        "offline": {
            "kind": "distill",
            "inputs": {"model": "base", "recorded": "record"},
            "distillation": {"name": "gkd", "top_k": CANDIDATES},
            "steps": 2,
            "prompts_per_step": 8,
            "generation": {"max_response_length": 6},
            "evaluate_every": 0,
        },
    }
    path, home = write_config(tmp_path / "run.yaml", config), prepared(tmp_path / "home")
    done = run_command("run", str(path), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["student"]["metrics"]["distil/on_policy"] == 0
    assert done.result["stages"]["student"]["metrics"]["distil/teacher_mass"] > 0.5
    assert done.result["stages"]["record"]["metrics"]["record/rows"] == 16
    assert done.result["stages"]["offline"]["metrics"]["distil/teacher_mass"] > 0.5
