"""Preference losses."""
