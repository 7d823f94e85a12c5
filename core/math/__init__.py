"""Pure tensor maths and statistics."""
