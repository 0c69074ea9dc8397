"""Ops that reduce a row: norms, softmax, fusions with them."""
