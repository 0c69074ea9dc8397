"""The card: its driver, its memory, launches and what waits for what; compiled kernels on disk."""
