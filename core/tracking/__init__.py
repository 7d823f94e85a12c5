"""MLflow: runs, metrics, lineage, plots.

Importing this package only sets defaults of the environment: MLflow reads them when it is imported
itself, and any of its modules may be the first to do that. A value set by the user wins.
"""

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # we show links ourselves
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # also quiets alembic's migrations
