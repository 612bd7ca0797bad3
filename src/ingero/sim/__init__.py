"""The GPU simulator, and whole clusters of it on one machine.

`runner` starts our own libcudart, libcuda and libnccl with workloads that keep their own account; `cluster` joins
hosts, a job, real agents and a real Fleet. Starts programs as processes and asks them as a user would. The C lies in
``gpusim/`` and is compiled when the package is built. What ran only on it says so.
"""
