"""Shaders and their parts: how they are put together, and weights of every type in them."""
