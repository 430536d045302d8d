"""Whether numbers are equal: tolerances, comparisons of tensors, digests. Serves recordings, proofs and `verify`."""
