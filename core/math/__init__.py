"""Pure functions of tensors and numbers: advantages, ratios, KL, intervals, answers."""
