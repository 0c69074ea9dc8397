"""Graph → Plan: the offset of every tensor in one arena, and the size of the arena."""

from pyggml.alloc.plan import Plan, plan

__all__ = ["Plan", "plan"]
