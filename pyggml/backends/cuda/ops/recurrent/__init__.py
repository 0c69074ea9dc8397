"""Ops with a state: the scans of Mamba, delta nets and RWKV, and their gradients."""
