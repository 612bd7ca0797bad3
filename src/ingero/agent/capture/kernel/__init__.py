"""The agent's contact with the Linux kernel: BPF objects, maps, links and ring buffers.

The bottom layer of the agent, and the only package that uses ctypes. It knows records and programs, not what CUDA or
NCCL are; it starts nothing by itself.
"""
