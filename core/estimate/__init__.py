"""What `posttrain plan` estimates: a run's tokens, time, memory and disk."""
