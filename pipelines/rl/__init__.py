"""One RL stage: the order of a step, its phases, its rollouts, and what is recorded of it."""
