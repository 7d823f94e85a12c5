"""Forward passes, losses and optimizer steps."""
