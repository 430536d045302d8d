"""What is asked of autograd's engine, by the runtime and by the profile that predicts it."""
