"""Attention, softmax, masks and rotary positions."""
