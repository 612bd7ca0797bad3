"""What stands beside the pipelines: one module or folder per extension. None imports another component."""
