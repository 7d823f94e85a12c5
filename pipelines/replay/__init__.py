"""A past optimizer step, computed again and compared with its record."""
