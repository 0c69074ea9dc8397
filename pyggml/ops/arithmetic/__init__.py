"""Arithmetic, powers and exponentials, random draws, reductions and sorting."""
