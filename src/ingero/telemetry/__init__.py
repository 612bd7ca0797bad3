"""What we say about ourselves: the clock, log lines and counters. Knows nothing of GPUs or clusters."""
