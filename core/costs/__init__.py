"""What a stage will cost: the model's shape, what this machine needs for it, time, memory, disk."""
