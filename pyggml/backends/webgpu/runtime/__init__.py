"""The device: its memory, the table of its kernels, and how it is opened."""
