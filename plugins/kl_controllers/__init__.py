"""KL coefficient controllers."""
