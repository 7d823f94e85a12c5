"""Tasks: problems with a verifier."""
