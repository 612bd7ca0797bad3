"""The GPU simulator: our own libcudart, libcuda and libnccl, and workloads that keep their own account.

Beside the three programs and blind to them: it starts processes and reads what they print. The C lies in ``gpusim/`` and
is compiled when the package is built. What ran only on it says so.
"""
