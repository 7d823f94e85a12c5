"""Configuration: the pydantic tree of a run, loading from YAML, resolution against plugins."""
