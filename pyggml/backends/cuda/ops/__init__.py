"""The kernels of ops, by families."""
