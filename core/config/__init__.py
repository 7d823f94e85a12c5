"""The YAML of a run as one pydantic tree: loading, presets, the DAG, checks of combinations."""
