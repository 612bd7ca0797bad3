"""What takes a node out of service and gives it back, one module each."""
