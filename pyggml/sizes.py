"""Arithmetic with sizes."""

from __future__ import annotations


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is n or more."""
    return -(-n // multiple) * multiple
