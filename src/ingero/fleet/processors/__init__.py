"""What happens to data on its way: one module or folder per processor. None imports another component."""
