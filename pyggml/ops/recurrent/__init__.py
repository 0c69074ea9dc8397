"""Recurrences: state spaces, delta nets and linear attention."""
