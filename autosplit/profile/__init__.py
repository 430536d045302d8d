"""What each node of a recording costs: bytes, FLOPs, saved storages and seconds."""
