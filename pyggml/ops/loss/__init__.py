"""Losses, and the output layer joined with one."""
