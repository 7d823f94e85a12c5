"""Contracts, maths, models, training, rollout, rewards, storage and tracking."""

from posttrain.core.runtime import lighter_imports as _lighter_imports

_lighter_imports.install()  # in every process of ours, before it loads transformers
