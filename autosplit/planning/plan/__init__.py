"""The plan: its data, its file, and what is done with it."""
