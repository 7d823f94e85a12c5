"""One module per stage kind."""
