"""From a plan to fx graphs: one per stage, and the pipelined program."""
