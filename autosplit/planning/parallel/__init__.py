"""What a rank has of a model under data, tensor and pipeline parallelism, and which degrees are best."""
