"""Where data enters: one module or folder per receiver. None imports another component."""
