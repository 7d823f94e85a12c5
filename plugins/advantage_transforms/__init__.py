"""Transforms of advantages."""
