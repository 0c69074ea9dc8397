"""Weights of every type, read, packed and unpacked by a card's threads."""
