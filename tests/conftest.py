"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import settings

from posttrain.core.runtime.startup import bound_waiting

bound_waiting()  # before torch is loaded, here and in what tests start

from posttrain.core.plugin_manager import PluginManager  # noqa: E402

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

    from tests.helpers.services import Services
    from tests.helpers.two_nodes import TwoNodes

T = TypeVar("T")
REPO = Path(__file__).resolve().parents[1]
GOLDEN_TEST = "test_the_peer_gives_the_same_numbers"
# So that `from tests.helpers import ...` works however pytest was started.
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.order import TOGETHER, rank, unit_of  # noqa: E402

# A shell ignores interrupts in what it starts in the background, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

MLFLOW_SERVERS = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
THREADS = os.environ.get("OMP_NUM_THREADS", "")
GIVEN_SERVERS = {name: os.environ[name] for name in MLFLOW_SERVERS if name in os.environ}

WORKERS: list[object] = []
"""This process's configuration, if it is a worker of xdist."""
# Registered first, so called last: taking apart all that is loaded takes a worker seconds.
atexit.register(lambda: os._exit(0) if WORKERS else None)

# The first call of a torch kernel can take more than a second.
settings.register_profile("posttrain", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("posttrain")


def pytest_configure(config: pytest.Config) -> None:
    """A process that a test starts has the variables of a worker, but is none."""
    if hasattr(config, "workerinput"):
        WORKERS.append(config)


@pytest.fixture(scope="session")
def manager() -> PluginManager:
    """Every installed plugin, loaded through entry points as in a real run."""
    return PluginManager()


RUNNING: dict[str, Any] = {}
"""What fixtures of `TOGETHER` have started, by their names."""
ENDS = {name: ExitStack() for name in TOGETHER}


def kept_running(name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
    """What fixture `name` has started, until a file follows that does not use it."""
    if name not in RUNNING:
        RUNNING[name] = ENDS[name].enter_context(start())
        ENDS[name].callback(RUNNING.pop, name)
    started: T = RUNNING[name]
    return started


@pytest.fixture(scope="module")
def services() -> Services:
    """Real PostgreSQL, Prefect, MLflow and a worker."""
    from tests.helpers.services import running_services

    return kept_running("services", running_services)


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Prefect server for as long as the tests run."""
    from tests.helpers.prefect_server import running_prefect

    with running_prefect(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture(scope="module")
def shared_prefect(prefect_url: str) -> Iterator[None]:
    """The commands of this file report to that server, instead of starting one each, and find the
    libraries loaded (`tests.helpers.warm`). Files without this start all as users do."""
    from tests.helpers.pipeline import REPORTS_TO

    REPORTS_TO["PREFECT_API_URL"] = prefect_url
    yield
    REPORTS_TO.clear()


@pytest.fixture
def reports_to_shared_prefect(prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for one test of a file whose others start a server of their own."""
    from tests.helpers.pipeline import REPORTS_TO

    monkeypatch.setitem(REPORTS_TO, "PREFECT_API_URL", prefect_url)


@pytest.fixture(scope="session")
def verifiers_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python of a virtual environment that has verifiers."""
    from tests.helpers.verifiers_sets import venv_with_verifiers

    python = venv_with_verifiers(tmp_path_factory.mktemp("verifiers"))
    if not python:
        pytest.skip("verifiers cannot be installed here")
    return python


@pytest.fixture(scope="module", params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def rank_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where ranks run, with a Ray cluster of this process for those that need one."""
    if request.param != "ray":
        yield "processes"
        return
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'posttrain[ray]'")
    from posttrain.core.cluster.on_ray import connection

    connection.join("local")
    yield "ray"
    connection.leave()


@pytest.fixture(scope="module")
def running_nodes(tmp_path_factory: pytest.TempPathFactory) -> TwoNodes:
    """A Ray cluster of two nodes."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'posttrain[ray]'")
    from tests.helpers.two_nodes import two_nodes

    return kept_running("running_nodes", lambda: two_nodes(tmp_path_factory.mktemp("nodes")))


@pytest.fixture(scope="module")
def nodes(running_nodes: TwoNodes) -> Iterator[TwoNodes]:
    """The same, joined by this process for the tests of a file."""
    from tests.helpers.two_nodes import joined

    with joined(running_nodes) as cluster:
        yield cluster


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget what the test before set for the whole process.

    MLflow keeps its server, in the environment too, where a command finds it and takes it for the
    user's. A command in this process gives torch all cores; next to other workers, threads that
    wait for each other take several times the processor time.
    """
    if THREADS.isdecimal() and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(THREADS))
    if (mlflow := sys.modules.get("mlflow")) is not None:
        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
    for name in MLFLOW_SERVERS:
        os.environ.pop(name, None)
    os.environ.update(GIVEN_SERVERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is there before the first test out of all collections of garbage.

    Thousands of tests and their modules are millions of objects. Engines and learners collect
    garbage when they end, and walked through all of it each time: a second or two. Between that,
    collections are seldom: with Python's own thresholds they took a twentieth of the tests' time.
    """
    gc.disable()  # nothing that is loaded becomes garbage
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first (`tests.helpers.order`)."""
    items.sort(key=lambda item: rank(item.nodeid.split("::", 1)[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Workers get files, as by `--dist loadfile`, but all that use one cluster go to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByUnit(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return ByUnit(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file has loaded, when its last fixture is gone."""
    if nextitem is None or nextitem.path != item.path:
        for name, started in ENDS.items():
            if name not in getattr(nextitem, "fixturenames", ()):
                started.close()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries complain at exit about what a collection cannot reach."""
    if not WORKERS:
        gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many of the peers' recorded answers our plugins give: one line in addition to pytest's
    own.

    It stands here since the process that sums up several workers reads no conftest below `tests`.
    """

    def count(outcome: str) -> int:
        reports = terminalreporter.stats.get(outcome, [])
        return sum(GOLDEN_TEST in r.nodeid and r.when == "call" for r in reports)

    passed, failed = count("passed"), count("failed")
    if passed + failed:
        terminalreporter.write_line(f"golden cases: {passed} of {passed + failed} equal the peers'")
