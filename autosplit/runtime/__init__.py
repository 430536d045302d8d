"""What the pipelined program calls while it runs."""
