"""What `ingero check` examines: what this machine allows, and the processes that use its GPUs."""
