"""Models, traps and programs that were written from the issue's text alone, each compared with its plain run.

``python -m benchmarks.strangers`` runs the models, ``.traps`` the table of traps, and ``.programs`` random
programs.
"""
