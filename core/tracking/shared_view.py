"""MLflow's shared views: a layout of charts as a tag of the experiment, and the address of it."""

from __future__ import annotations

import base64
import zlib

TAG = "mlflow.sharedViewState."


def name_of(kind: str) -> str:
    """The view of all stages of a kind in an experiment."""
    return f"posttrain-{kind}"


def packed(state: str) -> str:
    """The tag's value: compressed as MLflow's page compresses it, because tags have a limit."""
    return "deflate;" + base64.b64encode(zlib.compress(state.encode())).decode()


def place(experiment_id: str, name: str) -> str:
    """The address of a view below that of the server."""
    return f"experiments/{experiment_id}/runs?viewStateShareKey={name}&compareRunsMode=CHART"
