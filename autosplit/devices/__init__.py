"""What a device tells: how long something takes on it, and what its allocator does meanwhile."""
