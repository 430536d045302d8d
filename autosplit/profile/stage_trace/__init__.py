"""What a stage allocates and frees over a step, from a run on fake tensors."""
