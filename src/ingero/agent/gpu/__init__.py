"""What the driver says of its devices, through NVML, and what NCCL says of collectives on them, through its profiler interface.

Beside discovery. Reads and never sets; a value that a device does not have is absent, never 0.
"""
