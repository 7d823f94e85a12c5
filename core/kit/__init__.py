"""For plugin authors: what each kind promises, as checks, and an example of each to begin with."""
