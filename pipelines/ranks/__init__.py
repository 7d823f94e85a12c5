"""Training of a stage on several ranks: the run's end, and what each rank does."""
