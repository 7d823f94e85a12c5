"""Runs model-written code apart from everything else: see `runner.Sandbox` and docs/sandbox.md.

`guard` and what it imports (`confine`, `jail`, `kernel`, `seccomp`) run in a bare interpreter
without site packages: they import the standard library and each other only.
"""
