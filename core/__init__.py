"""Contracts of posttrain: types, hooks, config, models, learner, artifacts, tracking."""
