"""Values that Python reads while a forward runs: guards, assertions and opaque modules."""
