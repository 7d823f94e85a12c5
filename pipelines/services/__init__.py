"""PostgreSQL, the Prefect server, the MLflow server and a worker, as processes of this machine."""
