"""Processes, seeds, JSON and files, the reporter's interface: nothing that knows of models."""
