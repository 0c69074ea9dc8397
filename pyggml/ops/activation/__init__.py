"""Functions of one number with a bend, and gated linear units."""
