"""The Python API: what `import posttrain` gives."""
