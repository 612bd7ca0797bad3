"""What `ingero check` looks at: what this machine allows, and the processes that use its GPUs."""
