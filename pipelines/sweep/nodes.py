"""The branches of a sweep in processes on the nodes of a Ray cluster."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.config.cluster_section import ClusterSection, RaySection
from posttrain.core.errors import ConfigError, PosttrainError, ResourceError
from posttrain.core.redaction import redacted
from posttrain.pipelines.run.cluster import address_of
from posttrain.pipelines.services.cluster import require_ray, token_file
from posttrain.pipelines.sweep.places import STOP_S, BranchRequest, Messages, Place
from posttrain.pipelines.sweep.processes import WORKER
from posttrain.pipelines.sweep.record import sweep_folder

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.programs import NodeProgram
    from posttrain.core.config.schema import RunConfig
    from posttrain.pipelines.sweep.branches import Sweep
    from posttrain.pipelines.sweep.sweeping import SweepOptions

OF_CONFIG = "config"
"""In place of an address: the cluster that the config names."""
SERVERS = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL")
FIELDS = "--parallel or limits.num_threads"


class Nodes:
    """Processes on the nodes of the cluster at `address`, which this process joins.

    Each takes `limits.num_threads` CPUs, one without, and a GPU where nodes have some. A config
    with a section `cluster` has its ranks there: then the branch's own process takes nothing.
    """

    def __init__(self, address: str, sweep: Sweep, options: SweepOptions) -> None:
        require_ray()
        from posttrain.core.cluster.on_ray import connection

        config = sweep.loaded.config
        token = token_file(options.home)
        connection.join(_address(address, config), token if token.is_file() else None)
        cluster = config.cluster or ClusterSection()
        self.limit_s = cluster.ray.start_timeout_s
        self.bundle: dict[str, float] = {}
        try:
            self.most = self._room(config, options)
        except PosttrainError:
            connection.leave()
            raise
        self.most = min(self.most, max(1, len(sweep.branches)))
        self._home, self._folder = options.home, sweep_folder(options.home, sweep.name)
        self._opened = 0

    def _room(self, config: RunConfig, options: SweepOptions) -> int:
        """How many branches run at once."""
        from posttrain.core.cluster.on_ray import connection

        if config.cluster is not None:  # ranks that wait for one another's CPUs would not end
            return options.parallel or 1
        found = connection.nodes()
        self.bundle = {"CPU": float(config.limits.num_threads or 1)}
        if any(node.gpus for node in found):
            self.bundle["GPU"] = 1.0
        room = connection.room(self.bundle, found)
        if room < (options.parallel or 1):
            each = " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
            raise ResourceError(
                f"the Ray cluster has room for {room} branches with {each} each (its nodes: "
                f"{', '.join(map(str, found))}): add nodes, or lower {FIELDS}"
            )
        return options.parallel or room

    def open(self, messages: Messages) -> Place:
        """As in `Placement`."""
        self._opened += 1
        log = self._folder / f"worker-{self._opened}.log"
        return NodePlace(self.bundle, self.limit_s, self._home, log, messages)

    def close(self) -> None:
        """As in `Placement`."""
        from posttrain.core.cluster.on_ray import connection

        connection.leave()


class NodePlace(Place):
    """A process on a node; it stays for the whole sweep."""

    def __init__(
        self,
        bundle: dict[str, float],
        limit_s: float,
        home: Path,
        log: Path,
        messages: Messages,
    ) -> None:
        from posttrain.core.cluster.on_ray.programs import NodeProgram

        super().__init__(messages)
        self.is_ready, self._log, self._how = False, log, ""
        self._program: NodeProgram = NodeProgram(bundle, limit_s, FIELDS)
        self._thread = threading.Thread(target=self._follow, args=(home,), daemon=True)
        self._thread.start()

    def _follow(self, home: Path) -> None:
        """Pass on what it says until its end."""
        from posttrain.core.cluster.on_ray.programs import Program

        servers = {name: os.environ[name] for name in SERVERS if os.environ.get(name)}
        # An address with a password is not sent: then the nodes' own variables count.
        servers = {name: value for name, value in servers.items() if redacted(value) == value}
        try:
            program = Program(WORKER, [str(home)], servers, Path.cwd(), self._log)
            self._program.start(program)
            self.is_ready = True
            self.messages.put((self, {"event": "ready"}))
            code: int | None = None
            while code is None:
                lines, code = self._program.read()
                for line in lines:
                    self.messages.put((self, json.loads(line)))
            self._how = f"its process on node {self._program.node} ended (exit code {code})"
        except PosttrainError as error:
            self._how = str(error)
        self.is_ready = False
        self.messages.put((self, None))

    def begin(self, request: BranchRequest) -> None:
        """As in `Place`."""
        self._program.write(json.dumps({"do": "run", **request.model_dump(mode="json")}))

    def stop_run(self) -> None:
        """As in `Place`."""
        if self.branch is not None:
            self._program.write(json.dumps({"do": "stop", "key": self.branch.key}))

    def interrupt(self) -> None:
        """As in `Place`."""
        if self.is_ready:
            self._program.close()

    def end(self) -> None:
        """As in `Place`."""
        if self.is_ready:
            self._thread.join(STOP_S)
        self.kill()

    def kill(self) -> None:
        """As in `Place`."""
        self._program.kill()

    def how_it_ended(self) -> str:
        """As in `Place`."""
        return self._how


def _address(given: str, config: RunConfig) -> str:
    """HOST:PORT of the cluster. Raises `ConfigError` where none is named."""
    if given == OF_CONFIG:
        if config.cluster is None or config.cluster.ray.address == "local":
            raise ConfigError(
                "--ray config: the config names no cluster of several nodes in cluster.ray.address;"
                " give --ray HOST:PORT"
            )
        return address_of(config)
    try:
        section = RaySection(address=given)
    except ValueError:
        section = None
    if section is None or given == "local":
        raise ConfigError(
            f"--ray {given[:100]}: expected HOST:PORT of a Ray cluster, env for the one that "
            f"POSTTRAIN_RAY_ADDRESS names, or {OF_CONFIG} for the config's own"
        )
    return address_of(config.model_copy(update={"cluster": ClusterSection(ray=section)}))
