"""What a card makes of a graph and of bound calls before it runs them."""
