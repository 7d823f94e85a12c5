"""Comparing what was trained: algorithms on one frozen batch, and whole runs with one another."""
