"""How weights are fitted to the levels and points of a type, where it takes more than rounding."""
