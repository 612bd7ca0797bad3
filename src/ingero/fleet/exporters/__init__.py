"""Where data leaves: one module or folder per exporter. None imports another component."""
