"""An example of each kind of plugin, which `posttrain plugins new` writes under another name."""
