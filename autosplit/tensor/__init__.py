"""Tensor parallelism: which dimensions of a recorded model's parameters are sharded, and the collectives of that."""
