"""Few rows at a time: products with what stands around them, experts, heads, the next token."""
