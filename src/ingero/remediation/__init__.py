"""From a finding to a safe action: what Fleet concluded, a written policy, brakes, a journal, and a way back."""
