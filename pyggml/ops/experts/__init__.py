"""Products with one weight per expert."""
