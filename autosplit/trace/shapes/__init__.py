"""Sizes that follow the batch or a length."""
