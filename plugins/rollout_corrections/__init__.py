"""Rollout corrections."""
