"""Held-out accuracy of a policy, and paired comparison of two evaluations."""
