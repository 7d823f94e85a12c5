"""What a sandbox answers, which level it chooses, and how it behaves among others."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.sandbox import runner
from posttrain.core.sandbox.job import Job
from posttrain.core.sandbox.model import LEVELS, Level, SandboxResult, SandboxSettings, table
from posttrain.core.sandbox.runner import Interpreter, Probe, Sandbox
from tests.unit.sandbox.conftest import (
    HEAVY,
    SMALL,
    interpreter_at,
    running_with,
    wait_until_gone,
    wait_until_there,
)

Run = Callable[..., SandboxResult]
REPO = Path(__file__).resolve().parents[3]

# --- answers ------------------------------------------------------------------------------------


def test_exit_codes_and_outputs_come_back(run: Run) -> None:
    result = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)\n")
    assert (result.status, result.exit_code) == ("nonzero", 3)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert run("").status == "ok"
    assert run("def (").status == "nonzero"
    assert run("print('\udc80')").status == "nonzero"


def test_a_program_reads_what_it_is_given_and_files_beside_it(level: Level) -> None:
    box = Sandbox(level, interpreter_at(level), SMALL)
    source = "import sys, helper\nprint(helper.x, sys.stdin.read(), sys.argv[1:])\n"
    result = box.run(source, stdin=b"in", arguments=["a b"], files={"helper.py": b"x = 7"})
    assert result.stdout == b"7 in ['a b']\n"
    with pytest.raises(ValueError, match="plain names"):
        box.run("", files={"../x": b""})


@HEAVY
@pytest.mark.parametrize("closed", [False, True])
def test_folders_of_any_depth_are_removed(run: Run, level: Level, closed: bool) -> None:
    """10,000 folders in one another, made by moving into each; the path is far too long to use."""
    before = set(Path(tempfile.gettempdir()).glob("posttrain-sandbox-*"))
    depth = 10_000 if level == "rlimits" else 3_000  # the others count what may be in memory
    result = run(
        "import os\n"
        f"for _ in range({depth}):\n"
        "    os.mkdir('d'); open('f', 'w').close(); os.chdir('d')\n"
        + ("    os.chmod('..', 0)\n" if closed else "")
        + "print('deep')\n",
        cpu_s=20,
    )
    if not closed:
        assert result.stdout == b"deep\n" or level != "rlimits", result.stderr
    ends = time.monotonic() + 30  # the guard removes them after it has answered
    while left := set(Path(tempfile.gettempdir()).glob("posttrain-sandbox-*")) - before:
        assert time.monotonic() < ends, left
        time.sleep(0.1)


def test_runs_repeat_themselves(run: Run) -> None:
    assert (
        run("print(hash('a'), {'a', 'b', 'c'})").stdout
        == run("print(hash('a'), {'a', 'b', 'c'})").stdout
    )


def test_a_failure_of_the_sandbox_is_not_one_of_the_program(level: Level) -> None:
    interpreter_at(level)
    result = Sandbox(level, Interpreter("/usr/bin/no-such-python", ()), SMALL).run("print(1)")
    if level == "bubblewrap":  # the tool that sets limits inside reports it, as a program does
        assert result.status in ("error", "nonzero") and b"no-such-python" in result.stderr
    else:
        assert result.status == "error" and "No such file" in result.reason


def works(*command: str) -> bool:
    """Whether an unprivileged user can run this."""
    user = 65534 if os.getuid() == 0 else None
    try:
        done = subprocess.run(command, user=user, cwd="/", capture_output=True, timeout=30)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def test_no_level_is_missing_where_what_it_needs_works() -> None:
    # Otherwise a fault in a level would skip its tests.
    machine = os.uname()
    if machine.sysname != "Linux" or machine.machine not in ("x86_64", "aarch64"):
        pytest.skip("the sandbox needs Linux on x86-64 or aarch64")
    if shutil.which("python3", path="/usr/bin:/usr/local/bin") is None:
        pytest.skip("the system has no python3")
    expected = {"rlimits"}
    if works("unshare", "--user", "--net", "--mount", "--pid", "--ipc", "--fork", "true"):
        expected.add("namespaces")
    if works("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"):
        expected.add("bubblewrap")
    assert expected <= set(runner.levels_available())


# --- among others -------------------------------------------------------------------------------


def test_eight_at_once_do_not_take_each_others_processes(run: Run) -> None:
    source = (
        "import os, time\n"
        "for _ in range(9):\n    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n"
        "time.sleep(1)\nprint('all')\n"
    )
    limits = {"wall_s": 60.0}
    with ThreadPoolExecutor(8) as threads:
        box = Sandbox(run("").level, interpreter_at(run("").level), SMALL.model_copy(update=limits))
        results = list(threads.map(lambda _: box.run(source), range(8)))
    assert [(r.status, r.stdout, r.stderr) for r in results] == [("ok", b"all\n", b"")] * 8


def test_the_program_ends_with_the_process_that_asked_for_it(level: Level, token: str) -> None:
    code = (
        "from posttrain.core.sandbox.runner import *\n"
        f"box = Sandbox({level!r}, {interpreter_at(level)!r}, SandboxLimits(wall_s=60))\n"
        "source = 'import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(50)'\n"
        f"box.run(source, arguments=[{token!r}])\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, token])
    assert wait_until_there(token, 3)
    os.kill(asking.pid, signal.SIGKILL)
    asking.wait()
    assert wait_until_gone(token) == []


@pytest.fixture
def readable() -> Iterator[Path]:
    """A copy of the package in a folder that other users can read."""
    folder = Path(tempfile.mkdtemp(prefix="posttrain-test-"))
    shutil.copytree(REPO / "core" / "sandbox", folder / "sandbox")
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_an_unprivileged_user_is_as_well_protected(
    level: Level, readable: Path, token: str
) -> None:
    if os.getuid() != 0:
        pytest.skip("this is an unprivileged user: all other tests show it")
    source = (
        "import os, time\nstarted = 0\n"
        "try:\n"
        "    while started < 500:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n            time.sleep(60)\n            os._exit(0)\n"
        "        started += 1\n"
        "except OSError:\n    pass\n"
        "print(started, os.path.exists('/etc'), flush=True)\n"
    )
    found = interpreter_at(level)
    job = Job(
        level=level,
        python=found.path,
        prefixes=list(found.prefixes),
        bwrap=shutil.which("bwrap") or "",
        arguments=[token],
        files={"main.py": base64.b64encode(source.encode()).decode()},
        stdin=None,
        **SMALL.model_dump(),
    )
    start = runner.guard_start("guard", readable)
    alive, held = os.pipe()
    done = subprocess.run(
        [found.path, "-I", "-S", "-B", "-c", start, str(alive)],
        input=job.dump(),
        capture_output=True,
        user=65534,
        group=65534,
        extra_groups=[],
        env={},
        cwd="/",
        timeout=60,
        pass_fds=(alive,),
    )
    os.close(alive)
    os.close(held)
    answer = json.loads(done.stdout or b"{}")
    assert answer, done.stderr.decode()
    assert (answer["ended"], answer["error"], answer["left"]) == ("exit", "", 0)
    count, etc = base64.b64decode(answer["stdout"]).split()
    assert 8 <= int(count) <= 13 and etc == str(level == "rlimits").encode()
    assert running_with(token) == []


# --- the choice of a level ----------------------------------------------------------------------


def there(*levels: Level) -> Callable[[str | None], list[Probe]]:
    """A machine where only these levels work."""

    def probes(python: str | None = None) -> list[Probe]:
        one = Interpreter("/usr/bin/python3", ())
        return [Probe(name, one if name in levels else None, "not there") for name in LEVELS]

    return probes


def test_the_strongest_level_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "probe", there("rlimits", "namespaces", "bubblewrap"))
    assert Sandbox.best().level == "bubblewrap"
    monkeypatch.setattr(runner, "probe", there("rlimits", "namespaces"))
    assert Sandbox.best().level == "namespaces"


def test_a_level_that_hides_no_files_needs_the_users_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "probe", there("rlimits"))
    with pytest.raises(ResourceError, match=r"does not contain files.*apt-get install bubblewrap"):
        Sandbox.best()
    with pytest.raises(ValidationError, match="allow_weak: true"):
        SandboxSettings(min_level="rlimits")
    with pytest.raises(ResourceError, match="min_level: rlimits"):
        Sandbox.best(SandboxSettings(allow_weak=True))
    assert Sandbox.best(SandboxSettings(min_level="rlimits", allow_weak=True)).level == "rlimits"


def test_less_than_there_is_needs_the_users_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "probe", there("rlimits", "namespaces", "bubblewrap"))
    with pytest.raises(ConfigError, match="weaker than bubblewrap"):
        Sandbox.best(SandboxSettings(level="namespaces"))
    word = SandboxSettings(level="namespaces", allow_weak=True)
    assert Sandbox.best(word).level == "namespaces"


def test_a_level_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "probe", there("rlimits", "namespaces"))
    with pytest.raises(ResourceError, match=r"bubblewrap does not work here \(not there\)"):
        Sandbox.best(SandboxSettings(level="bubblewrap"))
    with pytest.raises(ResourceError, match="expected bubblewrap or better"):
        Sandbox.best(SandboxSettings(min_level="bubblewrap"))
    monkeypatch.setattr(runner, "probe", there())
    with pytest.raises(ResourceError, match="no sandbox .* works here"):
        Sandbox.best()


def test_the_page_shows_the_table_of_the_code() -> None:
    assert table() in (REPO / "docs" / "sandbox.md").read_text("utf-8")
