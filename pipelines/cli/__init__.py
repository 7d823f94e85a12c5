"""The `posttrain` command: one module per command."""
