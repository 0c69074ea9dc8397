"""How kernels are written: instructions without a name in Numba, warps, blocks, clusters, axes."""
