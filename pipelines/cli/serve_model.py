"""`posttrain serve-model`: an OpenAI-compatible server of one model."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import Annotated, Literal

import typer

from posttrain.core.errors import ConfigError, ResourceError
from posttrain.pipelines.cli.chat import DtypeOption, MaxModelLenOption, ModelArgument
from posttrain.pipelines.cli.common import EXIT_INTERRUPTED, CommandContext, command, interrupt
from posttrain.pipelines.services.listening import HOST, check_port

KEY_VARIABLE = "POSTTRAIN_API_KEY"
LOCAL = (HOST, "localhost", "::1")
EPILOG = (
    "Examples:\n\n"
    "  posttrain serve-model 3f2a9c\n\n"
    "  posttrain serve-model 3f2a9c/sft --engine builtin --port 8001 --name my-model\n\n"
    "  POSTTRAIN_API_KEY=... posttrain serve-model models:/quickstart@candidate --host 0.0.0.0\n\n"
    "Routes: /v1/models, /v1/chat/completions, /v1/completions (both stream), /health. auto is "
    "vLLM where it is installed, else the built-in engine, which answers one request at a time. "
    "The command that starts vLLM by hand is printed. Another host than 127.0.0.1 needs a key. "
    "Ctrl-C or SIGTERM stops the server."
)


@command(store=True, as_json=False)
def serve_model(
    context: CommandContext,
    model: ModelArgument,
    engine: Annotated[
        Literal["auto", "builtin", "vllm"], typer.Option(help="What computes.")
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests.  \\[default: as it was given]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="Key that requests must bring; the variable keeps it out of lists of processes.",
        ),
    ] = None,
    dtype: DtypeOption = None,
    max_model_len: MaxModelLenOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command that serves it, and end.")
    ] = False,
) -> None:
    """Serve a model to OpenAI's clients, on this machine alone unless --host says more."""
    if host not in LOCAL and not api_key:
        raise ConfigError(
            f"--host {host} lets other machines in: set {KEY_VARIABLE} (or --api-key) to a key "
            f"that requests must bring, or leave --host out for {HOST}"
        )
    from posttrain.pipelines.run.model_reference import find_model
    from posttrain.pipelines.using.speaker import unread_config
    from posttrain.pipelines.using.vllm_command import (
        missing_vllm,
        vllm_command,
        vllm_environment,
    )

    found = find_model(model, context.home, context.store)
    name = name or model
    missing = missing_vllm()
    if engine == "vllm" and missing:
        raise ResourceError(f"--engine vllm: {missing}; --engine builtin serves without it")
    by_hand = vllm_command(found, name, host, port, dtype, max_model_len)
    print(f"{found.origin}, digest {found.digest[:12]}: {found.path}", flush=True)
    if note := unread_config(found):
        print(note, file=sys.stderr, flush=True)
    key = "VLLM_API_KEY=... " if api_key else ""  # without it vLLM would let everybody in
    print(f"by hand, with vLLM: {key}{shlex.join(['python', *by_hand[1:]])}", flush=True)
    if dry_run:
        return
    check_port(port, "--port", "the model")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    if engine != "builtin" and not missing:
        print(f"starting vLLM at {url} (model '{name}')", flush=True)
        # vLLM takes this process's place, so that signals are its own.
        os.execve(by_hand[0], by_hand, vllm_environment(api_key))
    if engine == "auto":
        print(f"built-in engine: {missing}", flush=True)
    signal.signal(signal.SIGTERM, interrupt)  # while the model is loaded; then uvicorn's own
    try:
        from posttrain.core.plugin_manager import PluginManager
        from posttrain.pipelines.using.serving import build_app, serve
        from posttrain.pipelines.using.speaker import Speaker

        speaker = Speaker(found, PluginManager(), max_model_len=max_model_len, dtype=dtype)
        app = build_app(speaker, name, api_key)
        ready = f"serving '{name}' at {url}; Ctrl-C stops"
        serve(app, host, port, lambda: print(ready, flush=True))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
