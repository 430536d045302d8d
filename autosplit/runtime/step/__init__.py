"""A step: cells, their order, and who runs them."""
