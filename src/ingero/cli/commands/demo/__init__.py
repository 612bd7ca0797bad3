"""``ingero demo``: recorded scenarios, and live ones."""
