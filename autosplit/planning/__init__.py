"""From a profile to a plan: the pinned, saved decision."""
