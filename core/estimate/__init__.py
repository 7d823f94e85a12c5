"""What `posttrain plan` says: tokens, memory, disk and time of a run before it starts."""
