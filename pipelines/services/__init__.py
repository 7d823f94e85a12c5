"""PostgreSQL, Prefect, MLflow and a worker as processes of this machine."""
