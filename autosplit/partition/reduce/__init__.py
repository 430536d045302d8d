"""Smaller problems with the same optimum."""
