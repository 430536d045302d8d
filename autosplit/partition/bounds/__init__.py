"""Lower bounds on what any cut can reach."""
