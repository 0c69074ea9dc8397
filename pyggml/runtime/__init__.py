"""Plan → Program: every kernel call is bound to its memory once, then all run in order."""

from pyggml.runtime.program import Program, Tap, bind, compile_backwards, compute, results, run

__all__ = ["Program", "Tap", "bind", "compile_backwards", "compute", "results", "run"]
