"""`python -m pyggml COMMAND …`, also in a checkout that is not installed."""

from pyggml.cli.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
