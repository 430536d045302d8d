"""What the caller asks for, checked and made complete."""
