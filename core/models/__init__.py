"""Model sources, loading and saving."""
