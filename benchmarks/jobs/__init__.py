"""Real PyTorch jobs with real faults: who is named, how soon, and why; beside what others' rules say of the same records."""
