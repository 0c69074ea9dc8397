"""The large kernels of the CPU, and how the kernel of an op is declared."""
