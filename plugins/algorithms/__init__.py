"""Presets: one plugin per axis."""
