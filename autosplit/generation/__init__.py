"""Text out of a pipe: caches that stay on their stages, groups of rows that decode in turn."""
