"""The shaders of ops, by families."""
