"""One module per stage kind: what a node of the DAG does."""
