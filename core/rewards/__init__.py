"""Rewards: worker processes, checks of scores, shaping, judges, scores to token rewards."""
