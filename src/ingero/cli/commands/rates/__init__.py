"""``ingero rates``: prices of GPUs."""
