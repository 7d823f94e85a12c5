"""What rewards paid for: their distribution over time, and patterns that look like gaming."""
