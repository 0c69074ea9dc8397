"""Attacks on pyggml: damaged files, killed commands, crowds of clients. docs/reliability.md says
what it survived; each module here is run again, for longer, by `python -m attacks.NAME`."""
