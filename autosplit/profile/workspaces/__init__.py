"""What kernels hold beside their results."""
