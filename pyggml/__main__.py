"""`python -m pyggml`: the commands of `pyggml`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("pyggml.cli", run_name="__main__", alter_sys=True)
