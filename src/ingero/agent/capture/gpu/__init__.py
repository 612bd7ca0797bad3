"""What the driver says of its devices, through NVML.

Reads and never sets; a value that a device does not have is absent, never 0.
"""
