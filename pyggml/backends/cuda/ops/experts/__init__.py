"""Products of experts in a step, and the gated units between them."""
