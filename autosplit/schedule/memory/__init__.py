"""Bytes that a stage holds over a step: pure formulas."""
