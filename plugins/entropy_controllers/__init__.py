"""Entropy coefficient controllers."""
