"""Prompts, tokenisation, data sets."""
