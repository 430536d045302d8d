"""FLOPs, bytes and time of each node, from a run on fake tensors."""
