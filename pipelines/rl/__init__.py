"""The RL step: `flow` is the order, `step` the phases, `recording` what is kept of them."""
