"""The flows of the deployments: a request is checked, and its pipeline runs below it as a subflow.

Each run is a process of its own, which imports this module. What `posttrain run` prints goes to
the run's log in Prefect. Annotations here are types, not strings: Prefect checks parameters against
them also where it loaded the file without a name.
"""

import signal
from contextlib import AbstractContextManager
from uuid import UUID

from prefect import flow, flow_engine, get_client
from prefect.client.schemas.objects import State
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Failed

from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.errors import PosttrainError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.redaction import redact_error, redact_output
from posttrain.core.runtime.processes import owner
from posttrain.core.store.approval import ApprovalNeeded
from posttrain.core.store.artifacts import RunResult
from posttrain.pipelines.deploy.forms import EvaluateRequest, RunRequest
from posttrain.pipelines.deploy.suspension import cancelled_before, take_answers, wait_for_answer
from posttrain.pipelines.run.checks import check_inputs, folders, resolve_configs, shared_store
from posttrain.pipelines.run.execute import RunOptions, execute
from posttrain.pipelines.run.flow_records import for_the_pages, leave_results
from posttrain.pipelines.run.progress import LogReporter
from posttrain.pipelines.services.servers import PROCESS, PROCESS_STATE
from posttrain.pipelines.services.shared_servers import require_shared_mlflow


def keep_lease(
    lease_id: UUID, lease_duration: float, raise_on_lease_renewal_failure: bool = False
) -> AbstractContextManager[None]:
    """Hold a deployment's slot; a server that is away for minutes does not end the run for it.

    Prefect's own ends the run where it cannot renew the lease. Another run of the deployment may
    then begin; the locks of a home keep two runs from computing one stage.
    """
    return maintain_concurrency_lease(lease_id, lease_duration)


# Prefect has no setting for it, and its module does not export the name.
setattr(flow_engine, "maintain_concurrency_lease", keep_lease)  # noqa: B010


@flow(name="train", persist_result=False)
def train(request: RunRequest) -> State[None] | None:
    """Run the pipeline of a config. Stages that were computed before are reused."""
    return _run(request)


@flow(name="evaluate", persist_result=False)
def evaluate(request: EvaluateRequest) -> State[None] | None:
    """Measure a model on the held-out problems of a config's task."""
    return _run(request)


@flow(name="continual", persist_result=False)
def continual(request: RunRequest) -> State[None] | None:
    """Run the pipeline of a config again and again, on a schedule: new data make new stages."""
    return _run(request)


def note_process() -> None:
    """Say on the server which process runs this, so that a run that was killed is found."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run_id = context.flow_run.id
    with for_the_pages("the process of the run"), get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state_id
        client.update_flow_run_labels(run_id, {PROCESS: owner(), PROCESS_STATE: str(state)})


def _run(request: RunRequest) -> State[None] | None:
    """One request from its form to its record; what a user can fix fails with one sentence."""
    redact_output()
    note_process()
    cancelled = cancelled_before()
    if cancelled is not None:
        return Cancelled(message=f"the run that asked, {cancelled}, was cancelled or deleted")
    try:
        require_shared_mlflow()
        resolved, manager = resolve_configs(request.paths(), request.all_overrides())
        check_inputs(resolved, manager)
        leave_results(_execute(request, resolved, manager))
    except PosttrainError as error:
        get_run_logger().error(str(error))
        return Failed(message=str(error))
    except Exception as error:  # Prefect stores and shows its message
        redact_error(error)
        raise
    return None


def _execute(request: RunRequest, resolved: ResolvedRun, manager: PluginManager) -> RunResult:
    """The pipeline in this process. A stop ends as Prefect's own, so that it cancels the run."""
    home, store = folders(request.home_folder(), shared_store())
    options = RunOptions(home, store, fresh=request.fresh, no_cache=request.no_cache)
    reporter = LogReporter(get_run_logger())
    take_answers(home)
    try:
        while True:
            try:
                return execute(resolved, manager, options, reporter)
            except ApprovalNeeded as needed:
                wait_for_answer(needed, home)
    except KeyboardInterrupt as stop:
        raise TerminationSignal(signal.SIGTERM) from stop
