"""A plan for human eyes and for other programs."""
