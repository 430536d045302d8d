"""What profiles say of a model, as the problem that the search solves."""
