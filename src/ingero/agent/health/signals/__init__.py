"""What the health score is made of: readings, baselines, the score and the kind of workload."""
