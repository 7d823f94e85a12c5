"""Prefect flows, stages and the command line."""
