"""``ingero up``: a simulated cluster, and what is shown of it."""
