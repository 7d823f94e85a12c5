"""Divergences from a teacher."""
