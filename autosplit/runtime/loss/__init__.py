"""What a microbatch adds to the loss."""
