"""Is a rank persistently slower than its role peers? The e-detector and its parts."""
