"""Attention and its gradients, without the matrix of all scores."""
