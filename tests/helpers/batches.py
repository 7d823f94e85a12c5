"""The kit's small batches, under the name that tests use."""

from posttrain.core.kit.batches import build_batch

__all__ = ["build_batch"]
