"""The order of work of one training step: pure lists of actions."""
