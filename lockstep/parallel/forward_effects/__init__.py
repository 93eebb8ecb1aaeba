"""What forward passes leave in modules: buffers, and numbers in attributes."""
