"""Several processes that train one model: on this machine, or on the nodes of a Ray cluster."""
