"""What a recording borrows of the model's state and of Python's, and how all of it is put back."""
