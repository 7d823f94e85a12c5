"""One pipeline run from start to end: assembly, Prefect flow, gates, progress, summary."""
