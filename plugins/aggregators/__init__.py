"""Loss aggregation modes."""
