"""Models that train on several devices exactly as on one; run any of them as ``python -m examples.<name>``."""
