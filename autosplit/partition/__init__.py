"""Which node runs on which stage: pure numbers in, an assignment with its proof out."""
