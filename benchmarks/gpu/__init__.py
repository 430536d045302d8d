"""The benchmark for a GPU, part by part; see :mod:`benchmarks.gpu.run`."""
