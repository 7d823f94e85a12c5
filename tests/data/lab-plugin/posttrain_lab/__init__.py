"""Two stages, an optimizer and a command."""
