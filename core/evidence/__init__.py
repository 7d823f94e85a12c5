"""What a step of reinforcement learning was made of, token by token, kept to be looked at later."""
