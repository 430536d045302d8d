"""Runs of the model under a recorder, merged into one graph."""
