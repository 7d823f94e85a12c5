"""The learner: columns, forward passes, objective, optimizer, ranks, SFT, preferences, critic."""
