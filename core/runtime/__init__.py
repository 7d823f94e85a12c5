"""Seeds, devices, memory, signals."""
