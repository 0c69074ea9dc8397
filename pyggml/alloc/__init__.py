"""Graph -> Plan: where every tensor will lie in one arena, and how large that must be."""

from pyggml.alloc.plan import Plan, plan

__all__ = ["Plan", "plan"]
