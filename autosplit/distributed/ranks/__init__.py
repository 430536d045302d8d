"""The pipe of one process of several: its part of the model, recorded and run together with the others."""
