"""Asking a model behind an HTTP endpoint for a judgement: requests, limits, cache."""
