"""An example of a third-party package of plugins for posttrain."""
