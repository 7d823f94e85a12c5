"""Rewards in worker processes: one that hangs or dies costs its own sample and nothing else."""
