"""Exact cuts: dynamic programming over the ideals of the graph."""
