"""The token microscope: a step of reinforcement learning, token by token, as a page to look at."""
