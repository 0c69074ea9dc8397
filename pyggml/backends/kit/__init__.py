"""What devices share: how an op's formula, place, factors and faults are described."""
