"""Which operations mix rows of the batch: the probes, and what rows look like along dimensions."""
