"""What runs on a Ray cluster. The only package that imports Ray."""
