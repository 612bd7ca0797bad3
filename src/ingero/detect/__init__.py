"""The science: pure functions over NumPy arrays. No clock, no I/O, no threads."""
