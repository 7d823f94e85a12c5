"""Artifacts and what identifies them: digests, stage identity, locks, run records, approvals."""
