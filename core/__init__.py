"""Contracts, maths, models, training, rollout, rewards, storage and tracking."""
