"""Config as Prefect deployments: served, scheduled, suspended at gates."""
