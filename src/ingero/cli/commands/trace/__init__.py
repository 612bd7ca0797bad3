"""``ingero trace``: its options, the run, and what it prints."""
