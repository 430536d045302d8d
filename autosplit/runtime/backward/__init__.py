"""The backward of a cell: gradients, split weight gradients, recomputation."""
