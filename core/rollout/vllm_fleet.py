"""Several vLLM servers of one model, used as one: started or given, asked, synced, stopped."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.contracts import EngineSetup
from posttrain.core.errors import RunError
from posttrain.core.rollout.replicas import (
    Json,
    Limits,
    LoopThread,
    Replica,
    is_healthy,
    post_to_all,
    serve_all,
    wait_until_ready,
)
from posttrain.core.rollout.vllm_server import (
    MODEL_NAME,
    PATH,
    ServerOptions,
    check_architecture,
    check_given_servers,
    get_json,
    read_scores,
    scoring_request,
    server_command,
    server_environment,
)
from posttrain.core.rollout.weight_sync import WeightFiles
from posttrain.core.runtime.processes import ServerProcess, free_ports

# A prompt whose log-probs all replicas must agree on after a sync.
PROBE = tuple(range(1, 17))
# float32, bfloat16: one build on one machine gives equal numbers, other kernels these differences.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
CACHE_RESET_TRIES = 40


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Timeouts (seconds) and counts; see the engine's config."""

    startup_timeout_s: float
    request_timeout_s: float
    requests: Limits


class VllmFleet:
    """Replicas that hold the same weights. Used by one thread at a time."""

    def __init__(self, urls: Sequence[str], limits: FleetLimits, sync_dir: Path | None) -> None:
        self.limits = limits
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-vllm-", dir=sync_dir))
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self.model_name = MODEL_NAME
        self.version = ""
        connections = 4 + max(1, len(urls)) * limits.requests.max_concurrency
        self.loop = LoopThread(limits.request_timeout_s, connections)

    def start_servers(
        self, count: int, setup: EngineSetup, options: ServerOptions, gpus: Sequence[str]
    ) -> None:
        for index, port in enumerate(free_ports(count)):
            process = ServerProcess(
                server_command(setup, options, port),
                server_environment(setup, options, gpus[index] if gpus else None),
                self.folder / f"server-{index}.log",
            )
            self.replicas.append(Replica(f"http://127.0.0.1:{port}", process))
        self._wait()

    def accept_given(self, setup: EngineSetup, lora: bool) -> None:
        """Wait for the servers given by URL and check that they fit the run."""
        self._wait()
        self.loop.run(check_given_servers(self.loop.client, self.replicas, setup, lora))
        served = self.loop.run(get_json(self.loop.client, self.replicas[0], "/v1/models"))
        self.model_name = str(served["data"][0]["id"])
        answers = self._post_to_alive("/collective_rpc", {"method": "posttrain_architecture"})
        for replica, answer in answers:
            if isinstance(answer, RunError):
                raise answer
            check_architecture(replica, answer["results"][0], setup)

    def _wait(self) -> None:
        client, timeout = self.loop.client, self.limits.startup_timeout_s
        self.loop.run(wait_until_ready(client, self.replicas, timeout))
        found = self.loop.run(get_json(client, self.replicas[0], "/version"))
        self.version = str(found["version"])

    def complete(self, requests: Sequence[Json]) -> list[Json]:
        return self.loop.run(
            serve_all(self.loop.client, self.replicas, PATH, requests, self.limits.requests)
        )

    def alive(self) -> list[Replica]:
        found = [replica for replica in self.replicas if replica.alive]
        if not found:
            ends = "\n".join(replica.obituary() for replica in self.replicas)
            raise RunError(f"no vLLM server is left: start the run again, which resumes\n{ends}")
        return found

    def load_weights(self, files: WeightFiles, dtype: str) -> None:
        """Give all replicas the weights in `files` and check that they hold them.

        A replica that has gone is left out, with a warning. Raises `RunError` when another one did
        not take them; it is given up, and so is any that could answer with old weights.
        """
        arguments = {"folder": str(files.folder), "digest": files.digest}
        body: Json = {"method": "posttrain_reload", "kwargs": arguments}
        self._all_or_none("weight sync", "/collective_rpc", body)
        self._reset_caches()
        self._check_agreement(dtype)

    def load_adapter(self, name: str, folder: Path, dtype: str) -> None:
        """Load the adapter in `folder` as model `name` everywhere, and use it."""
        body: Json = {"lora_name": name, "lora_path": str(folder)}
        self._all_or_none("adapter sync", "/v1/load_lora_adapter", body)
        self.model_name = name
        self._check_agreement(dtype)

    def unload_adapter(self, name: str) -> None:
        """Let the servers forget the name of an adapter that no request asks for again."""
        self._post_to_alive("/v1/unload_lora_adapter", {"lora_name": name})

    def _all_or_none(self, what: str, path: str, body: Json) -> None:
        failed: list[str] = []
        answers = self._post_to_alive(path, body)
        for replica, answer in answers:
            if isinstance(answer, RunError):
                gone = not self.loop.run(is_healthy(self.loop.client, replica))
                if gone:
                    replica.lose(str(answer))
                else:
                    failed.append(str(answer))
            else:
                errors = [r["error"] for r in answer.get("results", []) if "error" in r]
                failed += [f"{replica.url}: {error}" for error in errors]
        self.alive()
        if failed:
            raise RunError(
                f"{what} failed at {len(failed)} of {len(answers)} vLLM server(s): {failed[0]}"
            )

    def _reset_caches(self) -> None:
        """Keys and values of the old weights must not serve the new ones."""
        for _ in range(CACHE_RESET_TRIES):
            answers = self._post_to_alive("/reset_prefix_cache", {})
            good = [not isinstance(a, RunError) and a.get("success") for _, a in answers]
            if all(good):
                return
            time.sleep(0.25)  # requests that were given up still hold blocks
        raise RunError("a vLLM server kept its prefix cache after a weight sync: restart the run")

    def _check_agreement(self, dtype: str) -> None:
        """Replicas with the same weights give the same log-probs."""
        replicas = self.alive()
        request = scoring_request(self.model_name, PROBE)
        answers = self._post_to_alive(PATH, request)
        rows = []
        for _, answer in answers:
            if isinstance(answer, RunError):
                raise answer
            rows.append(read_scores(answer, PROBE))
        for replica, row in zip(replicas[1:], rows[1:], strict=True):
            gap = max(abs(a - b) for a, b in zip(rows[0], row, strict=True))
            if not gap <= PROBE_TOLERANCE[dtype]:
                raise RunError(
                    f"after a sync the vLLM servers {replicas[0].url} and {replica.url} differ by "
                    f"{gap:.4f} nats on the same tokens, expected at most "
                    f"{PROBE_TOLERANCE[dtype]}: one of them has other weights; restart the run"
                )

    def _post_to_alive(self, path: str, body: Json) -> list[tuple[Replica, Json | RunError]]:
        replicas = self.alive()
        answers = self.loop.run(post_to_all(self.loop.client, replicas, path, body))
        return list(zip(replicas, answers, strict=True))

    def close(self) -> None:
        """Stop the servers that are ours. Logs stay when one was lost."""
        self.loop.close()
        processes = [r.process for r in self.replicas if r.process is not None]
        for process in processes:
            process.begin_stop()
        for process in processes:
            process.stop()
        if all(replica.alive for replica in self.replicas):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
        self.replicas = []
