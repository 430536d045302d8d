"""Losses, sums and means over the batch, taken apart into what each microbatch adds."""
