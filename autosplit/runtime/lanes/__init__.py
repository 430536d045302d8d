"""Lanes: where the actions of a stage run in order, on a thread or on a pair of streams."""
