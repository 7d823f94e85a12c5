"""`posttrain export`: a model as a Hugging Face folder, an adapter, GGUF files; to a hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from posttrain.pipelines.cli.chat import ModelArgument
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

EPILOG = (
    "Examples:\n\n"
    "  posttrain export 3f2a9c ./my-model\n\n"
    "  posttrain export 3f2a9c/sft ./adapter --adapter\n\n"
    "  posttrain export models:/quickstart@candidate ./gguf --gguf f16 --gguf q8_0\n\n"
    "  HF_TOKEN=... posttrain export 3f2a9c ./my-model --hub me/my-model --license apache-2.0\n\n"
    "README.md in the folder is the model card: base model, training, data, results with their "
    "intervals, licences, config. Without --adapter a LoRA model is exported merged. --gguf is for "
    "models of the types llama, qwen2 and qwen3. --hub makes a private repository unless --public "
    "is given. attestation.json has the digests that `posttrain verify DIR` compares.\n\n"
    + EPILOG_CODES
)


@command(store=True)
def export(
    context: CommandContext,
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, for peft and vLLM.")
    ] = False,
    gguf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE", help="A GGUF file instead, for llama.cpp: f16 or q8_0, or both in turn."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Title.  \\[default: of the run and its stage]")
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", help="Licence in the card.  \\[default: that of the base model, if known]"
        ),
    ] = None,
    hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder; needs HF_TOKEN.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written and uploaded, and end.")
    ] = False,
) -> Result:
    """Write a model to a folder with a model card made from its run, and upload it."""
    from posttrain.core.store.manifests import ATTESTATION
    from posttrain.pipelines.run.model_reference import find_model
    from posttrain.pipelines.using import export as exporting

    if hub is not None:
        exporting.check_hub(hub, needs_token=not dry_run)
    found = find_model(model, context.home, context.store)
    options = exporting.ExportOptions(
        out=out.expanduser().resolve(),
        name=name or (f"{found.run.name}-{found.stage}" if found.run else Path(found.given).name),
        adapter=adapter,
        gguf=exporting.gguf_types(gguf or ()),
        licence=licence,
    )
    exporting.check(found, options)
    say = context.say
    say(f"{found.origin}, digest {found.digest[:12]}")
    values = {"model": model, "digest": found.digest, "folder": str(options.out), "hub": hub}
    if dry_run:
        planned = [path.name for path in exporting.sources(found, options)]
        planned += [*map(options.gguf_name, options.gguf), exporting.CARD]
        if exporting.attestation_of(found, context.home, context.store) is not None:
            planned.append(ATTESTATION)
        say(f"would write to {options.out}: {', '.join(planned)}")
        if hub is not None:
            say(f"would upload them to {hub}, {'public' if public else 'private'}")
        return Result(values | {"status": "dry run", "files": planned})
    from posttrain.core.models.quiet import quiet_libraries
    from posttrain.pipelines.using.model_card import gather

    quiet_libraries()
    facts = gather(found, context.home, context.store)
    statement = exporting.attestation_of(found, context.home, context.store)
    files = exporting.export(found, facts, options, say, statement)
    say(f"{options.out}: {exporting.names(files)}")
    say(exporting.attested(options.out, statement))
    page = None
    if hub is not None:
        page = exporting.upload(options.out, hub, private=not public)
        say(f"uploaded: {page}")
    return Result(
        values | {"status": "ok", "files": [asdict(file) for file in files], "page": page}
    )
