"""Recording an nn.Module as a graph that is right at every batch size."""
